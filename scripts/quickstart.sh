#!/usr/bin/env bash
# From nothing to a table: install, build the built-in data, search, select, evaluate. Safe to run twice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
prepare ""

dgsearch=.venv/bin/dgsearch
data=data/digits
study=runs/digits
echo "four folds of 8 trials of 300 steps: about 7 minutes of work on two cores (at most 10)"
$dgsearch data build digits --out $data
$dgsearch search --data $data --space quick --study $study --trials 8 --steps 300
$dgsearch select $study
$dgsearch evaluate $study
echo "the same trials in the MLflow UI: $dgsearch ui $study"
