#!/bin/bash
# Runs the trainer on all tasks of this job and requeues the job when the trainer asks for it. Called by the .sbatch files.
#
# The trainer stops after saving on USR1 (sent before the time limit), on TERM (preemption, scontrol requeue) and when
# run.max_seconds is over; it then ends with status 75. After a failure the job is requeued only if this attempt has
# saved something new: a job that fails at once would otherwise go round for ever.
set -u
if (($# == 0)); then
    echo "usage: sbatch slurm/train.sbatch CONFIG [--section.field value ...]" >&2
    exit 2
fi
newest() { python -m dali_train status --config "$@" | sed 's/.*newest checkpoint //'; }

trap : TERM # bash stays until srun, whose tasks get the signal too, has ended
before=$(newest "$@")
# A rank that fails ends the others by itself, with a report; srun is not to kill them before, nor while others still save.
srun --kill-on-bad-exit=0 --wait=120 python -u -m dali_train train --config "$@"
status=$?
after=$(newest "$@")

case $status in
    0 | 2) exit $status ;;
    75) echo "job $SLURM_JOB_ID: stopped on request at step $after, requeued" ;;
    *)
        if [[ $after == "$before" ]]; then
            echo "job $SLURM_JOB_ID: failed with status $status and no checkpoint after step $before; not requeued" >&2
            exit $status
        fi
        echo "job $SLURM_JOB_ID: failed with status $status, but has come from step $before to $after; requeued" >&2
        ;;
esac
scontrol requeue "$SLURM_JOB_ID" || exit $status
