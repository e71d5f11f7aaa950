"""What came of a run: its sentence, its ledger, when its steps ended, which of its processes are others than at its
start, and what differs from the run that nothing struck."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import torch

from miles_like.checkpoint.ledger_audit import audit
from tests.faults.driver import CHANGES
from tests.support.local_run import OF_SERVERS, tensors, untimed

_ROW = 1 << 15  # bytes that hold a row of metrics
_REBUILT = re.compile(r"Trainer ranks were rebuilt within ([\d.]+) s")


def sentence(log: Path) -> str:
    """The error with which a command ended; empty: none."""
    if not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ")[:600] if lines else ""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def replaced(run_dir: Path) -> list[str]:
    """Of driver, ranks, server and teacher those that are other processes than at the start of the run."""
    lives = lines_of(run_dir / "introduced.jsonl")
    out = {line["restarted"] for line in lines_of(run_dir / CHANGES) if "restarted" in line}
    if len(drivers := {life["driver"] for life in lives}) > 1:
        out.add("driver")
    if len({(life["driver"], life["rank"]) for life in lives}) > len(drivers):
        out.add("ranks")
    return sorted(out)


def recovery_s(run_dir: Path, log: Path, at: float) -> float | None:
    """Seconds until ranks were rebuilt, or from `at` until a server that was restarted served again; None: neither."""
    if found := _REBUILT.findall(log.read_text(errors="replace") if log.exists() else ""):
        return max(map(float, found))
    changes = [line for line in lines_of(run_dir / CHANGES) if line["at"] > at]
    for i, change in enumerate(changes):
        if change.get("restarted") == "server":
            states = [c for c in changes[i:] if c.get("server") == change["number"]]
            return next((round(c["at"] - at, 1) for c in states if c["state"] == "healthy"), None)
    return None


def compared(run_dir: Path, whole: Path, steps: int) -> dict[str, Any]:
    """Ledger, and what of the run differs from the undisturbed one."""
    try:
        found = audit(run_dir / "ledger.jsonl")
        closed = found.wrong or (f"{found.unfinished} unfinished lines" if found.unfinished else "closed")
        if not found.wrong and (not found.steps or found.steps[-1].step != steps):
            closed = f"ends at step {found.steps[-1].step if found.steps else 0} of {steps}"
    except (OSError, ValueError) as e:
        return {"ledger": str(e), "differs": ["everything"]}
    return {"ledger": closed, "differs": differences(run_dir, whole, steps)}


def differences(run_dir: Path, whole: Path, steps: int) -> list[str]:
    """Which of samples, ledger, metrics (but of publications) and weights differ; empty: it is bitwise the same."""
    out = []
    with contextlib.suppress(FileNotFoundError):
        for step in range(1, steps + 1):
            kept = [(d / "rollouts" / f"step_{step}.jsonl") for d in (run_dir, whole)]
            if kept[0].read_bytes() != kept[1].read_bytes():
                out.append(f"samples of step {step}")
        if (run_dir / "ledger.jsonl").read_bytes() != (whole / "ledger.jsonl").read_bytes():
            out.append("ledger")
        if untimed(run_dir / "metrics.jsonl", *OF_SERVERS) != untimed(whole / "metrics.jsonl", *OF_SERVERS):
            out.append("metrics")
        found, want = (tensors(d / "checkpoints" / f"step_{steps}" / "trainer") for d in (run_dir, whole))
        same = found.keys() == want.keys() and all(_equal(x, want[name]) for name, x in found.items())
        return out if same else [*out, "weights"]
    return [*out, "files are missing"]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)))


class Rows:
    """When the rows of metrics.jsonl of further steps were there. A context manager."""

    def __init__(self, run_dir: Path) -> None:
        self._file, self._over = run_dir / "metrics.jsonl", threading.Event()
        self.seen: list[tuple[float, int]] = []  # (when, step), also of rows that were taken back
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.look()

    def look(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            with self._file.open("rb") as rows:
                rows.seek(max(0, rows.seek(0, 2) - _ROW))
                *_, last = rows.read().splitlines() or [b""]
            step = int(json.loads(last)["step"])
            if not self.seen or self.seen[-1][1] != step:
                self.seen.append((time.monotonic(), step))

    def until_next(self, at: float) -> float | None:
        """Seconds from a moment to the end of the step that was under way; None: it did not end."""
        before = max((step for when, step in self.seen if when <= at), default=0)  # which is written before step 1
        later = [when - at for when, step in self.seen if when > at and step > before]
        return round(later[0], 1) if later else None

    def __enter__(self) -> Rows:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()
