"""One recorded episode: requests of a client as rows of tokens, each sampled token under loss once."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from miles_like.protocols import RolloutEngine
from miles_like.types import ENVIRONMENT, POLICY, Finish, Prompt, Sample, SamplingParams, Span
from rollout.chat.messages import result_spans, turn_spans
from rollout.chat.turns import Added, Chat, Tool, Turn
from rollout.openai.errors import BadRequest
from rollout.recorder.matching import Node, deepest, false_fork, normal
from rollout.seeds import seed_of

REQUESTS, ROWS = "requests", "rows"
FORKS = "forks"  # a turn that was continued already is continued in another way
FALSE_FORKS = "false_forks"  # a client changed a turn that it received, so that it cannot be continued
REBUILT = "rebuilt"  # the template does not append the messages


@dataclass(frozen=True, slots=True)
class Played:
    """One answer. start: of the turn in the sample's tokens, all before it being the prompt."""

    sample: Sample
    start: int
    turn: Turn

    @property
    def prompt_ids(self) -> list[int]:
        return [int(i) for i in self.sample.token_ids[: self.start].tolist()]

    @property
    def completion_ids(self) -> list[int]:
        return [int(i) for i in self.sample.token_ids[self.start :].tolist()]

    @property
    def logprobs(self) -> list[float]:
        return [float(p) for p in self.sample.logprobs[self.start :].tolist()]


@dataclass(slots=True, kw_only=True)
class Session:
    """The requests of one episode, sample `index` of a prompt.

    engine: returns no aborted samples (`ResumingEngine`). params: of the run, except for `max_new_tokens`, which a
    request may lower. most_tokens: of a row. The first row is sampled with the seed of the sample; further rows have
    others, since a client that sends the same messages again wants another answer.
    """

    id: str
    key: str
    prompt: Prompt
    index: int
    engine: RolloutEngine
    chat: Chat
    params: SamplingParams
    most_tokens: int
    reward: float | None = None
    failure: Exception | None = None  # of the engine
    counts: Counter[str] = field(default_factory=Counter)
    _nodes: list[Node] = field(default_factory=list)
    _rows: list[Sample] = field(default_factory=list)
    _sampled: set[int] = field(default_factory=set)  # indices of rows whose next turn is being sampled

    @property
    def rows(self) -> list[Sample]:
        """One sample for each row that has a turn, with the reward of the episode."""
        rows = [row for row in self._rows if row.response_len]
        return [dataclasses.replace(row, row=i, reward=self.reward) for i, row in enumerate(rows)]

    async def play(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), max_tokens: int | None = None
    ) -> Played:
        """The policy's answer to a conversation. Raises BadRequest for messages that the template rejects, and for a
        conversation that is too long."""
        self.counts[REQUESTS] += 1
        path, shown = tuple(map(normal, messages)), json.dumps(list(tools), sort_keys=True)
        own = [m.get("role") == "assistant" for m in messages]
        node = deepest(self._nodes, path, shown, own)
        added = None
        if node is not None:
            ids, more = node.sample.token_ids.tolist(), messages[len(node.path) :]
            added = self.chat.bridge(ids[: node.start], ids[node.start :], more, tools)
            if added is None:
                self.counts[REBUILT] += 1
        elif any(own) and false_fork(self._nodes, path, own):
            self.counts[FALSE_FORKS] += 1
        if node is None or added is None:
            row, base = self._begun(self._render(messages, tools))
            spans, new = list[Span](), tuple[int, ...]()
        else:
            row, base = self._continued(node)
            spans, new = _answer_spans(base.length, messages[len(node.path) :], added), added.token_ids
        played = await self._sample(row, base, new, spans, tools, max_tokens)
        calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in made(played.turn)]
        reply = {"role": "assistant", "content": written(played.turn), "tool_calls": calls}
        self._nodes.append(Node((*path, normal(reply)), shown, row, played.sample, played.start))
        return played

    async def continue_ids(self, ids: Sequence[int], max_tokens: int | None = None) -> Played:
        """The policy's answer to a prompt of token ids, in a row that it continues, if there is one."""
        self.counts[REQUESTS] += 1
        given = list(ids)
        fits = [
            i
            for i, r in enumerate(self._rows)
            if i not in self._sampled and r.token_ids.tolist() == given[: r.length] and r.response_len
        ]
        row = max(fits, key=lambda i: self._rows[i].length, default=None)
        if row is None:
            row, base = self._begun(given)
        else:
            base = self._rows[row]
            for node in self._nodes:
                node.continued = node.continued or node.row == row
        new = tuple(given[base.length :])
        spans = [Span(who=ENVIRONMENT, start=base.length, end=len(given))] if new else []
        return await self._sample(row, base, new, spans, (), max_tokens)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> tuple[int, ...]:
        try:
            return self.chat.render(messages, tools)
        except ValueError as e:
            raise BadRequest(str(e), "messages") from None

    def _begun(self, ids: Sequence[int]) -> tuple[int, Sample]:
        """Another row, with a prompt and no turn."""
        n = len(ids)
        return self._another(
            Sample(
                prompt_id=self.prompt.id,
                index=self.index,
                token_ids=torch.tensor(list(ids), dtype=torch.int64),
                loss_mask=torch.zeros(n, dtype=torch.bool),
                logprobs=torch.zeros(n),
                routing=None,
                versions=(),
                finish=Finish.ABORT,
                text="",
            )
        )

    def _continued(self, node: Node) -> tuple[int, Sample]:
        """The row of a node, or another one that has the node's tokens as context: its turns are under loss once."""
        if not node.continued:
            node.continued = True
            return node.row, node.sample
        self.counts[FORKS] += 1
        return self._another(
            dataclasses.replace(
                node.sample.without_loss(),
                logprobs=torch.zeros(node.sample.length),
                versions=(),
                spans=(),
                finish=Finish.ABORT,
                text="",
            )
        )

    def _another(self, row: Sample) -> tuple[int, Sample]:
        self._rows.append(row)
        self.counts[ROWS] += 1
        return len(self._rows) - 1, row

    async def _sample(
        self,
        row: int,
        base: Sample,
        new: tuple[int, ...],
        spans: list[Span],
        tools: Sequence[Tool],
        max_tokens: int | None,
    ) -> Played:
        start = base.length + len(new)
        left = self.most_tokens - start
        if left < 1:
            raise BadRequest(
                f"the conversation has {start} tokens of at most {self.most_tokens} with its answer "
                "(rollout.max_episode_tokens)",
                "messages",
                code="context_length_exceeded",
            )
        limit = min(self.params.max_new_tokens, left, max_tokens or left)
        params = dataclasses.replace(self.params, max_new_tokens=limit)
        if row and params.sampling_seed is not None:
            params = dataclasses.replace(params, sampling_seed=seed_of(params.sampling_seed, "row", row))
        self._sampled.add(row)
        try:
            sample = await self.engine.continue_sample(base, new, params=params)
        except Exception as e:  # the agent's client gets it, and the run
            self.failure = self.failure or e
            raise
        finally:
            self._sampled.discard(row)
        ids = sample.token_ids.tolist()
        turn = self.chat.parse(ids[:start], ids[start:], tools)
        status = "" if sample.finish is Finish.STOP else sample.finish.value
        inner = [_moved(s, start) for s in turn_spans(turn, len(ids) - start)]
        whole = Span(who=POLICY, start=start, end=len(ids), status=status)
        sample = dataclasses.replace(sample, spans=(*base.spans, *spans, whole, *inner))
        self._rows[row] = sample
        return Played(sample, start, turn)


def made(turn: Turn) -> list[Any]:
    """The calls of a turn that a client can make."""
    return [call for call in turn.calls if call.arguments is not None and call.name]


def written(turn: Turn) -> str:
    """A turn's text as a client gets it: calls that cannot be made are text."""
    left = [call.text for call in turn.calls if call.arguments is None or not call.name]
    return "\n".join([*([turn.content] if turn.content.strip() else []), *left])


def _answer_spans(at: int, messages: Sequence[Mapping[str, Any]], added: Added) -> list[Span]:
    whole = Span(who=ENVIRONMENT, start=at, end=at + len(added.token_ids))
    return [whole, *(_moved(s, at) for s in result_spans(messages, added))]


def _moved(span: Span, by: int) -> Span:
    return dataclasses.replace(span, start=span.start + by, end=span.end + by)
