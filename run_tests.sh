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

# pytest exits with 5 if it collects no test; that is allowed for one of the two selections below.
without=0
choose() {
    local status=0
    "$PYTHON" -m pytest "$@" "${arguments[@]}" || status=$?
    if ((status == 5)); then
        without=$((without + 1))
        ((without < 2)) && status=0
    fi
    return "$status"
}

stage "format" "$PYTHON" -m ruff format --check
stage "lint" "$PYTHON" -m ruff check
stage "types" "$PYTHON" -m mypy
# One worker per core: many tests use one process. `-n 0` runs tests one at a time.
stage "tests" choose -n "$(nproc)" -m "${marks:+$marks and }not slurm"
# One at a time: they share a cluster whose jobs need the cores.
stage "slurm" choose -m "${marks:+$marks and }slurm"
