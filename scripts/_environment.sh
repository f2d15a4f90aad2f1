# Sourced by the scripts beside it: makes .venv with what is asked for, once; EXTRAS is "" or "[test]" and the like.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prepare() { # prepare EXTRAS
  local python stamp
  stamp=.venv/.installed-$(echo "$1" | tr -cd 'a-z')-$(cat pyproject.toml constraints.txt | cksum | tr -d ' ')
  if [ -f "$stamp" ]; then return; fi
  for python in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
    python=
  done
  if [ -z "$python" ]; then
    echo "error: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python $0" >&2
    exit 2
  fi
  echo "installing into .venv with $("$python" --version): a few minutes, some gigabytes the first time"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".$1"
  touch "$stamp"
}
