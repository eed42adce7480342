#!/usr/bin/env bash
# Collects in ./.whl what a GPU node without network lacks: OpenMMLab's packages and what they import. Copy the tree
# with .whl to the node; check.sh installs it there. The node needs torch, torchvision and what images with torch have
# in general (numpy, OpenCV, Pillow, SciPy, matplotlib, timm, transformers, pytest, pytest-xdist, pytest-timeout).
#   bash tools/dev/gpu/collect.sh [PACKAGE...]         also these packages
#   PYTHON=python3.12 bash tools/dev/gpu/collect.sh    for the node's version of Python, if this machine has another
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

# openxlab and onedl-mim are left out with what they import: they only download.
imported=(addict einops ftfy importlib-metadata lazy-importer mat4py model-index modelindex ordered-set platformdirs
  prettytable termcolor wcwidth yapf zipp)
mapfile -t pinned < <(grep -E '^onedl-(mmengine|mmcv|mmpretrain|mmsegmentation)==' requirements/onedl.txt)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install wheel 'setuptools>=77,<82' # some are source distributions, whose setup.py imports pkg_resources
rm -f .whl/*.whl
"${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir .whl "${pinned[@]}" "${imported[@]}" "$@"
wheels=(.whl/*.whl)
echo "${#wheels[@]} wheels, $(du -sm .whl | cut -f1) MiB in .whl"
