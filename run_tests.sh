#!/usr/bin/env bash
# ./run_tests.sh [--all] [--torch RELEASE] [PYTEST ARGUMENT]...: the whole check, as CI runs it; --all adds the slow tests,
# and installs the trainers with which those of longhaul-attention run.
# --torch 2.11: the tests on that release, and, where it is a CUDA build, the host's side of CUDA without a GPU.
set -euo pipefail

source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup_env.sh"

marks="not slow"
extras=(dev)
arguments=()
while (($#)); do
    case $1 in
        --all)
            marks=""
            extras+=(integrations)
            ;;
        --torch)
            with_torch "${2:-}"
            shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
setup_env "${extras[@]}"
# Commands that tests start take the same interpreter.
if [[ -n ${TORCH:-} ]]; then export PATH=${PYTHON%/*}:$PATH; fi
cd -- "$ROOT"

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

if [[ -z ${TORCH:-} ]]; then
    stage "format" "$PYTHON" -m ruff format --check
    stage "lint" "$PYTHON" -m ruff check
    stage "types" "$PYTHON" -m mypy
fi
# Three workers for two cores: many tests use one process, and some wait. `-n 0` runs tests one at a time.
stage "tests" choose -n "$(($(nproc) * 3 / 2))" -m "${marks:+$marks and }not slurm"
# One at a time: they share a cluster whose jobs need the cores.
stage "slurm" choose -m "${marks:+$marks and }slurm"
