#!/usr/bin/env bash
# The tests with the newest packages that pyproject.toml allows, instead of those that requirements/newest.txt pins.
#   bash tools/dev/check_newest.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_environment.sh"
prepare_environment newest test
pip_install --upgrade --upgrade-strategy eager --no-build-isolation -e '.[onedl,bands,onnx]' timm transformers
python -m pip freeze | grep -iE '^(torch|torchvision|numpy|pillow|scipy|onedl|timm|transformers)'
exec bash tools/run_tests.sh --stack newest "${@:-tests}"
