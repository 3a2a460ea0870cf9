"""``hvd-ckpt doctor``: a report of what is installed, what works, and how to install what is missing.

The command must run in environments in which nothing else runs. So this module does not import PyTorch or Horovod
at its top, and every check that fails becomes a line of the report. A controller is not judged by
Horovod's build flags, but tried with two ranks (:mod:`hvd_ckpt.processes.probe`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from hvd_ckpt.app.install.build_horovod import missing_prerequisites
from hvd_ckpt.app.install.prerequisites import BuildError
from hvd_ckpt.app.install.recipe import detect_target
from hvd_ckpt.processes.probe import OPERATIONS, ProbeResult, horovod_build, probe
from hvd_ckpt.utils.extras import apex_unavailable, explain_import_error, first_line, installed_version
from hvd_ckpt.utils.folders import make_writable
from hvd_ckpt.utils.text import BUILD_HOROVOD

CONTROLLERS = ("gloo", "mpi")
LINK_VARIABLE = "HVD_CKPT_LINK"  # of hvd_ckpt.processes.devices, whose import loads Horovod
ENVIRONMENT_PREFIXES = ("HOROVOD_", "NCCL_", "GLOO_", "OMPI_MCA_", "PYTORCH_", "SLURM_JOB_ID", "SLURM_NTASKS")
ENVIRONMENT_NAMES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUBLAS_WORKSPACE_CONFIG",
    "OPAL_PREFIX",
)

Facts = dict[str, Any]


class Finding(NamedTuple):
    """A row of the report.

    Attributes:
        what, found: what was looked at, and what was found.
        mark: ``ok``, ``-`` (absent, and not needed) or ``!`` (does not work).
        problem: of what is essential and does not work: one sentence with the way out.
    """

    what: str
    found: str
    mark: str
    problem: str = ""


def examine(timeout: float = 120.0) -> Iterator[Finding]:
    """Everything the doctor knows."""
    yield Finding("Python", f"{platform.python_version()}  {sys.executable}", "ok")
    torch, horovod = torch_facts(), horovod_facts()
    yield from of_torch(torch)
    if "error" in horovod:
        # Without a PyTorch that works nothing can be built yet, and that is a finding of its own.
        can_be_built = not {"error", "unsupported"} & torch.keys()
        yield Finding("Horovod", horovod["error"], "!", horovod["error"] if can_be_built else "")
        yield from _of_build() if can_be_built else ()
    else:
        yield from _of_horovod(torch, horovod, timeout)
    yield from _of_mpi()
    yield _of_home()
    reason = apex_unavailable()
    yield Finding("Apex", reason or "apex.amp can be used", "-" if reason else "ok")
    settings = "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if _matters(name))
    yield Finding("environment", settings or "no setting that matters is set", "ok" if settings else "-")


def torch_facts() -> Facts:
    """PyTorch's version, what CUDA it was built for, and the devices it sees; or the error of importing it."""
    try:
        torch = importlib.import_module("torch")
        cuda = torch.version.cuda
        available = torch.cuda.is_available()
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * available)]
    except Exception as error:
        return {"error": first_line(error)}
    facts: Facts = {
        "version": torch.__version__,
        "cuda_built": cuda,
        "rocm_built": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cuda_available": available,
        "devices": names,
        "nccl_groups": bool(cuda) and torch.distributed.is_nccl_available(),
    }
    try:
        # The only file that imports private names of PyTorch, so it fails where a version lacks one.
        importlib.import_module("hvd_ckpt.utils.torch_private")
    except ImportError as error:
        facts["unsupported"] = first_line(error)
    return facts


def of_torch(torch: Facts) -> Iterator[Finding]:
    """Findings from :func:`torch_facts`."""
    if "error" in torch:
        problem = f"PyTorch does not load ({torch['error']}): install it, then {BUILD_HOROVOD}."
        yield Finding("PyTorch", torch["error"], "!", problem)
        return
    unsupported = torch.get("unsupported", "")
    yield Finding("PyTorch", torch["version"], "!" if unsupported else "ok", unsupported)
    devices = ", ".join(torch["devices"]) or "no device"
    built = torch["cuda_built"] or (torch["rocm_built"] and f"ROCm {torch['rocm_built']}")
    cuda = f"built for {built}, {devices}" if built else "PyTorch is built for the CPU"
    yield Finding("CUDA", cuda, "ok" if torch["cuda_available"] else "-")
    # What carries tensors between pipeline stages and between parts of a layer.
    hosts = "tensors on CPUs over MPI, or shared memory and Gloo"
    over_nccl = (
        torch["cuda_available"] and torch["nccl_groups"] and os.environ.get(LINK_VARIABLE, "nccl") == "nccl"
    )
    if over_nccl:
        hosts = f"tensors on GPUs over NCCL {torch['nccl']}, {hosts}"
    elif torch["cuda_available"]:
        hosts += "; on GPUs the same, through host memory"
    yield Finding("stages and parts", hosts, "ok" if over_nccl else "-")


def horovod_facts() -> Facts:
    """Horovod's version and what it was built with; or ``error``, one sentence with the way out."""
    if importlib.util.find_spec("horovod") is None:
        return {"error": f"Horovod is not installed: {BUILD_HOROVOD}."}
    facts: Facts = {"version": installed_version("horovod")}
    try:
        facts.update(horovod_build())
    except Exception as error:
        text = explain_import_error(error) if isinstance(error, ImportError) else None
        facts["error"] = text or f"Horovod does not load ({first_line(error)}): {BUILD_HOROVOD}."
    return facts


def _of_horovod(torch: Facts, horovod: Facts, timeout: float) -> Iterator[Finding]:
    """Findings about a Horovod that loads: its build, and its controllers."""
    built = [name.upper() for name in ("mpi", "gloo", "cuda", "nccl", "rocm") if horovod[name]]
    yield Finding("Horovod", f"{horovod['version']}, built with {', '.join(['PyTorch', *built])}", "ok")
    if torch.get("cuda_available") and not (horovod["cuda"] or horovod["rocm"]):
        yield Finding("  operations", f"none on GPUs, so that ranks train on the CPU: {BUILD_HOROVOD}", "!")
    tried = {
        name: probe(name, timeout=timeout)
        if horovod[name]
        else ProbeResult(False, "Horovod was built without it")
        for name in CONTROLLERS
    }
    problem = ""
    if not any(each.works for each in tried.values()):
        reasons = "; ".join(f"{name}: {each.reason}" for name, each in tried.items())
        problem = (
            f"no controller works ({reasons}): check that `horovodrun` starts processes on this machine (its network interface: "
            f"HOROVOD_GLOO_IFACE), or that Horovod is built for this PyTorch: {BUILD_HOROVOD}."
        )
    for name, each in tried.items():
        text = f"2 ranks started and agreed in {each.seconds} s" if each.works else each.reason
        yield Finding(f"controller {name}", text, "ok" if each.works else "!", problem)
        problem = ""  # of both together
        for device, answers in each.operations.items():
            bad = [f"{name}: {answers[name]}" for name in OPERATIONS if answers[name] != "ok"]
            yield Finding(f"  on {device}", "; ".join(bad) or ", ".join(OPERATIONS), "!" if bad else "ok")


def _of_build() -> Iterator[Finding]:
    """What a build of Horovod lacks here."""
    try:
        detect_target()
        missing = missing_prerequisites()
    except (BuildError, OSError) as error:
        missing = [first_line(error)]
    for text in missing:
        yield Finding("  its build", text, "!", f"the build of Horovod lacks something: {text}")


def _of_mpi() -> Iterator[Finding]:
    """MPI's version as mpi4py sees it, mpi4py's own, and where the launcher and what it reaches other machines with are."""
    try:
        mpi4py = importlib.import_module("mpi4py")
        # Importing mpi4py.MPI would start MPI in this process, which is no rank.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        text: str = importlib.import_module("mpi4py.MPI").Get_library_version()
        yield Finding("MPI", text.split("\n")[0].split(",")[0].strip("\x00 "), "ok")
    except Exception as error:
        yield Finding("MPI", first_line(error), "-")
    # A virtual environment that is not activated has its programs beside its Python, and not on PATH.
    beside = Path(sys.executable).parent / "mpirun"
    ssh = "not found: mpirun wants it, for this machine too; without it, export OMPI_MCA_plm_rsh_agent="
    for what, found, absent in (
        ("mpirun", str(beside) if beside.exists() else shutil.which("mpirun"), "not found"),
        ("ssh", shutil.which("ssh") or shutil.which("rsh"), ssh),
        ("mpi4py", installed_version("mpi4py"), "not installed"),
    ):
        yield Finding(what, found or absent, "ok" if found else "-")


def _of_home() -> Finding:
    """The home folder, in which ``horovodrun`` must be able to write."""
    home = os.path.expanduser("~")
    wanted = "horovodrun keeps its cache in ~/.horovod: set HOME to a folder that you can write to"
    problem = ""
    if home == "~":
        problem = f"HOME is not set, and the password file does not know this user; {wanted}."
    else:
        try:
            make_writable(Path(home, ".horovod"))
        except OSError as error:
            problem = f"HOME, {home}, cannot be written to ({error.strerror}); {wanted}."
    return Finding("HOME", problem or home, "!" if problem else "ok", problem)


def _matters(name: str) -> bool:
    """Whether an environment variable changes how a job runs, and is no secret."""
    return (name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES) and "SECRET" not in name


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--timeout",
    default=120.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Seconds for each controller.",
)
def doctor(as_json: bool, timeout: float) -> None:
    """Report what is installed, what works and what is missing.

    The command starts two ranks over each controller, which try every operation. If something essential is missing, the
    exit status is 1, and the output says what to do.
    """
    findings = list(examine(timeout))
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        print_table(findings)
    sys.exit(1 if any(finding.problem for finding in findings) else 0)


def print_table(findings: list[Finding]) -> None:
    """The table and, below it, each problem."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title="hvd-ckpt doctor")
    for heading in ("what", "found", ""):
        table.add_column(heading, overflow="fold")
    colors = {"ok": "green", "-": "dim", "!": "red"}
    for what, found, mark, _ in findings:
        table.add_row(Text(what), Text(found), Text(mark, style=colors[mark]))
    console.print(table)
    for problem in (finding.problem for finding in findings if finding.problem):
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
