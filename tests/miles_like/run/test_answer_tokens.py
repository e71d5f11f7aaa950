"""The text that servers score after a publication fits on them: an engine refuses one of its whole context.

Not covered: that each engine does refuse it (tests/vllm_cpu, whose configuration serves 256 tokens).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.run.alignment import answer_tokens

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "setting", "most"),
    [
        ("tiny_vllm", "rollout.vllm.max_model_len=256", 255),
        ("tiny_vllm", "rollout.vllm.max_model_len=100", 99),
        ("tiny_vllm", "rollout.vllm.max_model_len=512", 256),  # publish.answer_tokens
        ("tiny", "rollout.embedded.context_length=200", 199),
        ("opd_deepseek_v3", "rollout.sglang.context_length=64", 63),
        ("opd_deepseek_v3", "data.max_prompt_tokens=40", 40),
    ],
)
def test_the_text_has_room_for_a_token_on_each_engine(name: str, setting: str, most: int) -> None:
    config = load_config(ROOT / "configs" / f"{name}.toml", [setting])
    assert answer_tokens(config, {"max_position_embeddings": 4096}) == most


def test_a_model_of_few_positions_has_a_shorter_text() -> None:
    config = load_config(ROOT / "configs" / "opd_deepseek_v3.toml")
    assert config.rollout.served_tokens is None
    assert answer_tokens(config, {"max_position_embeddings": 128}) == 127
    assert answer_tokens(config, {}) == config.publish.answer_tokens
