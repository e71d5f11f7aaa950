"""The complete example of docs/families.md, executed as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_bridge.families.base import Family
from megatron_bridge.families.registry import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "initializer_range": 0.1,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def example() -> Family:
    """The family that the page's only Python block defines."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    module: dict[str, Any] = {"__name__": "mixtral"}
    exec(compile(code, str(PAGE), "exec"), module)
    family: Family = module["FAMILY"]
    return family


@contextmanager
def registered() -> Iterator[Family]:
    """Among the registry's families, by the line that the page gives, for the duration."""
    family = example()
    FAMILIES[family.name] = family
    try:
        yield family
    finally:
        del FAMILIES[family.name]
