"""Layout checks and a rank's slice of a micro-batch: no ranks needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bridge.config import ParallelConfig
from megatron_bridge.device.device import init_device
from megatron_bridge.plan.layout import check_layout, check_world
from miles_like.config.load import load_config
from miles_like.run.assemble import known_model
from miles_like.types import MicroBatch
from routing_replay.align import ShardSpec, zigzag_index
from routing_replay.rank_routes import cut_routes
from routing_replay.trace import RoutingTrace
from tests.support import toy
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import tiny, tiny_qwen

init_device()

from megatron_bridge.step.shard import Shard, shard  # noqa: E402

MLA = tiny()  # 3 layers, the first dense; 16 experts of 64 channels, 4 heads, a vocabulary of 128
GQA = tiny_qwen()  # the same, all layers with experts, 2 key/value heads


@pytest.mark.parametrize(
    ("model", "layout", "facts"),
    [
        (MLA, {"dp": 3, "ep": 3}, (16, "parallel.ep", 3)),
        (MLA, {"dp": 3, "etp": 3}, (64, "parallel.etp", 3)),
        (MLA, {"tp": 3}, (4, "parallel.tp", 3)),
        (tiny_qwen(num_key_value_heads=1), {"tp": 2}, (1, "parallel.tp", 2)),
        (tiny(vocab_size=127), {"tp": 2}, (127, "parallel.tp", 2)),
        (tiny(intermediate_size=255), {"tp": 2}, (255, "MLP")),
        (tiny(moe_intermediate_size=63), {"tp": 2}, (63,)),
        (
            MLA,
            {"tp": 2, "sequence_parallel": False},
            ("parallel.sequence_parallel", "parallel.tp", 2),
        ),
        (MLA, {"vpp": 2}, ("parallel.vpp", 2, "parallel.pp", 1, "parallel.vpp", 1)),
        (MLA, {"pp": 3, "vpp": 2}, (1, "parallel.vpp", 2)),
        (MLA, {"pp": 2}, (3, 3, 2, "parallel.first_stage_layers")),
        (MLA, {"pp": 4}, (3, 3, 4)),
        (MLA, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 2}, (-1, 3)),
        (MLA, {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 1}, (1, 3, 0)),
        (MLA, {"pp": 2, "first_stage_layers": 3}, (0, 3, 1)),
        (MLA, {"first_stage_layers": 1}, ("parallel.pp", 1)),
        (tiny(num_hidden_layers=7), {"pp": 2, "vpp": 2, "first_stage_layers": 3}, (3, 2)),
        (
            tiny(num_hidden_layers=4),
            {"pp": 2, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 2},
            (2, "remove"),
        ),
    ],
)
def test_an_impossible_layout_is_refused_with_numbers(
    model: dict[str, Any], layout: dict[str, Any], facts: Facts
) -> None:
    """Before any process exists, so that no rank is left waiting for the others."""
    with refuses(ValueError, *facts):
        check_layout(ParallelConfig(**layout), model)


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
    with refuses(ValueError, 2, 3, "parallel.dp"):
        check_world(ParallelConfig(dp=2, ep=2), 3)
    with refuses(ValueError, "parallel.ep", "*", "parallel.etp", 4, "*", "*", 2):
        ParallelConfig(dp=2, ep=2, etp=2)
    with refuses(ValueError, 1, "first_stage_layers"):
        ParallelConfig(pp=2, first_stage_layers=0)


def test_a_run_is_refused_before_its_first_stage(tmp_path: Path) -> None:
    """A dry run of 671 B parameters over PP7 says so from config.json alone: nothing is fetched, no rank is started."""
    config = load_config(Path(__file__).parents[3] / "configs" / "deepseek_v3_fp8.toml", ["parallel.pp=7"])
    with refuses(ValueError, 48, 61, 5):
        known_model(config)
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
    part = ShardSpec(layers=layers, cp=cp, cp_rank=cp_rank, multiple=tp * unit)
    if cut:
        assert isinstance(batch.routing, RoutingTrace)
        batch = replace(batch, routing=cut_routes(batch.routing, batch.samples, batch.cu_seqlens, part))
    return shard(batch, parallel, torch.device("cpu"), shard_spec=part, num_experts=experts)


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
    padded segment, with its own routes; `token_rows` finds it again among the rows of all ranks."""
    batch = toy.pack([toy.sample(1, 6), toy.sample(2, 5), toy.sample(3, 1)])
    ranks = [[_fed(batch, tp, t, cp, c, cut=cut) for t in range(tp)] for c in range(cp)]
    first = [r[0] for r in ranks]
    assert len({p.tokens.shape for p in first}) == 1 and first[0].tokens.shape[1] % tp == 0
    cu = first[0].packed.cu_seqlens_q
    assert all(n % (2 * cp) == 0 for n in cu.diff().tolist()) and cu[-1] == cp * first[0].tokens.shape[1]
    home = first[0].token_rows
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
    replace(batch.routing, experts=ids, checksums=None).check()


def test_a_micro_batch_without_loss_has_no_real_row() -> None:
    """It fills up a row of fewer micro-batches: its routes must enter no statistic."""
    idle = replace(toy.sample(1, 3), loss_mask=torch.zeros(3, dtype=torch.bool))
    assert not _fed(idle).real.any()


def test_routes_of_another_model_are_refused() -> None:
    """A trace over another number of experts, or without a layer of this stage, would index nonsense."""
    batch = toy.sample(1, 6)
    with refuses(ValueError, 16, 32):
        _fed(batch, experts=32)
    with refuses(ValueError, "[5]", "[1, 2]"):
        _fed(batch, layers=(1, 5))


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (2, 2)])
def test_a_rank_has_as_many_rows_as_fp8_products_want(tp: int, cp: int) -> None:
    """A multiple on every rank, and no token lost. Not covered: the products themselves."""
    batch = toy.pack([toy.sample(1, 6), toy.sample(2, 5)])
    parts = [_fed(batch, tp, t, cp, c, unit=16) for c in range(cp) for t in range(tp)]
    assert all(len(p.real) % 16 == 0 for p in parts)
    assert sum(int(p.real.sum()) for p in parts) == 11
