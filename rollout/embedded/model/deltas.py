"""Weights made of the served ones and a directory of differences (`rollout/wire/deltas.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from quant.formats.codec import QuantTensor
from quant.stream import stored_name
from rollout.embedded.model.weights import WeightStore
from rollout.wire.deltas import Delta, DeltaConfig, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDelta:
    """Weights to replace in `store`, all checked. The others are equal in both versions."""

    checkpoint: HFCheckpoint
    config: DeltaConfig
    store: WeightStore
    weights: Mapping[str, Tensor | QuantTensor]


def read_delta(checkpoint: HFCheckpoint, store: WeightStore) -> ReadDelta:
    """Applies a directory of differences to `store`, which is not changed. A weight of which a tensor differs is in new
    memory. Any thread may call it.

    Raises ValueError naming a tensor that is missing, unknown or damaged, or whose difference was made of other values.
    """
    config = DeltaConfig.of(checkpoint.config, checkpoint.path)
    own, found = store.stored_names(), {n for n in checkpoint.names() if not store.skips(n)}
    every = {name for names in own.values() for name in names}
    for names, which in ((every - found, "lack"), (found - every, "have an unexpected tensor")):
        if names:
            raise ValueError(
                f"the weight differences in {checkpoint.path} {which} {min(names)} ({len(names)} tensors in all), "
                "so they do not belong to this model: publish the whole weights"
            )

    def changed() -> Iterator[tuple[str, Tensor]]:
        for weight, names in own.items():
            deltas = {name: Delta(name, checkpoint.read(name)) for name in names}
            old = _on_host(store[weight])
            stored = dict.fromkeys(names, old) if isinstance(old, Tensor) else _stored(weight, old)
            new = {name: delta.applied(stored[name]) for name, delta in deltas.items()}
            if any(delta.kind is not Kind.SAME for delta in deltas.values()):
                for name, tensor in new.items():
                    store.check(name, tensor)
                    yield name, store.placed(tensor)

    return ReadDelta(checkpoint=checkpoint, config=config, store=store, weights=store.pair(changed()))


def _on_host(value: Tensor | QuantTensor) -> Tensor | QuantTensor:
    if isinstance(value, Tensor):
        return value.cpu()
    return QuantTensor({leaf: t.cpu() for leaf, t in value.stored.items()}, value.shape)


def _stored(weight: str, value: QuantTensor) -> dict[str, Tensor]:
    return {stored_name(weight, leaf): tensor for leaf, tensor in value.stored.items()}
