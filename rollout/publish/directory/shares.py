"""Division of the published weights among the ranks that encode and write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from quant.stream import stored_name


class Shares:
    """Assigns each weight to one of `count` ranks, which encodes it: the rank with the fewest bytes so far, one rank
    for weights that share a scale. The result depends on the stream only, so the ranks need not communicate."""

    def __init__(self, count: int, spec: QuantSpec | None) -> None:
        self._spec, self._codec = spec, codec_or_none(spec)
        self._bytes = [0] * count
        self._owners: dict[tuple[str, ...], int] = {}  # of weights that share a scale
        # stored name -> dtype and shape, None where they are the codec's
        self._stored: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {}

    def owner(self, name: str, tensor: Tensor) -> int:
        """Call it for every weight, in the order of the stream."""
        bundle: tuple[str, ...] = ()
        if self._codec is not None and self._spec is not None and self._spec.covers(name, tensor.shape):
            bundle = tuple(self._codec.bundle_of(name))
            self._stored |= {stored_name(name, leaf): None for leaf in self._codec.leaves}
        else:
            self._stored[name] = tensor.dtype, tuple(tensor.shape)
        least = min(range(len(self._bytes)), key=self._bytes.__getitem__)
        rank = self._owners.setdefault(bundle, least) if len(bundle) > 1 else least
        self._bytes[rank] += tensor.nbytes
        return rank

    def of(self, rank: int, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The weights that `rank` encodes. Reads the whole stream, which is collective."""
        for name, tensor in weights:
            if self.owner(name, tensor) == rank:
                yield NamedTensor(name, tensor)

    def check_whole(self, written: HFCheckpoint) -> None:
        """Raises RuntimeError naming a tensor unless `written`, of all ranks, holds the tensors of this rank's stream:
        each stored one, and those that are not quantized with their dtype and shape."""
        self.check_names(written)
        ranks = len(self._bytes)
        for name, want in self._stored.items():
            info = written.info(name)
            if want is not None and want != (info.dtype, info.shape):
                raise RuntimeError(
                    f"the parts of {ranks} trainer ranks have {name} as {info.dtype} {list(info.shape)}, but the "
                    f"stream has {want[0]} {list(want[1])}: this is an internal error of miles-like: please "
                    "report it. Nothing was sent"
                )

    def check_names(self, written: HFCheckpoint) -> None:
        """`check_whole` of the names alone."""
        found, ranks = set(written.names()), len(self._bytes)
        if wrong := sorted(found ^ self._stored.keys()):
            side = "lack" if wrong[0] in self._stored else "have an unexpected tensor"
            raise RuntimeError(
                f"the parts of {ranks} trainer ranks {side} {wrong[0]}, {len(wrong)} tensors in all: this is an "
                "internal error of miles-like: please report it. Nothing was sent"
            )
