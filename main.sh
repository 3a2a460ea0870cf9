#!/usr/bin/env bash
# Sets up everything this repository needs in .venv, then runs a command of it.
#
#   bash main.sh                   the main job: hvd-ckpt compare
#   bash main.sh setup             set up only
#   bash main.sh test [ARGS]       set up, then the tests (ARGS go to pytest)
#   bash main.sh COMMAND [ARGS]    set up, then hvd-ckpt COMMAND: compare, doctor, ...
#
# NP=4 bash main.sh runs 4 ranks; PYTHON=/path/to/python3 chooses the Python for .venv.
# The set-up does only what is missing or has changed, and repairs one that was interrupted.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$root/.venv"
busy="$venv/.setting-up"   # holds the process id of a running set-up; left behind by an interrupted one
stamps="$venv/.stamps"     # one file for each finished step, holding the hash of what the step depends on

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not a program; name a Python 3.10 or newer."
        is_recent_python "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.10 or newer; install one and name it."
        command -v "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null && is_recent_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.10 or newer was not found; install it (for example python3 from your system's packages)" \
        "or name one with PYTHON=/path/to/python3."
}

check_venv_module() {
    "$1" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        die "$1 lacks the venv module with ensurepip; install it (Debian and Ubuntu: the package python3-venv)."
}

check_compiler() {
    local compiler="${CXX:-}" candidate
    for candidate in ${compiler:+"$compiler"} c++ g++ clang++; do
        if command -v "${candidate%% *}" >/dev/null; then return; fi
    done
    die "a C++ compiler was not found; install one (Debian and Ubuntu: the package g++)."
}

check_headers() {
    "$1" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "the headers of $1 (Python.h) were not found; install them (Debian and Ubuntu: the package" \
            "python3-dev), since Horovod is compiled for it."
}

hash_of() { "$venv/bin/python" -c '
import hashlib, sys
digest = hashlib.sha256(sys.version.encode())
for name in sys.argv[1:]:
    digest.update(open(name, "rb").read())
print(digest.hexdigest())' "$@"; }

is_done() { [[ -f "$stamps/$1" && "$(<"$stamps/$1")" == "$2" ]]; }
mark_done() { mkdir -p "$stamps" && printf '%s\n' "$2" >"$stamps/$1"; }

venv_works() {
    # A repository that was moved has scripts that point to the old place; a removed Python leaves dead links.
    [[ -x "$venv/bin/python" && -f "$venv/pyvenv.cfg" ]] &&
        grep -qF "$venv" "$venv/bin/activate" && "$venv/bin/python" -c 'import pip' >/dev/null 2>&1
}

make_venv() {
    if [[ -f "$busy" ]]; then
        local other
        other="$(<"$busy")"
        if [[ -n "$other" ]] && kill -0 "$other" 2>/dev/null; then
            die "another set-up of $root is running (process $other); wait for it to end."
        fi
        say "The last set-up was interrupted: starting over."
        rm -rf "$venv"
    fi
    if ! venv_works; then
        local python
        python="$(find_python)"
        check_venv_module "$python"
        check_compiler
        check_headers "$python"
        say "Making .venv with $("$python" --version)"
        rm -rf "$venv"
        mkdir "$venv"
        printf '%s\n' "$$" >"$busy"
        "$python" -m venv "$venv" >&2 || die "$python could not make a virtual environment in $venv."
    fi
}

install_requirements() {
    local list="$root/install/requirements.txt" hash
    hash="$(hash_of "$list")"
    if is_done requirements "$hash"; then return; fi
    printf '%s\n' "$$" >"$busy"
    say "Installing the requirements (PyTorch is large; the first time takes a while)"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r "$list" >&2 ||
        die "the requirements could not be installed; the reason is above."
    mark_done requirements "$hash"
}

build_horovod() {
    # Cheap when nothing changed: the script compares what is installed with the wheel in its cache.
    local hash
    hash="$(hash_of "$root/install/recipe.py")-$("$venv/bin/python" "$root/install/build_horovod.py" --print-key)"
    if is_done horovod "$hash" && "$venv/bin/python" -c '
import importlib.metadata; importlib.metadata.version("horovod")' 2>/dev/null; then return; fi
    check_compiler
    "$venv/bin/python" "$root/install/build_horovod.py" --no-install >&2 || exit 1
    printf '%s\n' "$$" >"$busy"   # the build may be interrupted freely, the installation may not
    "$venv/bin/python" "$root/install/build_horovod.py" >&2 || exit 1
    mark_done horovod "$hash"
}

install_package() {
    local hash
    hash="$(hash_of "$root/setup.cfg" "$root/pyproject.toml")"
    if is_done package "$hash"; then return; fi
    printf '%s\n' "$$" >"$busy"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
        --editable "$root" >&2 || die "this package could not be installed; the reason is above."
    mark_done package "$hash"
}

set_up() {
    make_venv
    install_requirements
    rm -f "$busy"
    build_horovod
    install_package
    rm -f "$busy"
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
fi
unset PYTHONHOME
set_up
export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"

case "${1:-compare}" in
    setup) say "Ready: $venv" ;;
    test) shift; exec "$venv/bin/python" "$root/tests/run.py" "$@" ;;
    compare) exec "$venv/bin/hvd-ckpt" compare "${@:2}" ;;
    *) exec "$venv/bin/hvd-ckpt" "$@" ;;
esac
