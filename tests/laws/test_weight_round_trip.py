"""What is published must be what is stored: Hugging Face -> converted -> loaded -> exported is the input, bit for bit,
in every layout, or the rollout serves a model that nobody trained.

Two independent oracles: the loaded shards are compared with slices of the Hugging Face tensors taken here by the rules
of tensor, expert and pipeline parallelism, so that errors of conversion and export cannot cancel; and every rank's
exported stream is compared with the input, names, shapes, dtypes and bits.
Not covered: expert tensor parallelism beyond 2, virtual stages, padded vocabularies, checkpoints of TransformerEngine's
spec.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.families.registry import family_of
from megatron_bridge.stream_convert import convert_checkpoint
from miles_like.hf_checkpoint import HFCheckpoint
from tests.megatron_bridge.tiny_models import (
    leave,
    load_converted,
    megatron_rank,
    random_tensors,
    tiny,
    write_checkpoint,
)
from tests.spawn import free_port, run_ranks

# 4 layers, so that two stages hold two each; the same model for every layout
HF = tiny(num_hidden_layers=4)
LAYOUTS: dict[str, dict[str, int]] = {
    "ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "tp2_etp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
}


def _rows(t: Tensor, rank: int, size: int) -> Tensor:
    return t.chunk(size, 0)[rank]


def _expected(name: str, hf: dict[str, Tensor], c: Any, parallel: Any) -> Tensor:
    """This rank's shard of a Megatron parameter (global layer number, local expert number), by hand."""
    tp, t, etp, et = c.tp, parallel.tp_rank, c.etp, parallel.etp_rank
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in top:
        return _rows(hf[top[name]], t, tp)
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    assert match
    at, rest = f"model.layers.{match[1]}.", match[2]
    if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.*)", rest):
        number = parallel.ep_rank * (16 // c.ep) + int(expert[1])
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
        "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    }
    if rest in whole:
        return hf[at + whole[rest]]
    by_rows = {
        "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    }
    if rest in by_rows:
        return _rows(hf[at + by_rows[rest]], t, tp)
    assert rest == "self_attention.linear_proj.weight", rest
    return hf[at + "self_attn.o_proj.weight"].chunk(tp, 1)[t]


def _mlp(hf: dict[str, Tensor], at: str, leaf: str, rank: int, size: int) -> Tensor:
    if leaf == "linear_fc2.weight":
        return hf[at + "down_proj.weight"].chunk(size, 1)[rank]
    return torch.cat([_rows(hf[f"{at}{half}_proj.weight"], rank, size) for half in ("gate", "up")])


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and a.contiguous().equal(b.contiguous())


def _check_layouts(
    rank: int, world_size: int, spare: int, root: str, jobs: dict[str, tuple[dict[str, int], int]]
) -> dict[str, Any]:
    source = HFCheckpoint(Path(root) / "hf")
    tensors = dict(source.stream())
    report = {}
    for name, (layout, port) in jobs.items():
        chunks, parallel = megatron_rank(HF, rank, world_size, port, **layout)
        from megatron_bridge.hf_export import export_hf
        from megatron_bridge.model import unwrap

        load_converted(chunks, parallel, Path(root) / "megatron")
        model = unwrap(chunks[0])
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        wrong_shards = []
        for key, value in model.state_dict().items():
            if not key.endswith("_extra_state"):
                fixed = re.sub(r"layers\.(\d+)", lambda m: f"layers.{numbers[int(m[1])]}", key)  # noqa: B023
                if not _same(value, _expected(fixed, tensors, parallel.config, parallel)):
                    wrong_shards.append(fixed)
        exports = [
            {n: t.clone() for n, t in export_hf(chunks, family_of(HF), HF, parallel, bucket_bytes=size)}
            for size in (1 << 30, 40_000)  # one bucket of a kind, and many
        ]
        orders = [list(e) for e in exports]
        report[name] = {
            "wrong_shards": wrong_shards,
            "wrong_exports": [n for e in exports for n, t in e.items() if not _same(t, tensors[n])],
            "missing": [sorted(set(tensors) ^ set(e)) for e in exports],
            "orders": orders,
        }
        leave()
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One report a rank; the last is the single rank's."""
    root = tmp_path_factory.mktemp("round_trip")
    write_checkpoint(root / "hf", HF, random_tensors(HF), shard_bytes=700_000)
    convert_checkpoint(root / "hf", root / "megatron")
    jobs = {name: (layout, free_port()) for name, layout in LAYOUTS.items()}
    pair = run_ranks(_check_layouts, 2, str(root), jobs)
    (single,) = run_ranks(_check_layouts, 1, str(root), {"one": ({}, free_port())})
    return [*pair, single]


@pytest.mark.parametrize("name", [*LAYOUTS, "one"])
def test_shards_and_exports_are_the_checkpoint(name: str, reports: list[dict[str, Any]]) -> None:
    found = [report[name] for report in reports if name in report]
    assert len(found) == (1 if name == "one" else 2)
    for report in found:
        assert report["wrong_shards"] == []
        assert report["wrong_exports"] == []
        assert report["missing"] == [[], []]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_agree_on_the_order(name: str, reports: list[dict[str, Any]]) -> None:
    """The publisher pairs ranks' streams by position."""
    first, second = (report[name]["orders"] for report in reports[:2])
    assert first == second
    for order in first:
        for i, tensor in enumerate(order):
            if tensor.endswith("gate_proj.weight"):
                assert order[i + 1] == tensor.replace("gate_proj", "up_proj")
