"""`quantization_config`: what is written is read back, what others write is read or refused by the name of its key."""

from __future__ import annotations

import copy
import re
from fnmatch import fnmatch
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from quant.hf_config import quantized_config, spec_from_hf, spec_to_hf
from quant.spec import CONVENTIONS, EXPERTS_ONLY, QuantFormat, QuantSpec
from tests.support.refusals import refuses

F = QuantFormat
SPECS = [QuantSpec(format=f, convention=c) for f, cs in CONVENTIONS.items() for c in cs]
every_convention = pytest.mark.parametrize("spec", SPECS, ids=[f"{s.format}-{s.convention}" for s in SPECS])
DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
KIMI_K2 = {  # as published for Kimi-K2-Thinking, and by Miles' converter
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "model.layers.1.mlp.experts.7.down_proj",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}
MILES_MXFP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "mxfp8",
    "weight_block_size": [1, 32],
    "scale_fmt": "ue8m0",
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"],
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "model.layers.0*", "model.layers.1.self_attn"],
    "producer": {"name": "modelopt", "version": "0.33"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }
    },
}


def read(q: Any) -> QuantSpec:
    spec = spec_from_hf({"quantization_config": q})
    assert spec is not None
    return spec


@st.composite
def names(draw: st.DrawFn) -> str:
    """Of tensors, real ones and such as differ by a component or a letter."""
    prefix = draw(st.sampled_from(["model", "language_model.model", "vision_tower", "xmodel"]))
    layer = draw(st.sampled_from(["layers.0", "layers.1", "layers.10", "layers.61", "shared_head", "linear_attn"]))
    module = draw(
        st.sampled_from(
            [
                "self_attn.q_proj",
                "self_attn.kv_b_proj",
                "self_attn.indexer.wk",
                "mlp.gate",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.shared_experts.up_proj",
                "mlp.shared_expert_gate",
                "mlp.experts.1.gate_proj",
                "mlp.experts.11.down_proj",
                "xmlp.experts.1.up_proj",
                "x.self_attn.o_proj",
                "eh_proj",
            ]
        )
    )
    return draw(st.sampled_from([f"{prefix}.{layer}.{module}.weight", f"{module}.weight", "lm_head.weight"]))


PLAIN = ("self_attn", "mlp.gate_proj", "layers.1", "model.layers.0.mlp", "mlp.gate", "experts.1", "lm_head", "q_proj")
PATTERNS = (
    *PLAIN,
    "layers.*.mlp.up_proj",
    "layers.?",
    "layers.[0-5].self_attn",
    "layers.[!1]",
    "mlp.*_proj",
    r"re:.*self_attn.*",
    r"re:model\.layers\.1\.",
    "glob:*.mlp.*",
    "glob:model.layers.?.self_attn*",
)


@every_convention
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back(spec: QuantSpec, data: st.DataObject) -> None:
    """The same names are covered, and once more written it is the same text; patterns of our own come back as they are.

    Lists of names and shell patterns hold only some patterns; with the names of the model's tensors they hold all.
    """
    patterned = spec.convention == "compressed-tensors"
    ignore = tuple(data.draw(st.lists(st.sampled_from(PATTERNS if patterned else PLAIN), max_size=4, unique=True)))
    spec = QuantSpec(format=spec.format, convention=spec.convention, ignore=ignore)
    some = data.draw(st.lists(names(), min_size=12, max_size=30))
    written = spec_to_hf(spec)
    again = read(written)
    assert [n for n in some if again.covers(n, (8, 8))] == [n for n in some if spec.covers(n, (8, 8))]
    assert spec_to_hf(again) == written
    assert {p for p in ignore if p not in ("lm_head", "mlp.gate")} <= set(again.ignore) or any(":" in p for p in ignore)

    spec = QuantSpec(format=spec.format, convention=spec.convention, ignore=PATTERNS[data.draw(st.integers(0, 16)) :])
    # a listed name stands for every name that ends in it, so the names are of one model
    model = [n for n in some if not n.startswith("language_model.")]
    by_name = read(spec_to_hf(spec, model))
    assert [n for n in model if by_name.covers(n, (8, 8))] == [n for n in model if spec.covers(n, (8, 8))]


def test_expressions_mean_what_the_patterns_do() -> None:
    """To a loader that matches them from the start of a name: exactly the modules that the pattern keeps out."""
    modules = ("self_attn.q_proj", "xself_attn.x.self_attn.q_proj", "mlp.gate_proj", "mlp.experts.1.up_proj")
    layers = [f"{p}{layer}" for p in ("model.", "xmodel.", "") for layer in ("layers.1", "layers.11", "xlayers.1")]
    some = [f"{layer}.{module}" for layer in layers for module in modules]
    for pattern in PATTERNS:
        spec = QuantSpec(format=F.INT4, ignore=(pattern,))
        expressions = [p.removeprefix("re:") for p in spec_to_hf(spec)["ignore"] if p.startswith("re:")]
        kept = [n for n in some if any(re.match(e, n) for e in expressions)]
        assert kept == [n for n in some if spec.ignores(f"{n}.weight")], pattern


@every_convention
@pytest.mark.parametrize("scope", ["all", "experts"])
def test_the_usual_specs_come_back_equal(spec: QuantSpec, scope: Any) -> None:
    """A checkpoint that the run wrote is distinguished from a foreign one by comparing specs."""
    ours = QuantSpec.of(spec.format, scope, convention=spec.convention)
    assert read(spec_to_hf(ours)) == ours
    config = quantized_config({"a": 1, "quantization_config": {"stale": True}}, ours)
    assert config["a"] == 1 and spec_from_hf(config) == ours


def test_deepseeks_config_is_read_and_written() -> None:
    """What is read must be written unchanged, or a converted checkpoint would not load where the first did."""
    assert read(DEEPSEEK_V3) == QuantSpec(format=F.FP8)
    assert spec_to_hf(QuantSpec(format=F.FP8)) == DEEPSEEK_V3
    ue8m0 = DEEPSEEK_V3 | {"scale_fmt": "ue8m0"}
    assert read(ue8m0) == QuantSpec(format=F.FP8_UE8M0) and spec_to_hf(read(ue8m0)) == ue8m0
    assert read(DEEPSEEK_V3 | {"scale_fmt": "float"}) == QuantSpec(format=F.FP8)
    kept = QuantSpec(format=F.FP8, block=(64, 32), ignore=("model.layers.0.mlp",))
    assert spec_to_hf(kept)["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp"]
    assert read(spec_to_hf(kept)) == kept
    assert read(DEEPSEEK_V3 | {"ignored_layers": ["a.b"]}).ignore == ("a.b",)


def test_published_configs_are_read() -> None:
    """With the modules they keep out, by the rule of the loaders that they are published for."""
    spec = read(KIMI_K2)
    assert (spec.format, spec.block) == (F.INT4, (1, 32))
    expert = "model.layers.1.mlp.experts.{}.down_proj.weight"
    assert spec.covers(expert.format(6), (8, 8)) and not spec.covers(expert.format(7), (8, 8))
    assert spec.covers(expert.format(77), (8, 8))  # a name is a whole one
    for module in ("self_attn.q_a_proj", "mlp.gate_proj", "mlp.shared_experts.up_proj"):
        assert not spec.covers(f"model.layers.1.{module}.weight", (8, 8))
    spec = read(MILES_MXFP8)
    assert spec == QuantSpec(
        format=F.MXFP8, ignore=("model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"), convention="sglang"
    )
    spec = read(MODELOPT)
    assert (spec.format, spec.convention) == (F.NVFP4, "modelopt")
    for name, covered in (("0", False), ("05", False), ("1", False), ("2", True)):
        assert spec.covers(f"model.layers.{name}.self_attn.q_proj.weight", (8, 8)) is covered
    miles = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    assert read(miles) == QuantSpec(format=F.NVFP4, convention="modelopt")
    nested = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["a.*"]}
    assert read({"quant_method": "modelopt", "quantization": nested}).ignore == ("glob:a.*",)
    w4a4 = spec_to_hf(QuantSpec(format=F.NVFP4))
    w4a4["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "dynamic": "local"}
    assert read(w4a4).format is F.NVFP4


def test_models_that_are_not_quantized_have_no_spec() -> None:
    """bf16 checkpoints lack the key, or have it as null."""
    assert spec_from_hf({}) is None
    assert spec_from_hf({"quantization_config": None}) is None
    assert quantized_config({"quantization_config": DEEPSEEK_V3, "a": 1}, None) == {"a": 1}
    assert quantized_config({"quantization_config": DEEPSEEK_V3}, QuantSpec(format=F.BF16)) == {}
    with refuses(ValueError, "bf16"):
        spec_to_hf(QuantSpec(format=F.BF16))


WEIGHTS = "config_groups.group_0.weights."
REFUSED: list[tuple[dict[str, Any], str, Any]] = [
    *[
        (DEEPSEEK_V3, key, value)
        for key, value in [
            ("quant_method", "awq"),
            ("quant_method", None),
            ("fmt", "e5m2"),
            ("activation_scheme", "static"),
            ("scale_fmt", "e8m0"),
            ("weight_block_size", None),
            ("weight_block_size", [128]),
            ("modules_to_not_convert", "lm_head"),
        ]
    ],
    (MILES_MXFP8, "weight_block_size", [1, 64]),
    (MILES_MXFP8, "scale_fmt", "float"),
    *[
        (KIMI_K2, key, value)
        for key, value in [
            (WEIGHTS + "num_bits", 8),
            (WEIGHTS + "num_bits", 3),
            (WEIGHTS + "type", "float"),  # 4 bits, float and group are MXFP4, whose format is another
            (WEIGHTS + "symmetric", False),
            (WEIGHTS + "dynamic", True),
            (WEIGHTS + "strategy", "channel"),
            (WEIGHTS + "group_size", 12),
            (WEIGHTS + "group_size", None),
            (WEIGHTS + "actorder", "group"),
            (WEIGHTS + "block_structure", [128, 128]),
            ("config_groups.group_0.targets", ["re:.*experts.*"]),
            ("config_groups.group_0.input_activations", {"num_bits": 8}),
            ("config_groups.group_0.format", "naive-quantized"),
            ("config_groups", {}),
            ("format", "marlin-24"),
            ("quantization_status", "frozen"),
            ("kv_cache_scheme", {"num_bits": 8}),
            ("sparsity_config", {"format": "sparse-24-bitmask"}),
            ("ignore", "lm_head"),
        ]
    ],
    (spec_to_hf(QuantSpec(format=F.MXFP4)), WEIGHTS + "group_size", 16),
    (spec_to_hf(QuantSpec(format=F.MXFP4)), WEIGHTS + "scale_dtype", "torch.bfloat16"),
    (spec_to_hf(QuantSpec(format=F.NVFP4)), WEIGHTS + "group_size", 32),
    (MODELOPT, "quant_algo", "FP8"),
    (MODELOPT, "group_size", 32),
    (MODELOPT, "config_groups.group_0.weights.group_size", 32),
    (MODELOPT, "kv_cache_quant_algo", "FP8"),
]


@pytest.mark.parametrize(("config", "path", "value"), REFUSED, ids=[f"{p.split('.')[-1]}={v}" for _, p, v in REFUSED])
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], path: str, value: object) -> None:
    """Read with the wrong rule, codes become wrong weights and nothing else would fail."""
    read(config)
    q = copy.deepcopy(config)
    *above, key = path.split(".")
    at = q
    for part in above:
        at = at[part]
    at[key] = value
    where = {WEIGHTS + "type": "format", "sparsity_config": "sparsity_config.format"}.get(path, path)
    together = (where, value) == (WEIGHTS + "num_bits", 8)  # which no format has with the other two
    facts = (f"quantization_config.{WEIGHTS[:-1]}", "num_bits", 8) if together else (f"quantization_config.{where}",)
    with refuses(ValueError, *facts):
        read(q)


def test_patterns_that_a_list_cannot_hold_are_refused() -> None:
    """Written as they are, an engine would look for modules of that name, find none and load wrong weights."""
    for convention, format, pattern in (
        ("deepseek", F.FP8, "re:.*self_attn.*"),
        ("sglang", F.MXFP8, "glob:*.mlp.*"),
        ("modelopt", F.NVFP4, "layers.*.mlp"),
    ):
        spec = QuantSpec(format=format, ignore=(pattern,), convention=convention)
        with refuses(ValueError, pattern):
            spec_to_hf(spec)
        kept = spec_to_hf(spec, ["model.layers.3.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.weight"])
        want = "model.layers.3.self_attn.q_proj" if convention == "deepseek" else "model.layers.3.mlp.up_proj"
        assert (kept.get("modules_to_not_convert") or kept["ignore"])[-1] == want


LEFT_ALONE = (
    "lm_head",
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.shared_expert_gate",
    "model.layers.61.eh_proj",
    "model.layers.61.shared_head.head",
    "model.layers.3.self_attn.indexer.weights_proj",
    "model.layers.3.self_attn.q_proj",
    "model.layers.3.self_attn.o_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.3.mlp.shared_experts.down_proj",
    "model.vision_tower.blocks.0.mlp.gate_proj",
)
CONVERTED = ("model.layers.3.mlp.experts.0.gate_proj", "model.layers.3.mlp.experts.12.down_proj")


def test_compressed_tensors_leaves_alone_what_is_not_stored_quantized() -> None:
    """By its own matching, which vLLM and transformers use: a router read as packed would lack its tensors."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match

    for format in (F.INT4, F.MXFP4, F.NVFP4):
        q = QuantizationConfig.model_validate(spec_to_hf(QuantSpec.of(format)))
        scheme = q.config_groups["group_0"]
        linear = torch.nn.Linear(1, 1)
        for name in (*LEFT_ALONE, *CONVERTED):
            assert is_match(name, linear, scheme.targets, q.ignore) is (name in CONVERTED), name


def test_modelopt_patterns_keep_out_for_both_engines() -> None:
    """By the rules read in SGLang (whole names or single components) and vLLM (parts of names, shell patterns).

    Both name fused modules: gate_up_proj and qkv_proj must be kept out with their parts, the experts must not.
    """
    ignore = spec_to_hf(QuantSpec.of(F.NVFP4, convention="modelopt"))["ignore"]

    def sglang(name: str) -> bool:
        globs = [re.compile(p.replace(".", r"\.").replace("*", ".*")) for p in ignore]
        return any(g.fullmatch(name) or any(g.fullmatch(part) for part in name.split(".")) for g in globs)

    def vllm(name: str) -> bool:
        return any(p in name or fnmatch(name, p) for p in ignore)

    fused = ("model.layers.0.mlp.gate_up_proj", "model.layers.3.self_attn.qkv_proj")
    for name in (*LEFT_ALONE, *fused, *CONVERTED, "model.layers.3.mlp.experts"):
        want = name not in (*CONVERTED, "model.layers.3.mlp.experts")
        assert (sglang(name), vllm(name)) == (want, want), name
    dense = spec_to_hf(QuantSpec.of(F.NVFP4, "all", convention="modelopt"))["ignore"]
    assert not any(p in "model.layers.0.mlp.gate_up_proj" for p in dense)  # the router's name is within that one


def test_full_names_keep_out_for_every_fp8_loader() -> None:
    """transformers (from the start, or the end), vLLM (the whole name) and SGLang (a run of components)."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    weights = [f"{n}.weight" for n in (*LEFT_ALONE, *CONVERTED)]
    kept = spec_to_hf(QuantSpec(format=F.FP8, ignore=EXPERTS_ONLY), weights)["modules_to_not_convert"]
    for name in (*LEFT_ALONE[6:10], "lm_head"):
        assert name in kept and not should_convert_module(name, kept)
    assert all(should_convert_module(name, kept) and name not in kept for name in CONVERTED)
