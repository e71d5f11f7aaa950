"""Reads the routes of a sample from the cache and encodes them for a reply."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pybase64
import torch
from numpy.typing import NDArray

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.device.transfers import HOST, Transfers
from rollout.wire.generate import RowVersions, WireSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingRows:
    """Captured routes of consecutive positions of a sample, from the first requested one on."""

    experts: NDArray[np.int32]  # [rows, layers, K]
    epochs: NDArray[np.int32]  # [rows] epochs of the weights, see KVCache
    gates: NDArray[np.float32] | None  # [rows, layers, K], if they are kept
    one_epoch: bool  # True: all rows are of one epoch; False: they may be of several

    def __len__(self) -> int:
        return len(self.experts)

    def append(self, more: RoutingRows) -> RoutingRows:
        gates = None
        if self.gates is not None and more.gates is not None:
            gates = np.concatenate([self.gates, more.gates])
        return RoutingRows(
            experts=np.concatenate([self.experts, more.experts]),
            epochs=np.concatenate([self.epochs, more.epochs]),
            gates=gates,
            one_epoch=False,
        )


class WireRoutes(NamedTuple):
    """The routes of one sample, encoded for a reply."""

    experts: str
    versions: RowVersions
    gates: str | None


class RouteCapture:
    """Reads routes from cache slots and maps epochs to weight versions."""

    def __init__(self, cache: KVCache, version: str, transfers: Transfers = HOST) -> None:
        assert cache.routing is not None, "a cache that keeps no expert ids"
        self._cache, self._transfers = cache, transfers
        self._versions = [version]  # of each epoch of the cache

    def next_epoch(self, version: str) -> None:
        self._versions.append(version)

    def read(self, slots: Sequence[NDArray[np.int64]]) -> list[RoutingRows]:
        """The routes of several samples, given the slots [rows] of each, in one pass: hundreds may end in a step."""
        at, cache = torch.from_numpy(np.concatenate(slots)), self._cache
        assert cache.routing is not None
        (there,) = self._transfers.send(at)
        kept = [t.index_select(0, there) for t in (cache.routing, cache.gates) if t is not None]
        # arrays of the copies only: memory that an array refers to cannot be freed, and the cache's is
        experts, *found = (t.numpy() for t in self._transfers.fetch(*kept))
        gates, epochs = found[0] if found else None, cache.epochs.index_select(0, at).numpy()
        one_epoch = bool((epochs == epochs[:1]).all())
        edges = itertools.pairwise(itertools.accumulate(map(len, slots), initial=0))
        return [
            RoutingRows(
                experts=experts[a:b],
                epochs=epochs[a:b],
                gates=None if gates is None else gates[a:b],
                one_epoch=one_epoch,
            )
            for a, b in edges
        ]

    def encode(self, rows: RoutingRows, start: int, *, gates: bool) -> WireRoutes:
        """Encodes rows whose first is at position `start`. gates: whether to include gate weights, if kept."""
        return WireRoutes(
            experts=_base64(rows.experts),
            versions=self._row_versions(rows, start),
            gates=_base64(rows.gates) if gates and rows.gates is not None else None,
        )

    def _row_versions(self, rows: RoutingRows, start: int) -> RowVersions:
        epochs = rows.epochs
        if not len(rows):
            return ()
        if rows.one_epoch:
            return self._versions[int(epochs[0])]
        edges = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(rows)]
        return tuple(WireSpan(self._versions[epochs[a]], start + a, start + b) for a, b in itertools.pairwise(edges))


def _base64(rows: NDArray[np.int32] | NDArray[np.float32]) -> str:
    return pybase64.b64encode_as_string(rows.data)
