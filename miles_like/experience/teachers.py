"""Teachers: add the log-probs of a teacher to every token of scored groups.

A teacher is fed its prompt, which is the student's or longer (self-distillation), followed by the student's response,
token for token. Its score of response token i belongs to the same token whatever the lengths of the prompts, so streams
are moved from the teacher's positions to the student's.

Letters: S tokens a sample, P prompt tokens, A a teacher's prompt tokens, R response tokens, C candidates a token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from miles_like.algorithms.distillation import distill_metrics, taught_numbers
from miles_like.batch.packer import Packer
from miles_like.batch.unpacking import streams_of
from miles_like.protocols import Trainer
from miles_like.types import (
    TAUGHT,
    TEACHER,
    TEACHER_CANDIDATES,
    Prompt,
    Sample,
    SampleGroup,
    ServerLost,
)
from rollout.concurrency import all_or_first_error
from rollout.sglang.client import ServerClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire.scores import PromptScores

PromptOf = Callable[[Prompt], Sequence[int]]  # prompt tokens that a teacher is fed
_TRIES = 3  # of a request
_PAUSE_S = 1.0
_CANDIDATES = 128  # candidates a token; with more, a request holds fewer sequences: servers bound the size of a reply


def as_it_is(prompt: Prompt) -> Sequence[int]:
    """The student's own prompt tokens, for a teacher without a separate prompt."""
    return prompt.token_ids


class TeacherScores(NamedTuple):
    """A teacher's scores of one sample's response."""

    logprobs: Tensor  # [R] fp32
    candidates: Tensor | None = None  # [R, C] int64, likeliest first
    candidate_logprobs: Tensor | None = None  # [R, C] fp32


class Teacher(Protocol):
    @property
    def early(self) -> bool:
        """Whether a group may be scored as soon as it is complete, while others are sampled."""

    async def start(self) -> None:
        """Raises ValueError or RolloutError where this teacher does not fit the student."""

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        """Scores [groups][samples] of the responses."""

    async def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class TeacherProcess:
    """A server that the run has started for a teacher. One that has ended, or does not answer a request that is sent
    again, is started again, with the weights of its directory, `restarts` times within `window_s` seconds at most.

    ended: whether its process has ended. restart: starts it again and returns a client; raises RuntimeError where it
    does not come up. Both block. say: called with what happened.
    """

    client: ServerClient
    ended: Callable[[], bool]
    restart: Callable[[], ServerClient]
    say: Callable[[str], None]
    restarts: int
    window_s: float
    clock: Callable[[], float] = time.monotonic
    _restarted: deque[float] = field(default_factory=deque, init=False)  # when it was, within the window
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def after(self, failed: ServerClient, name: str, *, hangs: bool = False) -> ServerClient:
        """The client to ask again with after a request with `failed` has failed. hangs: the server has not answered
        more than once, so that it is started again whether it has ended or not. Raises RolloutError for a server that
        has ended too often or does not come up."""
        async with self._lock:
            if self.client is not failed:  # another request of the same time found it
                return self.client
            await asyncio.sleep(_PAUSE_S)  # a connection is closed before its process has ended
            ended = await asyncio.to_thread(self.ended)
            if not (ended or hangs):
                return failed
            what = "has ended" if ended else "does not answer"
            now = self.clock()
            while self._restarted and self._restarted[0] < now - self.window_s:
                self._restarted.popleft()
            if len(self._restarted) >= self.restarts:
                raise RolloutError(
                    f"server {failed.url} {what} again, after {len(self._restarted)} restarts of at most "
                    f"rollout.restarts = {self.restarts} in {self.window_s:g} s: see the server's log"
                )
            self._restarted.append(now)
            self.say(f"the server of teacher {name!r} ({failed.url}) {what}: restarting it")
            try:
                self.client = await asyncio.to_thread(self.restart)
            except RuntimeError as e:
                raise RolloutError(f"its server cannot be restarted: {e}") from None
            await failed.close()
            return self.client


class Serves(Protocol):
    """Which servers of the rollout get requests (rollout.episodes.serving)."""

    def __contains__(self, engine: Any) -> bool: ...
    def lose(self, engine: Any, error: ServerLost) -> None: ...
    async def some(self, engines: Collection[Any]) -> None:
        """Returns once one of these serves. Raises ServerLost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTeacher:
    """A teacher on one or several equal servers; each scores a share of the sequences. A request that fails is sent
    again, `_TRIES` times in all; one of the rollout's that does not answer is passed over."""

    name: str
    clients: Sequence[ServerClient]
    prompt_of: PromptOf = as_it_is
    serving: Serves | None = None  # which of the rollout's servers have the current weights; None: all of `clients`
    top_k: int = 0
    at_once: int = 64  # sequences a request
    vocabulary: int | None = None  # tokens of the student's; None: not checked
    other_tokenizer: Callable[[Path], str | None] = lambda directory: None  # (directory) -> how its tokenizer differs
    own: bool = True  # whether `close` closes the clients; False for those that the rollout uses too
    early: bool = False
    started: TeacherProcess | None = None  # its one server, in place of `clients`

    @property
    def servers(self) -> Sequence[ServerClient]:
        if self.started is not None:
            return (self.started.client,)
        serving = self.serving
        return self.clients if serving is None else [c for c in self.clients if c in serving]

    async def start(self) -> None:
        """Checks that every server answers, and that its tokenizer, if its directory can be read here, equals the
        student's. Raises RolloutError for the former and ValueError for the latter."""
        for client in self.servers:
            try:
                info = await client.model_info()
            except RolloutError as e:
                raise RolloutError(f"teacher {self.name!r}: {e}") from None
            directory = Path(info.tokenizer_path or info.model_path)
            if directory.is_dir() and (why := self.other_tokenizer(directory)):
                raise ValueError(
                    f"teacher {self.name!r} at {client.url} serves {directory}, which uses a different tokenizer "
                    f"from the student ({why}): it would score other tokens; use a teacher with the student's "
                    "tokenizer"
                )

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        """Raises RolloutError naming teacher and server."""
        asked = [(list(self.prompt_of(g.prompt)), _response(g.prompt, s)) for g in groups for s in g.samples]
        step = max(1, self.at_once * _CANDIDATES // max(_CANDIDATES, 1 + self.top_k))
        shares = [range(i, min(i + step, len(asked))) for i in range(0, len(asked), step)]
        if self.serving is not None:
            await self.serving.some(self.clients)
        try:
            done = await all_or_first_error(
                self._share(self.servers[i % len(self.servers)], [asked[j] for j in share])
                for i, share in enumerate(shares)
            )
        except RolloutError as e:
            raise RolloutError(f"teacher {self.name!r}: {e}") from None
        return _by_group(groups, (scores for part in done for scores in part))

    async def _share(self, client: ServerClient, asked: Sequence[tuple[list[int], Tensor]]) -> list[TeacherScores]:
        start = min(len(prompt) for prompt, _ in asked) - 1
        texts = [torch.cat([torch.tensor(prompt), response]) for prompt, response in asked]
        for left in reversed(range(_TRIES)):
            try:
                scores = await client.score_after(texts, start, top=self.top_k)
                break
            except RolloutError as e:
                if not left or not (self.own or (isinstance(e, ServerLost) and self.serving is not None)):
                    raise
                hangs = isinstance(e, ServerLost) and left == 1
                lost = e
            if not self.own:  # a server of the rollout, which the run replaces; another has the same weights
                assert self.serving is not None and isinstance(lost, ServerLost)
                self.serving.lose(client, lost)
                await self.serving.some(self.clients)
                client = self.servers[0]
            elif self.started is None:
                await asyncio.sleep(_PAUSE_S)
            else:
                client = await self.started.after(client, self.name, hangs=hangs)
        return [self._scores_of(of, len(response), client) for of, (_, response) in zip(scores, asked, strict=True)]

    def _scores_of(self, of: PromptScores, r: int, client: ServerClient) -> TeacherScores:
        skipped = len(of.logprobs) - r  # of a prompt that is longer than the share's shortest
        logprobs = torch.from_numpy(of.logprobs[skipped:])
        if of.top is None:
            return TeacherScores(logprobs)
        ids = torch.from_numpy(of.top.ids[skipped:])
        if self.vocabulary is not None and ids.numel() and int(ids.max()) >= self.vocabulary:
            raise RolloutError(
                f"server {client.url} returned token {int(ids.max())}, but the student has {self.vocabulary} "
                "tokens: use a teacher with the student's vocabulary, or set distillation.top_k = 0"
            )
        return TeacherScores(logprobs, ids, torch.from_numpy(of.top.logprobs[skipped:]))

    async def close(self) -> None:
        if self.own:
            await all_or_first_error(client.close() for client in self.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTeacher:
    """A teacher whose weights replace the trainer's for a forward pass."""

    trainer: Trainer
    weights: str  # their name in the trainer
    packer: Packer
    path: Path | None = None  # converted directory to load; None: the trainer has the weights
    prompt_of: PromptOf = as_it_is
    early: bool = False  # it would have to wait for the training of a step

    async def start(self) -> None:
        if self.path is not None:
            await self.trainer.load_copy(self.weights, self.path)

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        """Raises ValueError where a privileged prompt makes a sample longer than a pack."""
        lengths = [len(self.prompt_of(g.prompt)) for g in groups]
        asked = [after_prompt(g, self.prompt_of) for g in groups]
        if not any(s.response_len for g in asked for s in g.samples):
            return [[TeacherScores(torch.zeros(0)) for _ in g.samples] for g in groups]
        batch = self.packer.batch(asked)
        streams = streams_of(asked, batch, await self.trainer.logprobs(batch, weights=self.weights))
        return [[TeacherScores(stream[a:]) for stream in of] for of, a in zip(streams, lengths, strict=True)]

    async def close(self) -> None:
        """The trainer is closed by the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedScores:
    """In a rollout worker, in place of a TrainerTeacher: its scores are the samples' stream TEACHER already."""

    prompt_of: PromptOf = as_it_is
    early: bool = False

    async def start(self) -> None:
        """The run has started the teacher."""

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        return [[TeacherScores(s.streams[TEACHER][len(g.prompt.token_ids) :]) for s in g.samples] for g in groups]

    async def close(self) -> None:
        """The run closes it."""


class Teachers:
    """The teachers of a run, and the source of prompts that each one covers."""

    def __init__(
        self, teachers: Mapping[str, Teacher], teacher_of: Callable[[str], str | None], *, top_k: int = 0
    ) -> None:
        """teacher_of: source of a prompt -> name of its teacher; None: no teacher, only the reward trains the
        prompt."""
        self._teachers, self.teacher_of, self._top_k = teachers, teacher_of, top_k
        # the tokens of a group's first sample -> its scores; a group that is discarded takes them with it
        self._begun: MutableMapping[Tensor, _Begun] = WeakIdKeyDictionary()
        self._early_share = 0.0  # of the groups scored last

    @property
    def of_trainer(self) -> Mapping[str, TrainerTeacher]:
        return {name: t for name, t in self._teachers.items() if isinstance(t, TrainerTeacher)}

    def asked(self, groups: Sequence[SampleGroup], names: Sequence[str]) -> list[SampleGroup]:
        """What teachers, by their names, are fed for groups."""
        found = [(g, self._teachers[name]) for g, name in zip(groups, names, strict=True)]
        return [after_prompt(g, t.prompt_of) for g, t in found if isinstance(t, MovedScores)]

    async def restarted(self) -> bool:
        """Starts the servers again that have ended; whether there was one. Raises as `TeacherProcess.after`."""
        again = False
        for teacher in self._teachers.values():
            if isinstance(teacher, ServerTeacher) and teacher.started is not None:
                failed = teacher.started.client
                again |= await teacher.started.after(failed, teacher.name) is not failed
        return again

    def check(self, prompts: Sequence[Prompt], *, alone: bool, named: Sequence[str]) -> None:
        """Raises ValueError for a source in `named`, the sources in the configuration, that no prompt has and, with
        `alone` (no reward), for a prompt source without a teacher."""
        sources = {p.source for p in prompts}
        for source in named:
            if source not in sources:
                raise ValueError(
                    f"a teacher's sources include {source!r}, but no prompt of data.train has this source (found: "
                    f"{', '.join(repr(s) for s in sorted(sources))}): remove it, or check the column 'source'"
                )
        untaught = sorted(s for s in sources if self.teacher_of(s) is None)
        if alone and untaught:
            raise ValueError(
                f"no teacher covers prompts of source {untaught[0]!r}, and with distillation.mode = 'alone' they "
                "would train nothing: add it to a teacher's sources, leave the sources of one teacher empty (it "
                "covers the rest), or set mode = 'added'"
            )

    async def start(self) -> None:
        """Raises ValueError or RolloutError where a teacher does not fit the student."""
        for teacher in self._teachers.values():
            await teacher.start()

    async def score(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """The groups with streams TEACHER and TAUGHT, 0 at tokens that are not loss tokens or have no teacher; with
        `top_k` also candidates and TEACHER_CANDIDATES. Teachers score concurrently. Raises the first error."""
        shares: dict[str, list[int]] = {}
        for i, group in enumerate(groups):
            if (name := self.teacher_of(group.prompt.source)) is not None:
                shares.setdefault(name, []).append(i)
        begun = {i for share in shares.values() for i in share if self._of_begun(groups[i]) is not None}
        self._early_share = len(begun) / max(1, sum(map(len, shares.values())))
        done = await all_or_first_error(
            self._scores(self._teachers[name], [groups[i] for i in share]) for name, share in shares.items()
        )
        scores = {
            i: of for share, part in zip(shares.values(), done, strict=True) for i, of in zip(share, part, strict=True)
        }

        def scored(i: int, group: SampleGroup) -> SampleGroup:
            none: list[TeacherScores | None] = [None] * len(group.samples)
            of = scores.get(i, none)
            return replace(
                group, samples=tuple(self._with_scores(s, x) for s, x in zip(group.samples, of, strict=True))
            )

        return [scored(i, group) for i, group in enumerate(groups)]

    def begin(self, group: SampleGroup) -> None:
        """Begins to score a complete group, whose scores `score` awaits, if its teacher allows that. Needs a running
        event loop."""
        name = self.teacher_of(group.prompt.source)
        if name is None or not group.samples or not (teacher := self._teachers[name]).early:
            return
        task = asyncio.create_task(_one(teacher, group))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised by `score`, if it is awaited
        self._begun[group.samples[0].token_ids] = _Begun(task, tuple(id(s.token_ids) for s in group.samples))

    def _of_begun(self, group: SampleGroup) -> asyncio.Task[list[TeacherScores]] | None:
        """None for a group that is not, or not in this form, asked for."""
        found = self._begun.get(group.samples[0].token_ids) if group.samples else None
        same = found is not None and found.samples == tuple(id(s.token_ids) for s in group.samples)
        return found.task if found is not None and same else None

    async def _scores(self, teacher: Teacher, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        begun = [self._of_begun(group) for group in groups]
        rest = [group for group, task in zip(groups, begun, strict=True) if task is None]
        asked = asyncio.ensure_future(teacher.score(rest)) if rest else None
        try:
            done = [None if task is None else await task for task in begun]
            others = iter([] if asked is None else await asked)
        finally:
            if asked is not None:
                asked.cancel()
        return [next(others) if scores is None else scores for scores in done]

    def _with_scores(self, sample: Sample, scores: TeacherScores | None) -> Sample:
        mask, streams, candidates = sample.loss_mask, dict(sample.streams), sample.candidates
        streams[TAUGHT] = mask.float() if scores is not None else torch.zeros(len(mask))
        streams[TEACHER] = _placed(mask, None if scores is None else scores.logprobs, torch.zeros(1))
        if self._top_k:
            none = torch.zeros(1, self._top_k)
            candidates = _placed(mask, None if scores is None else scores.candidates, none.long())
            streams[TEACHER_CANDIDATES] = _placed(mask, None if scores is None else scores.candidate_logprobs, none)
        return replace(sample, streams=streams, candidates=candidates)

    def metrics(self, groups: Sequence[SampleGroup]) -> dict[str, float]:
        """`distill/*` of a step's groups, which `score` returned last."""
        early = any(teacher.early for teacher in self._teachers.values())
        asked = {"distill/asked_early": self._early_share} if early else {}
        return distill_metrics(groups, taught_numbers(groups), self.teacher_of) | asked

    async def close(self) -> None:
        for begun in list(self._begun.values()):
            begun.task.cancel()
        await all_or_first_error(teacher.close() for teacher in self._teachers.values())


class _Begun(NamedTuple):
    """A group whose scores are asked for."""

    task: asyncio.Task[list[TeacherScores]]
    samples: tuple[int, ...]  # ids of the tensors of their tokens


async def _one(teacher: Teacher, group: SampleGroup) -> list[TeacherScores]:
    (scores,) = await teacher.score([group])
    return scores


def _response(prompt: Prompt, sample: Sample) -> Tensor:
    """[R] tokens after the prompt, including those of an environment. Raises ValueError for a further row of an episode
    that does not begin with the prompt: what a teacher would be fed before it is not known."""
    n = len(prompt.token_ids)
    if sample.row and (sample.token_ids[:n].tolist() != list(prompt.token_ids) or bool(sample.loss_mask[:n].any())):
        raise ValueError(
            f"sample {sample.name}, a further row of its episode, does not begin with the {n} tokens of its prompt, "
            "after which a teacher scores: remove the teachers, or let every row begin with the prompt"
        )
    return sample.token_ids[n:]


def after_prompt(group: SampleGroup, prompt_of: PromptOf) -> SampleGroup:
    """A group as a teacher with another prompt is fed it."""
    prompt = prompt_of(group.prompt)
    samples = (_after_prompt(s, prompt, _response(group.prompt, s)) for s in group.samples)
    return replace(group, samples=tuple(samples))


def _after_prompt(sample: Sample, prompt: Sequence[int], response: Tensor) -> Sample:
    """The sample after another prompt: tokens and loss mask alone."""
    own = sample.loss_mask[len(sample.loss_mask) - len(response) :]
    tokens = torch.cat([torch.tensor(list(prompt), dtype=torch.int64), response])
    return replace(
        sample,
        token_ids=tokens,
        loss_mask=torch.cat([torch.zeros(len(prompt), dtype=torch.bool), own]),
        logprobs=torch.zeros(len(tokens)),
        routing=None,
        streams={},
        candidates=None,
    )


def _placed(mask: Tensor, of_response: Tensor | None, like: Tensor) -> Tensor:
    """[S] or [S, C]: scores of the last R tokens, 0 at tokens that are not loss tokens."""
    out = like.new_zeros(len(mask), *like.shape[1:])
    if of_response is not None and len(of_response):
        out[len(mask) - len(of_response) :] = of_response
        out[~mask] = 0
    return out


def _by_group(groups: Sequence[SampleGroup], scores: Iterator[TeacherScores]) -> list[list[TeacherScores]]:
    return [[next(scores) for _ in g.samples] for g in groups]
