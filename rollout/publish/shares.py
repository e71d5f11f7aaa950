"""Division of the published weights among the ranks that encode and write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from miles_like.types import NamedTensor
from quant.registry import codec_or_none
from quant.spec import QuantSpec


class Shares:
    """Which of `count` ranks encodes a weight: that with the fewest bytes so far, and for weights that share a scale
    one. The answers depend on the stream alone, so that ranks need not agree on them."""

    def __init__(self, count: int, spec: QuantSpec | None) -> None:
        self._spec, self._codec = spec, codec_or_none(spec)
        self._bytes = [0] * count
        self._owners: dict[tuple[str, ...], int] = {}  # of weights that share a scale
        self.modules: set[str] = set()  # of all weights

    def owner(self, name: str, tensor: Tensor) -> int:
        """Call it for every weight, in the order of the stream."""
        bundle: tuple[str, ...] = ()
        if self._codec is not None and self._spec is not None and self._spec.covers(name, tensor.shape):
            bundle = tuple(self._codec.bundle_of(name))
        least = min(range(len(self._bytes)), key=self._bytes.__getitem__)
        rank = self._owners.setdefault(bundle, least) if len(bundle) > 1 else least
        self._bytes[rank] += tensor.nbytes
        self.modules.add(name.rpartition(".")[0])
        return rank

    def of(self, rank: int, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Those that `rank` encodes. The whole stream is drained, which is collective."""
        for name, tensor in weights:
            if self.owner(name, tensor) == rank:
                yield NamedTensor(name, tensor)

    def check_whole(self, stored: Iterable[str]) -> None:
        """Raises RuntimeError naming a module unless `stored`, of all ranks, are tensors of the stream's modules."""
        found = {name.rpartition(".")[0] for name in stored}
        if wrong := sorted(found ^ self.modules):
            side = "lack" if wrong[0] in self.modules else "have too much:"
            raise RuntimeError(
                f"the parts of {len(self._bytes)} trainer ranks {side} {wrong[0]}, {len(wrong)} modules in all: their "
                "streams differ, which is a fault of this program. Nothing was sent"
            )
