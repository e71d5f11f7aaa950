"""The tokenizer of a model directory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_like.hf.template_limits import check_template_of
from miles_like.limits.regular_files import check_inside, open_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_MORE = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that tokenizer.json defines completely


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The directory's tokenizer, by transformers. Raises ValueError for a directory without one (a server would start
    and return unreadable text) and for a chat template that exceeds the limits of template_worker.py."""
    from transformers import AutoTokenizer

    _check_files(directory)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    except Exception as e:  # the parsers raise exceptions of many classes, Exception itself among them
        why = " ".join(str(e).split())[:300]
        raise ValueError(
            f"{directory}: its tokenizer cannot be read ({type(e).__name__}: {why}): fetch the model's tokenizer again"
        ) from None
    check_template_of(tokenizer, str(directory))
    return tokenizer


def _check_files(directory: Path) -> None:
    if not any((directory / name).exists() for name in _FILES):
        raise ValueError(f"{directory} has no tokenizer files: put the model's tokenizer.json beside its weights")
    for name in (*_FILES, *_MORE):
        if os.path.lexists(directory / name):
            check_inside(directory / name, directory)
            os.close(open_regular(directory / name))


class LazyTokenizer:
    """The tokenizer of a directory, loaded without transformers if tokenizer.json is complete and no chat template is
    used. This saves about 1 s of import time, which matters where only a few rows are tokenized."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError for a directory without a tokenizer."""
        _check_files(directory)
        self._directory = directory

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._fast is None:
            ids: list[int] = self.full.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        tokenizer = self.full if self._fast is None else self._fast
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, conversation: list[dict[str, str]], **how: Any) -> Any:
        return self.full.apply_chat_template(conversation, **how)

    @property
    def eos_token_id(self) -> int | None:
        token = self._config.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if self._fast is None or not isinstance(token, str):
            eos: int | None = self.full.eos_token_id
            return eos
        found: int | None = self._fast.token_to_id(token)
        return found

    @cached_property
    def _config(self) -> dict[str, Any]:
        try:
            found = json.loads((self._directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def _fast(self) -> Any:
        """The tokenizer as the library `tokenizers` loads it; None: only transformers' class for it is complete."""
        file = self._directory / "tokenizer.json"
        if self._config.get("tokenizer_class") not in _PLAIN or not file.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises no other class
            raise ValueError(f"{file} is not a tokenizer: {e}") from e

    @cached_property
    def full(self) -> PreTrainedTokenizerBase:
        """As transformers loads it."""
        return load_tokenizer(self._directory)
