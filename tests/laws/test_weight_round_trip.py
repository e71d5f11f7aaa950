"""What is published must be what is stored: Hugging Face -> converted -> loaded -> exported is the input, bit for bit,
in every layout, or the rollout serves a model that was never trained.

Two independent oracles: the loaded shards are compared with slices of the Hugging Face tensors taken here by the rules
of tensor, expert and pipeline parallelism, so that errors of conversion and export cannot cancel; and every rank's
exported stream is compared with the input, names, shapes, dtypes and bits. The same holds of the shards that are
published without an export (`weights/shards.py`): each rank's regions have the values of the input there, and together
they cover each tensor once, or are copies.
Not covered: expert tensor parallelism beyond 2, padded vocabularies, checkpoints of TransformerEngine's spec.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.convert.to_megatron import to_megatron
from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import WeightRegion
from tests.support.chosen import chosen, later
from tests.support.layouts import EXPERTS, ROUTED
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import (
    leave,
    load_converted,
    megatron_rank,
    random_tensors,
    tiny,
    tiny_qwen,
    write_checkpoint,
)

# 4 layers, so that two stages of two virtual stages hold one each; 4 query heads a model
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": tiny(num_hidden_layers=4, num_nextn_predict_layers=2, **ROUTED),
    "qwen": tiny_qwen(num_hidden_layers=4, mlp_only_layers=[1], num_experts=EXPERTS),
    # with tensor parallelism, ranks share the only key/value head; with stages, the last one repeats the embedding
    "qwen_tied": tiny_qwen(num_hidden_layers=4, num_key_value_heads=1, tie_word_embeddings=True, num_experts=EXPERTS),
}
LAYOUTS: dict[str, dict[str, int]] = {
    "ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "tp2_etp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
}
CASES = [f"{model}-{layout}" for model in ("deepseek", "qwen") for layout in LAYOUTS]
CASES += ["qwen_tied-tp2", "qwen_tied-pp2"]
ALONE = [f"{model}-one" for model in MODELS]
# the checkpoint has draft layers, this trainer has none
CASES += ["deepseek-pp2-no_mtp"]
# each way to divide a model once, the models taking turns; context parallelism divides no weight
FIRST = ["deepseek-ep2", "deepseek-tp2_etp2", "qwen_tied-pp2", "deepseek-pp2_vpp2"]
FIRST += ["deepseek-one"]
HERE = "tests/laws/test_weight_round_trip.py"


def _rows(t: Tensor, rank: int, size: int) -> Tensor:
    return t.chunk(size, 0)[rank]


def _expected(name: str, hf: dict[str, Tensor], config: dict[str, Any], c: Any, parallel: Any) -> Tensor:
    """This rank's shard of a Megatron parameter (global layer number, local expert number), by hand."""
    tp, t, etp, et = c.tp, parallel.tp_rank, c.etp, parallel.etp_rank
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight" if "lm_head.weight" in hf else "model.embed_tokens.weight",
    }
    if name in top:
        return _rows(hf[top[name]], t, tp)
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    match = re.fullmatch(r"(?:decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?(.*)", name)
    assert match
    number = int(match[1]) + (config["num_hidden_layers"] if name.startswith("mtp.") else 0)
    at, rest = f"model.layers.{number}.", match[2]
    if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.*)", rest):
        number = parallel.ep_rank * (EXPERTS // c.ep) + int(expert[1])
        return _mlp(hf, f"{at}mlp.experts.{number}.", expert[2], et, etp)
    if rest.startswith(("mlp.shared_experts.", "mlp.linear_fc")):
        base, leaf = rest.rsplit("linear_fc", 1)
        return _mlp(hf, at + base, "linear_fc" + leaf, t, tp)
    whole = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "final_layernorm.weight": "shared_head.norm.weight",
    }
    if config["model_type"] == "deepseek_v3":
        whole["self_attention.q_layernorm.weight"] = "self_attn.q_a_layernorm.weight"
    if rest in whole:
        return hf[at + whole[rest]]
    by_rows = {
        "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "eh_proj.weight": "eh_proj.weight",
    }
    if rest in by_rows:
        return _rows(hf[at + by_rows[rest]], t, tp)
    if rest == "self_attention.linear_qkv.weight":
        return _rows(_qkv(hf, at, config["num_key_value_heads"]), t, tp)
    assert rest == "self_attention.linear_proj.weight", rest
    return hf[at + "self_attn.o_proj.weight"].chunk(tp, 1)[t]


def _qkv(hf: dict[str, Tensor], at: str, groups: int) -> Tensor:
    """For each key/value head: its query heads, it, its value head."""
    q, k, v = (hf[f"{at}self_attn.{x}_proj.weight"].chunk(groups) for x in "qkv")
    return torch.cat([part for g in range(groups) for part in (q[g], k[g], v[g])])


def _mlp(hf: dict[str, Tensor], at: str, leaf: str, rank: int, size: int) -> Tensor:
    if leaf == "linear_fc2.weight":
        return hf[at + "down_proj.weight"].chunk(size, 1)[rank]
    return torch.cat([_rows(hf[f"{at}{half}_proj.weight"], rank, size) for half in ("gate", "up")])


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and a.contiguous().equal(b.contiguous())


def _wrong_shards(chunk: Any, hf: dict[str, Tensor], config: dict[str, Any], parallel: Any) -> list[str]:
    from megatron_bridge.model.build import unwrap

    model = unwrap(chunk)
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    wrong = []
    for key, value in model.state_dict().items():
        if not key.endswith("_extra_state"):
            name = re.sub(r"decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{numbers[int(m[1])]}", key)
            if not _same(value, _expected(name, hf, config, parallel.config, parallel)):
                wrong.append(name)
    return wrong


def _there(t: Tensor, region: WeightRegion) -> Tensor:
    """The values of a region."""
    (a, b), (c, d) = region.rows, region.columns
    assert region.shape == tuple(t.shape) and region.dtype == str(t.dtype).removeprefix("torch.")
    return t.view(len(t), -1)[a:b, c:d]


def _check_layouts(rank: int, world_size: int, spare: int, root: str, jobs: dict[str, int]) -> dict[str, Any]:
    """Case -> what is wrong; a case is "MODEL-LAYOUT[-no_mtp]", its value a free port."""
    report = {}
    for case, port in jobs.items():
        name, layout, *rest = case.split("-")
        config, mtp = MODELS[name], name == "deepseek" and not rest
        tensors = dict(HFCheckpoint(Path(root) / name).stream())
        chunks, parallel = megatron_rank(config, rank, world_size, port, mtp=mtp, **LAYOUTS.get(layout, {}))
        from megatron_bridge.weights.export import ExportPlan
        from megatron_bridge.weights.shards import LocalShards

        load_converted(chunks, parallel, Path(root) / f"{name}-megatron")
        plans = [
            ExportPlan(chunks, family_of(config), config, parallel, mtp=mtp, bucket_bytes=b)
            for b in (1 << 30, 40_000)  # one bucket of a kind, and many
        ]
        exports = [{n: t.clone() for n, t in plan.export()} for plan in plans]
        shards = LocalShards(chunks, family_of(config).bind(config, mtp=mtp), parallel, plans[0])
        held = list(zip(shards.regions, shards.values(range(len(shards.regions))), strict=True))
        draft = tuple(f"model.layers.{config['num_hidden_layers'] + j}." for j in range(2))
        wanted = {n for n in tensors if mtp or not n.startswith(draft)}
        report[case] = {
            "wrong_shards": [n for chunk in chunks for n in _wrong_shards(chunk, tensors, config, parallel)],
            "wrong_exports": [n for e in exports for n, t in e.items() if not _same(t, tensors[n])],
            "missing": [sorted(wanted ^ set(e)) for e in exports],
            "orders": [list(e) for e in exports],
            "regions": shards.regions,
            "wrong_regions": [r for r, value in held if not _same(value, _there(tensors[r.name], r))],
        }
        leave()
    return report


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One report a rank; the last is the single rank's."""
    root, asked = tmp_path_factory.mktemp("round_trip"), chosen(request, "case", CASES)
    for name, config in MODELS.items():
        tensors = random_tensors(config, mtp=name == "deepseek")
        write_checkpoint(root / name, config, tensors, shard_bytes=700_000)
        to_megatron(root / name, root / f"{name}-megatron")
    pair = run_ranks(_check_layouts, 2, str(root), {case: free_port() for case in asked}, keep=True)
    alone = chosen(request, "case", ALONE)
    (single,) = run_ranks(_check_layouts, 1, str(root), {case: free_port() for case in alone}, keep=True)
    return [*pair, single]


@pytest.mark.parametrize("case", later([*CASES, *ALONE], FIRST, beside=HERE))
def test_shards_and_exports_are_the_checkpoint(case: str, reports: list[dict[str, Any]]) -> None:
    found = [report[case] for report in reports if case in report]
    assert len(found) == (1 if case in ALONE else 2)
    for report in found:
        assert report["wrong_shards"] == []
        assert report["wrong_exports"] == []
        assert report["missing"] == [[], []]


@pytest.mark.parametrize("case", later([*CASES, *ALONE], FIRST, beside=HERE))
def test_the_regions_of_all_ranks_are_each_tensor_once(case: str, reports: list[dict[str, Any]]) -> None:
    found = [report[case] for report in reports if case in report]
    assert [report["wrong_regions"] for report in found] == [[]] * len(found)
    covered: dict[str, Tensor] = {}
    for region in {r._replace(stage=0) for report in found for r in report["regions"]}:
        times = covered.setdefault(region.name, torch.zeros(region.shape, dtype=torch.int8))
        _there(times, region._replace(dtype="int8")).add_(1)
    assert covered.keys() == set(found[0]["orders"][0])
    assert all(bool((times == 1).all()) for times in covered.values())


@pytest.mark.parametrize("case", later(CASES, FIRST, beside=HERE))
def test_ranks_agree_on_the_order(case: str, reports: list[dict[str, Any]]) -> None:
    """The publisher pairs ranks' streams by position."""
    first, second = (report[case]["orders"] for report in reports[:2])
    assert first == second
    for order in first:
        for i, tensor in enumerate(order):
            if tensor.endswith("gate_proj.weight"):
                assert order[i + 1] == tensor.replace("gate_proj", "up_proj")
