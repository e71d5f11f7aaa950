"""Layout checks, the learning-rate schedule and a rank's slice of a micro-batch: no ranks needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bridge.config import OptimizerConfig, ParallelConfig
from megatron_bridge.device import init_device
from tests.megatron_bridge import toy

init_device()

from megatron_bridge.optimizer import learning_rate  # noqa: E402
from megatron_bridge.parallel import check_layout  # noqa: E402
from megatron_bridge.shard import shard  # noqa: E402
from routing_replay.align import zigzag_index  # noqa: E402

MODEL: dict[str, Any] = {"num_layers": 3, "num_experts": 16, "heads": 4, "vocab": 128}


@pytest.mark.parametrize(
    ("layout", "world", "words"),
    [
        ({"dp": 2, "ep": 2}, 3, ["= 2", "3 trainer ranks", "parallel.dp"]),
        ({"dp": 3, "ep": 3}, 3, ["16 experts", "parallel.ep = 3"]),
        ({"vpp": 2}, 1, ["parallel.vpp = 2", "parallel.pp = 1", "set parallel.vpp = 1"]),
        ({"pp": 3, "vpp": 2}, 3, ["1 layers of a pipeline stage", "parallel.vpp = 2"]),
        ({"tp": 3}, 3, ["4 attention heads", "parallel.tp = 3"]),
        ({"pp": 2}, 2, ["3 of 3 layers", "2 pipeline stages", "first_stage_layers"]),
        ({"pp": 2, "first_stage_layers": 2, "last_stage_layers": 2}, 2, ["-1 of 3"]),
        ({"first_stage_layers": 1}, 1, ["parallel.pp > 1"]),
    ],
)
def test_an_impossible_layout_is_refused_with_numbers(layout: dict[str, int], world: int, words: list[str]) -> None:
    """Before any process group exists, so that no rank is left waiting for the others."""
    with pytest.raises(ValueError) as e:
        check_layout(ParallelConfig(**layout), world_size=world, **MODEL)
    assert all(w in str(e.value) for w in words), str(e.value)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 3, "dp": 2, "ep": 4}, {"pp": 2, "first_stage_layers": 1}])
def test_a_possible_layout_passes(layout: dict[str, int]) -> None:
    """The checks must not refuse what works."""
    config = ParallelConfig(**layout)
    refused = check_layout(config, world_size=config.world_size, **MODEL)  # raises when it refuses
    assert refused is None


def test_the_rate_rises_linearly_and_stays() -> None:
    """Step 0 already moves; the last warm-up step has the full rate."""
    config = OptimizerConfig(lr=4.0, min_lr=2.0, warmup_steps=4)
    assert [learning_rate(config, i) for i in range(6)] == [2.5, 3.0, 3.5, 4.0, 4.0, 4.0]
    assert learning_rate(OptimizerConfig(lr=3.0), 0) == 3.0


def _rank(tp: int, rank: int, cp: int = 1, cp_rank: int = 0) -> Any:
    return SimpleNamespace(config=SimpleNamespace(tp=tp, cp=cp), tp_rank=rank, cp_rank=cp_rank)


def test_tensor_parallel_ranks_see_all_tokens_and_their_own_routes() -> None:
    """Padding to a multiple of tp has no loss and its own segment; the ranks' routing rows, end to end, are the trace
    and then valid, distinct ids."""
    batch = toy.pack([toy.sample(1, 6), toy.sample(2, 5)])
    parts = [shard(batch, _rank(4, r), torch.device("cpu"), layers=(2,), num_experts=toy.EXPERTS) for r in range(4)]
    for p in parts:
        assert p.tokens.shape == (1, 12) and torch.equal(p.tokens[0, :11], batch.tokens)
        assert int(p.loss_mask.sum()) == int(batch.loss_mask.sum()) and not p.loss_mask[0, 11]
        assert p.packed.cu_seqlens_q.tolist() == [0, 6, 11, 12] and p.packed.max_seqlen_q == 6
    assert torch.cat([p.real for p in parts]).tolist() == [True] * 11 + [False]
    ids = torch.cat([p.routing.experts for p in parts if p.routing is not None])
    assert batch.routing is not None and torch.equal(ids[:11, 0], batch.routing.experts[:, 1])
    assert len(set(ids[11, 0].tolist())) == toy.TOP_K


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (3, 2), (2, 4)])
def test_context_parallel_ranks_share_out_each_sample(tp: int, cp: int) -> None:
    """Segments of odd lengths: each token is fed by exactly one context-parallel rank, at its own position in its own
    padded segment, with its own routes; `home` finds it again among the rows of all ranks."""
    batch = toy.pack([toy.sample(1, 6), toy.sample(2, 5), toy.sample(3, 1)])
    ranks = [
        [shard(batch, _rank(tp, t, cp, c), torch.device("cpu"), layers=(1, 2), num_experts=16) for t in range(tp)]
        for c in range(cp)
    ]
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
    replace(batch.routing, experts=ids).check()


def test_a_micro_batch_without_loss_has_no_real_row() -> None:
    """It fills up a row of fewer micro-batches: its routes must enter no statistic."""
    idle = replace(toy.sample(1, 3), loss_mask=torch.zeros(3, dtype=torch.bool))
    assert not shard(idle, _rank(1, 0), torch.device("cpu"), layers=(1,), num_experts=16).real.any()


def test_routes_of_another_model_are_refused() -> None:
    """A trace over another number of experts, or without a layer of this stage, would index nonsense."""
    batch = toy.sample(1, 6)
    with pytest.raises(ValueError, match="16 experts do not fit a model of 32"):
        shard(batch, _rank(1, 0), torch.device("cpu"), layers=(1,), num_experts=32)
    with pytest.raises(ValueError, match="no routes of layers"):
        shard(batch, _rank(1, 0), torch.device("cpu"), layers=(1, 5), num_experts=toy.EXPERTS)
