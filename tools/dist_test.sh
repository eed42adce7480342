#!/usr/bin/env bash
# Testing in GPUS processes of this node; several nodes as in dist_train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
[[ $# -ge 3 ]] || usage "CONFIG CHECKPOINT GPUS [arguments of tools/test.py]"
config=("${@:1:2}") gpus=$3 extra=("${@:4}")
launch test.py
