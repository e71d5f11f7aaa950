"""Laws over TransformerEngine's modules: what megatron builds of them computes what its local modules do.

The modules are the package's own Python, its extension is emulated (tests/support/te, held to PyTorch's functions by
tests/test_te_emulation.py), ranks are CPU ranks over gloo, and DeepEP is emulated over torch's all-to-all. So names,
shapes, the order of a layer's operations, what is recomputed, what a checkpoint holds, and what the project does with
the modules are true; kernels are not. Attention in FP32 is the package's own in PyTorch, in BF16 its fused one.
Fused permutation is the package's over emulated kernels. Not covered: overlapped communication.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.convert.directory.torch_dist import TorchDist
from tests.laws import test_qat as qat
from tests.laws import test_resharding_resume as resume
from tests.support import layouts, qat_cases, toy
from tests.support.chosen import chosen, later
from tests.support.layouts import ROUTED, Case, agree_on_port
from tests.support.spawn import free_port, run_ranks
from tests.support.te import extension
from tests.support.te.process import init_te

HERE = "tests/laws/test_te_modules.py"
Found = dict[str, Any]
SEQUENTIAL = {"kernels": {"spec": "te"}}
GROUPED = {"kernels": {"spec": "te", "grouped_gemm": True}}
FUSED = {"kernels": {"spec": "te", "grouped_gemm": True, "permute_fusion": True}}
FLEX = {"kernels": {"spec": "te", "grouped_gemm": True, "dispatcher": "flex"}}
FUSED_FLEX = {"kernels": FLEX["kernels"] | FUSED["kernels"]}
PARTS = {"recompute": "selective", "recompute_modules": ("core_attn", "mla_up_proj", "moe", "layernorm")}
CASES: dict[str, Case] = {
    "TP2, latent attention, an expert at a time": Case("mla", SEQUENTIAL | {"tp": 2}),
    "EP2 by DeepEP, grouped queries and experts, recomputed": Case(
        "gqa", FLEX | {"dp": 2, "ep": 2, "recompute": "full"}
    ),
    "EP2, latent attention, grouped experts": Case("mla", GROUPED | {"dp": 2, "ep": 2}),
    "EP2 by DeepEP over TP2": Case("mla", FLEX | {"tp": 2, "ep": 2}),
    "TP2 and ETP2, recomputed in parts": Case("mla", GROUPED | PARTS | {"tp": 2, "etp": 2}),
    "PP2xVPP2": Case("mla", GROUPED | {"pp": 2, "vpp": 2}),
    "DP2, fused rotation": Case("gqa", {"kernels": {"spec": "te", "rope_fusion": True}, "dp": 2}),
    "TP2, draft layers": Case("glm", GROUPED | {"tp": 2}, {"mtp_coefficient": 0.3}),
    "DP2, a micro-batch for each": Case("gqa", GROUPED | {"dp": 2}, micros=2),
    "TP2, scalar head": Case("mla", GROUPED | {"tp": 2}, {"head": "scalar"}),
    "EP2, fused permutation": Case("mla", FUSED | {"dp": 2, "ep": 2}),
    "EP2 by DeepEP, fused permutation": Case("gqa", FUSED_FLEX | {"dp": 2, "ep": 2}),
}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 6.0, "targets": ["attention", "experts", "mlp"]}}
CASES |= {
    "TP2 and ETP2, adapters of grouped experts": Case("mla", GROUPED | {"tp": 2, "etp": 2}, LORA),
    "EP2, adapters": Case("gqa", GROUPED | {"dp": 2, "ep": 2}, LORA),
    "TP2, adapters of an expert at a time": Case("mla", SEQUENTIAL | {"tp": 2}, LORA),
}
ROUNDED: dict[str, Case] = {
    "CP2, latent attention": Case("mla", GROUPED | {"cp": 2}, {"dtype": "bfloat16"}),
    "CP2, grouped queries": Case("gqa", GROUPED | {"cp": 2}, {"dtype": "bfloat16"}),
}
ALL = CASES | ROUNDED
NAMES = later(CASES, list(CASES)[:2], beside=HERE)
IN_BF16 = later(ROUNDED, [], beside=HERE)
# checkpoints of adapters, on every kind of target
ADAPTED: dict[str, dict[str, Any]] = {
    "TP2 and ETP2, grouped experts": GROUPED | {"tp": 2, "etp": 2},
    "EP2, grouped experts": GROUPED | {"dp": 2, "ep": 2},
    "TP2, an expert at a time": SEQUENTIAL | {"tp": 2},
}
TARGETS: dict[str, Any] = {"lora": LORA["lora"] | {"targets": ["attention", "experts", "shared_experts", "mlp"]}}
BY_LAYOUT = later(ADAPTED, [], beside=HERE)
# key of `kernels` -> a function of the package's extension, or of DeepEP's buffer, that computes where it is set
CHOSEN = {
    "grouped_gemm": "te_general_grouped_gemm",
    "permute_fusion": "permute_with_mask_map",
    "rope_fusion": "fused_rope_forward",
    "dispatcher": "dispatch",
}
KEYS = ("train/loss", "train/grad_norm", "train/entropy", "mismatch/logprob_abs_diff_max", "sample/logprob")
QAT: qat_cases.Case = ("gqa", {"dtype": "bfloat16", "tp": 2} | GROUPED, ("fp8",))


def _hf(where: Path, rank: int, world: int) -> str:
    """The model of the checkpoints: a dense layer, one of experts."""
    return toy.hf_dir(where / f"hf-{world}-{rank}", toy.hf_config() | ROUTED | {"num_hidden_layers": 2})


def _trainers(where: Path, rank: int, world: int, layout: dict[str, Any]) -> tuple[Any, Any]:
    """Of the laws of resumption, one after the other."""
    ports = [agree_on_port(where / f"resumed-port-{world}-{k}", rank) for k in range(2)]
    config = toy.config(_hf(where, rank, world), **layout)
    return toy.trainer(config, rank, world, ports[0]), toy.trainer(config, rank, world, ports[1])


def _local(rank: int, world: int, port: int, where: Path, cases: dict[str, Case], adapted: list[str]) -> Found:
    """The single rank of local modules: every case's start and gradients, checkpoints."""
    first, again = _trainers(where, rank, world, {})
    out: Found = {"resumed": resume.one_layout(first, again, where / "start", where / "of-local", None)}
    if adapted:
        with toy.trainer(toy.config(_hf(where, rank, world), **TARGETS), rank, world, free_port()) as t:
            resume.train(t, (0, 1))
            t.save(where / "adapters-of-local")
            out["adapted"] = resume.train(t, (2, 3))
    return out | {"runs": layouts.references(rank, world, port, where, cases)}


def _on_te(rank: int, world: int, port: int, where: Path, cases: dict[str, Case], adapted: list[str]) -> Found:
    """All that is asked of two ranks of TransformerEngine's modules."""
    trained = {}
    for i, name in enumerate(adapted):
        config = toy.config(_hf(where, rank, world), **TARGETS, **ADAPTED[name])
        with toy.trainer(config, rank, world, agree_on_port(where / f"adapted-port-{i}", rank)) as t:
            t.load(where / "adapters-of-local")
            t.save(where / name / "of-local")
            trained[name] = resume.train(t, (2, 3))
            t.save(where / name / "of-te")
    called: dict[str, int] = sys.modules[extension.NAME].called
    runs: dict[str, layouts.Run] = {}
    calls: dict[str, set[str]] = {}
    for i, (name, case) in enumerate(cases.items()):
        called.clear()
        runs[name] = layouts.run_case(rank, world, agree_on_port(where / f"case-port-{i}", rank), where, case)
        calls[name] = set(called)
    first, again = _trainers(where, rank, world, GROUPED | {"tp": 2})
    resumed = resume.one_layout(first, again, where / "start", where / "of-te", where / "of-local")
    if rank == 0:
        toy.hf_dir(where / QAT[0], qat_cases.MODELS[QAT[0]])
    rounded = qat._law(where, rank, world, QAT, "fp8", agree_on_port(where / "qat-port", rank))
    return {"runs": runs, "calls": calls, "resumed": resumed, "adapted": trained, "qat": rounded}


def _back(rank: int, world: int, port: int, where: Path, adapted: list[str]) -> Any:
    """Local modules go on from the checkpoint of TransformerEngine's, and save its adapters."""
    for name in adapted:
        with toy.trainer(toy.config(_hf(where, rank, world), **TARGETS), rank, world, free_port()) as t:
            t.load(where / name / "of-te")
            t.save(where / name / "of-te-again")
    with toy.trainer(toy.config(_hf(where, rank, world)), rank, world, free_port()) as t:
        return resume.resharded(t, where / "of-te")["resharded"]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("te")
    cases = {name: ALL[name] for name in chosen(request, "name", ALL)}
    adapted, patience = chosen(request, "layout", ADAPTED), layouts.PATIENCE
    (local,) = run_ranks(_local, 1, where, cases, adapted, timeout_s=patience, keep=True)
    te = run_ranks(_on_te, 2, where, cases, adapted, timeout_s=patience, begin=init_te)
    (back,) = run_ranks(_back, 1, where, adapted, timeout_s=patience, keep=True)
    return {"local": local, "te": te, "back": back, "where": where}


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_local_modules(found: dict[str, Any], name: str) -> None:
    """Two steps with replayed routes from one checkpoint of local modules: figures within 1e-5 of the single rank's,
    each parameter's gradient within 2e-5 of its norm."""
    case = CASES[name]
    want, got = found["local"]["runs"][case.key], found["te"][0]["runs"][name]
    for first, mine in zip(want.metrics, got.metrics, strict=True):
        more = ("train/mtp_loss",) if case.model == "glm" else ()
        for key in (*KEYS, *more):
            assert mine[key] == pytest.approx(first[key], rel=1e-5, abs=1e-12), key
        assert mine["routing/replay_coverage"] == 1.0
    worst, distance = got.worst
    assert distance < 2e-5, worst
    for key, function in CHOSEN.items():
        assert (function in found["te"][0]["calls"][name]) == (key in case.layout["kernels"]), key


@pytest.mark.parametrize("name", IN_BF16)
def test_context_parallel_ranks_round_no_worse_than_one(found: dict[str, Any], name: str) -> None:
    """The package's attention passes keys and values around a ring, which it does in BF16 only. Of the same weights, a
    parameter's gradient is at most twice as far from that in FP32 as a single rank's, and no farther in the middle;
    loss and norm to 5e-3."""
    case = ALL[name]
    one, got = found["local"]["runs"][case.key], found["te"][0]["runs"][name]
    assert "thd_out_correction" in found["te"][0]["calls"][name]
    times = {p: got.rounding[p] / off for p, off in one.rounding.items() if off}
    worst = max(times, key=lambda p: times[p])
    assert len(times) > 100 and times[worst] < 2, (worst, times[worst])
    assert statistics.median(times.values()) < 1.1
    for want, mine in zip(one.metrics, got.metrics, strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert mine[key] == pytest.approx(want[key], rel=5e-3), key


def test_a_checkpoint_continues_on_either_kind_of_modules(found: dict[str, Any]) -> None:
    """Weights, masters and moments: a run of TransformerEngine's modules and its FusedAdam resumes bit for bit from its
    own checkpoint on two ranks, goes on from that of local modules and torch's AdamW on one, and they from its."""
    want = found["local"]["resumed"]["uninterrupted"]
    for mine in (ranks["resumed"] for ranks in found["te"]):
        assert mine["resumed"] == mine["uninterrupted"] and mine["resumed weights"]
        assert resume.apart(mine["uninterrupted"], want) < resume.FORKS
        assert resume.apart(mine["resharded"], want[2:]) < resume.FORKS
    assert resume.apart(found["back"], want[2:]) < resume.FORKS


def _saved(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint: weights, masters, moments."""
    source = TorchDist(path)
    shapes = {key: source.stored(key).shape for key in source.names()}
    return {key: source.read(key, (0,) * len(shape), shape) for key, shape in shapes.items()}


@pytest.mark.parametrize("layout", BY_LAYOUT)
def test_adapters_go_from_either_kind_of_modules_to_the_other_and_back(found: dict[str, Any], layout: str) -> None:
    """What two ranks of TransformerEngine's modules load from local modules and save again is bit for bit what they
    loaded, and so is what local modules load from them: adapters, their masters and moments, and frozen weights. Both
    go on alike from one checkpoint."""
    where = found["where"]
    for rank in found["te"]:
        assert resume.apart(rank["adapted"][layout], found["local"]["adapted"]) < resume.FORKS
    first, second = _saved(where / "adapters-of-local"), _saved(where / layout / "of-te")
    adapters = {key for key in first if "lora_" in key}
    assert len(adapters) > 20 and {k for k in adapters if torch.equal(first[k], second[k])} == set()
    for want, got in ((first, "of-local"), (second, "of-te-again")):
        again = _saved(where / layout / got)
        assert again.keys() == want.keys()
        assert [key for key in want if not torch.equal(want[key], again[key])] == []


def test_the_weights_that_are_multiplied_are_those_that_the_rollout_decodes(found: dict[str, Any]) -> None:
    """Quantization-aware training through the package's linears and grouped linears, after two steps in BF16."""
    for rounded in (ranks["qat"] for ranks in found["te"]):
        assert not rounded["differing"], rounded["where"]
        assert rounded["trained"] == rounded["served"] != rounded["before"]
        assert not rounded["not rounded"] and not rounded["changed"] and rounded["covered"]
