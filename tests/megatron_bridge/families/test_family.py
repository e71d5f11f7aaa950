"""A family's table must be total in both directions: a name it misses is a weight that is silently never trained or
never published, and a name it has twice is published twice. Oracles: the names and shapes that transformers saves, the
state dict of the GPTModel that stock megatron-core builds from the family's config, and DeepSeek-V3's published size.
Values, layouts and the meaning of the config (rope, router) are the laws' business.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import Precision, Split
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.layout import check_layout
from megatron_bridge.plan.resolve import resolve
from miles_like.hf.checkpoint import HFCheckpoint
from quant.hf_config import spec_from_hf
from tests.support import families_page, toy
from tests.support.refusals import Facts, refuses
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import (
    CONFIGS,
    leave,
    megatron_rank,
    sharded_state_dict,
    tiny,
    tiny_dense,
    tiny_glm,
    tiny_qwen,
    transformers_model,
)

BUILT = {  # transformers has no draft layers
    **CONFIGS,
    "draft_layers": tiny(num_nextn_predict_layers=2),
    "glm_draft_layer": tiny_glm(num_nextn_predict_layers=1),
}

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("name", [*CONFIGS, "docs/families.md"])
def test_table_names_what_transformers_saves(name: str, tmp_path: Path) -> None:
    with families_page.registered():
        _compare_with_saved({**CONFIGS, "docs/families.md": families_page.MIXTRAL}[name], tmp_path)


def _compare_with_saved(hf: dict[str, Any], tmp_path: Path) -> None:
    transformers_model(hf).save_pretrained(tmp_path)
    saved = HFCheckpoint(tmp_path)
    # the shared expert that a model does not have, it saves as tensors without elements
    names = [n for n in saved.names() if 0 not in saved.info(n).shape]
    places = list(family_of(hf).bind(hf).places())
    assert Counter(p.hf_name for p in places) == Counter(names)
    assert {p.hf_name: p.shape for p in places} == {n: saved.info(n).shape for n in names}


def _megatron_tensors(rank: int, world_size: int, port: int, hf: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """{state-dict name: shape} and the checkpoint keys that stock saving would write for this config."""
    (chunk,), parallel = megatron_rank(hf, rank, world_size, port, mtp=family_of(hf).mtp_layers(hf) > 0)
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

    from megatron_bridge.model.build import unwrap

    local = {k: tuple(v.shape) for k, v in unwrap(chunk).state_dict().items() if not k.endswith("_extra_state")}
    sharded = sharded_state_dict(chunk, parallel)
    apply_factories(sharded)
    values = list(nested_values(sharded))
    keys = {v.key: (tuple(v.global_shape), str(v.dtype)) for v in values if isinstance(v, ShardedTensor)}
    objects = [v.unique_key for v in values if isinstance(v, ShardedObject)]
    leave()
    return local, (keys, objects)


def _all_configs(rank: int, world_size: int, port: int, ports: list[int]) -> dict[str, Any]:
    return {
        name: _megatron_tensors(rank, world_size, port, hf)
        for port, (name, hf) in zip(ports, BUILT.items(), strict=True)
    }


@pytest.fixture(scope="module")
def megatron() -> dict[str, Any]:
    (answer,) = run_ranks(_all_configs, 1, [free_port() for _ in BUILT], keep=True)
    return answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", BUILT)
def test_every_megatron_tensor_is_in_the_table_once(name: str, megatron: dict[str, Any]) -> None:
    local, _ = megatron[name]
    tensors = family_of(BUILT[name]).bind(BUILT[name], mtp=True)
    found: Counter[str] = Counter()
    for megatron_name, shape in local.items():
        parts = tensors.places_in(megatron_name)
        found.update(p.hf_name for p in parts)
        assert all(p.megatron_name == megatron_name for p in parts)
        assert shape == tensors.megatron_shape(parts[0].entry)
    assert found == Counter(p.hf_name for p in tensors.places())


@pytest.mark.parametrize("name", BUILT)
def test_converted_keys_are_those_stock_saving_writes(name: str, megatron: dict[str, Any]) -> None:
    from megatron_bridge.convert.directory.boxes import checkpoint_key, extra_state_keys

    _, (keys, objects) = megatron[name]
    tensors = family_of(BUILT[name]).bind(BUILT[name], mtp=True)
    wanted = {}
    for p in tensors.places():
        lead = () if p.expert is None else (tensors.dims["experts"],)
        wanted[checkpoint_key(p)] = ((*lead, *tensors.megatron_shape(p.entry)), str(tensors.dtype(p.entry)))
    assert keys == wanted
    assert set(objects) <= set(extra_state_keys(tensors))


def test_names_go_both_ways() -> None:
    for hf in BUILT.values():
        tensors = family_of(hf).bind(hf, mtp=True)
        for place in tensors.places():
            assert tensors.place_of(place.hf_name) == place
            assert tensors.places_in(place.megatron_name)[place.index] == place


def test_runs_divide_every_megatron_parameter_among_its_parts() -> None:
    """Each row of the parameter belongs to one row of one Hugging Face tensor, and the other way round."""
    for hf in CONFIGS.values():
        tensors = family_of(hf).bind(hf)
        for entry in tensors.entries:
            ours: list[int] = []
            for part, shape in enumerate(tensors.shapes(entry)):
                theirs: list[int] = []
                for first, first_of_ours, rows in tensors.runs(entry, part):
                    theirs += range(first, first + rows)
                    ours += range(first_of_ours, first_of_ours + rows)
                assert theirs == list(range(shape[0]))
            assert sorted(ours) == list(range(tensors.megatron_shape(entry)[0]))


def test_number_of_parts_follows_from_the_split() -> None:
    for hf in (tiny(), tiny_qwen()):
        for entry in family_of(hf).table:
            assert len(entry.hf) == len(entry.shapes) == {Split.GATE_UP: 2, Split.QKV: 3}.get(entry.split, 1)


def test_size_and_layers_of_deepseek_v3() -> None:
    """671,026,404,352 weights (transformers' count of the published model, no draft layer) and 58 x 256 biases."""
    family = family_of(DEEPSEEK_V3)
    assert family.parameter_count(DEEPSEEK_V3) == 671_026_404_352 + 58 * 256
    assert family.moe_layers(DEEPSEEK_V3) == tuple(range(3, 61))
    assert (family.num_experts(DEEPSEEK_V3), family.top_k(DEEPSEEK_V3), family.num_layers(DEEPSEEK_V3)) == (256, 8, 61)


def test_draft_layer_of_deepseek_v3() -> None:
    """The names that the published checkpoint has for it, and its published size by dtype (the hub's counts, the
    blocks' scales among the fp32 ones)."""
    hf = {**DEEPSEEK_V3, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    tensors, spec = family_of(hf).bind(hf, mtp=True), spec_from_hf(hf)
    assert spec is not None
    attention = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    ffn = [f"{half}_proj.weight" for half in ("gate", "up", "down")]
    own = {
        *(f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
        *(f"self_attn.{name}.weight" for name in attention),
        *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
        *(f"mlp.shared_experts.{name}" for name in ffn),
        *(f"mlp.experts.{e}.{name}" for e in range(256) for name in ffn),
    }
    at = "model.layers.61."
    assert {p.hf_name for p in tensors.places() if p.depth is not None} == {at + name for name in own}
    copies = [name for entry in tensors.entries for name in tensors.copies_of(entry)]
    assert copies == [at + "embed_tokens.weight", at + "shared_head.head.weight"]

    count: Counter[str] = Counter()
    for place in tensors.places():
        size, copied = math.prod(place.shape), len(tensors.copies_of(place.entry))
        if spec.covers(place.hf_name, place.shape):
            count["fp8"] += size
            count["fp32"] += math.prod(-(-n // 128) for n in place.shape)
        else:
            count["fp32" if place.entry.precision is Precision.FP32 else "bf16"] += size * (1 + copied)
    assert count == {"bf16": 3_918_786_560, "fp8": 680_571_043_840, "fp32": 41_555_600}
    assert family_of(hf).parameter_count(hf, mtp=True) == 682_636_487_424  # each weight once


def test_copies_and_unasked_draft_layers_are_skipped_and_nothing_else() -> None:
    without, whole = (family_of(DEEPSEEK_V3).bind(DEEPSEEK_V3, mtp=mtp) for mtp in (False, True))
    for name in ("enorm.weight", "mlp.experts.255.up_proj.weight"):
        assert without.is_skipped("model.layers.61." + name)
        assert not whole.is_skipped("model.layers.61." + name)
    for tensors in (without, whole):
        assert tensors.is_skipped("model.layers.61.embed_tokens.weight")
        assert tensors.is_skipped("model.layers.61.shared_head.head.weight")
        for name in (
            "model.layers.61.unheard_of.weight",
            "model.layers.62.enorm.weight",
            "model.layers.60.enorm.weight",
        ):
            assert not tensors.is_skipped(name)
            with refuses(ValueError, name, "config.json"):
                tensors.place_of(name)


def test_size_of_qwen3_235b_a22b() -> None:
    """235.09 B parameters, 22.19 B of them used by a token: transformers' count of the published config."""
    hf = tiny_qwen(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    assert family_of(hf).parameter_count(hf) == 235_093_634_560
    assert family_of(hf).moe_layers(hf) == tuple(range(94))


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = tiny()
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    scaling = {k: v for k, v in old["rope_scaling"].items() if k != "type"}
    new["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": old["rope_theta"]}
    assert family_of(old).transformer_config(old) == family_of(new).transformer_config(new)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate.weight",  # layer 0 is dense
        "model.layers.3.input_layernorm.weight",  # layers are 0..2
        "model.layers.01.input_layernorm.weight",
        "model.layers.1.mlp.experts.16.up_proj.weight",  # experts are 0..15
        "model.layers.1.self_attn.q_proj.weight",  # with q_lora_rank there is none
        "model.layers.1.self_attn.o_proj.weight_scale_inv",
        "transformer.h.0.attn.weight",
    ],
)
def test_unknown_name_is_refused_by_name(name: str) -> None:
    with refuses(ValueError, name):
        family_of(tiny()).bind(tiny()).place_of(name)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"scoring_func": "softmax"}, ("scoring_func",)),
        ({"topk_method": "greedy"}, ("topk_method",)),
        ({"norm_topk_prob": False}, ("norm_topk_prob",)),
        ({"hidden_act": "gelu"}, ("hidden_act",)),
        ({"rope_interleave": False}, ("rope_interleave",)),
        ({"moe_layer_freq": 2}, ("moe_layer_freq",)),
        ({"num_key_value_heads": 2}, ("num_key_value_heads",)),
        ({"first_k_dense_replace": 3}, ("first_k_dense_replace",)),
        ({"num_experts_per_tok": 6}, ("topk_group",)),  # groups ranked by 3 experts in megatron-core, by 2 here
        ({"n_group": 3}, ("n_group",)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear",)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("original_max_position_embeddings",)),
        ({"kv_lora_rank": None}, ("kv_lora_rank",)),
    ],
)
def test_unsupported_option_is_refused_by_name(changes: dict[str, Any], facts: Facts) -> None:
    hf = tiny(**changes)
    with refuses(ValueError, *facts):
        family_of(hf).bind(hf)


@pytest.mark.parametrize("value", [4.5, 4.0, "4", True, [4], -4], ids=repr)
def test_a_count_that_is_no_whole_number_is_refused_by_key_and_value(value: Any) -> None:
    """Of what int() would take, or megatron die of on every rank; wherever a table's shapes read it."""
    for hf, keys in (
        (tiny(), ("q_lora_rank", "n_routed_experts", "n_shared_experts", "n_group", "first_k_dense_replace")),
        (tiny_qwen(), ("num_experts", "moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step")),
        (tiny_dense(), ("num_hidden_layers", "hidden_size", "vocab_size", "head_dim", "num_attention_heads")),
        (tiny_glm(), ("num_key_value_heads", "intermediate_size", "num_nextn_predict_layers")),
    ):
        for key in keys:
            with refuses(ValueError, "config.json", key, repr(value)):
                check_layout(ParallelConfig(), {**hf, key: value})


def test_unsupported_architecture_is_refused_by_name() -> None:
    with refuses(ValueError, "['LlamaForCausalLM']"):
        family_of(tiny(architectures=["LlamaForCausalLM"]))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ("sliding_attention",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"use_sliding_window": True}, ("use_sliding_window",)),
        ({"hidden_act": "gelu"}, ("hidden_act",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads",)),
        ({"mlp_only_layers": [0, 1, 2]}, ("mlp_only_layers",)),
        ({"decoder_sparse_step": 4}, ("decoder_sparse_step",)),
        ({"num_experts": None}, ("num_experts",)),
        ({"num_experts_per_tok": 1}, ("norm_topk_prob",)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("yarn",)),
        ({"moe_intermediate_size": None}, ("moe_intermediate_size",)),
    ],
)
def test_unsupported_option_of_qwen_is_refused_by_name(changes: dict[str, Any], facts: Facts) -> None:
    hf = tiny_qwen(**changes)
    with refuses(ValueError, *facts):
        family_of(hf).bind(hf)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"partial_rotary_factor": 0.4}, (19, 48)),
        ({"scoring_func": "softmax"}, ("scoring_func",)),
        ({"norm_topk_prob": False}, ("norm_topk_prob",)),
        ({"first_k_dense_replace": 3}, ("first_k_dense_replace",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("yarn",)),
        ({"n_routed_experts": None}, ("n_routed_experts",)),
    ],
)
def test_unsupported_option_of_glm_is_refused_by_name(changes: dict[str, Any], facts: Facts) -> None:
    hf = tiny_glm(**changes)
    with refuses(ValueError, *facts):
        family_of(hf).bind(hf)


def test_a_dense_model_is_not_divided_over_experts(tmp_path: Path) -> None:
    """Every key that acts on experts is refused by its name; none of the layout's checks needs a layer of them."""
    hf = tiny_dense()
    family = family_of(hf)
    assert (family.moe_layers(hf), family.num_experts(hf), family.top_k(hf)) == ((), 0, 0)
    check_layout(ParallelConfig(tp=2, pp=3), hf)
    for layout in ({"dp": 2, "ep": 2}, {"dp": 2, "etp": 2}):
        with refuses(ValueError, f"parallel.{list(layout)[1]}", 2, 1):
            check_layout(ParallelConfig(**layout), hf)
    for more, named in (
        ({"router_bias_update_rate": 1e-3}, ("router_bias_update_rate",)),
        ({"router_aux_loss": 1e-3}, ("train.router_aux_loss",)),
    ):
        with refuses(ValueError, *named, 0.001, 0):
            resolve(toy.config(str(tmp_path), **more), hf, cuda=False)


def test_a_bias_that_transformer_engine_lacks_is_refused(tmp_path: Path) -> None:
    """Of query, key and value it builds them, of the output it does not."""
    config = toy.config(str(tmp_path))
    resolve(config, tiny_glm(), cuda=True, te=True)
    with refuses(ValueError, "self_attention.linear_proj", "kernels.spec", "local"):
        resolve(config, tiny_dense(attention_bias=True), cuda=True, te=True)


def test_a_bias_that_the_router_lacks_is_not_updated_in_silence(tmp_path: Path) -> None:
    config = toy.config(str(tmp_path), router_bias_update_rate=1e-3)
    assert resolve(config, tiny(), cuda=False).transformer["moe_router_bias_update_rate"] == 1e-3
    with refuses(ValueError, "router_bias_update_rate", 0.001):
        resolve(config, tiny_qwen(), cuda=False)
