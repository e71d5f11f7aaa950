"""When a server's log-probabilities of the known text are taken for another model's, and what the run does then.

Trainer and servers are made up. Not covered: how small a fault is found (tests/laws/test_known_answer_of_a_model.py).
"""

from __future__ import annotations

import asyncio
import io
import json
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from miles_like.alignment.known_answer import KnownAnswer, text_of
from miles_like.alignment.server_checks import RunChecks
from miles_like.types import PublishReport, ServerFault
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.samples import RoutingShape
from tests.support.refusals import refuses
from tests.support.watched import Watched

TEXT = torch.arange(40)
TRUE = -torch.rand(39, generator=torch.Generator().manual_seed(0))
NOISE = 0.01 * torch.randn(39, generator=torch.Generator().manual_seed(1))
SHAPE = RoutingShape(num_layers=2, moe_layers=(1,), top_k=2, num_experts=4)
KL = 1e-3  # explains a median of 0.030 nats of samples, of 0.060 of the text


@dataclass
class Trainer:
    """As LiveTrainer. Routes that are replayed move its log-probabilities by `moved`."""

    moved: float = 0.0
    shape: RoutingShape | None = SHAPE
    added: Tensor = field(default_factory=lambda: torch.zeros(39))
    asked: list[int] = field(default_factory=list)  # texts, of which the routes were given, a call
    text: Tensor = field(default_factory=TEXT.clone)

    async def score(self, tokens: Any, *, temperature: float, routes: Any) -> Any:
        assert temperature == 1.0 and all(
            torch.equal(ids, self.text) and not m[0] and m[1:].all()
            for ids, m in zip(tokens.ids, tokens.masks, strict=True)
        )
        self.asked.append(len(routes or ()))
        own = TRUE + self.added + (self.moved if routes else 0.0)
        return SimpleNamespace(logprobs=tuple(torch.cat([torch.zeros(1), own]) for _ in tokens.ids))


@dataclass
class Server:
    wrong: list[Tensor | float | str] = field(default_factory=list)  # what it adds, or how it fails, a call
    url: str = "http://a"
    routed: bool = True

    async def score(self, sequences: Any) -> Any:
        add = self.wrong.pop(0) if self.wrong else 0.0
        if isinstance(add, str):
            raise RolloutError(f"server {self.url} {add}")
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
    steps = [Server([torch.full((39,), steps / 32) - NOISE]) for steps in (1, 2)]  # of a BF16 logit from 4 to 8
    assert [compared(known(), server)[0] for server in steps] == [[], ["http://a"]]
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


def test_the_gap_of_a_text_that_repeats_itself_is_no_measure() -> None:
    """Each of its tokens is rounded alike, so that a publication differs by a multiple of the usual by chance: a run
    whose prompts were one word lost its servers at step 93, by 0.026 after 0.005, of which 0.060 is explained."""
    text: Any = torch.full((40,), 7)
    answer = KnownAnswer(trainer=Trainer(text=text), text=text, kl_max=KL)  # type: ignore[arg-type]
    for _ in range(3):
        assert compared(answer, Server())[0] == []
    assert compared(answer, Server([NOISE.sign() * 0.03]))[0] == [] and answer.bound == answer.explained


def test_a_fault_that_grows_slowly_does_not_raise_its_own_bound_for_long() -> None:
    answer, gap, publications = known(), 0.001, 0
    while not compared(answer, Server([torch.full((39,), gap) - NOISE]))[0]:
        gap, publications = gap * 1.1, publications + 1
    assert publications > 8 and gap < 0.02, "what the precision explains is 0.060"


def test_tokens_that_the_trainer_does_not_expect_are_less_precise() -> None:
    """A third of the text is unlikely, and differs there; where nearly all is, all is compared."""
    few = torch.where(torch.arange(39) < 13, -9.0, 0.0)
    assert compared(known(Trainer(added=few)), Server([few + torch.where(few < 0, 0.5, 0.0)]))[0] == []
    most = torch.where(torch.arange(39) < 30, -9.0, 0.0)
    assert compared(known(Trainer(added=most)), Server([most + torch.where(most < 0, 0.5, 0.0)]))[0] == ["http://a"]


@pytest.mark.parametrize(("nats", "wrong"), [(8.0, ["http://a"]), (32.0, [])])
def test_a_log_probability_of_large_logits_is_compared_relatively(nats: float, wrong: list[str]) -> None:
    """One BF16 spacing of a logit of 16 to 32 is 0.125."""
    far = torch.full((39,), -nats)
    assert compared(known(Trainer(added=far)), Server([far + 0.125]))[0] == wrong


def test_routes_that_differ_are_no_fault() -> None:
    """The trainer scores again with the server's, and only for servers that differ."""
    trainer = Trainer(moved=0.2)
    assert compared(known(trainer), Server(), Server([0.2], "http://b"))[0] == []
    assert trainer.asked == [0, 1]
    assert compared(known(Trainer(moved=0.2)), Server([0.5]))[0] == ["http://a"]
    assert compared(known(Trainer(moved=0.2)), Server([0.2], routed=False))[0] == ["http://a"]
    assert compared(known(Trainer(moved=0.2, shape=None)), Server([0.2]))[0] == ["http://a"]


def checks(answer: KnownAnswer, *servers: Any, **more: Any) -> tuple[RunChecks, list[int]]:
    sent: list[int] = []

    async def republish(version: int) -> PublishReport:
        sent.append(version)
        return report(version)

    plain: Any = {"comparison": None, "prompts": (), "console": Console(file=io.StringIO())}
    off: Any = {"check_prompts": 0, "check_every": 0, "checksums_every": 0, "seed": 0, "idle": True}
    return RunChecks(clients=servers, known=answer, republish=republish, **plain, **off, **more), sent


def report(version: int, *failed: ServerFault) -> PublishReport:
    return PublishReport(version=version, bytes=1, seconds=0.5, pause_seconds=0.25, failed=failed)


def published(made: RunChecks, step: int) -> dict[str, float]:
    async def run() -> dict[str, float]:
        await made.before_publication()
        return dict((await made.published(step, report(step)))[1])

    return asyncio.run(run())


def test_a_server_that_differs_is_published_to_once_more() -> None:
    made, sent = checks(known(), Server([0.1]), Server(url="http://b"))
    assert published(made, 3)["mismatch/known_answer"] == pytest.approx(float(NOISE.abs().median()), abs=1e-6)
    assert sent == [3]
    assert published(made, 4)["sync/republications"] == 0.0 and sent == [3]


def test_a_second_publication_counts_in_the_report_of_the_first() -> None:
    async def run() -> tuple[PublishReport, Any]:
        made, _ = checks(known(), Server([0.1]))
        await made.before_publication()
        return await made.published(3, replace(report(3), bytes=5, seconds=2.0, pause_seconds=1.0))

    whole, figures = asyncio.run(run())
    assert (whole.version, whole.bytes, whole.seconds, whole.pause_seconds) == (3, 6, 2.5, 1.25)
    assert figures["sync/republications"] == 1.0


def test_a_server_that_does_not_score_is_published_to_once_more_too() -> None:
    made, sent = checks(known(), Server(["hangs"]), Server(url="http://b"))
    assert published(made, 3)["sync/republications"] == 1.0 and sent == [3]
    made, sent = checks(known(), Server(), Server(["hangs", "hangs"], "http://b"))
    with refuses(RuntimeError, 3, "http://b", "hangs", "--resume"):
        published(made, 3)
    assert sent == [3]


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
    with refuses(RuntimeError, 0, "http://a", "once"):
        asyncio.run(run(made))
    assert sent == [0]
    made, sent = checks(known(), Server([0.1]))
    asyncio.run(run(made))
    said: Any = made.console.file
    assert sent == [0] and "version 0 is published:" in said.getvalue(), "nothing was, before"


def test_with_turns_the_weights_that_servers_are_left_with_are_scored() -> None:
    """The trainer's second answer costs the servers their weights: what they get in their place is scored again."""
    made, sent = checks(known(Trainer(moved=0.2)), Server([0.2, 0.2]), turns=True)
    published(made, 3)
    assert sent == [] and made.known is not None and made.clients[0].wrong == []  # type: ignore[attr-defined]
    bad = [0.2, 0.5, 0.5]  # as the routes explain; then a publication that went wrong, and its repetition
    made, sent = checks(known(Trainer(moved=0.2)), Server([*bad, 0.5]), turns=True)
    with refuses(RuntimeError, 3, "http://a", "not replaced", "turns"):
        published(made, 3)
    made, sent = checks(known(Trainer(moved=0.2)), Server([0.2, 0.5]), turns=False)
    published(made, 3)


def test_the_usual_gap_is_kept_over_a_resume() -> None:
    """Of the same settings; a saved one of others would take another engine's noise for a fault."""
    answer = known(settings="a")
    for _ in range(3):
        compared(answer, Server())
    again, other = known(settings="a"), known(settings="b")
    saved = json.loads(json.dumps(answer.state()))
    again.restore(saved)
    other.restore(saved)
    assert again.bound == answer.bound < other.bound == known().bound


def test_the_text_is_of_the_run_s_prompts() -> None:
    assert text_of([(1, 2, 3), (4, 5), (6,)], 4).tolist() == [1, 2, 3, 4]
    assert text_of([(1, 2, 3)], 8).tolist() == [1, 2, 3]
    assert text_of([(7,)], 8).tolist() == [7, 7]


# ---- servers that are replaced

A, B = "http://a", "http://b"


def watching(*servers: Server) -> tuple[RunChecks, Watched]:
    fleet = Watched([server.url for server in servers])
    return checks(known(), *servers, fleet=fleet)[0], fleet


def after(made: RunChecks, *failed: ServerFault) -> Any:
    async def run() -> Any:
        await made.before_publication()
        return (await made.published(3, report(3, *failed)))[1]

    return asyncio.run(run())


def test_a_server_that_differs_twice_is_given_up_and_the_others_serve() -> None:
    made, fleet = watching(Server(), Server([0.1, 0.1], B))
    figures = after(made)
    left = [("left out", [B]), ("publish", [A, B]), ("failed", [B])]
    assert fleet.log == ["prepare", *left, ("verified", [A]), "settled"]
    assert (figures["sync/republications"], figures["rollout/restarts"]) == (1.0, 0.0)


def test_a_server_that_died_is_given_up_at_once_and_one_that_refused_is_asked_again() -> None:
    died = ServerFault(B, f"server {B} died", answers=False)
    made, fleet = watching(Server(), Server(url=B))
    after(made, died)
    assert fleet.log[1] == ("failed", [B]) and fleet.log[-2:] == [("verified", [A]), "settled"]
    assert not [x for x in fleet.log if x[0] == "publish"]
    made, fleet = watching(Server(), Server(url=B))
    after(made, ServerFault(B, f"server {B} has no memory", answers=True))
    assert fleet.log[1:] == [("left out", [B]), ("publish", [A, B]), ("verified", [A, B]), "settled"]
    made, fleet = watching(Server([0.1]), Server(url=B))
    after(made, died)
    assert ("publish", [A]) in fleet.log and fleet.log[-2:] == [("verified", [A]), "settled"]


def joined(made: RunChecks, held: Any = ()) -> list[str]:
    """What is wrong with B, which joins after publication 3 of the weights with these hashes."""

    async def run() -> list[str]:
        await made.before_publication()
        died = ServerFault(B, f"server {B} died", answers=False)
        await made.published(3, replace(report(3, died), checksums=held))
        return [fault.why for fault in await made.join([B])]

    return asyncio.run(run())


def test_a_server_that_joins_is_held_to_the_text_and_the_hashes_of_the_others() -> None:
    """It is not used before it is right."""
    made, fleet = watching(Server(), Server(url=B))
    assert joined(made) == [] and fleet.log[-2:] == [("join", [B]), ("verified", [B])]
    made, fleet = watching(Server(), Server([0.1], B))
    assert B in joined(made)[0] and fleet.log[-1] == ("verified", [])
    made, fleet = watching(Server(), Server(url=B))
    fleet.joins = [replace(report(3), checksums=({"x": "2"},))]
    assert "different weights" in joined(made, ({"x": "1"},))[0] and fleet.log[-1] == ("verified", [])
    made, fleet = watching(Server(), Server(url=B))
    fleet.joins = [report(3, ServerFault(B, f"server {B} died again", answers=False))]
    assert "died again" in joined(made)[0] and fleet.log[-1] == ("verified", [])


def test_no_server_joins_while_the_trainer_s_weights_change() -> None:
    made, fleet = watching(Server())
    asyncio.run(made.before_training(2))
    assert fleet.log == ["closed"]
    fleet.needs_trainer = False
    asyncio.run(made.before_training(2))
    assert fleet.log == ["closed"], "servers load files"


def test_a_server_that_starts_with_the_weights_of_the_run_is_sent_none() -> None:
    """No publication was made: it scores the text."""
    made, fleet = watching(Server())

    async def run() -> list[Any]:
        await made.before_publication()
        await made.at_start(0, None)
        return list(await made.join([A]))

    assert asyncio.run(run()) == [] and fleet.log[-1] == ("verified", [A])
    assert not [x for x in fleet.log if x[0] == "join"]
