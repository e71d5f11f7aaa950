"""`python -m tests.support.resolve [--write]` (make resolve): what a cluster installs has a solution.

Both environments of docs/cluster.md are resolved by uv, which reads the metadata of packages and builds none. That of
`transformer_engine_torch`, a source package whose build needs torch and the internet, is stated in pyproject.toml.
For Python 3.12 the exact versions in docs/cluster must still be a solution; `--write` replaces them by a new one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = Path("docs", "cluster")
PINNED_PYTHON, OTHER_PYTHON = "3.12", "3.11"
SOURCE_ONLY = "transformer-engine-torch"
_UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "Connection refused", "timed out")
_TIMEOUT_S = 600


class Installed(NamedTuple):
    """One environment. what: arguments of `uv pip compile` that name its requirements."""

    name: str
    what: tuple[str, ...]

    @property
    def pins(self) -> Path:
        return FOLDER / f"{self.name}-constraints.txt"


# the trainer's packages keep the versions that the tests run with
ENVIRONMENTS = (
    Installed("trainer", ("pyproject.toml", "--extra", "gpu", "--constraints", "constraints.txt")),
    Installed("engine", (str(FOLDER / "engine-requirements.txt"),)),
)


def compile_command(uv: str, one: Installed, python: str, *, pinned: bool) -> list[str]:
    return [
        *(uv, "pip", "compile", *one.what, "--python-version", python),
        *("--python-platform", "x86_64-manylinux_2_34", "--only-binary", ":all:", "--no-binary", SOURCE_ONLY),
        *("--no-header", "--no-annotate", "--quiet"),
        *(("--constraints", str(one.pins)) if pinned else ()),
    ]


def solution(uv: str, one: Installed, python: str, *, pinned: bool) -> str:
    """The versions of all packages of the environment, one a line. Raises ValueError, with the resolver's reason, where
    there is no solution or the registry does not answer."""
    command = compile_command(uv, one, python, pinned=pinned)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=_registry(), timeout=_TIMEOUT_S, check=False
    )
    if not done.returncode:
        return done.stdout
    reason = " ".join(done.stderr.split())
    if any(word in reason for word in _UNREACHABLE):
        raise ValueError(
            f"whether the {one.name}'s environment can be installed was not checked, because the package registry does "
            "not answer: run `make resolve` where pip can install packages"
        )
    raise ValueError(f"the {one.name}'s environment has no solution for Python {python}: {reason}")


def _registry() -> dict[str, str]:
    """This process's environment, with pip's registry and certificates for uv, which does not read pip's settings."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found = dict(re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE))
    names = {"UV_DEFAULT_INDEX": "index-url", "SSL_CERT_FILE": "cert"}
    given = {name: found[key] for name, key in names.items() if key in found}
    return given | dict(os.environ)


def find_uv() -> str:
    """Raises ValueError where uv is not installed."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (uv := shutil.which("uv", path=folders)) is None:
        raise ValueError("uv is not installed: pip install '.[dev]'")
    return uv


def main(arguments: Sequence[str]) -> int:
    try:
        uv = find_uv()
        for one in ENVIRONMENTS:
            if "--write" in arguments:
                found = solution(uv, one, PINNED_PYTHON, pinned=False)
                (ROOT / one.pins).write_text(_HEADER.format(name=one.name) + found)
            versions = solution(uv, one, PINNED_PYTHON, pinned=True).splitlines()
            missing = set(versions) - set((ROOT / one.pins).read_text().splitlines())
            if missing:
                raise ValueError(f"{one.pins} lacks {', '.join(sorted(missing))}: make resolve WRITE=--write")
            solution(uv, one, OTHER_PYTHON, pinned=False)
            print(f"{one.name}: {len(versions)} packages, as {one.pins} has them")
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


_HEADER = """\
# Versions of the {name}'s environment that fit each other by their metadata, for Python 3.12 on Linux, x86-64, with
# glibc 2.34 or later, written by `make resolve WRITE=--write`. Resolved, not installed: no GPU has run them yet.
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
