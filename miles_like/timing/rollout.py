"""Seconds in which the servers sample one step's responses."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from miles_like.timing.engine import EngineSetup, decode_step, prefill
from miles_like.timing.phase import Phase
from miles_like.timing.shape import ModelShape
from miles_like.timing.workload import Workload

_SEGMENTS = 48  # of a rollout, between which the batch is constant


def mean_context(load: Workload) -> float:
    """Mean tokens of context of a running request at a random step: its prompt and E[L^2] / (2 E[L]) of its
    response."""
    lengths = load.responses.knots
    return load.prompt + sum(x * x for x in lengths) / (2 * sum(lengths))


def running_limit(engine: EngineSetup, load: Workload) -> float:
    """Requests that run on a server at once: its limit, or what its cache holds."""
    return min(float(engine.max_running), max(1.0, engine.cache_tokens / mean_context(load)))


def rollout_time(shape: ModelShape, engine: EngineSetup, load: Workload) -> Phase:
    """Seconds until the last response of the step has ended, with no other requests: the slowest server has the longest
    response of all."""
    requests = max(1, math.ceil(load.samples / engine.servers))
    lengths = load.responses.of_n(requests)
    lengths[-1] = max(lengths[-1], load.responses.expected_longest(load.samples))
    limit = int(min(requests, running_limit(engine, load)))
    total = _prefills(shape, engine, load, requests)
    per_step = engine.drafts.tokens_per_step if engine.drafts else 1.0
    for tokens, running, sampled in _segments(lengths, max(1, limit)):
        for name, seconds in decode_step(shape, engine, running, load.prompt + sampled).items():
            total[name] = total.get(name, 0.0) + seconds * tokens / per_step
    return Phase(total)


def _prefills(shape: ModelShape, engine: EngineSetup, load: Workload, requests: float) -> dict[str, float]:
    """The samples of a group that are on one server share the keys and values of their prompt."""
    prompts = max(requests / load.samples_per_group, min(requests, load.groups / engine.servers))
    return prefill(shape, engine, prompts * load.prompt, prompts * load.prompt**2)


def _segments(lengths: list[float], limit: int) -> Iterator[tuple[float, float, float]]:
    """(tokens that each running request samples, running requests, tokens each has sampled on average) of the segments
    of a rollout. Waiting requests, of lengths in a mixed order, take the place of those that end."""
    queue = _mixed(lengths)
    running = [(queue.pop(), 0.0) for _ in range(min(limit, len(queue)))]  # (step at which it ends, at which it began)
    heapq.heapify(running)
    step, every = 0.0, max(1, len(lengths) // _SEGMENTS)
    while running:
        count = len(running)
        ended = [heapq.heappop(running) for _ in range(min(every, count))]
        last = ended[-1][0]
        began = (sum(b for _, b in running) + sum(b for _, b in ended)) / count
        # the requests of a segment end one after the other: half of them are gone on average
        yield last - step, count - (len(ended) - 1) / 2, max(0.0, (step + last) / 2 - began)
        step = last
        for _ in range(min(limit - len(running), len(queue))):
            heapq.heappush(running, (step + queue.pop(), step))


def _mixed(lengths: list[float]) -> list[float]:
    """The lengths in an order without long runs of similar ones: by multiples of the golden ratio."""
    ratio = (math.sqrt(5) - 1) / 2
    return [x for _, x in sorted((i * ratio % 1, x) for i, x in enumerate(lengths))]


def steady_rollout_time(
    shape: ModelShape, engine: EngineSetup, load: Workload, *, ahead: float, staleness: float
) -> Phase:
    """Seconds in which the servers sample as many tokens as a step has, where the requests of 1 + `ahead` steps are
    outstanding: the batch stays full, unless the longest response alone takes longer than 1 + `staleness` steps."""
    outstanding = (1 + ahead) * load.samples / engine.servers
    running = max(1.0, min(outstanding, running_limit(engine, load)))
    step = decode_step(shape, engine, running, mean_context(load))
    per_step = engine.drafts.tokens_per_step if engine.drafts else 1.0
    steps = load.sampled / engine.servers / running / per_step
    total = _prefills(shape, engine, load, load.samples / engine.servers)
    for name, seconds in step.items():
        total[name] = total.get(name, 0.0) + seconds * steps
    longest = load.responses.expected_longest(load.samples) / per_step * sum(step.values()) / (1 + staleness)
    excess = longest - sum(total.values())
    return Phase(total | ({"longest response": excess} if excess > 0 else {}))
