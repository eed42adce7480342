#!/usr/bin/env bash
# Tests under Slurm; environment as in slurm_train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
[[ $# -ge 4 ]] || usage "PARTITION JOB CONFIG CHECKPOINT [arguments of tools/test.py]"
slurm test.py "$@"
