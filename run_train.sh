#!/usr/bin/env bash
# ./run_train.sh [--config NAME|PATH] [--section.key VALUE]... [--check] [--plan] [--help]
# Sets up on first use, then starts training. Works from any folder; relative paths are relative to that folder.
set -euo pipefail

source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup_env.sh"
setup_env
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
# exec: no shell stays between, so signals reach the launcher and its end is this script's. -P: a folder named `trainer`
# or `models` where the user stands is not ours.
exec "$PYTHON" -P -m trainer.launch "$@"
