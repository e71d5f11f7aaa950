"""Replies -> samples. A sample starts as its prompt and is extended by one reply per turn.

Letters: S tokens a sample, R response tokens of one reply, L MoE layers, K experts a token. Row i holds the routes of
token i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from miles_like.types import Finish, Prompt, Sample, VersionSpan
from rollout.wire.generate import GenerateReply, WireSpan
from rollout.wire.scores import PromptScores, prompt_scores
from routing_replay.ids import payload_line
from routing_replay.trace import RoutingTrace
from routing_replay.versions import joined, step_of
from routing_replay.wire import read_wire_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """The shape of `routed_experts`, which a reply does not contain."""

    num_layers: int  # all decoder layers, including dense ones and without MTP layers
    moe_layers: tuple[int, ...]  # [L] indices of the MoE layers, from 0
    top_k: int  # K
    num_experts: int
    gates: bool = False  # also read gate weights, which only the embedded engine returns

    @property
    def payload(self) -> str:
        """The size of the routes, for the log."""
        return payload_line(
            num_layers=self.num_layers,
            moe_layers=len(self.moe_layers),
            top_k=self.top_k,
            num_experts=self.num_experts,
        )


def empty_sample(prompt: Prompt, index: int) -> Sample:
    """Sample `index` of a prompt before its first reply."""
    s = len(prompt.token_ids)
    return Sample(
        prompt_id=prompt.id,
        index=index,
        token_ids=torch.tensor(prompt.token_ids, dtype=torch.int64),
        loss_mask=torch.zeros(s, dtype=torch.bool),
        logprobs=torch.zeros(s),
        routing=None,
        versions=(),
        finish=Finish.ABORT,
        text="",
    )


def empty_samples(prompt: Prompt, n: int) -> list[Sample]:
    """Samples 0 .. n-1 of a prompt before their first replies. They share tensors."""
    first = empty_sample(prompt, 0)
    return [first, *(replace(first, index=j) for j in range(1, n))]


def routing_rows(sample: Sample) -> int:
    """Number of its routing rows: the `routed_experts_start_len` of the request that continues it."""
    return 0 if sample.routing is None else len(sample.routing)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReader:
    """Reads replies into samples.

    routing: None for a dense model. decode: token ids -> text, for servers that run without a tokenizer.
    """

    routing: RoutingShape | None
    decode: Callable[[Sequence[int]], str] | None = None

    @property
    def routes_per_token(self) -> int:
        """Number of 4-byte values in a reply for the routes and gate weights of one token."""
        shape = self.routing
        return 0 if shape is None else shape.num_layers * shape.top_k * (2 if shape.gates else 1)

    @property
    def gates(self) -> bool:
        return self.routing is not None and self.routing.gates

    def extend(
        self, samples: Sequence[Sample], environment: Sequence[Sequence[int]], replies: Sequence[GenerateReply]
    ) -> list[Sample]:
        """Append to each sample the tokens of its environment, which are not loss tokens, and its reply.

        All samples have equally many routing rows, and the replies contain the rows that follow. A reply that was
        aborted before its first token leaves the sample as it was. Raises ValueError naming the sample for counts that
        do not agree, for routes that are missing or wrong, and for routes computed by other weights than those that
        sampled the tokens.
        """
        live = [i for i, r in enumerate(replies) if not self._is_empty(r)]
        tokens = {i: torch.cat([samples[i].token_ids, *_new_ids(environment[i], replies[i])]) for i in live}
        for i in live:
            want, s = len(tokens[i]) - len(replies[i].output_ids), samples[i]
            if replies[i].prompt_tokens != want:
                raise ValueError(
                    f"sample {s.name} was sent with {want} tokens, but the server counted {replies[i].prompt_tokens}"
                )
        traces = self._traces([samples[i] for i in live], [tokens[i] for i in live], [replies[i] for i in live])
        trace_of = dict(zip(live, traces, strict=True))
        return [
            self._extended(s, tokens[i], replies[i], trace_of[i]) if i in trace_of else replace(s, finish=Finish.ABORT)
            for i, s in enumerate(samples)
        ]

    def scores(
        self, sequences: Sequence[Tensor], replies: Sequence[object]
    ) -> list[tuple[Tensor, RoutingTrace | None]]:
        """For each sequence [S] that was sent as a prompt to score: log p of tokens 1..S-1 as [S-1] fp32, and the
        routes. Raises ValueError for replies of other tokens, or without routes although `routing` is set."""
        if len(replies) != len(sequences):
            raise ValueError(f"{len(replies)} replies to {len(sequences)} prompts")
        return self.scored(sequences, [prompt_scores(r, t.numpy()) for r, t in zip(replies, sequences, strict=True)])

    def scored(
        self, sequences: Sequence[Tensor], scores: Sequence[PromptScores]
    ) -> list[tuple[Tensor, RoutingTrace | None]]:
        """As `scores`, of replies that are read already."""
        traces: list[RoutingTrace | None] = [None] * len(scores)
        if (shape := self.routing) is not None:
            if any(s.routed_experts is None for s in scores):
                raise ValueError("routed_experts is missing: start the server with --enable-return-routed-experts")
            traces = list(
                RoutingTrace.many_from_wire(
                    [s.routed_experts for s in scores if s.routed_experts is not None],
                    tokens=sequences,
                    num_layers=shape.num_layers,
                    layers=shape.moe_layers,
                    top_k=shape.top_k,
                    num_experts=shape.num_experts,
                )
            )
        return [(torch.from_numpy(s.logprobs), trace) for s, trace in zip(scores, traces, strict=True)]

    def _is_empty(self, reply: GenerateReply) -> bool:
        """Whether the reply was aborted before a token was sampled. In chunked prefill some rows may not have been
        computed then. A stock server that aborts a request waiting after a retraction returns tokens without routes;
        they cannot be trained on, so such a reply counts as empty too."""
        if reply.finish is not Finish.ABORT:
            return False
        return not len(reply.output_ids) or (self.routing is not None and reply.routed_experts is None)

    def _extended(self, sample: Sample, tokens: Tensor, reply: GenerateReply, trace: RoutingTrace | None) -> Sample:
        before, n, length = reply.prompt_tokens, sample.token_ids.shape[0], tokens.shape[0]
        assert reply.logprobs is not None  # the request has return_logprob
        mask, logprobs = torch.zeros(length, dtype=torch.bool), torch.zeros(length)
        mask[before:] = True
        logprobs[before:] = torch.from_numpy(reply.logprobs)
        first = before
        if sample.versions:  # not its first turn
            mask[:n], logprobs[:n] = sample.loss_mask, sample.logprobs
            first = int(mask.nonzero()[0, 0])
        text = self.decode(tokens[first:].tolist()) if self.decode else sample.text + (reply.text or "")
        return Sample(
            prompt_id=sample.prompt_id,
            index=sample.index,
            token_ids=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            routing=trace,
            versions=joined(sample.versions, [version_span(s) for s in reply.weight_versions], before - first),
            finish=reply.finish,
            text=text,
            spans=sample.spans,
            row=sample.row,
        )

    def _traces(
        self, samples: Sequence[Sample], tokens: Sequence[Tensor], replies: Sequence[GenerateReply]
    ) -> list[RoutingTrace | None]:
        shape = self.routing
        if shape is None or not samples:
            return [None] * len(samples)
        starts = {routing_rows(s) for s in samples}
        assert len(starts) == 1, "one routed_experts_start_len a request"
        start = starts.pop()
        if any(r.routed_experts is None for r in replies):
            raise ValueError("routed_experts is missing: start the server with --enable-return-routed-experts")
        traces = RoutingTrace.many_from_wire(
            [r.routed_experts for r in replies if r.routed_experts is not None],
            tokens=tokens,
            num_layers=shape.num_layers,
            layers=shape.moe_layers,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            start=start,
            samples=[s.name for s in samples],
            versions=[_new_rows(r, start, t.shape[0] - 1) for r, t in zip(replies, tokens, strict=True)],
        )
        if shape.gates:
            gates = [_gates(shape, r, len(t), start, s.name) for s, t, r in zip(samples, traces, replies, strict=True)]
            traces = [t.with_gates(g, start=start) for t, g in zip(traces, gates, strict=True)]
        return [
            new if s.routing is None else s.routing.append(new, start) for s, new in zip(samples, traces, strict=True)
        ]


def _gates(shape: RoutingShape, reply: GenerateReply, rows: int, start: int, sample: str) -> Tensor:
    """[rows, L, K] fp32."""
    if reply.routed_weights is None:
        raise ValueError(
            "routed_experts_weights is missing: only the embedded engine returns gate weights: start it with "
            "--enable-return-routed-weights"
        )
    return read_wire_weights(
        reply.routed_weights,
        rows,
        num_layers=shape.num_layers,
        layers=shape.moe_layers,
        top_k=shape.top_k,
        start=start,
        sample=sample,
    )


def _new_rows(reply: GenerateReply, start: int, stop: int) -> tuple[VersionSpan, ...]:
    """`row_versions` with positions relative to `start`."""
    if isinstance(reply.row_versions, str) and start < stop:  # fast path: a step has hundreds of replies
        return (VersionSpan(version_number(reply.row_versions), 0, stop - start),)
    return joined((), row_versions(reply, start, stop), -start)


def row_versions(reply: GenerateReply, start: int, stop: int) -> list[VersionSpan]:
    """The weight versions that computed the rows at positions start..stop-1, as far as the reply contains them.

    The embedded engine reports them for every row. A stock server does not. There a row was computed when the token
    after it was sampled, unless the request was retracted: then all its keys, values and routes were recomputed under
    the weights that continued it, and in a reply with several versions only the rows of the last version are certain.
    Rows of a cached prefix may be of older weights; no loss token follows them.
    """
    if isinstance(reply.row_versions, str):
        return [VersionSpan(version_number(reply.row_versions), start, stop)] if start < stop else []
    if reply.row_versions is not None:
        reported = [version_span(s) for s in reply.row_versions]
        return [VersionSpan(v, max(a, start), min(b, stop)) for v, a, b in reported if max(a, start) < min(b, stop)]
    spans = [version_span(s) for s in reply.weight_versions]
    if not spans:
        return []
    at = reply.prompt_tokens - 1  # row of the first response token
    rows = [VersionSpan(v, at + a, min(at + b, stop)) for v, a, b in spans]
    if reply.num_retractions:
        return rows[-1:] if reply.weight_version == reply.weight_versions[-1].version else []
    prompt = VersionSpan(rows[0].version, max(start, min(reply.cached_tokens, at)), at)
    return list(joined([prompt] if prompt.start < at else [], rows, 0))


def version_number(text: str) -> int:
    """The weight version as the number of steps that were trained for it (routing_replay.versions). Raises ValueError
    for a server started without a numeric version."""
    if not text.isdecimal():
        raise ValueError(f"weight version {text!r} is not a number: start the server with --weight-version 0")
    return step_of(int(text))


def version_span(span: WireSpan) -> VersionSpan:
    return VersionSpan(version_number(span.version), span.start, span.end)


def _new_ids(environment: Sequence[int], reply: GenerateReply) -> list[Tensor]:
    sampled = torch.from_numpy(np.asarray(reply.output_ids, np.int64))
    return [torch.tensor(list(environment), dtype=torch.int64), sampled] if len(environment) else [sampled]
