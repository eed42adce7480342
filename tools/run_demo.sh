#!/usr/bin/env bash
# From a fresh machine to a pretrained and fine-tuned model and its pictures, in twenty minutes on two CPU cores.
#   tools/run_demo.sh                          image-like pictures that the package draws itself
#   tools/run_demo.sh --data DIR               your own images: any folder; with class folders a classifier is trained too
#   tools/run_demo.sh --stages pretrain,test   only these of data,dvae,pretrain,finetune,segment,test
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

start=$PWD
prepare_environment onedl
cd "$start"
exec python "$root/tools/demo.py" "$@"
