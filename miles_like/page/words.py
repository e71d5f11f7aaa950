"""Texts of token ids, by the tokenizer.json that a run keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_like.limits.regular_files import MIB, read_own
from miles_like.page.samples import Words

TOKENIZER = "tokenizer.json"
TOKENIZER_BYTES = 128 * MIB


def words_of(run_dir: Path) -> Words | None:
    """None where the run has no tokenizer.json, as one without a rollout. Raises ValueError for one that is damaged."""
    path = run_dir / TOKENIZER
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    data = read_own(path, run_dir, TOKENIZER_BYTES)
    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as e:  # the library raises Exception itself
        raise ValueError(
            f"{path} is not a tokenizer ({str(e)[:200]}): remove it, and tokens are shown as ids"
        ) from None

    def words(ids: Sequence[int]) -> list[str]:
        return tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)

    return words
