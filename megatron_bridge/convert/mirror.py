"""Converts units on a machine that does not see the source: the bytes of a unit are pulled into files with holes.

A file of the mirror has the size and the modification time of the source's, so that a unit's hash is the same
everywhere, and the bytes of the unit's tensors at their true places. It is removed when the unit has been written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_bridge.convert.to_megatron import Conversion
from megatron_bridge.convert.units import UnitWork
from miles_like.hf.checkpoint import TensorInfo

Pull = Callable[[str, int, int], bytes]  # (file name, offset, bytes) -> bytes of the source, at most so many
BLOCK = 16 << 20  # bytes of one pull


def source_times(job: Conversion) -> dict[str, tuple[int, int]]:
    """File name -> (size, modification time in ns) of the source's weight files, for `MirroredWork`."""
    files = {info.file for info in map(job.source.hf.info, job.source.hf.names())}
    stats = {file.name: file.stat() for file in files}
    return {name: (st.st_size, st.st_mtime_ns) for name, st in stats.items()}


@dataclass(frozen=True)
class MirroredWork:
    """`UnitWork` whose source is pulled. directory: where the units are written, and the mirror meanwhile."""

    job: Conversion
    directory: Path
    times: Mapping[str, tuple[int, int]]
    pull: Pull

    def __call__(self, number: int) -> None:
        self._mirror.mkdir(parents=True, exist_ok=True)
        try:
            for info in self.job.read_by(number):
                self._fetch(info)
            for path in self._mirror.iterdir():
                mtime_ns = self.times[path.name][1]
                os.utime(path, ns=(mtime_ns, mtime_ns))
            self._work(number)
        finally:
            shutil.rmtree(self._mirror)

    @cached_property
    def _mirror(self) -> Path:
        return self.directory / f".source-{os.getpid()}"

    @cached_property
    def _work(self) -> UnitWork:
        source = replace(self.job.source, hf=self.job.source.hf.at(self._mirror))
        return UnitWork(replace(self.job, source=source), self.directory)

    def _fetch(self, info: TensorInfo) -> None:
        name, done = info.file.name, 0
        with (self._mirror / name).open("ab") as made:
            made.truncate(self.times[name][0])
        with (self._mirror / name).open("r+b") as out:
            out.seek(info.offset)
            while done < info.nbytes:
                data = self.pull(name, info.offset + done, min(BLOCK, info.nbytes - done))
                if not data:
                    raise ValueError(f"{info.file} ended {info.nbytes - done} bytes early: it was truncated meanwhile")
                out.write(data)
                done += len(data)
