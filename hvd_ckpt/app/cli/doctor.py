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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.install.build_horovod import failure_of_last_build, missing_prerequisites
from hvd_ckpt.app.install.offline import LIMIT, fill
from hvd_ckpt.app.install.prerequisites import BuildError
from hvd_ckpt.app.install.recipe import detect_target
from hvd_ckpt.processes.probe import OPERATIONS, probe
from hvd_ckpt.utils.extras import apex_unavailable, explain_import_error, first_line, installed_version
from hvd_ckpt.utils.folders import cache_folder, make_writable
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


def examine(timeout: float = 120.0) -> Facts:
    """Everything the doctor knows, as plain values for JSON; ``problems`` lists what is essential and missing.

    Args:
        timeout: seconds that each controller's two ranks may take.
    """
    facts: Facts = {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "torch": torch_facts(),
        "horovod": horovod_facts(),
    }
    facts["build"] = build_facts() if "error" in facts["horovod"] and "version" in facts["torch"] else {}
    facts["home"] = home_facts()
    facts["controllers"] = {name: _controller_facts(name, facts["horovod"], timeout) for name in CONTROLLERS}
    facts["mpi"] = mpi_facts()
    reason = apex_unavailable()
    facts["apex"] = {"usable": reason is None, "reason": reason or ""}
    facts["environment"] = environment_facts()
    facts["problems"] = problems(facts)
    return facts


def torch_facts() -> Facts:
    """PyTorch's version, what CUDA it was built for, and the devices it sees; or the error of importing it."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return {"error": first_line(error)}
    cuda = torch.version.cuda
    available = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else []
    facts: Facts = {
        "version": torch.__version__,
        "cuda_built": cuda,
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


def horovod_facts() -> Facts:
    """Horovod's version and what it was built with; or ``error``, one sentence with the way out."""
    if importlib.util.find_spec("horovod") is None:
        return {"error": f"Horovod is not installed: {BUILD_HOROVOD}."}
    facts: Facts = {"version": installed_version("horovod")}
    try:
        from hvd_ckpt.processes import runtime

        facts.update(runtime.horovod_build())
    except Exception as error:
        text = explain_import_error(error) if isinstance(error, ImportError) else None
        facts["error"] = text or f"Horovod does not load ({first_line(error)}): {BUILD_HOROVOD}."
    return facts


def build_facts() -> Facts:
    """Why Horovod could not be built here: ``missing`` prerequisites, and the error of the last build if it ``failed``."""
    try:
        target = detect_target()
        cache, _ = cache_folder()
        return {"missing": missing_prerequisites(), "failed": failure_of_last_build(cache, target)}
    except (BuildError, OSError) as error:
        return {"missing": [first_line(error)], "failed": None}


def home_facts() -> Facts:
    """The home folder, and ``error`` where ``horovodrun``, which keeps a cache in ``~/.horovod``, cannot write there."""
    home = os.path.expanduser("~")
    wanted = "horovodrun keeps its cache in ~/.horovod: set HOME to a folder that you can write to"
    if home == "~":
        return {
            "folder": None,
            "error": f"HOME is not set, and the password file does not know this user; {wanted}.",
        }
    try:
        make_writable(Path(home, ".horovod"))
    except OSError as error:
        return {"folder": home, "error": f"HOME, {home}, cannot be written to ({error.strerror}); {wanted}."}
    return {"folder": home}


def _controller_facts(name: str, horovod: Facts, timeout: float) -> Facts:
    if "error" in horovod:
        return {"works": False, "reason": "Horovod does not load", "seconds": 0.0, "operations": {}}
    if not horovod[name]:
        return {"works": False, "reason": "Horovod was built without it", "seconds": 0.0, "operations": {}}
    return asdict(probe(name, timeout=timeout))


def mpi_facts() -> Facts:
    """MPI's version as mpi4py sees it, mpi4py's own, and where the launcher and what it reaches other machines with are."""
    facts: Facts = {"mpi4py": installed_version("mpi4py"), "mpirun": _find_program("mpirun")}
    facts["ssh"] = shutil.which("ssh") or shutil.which("rsh")
    try:
        mpi4py = importlib.import_module("mpi4py")
        # Importing mpi4py.MPI would start MPI in this process, which is no rank.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        text: str = importlib.import_module("mpi4py.MPI").Get_library_version()
        facts["version"] = text.split("\n")[0].split(",")[0].strip("\x00 ")
    except Exception as error:
        facts["error"] = first_line(error)
    return facts


def environment_facts() -> dict[str, str]:
    """The environment variables that change how a job runs, secrets left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES) and "SECRET" not in name
    }


def problems(facts: Facts) -> list[str]:
    """Essential things that are missing, each one sentence with the way out."""
    if "error" in facts["torch"]:
        return [f"PyTorch does not load ({facts['torch']['error']}): install it, then {BUILD_HOROVOD}."]
    if "unsupported" in facts["torch"]:
        return [facts["torch"]["unsupported"]]
    home = [facts["home"]["error"]] if "error" in facts["home"] else []
    # Without Horovod no controller can work, so its own fault is the only one that is told.
    if "error" in facts["horovod"]:
        build = facts["build"]
        missing = [f"the build of Horovod lacks something: {text}" for text in build["missing"]]
        failed = [f"the last build of Horovod failed: {build['failed']}"] if build["failed"] else []
        return [facts["horovod"]["error"], *missing, *failed, *home]
    if any(controller["works"] for controller in facts["controllers"].values()):
        return home
    reasons = "; ".join(
        f"{name}: {controller['reason']}" for name, controller in facts["controllers"].items()
    )
    return [
        *home,
        f"no controller works ({reasons}): check that `horovodrun` starts processes on this machine (its network "
        f"interface: HOROVOD_GLOO_IFACE), or that Horovod is built for this PyTorch: {BUILD_HOROVOD}.",
    ]


def rows(facts: Facts) -> list[tuple[str, str, str]]:
    """The table's rows: what, what was found, and ``ok``, ``-`` (absent, not needed) or ``!`` (does not work)."""
    torch, horovod, mpi, apex = facts["torch"], facts["horovod"], facts["mpi"], facts["apex"]
    table = [("Python", f"{facts['python']['version']}  {facts['python']['executable']}", "ok")]
    if "error" in torch:
        table.append(("PyTorch", torch["error"], "!"))
    else:
        table.append(("PyTorch", torch["version"], "!" if "unsupported" in torch else "ok"))
        devices = ", ".join(torch["devices"]) or "no device"
        cuda = (
            f"built for {torch['cuda_built']}, {devices}"
            if torch["cuda_built"]
            else "PyTorch is built for the CPU"
        )
        table.append(("CUDA", cuda, "ok" if torch["cuda_available"] else "-"))
        table.append(("stages and parts", *_links_cell(torch)))
    if "error" in horovod:
        table.append(("Horovod", horovod["error"], "!"))
    else:
        built = [
            "PyTorch",
            *(name.upper() for name in ("mpi", "gloo", "cuda", "nccl", "rocm") if horovod[name]),
        ]
        table.append(("Horovod", f"{horovod['version']}, built with {', '.join(built)}", "ok"))
        if torch.get("cuda_available") and not (horovod["cuda"] or horovod["rocm"]):
            text = f"none on GPUs, so that ranks train on the CPU: {BUILD_HOROVOD}"
            table.append(("  operations", text, "!"))
    for name, controller in facts["controllers"].items():
        table.append((f"controller {name}", *_controller_cell(controller)))
        for device, answers in controller["operations"].items():
            bad = [
                f"{operation}: {answers[operation]}" for operation in OPERATIONS if answers[operation] != "ok"
            ]
            text = "; ".join(bad) or ", ".join(OPERATIONS)
            table.append((f"  on {device}", text, "!" if bad else "ok"))
    table.append(("MPI", mpi.get("version", mpi.get("error", "")), "ok" if "version" in mpi else "-"))
    table.append(("mpirun", mpi["mpirun"] or "not found", "ok" if mpi["mpirun"] else "-"))
    ssh = "not found: mpirun wants it, for this machine too; without it, export OMPI_MCA_plm_rsh_agent="
    table.append(("ssh", mpi["ssh"] or ssh, "ok" if mpi["ssh"] else "-"))
    table.append(("mpi4py", mpi["mpi4py"] or "not installed", "ok" if mpi["mpi4py"] else "-"))
    home = facts["home"]
    table.append(("HOME", home.get("error", home["folder"]), "!" if "error" in home else "ok"))
    table.append(("Apex", apex["reason"] or "apex.amp can be used", "ok" if apex["usable"] else "-"))
    settings = "\n".join(f"{name}={value}" for name, value in facts["environment"].items())
    table.append(("environment", settings or "no setting that matters is set", "ok" if settings else "-"))
    return table


def _controller_cell(controller: Facts) -> tuple[str, str]:
    if controller["works"]:
        return f"2 ranks started and agreed in {controller['seconds']} s", "ok"
    return controller["reason"], "!"


def _links_cell(torch: Facts) -> tuple[str, str]:
    """What carries tensors between pipeline stages and between parts of a layer."""
    hosts = "tensors on CPUs over MPI, or shared memory and Gloo"
    over_nccl = (
        torch["cuda_available"] and torch["nccl_groups"] and os.environ.get(LINK_VARIABLE, "nccl") == "nccl"
    )
    if over_nccl:
        return f"tensors on GPUs over NCCL {torch['nccl']}, {hosts}", "ok"
    return f"{hosts}; on GPUs the same, through host memory" if torch["cuda_available"] else hosts, "-"


def _find_program(name: str) -> str | None:
    # A virtual environment that is not activated has its programs beside its Python, and not on PATH.
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--timeout",
    default=120.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Seconds for each controller.",
)
@click.option(
    "--fill",
    "to_fill",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Instead, download the files for `bash main.sh gpu --offline` into this folder, for a machine without a network.",
)
@click.option(
    "--python",
    metavar="VERSION",
    default="3.12",
    show_default=True,
    help="With --fill: Python version of that machine.",
)
def doctor(as_json: bool, timeout: float, to_fill: Path | None, python: str) -> None:
    """Report what is installed, what works and what is missing.

    The command starts two ranks over each controller, which try every operation. If something essential is missing, the
    exit status is 1, and the output says what to do.
    """
    if to_fill is not None:
        fill_folder(to_fill, python)
        return
    facts = examine(timeout)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        print_table(facts)
    sys.exit(1 if facts["problems"] else 0)


def fill_folder(folder: Path, python: str) -> None:
    """Downloads what a machine without a network needs, and says what it is.

    Raises:
        BadArgument: it could not be downloaded.
    """
    try:
        files, left_out = fill(folder, python)
    except (BuildError, OSError, ValueError) as error:
        raise BadArgument(f"--fill: {error}") from None
    size = sum(file.stat().st_size for file in files) / 2**20
    click.echo(f"{folder}: {len(files)} files, {size:.1f} MiB, for Python {python}")
    if left_out:
        click.echo(f"Left out, beyond {LIMIT >> 20} MiB; the machine must have: {', '.join(left_out)}")
    click.echo(f"There: PYTHON=/path/to/the/python/with/torch bash main.sh gpu --offline {folder.name}")


def print_table(facts: Facts) -> None:
    """The table and, below it, each problem."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title="hvd-ckpt doctor")
    for heading in ("what", "found", ""):
        table.add_column(heading, overflow="fold")
    colors = {"ok": "green", "-": "dim", "!": "red"}
    for what, fact, mark in rows(facts):
        table.add_row(Text(what), Text(fact), Text(mark, style=colors[mark]))
    console.print(table)
    for problem in facts["problems"]:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
