#!/usr/bin/env bash
# Tests in GPUS processes on this node; for several nodes see dist_train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
[[ $# -ge 3 ]] || usage "CONFIG CHECKPOINT GPUS [arguments of tools/test.py]"
config=("${@:1:2}") gpus=$3 extra=("${@:4}")
launch test.py
