#!/usr/bin/env bash
# From a fresh machine to a green test run: environment, lint, tests, one process a core.
#   tools/run_tests.sh [--stack onedl|openmmlab] [pytest arguments]
#   tools/run_tests.sh tests/models -k bias
#   tools/run_tests.sh -m slow -n 0            in one process
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

stack=onedl
if [[ ${1:-} == --stack ]]; then
  stack=${2:?--stack needs onedl or openmmlab}
  shift 2
fi
prepare_environment "$stack" test
say "ruff"
python -m ruff check --output-format concise .
say "pytest, stack $stack"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the processes share the cores
python -m pytest -n auto --dist loadfile "$@"
