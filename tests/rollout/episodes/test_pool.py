"""Several engines as one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_like.types import Observation, SamplingParams, ServerLost
from rollout.episodes.pool import EnginePool
from rollout.episodes.serving import Serving
from rollout.sglang.http_replies import NoAnswer, RolloutError
from tests.support.fakes import FakeEngine, make_prompt
from tests.support.refusals import refuses
from tests.support.talker import Talker, played, transcript

PARAMS = SamplingParams(max_new_tokens=4)
PROMPTS = [make_prompt(f"p{i}") for i in range(7)]


def test_prompts_are_split_evenly_and_keep_their_order() -> None:
    """The caller packs by position: a group in another place would be trained with another's advantages."""
    engines = [FakeEngine(delay_s=0.05), FakeEngine(), FakeEngine(delay_s=0.02)]
    groups = asyncio.run(EnginePool(engines).generate(PROMPTS, n=2, params=PARAMS))
    assert [g.prompt for g in groups] == PROMPTS
    assert [[s.text for s in g.samples] for g in groups] == [[f"p{i}:0", f"p{i}:1"] for i in range(7)]
    assert sorted(len(e.asked) for e in engines) == [2, 2, 3]


def test_a_long_prompt_counts_as_more_load() -> None:
    """Load is in tokens: one long prompt weighs as many short ones."""
    engines = [FakeEngine(), FakeEngine()]
    prompts = [make_prompt("long", tokens=[1] * 100), *(make_prompt(f"s{i}", tokens=[1] * 20) for i in range(4))]
    asyncio.run(EnginePool(engines).generate(prompts, n=1, params=PARAMS))
    assert engines[0].asked == ["long"] and len(engines[1].asked) == 4


def test_a_second_call_goes_where_the_first_does_not_run() -> None:
    """Load is of what is in flight over all calls, and is given back when a call ends."""

    async def run() -> None:
        slow, fast = FakeEngine(delay_s=0.2), FakeEngine()
        pool = EnginePool([slow, fast])
        heavy = make_prompt("p0", tokens=[1] * 50)
        first = asyncio.create_task(pool.generate([heavy], n=1, params=PARAMS))
        await asyncio.sleep(0.01)
        await pool.generate(PROMPTS[1:2], n=1, params=PARAMS)
        assert (slow.asked, fast.asked) == (["p0"], ["p1"])
        await first
        await pool.generate(PROMPTS[2:3], n=1, params=PARAMS)
        assert slow.asked == ["p0", "p2"]

    asyncio.run(run())


def test_samples_go_on_where_the_load_is_least_but_for_what_is_cached() -> None:
    """A sample weighs what is sent of it and what it may still say, until it returns or fails. Its engine has cached 6
    tokens: it stays as long as another one has no more than 6 tokens less to do."""

    async def run() -> None:
        engines = [FakeEngine(delay_s=0.01), FakeEngine(delay_s=0.01)]
        pool = EnginePool(engines)
        (group,) = await pool.generate(PROMPTS[:1], n=5, params=PARAMS)
        busy = asyncio.create_task(pool.generate([make_prompt("p1", tokens=[1] * 17)], n=1, params=PARAMS))
        await asyncio.sleep(0)
        samples = [pool.continue_sample(s, params=PARAMS) for s in group.samples]  # 6 tokens and 4 more each
        assert [s.name for s in await asyncio.gather(*samples)] == [s.name for s in group.samples]
        await busy
        assert [[name for name, _, _ in e.continued] for e in engines] == [["p0/2", "p0/4"], ["p0/0", "p0/1", "p0/3"]]
        for e in engines:
            e.error = RolloutError("died")
        with pytest.raises(RolloutError):
            await pool.continue_sample(group.samples[0], params=PARAMS)
        assert pool._load == [0, 0]

    asyncio.run(run())


def test_turns_of_an_episode_stay_with_the_engine_that_has_their_prefix() -> None:
    """Where loads are equal, also after a sample has moved; a lost engine keeps none."""

    async def run() -> None:
        engines: list[Any] = [FakeEngine(delay_s=0.01), FakeEngine(delay_s=0.01)]
        for i, engine in enumerate(engines):
            engine.url = f"http://{i}"
        pool = EnginePool(engines, Serving([e.url for e in engines], limit_s=60.0))
        groups = await pool.generate(PROMPTS[:2], n=2, params=PARAMS)
        for _ in range(3):
            for g in reversed(groups):
                await pool.continue_sample(g.samples[0], params=PARAMS)
        assert [{name for name, _, _ in e.continued} for e in engines] == [{"p0/0"}, {"p1/0"}]
        pool._load[1] = 100
        for load in (100, 0):
            pool._load[1] = load
            await pool.continue_sample(groups[1].samples[1], params=PARAMS)
        assert [name for name, _, _ in engines[0].continued][-2:] == ["p1/1", "p1/1"]
        engines[0].error = NoAnswer("gone")
        await pool.continue_sample(groups[0].samples[0], params=PARAMS)
        assert engines[1].continued[-1][0] == "p0/0"

    asyncio.run(run())


def test_one_engines_error_cancels_the_others() -> None:
    """A dead server must not leave the step waiting for the rest."""
    bad, slow = FakeEngine(), FakeEngine(delay_s=10)
    bad.error = RolloutError("server A has died")
    with refuses(RolloutError, "server A has died"):
        asyncio.run(EnginePool([slow, bad]).generate(PROMPTS, n=1, params=PARAMS))
    assert slow.cancelled


def test_versions_must_agree() -> None:
    """Engines of different versions would mix policies in one batch; the message says which has which."""
    assert asyncio.run(EnginePool([FakeEngine(version=3), FakeEngine(version=3)]).weight_version()) == 3
    with refuses(ValueError, 0, 3, 1, 4):
        asyncio.run(EnginePool([FakeEngine(version=3), FakeEngine(version=4)]).weight_version())


def test_control_reaches_every_engine() -> None:
    """A pool of none is refused."""

    async def run() -> None:
        engines = [FakeEngine(), FakeEngine()]
        pool = EnginePool(engines)
        await pool.pause()
        assert all(e.paused for e in engines)
        await pool.resume()
        assert not any(e.paused for e in engines)
        await pool.close()
        assert all(e.closed for e in engines)

    asyncio.run(run())
    with refuses(ValueError, 0, "rollout.servers", 1):
        EnginePool([])


# ---- engines that do not answer


class Mortal(FakeEngine):
    """Does not answer while `dead`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.dead, self.aborted = url, False, 0

    def check(self) -> None:
        if self.dead:
            raise NoAnswer(f"server {self.url} cannot be reached")

    async def generate(self, prompts: Any, *, n: int, params: SamplingParams) -> Any:
        await asyncio.sleep(0)
        self.check()
        return await super().generate(prompts, n=n, params=params)

    async def continue_sample(self, sample: Any, environment: Any = (), *, params: SamplingParams) -> Any:
        self.check()
        return await super().continue_sample(sample, environment, params=params)

    async def abort_all(self) -> None:
        self.check()
        self.aborted += 1


def mortals(n: int = 2) -> tuple[list[Mortal], EnginePool, Serving, list[str]]:
    engines, reported = [Mortal(f"http://{i}") for i in range(n)], list[str]()
    serving = Serving([e.url for e in engines], lambda url, error: reported.append(f"{url}: {error}"), limit_s=60.0)
    return engines, EnginePool(engines, serving), serving, reported


def test_what_an_engine_was_asked_that_does_not_answer_is_asked_elsewhere() -> None:
    async def run() -> None:
        engines, pool, serving, reported = mortals()
        engines[0].dead = True
        groups = await pool.generate(PROMPTS, n=2, params=PARAMS)
        assert [g.prompt for g in groups] == PROMPTS and len(engines[1].asked) == 7 and not engines[0].asked
        assert reported == ["http://0: server http://0 cannot be reached"] and pool._load == [0, 0]
        assert serving.reissued == 4
        sample = groups[0].samples[0]
        for _ in range(3):
            await pool.continue_sample(sample, params=PARAMS)
        await pool.abort_all()
        assert (engines[0].aborted, engines[1].aborted, len(reported)) == (0, 1, 1)
        engines[0].dead = False
        serving.serve(["http://0", "http://1"])
        await pool.generate(PROMPTS, n=2, params=PARAMS)
        assert len(engines[0].asked) == 4

    asyncio.run(run())


def test_without_a_remedy_an_engine_that_does_not_answer_is_an_error() -> None:
    async def run() -> None:
        engine = Mortal("http://a")
        engine.dead = True
        with refuses(NoAnswer, "http://a"):
            await EnginePool([engine]).generate(PROMPTS, n=1, params=PARAMS)

    asyncio.run(run())


def test_requests_wait_for_an_engine_until_there_is_one_or_none_will_be() -> None:
    async def run(*, ends: bool) -> None:
        (engine,), pool, serving, reported = mortals(1)
        engine.dead = True
        waiting = asyncio.create_task(pool.generate(PROMPTS, n=1, params=PARAMS))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(reported) == 1 and not waiting.done()
        engine.dead = False
        if ends:
            serving.end("no server is left: server 0 died")
            with refuses(ServerLost, "server 0 died"):
                await waiting
            return
        serving.serve([engine.url])
        assert [g.prompt for g in await waiting] == PROMPTS

    asyncio.run(run(ends=False))
    asyncio.run(run(ends=True))


def test_the_wait_for_an_engine_has_a_limit() -> None:
    async def run() -> None:
        pool = EnginePool([Mortal("http://a")], Serving([], limit_s=0.01))
        with refuses(ServerLost, "http://a", "cluster.timeout_s", "--resume", 0.01):
            await pool.generate(PROMPTS, n=1, params=PARAMS)

    asyncio.run(run())


def test_an_engine_that_does_not_serve_gets_no_request_and_one_may_be_added() -> None:
    async def run() -> None:
        engines, pool, serving, _ = mortals()
        serving.serve(["http://0"])
        await pool.generate(PROMPTS, n=2, params=PARAMS)
        await pool.abort_all()
        assert (len(engines[0].asked), len(engines[1].asked), engines[1].aborted) == (7, 0, 0)
        pool.add(further := Mortal("http://2"))
        serving.serve(["http://2"])
        await pool.generate(PROMPTS, n=2, params=PARAMS)
        assert len(further.asked) == 7

    asyncio.run(run())


def test_engines_that_are_near_are_asked_while_one_of_them_serves() -> None:
    async def run() -> None:
        engines, _, serving, _ = mortals(3)
        pool = EnginePool(engines, serving, near=["http://1"])
        await pool.generate(PROMPTS, n=2, params=PARAMS)
        assert [len(e.asked) for e in engines] == [0, 7, 0]
        engines[1].dead = True
        await pool.generate(PROMPTS, n=2, params=PARAMS)
        assert len(engines[1].asked) == 7 and len(engines[0].asked) + len(engines[2].asked) == 7

    asyncio.run(run())


class Near(Talker):
    """One of several engines with the same policy; notes which samples it has gone on with, and dies after `until`."""

    def __init__(self, url: str, left: Any, until: int = 99) -> None:
        super().__init__("7", "8+9", "10", "24")
        self.url, self.left, self.until = url, left, until
        self.named: list[str] = []

    async def continue_sample(self, sample: Any, environment: Any = (), *, params: SamplingParams) -> Any:
        if len(self.named) == self.until:
            raise NoAnswer(f"server {self.url} cannot be reached")
        self.named.append(sample.name)
        return await super().continue_sample(sample, environment, params=params)


@pytest.mark.parametrize(
    ("until", "named"),
    [
        # nothing moves: the engine far away and the near one that did not begin it are not asked
        (99, [["p/0"] * 3, [], []]),
        # the near engine that is left takes over, and keeps what has moved
        (1, [["p/0"], ["p/0"] * 2, []]),
    ],
)
def test_the_turns_that_an_environment_answers_stay_where_their_prefix_is(until: int, named: list[list[str]]) -> None:
    left: dict[str, Any] = {}
    engines = [Near("http://0", left, until), Near("http://1", left), Near("http://2", left)]
    serving = Serving([e.url for e in engines], limit_s=60.0)
    pool = EnginePool(engines, serving, near=["http://0", "http://1"])

    def make(prompt: Any, *, seed: int) -> Any:
        return lambda sample, turn: Observation(ends=True) if turn == "24" else Observation(text="<>")

    (sample,) = played(pool, make)  # type: ignore[arg-type]
    assert transcript(sample) == "7<>8+9<>10<>24"
    assert [e.named for e in engines] == named
