"""Law: given routes, replayed in any layout from what the driver ships to each rank, give the loss and the gradients of
the unsharded replay on one rank. The batches are what a run trains: answers of one turn, of two with the environment's
tokens between them, and partial rollouts that went on under other weights, read from replies and packed.

Letters: T packed tokens, L MoE layers, K experts a token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.batch.packing import cut_shard, pack
from miles_like.types import Finish, MicroBatch, Prompt, Sample, SampleGroup
from rollout.sglang.samples import RoutingShape, SampleReader, empty_sample, routing_rows
from rollout.wire.generate import GenerateReply, WireSpan
from routing_replay.align import ShardSpec
from routing_replay.trace import RoutingTrace
from tests.support import layouts, toy
from tests.support.chosen import chosen, later
from tests.support.layouts import Case, Run
from tests.support.spawn import free_port, run_ranks

FULL = {"recompute": "full"}
PARTS = {"recompute": "selective", "recompute_modules": ("core_attn", "moe")}
MTP = {"mtp_coefficient": 0.3}
COMPARED = ("train/loss", "train/grad_norm", "train/entropy", "routing/agreement", "routing/replay_coverage")


EXPERTS, TOP_K = layouts.EXPERTS, toy.TOP_K
# of each reply: the weights' version, and how many tokens the environment says after it
KINDS = (((0, 0),), ((0, 3), (0, 0)), ((0, 0), (1, 0)), ((0, 2), (1, 3), (1, 0)))


def _session(g: torch.Generator, index: int, layers: tuple[int, ...]) -> Sample:
    """A sample read from replies: one for each pair of its kind."""
    shape = RoutingShape(num_layers=max(layers) + 1, moe_layers=layers, top_k=TOP_K, num_experts=EXPERTS)

    def drawn(n: int) -> list[int]:
        return torch.randint(2, toy.VOCAB, (n,), generator=g).tolist()

    sample = empty_sample(Prompt(id=f"p{index}", token_ids=tuple(drawn(1 + index % 4)), answer=""), 0)
    fed: list[int] = []
    for version, after in KINDS[index % len(KINDS)]:
        sampled, before, start = drawn(2 + index % 3), len(sample.token_ids) + len(fed), routing_rows(sample)
        rows = before + len(sampled) - 1 - start
        ids = torch.rand(rows, len(layers), EXPERTS, generator=g).topk(TOP_K, -1).indices.to(torch.uint8)
        trace = RoutingTrace(experts=ids, layers=layers, num_experts=EXPERTS)
        reply = GenerateReply(
            rid="",
            output_ids=np.array(sampled),
            logprobs=-5 * torch.rand(len(sampled), generator=g).numpy(),
            finish=Finish.STOP,
            prompt_tokens=before,
            weight_version=str(version),
            weight_versions=(WireSpan(str(version), 0, len(sampled)),),
            routed_experts=trace.to_wire(num_layers=shape.num_layers),
        )
        sample = SampleReader(routing=shape, decode=lambda _: "").extend([sample], [fed], [reply])[0]
        fed = drawn(after)
    return sample


def sessions(seed: int, layers: tuple[int, ...], dp: int, micros: int) -> layouts.Rows:
    """16 samples, four of each kind, as `pack` makes one step of them."""
    g = torch.Generator().manual_seed(seed)
    samples = [_session(g, i, layers) for i in range(16)]
    gaps = [bool((~s.loss_mask[int(s.loss_mask.nonzero()[0, 0]) :]).any()) for s in samples]
    assert sum(gaps) == 8 and sum(len({v.version for v in s.versions}) == 2 for s in samples) == 8
    groups = [SampleGroup(prompt=Prompt(id=s.prompt_id, token_ids=(1,), answer=""), samples=(s,)) for s in samples]
    advantages = [[a] for a in torch.randn(16, generator=g).tolist()]
    step = pack(groups, advantages, dp_size=dp, max_tokens=10_000, micro_multiple=micros)
    return [list(row) for row in step.grid], step.loss_tokens


def shipped(m: MicroBatch, part: ShardSpec) -> MicroBatch:
    """As the driver would send it to a rank: without the rows and layers that the rank has no use for."""
    return replace(m, routing=cut_shard([m], part)[0])


def _wrong(m: MicroBatch, part: ShardSpec, ids: torch.Tensor) -> MicroBatch:
    """Other ids [T, L, K] with seals of their new values, so that no check refuses them."""
    return shipped(toy.with_routes(m, ids), part)


def _ids(m: MicroBatch) -> torch.Tensor:
    assert isinstance(m.routing, RoutingTrace)
    return m.routing.experts


def one_row_late(m: MicroBatch, part: ShardSpec) -> MicroBatch:
    return _wrong(m, part, _ids(m).roll(1, 0))


def of_the_next_layer(m: MicroBatch, part: ShardSpec) -> MicroBatch:
    return _wrong(m, part, _ids(m).roll(1, 1))


def of_the_neighbour(m: MicroBatch, part: ShardSpec) -> MicroBatch:
    """The first two samples' rows exchanged, as far as both have any."""
    ids, starts = _ids(m).clone(), m.cu_seqlens.tolist()
    n = min(starts[1], starts[2] - starts[1])
    a, b = slice(0, n), slice(starts[1], starts[1] + n)
    ids[a], ids[b] = ids[b].clone(), ids[a].clone()
    return _wrong(m, part, ids)


def of_one_row(m: MicroBatch, part: ShardSpec) -> MicroBatch:
    """One row of each micro-batch has those of the row after it."""
    ids = _ids(m).clone()
    ids[2] = ids[3]
    return _wrong(m, part, ids)


FAULTS = {
    f.__name__: Case("mla", given=f, rows=sessions)
    for f in (one_row_late, of_the_next_layer, of_the_neighbour, of_one_row)
}
ONE = {
    "one sample a micro-batch": Case("mla", micros=16, given=shipped, rows=sessions),
    "one pack": Case("mla", micros=1, given=shipped, rows=sessions),
}
TWO: dict[str, dict[str, Any]] = {
    "TP2 with sequence parallel": {"tp": 2},
    "PP2, recomputed": {"pp": 2} | FULL,
    "PP2, recomputed in parts": {"pp": 2} | PARTS,
    "PP2xVPP2": {"pp": 2, "vpp": 2},
    "PP2xVPP2, recomputed": {"pp": 2, "vpp": 2} | FULL,
    "PP2xVPP2, recomputed in parts": {"pp": 2, "vpp": 2} | PARTS,
    "EP2": {"dp": 2, "ep": 2},
    "ETP2": {"dp": 2, "etp": 2},
    "CP2": {"cp": 2},
    "DP2": {"dp": 2},
}
DRAFT: dict[str, dict[str, Any]] = {
    "PP2xVPP2, recomputed, MTP": {"pp": 2, "vpp": 2} | FULL,
    "CP2, MTP": {"cp": 2},
}
FOUR: dict[str, dict[str, Any]] = {
    "CP2xPP2, recomputed in parts": {"cp": 2, "pp": 2} | PARTS,
    "PP2xVPP2xTP2, recomputed": {"pp": 2, "vpp": 2, "tp": 2} | FULL,
}


def _mla(rows: dict[str, dict[str, Any]]) -> dict[str, Case]:
    return {name: Case("mla", layout, given=shipped, rows=sessions) for name, layout in rows.items()}


DRAFTED = {k: Case("mtp", v, MTP, given=shipped, rows=sessions) for k, v in DRAFT.items()}
RANKS = {1: ONE, 2: _mla(TWO) | DRAFTED, 4: _mla(FOUR)}
CASES = {name: case for cases in RANKS.values() for name, case in cases.items()}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay-layouts")


def _one_rank(
    rank: int, world: int, port: int, where: Path, cases: dict[str, Case]
) -> tuple[dict[str, Run], dict[str, Run]]:
    alone = layouts.references(rank, world, port, where, cases)
    packed = {name: case for name, case in cases.items() if name in ONE or name in FAULTS}
    return alone, layouts.in_layouts(rank, world, port, where, packed)


@pytest.fixture(scope="module")
def single(request: pytest.FixtureRequest, where: Path) -> tuple[dict[str, Run], dict[str, Run]]:
    cases = {name: CASES[name] for name in chosen(request, "name", CASES)}
    cases |= {name: FAULTS[name] for name in chosen(request, "fault", FAULTS)}
    return run_ranks(_one_rank, 1, where, cases, timeout_s=layouts.PATIENCE, keep=True)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, where: Path, single: Any) -> dict[str, Run]:
    out: dict[str, Run] = dict(single[1])
    for world in (2, 4):
        cases = {name: RANKS[world][name] for name in chosen(request, "name", RANKS[world])}
        if cases:
            out |= run_ranks(layouts.in_layouts, world, where, cases, timeout_s=layouts.PATIENCE, keep=True)[0]
    return out


def _agree(want: Run, got: Run) -> bool:
    """To the tolerances of test_parallel_invariance: 1e-5 of the metrics of two steps, 2e-5 of each gradient's norm."""
    pairs = zip(want.metrics, got.metrics, strict=True)
    same = all(b[k] == pytest.approx(a[k], rel=1e-5, abs=1e-12) for a, b in pairs for k in COMPARED)
    return same and got.worst[1] < 2e-5


HERE = "tests/laws/test_replay_layouts.py"
FIRST = ["PP2xVPP2, recomputed", "CP2"]
FIRST_FAULTS = ["of_the_next_layer", "of_one_row"]  # of all rows, and the least


@pytest.mark.parametrize("name", later(CASES, FIRST, beside=HERE))
def test_replay_is_that_of_one_rank(single: Any, runs: dict[str, Run], name: str) -> None:
    """Four distinct experts of eight, random for each token and layer, which are not the routers' own choice; the
    first layer is dense. Ranks are given what `cut_shard` makes of a shard for them; the rank alone is given whole
    traces. The same sums in another order: fp32 rounding may differ, a row of another token may not. Not covered: more
    than four ranks; that a driver asks for the right part (tests/miles_like/cluster/test_workers.py)."""
    want, got = single[0][CASES[name].key], runs[name]
    assert _agree(want, got), (name, got.worst, want.metrics, got.metrics)
    assert all(m["routing/replay_coverage"] == 1.0 and m["routing/agreement"] < 0.05 for m in got.metrics)


@pytest.mark.parametrize("fault", later(FAULTS, FIRST_FAULTS, beside=HERE))
def test_the_law_sees_a_wrong_row(single: Any, runs: dict[str, Run], fault: str) -> None:
    """The tolerances let none of these through: the least of them moves a gradient a thousand times as far."""
    assert not _agree(single[0]["mla"], runs[fault])
    assert runs[fault].worst[1] > 2e-2


def _lively(t: Any) -> None:
    """Every matrix is redrawn, of the size that keeps its input's: at their small initial values experts change no
    logit. The head's makes distributions of about two nats, as a trained model's are."""
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, x in sorted(t.models[0].named_parameters()):
            if x.ndim == 2:
                size = 1.0 if "embedding" in name else (4.0 if "output_layer" in name else 1.0) * x.shape[1] ** -0.5
                x.copy_(size * torch.randn(x.shape, generator=g))
    t.optimizer.reload_model_params()


def _sampled(t: Any, m: MicroBatch) -> MicroBatch:
    """Every position's label drawn from the model's own distribution, and its log-probability as the rollout's."""
    m = replace(m, loss_mask=torch.ones_like(m.loss_mask))
    every = [replace(m, labels=torch.full_like(m.labels, v)) for v in range(toy.VOCAB)]
    table = torch.stack(t.logprobs(every), 1)  # [T, vocabulary]
    labels = torch.multinomial(table.exp(), 1, generator=torch.Generator().manual_seed(5))
    return replace(m, labels=labels[:, 0], rollout_logprobs=table.gather(1, labels)[:, 0])


def _slipped(rank: int, world: int, port: int, where: Path) -> dict[str, float]:
    """mismatch/kl (k3) by what was wrong with the routes that were replayed."""
    hf, start = toy.hf_dir(where / "hf"), where / "start"
    [[m]], _ = toy.grid(toy.samples(96), dp=1, micros=1)
    with toy.trainer(toy.config(hf, mode="off"), rank, world, port) as t:
        _lively(t)
        t.save(start)
        m = _sampled(t, m)
        m = toy.with_routes(m, toy.own_routes(t, [m], len(m.tokens))[0])
    out = {}
    with toy.trainer(toy.config(hf), rank, world, free_port(), ClippedLoss(clip_low=0.2, clip_high=0.2)) as t:
        t.load_weights(start)
        for name, given in {"nothing": shipped, **{k: case.given for k, case in FAULTS.items()}}.items():
            assert given is not None
            out[name] = t.evaluate([given(m, t.shard_spec)], len(m.tokens))["mismatch/kl"]
    return out


@pytest.mark.long(beside="tests/laws/test_routes_in_mid_run.py")
def test_a_fault_that_slipped_through_would_show_in_the_metrics(tmp_path: Path) -> None:
    """What `mismatch/kl` says of a fault if no check refused it: the alarm behind the checks. The model's own choices
    are replayed, so right routes give 0; all rows shifted by one gave 0.44, layers rotated by one 0.44. One row in a
    thousand gave 3e-4, which no bound on a mean could tell from rounding: single rows are for the checks."""
    found = run_ranks(_slipped, 1, tmp_path, keep=True)[0]
    assert found["nothing"] < 1e-9
    assert found["one_row_late"] > 0.1 and found["of_the_next_layer"] > 0.1
    assert 1e-9 < found["of_one_row"] < 1e-2
