"""A program to run in a sandbox, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from miles_like.limits.regular_files import is_inner_name


class Status(StrEnum):
    """How a program ended. Only EXIT with code 0 is a success."""

    EXIT = "exit"
    SIGNAL = "signal"
    TIME = "time"  # it was ended at its limit of processor time or of time by the clock
    MEMORY = "memory"  # it was ended at its limit of memory, or by an uncaught MemoryError
    OUTPUT = "output"  # it wrote more than the limit of output


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`code`, a Python program, or `argv`, a command; one of them. Its working directory has `files` alone."""

    code: str = ""
    argv: tuple[str, ...] = ()  # "python" as the first word: the sandbox's interpreter
    files: Mapping[str, bytes] = field(default_factory=dict)  # relative path -> content
    stdin: bytes = b""
    wall_s: float | None = None  # a shorter time limit than the sandbox's

    def __post_init__(self) -> None:
        if bool(self.code) == bool(self.argv):
            raise ValueError(f"a program has code {self.code[:40]!r} and argv {self.argv!r}: set one of them")
        wrong = next((path for path in self.files if not is_inner_name(path)), None)
        if wrong is not None:
            raise ValueError(f"the file {wrong!r} of a program is not a relative path without '..': rename it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The end of a program. Texts are decoded as UTF-8 with replacements and cut at the limit of output."""

    status: Status
    code: int  # exit status; for SIGNAL the signal's number; else -1
    stdout: str
    stderr: str
    seconds: float  # by the clock

    @property
    def succeeded(self) -> bool:
        return self.status is Status.EXIT and self.code == 0


class SandboxLost(Exception):
    """The sandbox ended or does not answer: nothing is known about the program. The text is a few words."""


class Sandbox(Protocol):
    """Runs programs, several at the same time. One of them sees nothing of another, or of an earlier one."""

    async def run(self, program: Program) -> Ran:
        """Raises SandboxLost, and ValueError for files that exceed the disk. When cancelled, the program is ended."""

    async def close(self) -> None:
        """End the programs that run. A closed sandbox must not be used."""
