"""The settings of a run that its simulation follows, and the closed forms of one step's parts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from miles_like.simulation.inputs.assumptions import EngineAssumptions, TrainAssumptions

PREFILL_TOKENS = 4096  # of the embedded engine (rollout.embedded.engine.engine.EngineLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The settings of a run that its simulation reads, under the names of their configuration keys where these are
    equal."""

    seed: int
    steps: int
    groups: int  # train.groups_per_step
    samples: int  # train.samples_per_group
    max_staleness: int
    lockstep: bool
    over_sampling: float | None
    mask_old_tokens: bool
    in_flight_at_publication: bool  # groups are sampled freely
    max_rounds: int
    servers: int
    slots: int | None  # of each; None: no limit
    kv_tokens: int | None  # of each; None: no limit
    reserves_limit: bool  # a sample that starts reserves the cache of the longest answer, as in the embedded engine
    prompts_per_request: int
    limit: int  # tokens of the longest answer
    slow_reward: bool
    pause_mode: Literal["abort", "retract", "in_place"]
    ranks: int  # of the trainer
    shards: int  # parallel.dp
    micro_batch_tokens: int
    eval_every: int
    save_every: int
    save_asynchronous: bool
    takes_turns: bool

    @property
    def prompt_per_request(self) -> bool:
        """Whether groups are complete at different times (RunConfig.groups_end_by_themselves, or a slow reward)."""
        aborts = bool(self.over_sampling) and not self.lockstep
        return self.in_flight_at_publication or aborts or self.slow_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a server can run at once. limit: tokens that a starting sample reserves; None: those that it will have."""

    slots: float
    kv_tokens: float
    prefill_tokens: int
    limit: int | None

    @classmethod
    def of(cls, settings: LoopSettings, engine: EngineAssumptions) -> Capacity:
        """What the assumptions give, else the configuration's."""
        slots, kv = engine.slots or settings.slots, engine.kv_tokens or settings.kv_tokens
        return cls(
            slots=math.inf if slots is None else slots,
            kv_tokens=math.inf if kv is None else kv,
            prefill_tokens=engine.prefill_tokens or PREFILL_TOKENS,
            limit=settings.limit if settings.reserves_limit else None,
        )

    def reserved(self, prompt_tokens: int, length: int) -> int:
        """Tokens of cache of one running sample."""
        return prompt_tokens + (length if self.limit is None else self.limit)


def decode_seconds(engine: EngineAssumptions, *, steps: int, running: int, context: int) -> float:
    """`steps` engine steps of `running` samples, whose contexts have `context` tokens together at the first."""
    first = engine.step_s + engine.token_s * running + engine.context_s * context
    return steps * first + engine.context_s * running * (steps * (steps - 1) / 2)


def busiest_shard(inputs: Sequence[int], shards: int) -> list[int]:
    """The inputs of the shard that has most tokens: longest first into the shard that has least
    (miles_like.batch.bins.spread)."""
    heap = [(0, shard) for shard in range(shards)]
    content: list[list[int]] = [[] for _ in range(shards)]
    for n in sorted(inputs, reverse=True):
        tokens, shard = heap[0]
        content[shard].append(n)
        heapq.heapreplace(heap, (tokens + n, shard))
    return max(content, key=sum)


def padded_tokens(inputs: Sequence[int], most: int) -> int:
    """Tokens of micro-batches of at most `most`, filled in the order given, each sample padded to its batch's
    longest."""
    total = rows = longest = 0
    for n in inputs:
        if rows and (rows + 1) * max(longest, n) > most:
            total, rows, longest = total + rows * longest, 0, 0
        rows, longest = rows + 1, max(longest, n)
    return total + rows * longest


def train_seconds(train: TrainAssumptions, inputs: Sequence[int], *, shards: int, micro_batch_tokens: int) -> float:
    """A step on samples of `inputs` tokens each. The DP shards wait for the one that has most."""
    if train.packing == "packed":
        return train.fixed_s + train.token_s * sum(busiest_shard(inputs, shards))
    size = math.ceil(len(inputs) / shards)
    cut = [inputs[i : i + size] for i in range(0, len(inputs), size)]
    return train.fixed_s + train.token_s * max(padded_tokens(c, micro_batch_tokens) for c in cut)
