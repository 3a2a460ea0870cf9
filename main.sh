#!/usr/bin/env bash
# Sets up everything this repository needs in .venv, then runs a command of it.
#
#   bash main.sh                   the main job: hvd-ckpt compare --quick
#   bash main.sh setup             set up only, with what the tests need
#   bash main.sh test [ARGS]       the same, then the tests (ARGS go to pytest; --quick: some of every room, in three minutes)
#   bash main.sh docs              build the documentation into site/ (needs no PyTorch and no Horovod)
#   bash main.sh gpu [ARGS]        set up, then check everything that runs on a GPU, and write a report
#   bash main.sh gpu --offline FOLDER   the same without a network; fill FOLDER elsewhere with python tests/gpu/offline.py FOLDER
#   bash main.sh COMMAND [ARGS]    set up, then hvd-ckpt COMMAND: compare, doctor, ...
#
# Variables: NP=4 runs 4 ranks. PYTHON=/path/to/python3 chooses the Python for .venv, and TORCH=2.14.1 the version of
# PyTorch; both are kept until .venv is removed.
# The set-up does only the steps that are missing or have changed, and repairs a set-up that was interrupted.
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
    die "Python 3.10 or newer was not found; install it with the rest of what is needed (Debian and Ubuntu: the packages" \
        "g++ python3-dev python3-venv; Fedora: gcc-c++ python3-devel), or name one with PYTHON=/path/to/python3."
}

check_prerequisites() {
    local missing
    missing="$("$1" "$root/hvd_ckpt/app/install/prerequisites.py")" ||
        die "this is missing for the set-up:"$'\n'"  ${missing//$'\n'/$'\n'  }"
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

repair_packages() {
    # pip writes a package's RECORD last: without it the package is half installed, and without its folder pip installs it again.
    local folder
    for folder in "$venv"/lib/python*/site-packages/*.dist-info; do
        if [[ -d "$folder" && ! -f "$folder/RECORD" ]]; then rm -rf "$folder"; fi
    done
}

make_venv() {
    if [[ -f "$busy" ]]; then
        local other
        other="$(<"$busy")"
        if [[ -n "$other" ]] && kill -0 "$other" 2>/dev/null; then
            die "another set-up of $root is running (process $other); wait for it to end."
        fi
        if [[ -d "$stamps" ]]; then
            say "The last set-up was interrupted: repairing it."
            repair_packages
        else
            say "The last set-up was interrupted: starting over."
            rm -rf "$venv"
        fi
    fi
    if ! venv_works; then
        local python
        python="$(find_python)"
        check_prerequisites "$python"
        say "Making .venv with $("$python" --version)"
        rm -rf "$venv"
        mkdir "$venv" || die "$venv cannot be made; the reason is above."
        printf '%s\n' "$$" >"$busy"
        "$python" -m venv "$venv" >&2 || die "$python could not make a virtual environment in $venv; the reason is above."
        mkdir "$stamps"
    fi
}

install_with_pip() {
    printf '%s\n' "$$" >"$busy"
    # Python compiles what is imported, when it is; to compile every file of PyTorch now would double the time.
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" >&2 && return
    repair_packages
    rm -f "$busy"
    return 1
}

install_requirements() {
    local list="$stamps/requirements.txt" torch hash
    mkdir -p "$stamps"
    torch="${TORCH:-$(cat "$stamps/torch" 2>/dev/null || true)}"
    sed "${torch:+s/^torch==.*/torch==$torch/}" "$root/install/requirements.txt" >"$list"
    hash="$(hash_of "$list")"
    if is_done requirements "$hash"; then return; fi
    say "Installing the requirements. The download is 0.4 GB with PyTorch's CPU build, and 2.9 GB with the CUDA build that" \
        "the default package index has. For the CPU build, pytorch.org shows the address of an index under Get Started:" \
        'read -rp "Address: " url && PIP_EXTRA_INDEX_URL="$url" bash main.sh'
    install_with_pip -r "$list" ||
        die "the requirements could not be installed; the reason is above. What was installed is kept: run it again."
    if [[ -n "$torch" ]]; then mark_done torch "$torch"; fi
    mark_done requirements "$hash"
}

install_test_requirements() {
    local list="$root/install/requirements-tests.txt" hash
    hash="$(hash_of "$list" "$stamps/requirements.txt")"
    if is_done tests "$hash"; then return; fi
    say "Installing what the tests need besides."
    # The constraint keeps the PyTorch and the other versions that are there.
    install_with_pip -r "$list" -c "$stamps/requirements.txt" ||
        die "the packages that the tests need could not be installed; the reason is above."
    mark_done tests "$hash"
}

install_pytest() {
    if "$venv/bin/python" -c 'import pytest' 2>/dev/null; then return; fi
    install_with_pip --quiet "$(grep '^pytest==' "$root/install/requirements-tests.txt")" ||
        die "pytest, which runs the checks, could not be installed; the reason is above."
}

install_offline() {
    # PyTorch and what else is missing in the folder are those of the Python that .venv is made with; wheels in it come first.
    local folder="$1" python hash
    local wheels=("$folder"/*.whl) packages=("$venv"/lib/python*/site-packages)
    hash="$(hash_of "${wheels[@]}")"
    if is_done offline "$hash"; then return; fi
    python="$(find_python)"
    "$python" -c '
import site
print(*site.getsitepackages(), site.getusersitepackages(), sep="\n")' >"${packages[0]}/machine.pth"
    "$venv/bin/python" -c 'import torch' >&2 ||
        die "PyTorch is not there for $python: name the Python that has it with PYTHON=/path/to/python3."
    install_with_pip --quiet --no-index --no-deps --ignore-installed "${wheels[@]}" ||
        die "the wheels in '$folder' could not be installed; the reason is above."
    mark_done offline "$hash"
}

install_package() {
    local hash
    hash="$(hash_of "$root/setup.cfg" "$root/pyproject.toml")"
    if is_done package "$hash"; then return; fi
    install_with_pip --quiet --no-deps --no-build-isolation --editable "$root" ||
        die "this package could not be installed; the reason is above."
    mark_done package "$hash"
}

build_docs() {
    local list="$root/install/requirements-docs.txt" hash
    make_venv
    hash="$(hash_of "$list")"
    if ! is_done docs "$hash"; then
        install_with_pip --quiet -r "$list" ||
            die "the packages that build the documentation could not be installed; the reason is above."
        mark_done docs "$hash"
    fi
    rm -f "$busy"
    cd "$root"
    NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict 2>&1 | sed '/^INFO/d' >&2 ||
        die "the documentation could not be built; the reasons are above."
    say "Built: $root/site/index.html"
}

build_horovod() {
    # Cheap when nothing changed: the module compares what is installed with the wheel in its cache.
    local hash build=("$venv/bin/python" -m hvd_ckpt.app.install.build_horovod)
    hash="$(hash_of "$root/hvd_ckpt/app/install/recipe.py")-$("${build[@]}" --print-key)" || return 1
    if is_done horovod "$hash" && "$venv/bin/python" -c '
import importlib.metadata; importlib.metadata.version("horovod")' 2>/dev/null; then return; fi
    "${build[@]}" --no-install >&2 || return 1
    printf '%s\n' "$$" >"$busy"   # the build may be interrupted freely, the installation may not
    "${build[@]}" >&2 || return 1
    mark_done horovod "$hash"
}

set_up() {
    make_venv
    if [[ -n "$offline" ]]; then install_offline "$offline"; else install_requirements; fi
    case "$1" in
        setup | test) install_test_requirements ;;
        gpu) if [[ -z "$offline" ]]; then install_pytest; fi ;;
    esac
    install_package
    rm -f "$busy"
    if [[ "$1" == gpu ]]; then return; fi   # it builds Horovod itself
    if ! build_horovod; then
        rm -f "$busy"
        [[ "$1" == doctor ]] || die "Horovod is missing; all else is there: $venv/bin/hvd-ckpt doctor says what works."
    fi
    rm -f "$busy"
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
fi
unset PYTHONHOME
if [[ "${1:-}" == docs ]]; then
    build_docs
    exit 0
fi
offline=""
if [[ "${1:-}" == gpu ]]; then
    for ((i = 2; i <= $#; i++)); do
        next=$((i + 1))
        case "${!i}" in
            --offline) offline="${!next:-}" ;;
            --offline=*) offline="${!i#*=}" ;;
            *) continue ;;
        esac
        compgen -G "$offline/*.whl" >/dev/null ||
            die "--offline: the folder '$offline' holds no wheels; python tests/gpu/offline.py FOLDER fills one elsewhere."
    done
fi
set_up "${1:-}"
export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"

case "${1:-}" in
    "") exec "$venv/bin/hvd-ckpt" compare --quick ;;
    setup) say "Ready: $venv" ;;
    test) shift; exec "$venv/bin/python" "$root/tests/run.py" "$@" ;;
    gpu) exec "$venv/bin/python" "$root/tests/gpu/run.py" "${@:2}" ;;
    *) exec "$venv/bin/hvd-ckpt" "$@" ;;
esac
