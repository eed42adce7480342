#!/usr/bin/env bash
# The wheel, outside of a checkout: its console script shows, pretrains, trains and tests, on drawn images.
#   bash tools/dev/check_wheel.sh            beside the packages that `python` has
#   bash tools/dev/check_wheel.sh --fresh    in a new environment, with the newest packages of the ranges it requires
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python -m pip wheel --quiet --no-deps --wheel-dir "$folder" $([[ ${1:-} == --fresh ]] || echo --no-build-isolation) .
cd "$folder"
if [[ ${1:-} == --fresh ]]; then
  python -m venv site
  site/bin/python -m pip install --quiet "$(echo ./*.whl)[onedl]"
  python=$PWD/site/bin/python
else
  python -m pip install --quiet --no-deps --target site ./*.whl
  export PYTHONPATH=$folder/site
  python=python
fi
beit_mm=$("$python" -c 'import beit_mm; print(beit_mm.__path__[0])')
[[ $beit_mm == "$folder"/* ]] || { echo "$beit_mm is not the wheel's" >&2; exit 1; }

"$python" "$beit_mm/.mim/tools/demo/draw_images.py" images --num-train 120 --num-val 20 --size 80
options=(--work-dir run --cfg-options data_root=images model.target_generator.checkpoint=None)
set -x
site/bin/beit-mm --version
site/bin/beit-mm config demo/pretrain >mine.py
site/bin/beit-mm pretrain images --out pretrained --steps 20
site/bin/beit-mm train mine.py --no-validate --steps 1 "${options[@]}" train_dataloader.batch_size=4
site/bin/beit-mm test mine.py run/iter_1.pth "${options[@]}"
