"""A file that is cut back and written on is the file that was written in one go; another file is refused.

Not covered: that bytes reach the disk.
"""

from __future__ import annotations

import hashlib

from miles_like.storage.appended_file import AppendedFile, truncate_to
from miles_like.storage.checkpoint_files import DamagedError
from tests.support.refusals import refuses


def test_a_position_is_of_all_that_is_there_and_what_comes_later_can_be_cut_off(tmp_path):
    path = tmp_path / "new" / "lines"
    first = AppendedFile(path)
    first.write("ä\n")
    early = first.position
    first.write("two\n")
    first.sync()
    assert (early.bytes, early.sha256) == (3, hashlib.sha256("ä\n".encode()).hexdigest())
    whole = first.position
    first.write("half a li")
    first.close()
    truncate_to(path, whole)
    second = AppendedFile(path)
    assert second.position == whole
    second.write("four\n")
    assert second.position.sha256 == hashlib.sha256("ä\ntwo\nfour\n".encode()).hexdigest()
    second.close()
    truncate_to(path, early)
    assert path.read_text() == "ä\n"


def test_another_file_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "lines"
    file = AppendedFile(path)
    file.write("one\ntwo\n")
    at = file.position
    file.close()
    path.write_text("one\ntw2\nmore")
    with refuses(DamagedError, "--fresh"):
        truncate_to(path, at)
    assert path.read_text() == "one\ntw2\nmore"
    path.write_text("one\n")
    with refuses(DamagedError, 4, 8):
        truncate_to(path, at)
    path.unlink()
    with refuses(DamagedError, 8, "--fresh"):
        truncate_to(path, at)
    file = AppendedFile(path)
    nothing = file.position
    file.close()
    path.unlink()
    truncate_to(path, nothing)
    assert not path.exists()
