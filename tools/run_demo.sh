#!/usr/bin/env bash
# Makes the environment and runs the demo: what pretraining gains, with pictures. See tools/run_demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

demo=$root/tools/demo/run_demo.py
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}  # needed before beit_mm is installed
python=$(find_python)
for argument; do
  if [[ $argument == -h || $argument == --help ]]; then exec "$python" "$demo" --help; fi
done
"$python" "$demo" --check "$@"  # finds mistakes before anything is installed
start=$PWD
prepare_environment onedl
cd "$start"
exec python "$demo" "$@"
