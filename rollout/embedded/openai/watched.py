"""The texts of a prompt's samples, made on the engine's thread as their tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.embedded.engine.requests import SampledToken
from rollout.embedded.openai.detokenize import Vocabulary
from rollout.embedded.openai.sample_text import Piece, SampleText


class WatchedTexts:
    """A `Watch`: samples end at stop strings.

    A tokenizer may fail on any token; the engine must not. An error ends its sample and is kept in `failure`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        samples: int,
        *,
        stops: Sequence[str],
        calls_begin: str | None,
        top: int,
        on_piece: Callable[[int, Piece], None],
    ) -> None:
        """top: as in `Watch`. on_piece: is given each piece of sample i; called where `__call__` and `end` are."""
        self._texts = [SampleText(vocabulary, stops, calls_begin=calls_begin) for _ in range(samples)]
        self._top, self._on_piece = top, on_piece
        self.failure: Exception | None = None

    @property
    def top(self) -> int:
        return self._top

    def __call__(self, index: int, token: SampledToken) -> bool:
        text = self._texts[index]
        try:
            self._on_piece(index, text.push(token))
        except Exception as e:
            self.failure = self.failure or e
            return True
        return text.finish is not None

    def end(self, index: int, reason: str) -> None:
        """Of a sample that no token has ended: aborted, or of no tokens. After its last call."""
        if self._texts[index].finish is None:
            self._on_piece(index, self._texts[index].end(reason))

    @property
    def tokens(self) -> int:
        """Sampled, of all samples, stop tokens and those of stop strings included."""
        return sum(t.tokens for t in self._texts)
