"""A sample's tokens as text that ends at its stop strings, with the log-prob of each token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_like.types import Finish
from rollout.embedded.engine.requests import SampledToken
from rollout.embedded.openai.detokenize import Vocabulary
from rollout.embedded.openai.stops import StopScanner


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token of the text. start: characters in front of it."""

    start: int
    sampled: SampledToken


@dataclass(slots=True)
class Piece:
    """What a token added. The text of all pieces is the sample's; so are the tokens."""

    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    calls: str = ""  # the text from the first tool call on, whole, in the last piece
    finish: str | None = None  # OpenAI's finish_reason, in the last piece


class SampleText:
    """`push` each token, until a piece has a `finish`; `end` one that ends otherwise."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = (), *, calls_begin: str | None = None) -> None:
        """calls_begin: the text that a model begins its tool calls with, which are no part of `Piece.text`."""
        self._detokenizer = vocabulary.detokenizer()
        self._stops = StopScanner(stops)
        self._calls = StopScanner([calls_begin] if calls_begin else [])
        self._call_text = ""
        self._length = 0  # characters of all tokens
        self._cut = 0  # of these, those in front of a stop string for certain
        self._waiting: deque[TextToken] = deque()  # tokens that may yet belong to a stop string
        self.tokens = 0
        self.finish: str | None = None

    def push(self, token: SampledToken) -> Piece:
        assert self.finish is None, "the sample has ended"
        self.tokens += 1
        if token.finish is Finish.STOP:  # a stop token is no text
            return self.end("stop")
        new = self._detokenizer.push(token.id)
        self._waiting.append(TextToken(self._length, token))
        piece = self._scan(new)
        if self._stops.matched is not None:
            return self._ended(piece, "stop")
        if token.finish is not None:
            rest = self.end(token.finish.value)
            return Piece(piece.text + rest.text, piece.tokens + rest.tokens, rest.calls, rest.finish)
        return piece

    def end(self, reason: str) -> Piece:
        """Ends the sample with the tokens it has."""
        piece = self._scan(self._detokenizer.finish())
        if self._stops.matched is not None:
            return self._ended(piece, "stop")
        held = self._stops.flush()
        self._cut += len(held)
        piece.text += self._outside_calls(held)
        piece.tokens += self._waiting
        return self._ended(piece, reason)

    def _scan(self, new: str) -> Piece:
        self._length += len(new)
        safe = self._stops.push(new)
        self._cut += len(safe)
        tokens = []
        while self._waiting and self._waiting[0].start < self._cut:
            tokens.append(self._waiting.popleft())
        return Piece(self._outside_calls(safe), tokens)

    def _outside_calls(self, text: str) -> str:
        if self._calls.matched is not None:
            self._call_text += text
            return ""
        out = self._calls.push(text)
        if self._calls.matched is not None:
            self._call_text = self._calls.matched + self._calls.after
        return out

    def _ended(self, piece: Piece, reason: str) -> Piece:
        if self._calls.matched is None:
            piece.text += self._calls.flush()
        piece.calls, piece.finish, self.finish = self._call_text, reason, reason
        return piece
