"""Models of published runs, from the config.json that `configs` ships or the keys here; a row of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_like.timing.shape import ModelShape, model_shape

Shapes = Mapping[str, ModelShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published figure and the predicted one, in `unit`."""

    source: str
    name: str
    seen: float
    predicted: float
    unit: str
    decides: str

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.seen - 1


SHIPPED = ("deepseek_v3", "qwen3_235b_a22b", "qwen3_30b_a3b", "qwen3_32b")

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
OTHERS: Mapping[str, dict[str, Any]] = {
    "qwen3_0_6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3_4b": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    # the matrices of Llama 3.1 8B, whose architecture this project does not train
    "llama31_8b": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 128_256, "tie_word_embeddings": False},
    "glm45_air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    },
}


def published_shapes(configs: Path) -> dict[str, ModelShape]:
    """Shapes by model name. configs: directory with NAME/config.json of the shipped models. Raises OSError without."""
    shipped = {name: json.loads((configs / name / "config.json").read_text(encoding="utf-8")) for name in SHIPPED}
    return {name: model_shape(hf) for name, hf in (shipped | dict(OTHERS)).items()}
