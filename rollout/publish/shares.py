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

    def owner(self, name: str, tensor: Tensor) -> int:
        """Call it for every weight, in the order of the stream."""
        bundle: tuple[str, ...] = ()
        if self._codec is not None and self._spec is not None and self._spec.covers(name, tensor.shape):
            bundle = tuple(self._codec.bundle_of(name))
        least = min(range(len(self._bytes)), key=self._bytes.__getitem__)
        rank = self._owners.setdefault(bundle, least) if len(bundle) > 1 else least
        self._bytes[rank] += tensor.nbytes
        return rank


def share_of(weights: Iterable[NamedTensor], rank: int, count: int, spec: QuantSpec | None) -> Iterator[NamedTensor]:
    """The weights that `rank` of `count` encodes. The whole stream is drained, which is collective."""
    shares = Shares(count, spec)
    for name, tensor in weights:
        if shares.owner(name, tensor) == rank:
            yield NamedTensor(name, tensor)
