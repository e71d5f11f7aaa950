"""Names of megatron's TransformerEngine specs, built on a CPU of the package's modules, against the local spec's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bridge.optim.param_names import renamer
from megatron_bridge.optim.te_names import checkpoint_state, is_extra, local_name, stored_key
from tests.support.refusals import check_refusal
from tests.support.spawn import run_ranks
from tests.support.te.facts import OPTIONAL
from tests.support.te.process import init_te
from tests.support.te_spec_names import local_names, te_names
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


@pytest.fixture(scope="module")
def te() -> dict[str, Any]:
    """In its own process: the others' megatron is imported without TransformerEngine."""
    jobs = [(MODELS[model], EXPERTS[experts]) for model, experts in CASES]
    (found,) = run_ranks(te_names, 1, jobs, begin=init_te)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def built(te: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    (local,) = run_ranks(local_names, 1, list(MODELS.values()), keep=True)
    return dict(zip([(m, "local") for m in MODELS], local, strict=True)) | dict(zip(CASES, te["built"], strict=True))


# line of ours -> what it takes for granted of the release: a fact of tests/support/te/facts.py, and its value
USES: dict[tuple[str, str], tuple[tuple[str, ...], Any]] = {
    ("megatron_bridge/optim/te_names.py", r"linear_qkv\.layer_norm_weight$"): (
        ("parameters", "LayerNormLinear"),
        ["layer_norm_weight", "weight"],
    ),
    ("megatron_bridge/optim/te_names.py", r"\.(weight|lora_a|lora_b)(\d+)$"): (
        ("parameters", "GroupedLinear"),
        ["weight0", "weight1"],
    ),
    ("megatron_bridge/step/fake_quant.py", 'leaf.rstrip("0123456789") == "weight"'): (
        ("parameters", "Linear"),
        ["weight"],
    ),
    ("megatron_bridge/optim/te_names.py", r"_extra_state\d*$"): (
        ("extra states",),
        ["Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm"],
    ),
    ("megatron_bridge/weights/checkpoint.py", "name: None for name in model.state_dict()"): (
        ("loads None",),
        ["Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm"],
    ),
    ("megatron_bridge/model/weight_functions.py", '"fuse_wgrad_accumulation"'): (
        ("fuse_wgrad_accumulation",),
        ["Linear", "LayerNormLinear", "GroupedLinear"],
    ),
    ("megatron_bridge/device/storages.py", "TransformerEngine's quantized weights"): (("quantized tensors",), True),
    ("megatron_bridge/plan/kernels.py", '_BLOCK = {"delayed"'): (
        ("recipes",),
        {
            "delayed": ["DelayedScaling", 16, 16],
            "tensorwise": ["Float8CurrentScaling", 16, 16],
            "blockwise": ["Float8BlockScaling", 16, 128],
            "mxfp8": ["MXFP8BlockScaling", 32, 32],
        },
    ),
    ("megatron_bridge/optim/optimizer.py", "(TransformerEngine's FusedAdam"): (
        ("adam",),
        "transformer_engine.FusedAdam",
    ),
    ("megatron_bridge/plan/deterministic.py", '"NVTE_ALLOW_NONDETERMINISTIC_ALGO"'): (
        ("variables",),
        ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"],
    ),
    ("pyproject.toml", "transformer-engine[pytorch,core-cu13]=="): (("version",), "2.20.2"),
}


@pytest.mark.parametrize(("path", "line"), USES, ids=[f"{Path(p).name}-{i}" for i, (p, _) in enumerate(USES)])
def test_the_release_is_as_a_line_of_ours_takes_it(te: dict[str, Any], path: str, line: str) -> None:
    """The message names the line that has to follow a release that renames something."""
    (number,) = [i for i, text in enumerate((ROOT / path).read_text().splitlines(), 1) if line in text]
    keys, want = USES[path, line]
    found = te["facts"]
    for key in keys:
        found = found[key]
    assert found == want, f"{path}:{number} needs {' of '.join(reversed(keys))} to be {want}, the release has {found}"


def test_what_megatron_finds_of_this_release_and_what_it_goes_on_without(te: dict[str, Any]) -> None:
    """A name that moves is no error: megatron binds None and takes another way. Without `te_general_gemm` a router's
    FP32 product is torch's, as on a rank of local modules; without `SplitAlongDim` query, key and value are split by
    torch. Fused permutation, rotation and padding have no other way: `kernels` offers them."""
    lacking = set(OPTIONAL) - set(te["facts"]["optional"])
    assert lacking == {"te_general_gemm", "SplitAlongDim"}


@pytest.mark.parametrize(("model", "experts"), CASES)
def test_every_parameter_has_one_local_name_and_its_shape(
    built: dict[tuple[str, ...], dict[str, Any]], model: str, experts: str
) -> None:
    """A bijection onto the local model's parameters, so that a published or saved weight is neither lost nor doubled.
    The oracle is megatron's own spec code over TransformerEngine's own modules."""
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
    published is the weight before; a linear multiplies by the rounded one."""
    te, local = built[model, experts]["rounded"], built[model, "local"]["rounded"]
    assert te == local and any(".experts." in name for name in te)
    assert all(computed != served for computed, served in te.values())


@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_finite_is_said_by_the_experts_global_number(
    built: dict[tuple[str, ...], dict[str, Any]], model: str
) -> None:
    """One grouped linear holds all experts of a rank, and numbers them from 0: expert 3 of the second of two ranks is
    one of the model's other half, and is called as checkpoints and name patterns call it."""
    hf: dict[str, Any] = MODELS[model]
    half = (hf.get("n_routed_experts") or hf["num_experts"]) // 2
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
