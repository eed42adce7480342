#!/usr/bin/env bash
# Training under Slurm. Environment: GPUS (8, of all nodes), GPUS_PER_NODE (8), CPUS_PER_TASK (8), PORT (29500),
# PYTHON, SRUN_ARGS.
#   GPUS=16 SRUN_ARGS='--time=48:00:00' tools/slurm_train.sh PARTITION JOB CONFIG
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
[[ $# -ge 3 ]] || usage "PARTITION JOB CONFIG [arguments of tools/train.py]"
slurm train.py "$@"
