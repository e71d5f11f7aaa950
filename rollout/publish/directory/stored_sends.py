"""Send the weights of a directory in buckets: the part of a publication by "tensor" or "distributed" that needs no
trainer.

Trainer ranks write the version as for `publish.path` "disk"; this process reads it and sends it as a rank would, so
that servers need not see the directory, and tensors that have not changed are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from rollout.publish.buckets import Fused, module_of
from rollout.publish.directory.loads import DirectoryLoads
from rollout.publish.publication import PublishTarget, Sent
from rollout.publish.publisher import TensorPublisher


class StoredSends(DirectoryLoads):
    """Publications of `version_N` directories to the servers of `target`, by its path. One thread calls at a time."""

    def __init__(self, target: PublishTarget, directory: Path) -> None:
        """target: handles are of this host's memory, if servers open some."""
        super().__init__(target, directory)
        self._publisher = _Encoded(target, send=True)

    def load(self, path: Path, version: int, nbytes: int) -> Sent:
        """As `DirectoryLoads.load`. The bytes are those that were sent."""
        whole = HFCheckpoint(path)
        report = self._publisher.publish(_in_units(whole, self._target.fused), version=version)
        return Sent(report.bytes, report.pause_seconds, report.checksums, report.failed, decoding=report.decoding)


class _Encoded(TensorPublisher):
    """Of a stream of stored tensors, in the order of `_in_units`."""

    def _stored(self, stream: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        return stream


def _in_units(whole: HFCheckpoint, fused: Fused) -> Iterator[NamedTensor]:
    """Every tensor, those of a module next to each other, and the modules of a `fused` tuple too."""
    first_of = {module_of(name): module_of(names[0]) for names in fused for name in names}
    for name in sorted(whole.names(), key=lambda n: (first_of.get(module_of(n), module_of(n)), module_of(n), n)):
        yield NamedTensor(name, whole.read(name))
