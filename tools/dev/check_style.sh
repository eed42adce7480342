#!/usr/bin/env bash
# Lint, types, spelling, and that imports go down only. Needs these four tools of requirements/dev.txt alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python -m ruff check --output-format concise .
python -m ruff format --quiet --check .
python -m codespell_lib beit_mm configs docs tests tools
python -m mypy --no-error-summary beit_mm
python -c 'import importlinter.cli as cli; raise SystemExit(cli.lint_imports(no_cache=True, no_logo=True))'
