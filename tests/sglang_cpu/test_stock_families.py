"""Law: every family that stock SGLang loads on CPU serves what is published to it, in requests of one byte too: the
bits that one large request gives, and those that it loads from a directory.

Why it must hold: stock SGLang fuses projections within one request only, each family other ones. DeepSeek and Qwen3-MoE
are in test_stock_sglang.py, in every `make test-sglang`; these are further families. Not covered: quantized weights;
GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang_cpu.served import START_S, serve
from tests.support.engine_contract.served_engine import ServedEngine, write_models
from tests.support.engine_contract.weights import WeightsContract
from tests.support.tiny_models import tiny_dense, tiny_glm, tiny_kimi

pytestmark = [pytest.mark.slow, pytest.mark.sglang_all]
MODELS: dict[str, dict[str, Any]] = {
    "qwen_dense": tiny_dense(eos_token_id=None),
    "glm": tiny_glm(eos_token_id=None),
    "kimi": tiny_kimi(eos_token_id=None, architectures=["DeepseekV3ForCausalLM"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_bucket_size_serves_what_a_directory_does(name: str, tmp_path: Path) -> None:
    first, other = write_models(MODELS[name], tmp_path)
    with serve(first, tmp_path / "sglang.log") as server:
        server.await_ready(START_S)
        engine = ServedEngine(
            url=server.url,
            kind="sglang",
            hf=MODELS[name],
            first=first,
            other=other,
            directory=tmp_path / "published",
            seeded=False,
            rounding=0.03,
            keeps_rows=False,
        )
        WeightsContract().test_every_path_and_bucket_size_serves_the_same_weights(engine)
