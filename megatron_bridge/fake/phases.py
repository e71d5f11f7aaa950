"""Executes one rank of a trainer through the phases of its life and counts bytes and operations.

building: the constructor. training: one optimizer step of `micro_batches` packs, after the optimizer's state exists.
asleep: after `sleep`. publishing: the largest chunk of each kind that this rank's pipeline stage gathers for an export,
of a rank that sleeps if trainer and engine share the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_bridge.device.device import DeviceEnv
from megatron_bridge.device.parallel import close_parallel
from megatron_bridge.fake.attribution import (
    ACTIVATIONS,
    MOMENTS,
    REFERENCES,
    attribute,
    attribute_asleep,
    attribution_substitutes,
    prime_hybrid,
)
from megatron_bridge.fake.live_bytes import LiveBytes
from megatron_bridge.fake.substitutes.cuda import cuda_substitutes
from megatron_bridge.fake.substitutes.facts import Balance, CoreAttention, RankCounts, RankRun
from megatron_bridge.fake.substitutes.process_groups import forget_last_rank, world_substitutes
from megatron_bridge.fake.substitutes.routing import routing_substitutes
from megatron_bridge.fake.substitutes.standins import (
    cpu_substitutes,
    cuda_substitutes_of,
    resolve_substitute,
    resolved_rank,
)
from megatron_bridge.fake.substitutes.step_values import PolicyGradient, StepFacts, micro_batch, number_substitutes
from megatron_bridge.fake.substitutes.substitute import Substitute, substituted
from megatron_bridge.fake.substitutes.tensors import RankMode, apply_to_module, outside
from megatron_bridge.families.registry import family_of
from megatron_bridge.optim.optimizer import prime_state
from megatron_bridge.plan.kernels import choose_spec
from megatron_bridge.plan.resolve import trained_config
from megatron_bridge.trainer import MegatronTrainer
from megatron_bridge.weights import export
from miles_like.hf.checkpoint import read_config
from miles_like.types import REFERENCE
from routing_replay.align import pack_rows

_LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)


def live_through(run: RankRun, env: DeviceEnv) -> RankCounts:
    """Run all phases of one rank; arguments and errors as `execute`."""
    hf = trained_config(run.config, read_config(Path(run.config.hf_config)))
    mode = RankMode(env.device)
    live = LiveBytes(host="cpu" if env.device.type == "cuda" else None)
    work, facts, counts = _Work(), StepFacts(), RankCounts()
    work.attention.pairs = run.pack.causal_pairs / run.config.parallel.cp
    batches = batches_of(run, hf)
    with ExitStack() as stack:
        table = _substitutes(run, hf, env, mode, live, facts, work)
        forget_last_rank()
        stack.callback(forget_last_rank)
        counts.stubbed = stack.enter_context(substituted(table))
        stack.callback(close_parallel)  # of a trainer that could not be built
        stack.enter_context(mode)
        stack.enter_context(live)
        trainer = built(run, live, counts)
        stack.callback(trainer.close)
        gc.freeze()  # collections between micro-batches need not look at the model
        stack.callback(gc.unfreeze)
        _tell(trainer, facts, batches)
        trained(run, trainer, batches, facts.loss_tokens, live, counts)
        batches.clear()
        counts.flops = {
            "linears": work.linears / run.micro_batches,
            "core attention": work.attention.flops / run.micro_batches,
        }
        slept_and_published(run, trainer, lambda: _largest_chunks(trainer), live, counts)
    return counts


def _tell(trainer: Any, facts: StepFacts, batches: list[Any]) -> None:
    """What the step of this trainer needs to know of numbers."""
    rows = _real(lambda: len(pack_rows(batches[0].cu_seqlens, trainer.shard_spec).rows))
    facts.rows = rows // trainer.config.parallel.tp
    facts.hidden = trainer.models[0].config.hidden_size
    facts.loss_tokens = _real(lambda: sum(int(batch.loss_mask.sum()) for batch in batches))


def _real(function: Callable[[], Any]) -> Any:
    return outside(function)()


def batches_of(run: RankRun, hf: Any) -> list[Any]:
    """The step's micro-batches; with routes where the configuration replays the rollout's."""
    family, replays = family_of(hf), run.config.replay.mode == "r3" and run.config.trains
    layers = tuple(family.moe_layers(hf)) if replays else ()
    experts, top_k = (family.num_experts(hf), family.top_k(hf)) if layers else (0, 0)
    return [
        micro_batch(run.pack, number=i, vocab=family.vocab_size(hf), layers=layers, experts=experts, top_k=top_k)
        for i in range(run.micro_batches)
    ]


def _substitutes(
    run: RankRun,
    hf: Any,
    env: DeviceEnv,
    mode: RankMode,
    live: LiveBytes,
    facts: StepFacts,
    work: _Work,
) -> list[Substitute]:
    cuda = env.device.type == "cuda"
    resolved = resolved_rank(run.config, hf, cuda=cuda)
    of_kernels = (
        (*cuda_substitutes(), *cuda_substitutes_of(mode, work.attention, run.config.kernels, te=_te(run, hf)))
        if cuda
        else cpu_substitutes(mode, work.attention)
    )
    routing = routing_substitutes(mode, _balance(run, resolved.transformer)) if family_of(hf).moe_layers(hf) else ()
    return [
        *world_substitutes("nccl" if cuda else "gloo"),
        Substitute("torch.nn:Module", "_apply", "fake tensors", lambda stock: apply_to_module),
        Substitute("torch:UntypedStorage", "copy_", "fake tensors", lambda stock: lambda self, source, *a: self),
        *number_substitutes(mode, facts),
        resolve_substitute(),
        *of_kernels,
        *routing,
        *attribution_substitutes(live),
        work.counted_steps(),
    ]


def _te(run: RankRun, hf: Any) -> bool:
    return choose_spec(run.config, hf, cuda=True, te=True) == "te"


def _balance(run: RankRun, transformer: Any) -> Balance:
    return Balance(
        experts=transformer["num_moe_experts"],
        top_k=transformer["moe_router_topk"],
        groups=transformer.get("moe_router_num_groups") or 1,
        group_top_k=transformer.get("moe_router_group_topk") or 1,
        imbalance=run.imbalance,
    )


class _NoModules:
    """In place of FlopCounterMode's tracker, whose hooks on the outputs of recomputed layers disable the trainer's."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class _Work:
    """Operations of a step's forward, recomputation and backward: passes under other weights are not counted."""

    def __init__(self) -> None:
        self.attention = CoreAttention()
        self.linears = 0.0

    def counted_steps(self) -> Substitute:
        def make(stock: Callable[..., Any]) -> Callable[..., Any]:
            def stats(*args: Any, **kwargs: Any) -> Any:
                self.attention.flops = 0.0
                counter = FlopCounterMode(display=False)
                counter.mod_tracker = _NoModules()  # type: ignore[assignment]
                with counter:
                    out = stock(*args, **kwargs)
                counted = counter.get_flop_counts().get("Global", {})
                self.linears = float(sum(counted.get(op, 0) for op in _LINEAR))
                return out

            return stats

        return Substitute("megatron_bridge.step.step:Step", "stats", "operations counted", make)


# ---- the phases, of fake ranks and of real ones


@contextmanager
def _phase(name: str, live: LiveBytes, counts: RankCounts) -> Iterator[None]:
    gc.collect()
    live.begin_phase()
    yield
    counts.peaks[name], counts.host[name] = live.peak, live.host_peak


def built(run: RankRun, live: LiveBytes, counts: RankCounts, *, address: tuple[str, int] = ("", 0)) -> Any:
    """Construct the trainer of a rank, with its optimizer's state and its reference. address: of the rendezvous of real
    ranks."""
    with _phase("building", live, counts):
        trainer = MegatronTrainer(
            run.config,
            rank=run.rank,
            world_size=run.config.parallel.world_size,
            master_addr=address[0],
            master_port=address[1],
            loss=PolicyGradient(),
        )
        if run.config.trains:
            with live.part(MOMENTS):
                prime_state(trainer.optimizer)
                prime_hybrid(trainer.optimizer)
        if run.config.reference:
            with live.part(REFERENCES):
                trainer.copies.keep(REFERENCE)
        attribute(trainer, live)
    counts.stage = trainer.parallel.pp_rank
    for model in trainer.models:
        for name, parameter in model.named_parameters():
            counts.parameters += parameter.numel()
            counts.expert_parameters += parameter.numel() if ".experts." in name else 0
    return trainer


def trained(
    run: RankRun, trainer: Any, batches: list[Any], loss_tokens: int, live: LiveBytes, counts: RankCounts
) -> None:
    """Run one training step; for ranks that do not train, one forward pass."""
    with _phase("training", live, counts), live.part(ACTIVATIONS):
        if run.config.trains:
            trainer.train([batches], [loss_tokens], 1)
        else:
            trainer.logprobs(batches)
    attribute(trainer, live)
    gc.collect()
    counts.static = live.device


def slept_and_published(
    run: RankRun, trainer: Any, chunks: Callable[[], Iterable[Iterable[Any]]], live: LiveBytes, counts: RankCounts
) -> None:
    """Put the rank to sleep, then publish; where trainer and engine do not share the device, it publishes awake.
    chunks: the exports to run."""
    if run.colocated:
        trainer.sleep()
        attribute_asleep(trainer, live)
        with _phase("asleep", live, counts):
            pass
    context = trainer.parameters() if run.colocated else nullcontext()
    with _phase("publishing", live, counts), live.part(ACTIVATIONS), context:
        for chunk in chunks():
            for _ in chunk:
                pass
    if run.colocated:
        trainer.wake()


def _elements(bucket: Sequence[Any]) -> int:
    return sum(slot.tensor.numel() for slot in bucket)


def _largest_chunks(trainer: Any) -> Iterator[Any]:
    """Exports of the two largest buckets of each kind, one after the other: first as if another stage had gathered
    them, then of this rank's stage. A consumer holds the last tensor of a bucket while the next one is gathered."""
    tensors = trainer.family.bind(trainer.hf, mtp=bool(trainer.models[0].config.mtp_num_layers))
    exporter, stage = export._Exporter(tensors, trainer.parallel), trainer.parallel.pp_rank
    own = (slot for chunk in trainer.chunks for slot in export._local_slots(chunk, tensors, stage))
    largest: list[list[Any]] = []
    for _, slots in groupby(sorted(export._unique(own), key=exporter.key), key=exporter.key):
        buckets = exporter.buckets(slots, export.BUCKET_BYTES)
        largest += sorted(buckets, key=_elements, reverse=True)[:2]
    if trainer.config.parallel.pp > 1:
        other = stage - 1 if stage else 1
        for bucket in largest:
            yield exporter.export([replace(slot, stage=other, tensor=None) for slot in bucket], export._served)
    for bucket in largest:
        yield exporter.export(bucket, export._served)
