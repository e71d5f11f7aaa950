"""Samples and groups of the simulated loop; they have lengths in place of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True, eq=False)
class SimSample:
    """An answer of `length` tokens, of which `tokens` are sampled. Times are seconds since the run began."""

    prompt_tokens: int
    length: int  # tokens at its end
    tokens: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # (weight version, tokens sampled by it), in order
    started: float | None = None  # first token
    ended: float | None = None  # last token

    @property
    def left(self) -> int:
        return self.length - self.tokens

    def sampled(self, n: int, version: int) -> None:
        """`n` further tokens, sampled by weights `version`."""
        self.tokens += n
        if self.spans and self.spans[-1][0] == version:
            n += self.spans.pop()[1]
        self.spans.append((version, n))

    def reset(self, spans: list[tuple[int, int]]) -> None:
        """Return to earlier spans; tokens sampled since are lost."""
        self.spans, self.tokens = list(spans), sum(n for _, n in spans)

    def trainable(self, oldest: int) -> list[tuple[int, int]]:
        """The spans of weights `oldest` or later."""
        return [(version, n) for version, n in self.spans if version >= oldest]


@dataclass(slots=True, kw_only=True, eq=False)
class SimGroup:
    """The samples of one prompt. needed: of them, for the group to be complete; the others are spare."""

    group_id: int
    samples: list[SimSample]
    needed: int
    accepted: bool = True  # by the filter
    admitted: float = 0.0
    scored: float | None = None
    mask: int | None = None  # tokens of older weights than this are not trained; None: all are

    @property
    def complete(self) -> list[SimSample]:
        """Samples that have ended, in the order of their ends: the first `needed` are the group's."""
        ended = [(s.ended, i) for i, s in enumerate(self.samples) if s.ended is not None]
        return [self.samples[i] for _, i in sorted(ended)][: self.needed]

    def spans(self) -> list[tuple[int, int]]:
        """(weight version, tokens) of the tokens to train, of all complete samples."""
        oldest = 0 if self.mask is None else self.mask
        return [span for s in self.complete for span in s.trainable(oldest)]

    @property
    def oldest_version(self) -> int:
        return min((version for version, _ in self.spans()), default=0)
