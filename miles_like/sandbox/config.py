"""The section [sandbox]. Torch-free."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, field_validator, model_validator

from miles_like.section import Section
from rollout.server_url import ServerUrl

Kind = Literal["bwrap", "docker", "gvisor", "remote"]
# keys that only some kinds read
_READ_BY: dict[str, tuple[Kind, ...]] = {
    "image": ("docker",),
    "url": ("remote",),
    "retries": ("remote",),
    "python": ("bwrap", "docker", "gvisor"),
    "read_only": ("bwrap", "gvisor"),
    "runs_per_sandbox": ("bwrap", "docker", "gvisor"),
    "start_timeout_s": ("bwrap", "docker", "gvisor"),
    "cpu_s": ("bwrap", "docker", "gvisor"),
    "processes": ("bwrap", "docker", "gvisor"),
    "disk_mb": ("bwrap", "docker", "gvisor"),
}


class SandboxConfig(Section):
    """Where programs of a model run: the reward `unit_tests`, the Python tool, environments over files."""

    # bwrap: bubblewrap on this machine; docker; gvisor: runsc on this machine; remote: a SandboxFusion server; None: no
    # program is run
    kind: Kind | None = None
    slots: int | None = Field(None, ge=1, le=1024)  # programs that run at the same time in a process; None: its cores
    memory_mb: int = Field(512, ge=64)  # address space of each process, and memory of all processes of a program, MiB
    cpu_s: int = Field(10, ge=1)  # processor time of each process, seconds
    wall_s: float = Field(10.0, gt=0)  # time of a program by the clock, seconds
    processes: int = Field(16, ge=1)  # processes and threads of a program at the same time
    disk_mb: int = Field(16, ge=1)  # all files of a program, and the largest one, MiB
    output_kb: int = Field(64, ge=1, le=16384)  # standard output and error output together, KiB
    runs_per_sandbox: int = Field(1000, ge=1)  # programs after which a sandbox is replaced; 1: each has a new one
    start_timeout_s: float = Field(60.0, gt=0)  # time limit of a sandbox's start, seconds
    # interpreter, as a path inside the sandbox, Python 3.10 or later; None: /usr/bin/python3, in a container `python3`
    python: str | None = None
    read_only: tuple[str, ...] = ()  # directories of this machine that programs may read, beside /usr
    image: str | None = None  # container image with Python
    url: ServerUrl | None = None  # address of the SandboxFusion server, without a path
    retries: int = Field(4, ge=0)  # further attempts where the server does not answer, 1, 2, 4, ... s apart

    @field_validator("read_only")
    @classmethod
    def they_are_absolute(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for path in given:
            if not PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path == "/":
                raise ValueError(
                    f"sandbox.read_only has {path!r}: expected absolute paths of directories other than '/'"
                )
        return given

    @model_validator(mode="after")
    def keys_fit_the_kind(self) -> SandboxConfig:
        fields = type(self).model_fields
        changed = sorted(key for key in fields if key != "kind" and getattr(self, key) != fields[key].default)
        for key in changed:
            if self.kind is None:
                raise ValueError(
                    f"sandbox.{key} has no effect without sandbox.kind: set it to 'bwrap', 'docker', 'gvisor' or "
                    "'remote'"
                )
            if self.kind not in _READ_BY.get(key, (self.kind,)):
                kinds = ", ".join(map(repr, _READ_BY[key]))
                raise ValueError(
                    f"sandbox.{key} has no effect with sandbox.kind = {self.kind!r}, only with {kinds}: remove it"
                )
        for key, kind in (("image", "docker"), ("url", "remote")):
            if self.kind == kind and getattr(self, key) is None:
                raise ValueError(f"sandbox.kind = {kind!r} needs sandbox.{key}: set it")
        return self

    def check_run(self, *, runs_programs: bool) -> None:
        """Raises ValueError for a run whose reward runs programs, without a sandbox."""
        if runs_programs and self.kind is None:
            raise ValueError(
                "the reward 'unit_tests' runs programs of the model, but sandbox.kind is not set: set it to 'bwrap', "
                "and install it with apt-get install bubblewrap"
            )


NO_SANDBOX = SandboxConfig()
