"""Replacements of functions whose results depend on the values of tensors: micro-batches, statistics, random states.

A micro-batch is cut for the rank by the trainer's own code, on real tensors; the model then gets fake ones of the same
shapes.

Letters: T packed tokens, L MoE layers, K experts per token, D depths of multi-token prediction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_bridge.fake.substitutes.facts import Pack
from megatron_bridge.fake.substitutes.substitute import Substitute
from megatron_bridge.fake.substitutes.tensors import RankMode, outside
from miles_like.types import LossInputs, LossOutput, MicroBatch, Stat
from routing_replay.align import padding_ids
from routing_replay.checksums import row_checksums
from routing_replay.trace import RoutingTrace

_STREAMS = ("tokens", "labels", "positions", "loss_mask", "advantages", "rollout_logprobs")
_STEP = "megatron_bridge.step.step"
_RANDOM = "megatron.core.tensor_parallel.random"


@dataclass(slots=True)
class StepFacts:
    """loss_tokens: of the mini-batch that is trained; rows: that a rank passes to the next pipeline stage."""

    loss_tokens: int = 1
    rows: int = 0
    hidden: int = 0


class PolicyGradient:
    """-log p * advantage, the simplest loss function that a trainer computes."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return -inputs.logprobs * inputs.advantages, {}


def micro_batch(
    pack: Pack, *, number: int, vocab: int, layers: tuple[int, ...], experts: int, top_k: int
) -> MicroBatch:
    """A micro-batch of real tensors with the lengths of `pack`. layers: the model's MoE layers, whose routes use every
    expert equally often; (): no routes."""
    lengths = torch.tensor(pack.lengths)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in pack.lengths])
    last = torch.cat([torch.arange(n) >= n - max(1, round(n * pack.loss_share)) for n in pack.lengths])
    tokens = (positions * 7 + number) % vocab
    routing = None
    if layers:
        ids = padding_ids(pack.tokens, num_layers=len(layers), top_k=top_k, num_experts=experts).contiguous()
        sums = row_checksums(tokens, ids, layers, positions=positions)
        routing = RoutingTrace(experts=ids, layers=layers, num_experts=experts, checksums=sums)
    return MicroBatch(
        samples=tuple(f"fake/{number}/{i}" for i in range(len(pack.lengths))),
        tokens=tokens,
        labels=tokens.roll(-1),
        positions=positions,
        cu_seqlens=ends,
        loss_mask=last,
        advantages=torch.ones(pack.tokens),
        rollout_logprobs=torch.zeros(pack.tokens),
        routing=routing,
    )


def number_substitutes(mode: RankMode, facts: StepFacts) -> tuple[Substitute, ...]:
    """The replacements for one executed rank."""
    samples, statistics, random = "real samples", "statistics", "random states"
    return (
        Substitute(f"{_STEP}:Step", "_shards", samples, outside),
        Substitute(_STEP, "shard", samples, lambda stock: _fed(stock, mode)),
        Substitute("megatron_bridge.model.mtp", "shift_labels", samples, _shifted),
        Substitute(
            "megatron_bridge.model.build:PolicyModel",
            "_postprocess",
            "rows with loss",
            lambda stock: _rows_with_loss(stock, mode),
        ),
        Substitute(f"{_STEP}:Step", "_routing", statistics, lambda _: lambda self, updated: {}),
        Substitute(_STEP, "reduce_stats", statistics, lambda _: lambda outputs, *rest: _stats(facts)),
        Substitute("megatron_bridge.trainer", "values", statistics, lambda _: lambda stats: {"train/loss": 1.0}),
        Substitute("megatron_bridge.trainer", "combine", statistics, lambda _: lambda several: dict(several[0])),
        Substitute(
            "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
            "_communicate_shapes",
            "shapes that stages announce",
            lambda _: lambda self, *a: ([facts.rows, 1, facts.hidden],) * 2,
        ),
        Substitute(f"{_RANDOM}:CudaRNGStatesTracker", "fork", random, lambda _: _unforked),
        Substitute(_RANDOM, "_fork_rng", random, lambda _: _unforked),
        Substitute(_RANDOM, "_get_all_rng_states", random, lambda _: lambda: (None, None, None)),
        Substitute(_RANDOM, "_set_all_rng_states", random, lambda _: lambda *states: None),
        Substitute(
            "megatron_bridge.device.parallel", "model_parallel_cuda_manual_seed", random, lambda _: lambda seed: None
        ),
    )


def _stats(facts: StepFacts) -> dict[str, Any]:
    return {"train/loss": Stat(1.0, facts.loss_tokens)}  # type: ignore[arg-type]


@contextlib.contextmanager
def _unforked(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _fed(stock: Any, mode: RankMode) -> Any:
    """`shard` of real tensors, then fake tensors in their place. Lengths of samples stay real: indices are made of
    them."""

    def shard(batch: MicroBatch, parallel: Any, device: Any, **settings: Any) -> Any:
        real = stock(batch, parallel, torch.device("cpu"), **settings)
        of = mode.of
        loss_mask: Any = of(real.loss_mask)
        loss_mask.rows_with_loss = int(real.loss_mask[0].sum())
        return replace(
            real,
            batch=replace(real.batch, **{name: of(getattr(real.batch, name)) for name in _STREAMS}),
            tokens=of(real.tokens),
            labels=of(real.labels),
            positions=of(real.positions),
            loss_mask=loss_mask,
            token_rows=of(real.token_rows),
            real=of(real.real),
            routing=None if real.routing is None else real.routing.map_rows(of),
        )

    return shard


def _shifted(stock: Any) -> Any:
    def shift_labels(labels: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, depths: int) -> tuple[Tensor, Tensor]:
        if not isinstance(loss_mask, FakeTensor):
            real: tuple[Tensor, Tensor] = stock(labels, loss_mask, cu_seqlens, depths)
            return real
        shape = (1 + depths, len(labels))
        return labels.new_zeros(shape), loss_mask.new_zeros(shape)

    return shift_labels


def _rows_with_loss(stock: Any, mode: RankMode) -> Any:
    def postprocess(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        rows = getattr(kwargs["loss_mask"], "rows_with_loss", 0)
        with mode.true_elements(rows):
            return stock(self, hidden_states, **kwargs)

    return postprocess
