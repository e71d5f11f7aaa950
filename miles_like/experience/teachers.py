"""Teachers: add the log-probs of a teacher to every token of scored groups.

A teacher is fed its prompt, which is the student's or longer (self-distillation), followed by the student's response,
token for token. Its score of response token i belongs to the same token whatever the lengths of the prompts, so streams
are moved from the teacher's positions to the student's.

Letters: S tokens a sample, P prompt tokens, A a teacher's prompt tokens, R response tokens, C candidates a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from miles_like.algorithms.distillation import distill_metrics
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
)
from rollout.concurrency import all_or_first_error
from rollout.sglang.client import RolloutError, SGLangClient
from rollout.wire.scores import PromptScores

PromptOf = Callable[[Prompt], Sequence[int]]  # prompt tokens that a teacher is fed
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
    async def start(self) -> None:
        """Raises ValueError or RolloutError where this teacher does not fit the student."""

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        """Scores [groups][samples] of the responses."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTeacher:
    """A teacher on one or several equal servers; each scores a share of the sequences."""

    name: str
    clients: Sequence[SGLangClient]
    prompt_of: PromptOf = as_it_is
    top_k: int = 0
    at_once: int = 64  # sequences a request
    vocabulary: int | None = None  # tokens of the student's; None: not checked
    other_tokenizer: Callable[[Path], str | None] = lambda directory: None  # (directory) -> how its tokenizer differs
    own: bool = True  # whether `close` closes the clients; False for those that the rollout uses too

    async def start(self) -> None:
        """Checks that every server answers, and that its tokenizer, if its directory can be read here, equals the
        student's. Raises RolloutError for the former and ValueError for the latter."""
        for client in self.clients:
            try:
                info = await client.model_info()
            except RolloutError as e:
                raise RolloutError(f"teacher {self.name!r}: {e}") from None
            directory = Path(info.tokenizer_path or info.model_path)
            if directory.is_dir() and (why := self.other_tokenizer(directory)):
                raise ValueError(
                    f"teacher {self.name!r} at {client.url} serves {directory}, which has another tokenizer than the "
                    f"student ({why}): it would score other words; take a teacher of the student's tokenizer"
                )

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        """Raises RolloutError naming teacher and server."""
        asked = [(list(self.prompt_of(g.prompt)), _response(g.prompt, s)) for g in groups for s in g.samples]
        step = max(1, self.at_once * _CANDIDATES // max(_CANDIDATES, 1 + self.top_k))
        shares = [range(i, min(i + step, len(asked))) for i in range(0, len(asked), step)]
        try:
            done = await all_or_first_error(
                self._share(self.clients[i % len(self.clients)], [asked[j] for j in share])
                for i, share in enumerate(shares)
            )
        except RolloutError as e:
            raise RolloutError(f"teacher {self.name!r}: {e}") from None
        return _by_group(groups, (scores for part in done for scores in part))

    async def _share(self, client: SGLangClient, asked: Sequence[tuple[list[int], Tensor]]) -> list[TeacherScores]:
        start = min(len(prompt) for prompt, _ in asked) - 1
        texts = [torch.cat([torch.tensor(prompt), response]) for prompt, response in asked]
        scores = await client.score_after(texts, start, top=self.top_k)
        return [self._scores_of(of, len(response), client) for of, (_, response) in zip(scores, asked, strict=True)]

    def _scores_of(self, of: PromptScores, r: int, client: SGLangClient) -> TeacherScores:
        skipped = len(of.logprobs) - r  # of a prompt that is longer than the share's shortest
        logprobs = torch.from_numpy(of.logprobs[skipped:])
        if of.top is None:
            return TeacherScores(logprobs)
        ids = torch.from_numpy(of.top.ids[skipped:])
        if self.vocabulary is not None and ids.numel() and int(ids.max()) >= self.vocabulary:
            raise RolloutError(
                f"server {client.url} finds token {int(ids.max())} likely, the student has {self.vocabulary}: take a "
                "teacher of the student's vocabulary, or distillation.top_k = 0"
            )
        return TeacherScores(logprobs, ids, torch.from_numpy(of.top.logprobs[skipped:]))

    async def close(self) -> None:
        if self.own:
            await all_or_first_error(client.close() for client in self.clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTeacher:
    """A teacher whose weights replace the trainer's for a forward pass."""

    trainer: Trainer
    weights: str  # their name in the trainer
    packer: Packer
    path: Path | None = None  # converted directory to load; None: the trainer has the weights
    prompt_of: PromptOf = as_it_is

    async def start(self) -> None:
        if self.path is not None:
            await self.trainer.load_copy(self.weights, self.path)

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        """Raises ValueError where a privileged prompt makes a sample longer than a pack."""
        lengths = [len(self.prompt_of(g.prompt)) for g in groups]
        asked = [
            replace(
                g, samples=tuple(_after_prompt(s, self.prompt_of(g.prompt), _response(g.prompt, s)) for s in g.samples)
            )
            for g in groups
        ]
        if not any(s.response_len for g in asked for s in g.samples):
            return [[TeacherScores(torch.zeros(0)) for _ in g.samples] for g in groups]
        batch = self.packer.batch(asked)
        streams = streams_of(asked, batch, await self.trainer.logprobs(batch, weights=self.weights))
        return [[TeacherScores(stream[a:]) for stream in of] for of, a in zip(streams, lengths, strict=True)]

    async def close(self) -> None:
        """The trainer is closed by the run."""


class Teachers:
    """The teachers of a run, and the source of prompts that each one covers."""

    def __init__(
        self, teachers: Mapping[str, Teacher], teacher_of: Callable[[str], str | None], *, top_k: int = 0
    ) -> None:
        """teacher_of: source of a prompt -> name of its teacher; None: no teacher, only the reward trains the
        prompt."""
        self._teachers, self._teacher_of, self._top_k = teachers, teacher_of, top_k

    def check(self, prompts: Sequence[Prompt], *, alone: bool, named: Sequence[str]) -> None:
        """Raises ValueError for a source in `named`, the sources in the configuration, that no prompt has and, with
        `alone` (no reward), for a prompt source without a teacher."""
        sources = {p.source for p in prompts}
        for source in named:
            if source not in sources:
                raise ValueError(
                    f"a teacher's sources name {source!r}, which no prompt of data.train has (it has "
                    f"{', '.join(repr(s) for s in sorted(sources))}): remove it, or check the column 'source'"
                )
        untaught = sorted(s for s in sources if self._teacher_of(s) is None)
        if alone and untaught:
            raise ValueError(
                f"no teacher covers prompts of source {untaught[0]!r}, and with distillation.mode = 'alone' they would "
                "train nothing: add it to a teacher's sources, give one teacher no sources (it covers the rest), or "
                "set mode = 'added'"
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
            if (name := self._teacher_of(group.prompt.source)) is not None:
                shares.setdefault(name, []).append(i)
        done = await all_or_first_error(
            self._teachers[name].score([groups[i] for i in share]) for name, share in shares.items()
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
        """`distill/*` of a step's groups."""
        return distill_metrics(groups, self._teacher_of)

    async def close(self) -> None:
        await all_or_first_error(teacher.close() for teacher in self._teachers.values())


def _response(prompt: Prompt, sample: Sample) -> Tensor:
    """[R] tokens after the prompt, including those of an environment."""
    return sample.token_ids[len(prompt.token_ids) :]


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
