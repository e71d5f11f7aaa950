"""The phases of a starting server, read from its log.

The marks of a stock server are its log messages in SGLang 0.5.23 and vLLM 0.32; tests/sglang_cpu and tests/vllm_cpu
hold them to what these servers write. The embedded engine writes the marks of its phases itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollout.wire.log_marks import LOADED, LOADS

Limit = Literal["start", "load", "warmup"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. words: text that follows "server N is" in messages. marks: parts of log lines, each of which begins
    the phase."""

    words: str
    limit: Limit
    marks: tuple[str, ...] = ()


STOCK = (
    Phase("starting", "start"),
    Phase("connecting its ranks", "start", ("Init parallel begin",)),
    Phase("loading weights", "load", (LOADS,)),
    Phase("allocating its cache", "warmup", (LOADED,)),
    Phase("compiling kernels", "warmup", ("Entering DeepGEMM JIT Pre-Compile session", "Try DeepGEMM JIT Compiling")),
    Phase("capturing graphs", "warmup", ("prefill CUDA graph begin", "decode CUDA graph begin")),
    Phase("warming up", "warmup", ("Uvicorn running on", "The server is fired up and ready to roll!")),
)
VLLM = (
    Phase("starting", "start"),
    Phase("connecting its ranks", "start", ("world_size=",)),
    Phase("loading weights", "load", ("Starting to load model",)),
    Phase("allocating its cache", "warmup", ("Loading weights took", "Model loading took")),
    Phase("compiling kernels", "warmup", ("Using cache directory", "torch.compile takes")),
    Phase("capturing graphs", "warmup", ("Capturing CUDA graphs",)),
    Phase("warming up", "warmup", ("Starting vLLM API server", "Starting vLLM server")),
)
EMBEDDED = (
    Phase("starting", "start"),
    Phase("loading weights", "load", (LOADS,)),
    Phase("warming up", "warmup", (LOADED,)),
)

_TAIL = 1 << 16
# "ValueError: ...", "torch.OutOfMemoryError: ...", "[2026-01-01 12:00:00 TP0] ... error: ...", "error: ..."
_ERROR = re.compile(
    r"^(\[[^]]*\]\s*)?(([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt|Exit|Failure)\b|(fatal |runtime )?error\b)"
    r"|out of memory|\bKilled\b|Segmentation fault|\b(NCCL|CUDA|cuda\w+) ([Ee]rror|failure)",
    re.IGNORECASE,
)


class FollowedLog:
    """Reads a log as it grows. Phases only advance: the ranks of a server write into one log, each at its own time."""

    def __init__(self, log: Path, phases: tuple[Phase, ...], start: int = 0) -> None:
        """start: byte from which the lines are this server's."""
        self._log, self._phases = log, phases
        self._offset, self._rest = start, ""
        self._reached = 0

    def phase(self) -> Phase:
        """The last phase that has begun."""
        if self._log.exists():
            with self._log.open("rb") as f:
                f.seek(self._offset)
                new = f.read()
            self._offset += len(new)
            text = self._rest + new.decode("utf-8", "replace")
            self._rest = text[text.rfind("\n") + 1 :][-_TAIL:]
            later = range(len(self._phases) - 1, self._reached, -1)
            self._reached = next((i for i in later if any(m in text for m in self._phases[i].marks)), self._reached)
        return self._phases[self._reached]


def last_error(log: Path, start: int = 0) -> str:
    """The last line of a log that looks like an error; if there is none, the last line. start: byte from which the
    lines are a server's; those before are of one in whose place it was started."""
    if not log.exists():
        return "(no log)"
    with log.open("rb") as f:
        f.seek(max(start, log.stat().st_size - _TAIL))
        lines = [line.strip() for line in f.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines or ["(an empty log)"])[-1][:1000]


def log_of(url: str, logs: Path) -> Path:
    """The log of the server at `url`: `logs` itself unless it is a directory, else the file of the server's port that
    was written last, or the directory where there is none."""
    port = url.rpartition(":")[2]
    files = sorted(logs.glob(f"*_{port}*.log"), key=lambda p: p.stat().st_mtime) if logs.is_dir() else [logs]
    return (files or [logs])[-1]


def see_log(url: str, logs: Path | None) -> str:
    """Where to look after a failure, with the last error of the log. logs: the server's log, or its directory; None: it
    is not this run's server."""
    if logs is None:
        return "see its log"
    log = log_of(url, logs)
    return f"its log {log} says: {last_error(log)}" if log.is_file() else f"see {log}"
