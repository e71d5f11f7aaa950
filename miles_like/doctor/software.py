"""Versions of one Python environment and of the system below it, read from metadata; no package is imported.

Runs as a program of the engine's interpreter too (`python -I software.py`), so that it needs the standard library
alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

# name in messages -> names of the distribution; the first that is installed counts
DISTRIBUTIONS = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine",),
    "transformer-engine-torch": ("transformer-engine-torch",),
    "transformer-engine-cuda": ("transformer-engine-cu13", "transformer-engine-cu12"),
    "ray": ("ray",),
    "sglang": ("sglang",),
    "vllm": ("vllm",),
    "sglang-kernel": ("sglang-kernel", "sgl-kernel"),
    "transformers": ("transformers",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "deep-ep": ("deep-ep", "sgl-deep-ep"),  # SGLang's own build of it
}
ENGINE_S = 60.0


class Software(TypedDict):
    """One Python environment. Names are those of DISTRIBUTIONS, python and cuda (torch's)."""

    packages: dict[str, str]  # name -> version
    distributions: dict[str, str]  # name -> its distribution
    requires: dict[str, list[str]]  # name -> its requirements on distributions of the table
    glibc: str
    glibc_needed: dict[str, str]  # name -> the glibc that its wheel is built for


def software() -> Software:
    """Of this interpreter's environment."""
    packages: dict[str, str] = {"python": platform.python_version()}
    chosen: dict[str, str] = {}
    requires: dict[str, list[str]] = {}
    needed: dict[str, str] = {}
    known = {one: name for name, names in DISTRIBUTIONS.items() for one in names}
    for name, names in DISTRIBUTIONS.items():
        found = next((d for one in names if (d := _distribution(one)) is not None), None)
        if found is None:
            continue
        packages[name], chosen[name] = found.version, found.metadata["Name"]
        requires[name] = [r for r in found.requires or () if _required(r) in known and "extra ==" not in r]
        if (glibc := _glibc_of_wheel(found.read_text("WHEEL") or "")) is not None:
            needed[name] = glibc
    cuda = _torch_cuda()
    return {
        "packages": packages | ({"cuda": cuda} if cuda is not None else {}),
        "distributions": chosen,
        "requires": requires,
        "glibc": platform.libc_ver()[1],
        "glibc_needed": needed,
    }


def engine_software(interpreter: str) -> Software | str:
    """`software` of another interpreter's environment, or why it has none."""
    if interpreter == sys.executable:
        return software()
    try:
        # -I: neither PYTHONPATH nor the user's packages, which belong to this interpreter
        done = subprocess.run(
            [interpreter, "-I", __file__], capture_output=True, text=True, timeout=ENGINE_S, check=False
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        found: Software = json.loads(done.stdout)
        return found
    except (OSError, subprocess.TimeoutExpired, ValueError) as e:
        return str(e)


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found is not None else ""


def _glibc_of_wheel(wheel: str) -> str | None:
    """The newest glibc among the wheel's tags, such as "2.34" for manylinux_2_34."""
    found = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", wheel)]
    return "{}.{}".format(*min(found)) if found else None


def _torch_cuda() -> str | None:
    """The CUDA that torch is built for; None: without torch, or a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found is not None else None


if __name__ == "__main__":
    print(json.dumps(software()))
