#!/usr/bin/env bash
# From a fresh machine to a green test run: environment, lint, tests.
#   tools/run_tests.sh [--stack onedl|openmmlab] [pytest arguments]
#   tools/run_tests.sh tests/models -k bias
#   tools/run_tests.sh -m slow
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
python -m pytest "$@"
