"""Names of megatron's own TransformerEngine specs, built on a CPU over a stand-in, against the local spec's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bridge.optim.param_names import renamer
from megatron_bridge.optim.te_names import checkpoint_state, is_extra, local_name, stored_key
from tests.support.refusals import check_refusal
from tests.support.tiny_models import CONFIGS, tiny, tiny_qwen

ROOT = Path(__file__).parents[3]
MODELS = {
    "deepseek": tiny(),
    "deepseek with a draft layer": tiny(num_nextn_predict_layers=1),
    "deepseek without q_lora": CONFIGS["no_q_lora_no_yarn"],
    "qwen with a dense layer": tiny_qwen(mlp_only_layers=[1]),
}
EXPERTS: dict[str, dict[str, Any]] = {"grouped": {"grouped_gemm": True}, "sequential": {}}

CASES = [(m, e) for m in MODELS for e in EXPERTS if e == "grouped" or m in ("deepseek", "qwen with a dense layer")]


def _names(kind: str, jobs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """In its own process: this one's megatron was imported without TransformerEngine."""
    arguments = [kind, json.dumps([(MODELS[model], kernels) for model, kernels in jobs])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.te_spec_names", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, ...], dict[str, Any]]:
    local = _names("local", [(model, {}) for model in MODELS])
    te = _names("te", [(model, EXPERTS[experts]) for model, experts in CASES])
    return dict(zip([(model, "local") for model in MODELS], local, strict=True)) | dict(zip(CASES, te, strict=True))


@pytest.mark.parametrize(("model", "experts"), CASES)
def test_every_parameter_has_one_local_name_and_its_shape(
    built: dict[tuple[str, ...], dict[str, Any]], model: str, experts: str
) -> None:
    """A bijection onto the local model's parameters, so that a published or saved weight is neither lost nor doubled.
    The oracle is megatron's own spec code. Not covered: that the stand-in's names are those of the installed release
    (tests/gpu compares on a real one)."""
    te, local = built[model, experts], built[model, "local"]
    assert "TEDotProductAttention" in te["types"] and ("TEGroupedMLP" in te["types"]) is (experts == "grouped")
    renamed = {local_name(name): shape for name, shape in te["parameters"].items()}
    assert len(renamed) == len(te["parameters"])
    assert renamed == local["parameters"]


@pytest.mark.parametrize(("model", "experts"), CASES)
def test_quantization_aware_training_rounds_the_same_weights_to_the_same_values(
    built: dict[tuple[str, ...], dict[str, Any]], model: str, experts: str
) -> None:
    """With either kind of linears: each weight is rounded, the experts' in one grouped linear too, and what is
    published is the weight before. Not covered: TransformerEngine's own forward; the stand-in's is a matrix product."""
    te, local = built[model, experts]["rounded"], built[model, "local"]["rounded"]
    assert te == local and any(".experts." in name for name in te)
    assert all(computed != served for computed, served in te.values())


@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_finite_is_said_by_the_experts_global_number(
    built: dict[tuple[str, ...], dict[str, Any]], model: str
) -> None:
    """One grouped linear holds all experts of a rank, and numbers them from 0: expert 3 of the second of two ranks is
    one of the model's other half, and is called as checkpoints and name patterns call it."""
    half = MODELS[model].get("n_routed_experts", MODELS[model].get("num_experts")) // 2
    expert = f"decoder.layers.2.mlp.experts.local_experts.{half + 3}.linear_fc1.weight"
    gradient, total, weight = built[model, "grouped"]["not finite"]
    check_refusal(gradient, expert, 0)
    check_refusal(total, expert, "inf", 1)
    check_refusal(weight, expert, "nan", 1)


@pytest.mark.parametrize(("model", "experts"), CASES)
def test_a_checkpoint_has_the_keys_that_the_local_model_writes(
    built: dict[tuple[str, ...], dict[str, Any]], model: str, experts: str
) -> None:
    """Else a run on GPUs could not be resumed on CPUs, nor a converted model be loaded on GPUs."""
    latent = "kv_lora_rank" in MODELS[model]
    te, local = built[model, experts]["keys"], built[model, "local"]["keys"]
    weights = [
        sorted(stored_key(key, latent_attention=latent) for name, key in keys.items() if not is_extra(name))
        for keys in (te, local)
    ]
    assert weights[0] == weights[1]
    objects = [{key for name, key in keys.items() if is_extra(name)} for keys in (te, local)]
    assert objects[1] <= objects[0], "the local spec asks for objects that a TransformerEngine model would not write"


def test_a_local_name_stays_as_it_is(built: dict[tuple[str, ...], dict[str, Any]]) -> None:
    """The map may be asked about a model of either spec."""
    for model in MODELS:
        for name in built[model, "local"]["parameters"]:
            assert local_name(name) == name


def test_only_keys_change_and_no_object_is_asked_for() -> None:
    """The names are load_state_dict's; the keys are the checkpoint's."""

    class Entry:
        def __init__(self, key: str) -> None:
            self.key, self.data = key, "something"

    fused = "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"
    extra = "decoder.layers.3.mlp.linear_fc1._extra_state"
    for loading in (False, True):
        out = checkpoint_state({fused: Entry(fused), extra: Entry(extra)}, latent_attention=True, loading=loading)
        assert out[fused].key == "decoder.layers.3.pre_mlp_layernorm.weight"
        assert (extra in out) is not loading
        assert loading or out[extra].data is None


def test_patterns_and_adapters_are_told_global_local_names() -> None:
    """The second expert rank of four experts, on a stage of layers 4 and 5: a name pattern must mean the same
    parameter in every layout and with either spec, and a module is called as its parameters are."""
    model = SimpleNamespace(
        decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=n) for n in (5, 6)]),
        config=SimpleNamespace(num_moe_experts=4),
    )
    parallel: Any = SimpleNamespace(ep_rank=1, config=SimpleNamespace(ep=2))
    rename = renamer(model, parallel)
    expert = "decoder.layers.5.mlp.experts.local_experts.3.linear_fc2.weight"
    for name in ("linear_fc2.weight1", "local_experts.1.linear_fc2.weight"):
        assert rename(f"decoder.layers.1.mlp.experts.{name}") == expert
    assert rename("decoder.layers.0.mlp.linear_fc1.layer_norm_weight") == "decoder.layers.4.pre_mlp_layernorm.weight"
    assert rename("decoder.layers.1") == "decoder.layers.5" and rename("output_layer.weight") == "output_layer.weight"
    assert rename("mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight0") == (
        "mtp.layers.0.transformer_layer.mlp.experts.local_experts.2.linear_fc1.weight"
    )
