"""How far a run is, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class PhaseBar:
    """A progress bar with the phase at hand; silent where the console is no terminal."""

    def __init__(self, steps: int, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.fields[phase]:<9}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._steps = steps

    def __enter__(self) -> tuple[Progress, Any]:
        self._progress.start()
        return self._progress, self._progress.add_task("train", total=self._steps, phase="")

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
