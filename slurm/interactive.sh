#!/bin/bash
# While you watch: bash slurm/interactive.sh configs/vit-b16.py [--section.field value ...], from the repository.
# Waits for one node, or uses the allocation of an salloc. Resources come from Slurm's own variables, e.g.
# SLURM_NTASKS_PER_NODE=4 SLURM_GPUS_PER_NODE=4 SLURM_PARTITION=debug bash slurm/interactive.sh ...
# Ctrl-C twice ends it at once; scancel --signal=TERM JOBID lets it save first. The same line resumes from there.
set -u
exec srun --kill-on-bad-exit=0 --wait=120 python -u -m dali_train train --config "$@"
