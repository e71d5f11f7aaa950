"""A tiny model's batches and trainers, for tests. Letters: T packed tokens, L MoE layers, K experts a token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.config import ParallelConfig, TrainerConfig
from miles_like.types import LossInputs, LossOutput, MicroBatch, Reduce, Stat
from routing_replay.checksums import row_checksums
from routing_replay.trace import RoutingTrace

TINY = Path(__file__).parents[2] / "configs" / "tiny" / "model.json"
LAYERS, EXPERTS, TOP_K, VOCAB = (1, 2), 16, 4, 128


def hf_dir(where: Path, config: dict[str, Any] | None = None) -> str:
    """A directory that holds `config`, else the tiny model's, as config.json."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(config or hf_config()))
    return str(where)


def config(hf: str, *, dtype: str = "float32", mode: str = "r3", lr: float = 1e-3, **more: Any) -> TrainerConfig:
    layout = {k: more.pop(k) for k in list(more) if k in ParallelConfig.model_fields}
    return TrainerConfig.model_validate(
        {
            "hf_config": hf,
            "parallel": layout,
            "precision": {},
            # a large eps: where a gradient is rounding noise, Adam's step is its sign, and no two layouts would agree
            "optimizer": {"lr": lr, "weight_decay": 0.1, "eps": 1e-4},
            "replay": {"mode": mode},
            "params_dtype": dtype,
            **more,
        }
    )


def sample(
    seed: int, length: int, *, learnable: bool = False, layers: tuple[int, ...] = LAYERS, experts: int = EXPERTS
) -> MicroBatch:
    """One sample of `length` inputs, its second half with loss; the routes of `layers`, if any, are random sets."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCAB, (length + 1,), generator=g)
    if learnable:  # the next token is a function of the last
        for i in range(length):
            tokens[i + 1] = (tokens[i] * 7 + 3) % VOCAB
    ids = torch.rand(length, len(layers), experts, generator=g).topk(TOP_K, -1).indices.to(torch.uint8)
    return MicroBatch(
        samples=(f"toy/{seed}",),
        tokens=tokens[:-1],
        labels=tokens[1:],
        positions=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        loss_mask=torch.arange(length) >= length // 2,
        advantages=torch.randn(1, generator=g).expand(length).contiguous(),
        rollout_logprobs=-5 * torch.rand(length, generator=g),
        routing=RoutingTrace(experts=ids, layers=layers, num_experts=experts).with_checksums(tokens[:-1])
        if layers
        else None,
    )


def samples(n: int, seed: int = 0, **more: Any) -> list[MicroBatch]:
    return [sample(seed * 1000 + i, 5 + (i * 7 + seed) % 13, **more) for i in range(n)]


def pack(parts: Sequence[MicroBatch]) -> MicroBatch:
    """Samples end to end in one micro-batch."""
    ends = torch.tensor([0] + [len(p.tokens) for p in parts]).cumsum(0).to(torch.int32)
    names = ("tokens", "labels", "positions", "loss_mask", "advantages", "rollout_logprobs")
    joined: dict[str, Any] = {name: torch.cat([getattr(p, name) for p in parts]) for name in names}
    routing = [p.routing for p in parts if isinstance(p.routing, RoutingTrace)]
    return MicroBatch(
        samples=tuple(name for p in parts for name in p.samples),
        cu_seqlens=ends,
        routing=RoutingTrace.concat(routing) if len(routing) == len(parts) else None,
        **joined,
    )


def grid(parts: Sequence[MicroBatch], *, dp: int, micros: int) -> tuple[list[list[MicroBatch]], int]:
    """([dp][micro] micro-batches holding all the samples, number of loss tokens)."""
    cells = [pack(parts[i :: dp * micros]) for i in range(dp * micros)]
    rows = [cells[d * micros : (d + 1) * micros] for d in range(dp)]
    return rows, sum(int(p.loss_mask.sum()) for p in parts)


def with_routes(batch: MicroBatch, ids: Tensor | None) -> MicroBatch:
    """`batch` with other routes, as if they had come with its tokens: ids [T, L, K], or None for none."""
    if ids is None:
        return replace(batch, routing=None)
    trace = batch.routing
    assert isinstance(trace, RoutingTrace)
    return with_trace(batch, replace(trace, experts=ids.to(trace.experts.dtype)))


def with_trace(batch: MicroBatch, trace: RoutingTrace) -> MicroBatch:
    """`batch` with `trace` [T, L, K], sealed to its tokens."""
    gates, positions = trace.weights, batch.positions
    seals = row_checksums(batch.tokens, trace.experts, trace.layers, weights=gates, positions=positions)
    return replace(batch, routing=replace(trace, checksums=seals))


def own_routes(t: Any, row: Sequence[MicroBatch], tokens: int) -> list[Tensor]:
    """The routes that a trainer of one rank itself chooses, [T, L, K] for each micro-batch, in mode "off"."""
    seen: dict[tuple[int, int], Tensor] = {}
    replay = t._step.replay
    stock = replay.route

    def route(layer: int, scores: Any, native: Any) -> Any:
        picked, ids = stock(layer, scores, native)
        seen[replay._micro, layer] = ids
        return picked, ids

    replay.route = route
    t.evaluate(row, tokens)
    del replay.route
    return [torch.stack([seen[m, layer] for layer in replay.layers], 1) for m in range(len(row))]


class PolicyGradient:
    """-advantage * ratio, with an extra entropy statistic: enough to see signs, masks and reductions."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        logprobs, loss_mask = inputs.logprobs, inputs.loss_mask
        gap = torch.where(loss_mask, logprobs.detach() - inputs.rollout_logprobs, 0.0)
        least = torch.where(loss_mask, logprobs.detach(), math.inf)
        stats = {
            "train/entropy": Stat((inputs.entropy * loss_mask).sum(), loss_mask.sum()),
            "mismatch/logprob_abs_diff_max": Stat(gap.abs().max(), loss_mask.sum(), Reduce.MAX),
            "mismatch/logprob_abs_diff_sum": Stat(gap.abs().sum(), loss_mask.sum(), Reduce.SUM),
            "train/logprob_min": Stat(least.min(), loss_mask.sum(), Reduce.MIN),
        }
        return -logprobs * (inputs.advantages + 0.5), stats


class NegativeLogLikelihood(PolicyGradient):
    def __call__(self, inputs: LossInputs) -> LossOutput:
        return -inputs.logprobs, super().__call__(inputs)[1]


@contextmanager
def trainer(cfg: TrainerConfig, rank: int, world_size: int, port: int, loss: Any = None) -> Iterator[Any]:
    """A MegatronTrainer of this rank, closed afterwards."""
    from megatron_bridge.trainer import MegatronTrainer

    t = MegatronTrainer(
        cfg, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, loss=loss or PolicyGradient()
    )
    try:
        yield t
    finally:
        t.close()


def scramble(t: Any) -> None:
    """Norm weights, biases, a scalar head away from their constant starts, the same on every rank that holds them."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, x in sorted([*t.models[0].named_parameters(), *t.models[0].named_buffers()]):
            if "layernorm" in name or name.endswith("bias") or x.shape[:1] == (1,):
                x.add_(0.1 * torch.randn(x.shape, generator=g))
    t.optimizer.reload_model_params()


def hf_config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TINY.read_text())
    return found
