"""Law: a rollout that was suspended, saved, and goes on in another process against another server is the one that was
never touched; and a rollout that is no longer wanted is not computed.

A run is killed at any moment and resumed: tokens sampled twice, a route or a version at the wrong place, or a sample
that restarts under other weights would make it another run than the one that was not killed. Saved and read as a
checkpoint does. Engines are held in the middle, so that no clock decides.

The embedded engine over HTTP, with plain and with exact operations. Not covered: stock SGLang, episodes of several
turns, which are issued again from the start (tests/rollout/episodes/test_partial.py).

Letters: P prompt tokens, G samples a prompt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from miles_like.checkpoint.saved_groups import read_groups, write_groups
from miles_like.rewards.load import scored_by
from miles_like.types import NamedTensor, Prompt, Sample, SampleGroup, SamplingParams, VersionSpan
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.model import plain_ops
from rollout.embedded.model.exact_ops import ExactOps
from rollout.embedded.server.service import Service
from rollout.episodes.groups import groups_as_completed, run_groups
from rollout.episodes.partial import PartialRollouts
from rollout.episodes.pool import EnginePool
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape
from tests.support.embedded_fixtures import Held, oracle, save, served
from tests.support.ranked import divided

SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), top_k=4, num_experts=16)
NEW, G = 12, 2
PARAMS = SamplingParams(max_new_tokens=NEW, sampling_seed=3)
# six samples, of which three run at a time
PROMPTS = [Prompt(id=f"p/{p}", token_ids=tuple((7 * j + p) % 90 + 2 for j in range(p)), answer="") for p in (5, 20, 37)]
OPS: dict[str, Any] = {"plain": plain_ops, "exact": ExactOps(1)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle(), tmp_path_factory.mktemp("hf"))


@dataclass
class World:
    service: Service
    held: Held
    kept: PartialRollouts

    def groups(self, **how: Any) -> Any:
        return groups_as_completed(self.kept, PROMPTS, scored_by(_reward), n=G, params=PARAMS, **how)

    async def run(self, **how: Any) -> list[SampleGroup]:
        return await run_groups(self.kept, PROMPTS, scored_by(_reward), n=G, params=PARAMS, **how)

    async def asked(self, samples: int) -> None:
        """Until so many samples are on the server."""
        async with asyncio.timeout(60):
            while self.service.engine.running + self.service.engine.waiting < samples:
                await asyncio.sleep(0.002)

    @property
    def idle(self) -> bool:
        return self.service.engine.running == self.service.engine.waiting == 0


def _reward(prompt: Prompt, sample: Sample) -> float:
    return float(sample.index)


@asynccontextmanager
async def world(
    path: Path, ops: Any = plain_ops, *, running: int = 3, layout: str | None = None
) -> AsyncIterator[World]:
    """A new process: its own server and client. layout: of its ranks; None: one."""
    limits = EngineLimits(max_total_tokens=2048, context_length=256, max_running=running)
    s = Service(path, limits, ops=ops) if layout is None else divided(path, limits, layout, ops=ops)
    s.engine.set_version("0")
    with served(s) as url:
        client = SGLangClient(url, routing=SHAPE, request_timeout_s=60.0)
        yield World(s, Held(s.engine), PartialRollouts(EnginePool([client])))
        await client.close()


def _samples(groups: Sequence[SampleGroup]) -> list[Sample]:
    return [s for g in groups for s in g.samples]


def _same(got: Sequence[SampleGroup], want: Sequence[SampleGroup], atol: float) -> None:
    for a, b in zip(_samples(got), _samples(want), strict=True):
        assert (a.name, a.finish, a.versions, a.reward) == (b.name, b.finish, b.versions, b.reward)
        assert a.token_ids.tolist() == b.token_ids.tolist()
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=atol, rtol=0)
        assert a.routing is not None and b.routing is not None
        assert torch.equal(a.routing.experts, b.routing.experts)
        assert a.routing.versions == b.routing.versions
        a.routing.check_tokens(a.token_ids, sample=a.name)


async def _cut(w: World, file: Path, *, prompt_per_request: bool, tokens: int) -> list[SampleGroup]:
    """Suspended after so many tokens and saved, three times more before anything is sampled, then let go to its end."""
    w.held.until = 0  # requests arrive one by one: none begins before all are there
    under_way = asyncio.create_task(w.run(prompt_per_request=prompt_per_request, resumes=1))
    await w.asked(G * len(PROMPTS))
    w.held.until = tokens
    await w.kept.resume()
    await w.held.reached()
    async with w.kept.suspended():
        assert w.idle and not under_way.done()
        write_groups(file, w.kept.state())
    for until in (w.held.until, w.held.until, math.inf):
        await w.asked(3)
        async with w.kept.suspended():
            assert w.idle
            w.held.until = until
    return await under_way


@pytest.mark.parametrize(
    # one sample of a group has begun and one has not; three have ended and wait for the others
    ("ops", "apart", "tokens", "cuts", "atol", "layout"),
    [
        ("plain", True, 26, {0, 9}, 1e-5, None),
        pytest.param("exact", False, 42, {2, 12}, 0.0, None, marks=pytest.mark.slow),
        pytest.param("exact", False, 42, {2, 12}, 0.0, "ep2", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_goes_on_elsewhere_is_the_one_that_was_not_touched(
    path: Path, tmp_path: Path, ops: str, apart: bool, tokens: int, cuts: set[int], atol: float, layout: str | None
) -> None:
    """Nor is the one that goes on where it was. What is saved is not sampled again. That it was suspended four times
    does not look like a server that aborts all it is given, of which one attempt more is allowed here."""

    async def all_of_it() -> None:
        async with world(path, OPS[ops]) as w:
            whole = await w.run(prompt_per_request=apart)
        async with world(path, OPS[ops], layout=layout) as w:
            _same(await _cut(w, tmp_path / "groups", prompt_per_request=apart, tokens=tokens), whole, atol)
        saved = read_groups(tmp_path / "groups")
        kept_tokens = sum(s.response_len for s in _samples(list(saved.values())))
        assert {s.response_len for s in _samples(list(saved.values()))} == cuts
        async with world(path, OPS[ops], layout=layout) as w:
            w.kept.restore(saved)
            assert {k: g.prompt for k, g in w.kept.state().items()} == {k: g.prompt for k, g in saved.items()}
            _same(await w.run(prompt_per_request=apart), whole, atol)
            assert w.service.engine.generated == sum(s.response_len for s in _samples(whole)) - kept_tokens
            assert {s.name: s.response_len for g in w.kept.state().values() for s in g.samples} == {
                s.name: s.response_len for s in _samples(whole)
            }
            for p in PROMPTS:
                w.kept.forget(3, p.id)
            assert not w.kept.state()

    asyncio.run(all_of_it())


def test_under_new_weights_what_was_sampled_stays(path: Path, tmp_path: Path) -> None:
    """Tokens, log-probs, routes and versions of the old part, bit for bit as saved; the new part says what it is of."""

    async def all_of_it() -> None:
        async with world(path) as w:
            await _cut(w, tmp_path / "groups", prompt_per_request=True, tokens=26)
        saved = {s.name: s for g in read_groups(tmp_path / "groups").values() for s in g.samples}
        async with world(path) as w:
            w.kept.restore(read_groups(tmp_path / "groups"))
            torch.manual_seed(1)
            w.service.begin_update()
            new = load_file(path / "model.safetensors").items()
            changed = [NamedTensor(n, t + 0.05 * torch.randn_like(t)) for n, t in new]
            w.service.update(changed, flush_cache=False, version="1")
            w.service.end_update()
            groups = await w.run(prompt_per_request=True)
        crossed = 0
        for s in _samples(groups):
            old = saved.get(s.name)
            at = 0 if old is None else old.response_len
            p = len(s.token_ids) - s.response_len
            edges = [(0, 0, at), (1, at, s.response_len)]
            assert s.versions == tuple(VersionSpan(*e) for e in edges if e[1] < e[2])
            assert s.routing is not None
            edges = [(0, 0, p + at - 1 if at else 0), (1, p + at - 1 if at else 0, len(s.token_ids) - 1)]
            assert s.routing.versions == tuple(VersionSpan(*e) for e in edges if e[1] < e[2])
            s.routing.check_tokens(s.token_ids, sample=s.name)
            if old is not None and at:
                assert torch.equal(s.token_ids[: p + at], old.token_ids)
                assert torch.equal(s.logprobs[: p + at], old.logprobs)
                assert old.routing is not None
                assert torch.equal(s.routing.experts[: p + at - 1], old.routing.experts)
            crossed += len(s.versions) == 2
        assert crossed >= 2

    asyncio.run(all_of_it())


def test_what_nobody_wants_any_more_is_not_computed(path: Path) -> None:
    """Over-sampling takes the first groups that end and gives the rest up. The server is then as if it had never been
    asked: what comes next is what it would have been."""

    async def all_of_it() -> None:
        async with world(path) as w:
            whole = await w.run()
        async with world(path, running=2) as w:
            w.held.until = G * NEW + 6  # the first group has ended, the second is in the middle, the third waits
            tasks = asyncio.all_tasks()
            async with aclosing(w.groups(prompt_per_request=True)) as groups:
                i, group = await anext(groups)
                await w.held.reached()
                assert not w.idle
            assert asyncio.all_tasks() == tasks
            await w.kept.abort_all()
            assert w.idle and w.service.engine.generated == w.held.until
            _same([group], [whole[i]], 1e-5)
            w.held.until = math.inf
            _same(await w.run(), whole, 1e-5)

    asyncio.run(all_of_it())
