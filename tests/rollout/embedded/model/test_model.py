"""The plain-torch model computes what transformers' models of the five families compute.

Why it must hold: the rollout's log-probs and expert ids are compared with a trainer's; an engine that computes another
function would be a silent off-policy error. transformers' implementations are the oracle, in fp32, whole-prompt, in
pieces and token by token. Not covered: bfloat16 (other rounding), and configurations the engine refuses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import HFCheckpoint
from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model import plain_ops
from rollout.embedded.model.layout import SequenceRows, lay_out
from rollout.embedded.model.model import Model
from rollout.embedded.model.prepared import Preparation
from rollout.embedded.model.tensors import expected_tensors
from rollout.embedded.model.weights import WeightStore
from tests.support import tiny_models
from tests.support.embedded_fixtures import BASE, GLM, QWEN, QWEN_MOE, YARN, oracle, save
from tests.support.refusals import Facts, refuses

_NEEDED = {
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("num_key_value_heads", "moe_intermediate_size", "num_experts_per_tok", "num_experts", "n_routed_experts"),
    *("n_shared_experts", "n_group", "topk_group", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim"),
    *(
        "first_k_dense_replace",
        "routed_scaling_factor",
        "qk_rope_head_dim",
        "v_head_dim",
        "max_position_embeddings",
        "eos_token_id",
    ),
}
NO_YARN = {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}
SHORT_YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
# beside the trainer's own: what its families refuse or have no case of
OWN: dict[str, dict[str, Any]] = {
    "deepseek_no_yarn_no_shared": BASE | NO_YARN | {"q_lora_rank": None, "n_shared_experts": 0},
    "deepseek_all_dense_but_last": BASE | {"first_k_dense_replace": 2, "norm_topk_prob": False, "n_shared_experts": 2},
    "deepseek_all_moe_factor_only": BASE
    | {"first_k_dense_replace": 0, "num_hidden_layers": 2, "rope_scaling": SHORT_YARN},
    "deepseek_mscale_differs": BASE | {"rope_scaling": {**BASE["rope_scaling"], "mscale": 0.5, "mscale_all_dim": 1.3}},
    "kimi_272_experts": BASE
    | {"n_group": 1, "topk_group": 1, "n_routed_experts": 272, "num_experts_per_tok": 8, "num_hidden_layers": 2},
    "qwen_moe_every_head_unnormalized_yarn": QWEN_MOE
    | {"num_key_value_heads": 4, "norm_topk_prob": False, "rope_scaling": YARN},
    "qwen_one_kv_head_tied_yarn": QWEN
    | {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_scaling": YARN, "head_dim": 16},
    "glm_every_head_whole_rotary_yarn": GLM
    | {"num_key_value_heads": 4, "partial_rotary_factor": 1.0, "norm_topk_prob": False, "rope_scaling": YARN}
    | {"first_k_dense_replace": 2, "n_shared_experts": 2},
    "glm_no_dense_layer": GLM | {"first_k_dense_replace": 0, "num_key_value_heads": 1},
}
CONFIGS = tiny_models.CONFIGS | tiny_models.KIMI | OWN
PUBLISHED = {path.parent.name: path for path in (Path(__file__).parents[4] / "configs").glob("*/config.json")}


def _ours(reference: Any, tmp_path: Path, config: dict[str, Any] | None = None) -> tuple[Model, KVCache]:
    checkpoint = HFCheckpoint(save(reference, tmp_path / "hf", config))
    arch = architecture_of(checkpoint.config)
    weights = Preparation(torch.float32).prepare(WeightStore.load(checkpoint, arch))
    return Model(arch, weights, plain_ops, torch.float32), KVCache(arch, slots=512, page=4)


def _feed(model: Model, cache: KVCache, pages: list[list[int]], pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Logits of the new tokens of each sequence, packed; `pieces` are (tokens already cached, new tokens)."""
    tables = [cache.slots_of(p) for p in pages]
    rows = [SequenceRows(tokens=t, start=s, slots=tables[i]) for i, (s, t) in enumerate(pieces)]
    width = 4 * model.arch.attention.cache_width
    return model.logits(model.forward(lay_out(rows, width_bytes=1 << 20, token_bytes=width), cache))


def _routes(reference: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """transformers' logits [T, V] and the experts [T, K] of each layer with any."""
    found: dict[int, torch.Tensor] = {}
    hooks = [
        m.gate.register_forward_hook(lambda _m, _i, out, i=i: found.update({i: out[2]}))
        for i, layer in enumerate(reference.model.layers)
        if hasattr(m := layer.mlp, "gate")
    ]
    logits = reference(ids[None]).logits[0]
    for h in hooks:
        h.remove()
    return logits, found


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_and_experts_equal_transformers(name: str, tmp_path: Path) -> None:
    """Three prompts at once; then two of them again, in pieces and token by token side by side."""
    base = CONFIGS[name]
    reference = oracle(base=base)
    # transformers has no kimi_k2: that is read as its release says it
    model, cache = _ours(reference, tmp_path, base if base["model_type"] == "kimi_k2" else None)
    torch.manual_seed(1)
    ids = [torch.randint(2, 96, (n,)) for n in (41, 19, 34)]
    want, routes = zip(*(_routes(reference, i) for i in ids), strict=True)
    pages = [cache.take(cache.pages_for(len(i))) for i in ids]
    whole = _feed(model, cache, pages, [(0, i) for i in ids]).split([len(i) for i in ids])
    assert max((a - b).abs().max().item() for a, b in zip(whole, want, strict=True)) <= 1e-4
    layers = model.arch.moe_layers
    assert all(tuple(r) == layers for r in routes), "the same layers have experts"
    for i, p, theirs in zip(ids, pages, routes, strict=True):
        got = cache.routing[cache.slots_of(p)[: len(i)]]
        for layer in range(model.arch.layers):
            if layer in layers:
                assert torch.equal(got[:, layer].sort(-1).values.long(), theirs[layer].sort(-1).values)
            else:
                assert not got[:, layer].any(), "dense layers are zero-filled"
    for values in cache.values:
        values.fill_(7.0)  # what was there is no excuse
    ids, want, pages = ids[1:], want[1:], pages[1:]
    _feed(model, cache, pages, [(0, i[:9]) for i in ids])
    piece = _feed(model, cache, [pages[1]], [(9, ids[1][9:25])])
    assert (piece - want[1][9:25]).abs().max() <= 1e-4
    for step in range(9):
        pieces = [(9 + step, ids[0][9 + step : 10 + step]), (25 + step, ids[1][25 + step : 26 + step])]
        got = _feed(model, cache, pages, pieces)
        assert (got[0] - want[0][9 + step]).abs().max() <= 1e-4
        assert (got[1] - want[1][25 + step]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", [*tiny_models.CONFIGS, *PUBLISHED])
def test_engine_and_trainer_name_the_same_tensors(name: str) -> None:
    """Two tables, written apart: what one publishes the other must know, all of it; of published models too."""
    hf = json.loads(PUBLISHED[name].read_text()) if name in PUBLISHED else tiny_models.CONFIGS[name]
    theirs = {p.hf_name: p.shape for p in family_of(hf).bind(hf).places()}
    assert expected_tensors(architecture_of(hf)) == theirs
    assert architecture_of(hf).moe_layers == tuple(family_of(hf).moe_layers(hf))


@torch.no_grad()
def test_expanded_attention_equals_absorbed(tmp_path: Path) -> None:
    """A set of operations that may not absorb (a bit-exact one) takes the model's other branch: same function."""

    class Expanding:
        absorb = False

        def __getattr__(self, name: str) -> Any:
            return getattr(plain_ops, name)

    model, cache = _ours(oracle(), tmp_path)
    ids = torch.randint(2, 96, (12,))
    pages = [cache.take(3)]
    _feed(model, cache, pages, [(0, ids[:11])])
    absorbed = _feed(model, cache, pages, [(11, ids[11:])])
    model.ops = Expanding()
    cache = KVCache(model.arch, slots=64, page=4, width=model.cache_width)  # of keys and values
    pages = [cache.take(3)]
    _feed(model, cache, pages, [(0, ids[:11])])
    expanded = _feed(model, cache, pages, [(11, ids[11:])])
    assert not torch.equal(absorbed, expanded), "the same branch was taken twice"
    assert (absorbed - expanded).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("base", "change", "facts"),
    [
        (BASE, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, ("LlamaForCausalLM",)),
        (BASE, {"model_type": "qwen3_next"}, ("None", "model_type", "qwen3_next", "rollout.engine")),
        (BASE, {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        (BASE, {"scoring_func": "softmax"}, ("scoring_func", "softmax")),
        (BASE, {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear",)),
        (BASE, {"num_key_value_heads": 2}, ("num_key_value_heads", 2)),
        (BASE, {"n_group": 3}, ("n_group", 3)),
        (BASE, {"num_experts_per_tok": 9}, ("num_experts_per_tok", 9, 8)),
        (BASE, {"kv_lora_rank": None}, ("kv_lora_rank",)),
        (QWEN, {"use_sliding_window": True, "sliding_window": 64}, ("use_sliding_window", "True")),
        (QWEN, {"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types", "sliding_attention")),
        (QWEN, {"num_key_value_heads": 3}, ("num_attention_heads", 4, "num_key_value_heads", 3)),
        (QWEN, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ("llama3",)),
        (QWEN, {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", 0.5)),
        (QWEN_MOE, {"use_sliding_window": True}, ("use_sliding_window", "True")),
        (QWEN_MOE, {"num_experts": None}, ("num_experts",)),
        (QWEN_MOE, {"num_experts_per_tok": 17}, ("num_experts_per_tok", 17, 16)),
        (GLM, {"sliding_window": 128}, ("sliding_window", 128)),
        (GLM, {"partial_rotary_factor": 0.1}, (3, "partial_rotary_factor", "head_dim")),
        (GLM, {"hidden_act": "relu"}, ("hidden_act", "relu")),
        (GLM, {"n_routed_experts": None}, ("n_routed_experts",)),
        (BASE, {"q_lora_rank": 4.5}, ("q_lora_rank", 4.5)),
        (QWEN, {"num_hidden_layers": "3"}, ("num_hidden_layers", 3)),
        (QWEN_MOE, {"num_experts": 16.0}, ("num_experts", 16.0)),
        (GLM, {"first_k_dense_replace": True}, ("first_k_dense_replace", "True")),
    ],
)
def test_what_is_not_computed_is_refused_by_name(base: dict[str, Any], change: dict[str, Any], facts: Facts) -> None:
    architecture_of(base)
    with refuses(ValueError, *facts):
        architecture_of(base | change)


@pytest.mark.parametrize("base", [BASE, QWEN, QWEN_MOE, GLM], ids=lambda c: c["model_type"])
def test_an_absent_key_means_what_it_means_to_transformers(base: dict[str, Any]) -> None:
    """Published configs leave keys out. transformers fills them in, so both ways must read as the same architecture."""
    sparse = {k: v for k, v in base.items() if k in _NEEDED}
    theirs = AutoConfig.for_model(**sparse).to_dict()
    kind = {"model_type": base["model_type"]}
    ours = architecture_of(sparse)
    assert ours == replace(architecture_of(theirs | kind), mtp_layers=0), "MTP layers are served by neither"


def test_end_tokens_are_those_of_both_files() -> None:
    """config.json and generation_config.json, as SGLang unites them."""
    config = oracle().config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"], "eos_token_id": [7, 2]}
    assert architecture_of(config).eos_ids == (7, 2)
    assert architecture_of(config, eos_ids=(2, 9)).eos_ids == (7, 2, 9)
    assert architecture_of(config | {"eos_token_id": None}, eos_ids=(9,)).eos_ids == (9,)
