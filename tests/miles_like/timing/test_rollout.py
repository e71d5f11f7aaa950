"""A rollout against a simulation token by token, and closed forms.

Not covered: engines that interleave prefills with decode steps.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from miles_like.device_table import device
from miles_like.timing.engine import Drafts, EngineSetup, decode_step
from miles_like.timing.rollout import mean_context, rollout_time, running_limit, steady_rollout_time
from miles_like.timing.shape import model_shape
from miles_like.timing.workload import Lengths, Workload, lengths_with_mean

ROOT = Path(__file__).parents[3]
SMALL = model_shape(json.loads((ROOT / "configs/qwen3_30b_a3b/config.json").read_text()))
ENGINE = EngineSetup(device=device("H100"), servers=4, tp=2)


def load(samples: int, mean: float, limit: float, prompt: float = 100.0) -> Workload:
    responses = lengths_with_mean(mean, limit)
    return Workload(groups=samples // 8, samples_per_group=8, prompt=prompt, responses=responses)


def simulated(lengths: list[int], limit: int, prompt: float) -> float:
    """Seconds of one server, a step at a time: requests wait in the given order for a free place."""
    waiting, running, seconds = list(reversed(lengths)), list[tuple[int, int]](), 0.0  # running: (length, sampled)
    while waiting or running:
        while waiting and len(running) < limit:
            running.append((waiting.pop(), 0))
        context = prompt + sum(done for _, done in running) / len(running)
        seconds += sum(decode_step(SMALL, ENGINE, len(running), context).values())
        running = [(n, done + 1) for n, done in running if done + 1 < n]
    return seconds


@pytest.mark.parametrize("limit", [1000, 24])
def test_a_rollout_takes_what_a_simulation_of_its_steps_takes(limit: int) -> None:
    work = load(256, 150.0, 500.0)
    lengths = [round(x) for x in work.responses.of_n(64)]
    lengths[-1] = round(max(lengths[-1], work.responses.expected_longest(256)))
    draw, seconds = random.Random(0), 0.0
    for _ in range(6):  # the order decides whether a long request starts late
        draw.shuffle(lengths)
        seconds += simulated(lengths, limit, 100.0) / 6
    found = rollout_time(SMALL, replace(ENGINE, max_running=limit), work)
    assert found.seconds - found.terms["prefill"] == pytest.approx(seconds, rel=0.06)


def test_equal_lengths_have_a_closed_form() -> None:
    """L steps of the whole batch, with a context that grows from the prompt on."""
    work = Workload(groups=8, samples_per_group=8, prompt=100.0, responses=Lengths((400.0,)))
    found = rollout_time(SMALL, ENGINE, work)
    wanted = 400 * sum(decode_step(SMALL, ENGINE, 16, 100.0 + 200.0).values())
    assert found.seconds - found.terms["prefill"] == pytest.approx(wanted, rel=0.03)


def test_more_servers_and_drafts_shorten_a_rollout() -> None:
    work = load(512, 700.0, 4000.0)
    once = rollout_time(SMALL, ENGINE, work).seconds
    assert rollout_time(SMALL, replace(ENGINE, servers=16), work).seconds < once
    drafted = replace(ENGINE, servers=16, drafts=Drafts(tokens=1, acceptance=0.8))
    assert rollout_time(SMALL, drafted, work).seconds < rollout_time(SMALL, replace(ENGINE, servers=16), work).seconds
    assert rollout_time(SMALL, replace(ENGINE, max_running=16), work).seconds > 1.5 * once


def test_the_longest_response_ends_a_rollout() -> None:
    """With the same mean, a longer tail takes longer; a rollout is at least its longest response, alone."""
    even = Workload(groups=8, samples_per_group=8, prompt=100.0, responses=Lengths((1000.0,)))
    tailed = replace(even, responses=Lengths((*[500.0] * 15, 8500.0)))
    assert tailed.responses.mean == even.responses.mean
    found = rollout_time(SMALL, ENGINE, tailed).seconds
    assert found > 2 * rollout_time(SMALL, ENGINE, even).seconds
    alone = sum(decode_step(SMALL, ENGINE, 1, 100.0).values())
    assert found > tailed.responses.expected_longest(64) * alone * 0.99


def test_a_cache_limits_the_running_requests() -> None:
    work = load(512, 700.0, 4000.0)
    assert running_limit(ENGINE, work) == 1024
    small = replace(ENGINE, cache_tokens=20 * mean_context(work))
    assert running_limit(small, work) == pytest.approx(20)
    assert rollout_time(SMALL, small, work).seconds > 1.3 * rollout_time(SMALL, ENGINE, work).seconds


def test_the_context_of_a_request_caught_at_a_random_step() -> None:
    """Of a simulation: a step of a response is caught in proportion to the response's length."""
    work, draw = load(64, 300.0, 3000.0), random.Random(3)
    caught = [
        work.prompt + draw.random() * n
        for n in draw.choices(work.responses.knots, weights=work.responses.knots, k=40_000)
    ]
    assert mean_context(work) == pytest.approx(sum(caught) / len(caught), rel=0.02)


def test_requests_ahead_hide_the_tail() -> None:
    work = load(512, 700.0, 8000.0)
    alone = rollout_time(SMALL, ENGINE, work).seconds
    steady = steady_rollout_time(SMALL, ENGINE, work, ahead=1.0, staleness=64)
    assert steady.seconds < alone and "longest response" not in steady.terms
    step = decode_step(SMALL, ENGINE, 256, mean_context(work))
    steps = work.sampled / 4 / 256
    assert steady.seconds - steady.terms["prefill"] == pytest.approx(steps * sum(step.values()))


def test_a_bound_on_staleness_waits_for_the_longest_response() -> None:
    work = load(32, 700.0, 30_000.0)
    times = [steady_rollout_time(SMALL, ENGINE, work, ahead=1.0, staleness=k) for k in (1, 4, 64)]
    assert [x.seconds for x in times] == sorted((x.seconds for x in times), reverse=True)
    assert times[0].decides == "longest response" and "longest response" not in times[2].terms
