"""When a running job checks its servers, and what it says of what it finds.

The comparison itself is a stand-in. Not covered: what it finds (tests/laws/test_verify_names_faults.py), and whole runs
(tests/laws/test_routes_in_mid_run.py).
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from miles_like.alignment.live import Comparison as LiveComparison
from miles_like.alignment.server_checks import RunChecks, differing
from miles_like.types import Prompt, PublishReport, SamplingParams
from rollout.sglang.http_replies import NoAnswer
from rollout.wire.control import ChecksumReply, RankReply
from tests.support.fakes import FakeEngine
from tests.support.refusals import refuses
from tests.support.watched import Watched

HELD = {"a": "1", "b": "2"}
PARAMS = SamplingParams(max_new_tokens=3)
GOOD: Any = SimpleNamespace(ok=True, initial_gap=SimpleNamespace(tokens=9, kl=0.0, largest=0.0))
BAD: Any = SimpleNamespace(ok=False, sentence=lambda: "numerics: a KL of 1")


@dataclass
class Server:
    url: str = "http://a"
    held: dict[str, str] = field(default_factory=lambda: dict(HELD))
    asked: int = 0

    async def checksum(self) -> ChecksumReply:
        self.asked += 1
        return ChecksumReply(per_engine_checksum="", ranks=(RankReply(checksums=dict(self.held), per_gpu_checksum=""),))


@dataclass(frozen=True)
class Comparison:
    """As verify_live.Comparison."""

    log: list[tuple[list[int], int | None, bool]]
    answers: list[Any]
    prompts: Any = ()
    params: SamplingParams = PARAMS

    async def short(self, clients: Any, *, flush: bool, serving: Any) -> Any:
        self.log.append((list(self.prompts), self.params.sampling_seed, flush))
        return self.answers.pop(0) if self.answers else GOOD


def checks(*servers: Server, answers: tuple[Any, ...] = (), **how: Any) -> tuple[RunChecks, list[Any]]:
    log: list[Any] = []
    compare: Any = Comparison(log, list(answers))
    clients: Any = servers or (Server(),)
    given = {"check_prompts": 3, "check_every": 2, "checksums_every": 2, "seed": 0, "idle": True} | how
    console = Console(file=io.StringIO())
    prompts: Any = range(10)
    plain: Any = {"comparison": compare, "prompts": prompts, "console": console, "known": None, "republish": None}
    return RunChecks(clients=clients, **plain | given), log


def report(version: int, held: dict[str, str] | None = None) -> PublishReport:
    sums = () if held is None else (held,)
    return PublishReport(version=version, bytes=1, seconds=0.0, pause_seconds=0.0, checksums=sums)


def steps(made: RunChecks, n: int, held: dict[str, str] | None = HELD) -> None:
    async def run() -> None:
        await made.at_start(0, None)
        for step in range(n):
            await made.before_training(step)
            await made.before_publication()
            await made.published(step + 1, report(step + 1, held))

    asyncio.run(run())


def test_both_sides_are_compared_at_their_steps_on_other_prompts_and_seeds() -> None:
    made, log = checks()
    steps(made, 5)
    assert [prompts for prompts, _, _ in log] == [[0, 1, 2], [6, 7, 8], [2, 3, 4]], "at the start, after 2 and 4"
    assert len({seed for _, seed, _ in log}) == 3 and all(flush for _, _, flush in log)
    made, log = checks(idle=False)
    steps(made, 2)
    assert [flush for _, _, flush in log] == [True, False], "a server with requests under way refuses to"
    for off in ({"check_prompts": 0}, {"check_every": 0}):
        made, log = checks(**off)
        steps(made, 4)
        assert len(log) == (0 if "check_prompts" in off else 1)


def test_only_two_comparisons_that_agree_end_a_run() -> None:
    """One may be a rare near-tie; the second is of other prompts and samples."""
    made, log = checks(answers=(GOOD, BAD, GOOD))
    steps(made, 2)
    assert len(log) == 3 and log[1][:2] != log[2][:2]
    made, _ = checks(answers=(GOOD, BAD, BAD))
    with refuses(RuntimeError, 2, "KL", "--resume"):
        steps(made, 2)


def test_a_server_that_dies_in_a_comparison_is_left_out_where_it_is_replaced() -> None:
    """The comparison of a run, with a server that does not answer: the other one's samples are compared."""

    class Engine(FakeEngine):
        def __init__(self, url: str, dead: bool) -> None:
            super().__init__()
            self.url, self.dead, self.flushed = url, dead, 0

        async def generate(self, prompts: Any, *, n: int, params: SamplingParams) -> Any:
            if self.dead:
                raise NoAnswer(f"server {self.url} died")
            return await super().generate(prompts, n=n, params=params)

        async def flush_cache(self) -> None:
            if self.dead:
                raise NoAnswer(f"server {self.url} died")
            self.flushed += 1

    @dataclass(frozen=True, kw_only=True)
    class Compared(LiveComparison):
        async def of(self, groups: Any) -> Any:
            sampled.append(len(groups))
            return GOOD

    sampled: list[int] = []
    prompts = [Prompt(id=str(i), token_ids=(1, 2, 3), answer="") for i in range(4)]
    nothing: Any = None
    live: Any = Compared(trainer=nothing, replay=False, prompts=(), params=PARAMS, bounds=nothing, allowed=nothing)
    for fleet in (Watched(["http://a", "http://b"]), None):
        servers: Any = (Engine("http://a", dead=True), Engine("http://b", dead=False))
        made, _ = checks(*servers, comparison=live, prompts=prompts, fleet=fleet, checksums_every=0)
        if fleet is None:
            with pytest.raises(NoAnswer, match="http://a"):
                asyncio.run(made.at_start(0, None))
            continue
        asyncio.run(made.at_start(0, None))
        assert sampled == [3] and servers[1].flushed == 1 and servers[0] not in fleet.serving


def test_a_server_that_holds_other_weights_than_were_published_is_named_with_its_tensors() -> None:
    second = Server(url="http://b", held=HELD | {"b": "3"})
    made, _ = checks(Server(), second)
    facts = (2, "http://b", 1, 1)
    with refuses(RuntimeError, *facts):
        steps(made, 2)


def test_checksums_are_asked_for_at_their_steps_only() -> None:
    server = Server()
    steps(checks(server)[0], 4)
    assert server.asked == 2, "before steps 2 and 4"
    server = Server()
    steps(checks(server, checksums_every=0)[0], 4)
    assert not server.asked


def test_without_those_of_the_publication_the_server_s_own_after_it_count() -> None:
    """publish.verify = false, and the first publication of a run that publishes nothing at its start."""
    server = Server()
    made, _ = checks(server, checksums_every=1)

    async def run() -> None:
        await made.at_start(0, None)
        server.held["a"] = "5"
        await made.before_training(0)

    with refuses(RuntimeError, 0, 1):
        asyncio.run(run())
    steps(replace(made, clients=(Server(),)), 3, None)


def test_a_server_that_does_not_answer_is_left_to_the_next_publication_if_that_replaces_it() -> None:
    class Dead(Server):
        async def checksum(self) -> ChecksumReply:
            raise NoAnswer(f"server {self.url} cannot be reached")

    two = ["http://a", "http://b"]
    steps(checks(Server(), Dead(url="http://b"), fleet=Watched(two))[0], 2)
    none_has = checks(Dead(url="http://b"), fleet=Watched(["http://b"]), checksums_every=1)[0]
    steps(none_has, 1, None)  # hashes to keep
    with refuses(NoAnswer, "http://b"):
        steps(checks(Server(), Dead(url="http://b"))[0], 2)
    gone = Watched(two)
    gone.serving.serve(["http://a"])
    steps(checks(Server(), Server(url="http://b", held=HELD | {"b": "3"}), fleet=gone)[0], 2)  # is not asked


def test_what_differs() -> None:
    assert differing([HELD], [HELD]) == []
    assert differing([HELD], [{"a": "1", "c": "2"}]) == ["b", "c"]
    assert differing([HELD, HELD], [HELD]) == ["1 ranks in place of 2"]
