# shellcheck shell=bash
# Sourced by run_train.sh and run_tests.sh. `setup_env [EXTRA]...` sets PYTHON to an interpreter with pyproject.toml's
# requirements: the active one, else that of .venv, which it creates or completes if necessary. After `with_torch VERSION`
# it is that of .venv-torchVERSION.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
VENV=$ROOT/.venv
PYTHONS="python3.14 python3.13 python3.12 python3.11 python3 python"
TORCH=""

# with_torch 2.11: that release, as the package index has it, on Python 3.12 if there is one.
with_torch() {
    if [[ ! $1 =~ ^[0-9]+\.[0-9]+$ ]]; then
        echo "error: torch $1 is not a release such as 2.11" >&2
        return 2
    fi
    TORCH="torch>=$1,<${1%.*}.$((${1#*.} + 1))"
    VENV=$ROOT/.venv-torch$1
    PYTHONS="python3.12 $PYTHONS"
}

# Prints the requirements of pyproject.toml with the extras $2. Fails if interpreter $1 lacks one or cannot tell.
# Reads package metadata, because importing torch would cost a second on every start.
requirements() {
    "$1" -P - "$ROOT/pyproject.toml" "${2:-}" "$TORCH" <<'PYTHON'
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version


def release(text):
    numbers = [int(number) for number in re.match(r"\d+(?:\.\d+)*", text)[0].split(".")]
    return numbers + [0] * (4 - len(numbers))


def holds(requirement):
    name, rules = re.match(r"([\w.-]+)\s*(.*)", requirement).groups()
    try:
        installed = release(version(name))
    except (PackageNotFoundError, TypeError):
        return False
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", rules)
    return all((installed >= release(bound)) == (sign == ">=") for sign, bound in bounds)


with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + [each for extra in sys.argv[2].split() for each in project["optional-dependencies"][extra]]
wanted += sys.argv[3:] if sys.argv[3] else []
print("\n".join(wanted))
sys.exit(not all(map(holds, wanted)))
PYTHON
}

# The newest interpreter that torch has wheels for and that has the venv module.
find_python() {
    local name
    for name in $PYTHONS; do
        if "$name" -P -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no Python 3.11 to 3.14 with the venv module was found (on Debian: apt install python3-venv)" >&2
    return 1
}

# VENV/incomplete exists during installation, so that an interrupted set-up is repeated.
has_all() {
    [[ ! -e $VENV/incomplete ]] && requirements "$VENV/bin/python" "$1" >/dev/null 2>&1
}

make_venv() {
    local base wanted
    if has_all "$1"; then return; fi # another process created it while this one waited for the lock
    echo "setting up $VENV (once; torch is large)" >&2
    mkdir -p "$VENV"
    touch "$VENV/incomplete"
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python)
        "$base" -m venv --clear "$VENV"
        touch "$VENV/incomplete"
    fi
    # One command, so that no later requirement can raise torch above its upper bound.
    wanted=$(requirements "$VENV/bin/python" "$1" || true)
    "$VENV/bin/python" -m pip install --requirement /dev/stdin <<<"$wanted" >&2
    rm "$VENV/incomplete"
    if ! has_all "$1"; then
        echo "error: $VENV still lacks some of: ${wanted//$'\n'/ }; remove it and run this again" >&2
        return 1
    fi
}

setup_env() {
    local extra="$*" active
    for active in python python3; do
        if [[ -z $TORCH ]] && requirements "$active" "$extra" >/dev/null 2>&1; then
            PYTHON=$(command -v "$active")
            return
        fi
    done
    PYTHON=$VENV/bin/python
    if has_all "$extra"; then return; fi
    # One set-up at a time per file system: srun starts a task per rank. NFS locks only files opened for writing.
    (
        if command -v flock >/dev/null; then flock 9; fi
        make_venv "$extra"
    ) 9>>"$ROOT/pyproject.toml"
}
