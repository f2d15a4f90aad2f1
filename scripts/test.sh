#!/usr/bin/env bash
# From nothing to tested: install, then the tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
prepare "[dev]"
exec .venv/bin/python -m pytest "$@"
