#!/usr/bin/env bash
# Trains in GPUS processes on this node; GPUS counts the GPUs of one node. For several nodes, run on each:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=<address of node 0> PORT=29500 tools/dist_train.sh CONFIG 8
# Restarts all processes from the newest checkpoint when one has died, at most three times:
#   MAX_RESTARTS=3 tools/dist_train.sh CONFIG 8
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
[[ $# -ge 2 ]] || usage "CONFIG GPUS [arguments of tools/train.py]"
config=("${@:1:1}") gpus=$2 extra=("${@:3}")
launch train.py
