#!/usr/bin/env bash
# Builds the site; a link or a docstring that is wrong fails. Needs requirements/docs.txt, and no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python -m mkdocs build --strict "$@"
