#!/bin/bash
# Runs the trainer on all tasks of this job and requeues the job when the trainer asks for it. Called by train.sbatch.
#
# The trainer stops after saving on USR1 (sent before the time limit), on TERM (preemption, scontrol requeue) and when
# run.max_seconds is over; it then ends with status 75. After a failure the job is requeued only if this job has saved
# something new: one that fails at once would otherwise be requeued endlessly, also while another job trains in the same run.dir.
set -u
if (($# == 0)); then
    echo "usage: sbatch slurm/train.sbatch CONFIG [--section.field value ...]" >&2
    exit 2
fi
if ! command -v srun >/dev/null || [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "slurm/run.sh is not in a Slurm job: submit it with sbatch slurm/train.sbatch CONFIG" >&2
    exit 2
fi
if ! python -c 'import dali_train' 2>/dev/null; then
    echo "$(command -v python || echo 'python (not found)') on $(hostname) has no dali_train: activate its environment" \
        "before sbatch, set DALI_TRAIN_ENV (slurm/train.sbatch), or submit from the repository" >&2
    exit 2
fi
# In an array each task's number stands for %a, as in Slurm's own patterns, and is part of what is requeued: a number alone
# may be that of the whole array.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
state() { python -m dali_train status --config "$@"; }
newest() { sed -n 's/.*newest checkpoint \([0-9A-Za-z]*\).*/\1/p' <<<"$1"; }

trap : TERM # bash stays until srun, whose tasks get the signal too, has ended
# Since Slurm 22.05 srun does not take the job's value by itself, and a task would have one core.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
before=$(newest "$(state "$@")")
# A rank that fails ends the others by itself, with a report; srun is not to kill them before, nor while others still save.
srun --kill-on-bad-exit=0 --wait=120 python -u -m dali_train train --config "$@"
status=$?
state=$(state "$@")
after=$(newest "$state")

case $status in
    0 | 2) exit $status ;;
    75) echo "job $job: stopped on request at step $after, requeued" ;;
    76)
        echo "job $job: a device computes wrongly, its host is named above; submit again with sbatch --exclude=HOST" >&2
        exit $status
        ;;
    *)
        if [[ $after == "$before" ]]; then
            echo "job $job: failed with status $status and no new checkpoint${before:+ after step $before}; not requeued" >&2
            exit $status
        elif [[ ! $state =~ "Slurm job $SLURM_JOB_ID"(,|$) ]]; then
            echo "job $job: failed with status $status; the checkpoint of step $after is another job's; not requeued" >&2
            exit $status
        fi
        echo "job $job: failed with status $status, but has come from step ${before:-0} to $after; requeued" >&2
        ;;
esac
scontrol requeue "$job" || exit $status
