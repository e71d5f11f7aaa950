"""Trainer and servers compute one text, and give the residual stream at every layer.

Letters: S tokens, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_like.alignment.evidence import SampleTokens
from miles_like.alignment.layers.compare import LayerComparison, compare_states
from miles_like.alignment.live import LiveTrainer
from miles_like.types import Scored, TrainBatch
from rollout.sglang.client import SGLangClient
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillDown:
    """text: [S] int64. values: numbers that its states have, [S, 2L+1, H]. rounding, of_stream: as in
    `compare_states`."""

    trainer: LiveTrainer
    text: Tensor
    values: int
    rounding: float
    of_stream: float

    async def of(self, clients: Sequence[SGLangClient]) -> list[LayerComparison]:
        """Of each server, with the routes that it chose. Raises RolloutError for one that gives no states."""
        return [await self._of(client) for client in clients]

    async def _of(self, client: SGLangClient) -> LayerComparison:
        theirs, routes = await client.layer_states(self.text, values=self.values)
        return self.compared(client.url, await self.by_trainer(routes), theirs)

    def compared(self, url: str, ours: Tensor, theirs: Tensor) -> LayerComparison:
        """ours: [S-1, 2L+1, H], theirs: [S, 2L+1, H]. Raises ValueError for states of another model."""
        if ours.shape[1:] != theirs.shape[1:]:
            raise ValueError(
                f"server {url} has {theirs.shape[1]} states of {theirs.shape[2]} values per token, but the "
                f"trainer has {ours.shape[1]} of {ours.shape[2]}: use a server of the trainer's model"
            )
        parts = compare_states(ours, theirs[: len(ours)], rounding=self.rounding, of_stream=self.of_stream)
        return LayerComparison(url=url, tokens=len(ours), parts=parts)

    async def by_trainer(self, routes: RoutingTrace | None) -> Tensor:
        """[S-1, 2L+1, H] of the trainer, which is fed all tokens but the last. routes: replayed; None: its own."""
        mask = torch.ones(len(self.text), dtype=torch.bool)
        mask[0] = False
        tokens = SampleTokens(ids=(self.text,), masks=(mask,))
        replayed = None if routes is None or self.trainer.shape is None else [routes.experts.long()]
        batch, scores = await self.trainer.states(tokens, routes=replayed)
        return joined_states(batch, scores, len(self.text) - 1)


def joined_states(batch: TrainBatch, scores: Sequence[tuple[int, Scored]], tokens: int) -> Tensor:
    """[S-1, 2L+1, H] fp32 of the one sample in `batch`, from the (DP shard, result) of every rank, each of which has
    part of its rows and layers."""
    (shard, micro), *more = [
        (dp, i) for dp, row in enumerate(batch.grid) for i, m in enumerate(row) if any(m.samples) and m.loss_mask.any()
    ]
    assert not more, "one sample in one micro-batch"
    parts = [scored.states[micro] for dp, scored in scores if dp == shard]
    count = 1 + max(state for part in parts for state in part.states)
    out = torch.zeros(tokens, count, parts[0].values.shape[-1])
    found = torch.zeros(tokens, count, dtype=torch.bool)
    for part in parts:
        real = part.fed.tokens >= 0
        at = part.fed.tokens[real][:, None], torch.tensor(part.states)[None, :]
        out[at], found[at] = part.values[real].float(), True
    assert bool(found.all()), "a row or state that no rank recorded"
    return out
