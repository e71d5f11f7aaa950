"""Text in and out, for directories that hold a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


class Text:
    """`tokenizer.json`, read without transformers: importing that would double the server's start."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, directory: Path) -> Text:
        file = directory / "tokenizer.json"
        return cls(Tokenizer.from_file(str(file)) if file.exists() else None)

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: object) -> list[int] | list[list[int]]:
        """Token ids of a string or of a list of strings. Raises ValueError without a tokenizer."""
        if self._tokenizer is None:
            raise ValueError("text was sent, but the model's directory has no tokenizer.json: send input_ids")
        if isinstance(text, str):
            return list(self._tokenizer.encode(text).ids)
        if isinstance(text, list) and all(isinstance(t, str) for t in text):
            return [list(e.ids) for e in self._tokenizer.encode_batch(text)]
        raise ValueError("text is neither a string nor a list of strings")

    def decode(self, samples: Sequence[Sequence[int]], *, trim: Sequence[bool], skip_special: bool) -> list[str] | None:
        """Of each sample, without its last token where `trim`; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        ids = [list(s[:-1] if t else s) for s, t in zip(samples, trim, strict=True)]
        return list(self._tokenizer.decode_batch(ids, skip_special_tokens=skip_special))
