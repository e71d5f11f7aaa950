"""The plain-torch model computes what transformers' DeepSeek-V3 computes.

Why it must hold: the rollout's log-probs and expert ids are compared with a trainer's; an engine that computes another
function would be a silent off-policy error. transformers' implementation is the oracle, in fp32, whole-prompt and token
by token. Not covered: bfloat16 (other rounding), and configurations the engine refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embedded_fixtures import BASE, oracle, save

from miles_like.hf_checkpoint import HFCheckpoint
from rollout.embedded import plain_ops
from rollout.embedded.architecture import Architecture
from rollout.embedded.kv_cache import KVCache
from rollout.embedded.layout import SequenceRows, lay_out
from rollout.embedded.model import Model
from rollout.embedded.prepared import prepare
from rollout.embedded.weights import WeightStore

NO_YARN = {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}
CONFIGS: dict[str, dict[str, Any]] = {
    "groups_yarn_q_lora": {},
    "one_group": {"n_group": 1, "topk_group": 1},
    "no_q_lora_no_yarn": {"q_lora_rank": None, **NO_YARN},
    "all_dense_but_last": {"first_k_dense_replace": 2, "norm_topk_prob": False, "n_shared_experts": 2},
    "all_moe_factor_only": {
        "first_k_dense_replace": 0,
        "num_hidden_layers": 2,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    },
    "mscale_differs": {"rope_scaling": {**BASE["rope_scaling"], "mscale": 0.5, "mscale_all_dim": 1.3}},
}


def _ours(reference: Any, tmp_path: Any) -> tuple[Model, KVCache]:
    checkpoint = HFCheckpoint(save(reference, tmp_path / "hf"))
    arch = Architecture.from_hf(checkpoint.config)
    weights = prepare(WeightStore.load(checkpoint, arch), torch.float32)
    return Model(arch, weights, plain_ops, torch.float32), KVCache(arch, slots=512, page=4)


def _feed(model: Model, cache: KVCache, pages: list[list[int]], pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Logits of the new tokens of each sequence, packed; `pieces` are (tokens already cached, new tokens)."""
    tables = [cache.slots_of(p) for p in pages]
    rows = [SequenceRows(tokens=t, start=s, slots=tables[i]) for i, (s, t) in enumerate(pieces)]
    return model.logits(model.forward(lay_out(rows, width_bytes=1 << 20, latent_bytes=4 * model.arch.latent), cache))


def _routes(reference: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    hooks = [
        m.gate.register_forward_hook(lambda _m, _i, out: found.append(out[2]))
        for layer in reference.model.layers
        if hasattr(m := layer.mlp, "gate")
    ]
    reference(ids[None])
    for h in hooks:
        h.remove()
    return found


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_and_experts_equal_transformers(name: str, tmp_path: Any) -> None:
    reference = oracle(**CONFIGS[name])
    model, cache = _ours(reference, tmp_path)
    torch.manual_seed(1)
    ids = [torch.randint(2, 96, (n,)) for n in (41, 7, 23)]
    want = [reference(i[None]).logits[0] for i in ids]
    pages = [cache.take(cache.pages_for(len(i))) for i in ids]
    whole = _feed(model, cache, pages, [(0, i) for i in ids]).split([len(i) for i in ids])
    assert max((a - b).abs().max().item() for a, b in zip(whole, want, strict=True)) <= 1e-4
    layers = list(range(model.arch.first_dense, model.arch.layers))
    for i, p in zip(ids, pages, strict=True):
        got = cache.routing[cache.slots_of(p)[: len(i)]]
        for layer, theirs in zip(layers, _routes(reference, i), strict=True):
            assert torch.equal(got[:, layer].sort(-1).values.long(), theirs.sort(-1).values)
        assert not got[:, : model.arch.first_dense].any(), "dense layers are zero-filled"


@pytest.mark.parametrize("name", ["groups_yarn_q_lora", "no_q_lora_no_yarn"])
@torch.no_grad()
def test_decoding_with_the_cache_equals_the_whole_prompt(name: str, tmp_path: Any) -> None:
    """Sequences of different length decode side by side; a chunk of a prompt follows another."""
    reference = oracle(**CONFIGS[name])
    model, cache = _ours(reference, tmp_path)
    torch.manual_seed(2)
    ids = [torch.randint(2, 96, (n,)) for n in (19, 34)]
    want = [reference(i[None]).logits[0] for i in ids]
    pages = [cache.take(cache.pages_for(len(i))) for i in ids]
    _feed(model, cache, pages, [(0, i[:9]) for i in ids])
    chunk = _feed(model, cache, [pages[1]], [(9, ids[1][9:25])])
    assert (chunk - want[1][9:25]).abs().max() <= 1e-4
    for step in range(9):
        pieces = [(9 + step, ids[0][9 + step : 10 + step]), (25 + step, ids[1][25 + step : 26 + step])]
        got = _feed(model, cache, pages, pieces)
        assert (got[0] - want[0][9 + step]).abs().max() <= 1e-4
        assert (got[1] - want[1][25 + step]).abs().max() <= 1e-4


@torch.no_grad()
def test_expanded_attention_equals_absorbed(tmp_path: Any) -> None:
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
    expanded = _feed(model, cache, pages, [(11, ids[11:])])
    assert not torch.equal(absorbed, expanded), "the same branch was taken twice"
    assert (absorbed - expanded).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "Qwen3MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"n_group": 3}, "n_group = 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 exceeds the 8"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    good = {**BASE, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    Architecture.from_hf(good)
    with pytest.raises(ValueError, match=named):
        Architecture.from_hf(good | change)
    del good["kv_lora_rank"]
    with pytest.raises(ValueError, match="kv_lora_rank"):
        Architecture.from_hf(good)
