#!/usr/bin/env bash
# ./run_tests.sh [--all] [PYTEST ARGUMENT]...: the whole check, as CI runs it; --all adds the slow tests.
set -euo pipefail

source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup_env.sh"
setup_env dev
cd -- "$ROOT"

marks="not slow"
arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        marks=""
    else
        arguments+=("$argument")
    fi
done

stage() {
    local name=$1
    shift
    echo "== $name"
    "$@" || { echo "run_tests.sh: $name failed" >&2; exit 1; }
}

stage "format" "$PYTHON" -m ruff format --check
stage "lint" "$PYTHON" -m ruff check
stage "types" "$PYTHON" -m mypy
# Two at a time where there are two cores: many tests are of one process. `-n 0` runs them one after the other.
stage "tests" "$PYTHON" -m pytest -n "$(nproc)" -m "$marks" "${arguments[@]}"
