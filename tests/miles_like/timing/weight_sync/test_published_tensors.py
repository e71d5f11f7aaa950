"""The simulated stream has the tensors of the exporter in its order, and the bytes that a server's rank keeps are those
of the memory plan.

Oracles: `ExportPlan` over stand-ins of one stage, the hub's number of tensors, `EngineWeights` of the memory plan and
the closed form of a publication's bytes. Not covered: the order of a layer's tensors in megatron's modules, which the
stand-ins have in the order of the family's table; draft layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.precision import served_spec
from megatron_bridge.weights.export import ExportPlan
from miles_like.config.load import load_config
from miles_like.device_table import device
from miles_like.planning.memory.engine import EngineWeights
from miles_like.timing.engine import EngineSetup
from miles_like.timing.of_run import Facts, engine_setup
from miles_like.timing.publish import served_bytes
from miles_like.timing.shape import model_shape
from miles_like.timing.weight_sync.stream import buckets, publication
from quant.spec import QuantFormat, QuantSpec
from tests.support.tiny_models import tiny, tiny_qwen

ROOT = Path(__file__).parents[4]
H100 = device("H100")
ONE = EngineSetup(device=H100, servers=1, tp=1)
WIDE = ParallelConfig(dp=16, ep=16)


def read(name: str) -> dict[str, Any]:
    hf: dict[str, Any] = json.loads((ROOT / f"configs/{name}/config.json").read_text())
    return hf


class _Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class _Model:
    """The parameters of expert-parallel rank 0, layer by layer, an expert's together."""

    def __init__(self, hf: dict[str, Any], ep: int) -> None:
        tensors = family_of(hf).bind(hf)
        layers = tensors.dims["layers"]
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=i + 1) for i in range(layers)])
        self.state: dict[str, torch.Tensor] = {}
        local = tensors.dims.get("experts", 0) // ep
        places = [p for p in tensors.places() if p.expert is None or p.expert < local]
        first = [p for p in places if p.megatron_name.startswith("embedding.")]
        last = [p for p in places if p.layer is None and p not in first]
        middle = sorted((p for p in places if p.layer is not None), key=lambda p: (p.layer, p.expert or 0))
        for place in [*first, *middle, *last]:
            kind = torch.float32 if place.megatron_name.endswith("expert_bias") else torch.bfloat16
            self.state[place.megatron_name] = torch.empty(tensors.megatron_shape(place.entry), dtype=kind)

    def state_dict(self, keep_vars: bool) -> dict[str, torch.Tensor]:
        return self.state


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("hf", [tiny(), tiny_qwen()], ids=["deepseek", "qwen"])
@pytest.mark.parametrize("limit", [1, 1 << 16, 1 << 40])
def test_the_order_and_the_buckets_are_the_exporter_s(hf: dict[str, Any], ep: int, limit: int) -> None:
    one = _Group(1)
    groups: Any = SimpleNamespace(tp_group=one, etp_group=one, ep_group=_Group(ep), pp_group=one)
    model: Any = _Model(hf, ep)
    plan = ExportPlan([model], family_of(hf), hf, groups, bucket_bytes=limit)
    slots = publication(hf, ParallelConfig(dp=ep, ep=ep), ONE, None)
    assert [name for slot in slots for name in slot.names] == list(plan.names())
    counts = [sum(1 for _ in plan.exporter.names(bucket)) for bucket in plan._buckets]
    assert [bucket.tensors for bucket in buckets(slots, limit)] == counts


def test_stages_follow_each_other_with_their_layers() -> None:
    hf = read("deepseek_v3")
    layout = ParallelConfig(tp=8, pp=8, dp=2, ep=16, first_stage_layers=7, last_stage_layers=6)
    slots = publication(hf, layout, ONE, None)
    stages = [slot.key.stage for slot in slots]
    assert stages == sorted(stages) and set(stages) == set(range(8))
    names = {s: [n for slot in slots if slot.key.stage == s for n in slot.names] for s in (0, 1, 7)}
    assert "model.embed_tokens.weight" in names[0] and "lm_head.weight" in names[7] and "model.norm.weight" in names[7]
    assert {n.split(".")[2] for n in names[1]} == {str(i) for i in range(7, 15)}  # 61 layers: 7, 8 x 6, 6


@pytest.mark.parametrize(("name", "count"), [("deepseek_v3", 45_395), ("qwen3_30b_a3b", 18_867)])
def test_every_tensor_is_there_once(name: str, count: int) -> None:
    """45,395: NeMo-RL's log of a server's rank (docs/guides/checkpoint-engine-refit.md)."""
    slots = publication(read(name), WIDE, ONE, None)
    names = [n for slot in slots for n in slot.names]
    assert len(names) == len(set(names)) == count
    assert sum(slot.kept for slot in slots) == count


@pytest.mark.parametrize("spec", [None, QuantSpec(format=QuantFormat.FP8)])
def test_bytes_are_those_of_the_closed_form(spec: QuantSpec | None) -> None:
    hf = read("deepseek_v3")
    nbytes = 2.0 if spec is None else 1.0 + 4 / 128**2
    engine = EngineSetup(device=H100, servers=4, tp=32, weight_bytes=nbytes, expert_bytes=nbytes)
    slots = publication(hf, WIDE, engine, spec)
    shape = model_shape(hf)
    assert sum(slot.full for slot in slots) == pytest.approx(2 * shape.parameters, rel=1e-4)
    assert sum(slot.encoded for slot in slots) == pytest.approx(served_bytes(shape, engine), rel=2e-3)


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "kimi_k2_int4_qat", "qwen3_235b_a22b", "qwen3_30b_a3b_fp8"])
def test_a_server_s_rank_keeps_what_the_memory_plan_has(name: str) -> None:
    run = load_config(ROOT / f"configs/{name}.toml")
    hf = json.loads(Path(str(run.model.config)).read_text())
    spec, engine = served_spec(run.precision, hf), engine_setup(run, hf, Facts(device=H100))
    slots = publication(hf, WIDE, engine, spec)
    weights = EngineWeights(hf, spec, run.rollout.sglang)
    wanted = weights.nbytes() - weights._absorbed()
    assert sum(slot.slice for slot in slots) == pytest.approx(wanted, rel=2e-3)


def test_whole_experts_are_fewer_tensors_for_a_rank() -> None:
    hf = read("deepseek_v3")
    found = {}
    for ep in (1, 32):
        engine = EngineSetup(device=H100, servers=1, tp=32, ep=ep)
        slots = publication(hf, WIDE, engine, None)
        found[ep] = (sum(s.kept for s in slots), sum(s.slice for s in slots))
    experts = 58 * 256 * 3
    assert found[1][0] - found[32][0] == pytest.approx(experts * (1 - 1 / 32))
    assert found[1][1] == pytest.approx(found[32][1])
