"""Layout checks and a rank's slice of a micro-batch: no ranks needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_bridge.config import ParallelConfig
from megatron_bridge.device import init_device
from megatron_bridge.layout import check_layout, check_world
from miles_like.assemble import pipeline_parts
from miles_like.config_io import load_config
from miles_like.pipeline import plan_stages
from miles_like.types import MicroBatch
from routing_replay.align import RankPart, zigzag_index
from routing_replay.parts import cut_routes
from routing_replay.trace import RoutingTrace
from tests.megatron_bridge import toy
from tests.megatron_bridge.tiny_models import tiny, tiny_qwen

init_device()

from megatron_bridge.shard import Shard, shard  # noqa: E402

MLA = tiny()  # 3 layers, the first dense; 16 experts of 64 channels, 4 heads, a vocabulary of 128
GQA = tiny_qwen()  # the same, all layers with experts, 2 key/value heads


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        (MLA, {"dp": 3, "ep": 3}, ["16 experts", "parallel.ep = 3", "divisor"]),
        (MLA, {"dp": 3, "etp": 3}, ["64 channels of an expert", "parallel.etp = 3"]),
        (MLA, {"tp": 3}, ["4 attention heads", "parallel.tp = 3"]),
        (tiny_qwen(num_key_value_heads=1), {"tp": 2}, ["1 key-value heads", "parallel.tp = 2"]),
        (tiny(vocab_size=127), {"tp": 2}, ["127 rows of the vocabulary", "parallel.tp = 2"]),
        (tiny(intermediate_size=255), {"tp": 2}, ["255 channels of the dense MLP"]),
        (tiny(moe_intermediate_size=63), {"tp": 2}, ["63 channels of the shared experts"]),
        (
            MLA,
            {"tp": 2, "sequence_parallel": False},
            ["sequence_parallel = false", "parallel.tp = 2", "to true"],
        ),
        (MLA, {"vpp": 2}, ["parallel.vpp = 2", "parallel.pp = 1", "set parallel.vpp = 1"]),
        (MLA, {"pp": 3, "vpp": 2}, ["1 layers of a pipeline stage", "parallel.vpp = 2"]),
        (MLA, {"pp": 2}, ["3 of 3 layers", "2 pipeline stages", "first_stage_layers"]),
        (MLA, {"pp": 4}, ["3 of 3 layers", "4 pipeline stages"]),
        (MLA, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 2}, ["-1 of 3"]),
        (MLA, {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 1}, ["1 of 3", "0 pipeline stages"]),
        (MLA, {"pp": 2, "first_stage_layers": 3}, ["0 of 3 layers", "1 pipeline stages"]),
        (MLA, {"first_stage_layers": 1}, ["parallel.pp > 1"]),
        (tiny(num_hidden_layers=7), {"pp": 2, "vpp": 2, "first_stage_layers": 3}, ["3 layers of a", "vpp = 2"]),
    ],
)
def test_an_impossible_layout_is_refused_with_numbers(
    model: dict[str, Any], layout: dict[str, Any], words: list[str]
) -> None:
    """Before any process exists, so that no rank is left waiting for the others."""
    with pytest.raises(ValueError) as e:
        check_layout(ParallelConfig(**layout), model)
    assert all(w in str(e.value) for w in words), str(e.value)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (MLA, {}),
        (MLA, {"tp": 2, "pp": 3, "dp": 2, "ep": 4}),
        (MLA, {"pp": 2, "first_stage_layers": 1}),
        (MLA, {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 2}),
        (tiny(num_hidden_layers=6), {"pp": 3, "vpp": 2, "cp": 4, "etp": 2}),
        (GQA, {"tp": 2, "ep": 2, "cp": 2}),
        (tiny_qwen(intermediate_size=255), {"tp": 2}),  # no layer has that MLP
    ],
)
def test_a_possible_layout_passes(model: dict[str, Any], layout: dict[str, int]) -> None:
    """The checks must not refuse what works."""
    refused = check_layout(ParallelConfig(**layout), model)  # raises when it refuses
    assert refused is None


def test_a_world_of_another_size_is_refused() -> None:
    """Both numbers and what to set; expert ranks that do not fit the others are refused by the section itself."""
    with pytest.raises(ValueError, match=r"= 2, but 3 trainer ranks.*parallel.dp"):
        check_world(ParallelConfig(dp=2, ep=2), 3)
    with pytest.raises(ValueError, match=r"ep \* parallel.etp = 4 does not divide tp \* cp \* dp = 2"):
        ParallelConfig(dp=2, ep=2, etp=2)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        ParallelConfig(pp=2, first_stage_layers=0)


def test_a_run_is_refused_before_its_first_stage(tmp_path: Path) -> None:
    """A dry run of 671 B parameters over PP7 says so from config.json alone: nothing is fetched, no rank is started."""
    config = load_config(Path(__file__).parents[2] / "configs" / "deepseek_v3_fp8.toml", ["parallel.pp=7"])
    with pytest.raises(ValueError, match=r"48 of 61 layers do not divide over 5 pipeline stages"):
        plan_stages(config, tmp_path / "run", pipeline_parts(config, Console(quiet=True), None))
    assert not list(tmp_path.iterdir())


def _fed(
    batch: MicroBatch,
    tp: int = 1,
    rank: int = 0,
    cp: int = 1,
    cp_rank: int = 0,
    *,
    layers: tuple[int, ...] = (1, 2),
    experts: int = toy.EXPERTS,
    unit: int = 1,
    cut: bool = False,
) -> Shard:
    """What a rank feeds of `batch`; with `cut` its routes come to it as they would from elsewhere."""
    parallel: Any = SimpleNamespace(config=SimpleNamespace(tp=tp), tp_rank=rank)
    part = RankPart(layers=layers, cp=cp, cp_rank=cp_rank, multiple=tp * unit)
    if cut:
        assert isinstance(batch.routing, RoutingTrace)
        batch = replace(batch, routing=cut_routes(batch.routing, batch.samples, batch.cu_seqlens, part))
    return shard(batch, parallel, torch.device("cpu"), part=part, num_experts=experts)


def test_tensor_parallel_ranks_see_all_tokens_and_their_own_routes() -> None:
    """Padding to a multiple of tp has no loss and its own segment; the ranks' routing rows, end to end, are the trace
    and then valid, distinct ids."""
    batch = toy.pack([toy.sample(1, 6), toy.sample(2, 5)])
    parts = [_fed(batch, 4, r, layers=(2,)) for r in range(4)]
    for p in parts:
        assert p.tokens.shape == (1, 12) and torch.equal(p.tokens[0, :11], batch.tokens)
        assert int(p.loss_mask.sum()) == int(batch.loss_mask.sum()) and not p.loss_mask[0, 11]
        assert p.packed.cu_seqlens_q.tolist() == [0, 6, 11, 12] and p.packed.max_seqlen_q == 6
    assert torch.cat([p.real for p in parts]).tolist() == [True] * 11 + [False]
    ids = torch.cat([p.routing.experts for p in parts if p.routing is not None])
    assert batch.routing is not None and torch.equal(ids[:11, 0], batch.routing.experts[:, 1])
    assert len(set(ids[11, 0].tolist())) == toy.TOP_K


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (3, 2), (2, 4)])
def test_context_parallel_ranks_share_out_each_sample(tp: int, cp: int, cut: bool) -> None:
    """Segments of odd lengths: each token is fed by exactly one context-parallel rank, at its own position in its own
    padded segment, with its own routes; `home` finds it again among the rows of all ranks."""
    batch = toy.pack([toy.sample(1, 6), toy.sample(2, 5), toy.sample(3, 1)])
    ranks = [[_fed(batch, tp, t, cp, c, cut=cut) for t in range(tp)] for c in range(cp)]
    first = [r[0] for r in ranks]
    assert len({p.tokens.shape for p in first}) == 1 and first[0].tokens.shape[1] % tp == 0
    cu = first[0].packed.cu_seqlens_q
    assert all(n % (2 * cp) == 0 for n in cu.diff().tolist()) and cu[-1] == cp * first[0].tokens.shape[1]
    home = first[0].home
    for name in ("tokens", "labels", "positions", "loss_mask"):
        rows = torch.cat([getattr(p, name)[0] for p in first])
        assert torch.equal(rows[home], getattr(batch, name)), name
        padding = torch.ones(len(rows), dtype=torch.bool).index_fill(0, home, False)
        assert not rows[padding].any(), f"{name}: padding is not 0"
    for c, p in enumerate(first):  # the position that rope gives a row is its place in the padded segment
        place = zigzag_index(cu, c, cp)
        within = place - cu[:-1].long()[torch.searchsorted(cu[1:].long(), place, right=True)]
        real = torch.cat([r.real for r in ranks[c]])
        assert torch.equal(within[real], p.positions[0][real])
    every = [p for r in ranks for p in r]
    assert torch.cat([p.real for p in every]).nonzero()[:, 0].tolist() == sorted(home.tolist())
    ids = torch.cat([p.routing.experts for p in every if p.routing is not None])
    assert batch.routing is not None and torch.equal(ids[home], batch.routing.experts)
    replace(batch.routing, experts=ids, seals=None).check()


def test_a_micro_batch_without_loss_has_no_real_row() -> None:
    """It fills up a row of fewer micro-batches: its routes must enter no statistic."""
    idle = replace(toy.sample(1, 3), loss_mask=torch.zeros(3, dtype=torch.bool))
    assert not _fed(idle).real.any()


def test_routes_of_another_model_are_refused() -> None:
    """A trace over another number of experts, or without a layer of this stage, would index nonsense."""
    batch = toy.sample(1, 6)
    with pytest.raises(ValueError, match="16 experts do not fit a model of 32"):
        _fed(batch, experts=32)
    with pytest.raises(ValueError, match="no routes of layers"):
        _fed(batch, layers=(1, 5))


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (2, 2)])
def test_a_rank_has_as_many_rows_as_fp8_products_want(tp: int, cp: int) -> None:
    """A multiple on every rank, and no token lost. Not covered: the products themselves."""
    batch = toy.pack([toy.sample(1, 6), toy.sample(2, 5)])
    parts = [_fed(batch, tp, t, cp, c, unit=16) for c in range(cp) for t in range(tp)]
    assert all(len(p.real) % 16 == 0 for p in parts)
    assert sum(int(p.real.sum()) for p in parts) == 11
