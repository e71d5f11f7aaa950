"""Law: a model that stock vLLM 0.32 loads, reloads or computes wrongly is refused before a server is started.

Why it must hold: vLLM answers with HTTP 200 and log-probabilities of other models, or ends at the first request. For
experts the server itself shows it (tests/vllm_cpu). Not covered: GPUs, where nothing of this was run.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_bridge.config import PrecisionConfig
from miles_like.run.setup.engine_support import check_engine
from rollout.config import RolloutConfig
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import tiny, tiny_qwen

VLLM = RolloutConfig(engine="vllm")
BF16 = PrecisionConfig(format="bf16")
DENSE = {
    **{k: v for k, v in tiny_qwen(model_type="qwen3").items() if "expert" not in k},
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("hf", "gpus", "facts"),
    [
        (tiny_qwen(), 0, ("experts", "cluster.gpus_per_node", 0, "rollout.engine")),
        (tiny(topk_method="noaux_tc"), 0, ("latent", "cluster.gpus_per_node", 0)),
        ({**DENSE, "tie_word_embeddings": True}, 0, ("tie_word_embeddings", "true", "cluster.gpus_per_node")),
        ({**DENSE, "head_dim": 48}, 0, (48, 32, 64)),
        ({k: v for k, v in tiny().items() if k != "topk_method"}, 8, ("topk_method", "noaux_tc")),
    ],
    ids=["moe", "latent", "tied", "head", "topk"],
)
def test_what_it_serves_wrongly_is_refused(hf: dict[str, Any], gpus: int, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        check_engine(VLLM, BF16, hf, gpus_per_node=gpus)


def test_what_it_serves_right_is_not() -> None:
    check_engine(VLLM, BF16, DENSE, gpus_per_node=0)
    check_engine(VLLM, BF16, tiny_qwen(), gpus_per_node=8)
    check_engine(VLLM, BF16, tiny(topk_method="noaux_tc"), gpus_per_node=8)


def test_quantized_weights_are_refused() -> None:
    """A publication would load them again while the server runs, which is not known to be right."""
    with refuses(ValueError, "precision.format", "fp8"):
        check_engine(VLLM, PrecisionConfig(format="fp8", qat=True), tiny_qwen(), gpus_per_node=8)
