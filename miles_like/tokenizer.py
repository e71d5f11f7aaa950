"""A model directory's tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises ValueError for a directory without one: a server would start, and answer nothing that can be read."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(f"{directory} has no tokenizer files: put the model's tokenizer.json beside its weights")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return tokenizer
