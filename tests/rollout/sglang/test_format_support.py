"""An engine that would change weights, or could not take the next ones, is refused before it is started.

Why it must hold: SGLang ignores tensors it does not know with HTTP 200, and quantizes again without a warning: a run
would go on with weights that were never trained. Not covered: that SGLang does as its source reads; it has not run here
on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from rollout.config import RolloutConfig, SGLangFlags
from rollout.sglang.format_support import check_served
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import launch_server
from tests.support.refusals import Facts, refuses

F = QuantFormat
MODELOPT = {"convention": "modelopt"}
SERVED: list[tuple[QuantSpec | None, tuple[str, ...]]] = [
    (None, ("hopper", "blackwell")),
    (QuantSpec.of(F.FP8), ("hopper",)),
    (QuantSpec.of(F.FP8_UE8M0), ("hopper", "blackwell")),
    (QuantSpec.of(F.INT4), ("hopper", "blackwell")),
    (QuantSpec.of(F.MXFP8), ("blackwell",)),
    (QuantSpec.of(F.MXFP8, convention="compressed-tensors"), ()),
    (QuantSpec.of(F.MXFP4), ()),
    (QuantSpec.of(F.NVFP4), ()),
    (QuantSpec.of(F.NVFP4, **MODELOPT), ("blackwell",)),
    (QuantSpec.of(F.INT4, block=(1, 40)), ()),
]


@pytest.mark.parametrize(("spec", "gpus"), SERVED, ids=str)
def test_what_each_engine_serves(spec: QuantSpec | None, gpus: tuple[str, ...]) -> None:
    check_served("embedded", spec, SGLangFlags())
    for gpu in ("hopper", "blackwell"):
        flags = SGLangFlags.model_validate({"gpu": gpu})
        if gpu in gpus:
            check_served("sglang", spec, flags)
            continue
        with refuses(ValueError, gpu):
            check_served("sglang", spec, flags)


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        (QuantSpec.of(F.FP8), ("precision.format", "fp8-ue8m0")),
        (QuantSpec.of(F.NVFP4), ("nvfp4", "modelopt")),
        (QuantSpec.of(F.MXFP8, convention="compressed-tensors"), ("mxfp8", "sglang")),
        (QuantSpec.of(F.INT4, block=(1, 40)), (32, 64, 128, 40, "precision.block")),
    ],
    ids=str,
)
def test_a_refusal_names_the_remedy(spec: QuantSpec, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        check_served("sglang", spec, SGLangFlags(gpu="blackwell"))


def test_a_directory_is_looked_at_before_its_server_is_started(tmp_path: Path) -> None:
    hf: dict[str, Any] = quantized_config({"model_type": "qwen3_moe"}, QuantSpec.of(F.FP8))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = RolloutConfig(engine="sglang", sglang=SGLangFlags(gpu="blackwell"))
    with refuses(ValueError, "fp8-ue8m0"):
        launch_server(ServerLaunch(model_path=tmp_path, config=config, log_dir=tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()
