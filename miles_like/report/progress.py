"""Progress of a run: a bar on a terminal, and a line now and then in a log during a long rollout."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LINE_S = 60.0  # between two lines of a rollout where the console is no terminal


class PhaseBar:
    """A progress bar that names the current phase; where the console is no terminal, a line for each minute of a
    rollout. clock: seconds."""

    def __init__(self, steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.fields[phase]:<9}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("train", total=steps, phase="")
        self._steps, self._console, self._clock = steps, console, clock
        self._step, self._printed = 0, clock()
        self._phase, self._since = "", self._printed

    def phase(self, step: int, name: str) -> None:
        """Shows that the run is in phase `name` after `step` steps."""
        self._step, self._printed = step, self._clock()
        self._phase, self._since = name, self._printed
        self._progress.update(self._task, completed=step, phase=name)

    @property
    def under_way(self) -> tuple[str, float]:
        """The phase that goes on, and for how many seconds."""
        return self._phase, self._clock() - self._since

    def groups(self, complete: int, needed: int) -> None:
        """Shows how many of a step's groups are complete. Call it often during the phase `rollout`."""
        text = f"rollout {min(complete, needed)}/{needed} groups"
        self._progress.update(self._task, phase=text)
        if not self._console.is_terminal and (now := self._clock()) - self._printed >= LINE_S:
            self._printed = now
            line = f"step {self._step + 1:>{len(str(self._steps))}}/{self._steps} {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> PhaseBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
