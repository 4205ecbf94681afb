#!/usr/bin/env bash
# ./run_train.sh [--config NAME|PATH] [--section.key VALUE]... [--check] [--plan] [--help]
# Sets up the environment on first use, then starts training. Relative paths are relative to the current folder.
set -euo pipefail

source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup_env.sh"
setup_env
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
# exec: signals reach the launcher, and its exit status is the script's. -P: a folder named `trainer` or `models` in the
# current folder must not shadow ours.
exec "$PYTHON" -P -m trainer.launch "$@"
