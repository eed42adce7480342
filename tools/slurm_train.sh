#!/usr/bin/env bash
# Trains under Slurm. Environment: GPUS (8, on all nodes), GPUS_PER_NODE (8), CPUS_PER_TASK (8), PORT (29500),
# PYTHON, SRUN_ARGS.
#   GPUS=16 SRUN_ARGS='--time=48:00:00' tools/slurm_train.sh PARTITION JOB CONFIG
# As a job that is requeued and resumes when its time is over or when it is preempted:
#   sbatch --partition=PARTITION --ntasks=16 --ntasks-per-node=8 --gres=gpu:8 --cpus-per-task=8 --time=12:00:00 \
#     --signal=USR1@120 --requeue --open-mode=append \
#     --wrap='GPUS=16 tools/slurm_train.sh PARTITION JOB CONFIG'
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
[[ $# -ge 3 ]] || usage "PARTITION JOB CONFIG [arguments of tools/train.py]"
slurm train.py "$@"
