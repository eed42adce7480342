#!/usr/bin/env bash
# Makes the environment, then runs lint and tests, one process for each core. It needs nothing but a fresh machine.
#   tools/run_tests.sh [--all] [--stack onedl|openmmlab|oldest|newest] [pytest arguments]
#   tools/run_tests.sh                         without tests marked long or slow
#   tools/run_tests.sh tests                   long tests too, as in CI
#   tools/run_tests.sh --all                   slow tests too
#   tools/run_tests.sh tests/models -k bias
#   tools/run_tests.sh -m slow -n 0            in one process
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

stack=onedl
options=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit ;;
    --all) options=(-m 'slow or not slow'); shift ;;
    --stack) stack=${2:?--stack needs onedl, openmmlab, oldest or newest}; shift 2 ;;
    *) break ;;
  esac
done
((${#options[@]} + $#)) || options=(-m 'not long and not slow')
prepare_environment "$stack" test
say "ruff, codespell, mypy, import-linter, and beside all of it generated headers and tables"
python tools/dev/update_configs.py --check &
generated=$!
trap 'kill $generated 2>/dev/null || true' EXIT
bash tools/dev/check_style.sh
say "pytest, stack $stack"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the processes share the cores
# In the order of the files, the slow ones of tests/apis first; xdist would begin with the files of most tests.
python -m pytest -n auto --dist loadfile --no-loadscope-reorder "${options[@]}" "$@"
wait "$generated" || { say "generated headers or tables are not up to date, see above"; exit 1; }
