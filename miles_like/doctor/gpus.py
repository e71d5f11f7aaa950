"""The NVIDIA GPUs of a machine, as nvidia-smi reports them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TypedDict

_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "driver_version",
    "persistence_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "compute_mode",
)
_APPS = ("gpu_uuid", "pid", "process_name")
SMI_S = 60.0  # without persistence mode the driver is loaded for each call, which takes seconds a GPU


class GpuFacts(TypedDict):
    """One GPU."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    free_mib: int
    driver: str
    persistence: str  # "Enabled", "Disabled", or "" where not reported, as the following
    mig: str
    ecc: str
    ecc_errors: str
    compute_mode: str
    processes: list[str]  # "pid name"


def query_gpus(smi: Callable[[str, tuple[str, ...]], str] | None = None) -> list[GpuFacts] | str:
    """All GPUs, or why none is reported. smi: replaces the call of nvidia-smi."""
    ask = smi or _smi
    try:
        rows = _rows(ask("gpu", _FIELDS), len(_FIELDS))
        apps = _rows(ask("compute-apps", _APPS), len(_APPS)) if rows else []
    except FileNotFoundError:
        return "no nvidia-smi"
    except (OSError, RuntimeError, subprocess.SubprocessError) as e:
        return " ".join(str(e).split())
    return [_gpu(row, apps) for row in rows]


def _gpu(row: list[str], apps: list[list[str]]) -> GpuFacts:
    index, uuid, name, total, free, driver, persistence, mig, ecc, errors, mode = row
    return {
        "index": int(index),
        "uuid": uuid,
        "name": name,
        "memory_mib": _whole(total),
        "free_mib": _whole(free),
        "driver": driver,
        "persistence": persistence,
        "mig": mig,
        "ecc": ecc,
        "ecc_errors": errors,
        "compute_mode": mode,
        "processes": [f"{pid} {process}" for gpu, pid, process in apps if gpu == uuid],
    }


def _rows(text: str, fields: int) -> list[list[str]]:
    cells = [[_reported(cell.strip()) for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [row for row in cells if len(row) == fields]


def _reported(cell: str) -> str:
    return "" if cell.strip("[]").lower() in ("n/a", "not supported", "unknown error") else cell


def _whole(cell: str) -> int:
    return int(cell) if cell.isdecimal() else 0


def _smi(what: str, fields: tuple[str, ...]) -> str:
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout.strip() or done.stderr.strip() or f"nvidia-smi ended with {done.returncode}")
    return done.stdout
