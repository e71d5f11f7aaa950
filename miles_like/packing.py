"""Groups and their advantages -> one train batch. The one place where tokens are shifted.

Letters: S tokens a sample, N samples a micro-batch, T packed tokens, F tokens of all samples end to end.

A sample of S tokens is fed as its first S-1 tokens; position t of the batch holds input token t and everything about
its label, token t+1. Samples are never split. What a step must satisfy, and how it is met:

* every data-parallel row has the same number of micro-batches, or the ranks' collectives would hang: as many as
  first-fit-decreasing needs for the neediest row, rounded up to `micro_multiple`;
* no micro-batch is above `max_tokens` inputs, for memory;
* rows, and micro-batches within a row, carry nearly equal load, for speed: costliest first to the least loaded. Load is
  tokens, or whatever `cost` says of a sample's length (its FLOPs: attention makes a long sample cost more a token).
  Where an even spread over a row's micro-batches would break the limit, the row keeps its first-fit result.

A cell of the grid that gets no sample (fewer samples than cells) holds one masked token, copied with its routing row
from a real sample, so that its rank has something legal to compute.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_like.types import MicroBatch, Sample, SampleGroup, TrainBatch
from routing_replay.align import RankPart, take_rows
from routing_replay.parts import RankRoutes, cut_routes
from routing_replay.trace import RoutingTrace
from routing_replay.versions import check_all_versions

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Cost = Callable[[int], float]  # of a sample, from the number of its inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flat:
    """All samples end to end, not yet shifted."""

    names: Sequence[str]  # [samples], each once
    tokens: Tensor  # [F] int64
    loss_mask: Tensor  # [F] bool
    logprobs: Tensor  # [F] fp32
    lengths: Ints  # [samples], S of each
    advantages: NDArray[np.float32]  # [samples]
    routing: Mapping[str, RoutingTrace] | None  # by name, rows S-1 each

    @property
    def starts(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.lengths)[:-1]))

    def loss_counts(self) -> Ints:
        """[samples]: labels with loss of each."""
        total = np.concatenate(([0], np.cumsum(self.loss_mask.numpy())))
        counts: Ints = total[self.starts + self.lengths] - total[self.starts]
        return counts


def pack(
    groups: Sequence[SampleGroup],
    advantages: Sequence[Sequence[float]],
    *,
    dp_size: int,
    max_tokens: int,
    micro_multiple: int = 1,
    cost: Cost | None = None,
    replayed: bool = True,
) -> TrainBatch:
    """All samples of `groups` as one optimizer step for `dp_size` data-parallel rows.

    `advantages[g][i]` belongs to `groups[g].samples[i]` and is put on each of its positions. `max_tokens` bounds the
    inputs of a micro-batch. `micro_multiple`: the number of micro-batches is a multiple of it (an interleaved pipeline
    schedule needs its number of stages). `cost` is the load to balance; None: tokens. `replayed`: training takes the
    routes (replay.mode "r3"), so each must be of the weights that sampled the token after it; else they are only
    compared with, and those that a server computed anew after a retraction may stay. The same arguments give the same
    batch. A sample without a label under loss trains nothing and is left out; a batch of only such is refused, since no
    rollout gives one by chance: its servers abort or stop at once, and to go on would be to wait for nothing.

    Raises ValueError: no sample, or none with a response token; a sample above `max_tokens`; advantages that do not
    match the groups or are not finite; some samples with routing and some without, or with routes that have no
    seals or are not those that were sealed with their tokens; with `replayed`, routes of other weights than sampled the
    tokens under loss, or of which nobody tells.
    """
    samples, flat_advantages = _matched(groups, advantages)
    traces = [s.routing for s in samples if s.routing is not None]
    if len(traces) not in (0, len(samples)):
        raise ValueError(
            f"{len(traces)} of {len(samples)} samples carry routing: replay needs all or none; "
            "check that every rollout server returns routed experts"
        )
    names = _names(samples)
    if traces:
        own = [s.name for s in samples]
        RoutingTrace.verify_all(traces, [s.token_ids for s in samples], samples=own)
        if replayed:
            spans, masks = [s.versions for s in samples], [s.loss_mask for s in samples]
            check_all_versions([t.versions for t in traces], spans, masks, samples=own)
    flat = _Flat(
        names=names,
        tokens=torch.cat([s.token_ids for s in samples]),
        loss_mask=torch.cat([s.loss_mask for s in samples]),
        logprobs=torch.cat([s.logprobs for s in samples]).float(),
        lengths=np.array([len(s.token_ids) for s in samples], dtype=np.int64),
        advantages=np.array(flat_advantages, dtype=np.float32),
        routing=dict(zip(names, traces, strict=True)) if traces else None,
    )
    versions = [span.version for s in samples for span in s.versions] or [0]
    return _pack(
        flat,
        dp_size=dp_size,
        max_tokens=max_tokens,
        micro_multiple=micro_multiple,
        cost=cost,
        versions=(min(versions), max(versions)),
    )


def pack_steps(
    groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float]], *, steps: int, **how: Any
) -> list[TrainBatch]:
    """A rollout's groups as `steps` mini-batches, each packed by `pack(..., **how)` as one optimizer step: the first
    len(groups) / steps of them in the order given, then the next. Raises ValueError when `steps` does not divide them.
    """
    if steps < 1 or len(groups) % steps:
        raise ValueError(
            f"{len(groups)} groups do not divide into {steps} mini-batches: change train.steps_per_rollout"
        )
    n = len(groups) // steps
    return [pack(groups[i : i + n], advantages[i : i + n], **how) for i in range(0, len(groups), n)]


def pack_pairs(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    dp_size: int,
    max_tokens: int,
    micro_multiple: int = 1,
    cost: Cost | None = None,
) -> TrainBatch:
    """Supervised (prompt ids, answer ids) pairs as one step: loss on the answers, advantage 1, no routing.

    Raises ValueError as `pack` does, and for an empty prompt, whose first answer token nothing would predict.
    """
    for i, (prompt, _) in enumerate(pairs):
        if not len(prompt):
            raise ValueError(f"pair {i} of {len(pairs)} has an empty prompt: its first answer token has no predecessor")
    if not pairs:
        raise ValueError("0 pairs to pack: want at least 1")
    sizes = np.array([[len(p), len(a)] for p, a in pairs], dtype=np.int64)
    tokens = np.fromiter((t for pair in pairs for ids in pair for t in ids), dtype=np.int64, count=int(sizes.sum()))
    mask = np.repeat(np.tile([False, True], len(pairs)), sizes.reshape(-1))
    flat = _Flat(
        names=[f"pair {i}" for i in range(len(pairs))],
        tokens=torch.from_numpy(tokens),
        loss_mask=torch.from_numpy(mask),
        logprobs=torch.zeros(len(tokens)),
        lengths=sizes.sum(1),
        advantages=np.ones(len(pairs), dtype=np.float32),
        routing=None,
    )
    return _pack(
        flat, dp_size=dp_size, max_tokens=max_tokens, micro_multiple=micro_multiple, cost=cost, versions=(0, 0)
    )


def cut_row(row: Sequence[MicroBatch], part: RankPart) -> list[RankRoutes | None]:
    """Of the routes of each micro-batch those that the ranks of `part` need. Raises ValueError as `cut_routes`."""
    out: list[RankRoutes | None] = []
    for m in row:
        assert not isinstance(m.routing, RankRoutes), "routes that are cut cannot be cut again"
        out.append(None if m.routing is None else cut_routes(m.routing, m.samples, m.cu_seqlens, part))
    return out


def _names(samples: Sequence[Sample]) -> list[str]:
    """ "prompt_id/index" of each; a prompt that comes twice in a step, as where an epoch ends, is "...#2" then."""
    seen: Counter[str] = Counter()
    out = []
    for s in samples:
        name = s.name
        seen[name] += 1
        out.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return out


def _matched(groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float]]) -> tuple[list[Sample], list[float]]:
    if len(groups) != len(advantages):
        raise ValueError(f"{len(groups)} groups but {len(advantages)} lists of advantages: give one list a group")
    for group, values in zip(groups, advantages, strict=True):
        if len(group.samples) != len(values):
            raise ValueError(
                f"group {group.prompt.id!r} has {len(group.samples)} samples but {len(values)} advantages: "
                "give one a sample"
            )
        if not all(math.isfinite(a) for a in values):
            raise ValueError(f"group {group.prompt.id!r} has advantages {list(values)}: check its rewards for nan")
    samples = [s for g in groups for s in g.samples]
    if not samples:
        raise ValueError(f"0 samples in {len(groups)} groups: want at least 1")
    return samples, [a for values in advantages for a in values]


def _pack(
    flat: _Flat, *, dp_size: int, max_tokens: int, micro_multiple: int, cost: Cost | None, versions: tuple[int, int]
) -> TrainBatch:
    if dp_size < 1 or micro_multiple < 1:
        raise ValueError(f"dp_size {dp_size} and micro_multiple {micro_multiple} must be at least 1")
    counts = flat.loss_counts()
    if not counts.sum():
        raise ValueError(f"0 response tokens in {len(counts)} samples: nothing to train on; check the rollout servers")
    kept = np.flatnonzero(counts)
    inputs = flat.lengths - 1
    longest = int(kept[inputs[kept].argmax()])
    if inputs[longest] > max_tokens:
        raise ValueError(
            f"sample {flat.names[longest]} has {inputs[longest]} input tokens, a micro-batch holds {max_tokens}: "
            "raise train.max_tokens_per_rank or lower rollout.max_new_tokens"
        )
    loads = _loads(inputs, kept, cost)
    rows = _spread(kept, loads, bins=dp_size)
    cells = _micro_batches(rows, inputs, loads, max_tokens=max_tokens, multiple=micro_multiple)
    starts = flat.starts
    grid = tuple(
        tuple(
            _micro_batch(flat, np.sort(cell), starts) if len(cell) else _dummy(flat, int(kept[0]), starts)
            for cell in row
        )
        for row in cells
    )
    return TrainBatch(grid=grid, loss_tokens=int(counts.sum()), versions=versions)


def _loads(inputs: Ints, kept: Ints, cost: Cost | None) -> Floats:
    """[samples]: what each weighs in the balance; asked once a length."""
    if cost is None:
        return inputs.astype(np.float64)
    loads = np.zeros(len(inputs))
    lengths, of = np.unique(inputs[kept], return_inverse=True)
    loads[kept] = np.array([cost(n) for n in lengths.tolist()])[of]
    return loads


def _spread(ids: Ints, loads: Floats, *, bins: int) -> list[Ints]:
    """Heaviest first to the least loaded bin (Graham 1969: at most 4/3 of the best possible largest load)."""
    heap = [(0.0, b) for b in range(bins)]
    content: list[list[int]] = [[] for _ in range(bins)]
    for i in ids[np.argsort(-loads[ids], kind="stable")].tolist():
        load, b = heap[0]
        content[b].append(i)
        heapq.heapreplace(heap, (load + float(loads[i]), b))
    return [np.array(c, dtype=np.int64) for c in content]


def _first_fit(ids: Ints, inputs: Ints, *, max_tokens: int) -> list[Ints]:
    """Longest first to the first bin with room: at most 11/9 of the fewest possible bins, plus 6/9 (Dosa 2007)."""
    room = np.full(max(len(ids), 1), max_tokens, dtype=np.int64)
    content: list[list[int]] = []
    for i in ids[np.argsort(-inputs[ids], kind="stable")].tolist():
        b = int((room[: len(content) + 1] >= inputs[i]).argmax())
        if b == len(content):
            content.append([])
        content[b].append(i)
        room[b] -= inputs[i]
    return [np.array(c, dtype=np.int64) for c in content]


def _micro_batches(
    rows: Sequence[Ints], inputs: Ints, loads: Floats, *, max_tokens: int, multiple: int
) -> list[list[Ints]]:
    """Each row as the same number of bins of at most `max_tokens` inputs; an empty bin waits for the dummy."""
    fitted = [_first_fit(row, inputs, max_tokens=max_tokens) for row in rows]
    count = math.ceil(max(map(len, fitted)) / multiple) * multiple
    out = []
    for row, first_fit in zip(rows, fitted, strict=True):
        even = _spread(row, loads, bins=count)
        if any(int(inputs[cell].sum()) > max_tokens for cell in even):
            even = first_fit + [row[:0]] * (count - len(first_fit))
        out.append(even)
    return out


def _micro_batch(flat: _Flat, ids: Ints, starts: Ints) -> MicroBatch:
    n = flat.lengths[ids] - 1
    cu_seqlens = np.concatenate(([0], np.cumsum(n)))
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], n)
    at = torch.from_numpy(np.repeat(starts[ids], n) + positions)  # [T] of each input in the flat streams
    names = tuple(flat.names[i] for i in ids)
    return MicroBatch(
        samples=names,
        tokens=flat.tokens[at],
        labels=flat.tokens[at + 1],
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens).to(torch.int32),
        loss_mask=flat.loss_mask[at + 1],
        advantages=torch.from_numpy(np.repeat(flat.advantages[ids], n)),
        rollout_logprobs=flat.logprobs[at + 1],
        routing=RoutingTrace.concat([flat.routing[name] for name in names]) if flat.routing is not None else None,
    )


def _dummy(flat: _Flat, i: int, starts: Ints) -> MicroBatch:
    """The first input of sample i, without loss."""
    token = flat.tokens[int(starts[i])].reshape(1)
    routing = None
    if flat.routing is not None:
        routing = take_rows(flat.routing[flat.names[i]], torch.zeros(1, dtype=torch.int64))
    return MicroBatch(
        samples=("",),
        tokens=token,
        labels=token.clone(),
        positions=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        advantages=torch.zeros(1),
        rollout_logprobs=torch.zeros(1),
        routing=routing,
    )
