"""Progress of a command that writes a directory of gigabytes: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from miles_like.report.console import duration

LINE_S = 5.0  # between two lines
POLL_S = 0.5  # between two looks at the directory


class Written:
    """Call it for a context in which others write a directory, in this process or others: it looks at the files, so
    work that is shared by processes or resumed has one figure. what: the first words of a line. clock: seconds."""

    def __init__(
        self,
        what: str,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        line_s: float = LINE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._what, self._console, self._clock = what, console, clock
        self._line_s, self._poll_s = line_s, poll_s

    @contextmanager
    def __call__(self, directory: Path, total: int) -> Iterator[None]:
        """total: bytes that the files of `directory` will have."""
        if self._console.quiet or total <= 0:
            yield
            return
        ended = threading.Event()
        columns = (TextColumn(self._what), BarColumn(), DownloadColumn(binary_units=True))
        live = self._console.is_terminal
        bar = Progress(
            *columns,
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not live,
        )
        start = held(directory), self._clock()  # here: what is written before the thread runs is new
        follower = threading.Thread(
            target=self._follow, args=(directory, total, start, bar, ended, live), name="progress", daemon=True
        )
        with bar:
            follower.start()
            try:
                yield
            finally:
                ended.set()
                follower.join()

    def _follow(
        self,
        directory: Path,
        total: int,
        start: tuple[int, float],
        bar: Progress,
        ended: threading.Event,
        live: bool,
    ) -> None:
        first, began = start
        task, printed = bar.add_task(self._what, total=total, completed=first), began
        while not ended.wait(self._poll_s):
            done, now = min(held(directory), total), self._clock()
            first = min(first, done)  # what a killed command left is removed
            bar.update(task, completed=done)
            if not live and now - printed >= self._line_s:
                printed = now
                line = f"{'':12}{self._what}: {progress_text(done, total, done - first, now - began)}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def held(directory: Path) -> int:
    """Bytes of the files in a directory, which others write, rename and remove; 0 where there is none."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # removed since it was listed
            continue
    return total


def progress_text(done: int, total: int, new: int, seconds: float) -> str:
    """`3.2 of 12.8 GiB (25 %), 410.0 MB/s, 00:24 left`. new: bytes of the last `seconds`, by which the rest is
    predicted; of 0 nothing is."""
    unit, name = (1 << 30, "GiB") if total >= 1 << 30 else (1 << 20, "MiB")
    text = f"{done / unit:.1f} of {total / unit:.1f} {name} ({done / total:.0%})"
    if new <= 0 or seconds <= 0:
        return text
    rate = new / seconds
    return f"{text}, {rate / 1e6:,.1f} MB/s, {duration((total - done) / rate)} left"
