"""When a server's log-probabilities of the known text are taken for another model's, and what the run does then.

Trainer and servers are made up. Not covered: how small a fault is found (tests/laws/test_known_answer_of_a_model.py).
"""

from __future__ import annotations

import asyncio
import io
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from miles_like.types import PublishReport
from miles_like.verify.known_answer import KnownAnswer, text_of
from miles_like.verify.server_checks import RunChecks
from rollout.sglang.samples import RoutingShape
from tests.support.refusals import refuses

TEXT = torch.arange(40)
TRUE = -torch.rand(39, generator=torch.Generator().manual_seed(0))
NOISE = 0.01 * torch.randn(39, generator=torch.Generator().manual_seed(1))
SHAPE = RoutingShape(num_layers=2, moe_layers=(1,), top_k=2, num_experts=4)
KL = 1e-3  # explains a median of 0.030 nats


@dataclass
class Trainer:
    """As LiveTrainer. Routes that are replayed move its log-probabilities by `moved`."""

    moved: float = 0.0
    shape: RoutingShape | None = SHAPE
    added: Tensor = field(default_factory=lambda: torch.zeros(39))
    asked: list[int] = field(default_factory=list)  # texts, of which the routes were given, a call

    async def score(self, tokens: Any, *, temperature: float, routes: Any) -> Any:
        assert temperature == 1.0 and all(
            torch.equal(ids, TEXT) and not m[0] and m[1:].all() for ids, m in zip(tokens.ids, tokens.masks, strict=True)
        )
        self.asked.append(len(routes or ()))
        own = TRUE + self.added + (self.moved if routes else 0.0)
        return SimpleNamespace(logprobs=tuple(torch.cat([torch.zeros(1), own]) for _ in tokens.ids))


@dataclass
class Server:
    wrong: list[Tensor | float] = field(default_factory=list)  # what it adds, a call
    url: str = "http://a"
    routed: bool = True

    async def score(self, sequences: Any) -> Any:
        add = self.wrong.pop(0) if self.wrong else 0.0
        trace = SimpleNamespace(experts=torch.zeros(39, 1, 2, dtype=torch.uint8)) if self.routed else None
        return [(TRUE + NOISE + add, trace)]


def known(trainer: Any = None, **how: Any) -> KnownAnswer:
    return KnownAnswer(trainer=trainer or Trainer(), text=TEXT, kl_max=KL, **how)


def compared(answer: KnownAnswer, *servers: Any) -> tuple[list[str], float]:
    async def run() -> tuple[list[str], float]:
        await answer.expect()
        wrong, gap = await answer.compare(servers)
        return [w.url for w in wrong], gap

    return asyncio.run(run())


def test_what_the_precision_explains_is_no_fault_and_more_is() -> None:
    wrong, gap = compared(known(), Server(), Server([0.1], "http://b"), Server([math.nan], "http://c"))
    assert wrong == ["http://b", "http://c"] and gap == pytest.approx(float(NOISE.abs().median()), abs=1e-6)
    assert compared(known(), Server())[0] == []
    assert compared(known(exact=True), Server())[0] == ["http://a"], "equal bits leave no room"


def test_once_servers_have_agreed_what_they_differed_by_is_the_measure() -> None:
    """0.029 is explained by the precision; after publications with 0.007, it is a fault."""
    answer, small = known(), Server([NOISE.sign() * 0.02])
    assert compared(known(), small)[0] == [] and not answer._usual
    for _ in range(3):
        compared(answer, Server())
    assert 0.0001 < answer.bound < 0.029
    assert compared(answer, Server([NOISE.sign() * 0.03]))[0] == ["http://a"]
    assert len(answer._usual) == 3, "a fault is no measure"


def test_a_fault_that_grows_slowly_does_not_raise_its_own_bound_for_long() -> None:
    answer, gap, publications = known(), 0.001, 0
    while not compared(answer, Server([torch.full((39,), gap) - NOISE]))[0]:
        gap, publications = gap * 1.1, publications + 1
    assert publications > 8 and gap < 0.02, "what the precision explains is 0.030"


def test_tokens_that_the_trainer_does_not_expect_are_less_precise() -> None:
    """A third of the text is unlikely, and differs there; where nearly all is, all is compared."""
    few = torch.where(torch.arange(39) < 13, -9.0, 0.0)
    assert compared(known(Trainer(added=few)), Server([few + torch.where(few < 0, 0.5, 0.0)]))[0] == []
    most = torch.where(torch.arange(39) < 30, -9.0, 0.0)
    assert compared(known(Trainer(added=most)), Server([most + torch.where(most < 0, 0.5, 0.0)]))[0] == ["http://a"]


def test_routes_that_differ_are_no_fault() -> None:
    """The trainer scores again with the server's, and only for servers that differ."""
    trainer = Trainer(moved=0.2)
    assert compared(known(trainer), Server(), Server([0.2], "http://b"))[0] == []
    assert trainer.asked == [0, 1]
    assert compared(known(Trainer(moved=0.2)), Server([0.5]))[0] == ["http://a"]
    assert compared(known(Trainer(moved=0.2)), Server([0.2], routed=False))[0] == ["http://a"]
    assert compared(known(Trainer(moved=0.2, shape=None)), Server([0.2]))[0] == ["http://a"]


def checks(answer: KnownAnswer, *servers: Any) -> tuple[RunChecks, list[int]]:
    sent: list[int] = []

    async def republish(version: int) -> PublishReport:
        sent.append(version)
        return report(version)

    plain: Any = {"comparison": None, "prompts": (), "console": Console(file=io.StringIO())}
    off: Any = {"check_prompts": 0, "check_every": 0, "checksums_every": 0, "seed": 0, "idle": True}
    return RunChecks(clients=servers, known=answer, republish=republish, **plain, **off), sent


def report(version: int) -> PublishReport:
    return PublishReport(version=version, bytes=1, seconds=0.0, pause_seconds=0.0)


def published(made: RunChecks, step: int) -> dict[str, float]:
    async def run() -> dict[str, float]:
        await made.before_publication()
        return dict(await made.published(step, report(step)))

    return asyncio.run(run())


def test_a_server_that_differs_is_published_to_once_more() -> None:
    made, sent = checks(known(), Server([0.1]), Server(url="http://b"))
    assert published(made, 3)["mismatch/known_answer"] == pytest.approx(float(NOISE.abs().median()), abs=1e-6)
    assert sent == [3]
    assert set(published(made, 4)) == {"mismatch/known_answer"} and sent == [3]


def test_one_that_differs_twice_ends_the_run_by_name() -> None:
    made, sent = checks(known(), Server(), Server([0.1, 0.1], "http://b"))
    with refuses(RuntimeError, 3, "http://b", 0.0978, 39, "--resume"):
        published(made, 3)
    assert sent == [3]


def test_the_start_is_held_to_it_too() -> None:
    async def run(made: RunChecks) -> None:
        await made.before_publication()
        await made.at_start(0, None)

    made, sent = checks(known(), Server([0.1, 0.1]))
    with refuses(RuntimeError, 0, "http://a"):
        asyncio.run(run(made))
    assert sent == [0]


def test_the_text_is_of_the_run_s_prompts() -> None:
    assert text_of([(1, 2, 3), (4, 5), (6,)], 4).tolist() == [1, 2, 3, 4]
    assert text_of([(1, 2, 3)], 8).tolist() == [1, 2, 3]
    assert text_of([(7,)], 8).tolist() == [7, 7]
