"""Law: in every layout of the trainer's ranks its log-probabilities are the rollout's bit for bit, or it is refused.

Ranks either compute whole rows (data, expert, context and pipeline parallelism), or whole columns of a product, or
shares of a sum, of which the engine then computes as many. The table of docs/alignment.md says so; it is held to what
is run here. Not covered: more than four ranks, several of these at once in all combinations.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.config import KernelsConfig, ParallelConfig, PrecisionConfig, TrainerConfig
from megatron_bridge.plan.resolve import resolve
from miles_like.alignment.drill_down import DrillDown
from miles_like.alignment.live import LiveTrainer, sampled
from miles_like.batch.packer import Packer
from miles_like.types import SamplingParams, Scored, TrainBatch
from rollout.embedded.engine.requests import PromptSpec
from tests.support import exactly, layouts, toy
from tests.support.refusals import Facts, refuses
from tests.support.spawn import run_ranks

STEPS = 2
Case = tuple[str, str, str, dict[str, Any]]  # model, format, dtype, settings
_LATE = {"kernels": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
_EP_TP = {"tp": 2, "ep": 2, "dp": 2}
# as in the table -> its runs
TWO: dict[str, tuple[Case, ...]] = {
    "DP2": (("mla", "bf16", "bfloat16", {"dp": 2}),),
    "EP2": (("mla", "fp8", "bfloat16", {"dp": 2, "ep": 2}), ("gqa", "bf16", "float32", {"dp": 2, "ep": 2})),
    "TP2": (("mla", "fp8", "bfloat16", {"tp": 2}), ("gqa", "bf16", "float32", {"tp": 2})),
    "TP2 with EP2": (("mla", "bf16", "float32", {"tp": 2, "ep": 2}), ("gqa", "int4", "bfloat16", {"tp": 2, "ep": 2})),
    "ETP2": (("mla", "bf16", "float32", {"dp": 2, "etp": 2}), ("gqa", "fp8", "bfloat16", {"dp": 2, "etp": 2})),
    "TP2 with ETP2": (("mla", "fp8", "bfloat16", {"tp": 2, "etp": 2} | _LATE),),
    "CP2": (("mla", "fp8", "bfloat16", {"cp": 2}), ("gqa", "bf16", "float32", {"cp": 2})),
    "PP2": (("mla, mtp", "fp8", "bfloat16", {"pp": 2, "mtp_coefficient": 0.1}),),
    "PP2 with VPP2": (("gqa, four layers", "int4", "bfloat16", {"pp": 2, "vpp": 2, "recompute": "full"}),),
}
FOUR: dict[str, tuple[Case, ...]] = {
    "TP4": (("mla", "bf16", "float32", {"tp": 4}),),
    "TP2 with EP2 and DP2": (("mla", "fp8", "bfloat16", _EP_TP), ("gqa", "int4", "bfloat16", _EP_TP)),
    "ETP2 with EP2": (("mla", "fp8", "float32", {"dp": 4, "ep": 2, "etp": 2}),),
    "TP2 with CP2": (("gqa", "int4", "bfloat16", {"tp": 2, "cp": 2}),),
    "TP2 with PP2": (("gqa, four layers", "nvfp4", "bfloat16", {"tp": 2, "pp": 2, "ep": 2}),),
}
REFUSED: dict[str, tuple[dict[str, Any], Facts]] = {
    "ETP4": ({"parallel": {"dp": 4, "etp": 4}}, ("parallel.etp", 4)),
    '`kernels.dispatcher = "allgather"`': ({"kernels": {"dispatcher": "allgather"}}, ("kernels.dispatcher",)),
    "`kernels.overlap_shared_expert = true`": (
        {"kernels": {"overlap_shared_expert": True}},
        ("kernels.overlap_shared_expert",),
    ),
    "`kernels.swiglu_fusion = false`": ({"kernels": {"swiglu_fusion": False}}, ("kernels.swiglu_fusion",)),
}
PAGE = Path(__file__).parents[2] / "docs" / "alignment.md"


@dataclass(frozen=True)
class _Ranks:
    """As RayTrainer, of all ranks of this world, each of which asks."""

    t: Any

    async def score(
        self, batch: TrainBatch, *, temperature: float, replay: bool, states: bool = False
    ) -> list[tuple[int, Scored]]:
        own = self.t.score(batch.grid[self.t.dp_rank], temperature=temperature, replay=replay, states=states)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self.t.dp_rank, own))
        return every


def _compared(pair: exactly.Pair) -> tuple[bool, bool, bool, bool]:
    """What `verify` puts together of all ranks' answers: whether the tokens are those that were sampled, the
    log-probabilities the rollout's under its own routes and under replayed ones, the routes the rollout's, and the
    states of layers the engine's."""
    rollout, layout = sampled(pair.groups(STEPS)), pair.t.config.parallel
    packer = Packer(dp_size=layout.dp, max_tokens=150, micro_multiple=layout.micro_multiple, replayed=False)
    ranks: Any = _Ranks(pair.t)
    trainer = LiveTrainer(trainer=ranks, packer=packer, shape=exactly.shape_of(pair.t))
    own, replayed = (
        asyncio.run(trainer.score(rollout.tokens, temperature=1.0, routes=r)) for r in (None, rollout.routes)
    )
    assert rollout.routes is not None and own.routes is not None and replayed.routes is None
    same = [torch.equal(a, b) for a, b in zip(own.tokens.ids, rollout.tokens.ids, strict=True)]
    probs = [torch.equal(a, b) for s in (own, replayed) for a, b in zip(s.logprobs, rollout.logprobs, strict=True)]
    routes = [torch.equal(a.sort(-1)[0], b.sort(-1)[0]) for a, b in zip(own.routes, rollout.routes, strict=True)]
    return all(same), all(probs), all(routes), _same_states(pair, trainer, rollout.tokens.ids[0])


def _same_states(pair: exactly.Pair, trainer: LiveTrainer, text: Tensor) -> bool:
    """Whether the residual stream that all ranks together report at every layer is the engine's."""
    spec = PromptSpec(
        rid="text",
        token_ids=tuple(text.tolist()),
        sampling=SamplingParams(max_new_tokens=0),
        logprob_start=0,
        states=True,
    )
    found: list[Any] = [None]
    if not pair.t.parallel.rank:
        pair.engine.limits = replace(pair.engine.limits, states=True)
        found = [exactly.generate(pair.engine, [spec])[0][0].states]
    dist.broadcast_object_list(found, src=0)
    down = DrillDown(trainer=trainer, text=text, values=0, rounding=0.0, of_stream=0.0)
    return torch.equal(asyncio.run(down.by_trainer(None)), torch.from_numpy(found[0])[:-1])


def _in_layouts(rank: int, world: int, port: int, where: Path, cases: list[Case]) -> list[Any]:
    out = []
    for i, (model, format, dtype, settings) in enumerate(cases):
        own = layouts.agree_on_port(where / f"port-{world}-{i}", rank)
        with toy.trainer(exactly.config(where / str(rank), model, format, dtype, **settings), rank, world, own) as t:
            pair = exactly.Pair(t, where / f"served-{world}-{i}")
            out.append((exactly.steps(pair, STEPS), _compared(pair)))
    return out


LONG = pytest.mark.long(beside="tests/laws/test_exact_layouts.py")
FIRST = ("TP2 with ETP2", "CP2")
QUICK = {name: TWO[name][:1] for name in FIRST}
REST = {name: cases[1:] if name in FIRST else cases for name, cases in TWO.items()}
WORLDS = [
    pytest.param((2, QUICK), id="two"),
    pytest.param((2, {name: cases for name, cases in REST.items() if cases}), id="two, others", marks=LONG),
    pytest.param((4, FOUR), id="four", marks=LONG),
]


@pytest.fixture(scope="module", params=WORLDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    world, rows = request.param
    cases = [case for of_row in rows.values() for case in of_row]
    where = tmp_path_factory.mktemp("layouts")
    ranks = run_ranks(_in_layouts, world, where, cases, timeout_s=layouts.PATIENCE, keep=True)
    found = iter(zip(*ranks, strict=True))
    return {name: [each for _ in of_row for each in next(found)] for name, of_row in rows.items()}


def test_log_probabilities_are_exact_in_every_layout(run: dict[str, list[Any]]) -> None:
    """On every rank: what its row of the batch was given by the engine, before and after an optimizer step."""
    steps = {name: [found for found, _ in ranks] for name, ranks in run.items()}
    wrong = {
        name: found for name, ranks in steps.items() if (found := [r for r in ranks if r != [(0, 0, True)] * STEPS])
    }
    assert not wrong


def test_verify_puts_the_ranks_of_every_layout_together(run: dict[str, list[Any]]) -> None:
    """Each rank reports its rows and layers of its row of the batch; the assembled whole is what the engine sampled. A
    run makes the same comparison before its first step."""
    wrong = {name: ranks for name, ranks in run.items() if any(asked != (True,) * 4 for _, asked in ranks)}
    assert not wrong


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    changes, facts = REFUSED[name]
    config = TrainerConfig(
        hf_config="",
        parallel=ParallelConfig(**changes.get("parallel", {})),
        precision=PrecisionConfig(format="bf16"),
        optimizer={},  # type: ignore[arg-type]
        replay={},  # type: ignore[arg-type]
        kernels=KernelsConfig(**changes.get("kernels", {})),
        deterministic=True,
    )
    with refuses(ValueError, "alignment.deterministic", *facts):
        resolve(config, toy.hf_config(), cuda=False)


def test_the_table_of_the_docs_is_what_is_run_here() -> None:
    lines = PAGE.read_text().partition("## Layouts")[2].partition("\n## ")[0].splitlines()
    table = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines if line.startswith("| ")][1:]
    want = [("one rank", "exact"), *((name, "exact") for name in (*TWO, *FOUR)), *((n, "refused") for n in REFUSED)]
    assert table == want
