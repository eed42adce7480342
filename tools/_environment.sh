# run_tests.sh and run_demo.sh source this file: it makes and activates the Python environment of a stack.
#   prepare_environment STACK [test]
# STACK is onedl (.venv), openmmlab (.venv-openmmlab), or onedl with the oldest or newest supported torch and Python,
# oldest (.venv-oldest) or newest (.venv-newest). `test` adds requirements/dev*.txt and docs.txt. Afterwards `python` is
# the environment's. A stamp in the environment makes later calls instant until pyproject.toml, setup.py or
# requirements/ change.

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { echo "== $*"; }

# find_python [CANDIDATE...]: prints the first candidate that can make environments.
find_python() {
  local candidate
  (($#)) || set -- python3.12 python3.11 python3.10 python3
  for candidate; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "No Python >= 3.10 with venv found among $* (Debian, Ubuntu: apt install python3-venv)." >&2
  return 1
}

# Installs packages without a line for each requirement that is already satisfied.
pip_install() {
  python -m pip install --disable-pip-version-check --progress-bar off "$@" |
    { grep --line-buffered -v '^Requirement already satisfied' || true; }
}

# OpenMMLab's mmseg imports mmcv's compiled ops, but nothing here runs them. So they are built without CUDA, which does
# not need nvcc.
install_mmcv_with_ops() {
  python -c 'from importlib.metadata import files, version
assert version("mmcv") == "2.1.0" and any(file.name.startswith("_ext") for file in files("mmcv"))' 2>/dev/null && return
  say "torch, and mmcv built with its ops (6 to 17 minutes)"
  pip_install -c requirements/openmmlab.txt torch torchvision setuptools wheel ninja psutil packaging
  CUDA_VISIBLE_DEVICES='' MMCV_WITH_OPS=1 \
    pip_install --no-build-isolation -c requirements/openmmlab.txt mmcv
}

prepare_environment() {
  local stack=$1 purpose=${2:-run} folder=.venv-$1 family=onedl pythons=()
  case $stack in
    onedl) folder=.venv ;;
    openmmlab) family=openmmlab ;;
    oldest) pythons=(python3.10) ;;
    newest) pythons=(python3.13) ;;
    *) echo "Unknown stack '$stack': use onedl, openmmlab, oldest or newest." >&2; return 2 ;;
  esac
  cd "$root"
  local stamp=$folder/.beit_mm-$purpose fingerprint
  fingerprint=$({ echo "$root"; cat pyproject.toml setup.py requirements/*.txt; } | cksum)
  export PATH=$root/$folder/bin:$PATH
  if [[ $(cat "$stamp" 2>/dev/null) == "$fingerprint" ]]; then
    say "environment $folder is up to date"
    return
  fi

  if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    local base
    base=$(find_python "${pythons[@]}")
    say "new environment $folder with $("$base" --version)"
    "$base" -m venv --clear "$folder"
  fi
  [[ $stack == openmmlab ]] && install_mmcv_with_ops
  say "requirements/$stack.txt (the first time about 2 minutes and 5 GB, mostly torch)"
  if [[ $stack == oldest || $stack == newest ]]; then
    pip_install -r "requirements/$stack.txt" -r <(grep -v '^torch' requirements/onedl.txt)
  else
    pip_install -r "requirements/$stack.txt"
  fi
  say "beit_mm, editable"
  pip_install --no-build-isolation -e ".[$family]"
  if [[ $purpose == test ]]; then
    say "requirements/dev.txt, requirements/docs.txt"
    pip_install -r requirements/dev.txt -r requirements/docs.txt
    pip_install --no-deps -r requirements/dev_no_deps.txt
  fi
  if ! python -c 'import cv2' 2>/dev/null; then
    say "this machine lacks libGL: headless OpenCV instead"
    python -m pip uninstall -qq --yes opencv-python
    pip_install opencv-python-headless
  fi
  echo "$fingerprint" >"$stamp"
}
