"""A simulated server is one that takes every step by itself.

The oracle goes from step to step and token to token; the server jumps over steps that are alike. Not covered: whether
the engines' steps take the times that are assumed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.simulation.clock.processors import Processors
from miles_like.simulation.clock.timeline import ServerTimeline, shares
from miles_like.simulation.clock.virtual_time import now, run_virtual
from miles_like.simulation.inputs.assumptions import EngineAssumptions
from miles_like.simulation.inputs.settings import Capacity
from miles_like.simulation.servers.samples import SimSample
from miles_like.simulation.servers.server import PauseMode, Server

ENGINE = EngineAssumptions(step_s=0.5, token_s=0.125, context_s=0.03125, prefill_s=0.0625)


@dataclass(frozen=True)
class Asked:
    """A prompt that reaches the server at a time."""

    time: float
    prompt_tokens: int
    lengths: tuple[int, ...]


ASKED = st.builds(
    Asked,
    time=st.integers(0, 40 * 32).map(lambda n: n / 32),  # ENGINE's steps are multiples of 1/32 s
    prompt_tokens=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple),
)


def between_steps(prompts: list[Asked]) -> list[Asked]:
    """Each prompt later by another part of 1/32 s: none arrives in the moment in which a step ends, where rounding
    alone would decide which step feeds it."""
    return [replace(asked, time=asked.time + (i + 1) / 1000) for i, asked in enumerate(prompts)]


def made(engine: EngineAssumptions = ENGINE, *, slots: float = 1e9, kv: float = 1e9, prefill: int = 10**6) -> Server:
    capacity = Capacity(slots=slots, kv_tokens=kv, prefill_tokens=prefill, limit=None)
    return Server(capacity=capacity, engine=engine, processors=Processors(), timeline=ServerTimeline())


def samples_of(asked: Asked) -> list[SimSample]:
    return [SimSample(prompt_tokens=asked.prompt_tokens, length=n) for n in asked.lengths]


async def served(server: Server, prompts: list[Asked]) -> list[list[SimSample]]:
    engine = asyncio.create_task(server.run())

    async def ask(prompt: Asked) -> list[SimSample]:
        await asyncio.sleep(prompt.time)
        samples = samples_of(prompt)
        await asyncio.wait(server.submit(samples))
        return samples

    try:
        return await asyncio.gather(*(ask(p) for p in prompts))
    finally:
        engine.cancel()


def step_by_step(prompts: list[Asked], *, slots: int, prefill: int) -> list[list[float]]:
    """When each sample ends, from one step to the next."""
    waiting = sorted(range(len(prompts)), key=lambda i: prompts[i].time)
    queue: list[tuple[int, int]] = []  # (prompt, sample)
    fed, running, ends = set[int](), dict[tuple[int, int], int](), {}
    time = 0.0
    while waiting or queue or running:
        if not queue and not running:
            time = max(time, prompts[waiting[0]].time)
        while waiting and prompts[waiting[0]].time <= time:
            i = waiting.pop(0)
            queue += [(i, j) for j in range(len(prompts[i].lengths))]
        seconds = ENGINE.step_s + ENGINE.token_s * len(running)
        seconds += ENGINE.context_s * sum(prompts[i].prompt_tokens + n for (i, _), n in running.items())
        tokens, started = 0, []
        while queue and len(running) + len(started) < slots:
            i = queue[0][0]
            if i not in fed:
                if tokens and tokens + prompts[i].prompt_tokens > prefill:
                    break
                tokens += prompts[i].prompt_tokens
                fed.add(i)
            started.append(queue.pop(0))
        time += seconds + ENGINE.prefill_s * tokens
        running |= dict.fromkeys(started, 0)
        for key in list(running):
            running[key] += 1
            if running[key] == prompts[key[0]].lengths[key[1]]:
                ends[key] = time
                del running[key]
    return [[ends[i, j] for j in range(len(p.lengths))] for i, p in enumerate(prompts)]


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(ASKED, min_size=1, max_size=8).map(between_steps),
    slots=st.integers(1, 12),
    prefill=st.integers(3, 12),
)
def test_jumping_over_equal_steps_changes_no_end(prompts: list[Asked], slots: int, prefill: int) -> None:
    server = made(slots=slots, prefill=prefill)
    found = run_virtual(served(server, prompts))
    ends = [[s.ended for s in group] for group in found]
    wanted = step_by_step(prompts, slots=slots, prefill=prefill)
    assert [e for group in ends for e in group] == pytest.approx([e for group in wanted for e in group])
    assert server.generated == sum(sum(p.lengths) for p in prompts)


def test_a_cache_that_is_full_lets_no_further_sample_start() -> None:
    """Two samples of 3 + 5 tokens fit into 16; the third starts when they have ended."""
    engine = EngineAssumptions(step_s=1.0)
    (samples,) = run_virtual(served(made(engine, kv=16), [Asked(0, 3, (5, 5, 5))]))
    assert [s.ended for s in samples] == [5, 5, 10]


async def paused(mode: PauseMode) -> tuple[Server, list[SimSample], bool]:
    """A prompt of two samples, paused in its third step for 10 s; whether the replies came by then."""
    server = made(EngineAssumptions(step_s=1.0, prefill_s=0.5))
    engine = asyncio.create_task(server.run())
    samples = samples_of(Asked(0, 2, (6, 6)))
    replies = server.submit(samples)
    await asyncio.sleep(3.25)  # the first step ends at 2
    await server.pause(mode)
    assert now() == 4.0
    answered = all(r.done() for r in replies)
    await asyncio.sleep(10)
    await server.resume(7)
    if answered:
        await asyncio.wait([r for s in samples for r in server.submit([s])])
    else:
        await asyncio.wait(replies)
    engine.cancel()
    return server, samples, answered


@pytest.mark.parametrize(
    ("mode", "answered", "end"),
    [
        ("in_place", False, 14 + 3),  # three tokens are left
        ("retract", False, 14 + 3 + 2 * 5 * 0.5),  # both are fed again, 2 + 3 tokens each
        ("abort", True, 14 + 3 + 2 * 5 * 0.5),
    ],
)
def test_a_pause_keeps_tokens_and_their_versions(mode: PauseMode, answered: bool, end: float) -> None:
    server, samples, replied = run_virtual(paused(mode))
    assert replied == answered
    assert [s.spans for s in samples] == [[(0, 3), (7, 3)]] * 2
    assert [s.ended for s in samples] == [end, end] and server.generated == 12
    assert shares(server.timeline.intervals, 0, 14).get("paused", 0) == (0 if answered else 10)


def test_a_failed_server_loses_what_was_sampled_there_alone() -> None:
    async def body() -> tuple[list[SimSample], float]:
        server = made(EngineAssumptions(step_s=1.0))
        engine = asyncio.create_task(server.run())
        fresh, continued = SimSample(prompt_tokens=1, length=9), SimSample(prompt_tokens=1, length=9)
        continued.sampled(4, 0)
        replies = [*server.submit([fresh]), *server.submit([continued])]
        await asyncio.sleep(2.5)
        failing = asyncio.create_task(server.fail(30.0))
        await asyncio.wait(replies)
        lost = [fresh.tokens, continued.tokens]
        await asyncio.wait(server.submit([fresh]))
        await failing
        engine.cancel()
        assert lost == [0, 4]
        return [fresh, continued], now()

    samples, end = run_virtual(body())
    assert end == 3 + 30 + 9 and samples[0].ended == end


def test_aborted_samples_free_their_places() -> None:
    async def body() -> float:
        server = made(EngineAssumptions(step_s=1.0), slots=2)
        engine = asyncio.create_task(server.run())
        first = samples_of(Asked(0, 1, (50, 50)))
        replies = server.submit(first)
        waiting = server.submit(samples_of(Asked(0, 1, (3, 3))))
        await asyncio.sleep(4.5)
        await server.abort(first)
        assert all(r.done() for r in replies) and [s.tokens for s in first] == [5, 5]
        await asyncio.wait(waiting)
        engine.cancel()
        return now()

    assert run_virtual(body()) == 5 + 3
