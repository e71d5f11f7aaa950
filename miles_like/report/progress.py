"""Progress of a run on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class PhaseBar:
    """A progress bar that names the current phase; prints nothing where the console is no terminal."""

    def __init__(self, steps: int, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.fields[phase]:<9}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("train", total=steps, phase="")

    def phase(self, step: int, name: str) -> None:
        """Shows that the run is in phase `name` after `step` steps."""
        self._progress.update(self._task, completed=step, phase=name)

    def __enter__(self) -> PhaseBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
