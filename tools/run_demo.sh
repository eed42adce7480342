#!/usr/bin/env bash
# From a fresh machine to a pretrained and fine-tuned model and its pictures: tools/run_demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

demo=$root/tools/demo/run_demo.py
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}  # before it is installed
python=$(find_python)
for argument; do
  if [[ $argument == -h || $argument == --help ]]; then exec "$python" "$demo" --help; fi
done
"$python" "$demo" --check "$@"  # a mistake shows before anything is installed
start=$PWD
prepare_environment onedl
cd "$start"
exec python "$demo" "$@"
