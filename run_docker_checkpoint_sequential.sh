#!/usr/bin/env bash
# Builds the container image of this repository, then runs a command of main.sh in a container of it.
#
#   bash run_docker_checkpoint_sequential.sh                  the main job: hvd-ckpt compare --quick
#   bash run_docker_checkpoint_sequential.sh COMMAND [ARGS]   any command of main.sh: compare, test, doctor, ...
#
# Results appear in ./runs on this side and belong to you (if you are root, to the owner of the current folder); the
# container sees no other file of yours. The exit status is the command's. The first build compiles Horovod: minutes,
# once. NP and OMP_NUM_THREADS, and what starts with HOROVOD_, OMPI_MCA_, NCCL_ or GLOO_, reach the container. More:
#
#   BASE_IMAGE            what the image is built on (debian:bookworm-slim); a CUDA image of the "devel" kind, such as
#                         nvidia/cuda:13.0.2-devel-ubuntu24.04, gives Horovod its NCCL operations and the job the GPUs
#   DOCKER_GPUS           the GPUs, as for `docker run --gpus` (all where BASE_IMAGE has cuda in its name, else none)
#   DOCKER_IMAGE          the name of the image (hvd_ckpt, or hvd_ckpt:cuda)
#   DOCKER_BUILD_FLAGS    more for `docker build`, split at spaces, such as --build-arg PIP_EXTRA_INDEX_URL=...
#   DOCKER_RUN_FLAGS      more for `docker run`, split at spaces, such as --volume /data:/data
set -euo pipefail
set -f  # words of the flags are words, not file patterns

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
runs="$PWD/runs"
base="${BASE_IMAGE:-debian:bookworm-slim}"
case "$base" in
    *cuda*) image="${DOCKER_IMAGE:-hvd_ckpt:cuda}" gpus="${DOCKER_GPUS-all}" operations="${HOROVOD_GPU_OPERATIONS:-NCCL}" ;;
    *) image="${DOCKER_IMAGE:-hvd_ckpt}" gpus="${DOCKER_GPUS-}" operations="${HOROVOD_GPU_OPERATIONS:-}" ;;
esac

die() { printf 'error: %s\n' "$*" >&2; exit 1; }

check_docker() {
    local answer
    command -v docker >/dev/null ||
        die "docker was not found; install Docker, or run without a container: bash main.sh."
    answer="$(docker version --format '{{.Server.Version}}' 2>&1)" ||
        die "Docker's daemon does not answer (${answer##*$'\n'}); start it, or ask for the right to use it."
}

# Sets owner, whom the results will belong to: the caller; for root (sudo, say), the owner of the folder it works in.
make_results_folder() {
    owner="$(id -u):$(id -g)"
    if ((EUID == 0)); then
        if [[ -d "$runs" ]]; then owner="$(stat -c %u:%g "$runs")"; else owner="$(stat -c %u:%g "$PWD")"; fi
    fi
    if [[ ! -d "$runs" ]]; then
        mkdir "$runs" 2>/dev/null && chown "$owner" "$runs"
    fi
    [[ -d "$runs" && -w "$runs" ]] || die "results cannot be written to $runs; start in a folder of yours."
}

# The container's user, such that what it writes belongs to the owner. A rootless daemon maps its own user to root; one
# that maps users to others of its choice is asked not to.
user_flags() {
    case "$(docker info --format '{{.SecurityOptions}}' 2>/dev/null)" in
        *name=rootless*) printf '%s' "--user 0:0" ;;
        *name=userns*) printf '%s' "--user $owner --userns=host" ;;
        *) printf '%s' "--user $owner" ;;
    esac
}

build() {
    # On standard error, so that standard output is the command's alone.
    # shellcheck disable=SC2086 # the flags are several words
    docker build --tag "$image" --build-arg "BASE_IMAGE=$base" \
        ${operations:+--build-arg "HOROVOD_GPU_OPERATIONS=$operations"} ${DOCKER_BUILD_FLAGS:-} "$root" >&2 ||
        die "the image $image could not be built on $base; the reason is above."
}

run() {
    local flags name
    # The folder has the same path inside, so that paths in messages and reports hold outside, too.
    flags="--rm --ipc=host $(user_flags)"
    for name in $(compgen -e); do
        case "$name" in
            NP | OMP_NUM_THREADS | HOROVOD_* | OMPI_MCA_* | NCCL_* | GLOO_*) flags+=" --env $name" ;;
        esac
    done
    if [[ -t 0 && -t 1 ]]; then flags+=" --interactive --tty"; fi
    # shellcheck disable=SC2086 # the flags are several words
    exec docker run $flags ${gpus:+--gpus "$gpus"} --mount "type=bind,source=$runs,target=$runs" --workdir "$PWD" \
        ${DOCKER_RUN_FLAGS:-} "$image" "$@"
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
fi
check_docker
make_results_folder
build
run "$@"
