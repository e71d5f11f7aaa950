"""A teacher's log-probabilities land on the tokens that they belong to, whatever prompt and kind the teacher has.

The server is the embedded engine in this process, the oracle transformers' log-probabilities of the same weights; the
trainer is one whose log-probabilities are a function of token and predecessor. Not covered: Megatron ranks and a whole
run (tests/e2e), stock SGLang.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_like.batch.packer import Packer
from miles_like.experience.teachers import ServerTeacher, TeacherProcess, Teachers, TeacherScores, TrainerTeacher
from miles_like.types import (
    TAUGHT,
    TEACHER,
    TEACHER_CANDIDATES,
    Finish,
    Prompt,
    Sample,
    SampleGroup,
    TrainBatch,
    VersionSpan,
)
from rollout.episodes.serving import Serving
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import EngineEnded, NoAnswer, RolloutError
from rollout.wire.scores import PromptScores
from tests.support.embedded_fixtures import oracle, save, served, service
from tests.support.refusals import refuses
from tests.support.spawn import free_port

HINT = (40, 41, 42)


def answered(prompt: Prompt, index: int, response: Sequence[int], masked: Sequence[int] = ()) -> Sample:
    """`masked`: places of the response that an environment wrote."""
    p, r = len(prompt.token_ids), len(response)
    mask = torch.tensor([False] * p + [i not in masked for i in range(r)], dtype=torch.bool)
    return Sample(
        prompt_id=prompt.id,
        index=index,
        token_ids=torch.tensor([*prompt.token_ids, *response]),
        loss_mask=mask,
        logprobs=torch.zeros(p + r),
        routing=None,
        versions=(VersionSpan(0, 0, r),),
        finish=Finish.STOP,
        text="",
    )


def groups() -> list[SampleGroup]:
    """Prompts and answers of several lengths, an environment's tokens in one, an answer without a token in another."""
    a = Prompt(id="a", token_ids=(5, 9, 33), answer="1", source="x")
    b = Prompt(id="b", token_ids=(7, 8, 2, 71, 3, 4), answer="2", source="y")
    return [
        SampleGroup(prompt=a, samples=(answered(a, 0, [3, 4, 5]), answered(a, 1, [60, 61, 62, 63, 64], masked=[1, 2]))),
        SampleGroup(prompt=b, samples=(answered(b, 0, [9]), answered(b, 1, []))),
    ]


def hinted(prompt: Prompt) -> tuple[int, ...]:
    """A longer prompt; the second is longer than the first by more than its own tokens."""
    return (*HINT * len(prompt.token_ids), *prompt.token_ids)


@pytest.fixture(scope="module")
def model() -> Any:
    return oracle()


@pytest.fixture(scope="module")
def url(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(service(save(model, tmp_path_factory.mktemp("teacher")))) as where:
        yield where


@torch.no_grad()
def logprobs_by(model: Any, prompt: Sequence[int], s: Sample, p: int) -> Tensor:
    """[R, V] the model's log-probabilities before each response token, after `prompt`."""
    response = s.token_ids[p:]
    ids = torch.cat([torch.tensor(list(prompt)), response])
    return model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


async def _scored(teacher: Any, top_k: int = 0, teacher_of: Any = lambda source: "t") -> list[SampleGroup]:
    teachers = Teachers({"t": teacher}, teacher_of, top_k=top_k)
    await teachers.start()
    try:
        return await teachers.score(groups())
    finally:
        await teachers.close()


@pytest.mark.parametrize("at_once", [1, 3, 64])
@pytest.mark.parametrize("privileged", [False, True])
def test_a_server_s_words_stand_at_the_student_s_places(model: Any, url: str, at_once: int, privileged: bool) -> None:
    async def run() -> list[SampleGroup]:
        clients = [SGLangClient(url, routing=None) for _ in range(2)]
        how = {"prompt_of": hinted} if privileged else {}
        return await _scored(ServerTeacher(name="t", clients=clients, top_k=4, at_once=at_once, **how), top_k=4)

    for group in asyncio.run(run()):
        p = len(group.prompt.token_ids)
        for s in group.samples:
            expected = logprobs_by(model, hinted(group.prompt) if privileged else group.prompt.token_ids, s, p)
            mask = s.loss_mask
            assert torch.equal(s.streams[TAUGHT], mask.float())
            picked = expected.gather(1, s.token_ids[p:, None])[:, 0]
            torch.testing.assert_close(s.streams[TEACHER][mask], picked[mask[p:]], atol=1e-4, rtol=1e-4)
            values, ids = expected.topk(4)
            assert s.candidates is not None and torch.equal(s.candidates[mask], ids[mask[p:]])
            torch.testing.assert_close(s.streams[TEACHER_CANDIDATES][mask], values[mask[p:]], atol=1e-4, rtol=1e-4)
            for stream in (s.streams[TEACHER], s.streams[TEACHER_CANDIDATES], s.candidates):
                assert stream.shape[0] == len(mask) and not stream[~mask].any()


def test_of_many_candidates_fewer_sequences_are_asked_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reply holds stays the same, and a server's bound on it is not met."""
    monkeypatch.setattr("miles_like.experience.teachers._CANDIDATES", 3)
    sizes: list[int] = []
    score_after = SGLangClient.score_after

    async def counted(self: SGLangClient, texts: Sequence[Tensor], *args: Any, **how: Any) -> Any:
        sizes.append(len(texts))
        return await score_after(self, texts, *args, **how)

    monkeypatch.setattr(SGLangClient, "score_after", counted)
    for top_k, want in ((2, [4]), (5, [2, 2]), (90, [1, 1, 1, 1])):
        sizes.clear()
        client = SGLangClient(url, routing=None)
        asyncio.run(_scored(ServerTeacher(name="t", clients=[client], top_k=top_k, at_once=4), top_k=top_k))
        assert sizes == want


class SpeakingTrainer:
    """log p of a label is minus (the label + its input / 100): neither place nor length enters."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.loaded: list[tuple[str, Path]] = []

    async def logprobs(self, batch: TrainBatch, *, weights: str | None = None) -> list[list[Tensor]]:
        self.asked.append(weights)
        return [[torch.where(m.loss_mask, -(m.labels + m.tokens / 100), 0.0) for m in row] for row in batch.grid]

    async def load_copy(self, name: str, path: Path) -> None:
        self.loaded.append((name, path))


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_trainer_s_words_stand_there_too(dp_size: int) -> None:
    """With a privileged prompt, over several rows, and where samples share a pack."""
    trainer: Any = SpeakingTrainer()
    how = {"packer": Packer(dp_size=dp_size, max_tokens=40, replayed=False), "prompt_of": hinted}
    teacher = TrainerTeacher(trainer=trainer, weights="w", path=Path("d"), **how)
    for group in asyncio.run(_scored(teacher)):
        for s in group.samples:
            ids = s.token_ids.float()
            want = torch.where(s.loss_mask, -(ids + ids.roll(1) / 100), 0.0)
            torch.testing.assert_close(s.streams[TEACHER], want)
            assert torch.equal(s.streams[TAUGHT], s.loss_mask.float())
    assert trainer.asked == ["w"] and trainer.loaded == [("w", Path("d"))]


def test_a_trainer_is_not_asked_about_nothing() -> None:
    trainer: Any = SpeakingTrainer()
    empty = [replace(g, samples=tuple(replace(s, loss_mask=s.loss_mask & False) for s in g.samples)) for g in groups()]
    teacher = TrainerTeacher(trainer=trainer, weights="w", packer=Packer(dp_size=1, max_tokens=99))
    assert not any(len(scored.logprobs) for of in asyncio.run(teacher.score(empty)) for scored in of)
    assert not trainer.asked


class Constant:
    """Says one number of every token."""

    def __init__(self, value: float, early: bool = False) -> None:
        self.value, self.early = value, early
        self.closed = False

    async def start(self) -> None: ...

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        return [
            [TeacherScores(torch.full((len(s.token_ids) - len(g.prompt.token_ids),), self.value)) for s in g.samples]
            for g in groups
        ]

    async def close(self) -> None:
        self.closed = True


def test_each_source_has_its_teacher_and_what_nobody_teaches_says_so() -> None:
    teacher_of: dict[str, str | None] = {"x": "one", "y": "two"}
    both = Teachers({"one": Constant(-1.0), "two": Constant(-2.0)}, teacher_of.get)
    first, second = asyncio.run(both.score(groups()))
    assert first.samples[0].streams[TEACHER].tolist() == [0, 0, 0, -1, -1, -1]
    assert first.samples[1].streams[TEACHER].tolist() == [0, 0, 0, -1, 0, 0, -1, -1]
    assert second.samples[0].streams[TEACHER].tolist() == [0] * 6 + [-2]
    found = both.metrics([first, second])
    assert found["distill/tokens/one"] == 6 and found["distill/tokens/two"] == 1
    one = Teachers({"one": Constant(-1.0)}, {"x": "one"}.get, top_k=3)
    _, untaught = asyncio.run(one.score(groups()[1:] * 2))
    s = untaught.samples[0]
    assert not s.streams[TAUGHT].any() and not s.streams[TEACHER].any()
    assert s.candidates is not None and s.candidates.shape == s.streams[TEACHER_CANDIDATES].shape == (7, 3)


def test_a_source_that_nobody_teaches_is_refused_where_teachers_are_all_there_is() -> None:
    prompts = [g.prompt for g in groups()]
    one = Teachers({"one": Constant(-1.0)}, {"x": "one"}.get)
    one.check(prompts, alone=False, named=["x"])
    with refuses(ValueError, "y", "added"):
        one.check(prompts, alone=True, named=["x"])
    with refuses(ValueError, "z", "x", "y"):
        one.check(prompts, alone=False, named=["x", "z"])


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    async def run() -> None:
        await _scored(
            ServerTeacher(name="big", clients=[SGLangClient(f"http://127.0.0.1:{free_port()}", routing=None)])
        )

    with refuses(RolloutError, "big", "/model_info"):
        asyncio.run(run())


def test_a_server_that_dies_between_two_steps_is_one_sentence(model: Any, tmp_path: Path) -> None:
    async def run(where: str) -> None:
        teacher = ServerTeacher(name="big", clients=[SGLangClient(where, routing=None)])
        with refuses(RolloutError, "big"):
            await teacher.score(groups())
        await teacher.close()

    with served(service(save(model, tmp_path / "m"))) as where:
        pass
    asyncio.run(run(where))


def test_another_tokenizer_or_vocabulary_is_refused(url: str) -> None:
    async def run(**how: Any) -> None:
        teacher = ServerTeacher(name="big", clients=[SGLangClient(url, routing=None)], top_k=4, **how)
        await _scored(teacher, top_k=4)

    with refuses(ValueError, "big", 97):
        asyncio.run(run(other_tokenizer=lambda directory: "97 tokens instead of 96"))
    with refuses(RolloutError, 8, "distillation.top_k", 0):
        asyncio.run(run(vocabulary=8))


def test_the_rollout_s_own_clients_stay_open() -> None:
    class Client:
        closed = False

        async def close(self) -> None:
            self.closed = True

    own, lent = Client(), Client()
    for client, how in ((own, {}), (lent, {"own": False})):
        wanted: Any = client
        asyncio.run(ServerTeacher(name="t", clients=[wanted], **how).close())
    assert own.closed and not lent.closed


class Counting(Constant):
    """Says of every token how often it was asked, and waits until it may answer."""

    def __init__(self) -> None:
        super().__init__(0.0, early=True)
        self.asked: list[list[str]] = []
        self.may = asyncio.Event()

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        self.asked.append([g.prompt.id for g in groups])
        self.value = float(len(self.asked))
        await self.may.wait()
        return await super().score(groups)


def test_a_complete_group_is_asked_for_while_others_are_sampled() -> None:
    """Each once. A group that came otherwise, as one that a checkpoint brought back, is asked for with its step."""

    async def run() -> tuple[list[list[str]], list[SampleGroup], dict[str, float]]:
        teacher = Counting()
        teachers = Teachers({"t": teacher}, lambda source: "t")
        early, late = groups()
        teachers.begin(early)
        await asyncio.sleep(0)
        assert teacher.asked == [["a"]], "before anything waits for it"
        trained = replace(early, samples=tuple(replace(s, text="scored") for s in early.samples))
        teacher.may.set()
        done = await teachers.score([trained, late])
        return teacher.asked, done, teachers.metrics(done)

    asked, done, found = asyncio.run(run())
    assert asked == [["a"], ["b"]] and found["distill/asked_early"] == 0.5
    assert all(bool(s.streams[TEACHER][s.loss_mask].all()) for g in done for s in g.samples)
    assert done[0].samples[0].text == "scored"


def test_a_group_of_other_samples_is_asked_for_again() -> None:
    async def run() -> list[list[str]]:
        teacher = Counting()
        teachers = Teachers({"t": teacher}, lambda source: "t")
        first, _ = groups()
        teachers.begin(first)
        teacher.may.set()
        await teachers.score([replace(first, samples=first.samples[:1])])
        return teacher.asked

    assert asyncio.run(run()) == [["a"], ["a"]]


def test_the_error_of_an_early_request_is_raised_where_its_scores_are_needed() -> None:
    class Failing(Constant):
        async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
            raise RolloutError("teacher 'big': gone")

    async def run() -> None:
        teachers = Teachers({"t": Failing(0.0, early=True)}, lambda source: "t")
        (first, _) = groups()
        teachers.begin(first)
        await asyncio.sleep(0.01)
        with pytest.raises(RolloutError, match="gone"):
            await teachers.score([first])

    asyncio.run(run())


class Flaky:
    """A client that fails so many times, then gives -1 for every token."""

    def __init__(self, failures: int, url: str = "http://here", error: type[RolloutError] = RolloutError) -> None:
        self.failures, self.url, self.closed, self.error = failures, url, False, error

    async def score_after(self, texts: Sequence[Tensor], start: int, *, top: int) -> list[PromptScores]:
        self.failures -= 1
        if self.failures >= 0:
            raise self.error(f"server {self.url} closed the connection")
        return [
            PromptScores(logprobs=np.full(len(t) - 1 - start, -1.0, np.float32), top=None, routed_experts=None)
            for t in texts
        ]

    async def close(self) -> None:
        self.closed = True


def process(client: Any, restarted: list[Any], **how: Any) -> TeacherProcess:
    """Whose server has ended as often as there are others in `restarted`."""
    limits = {"restarts": 3, "window_s": 60.0} | how
    return TeacherProcess(
        client=client, ended=lambda: bool(restarted), restart=lambda: restarted.pop(0), say=lambda text: None, **limits
    )


def test_a_server_that_has_ended_is_started_again_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that fail at the same time; what is asked again is answered by the server that took its place."""
    monkeypatch.setattr("miles_like.experience.teachers._PAUSE_S", 0.0)
    dead, other = Flaky(1 << 30), Flaky(0, "http://other")
    restarted: list[Any] = [other]
    teacher = ServerTeacher(name="big", clients=(), at_once=1, started=process(dead, restarted))
    (first, second) = asyncio.run(teacher.score(groups()))
    assert [len(s.logprobs) for s in (*first, *second)] == [3, 5, 1, 0]
    assert not restarted and dead.closed and teacher.servers == (other,)


def test_a_server_that_hangs_is_started_again_at_the_third_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process runs on. One that answers with an error is not: it would answer the same after a start."""
    monkeypatch.setattr("miles_like.experience.teachers._PAUSE_S", 0.0)
    for error, restarts in ((NoAnswer, True), (RolloutError, False)):
        said: list[str] = []
        hung, other = Flaky(1 << 30, error=error), Flaky(0, "http://other")
        how: Any = {"restart": lambda o=other: o, "say": said.append, "restarts": 1, "window_s": 60.0}
        started = TeacherProcess(client=hung, ended=lambda: False, **how)  # type: ignore[arg-type]
        teacher = ServerTeacher(name="big", clients=(), at_once=1, started=started)
        if restarts:
            assert len(asyncio.run(teacher.score(groups()))) == 2
            assert said == ["the server of teacher 'big' (http://here) does not answer: restarting it"]
        else:
            with refuses(RolloutError, "big", "http://here"):
                asyncio.run(teacher.score(groups()))
            assert not said


def test_tokens_that_a_teacher_does_not_have_are_not_sent_to_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock server ends by them. One of the student's is 64."""
    monkeypatch.setattr("miles_like.experience.teachers._PAUSE_S", 0.0)
    client: Any = SGLangClient(url, routing=None, vocabulary=64)
    with refuses(RolloutError, "big", 64, 63):
        asyncio.run(_scored(ServerTeacher(name="big", clients=[client])))


@pytest.mark.parametrize("failures", [2, 3])
def test_a_request_is_sent_three_times(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_like.experience.teachers._PAUSE_S", 0.0)
    client: Any = Flaky(failures)
    for how in ({"clients": (client,)}, {"clients": (), "started": process(Flaky(failures), [])}):
        client.failures = failures
        scored = ServerTeacher(name="big", **how).score(groups())  # type: ignore[arg-type]
        if failures < 3:
            assert len(asyncio.run(scored)) == 2
        else:
            with refuses(RolloutError, "big", "http://here"):
                asyncio.run(scored)


@pytest.mark.parametrize("error", [NoAnswer, EngineEnded])
def test_a_server_of_the_rollout_that_does_not_answer_is_passed_over(error: type[RolloutError]) -> None:
    """The run replaces it at the next publication; its own teacher's servers are asked again where they are. A refusal
    is no such failure: every server gives it."""
    dead, alive = Flaky(1 << 30, "http://dead", error), Flaky(0, "http://alive")
    both: Any = (dead, alive)
    lost: list[str] = []
    serving = Serving(["http://dead", "http://alive"], lambda url, error: lost.append(url), limit_s=60.0)
    own = ServerTeacher(name="self", clients=both, at_once=1, own=False, serving=serving)
    (first, second) = asyncio.run(own.score(groups()))
    assert [len(s.logprobs) for s in (*first, *second)] == [3, 5, 1, 0]
    assert lost == ["http://dead"] and own.servers == [alive]
    refusing: Any = (Flaky(1, "http://refuses"), alive)
    for clients, url in ((both[:1], "http://dead"), (refusing, "http://refuses")):
        with refuses(RolloutError, "self", url):
            asyncio.run(ServerTeacher(name="self", clients=clients, at_once=1, own=False).score(groups()))


def test_a_further_row_with_another_prompt_is_refused_by_teachers() -> None:
    """Its tokens after the prompt's length are not what follows the prompt."""
    (one, _) = groups()
    client: Any = Flaky(0)
    teacher, row = ServerTeacher(name="big", clients=(client,)), replace(one.samples[0], row=1)
    assert len(asyncio.run(teacher.score([replace(one, samples=(row,))]))) == 1
    with refuses(ValueError, row.name, 3, "row"):
        asyncio.run(teacher.score([replace(one, samples=(replace(row, token_ids=row.token_ids + 1),))]))


@pytest.mark.parametrize("apart_s", [0.0, 61.0])
def test_a_server_that_ends_again_and_again_ends_the_run(apart_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless that takes so long that its restarts do not count together."""
    monkeypatch.setattr("miles_like.experience.teachers._PAUSE_S", 0.0)
    others: list[Any] = [Flaky(1 << 30, "http://0"), Flaky(0, "http://1")]
    times = itertools.count(step=apart_s)
    started = process(Flaky(1 << 30), others, restarts=1, window_s=60.0, clock=lambda: next(times))
    teacher = ServerTeacher(name="big", clients=(), at_once=1, started=started)
    if apart_s:
        assert len(asyncio.run(teacher.score(groups()))) == 2
    else:
        with refuses(RolloutError, "big", "http://0", "rollout.restarts", 1, 60):
            asyncio.run(teacher.score(groups()))
