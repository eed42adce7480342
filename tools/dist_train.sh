#!/usr/bin/env bash
# Training in GPUS processes of this node; GPUS counts the GPUs of one node. Several nodes: on each of them
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=<address of node 0> PORT=29500 tools/dist_train.sh CONFIG 8
# After a process has died, start all again from the newest checkpoint, at most so many times:
#   MAX_RESTARTS=3 tools/dist_train.sh CONFIG 8
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
[[ $# -ge 2 ]] || usage "CONFIG GPUS [arguments of tools/train.py]"
config=("${@:1:1}") gpus=$2 extra=("${@:3}")
launch train.py
