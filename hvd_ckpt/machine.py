"""Machine facts to print beside a measured number: the machine, versions, and settings that change it."""

from __future__ import annotations

import importlib.metadata
import os
import platform

__all__ = ["machine_facts"]

PACKAGES = ("torch", "horovod", "transformers")
PREFIXES = ("HOROVOD_", "OMPI_MCA_", "GLOO_")


def machine_facts(threads: int | None = None) -> dict[str, str]:
    """Machine, versions, and variables that are set for Horovod and Open MPI, as lines for a report.

    Args:
        threads: CPU threads of each rank, where that is one number.
    """
    from hvd_ckpt.runtime import allowed_cpus  # which imports PyTorch

    per_rank = "" if threads is None else f", {threads} thread(s) per rank"
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in PACKAGES)]
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)]
    return {
        "machine": f"{platform.system()} {platform.machine()}, {allowed_cpus()} CPUs{per_rank}",
        "versions": ", ".join(versions),
        "environment": " ".join(chosen) or "no HOROVOD_*, OMPI_MCA_* or GLOO_* variables set",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
