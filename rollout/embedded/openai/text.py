"""Text input and output, for model directories with a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from miles_like.limits.regular_files import check_inside, read_regular

_TOKENIZER_BYTES = 256 << 20  # maximum size of the file


class Text:
    """`tokenizer.json`, read without transformers: importing it would double the server's start time."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def of(cls, directory: Path) -> Text:
        """Raises ValueError for a tokenizer.json that cannot be read or links out of the directory."""
        file = directory / "tokenizer.json"
        if not os.path.lexists(file):
            return cls(None)
        check_inside(file, directory)
        try:
            return cls(Tokenizer.from_buffer(read_regular(file, _TOKENIZER_BYTES)))
        except Exception as e:  # the library raises plain Exception
            raise ValueError(f"{file} is not a tokenizer ({e}): fetch it again") from None

    @property
    def known(self) -> bool:
        return self.tokenizer is not None

    def encode(self, text: object) -> list[int] | list[list[int]]:
        """Token ids of a string or of a list of strings. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("the model's directory has no tokenizer.json to encode text: send input_ids")
        if isinstance(text, str):
            return list(self.tokenizer.encode(text).ids)
        if isinstance(text, list) and all(isinstance(t, str) for t in text):
            return [list(e.ids) for e in self.tokenizer.encode_batch(text)]
        raise ValueError("text is neither a string nor a list of strings")

    def decode(self, samples: Sequence[Sequence[int]], *, trim: Sequence[bool], skip_special: bool) -> list[str] | None:
        """The text of each sample, without its last token where `trim`; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        ids = [list(s[:-1] if t else s) for s, t in zip(samples, trim, strict=True)]
        return list(self.tokenizer.decode_batch(ids, skip_special_tokens=skip_special))
