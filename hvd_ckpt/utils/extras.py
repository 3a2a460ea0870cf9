"""Missing packages, and the line that says how to install each of them.

``setup.cfg`` lists the packages of each extra. No package index has this package, so the command that installs an extra names a
folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from hvd_ckpt.utils.text import BUILD_HOROVOD

DISTRIBUTIONS = {"sklearn": "scikit-learn", "pil": "pillow", "yaml": "pyyaml"}  # by import name
PREFERRED = (
    "training",
    "mpi",
    "peers",
    "build",
    "lightning",
    "transformers",
)  # order of preference among the extras with a package


def installed_version(package: str) -> str | None:
    """The version of an installed package, which is not imported, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip_command(extra: str) -> str:
    """The command that installs an extra of this package, from the clone that it lies in."""
    clone = Path(__file__).resolve().parents[2]
    origin = clone if (clone / "setup.cfg").is_file() else "<clone or wheel of hvd_ckpt>"
    return f"pip install '{origin}[{extra}]'"


def explain_import_error(error: ImportError) -> str | None:
    """One sentence with what is missing or broken and how to repair it; None for unknown errors."""
    package = (error.name or "").split(".")[0]
    missing = isinstance(error, ModuleNotFoundError)
    if package == "horovod" and importlib.util.find_spec("horovod") is None:
        return f"Horovod is not installed: {BUILD_HOROVOD}."
    if "has not been built" in str(error):
        return f"Horovod was built without PyTorch ({first_line(error)}): {BUILD_HOROVOD}."
    if package == "horovod" or "mpi_lib_v2" in f"{error} {error.path}":
        return f"Horovod does not load ({first_line(error)}), as when it was built for another PyTorch: {BUILD_HOROVOD}."
    if package == "torch" and missing and error.name == "torch":
        return (
            "PyTorch is not installed: pytorch.org names the command for your machine; then "
            + BUILD_HOROVOD
            + "."
        )
    if (
        package == "hvd_ckpt" and not missing
    ):  # the error of hvd_ckpt.utils.torch_private names the PyTorch that is needed
        return str(error)
    extra = _extra_of(package) if missing else None
    if extra is not None:
        return f"{package} is not installed: {pip_command(extra)}"
    return None


def say_no_pictures(error: ImportError) -> None:
    """Prints on standard error why a report has no pictures. The report is written without them."""
    print(f"No pictures: {explain_import_error(error) or error}", file=sys.stderr)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]


def apex_unavailable() -> str | None:
    """The reason why ``apex.amp`` cannot be used in this environment, as a clause; None if it can.

    Three packages have the name: NVIDIA Apex up to 25.05, its later versions without ``apex.amp``, and an unrelated project.
    """
    if importlib.util.find_spec("apex") is None:
        return "NVIDIA Apex is not installed (optional: torch.amp is built in)"
    try:
        amp = importlib.import_module("apex.amp")
        cuda = importlib.import_module("torch").cuda.is_available()
    except Exception as error:
        return (
            f"the installed 'apex' has no apex.amp that loads ({first_line(error)}): it is NVIDIA Apex after 25.05, or another "
            f"project of that name"
        )
    if not hasattr(amp, "initialize"):
        return "the installed 'apex' has no apex.amp.initialize: it is not NVIDIA Apex up to 25.05"
    return None if cuda else "NVIDIA Apex needs a CUDA device, and this machine has no such device"


def _extra_of(package: str) -> str | None:
    """The extra with a package, by the metadata of this package, or None."""
    try:
        requirements = importlib.metadata.requires("hvd_ckpt") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = DISTRIBUTIONS.get(package.lower(), package).lower().replace("_", "-")
    extras = set()
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == [\"']([\w.-]+)[\"']", requirement)
        if name and extra and name.group().lower().replace("_", "-") == wanted:
            extras.add(extra.group(1))
    return next((extra for extra in PREFERRED if extra in extras), None)
