"""A configuration becomes the setup that its processes would have.

Not covered: data of which nothing is known.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.device_table import device
from miles_like.rewards import load
from miles_like.timing.of_run import RESPONSE_SHARE, Facts, element_bytes, step_setup
from miles_like.timing.shape import model_shape
from miles_like.timing.step import overlap_of, step_time
from miles_like.timing.workload import Lengths
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[3]
FACTS = Facts(device=device("H100"), prompt=200.0, responses=Lengths((1000.0,)), cache_tokens=200_000.0)


def run_of(name: str, *overrides: str) -> tuple[RunConfig, dict[str, object]]:
    run = load_config(ROOT / "configs" / name, overrides)
    assert run.model.config is not None
    return run, json.loads(Path(run.model.config).read_text())


@pytest.mark.parametrize("format", [f for f in QuantFormat if f is not QuantFormat.BF16])
def test_an_element_takes_what_its_codec_stores(format: QuantFormat) -> None:
    spec = QuantSpec.of(format, "all")
    layout = make_codec(spec).layout((512, 1024))
    nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())
    assert element_bytes(spec) == pytest.approx(nbytes / (512 * 1024), rel=0.001)


def test_a_shipped_configuration_of_deepseek_v3() -> None:
    run, hf = run_of("deepseek_v3_fp8.toml")
    found = step_setup(run, hf, FACTS)
    engine = found.publish.engine
    assert (engine.servers, engine.tp, engine.ep, engine.dp, engine.deepep) == (4, 32, 32, 32, True)
    assert engine.fp8 and engine.weight_bytes == engine.expert_bytes == 1 + 4 / 128**2
    assert found.train.layer.recompute == "full" and found.train.layer.dispatcher == "flex"
    assert found.train.pack_tokens == run.max_pack_tokens and found.train.rounded
    assert found.gpus == 128 and found.colocated and overlap_of(found) == "none"
    assert found.train.passes == 0 and found.publish.path == "disk"
    assert found.load.samples == 1024 and found.train.loss_share == pytest.approx(1000 / 1200)


def test_four_bit_formats_serve_other_linears_in_bf16() -> None:
    run, hf = run_of("qwen3_30b_a3b_int4_qat.toml")
    engine = step_setup(run, hf, FACTS).publish.engine
    assert engine.expert_bytes == pytest.approx(0.5 + 2 / 32) and engine.weight_bytes == 2.0 and not engine.fp8


def test_keys_reach_the_formulas() -> None:
    run, hf = run_of(
        "qwen3_30b_a3b.toml",
        "kernels.offload_optimizer=1.0",
        "train.recompute=selective",
        "train.steps_per_rollout=4",
        "algorithm.kl_coefficient=0.1",
        "buffer.max_staleness=2",
        "publish.pause_mode=in_place",
        "cluster.colocate=false",
        "cluster.nodes=4",
        "parallel.dp=4",
        "publish.path=disk",
    )
    found = step_setup(run, hf, FACTS)
    assert found.train.offload == 1.0 and found.train.layer.again == {"core_attn", "moe"}
    assert found.train.passes == 2 and found.train.swaps == 1 and found.load.steps_per_rollout == 4
    assert overlap_of(found) == "beside" and found.staleness == 2 and found.gpus == 32
    assert found.publish.path == "disk"


def test_without_facts_lengths_are_shares_of_their_limits() -> None:
    run, hf = run_of("qwen3_30b_a3b.toml")
    found = step_setup(run, hf, Facts(device=device("H200")))
    assert found.load.responses.mean == pytest.approx(RESPONSE_SHARE * run.rollout.max_new_tokens)
    assert found.train.layer.device.name == "H200"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_configuration_has_a_step_time(path: Path) -> None:
    run = load_config(path)
    if not run.cluster.gpus_per_node or run.servers is None or run.model.config is None:
        return
    hf = json.loads(Path(run.model.config).read_text())
    time = step_time(model_shape(hf), step_setup(run, hf, FACTS))
    assert time.seconds > 0 and time.tokens_per_s_per_gpu > 0 and 0 < time.train_mfu < 0.6


def test_a_supervised_run_has_no_rollout() -> None:
    run = load_config(ROOT / "configs" / "tiny_sft.toml")
    with refuses(ValueError, "algorithm.name"):
        step_setup(run, {}, FACTS)


REMOTE = ("reward.name=remote", "reward.remote.url=http://127.0.0.1:9")


def test_scores_wait_for_as_many_calls_as_the_run_makes() -> None:
    assert step_setup(*run_of("qwen3_4b.toml", *REMOTE, "reward.concurrency=7"), FACTS).reward.at_once == 7
    assert step_setup(*run_of("qwen3_4b.toml"), FACTS).reward.at_once == load.CALLS
