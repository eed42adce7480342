#!/usr/bin/env bash
# From a fresh machine to a pretrained model and its pictures, in a quarter of an hour on two CPU cores.
#   tools/run_demo.sh                          photo-like pictures that the package draws itself
#   tools/run_demo.sh --data DIR               your own photos: any folder, no labels needed
#   tools/run_demo.sh --stages pretrain,test   only these of data,dvae,pretrain,test
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

start=$PWD
prepare_environment onedl
cd "$start"
exec python "$root/tools/demo.py" "$@"
