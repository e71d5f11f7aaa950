"""What a command that writes gigabytes shows meanwhile: a bar on a terminal, lines in a pipe, nothing with --quiet.

Why it must hold: a conversion of an hour that prints nothing looks like one that hangs. That the bytes are those of the
output: tests/miles_like/pipeline/test_watched_work.py. Not covered: how often rich redraws.
"""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from miles_like.report.written import Written, held, progress_text

MIB = 1 << 20


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ((MIB, 4 * MIB, MIB, 2.0), "1.0 of 4.0 MiB (25%), 0.5 MB/s, 00:06 left"),
        ((3 << 30, 4 << 30, 1 << 30, 2.0), "3.0 of 4.0 GiB (75%), 536.9 MB/s, 00:02 left"),  # 2 GiB were there before
        ((2 << 30, 4 << 30, 0, 9.0), "2.0 of 4.0 GiB (50%)"),  # nothing to predict by
        ((4 * MIB, 4 * MIB, MIB, 1.0), "4.0 of 4.0 MiB (100%), 1.0 MB/s, 00:00 left"),
    ],
)
def test_a_line_has_what_is_done_the_speed_and_the_time_that_is_left(
    figures: tuple[int, int, int, float], text: str
) -> None:
    assert progress_text(*figures) == text


class Seen(io.StringIO):
    """Output in which a text is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def write(self, text: str) -> int:
        with self.changed:
            self.changed.notify_all()
            return super().write(text)

    def wait_for(self, pattern: str) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: re.search(pattern, self.getvalue()), 60), self.getvalue()
        return self.getvalue()


def test_a_pipe_gets_lines_while_the_files_grow(tmp_path: Path) -> None:
    """Those of folders too; a directory that is not there yet has no bytes."""
    out, directory = Seen(), tmp_path / "out.partial"
    with Written("converting", Console(file=out, width=20), line_s=0.0, poll_s=0.001)(directory, 4 * MIB):
        (directory / "hf").mkdir(parents=True)
        for i, name in enumerate(("a.tmp", "hf/b"), 1):
            (directory / name).write_bytes(bytes(MIB))
            out.wait_for(rf"\n {{12}}converting: {i}\.0 of 4\.0 MiB \({25 * i}%\), [\d.,]+ MB/s, [\d:]+ left\n")
        (directory / "a.tmp").write_bytes(bytes(5 * MIB))  # with the framing of files
        shown = out.wait_for("100%")
    assert "\x1b" not in shown and held(directory) == 6 * MIB and not re.search(r"1\d\d%", shown.replace("100%", ""))
    assert not [t for t in threading.enumerate() if t.name == "progress"]


def test_lines_are_seconds_apart(tmp_path: Path) -> None:
    """The clock tells 2 s more each time."""
    out, times = Seen(), iter(range(0, 10**9, 2))
    written = Written("quantizing", Console(file=out), clock=lambda: float(next(times)), poll_s=0.001)
    with written(tmp_path, MIB):
        out.wait_for(r"(?s)\n.*\n.*\n")
    lines = len(out.getvalue().splitlines())
    assert lines >= 3 and next(times) / 2 - 1 >= 3 * lines  # of three looks one is at least 5 s after the last line


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(tmp_path: Path) -> None:
    out = Seen()
    console = Console(file=out, force_terminal=True, width=100, legacy_windows=False)
    with Written("converting", console, line_s=0.0, poll_s=0.001)(tmp_path, 4 * MIB):
        (tmp_path / "a").write_bytes(bytes(MIB))
        shown = out.wait_for(r"1\.0/4\.0 MiB")
    assert "converting" in shown and "left" not in shown and out.getvalue().endswith("\x1b[2K")


def test_nothing_is_shown_where_it_is_not_wanted(tmp_path: Path) -> None:
    out = Seen()
    for console, total in ((Console(file=out, quiet=True), MIB), (Console(file=out), 0)):
        with Written("converting", console, line_s=0.0, poll_s=0.001)(tmp_path, total):
            assert not [t for t in threading.enumerate() if t.name == "progress"]
    assert out.getvalue() == ""


def test_what_fails_inside_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), Written("converting", Console(file=Seen()))(tmp_path, MIB):
        raise OSError("disk full")
    assert not [t for t in threading.enumerate() if t.name == "progress"]
