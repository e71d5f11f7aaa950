"""Law: under replay the router's gradient is autograd's of the gathered formula, for experts it would not choose too.

R3 keeps the routers learning: the chosen experts are taken from the record, their gates are recomputed. Megatron
asks for the choice amid its own computation of the gates, at another place for each kind of router, so that a replay
which returned the recorded scores, a scattered copy of them or the wrong stage's would train without an error. Replayed
gates are the contrary: constants, and the identity where they are the router's own.

Megatron's own router on one rank stands beside the published formula in fp64. Not covered: bf16, TransformerEngine's
fused router (which is refused), the layouts, which tests/laws/test_parallel_invariance.py has.

Letters: t tokens, H hidden size, E experts, K of them a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.device.device import init_device
from tests.support.refusals import refuses

init_device()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_bridge.config import ReplayConfig  # noqa: E402
from megatron_bridge.model.router import MaskedRouter  # noqa: E402
from megatron_bridge.step.replay_hook import RoutingReplay  # noqa: E402
from routing_replay.replay import FedRows, RecordedRoutes  # noqa: E402
from routing_replay.trace import RoutingTrace  # noqa: E402

T, H, E, K = 24, 12, 16, 4
FED = FedRows(samples=("a/0",), ends=torch.tensor([0, T]), tokens=torch.arange(T))
SCALE = 2.5


def _sigmoid(logits: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V3 (arXiv:2412.19437, eq. 12-16): the bias moves the choice, never the gate."""
    chosen = logits.sigmoid().gather(1, ids)
    return chosen / chosen.sum(1, keepdim=True)


def _softmax_of_chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(1, ids).softmax(1)


def _renormalized(logits: Tensor, ids: Tensor) -> Tensor:
    """Qwen3-MoE with norm_topk_prob, as its published code computes it."""
    chosen = logits.softmax(1).gather(1, ids)
    return chosen / chosen.sum(1, keepdim=True)


def _softmax_of_all(logits: Tensor, ids: Tensor) -> Tensor:
    """Qwen3-MoE without norm_topk_prob: the gradient goes through the normaliser to every expert."""
    return logits.softmax(1).gather(1, ids)


GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}
PRE = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
Formula = Callable[[Tensor, Tensor], Tensor]
KINDS: dict[str, tuple[dict[str, Any], Formula]] = {
    "sigmoid with bias": (SIGMOID, _sigmoid),
    "sigmoid with bias, groups": (SIGMOID | GROUPS, _sigmoid),
    "softmax of the chosen": (SOFTMAX, _softmax_of_chosen),
    "softmax, renormalized": (SOFTMAX, _renormalized),
    "softmax of all": (PRE, _softmax_of_all),
    "softmax of all, groups": (PRE | GROUPS, _softmax_of_all),
}


class Bench:
    """One router of megatron's, its replay, and one micro-batch."""

    def __init__(self, kind: str, scale: float | None, *, mode: str = "r3", gates: bool = False) -> None:
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=H,
            num_attention_heads=1,
            add_bias_linear=False,
            num_moe_experts=E,
            moe_router_topk=K,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",
            moe_router_topk_scaling_factor=scale,
            **KINDS[kind][0],
        )
        self.router = MaskedRouter(
            config=config, pg_collection=SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
        )
        self.router.layer_number = 1
        torch.nn.init.normal_(self.router.weight, std=0.5)  # logits of some spread
        if self.router.expert_bias is not None:
            self.router.expert_bias.copy_(torch.randn(E))
        self.replay = RoutingReplay(
            [torch.nn.ModuleList([self.router])], ReplayConfig(mode=mode, gates=gates), recompute=False
        )
        self.scale, self.formula = scale or 1.0, KINDS[kind][1]
        self.hidden = torch.randn(T, H)
        self.upstream = torch.randn(T, E)

    def load(self, ids: Tensor | None, **how: Any) -> None:
        trace = None
        if ids is not None:
            trace = RoutingTrace(experts=ids[:, None].to(torch.uint8), layers=(0,), num_experts=E)
        shard: Any = SimpleNamespace(real=torch.ones(T, dtype=torch.bool), routing=trace, fed=FED)
        self.replay.load([shard], **how)
        self.replay.forward_of(0)

    def run(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Probs [t, E], and the gradients of sum(probs * upstream) to weight [E, H] and input [t, H]."""
        x = self.hidden.clone().requires_grad_()
        probs, routing_map = self.router(x[:, None])
        assert torch.equal(routing_map, probs != 0)
        weight, back = torch.autograd.grad((probs * self.upstream).sum(), (self.router.weight, x))
        return probs.detach(), weight, back

    def exactly(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same by the formula in fp64."""
        weight = self.router.weight.detach().double().requires_grad_()
        x = self.hidden.double().requires_grad_()
        gates = self.scale * self.formula(x @ weight.t(), ids)
        probs = torch.zeros(T, E, dtype=torch.float64).scatter(1, ids, gates)
        return probs.detach(), *torch.autograd.grad((probs * self.upstream.double()).sum(), (weight, x))

    def own(self) -> Tensor:
        """[t, K]: what the router chooses by itself."""
        self.load(None, forward_only=True, source="own")
        with torch.no_grad():
            return self.router(self.hidden[:, None])[1].nonzero()[:, 1].view(T, K)


def _others(own: Tensor) -> Tensor:
    """[t, K] ids in no order: of row i, i modulo K + 1 experts are not among the router's own."""
    rows = []
    for i, mine in enumerate(own):
        foreign = [e for e in torch.randperm(E).tolist() if e not in mine]
        kept = mine[torch.randperm(K)].tolist()
        n = i % (K + 1)
        rows.append((foreign[:n] + kept)[:K])
    return torch.tensor(rows)


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_the_gathered_formula(kind: str, scale: float | None) -> None:
    """Values and both gradients within rounding of fp32, of the router's own experts, of some and of none of them;
    with groups also of experts whose group was closed."""
    bench = Bench(kind, scale)
    own = bench.own()
    ids = _others(own)
    foreign = (ids[:, :, None] != own[:, None]).all(-1).sum(1)
    assert set(foreign.tolist()) == set(range(K + 1))
    if "groups" in kind:
        open_groups = [set((row // 4).tolist()) for row in own]
        assert any(set((row // 4).tolist()) - mine for row, mine in zip(ids, open_groups, strict=True))
        assert max(len(mine) for mine in open_groups) <= 2
    bench.load(ids, forward_only=False)
    got = bench.run()
    bench.replay.finish()
    for ours, exact in zip(got, bench.exactly(ids), strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-6)
    used = torch.zeros(E, dtype=torch.bool).index_fill(0, ids[foreign == K].flatten(), True)
    assert bool(got[1][used].any(1).all()), "every replayed expert's row of the weight learns"


def test_own_routes_are_replayed_for_the_rows_that_they_were_recorded_for() -> None:
    """R2 keeps them on the rank, where no seal holds them to their tokens: samples and rows do."""
    bench = Bench("sigmoid with bias", None, mode="r2")
    trace = RoutingTrace(experts=bench.own()[:, None].to(torch.uint8), layers=(0,), num_experts=E)
    bench.load(None, forward_only=False, routes=[RecordedRoutes(fed=replace(FED), trace=trace)])
    for other in (replace(FED, samples=("b/0",)), replace(FED, tokens=FED.tokens.flip(0))):
        with refuses(ValueError, 0, "a/0"):
            bench.load(None, forward_only=False, routes=[RecordedRoutes(fed=other, trace=trace)])


def test_routes_of_another_number_of_experts_a_token_are_refused() -> None:
    """Of fewer the gathered formula would make gates all the same."""
    bench = Bench("sigmoid with bias", None)
    with refuses(ValueError, 0, "a/0", 3, 4):
        bench.load(bench.own()[:, :3], forward_only=False)


@pytest.mark.parametrize("kind", KINDS)
def test_own_routes_and_gates_replayed_are_the_identity(kind: str) -> None:
    """Recorded under R2, then replayed by the same weights: bit for bit the probabilities of routing freely, whatever
    stage of their computation the choice is in. With gates there is no gradient; without, the free router's."""
    free = Bench(kind, SCALE, mode="off")
    free.load(None, forward_only=False)
    want = free.run()
    for gates in (False, True):
        bench = Bench(kind, SCALE, mode="r2", gates=gates)
        bench.load(None, forward_only=True, source="record")
        with torch.no_grad():
            bench.router(bench.hidden[:, None])
        routes = bench.replay.recorded()
        bench.load(None, forward_only=False, routes=routes)
        probs, weight, x = bench.run()
        assert torch.equal(probs, want[0])
        assert not weight.any() and not x.any() if gates else torch.equal(weight, want[1])


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_gates_are_what_counts(kind: str) -> None:
    """Any numbers, of any experts, come out as they were recorded: neither normalized nor scaled once more."""
    bench = Bench(kind, SCALE, mode="r2", gates=True)
    ids, gates = _others(bench.own()), torch.rand(T, 1, K) + 0.1
    trace = RoutingTrace(experts=ids[:, None].to(torch.uint8), layers=(0,), num_experts=E, weights=gates)
    bench.load(None, forward_only=False, routes=[RecordedRoutes(fed=FED, trace=trace)])
    probs, weight, x = bench.run()
    assert torch.equal(probs, torch.zeros(T, E).scatter(1, ids, gates[:, 0]))
    assert not weight.any() and x is not None and not x.any()
