# What `bash main.sh setup` makes, in an image without the tools it takes to make it.
#
#   docker build --tag hvd_ckpt .
#   docker build --tag hvd_ckpt:cuda --build-arg BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04 \
#       --build-arg HOROVOD_GPU_OPERATIONS=NCCL .
#
# Any Debian or Ubuntu base with Python 3.10 or newer will do; with nvcc in it, Horovod can have operations on GPUs.
# run_docker_checkpoint_sequential.sh builds this image and runs commands of main.sh in it.
ARG BASE_IMAGE=debian:bookworm-slim

# ---- build: compiler, headers, and the environment. No source of hvd_ckpt is in it, so editing one rebuilds nothing.
FROM ${BASE_IMAGE} AS build
# Where pip looks for packages, if not where it looks by default. With an index of PyTorch's CPU wheels as the extra
# one, the image is several GB smaller: the default index has PyTorch with CUDA.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# Horovod's operations on GPUs, which a build does not see: NCCL, for all GPUs that nvcc knows or for those listed (80,90).
ARG HOROVOD_GPU_OPERATIONS
ARG HOROVOD_BUILD_CUDA_CC_LIST
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
WORKDIR /hvd_ckpt
COPY main.sh setup.cfg pyproject.toml ./
COPY install install
COPY hvd_ckpt/app/install hvd_ckpt/app/install
COPY hvd_ckpt/app/__init__.py hvd_ckpt/app/
COPY hvd_ckpt/utils/__init__.py hvd_ckpt/utils/extras.py hvd_ckpt/utils/folders.py hvd_ckpt/utils/machine.py \
    hvd_ckpt/utils/text.py hvd_ckpt/utils/
# The package is installed in place: one that builds Horovod and is empty otherwise is enough to record where it will be.
RUN touch hvd_ckpt/__init__.py && PIP_NO_CACHE_DIR=1 bash main.sh setup
# Nothing compiles or lints in the container: leave out the tools for it, and PyTorch's C++ headers, tests and protoc. Whoever
# runs it may not write there, so Python's files are compiled now; some are of other versions of Python, which is no error.
RUN .venv/bin/python -m pip uninstall --quiet --yes cmake ninja ruff mypy \
    && cd .venv/lib/python3*/site-packages \
    && rm -rf torch/include torch/test && find torch/bin -type f ! -name torch_shm_manager -delete \
    && { /hvd_ckpt/.venv/bin/python -m compileall -qq . || true; }

# ---- the image: Python, an init process, the environment, the sources. mpirun looks for ssh even on one machine, and
# PyTorch hangs where it wants to describe a stack, as checkpoint(debug=True) does, and there is no addr2line (binutils).
# The tests of main.sh want venv.
FROM ${BASE_IMAGE}
ARG HOROVOD_GPU_OPERATIONS
ARG HOROVOD_BUILD_CUDA_CC_LIST
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends binutils openssh-client \
        python3-venv tini \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
WORKDIR /hvd_ckpt
COPY --from=build /hvd_ckpt/.venv .venv
COPY . .
# Any user may run it: all can read it, whatever the modes in the checkout, and write to HOME and pytest's caches here.
RUN chmod -R a+rX -- * && .venv/bin/python -m compileall -q hvd_ckpt && chmod 1777 . && mkdir -m 1777 /home/anyone
# Open MPI refuses to run as root unless told twice that it may: here it may. Reading another process's memory, with
# which it would save a copy, is what containers forbid: it would say so ("Read -1, expected ...") at every message.
ENV HOME=/home/anyone \
    HOROVOD_GPU_OPERATIONS=${HOROVOD_GPU_OPERATIONS} \
    HOROVOD_BUILD_CUDA_CC_LIST=${HOROVOD_BUILD_CUDA_CC_LIST} \
    PATH=/hvd_ckpt/.venv/bin:$PATH \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
# An init process hands signals to the whole job and collects ranks whose launcher has gone.
ENTRYPOINT ["tini", "-g", "--", "bash", "/hvd_ckpt/main.sh"]
