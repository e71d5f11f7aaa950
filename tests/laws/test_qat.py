"""Laws of quantization-aware training: after optimizer steps the weights that the model computes with are, bit for bit,
those that the rollout decodes from what is published, in every format and layout; and the gradient is that of the
weights so rounded, given to the weights themselves.

Oracles: the stream codec on whole exported tensors (which knows no shard), and a trainer without quantization whose
weights are replaced by hand. Not covered: more than two ranks, CUDA.
"""

from __future__ import annotations

import functools
import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.stream import dequantize_stream, quantize_stream
from tests.support import toy
from tests.support.layouts import EXPERTS
from tests.support.qat_cases import BF16, FORMATS, MODELS, ONE, QUICK, TWO, Case
from tests.support.spawn import free_port, run_ranks

Found = dict[str, Any]
Reports = Callable[[str], list[Found]]  # of a case: one a rank
STEPS = 2
LONG = pytest.mark.long(beside="tests/laws/test_qat.py")


def _config(where: Path, model: str, precision: dict[str, Any] | None = None, **settings: Any) -> Any:
    given = {"format": "bf16"} if precision is None else {"qat": True, **precision}
    return toy.config(str(where / model), precision=given, lr=1e-2, **settings)


def _row(t: Any, seed: int) -> tuple[Any, int]:
    layers = t.family.moe_layers(t.hf)
    dp = t.config.parallel.dp
    rows, tokens = toy.grid(toy.samples(4, seed=seed, layers=layers, experts=EXPERTS), dp=dp, micros=2 // dp)
    return rows[t.dp_rank], tokens


def _step(t: Any, seed: int) -> dict[str, float]:
    return dict(t.step(*_row(t, seed), seed + 1).metrics)


def _clones(stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in stream}


def _hash(tensors: Mapping[str, Tensor]) -> str:
    h = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        h.update(name.encode() + x.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def _compared(t: Any) -> Found:
    """What the model computes with beside what the rollout decodes from the codes that are published."""
    spec = t._fake._codec.spec
    trained, published = _clones(t.export(computed=True)), _clones(t.export())
    served = dict(dequantize_stream(quantize_stream(iter(published.items()), spec), spec))
    covered = [n for n, x in published.items() if spec.covers(n, x.shape)]
    wrong = {n: int((trained[n] != x.to(trained[n].dtype)).sum()) for n, x in served.items()}
    return {
        "differing": sum(wrong.values()),
        "where": [n for n, count in wrong.items() if count][:3],
        "trained": _hash({n: trained[n] for n in covered}),
        "served": _hash({n: served[n] for n in covered}),
        "not rounded": [n for n in covered if torch.equal(trained[n], published[n])],
        "changed": [n for n, x in published.items() if n not in covered and not torch.equal(trained[n], x)],
        "covered": len(covered),
    }


def _law(where: Path, rank: int, world: int, case: Case, format: str, port: int) -> Found:
    model, settings, _ = case
    with toy.trainer(_config(where, model, FORMATS[format], **settings), rank, world, port) as t:
        before = _compared(t)
        for step in range(STEPS):
            _step(t, step)
        return _compared(t) | {"before": before["trained"]}


@torch.no_grad()
def _by_hand(t: Any, values: list[Tensor]) -> None:
    for p, value in zip((p for m in t.models for p in m.parameters()), values, strict=True):
        p.copy_(value)


def _oracle(where: Path, rank: int, world: int, ports: Sequence[int], name: str, **settings: Any) -> Found:
    """A step of fake quantization, and one whose forward and backward ran on weights replaced by hand."""
    start, out = where / f"start {name}", []
    with toy.trainer(_config(where, "mla", **settings), rank, world, ports[0]) as t:
        t.save(start)
    with toy.trainer(_config(where, "mla", FORMATS["fp8"], **settings), rank, world, ports[1]) as t:
        t.load_weights(start)
        t._fake.refresh()
        replaced = [
            (p.computed() if hasattr(p, "computed") else p).detach().clone() for m in t.models for p in m.parameters()
        ]
        out.append(_after_a_step(t, lambda: None))
    with toy.trainer(_config(where, "mla", **settings), rank, world, ports[2]) as t:
        t.load_weights(start)
        own = [p.detach().clone() for m in t.models for p in m.parameters()]
        _by_hand(t, replaced)
        out.append(_after_a_step(t, lambda: _by_hand(t, own)))
        _by_hand(t, own)
    (gradients, metrics, weights), (want_gradients, want_metrics, want) = out
    return {
        "rounded": sum(not torch.equal(a, b) for a, b in zip(own, replaced, strict=True)),
        "gradients": sum(not torch.equal(a, b) for a, b in zip(gradients, want_gradients, strict=True)),
        "weights": sum(not torch.equal(a, b) for a, b in zip(weights, want, strict=True)),
        "unmoved": sum(torch.equal(a, b) for a, b in zip(weights, own, strict=True)),
        "metrics": [metrics, want_metrics],
    }


def _after_a_step(t: Any, before_the_update: Callable[[], None]) -> tuple[list[Tensor], dict[str, float], list[Tensor]]:
    import megatron_bridge.trainer as module

    gradients: list[Tensor] = []
    stock = module.apply_gradients

    def apply(*args: Any, **kwargs: Any) -> float:
        gradients.extend(p.main_grad.clone() for m in t.models for p in m.parameters() if p.requires_grad)
        before_the_update()
        return stock(*args, **kwargs)

    module.apply_gradients = apply
    try:
        metrics = _step(t, 0)
    finally:
        module.apply_gradients = stock
    return gradients, metrics, [p.detach().clone() for m in t.models for p in m.parameters()]


def _copies(where: Path, rank: int, world: int, port: int) -> Found:
    """A reference is rounded as it was when it was the policy, teachers are not; the policy is itself again after
    them."""
    cfg = _config(where, "mla", FORMATS["int4"], reference=True, **BF16)
    with toy.trainer(cfg, rank, world, port) as t:
        t.save(where / "reference")
        t.load_weights(where / "reference")
        row, _ = _row(t, 9)
        first = t.logprobs(row)
        for step in range(STEPS):
            _step(t, step)
        own, kept, again = t.logprobs(row), t.logprobs(row, "reference"), t.logprobs(row)
        law = _compared(t)
        t.save(where / "resumed", asynchronous=True)
        _step(t, STEPS)
        t.finish_save(wait=True)
        further = t.logprobs(row)
        t.load(where / "resumed")
        resumed, law_again = t.logprobs(row), _compared(t)
        before = [p.detach().clone() for p in t.models[0].parameters()]
        for teacher in ("reference", "resumed"):
            t.load_copy(f"teacher, {teacher}", where / teacher)
        names = ("teacher, reference", "teacher, resumed", "teacher, reference", "reference")
        taught = [t.logprobs(row, name) for name in names]
        law_again["untouched"] = _same(before, list(t.models[0].parameters())) and _same(resumed, t.logprobs(row))
    with toy.trainer(_config(where, "mla", **BF16), rank, world, free_port()) as t:
        t.load_weights(where / "reference")
        plain = t.logprobs(row)
        t.load_weights(where / "resumed")
        trained = t.logprobs(row)
    return law | {
        "kept": _same(first, kept),
        "again": _same(own, again),
        "left": _same(own, first) or _same(first, plain),
        "taught": all(map(_same, taught, [plain, trained, plain, first])) and not _same(plain, trained),
        "untouched": law_again.pop("untouched"),
        "resumed": _same(own, resumed) and not _same(further, resumed) and law_again == law,
    }


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class _Inputs:
    """Rounds what enters linears, by the formula: e4m3 by 128 columns, gradient of the identity."""

    def __init__(self, t: Any) -> None:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        from megatron_bridge.model.local_modules import DuplicatedLinear

        kinds = (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear)
        for model in t.models:
            for name, module in model.named_modules():
                if isinstance(module, kinds) and name != "output_layer":
                    module.register_forward_pre_hook(self)

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        groups = x.detach().to(torch.bfloat16).float().unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        value = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16).to(x.dtype)
        return value.flatten(-2) + (x - x.detach()), *rest


def _inputs(where: Path, rank: int, world: int, port: int, layout: dict[str, Any]) -> list[dict[str, float]]:
    cfg = _config(where, "wide", FORMATS["fp8"] | {"activations": "fp8"}, **layout)
    with toy.trainer(cfg, rank, world, port) as t:
        if not layout:
            t.save(where / "wide start")
        t.load_weights(where / "wide start")
        return [_step(t, step) for step in range(STEPS)]


def _inputs_by_hand(where: Path, rank: int, world: int, port: int, *, activations: bool) -> dict[str, float]:
    with toy.trainer(_config(where, "wide", FORMATS["fp8"]), rank, world, port) as t:
        t.load_weights(where / "wide start")
        if activations:
            _Inputs(t)
        return _step(t, 0)


def _mutated(where: Path, rank: int, world: int, ports: Sequence[int]) -> Found:
    """The law under rules that are wrong: a cache that is not renewed, and a scale of NVFP4 from a rank's own rows."""
    import megatron_bridge.step.fake_quant as module

    case: Case = ("mla", BF16 | {"dp": 2, "etp": 2}, ())
    out = {}
    stock = module.FakeQuant.weights_changed, module._shared_amax
    module.FakeQuant.weights_changed = lambda self: None  # type: ignore[method-assign]
    out["stale"] = _law(where, rank, world, case, "fp8", ports[0])["differing"]
    module.FakeQuant.weights_changed = stock[0]  # type: ignore[method-assign]
    module._shared_amax = lambda weights, codec: None  # type: ignore[assignment]
    out["own amax"] = _law(where, rank, world, case, "nvfp4", ports[1])["differing"]
    module._shared_amax = stock[1]
    return out


def _not_finite(where: Path, rank: int, world: int, port: int) -> str:
    """On rank 0 alone; every rank raises."""
    with toy.trainer(_config(where, "mla", FORMATS["int4"], pp=world), rank, world, port) as t:
        if rank == world - 1:
            with torch.no_grad():
                named = dict(t.models[0].named_parameters())
                next(x for n, x in named.items() if n.endswith("local_experts.3.linear_fc2.weight"))[2, 5] = torch.nan
            t.weights_changed()
        try:
            _step(t, 0)
        except ValueError as e:
            return str(e)
        return "no error"


@contextmanager
def _quick_to_close() -> Iterator[None]:
    """A trainer that closes collects garbage: not among all that was imported, dozens of times."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_SINGLES = {f"{name}: {format}": (case, format) for name, case in ONE.items() for format in case[2]}
_PAIRS = {f"{name}: {format}": (case, format) for name, case in TWO.items() for format in case[2]}
_PORTS = 3  # the most that a case takes
_QUICK_PAIRS = [*(name for name in _PAIRS if name in QUICK), "inputs, TP2", "mutated", "not finite"]
_LONG_PAIRS = [*(name for name in _PAIRS if name not in QUICK), "oracle TP2"]
_LONG_SINGLES = [*(name for name in _SINGLES if name not in QUICK), "oracle float32"]


@_quick_to_close()
def _long_of_one(rank: int, world: int, port: int, where: Path) -> Found:
    return {name: _of_one(rank, world, where, name) for name in _LONG_SINGLES}


def _of_one(rank: int, world: int, where: Path, name: str) -> Any:
    if name in _SINGLES:
        return _law(where, rank, world, *_SINGLES[name], free_port())
    dtype = name.removeprefix("oracle ")
    return _oracle(where, rank, world, [free_port() for _ in range(_PORTS)], f"{dtype} 1", dtype=dtype)


@_quick_to_close()
def _one_rank(rank: int, world: int, port: int, where: Path) -> Found:
    """The cases that are not long."""
    quick = [*(name for name in _SINGLES if name in QUICK), "oracle bfloat16"]
    out: Found = {name: _of_one(rank, world, where, name) for name in quick}
    out["copies"] = _copies(where, rank, world, free_port())
    out["inputs"] = _inputs(where, rank, world, free_port(), {})
    out["inputs by hand"] = [_inputs_by_hand(where, rank, world, free_port(), activations=on) for on in (True, False)]
    return out


@_quick_to_close()
def _two_ranks(rank: int, world: int, port: int, where: Path, ports: dict[str, list[int]]) -> Found:
    """The cases that `ports` has ports for."""

    def of(name: str, ports: list[int]) -> Any:
        match name:
            case "oracle TP2":
                return _oracle(where, rank, world, ports, "TP2", tp=2, etp=2, **BF16)
            case "inputs, TP2":
                return _inputs(where, rank, world, ports[0], {"tp": 2, "etp": 2})
            case "mutated":
                return _mutated(where, rank, world, ports)
            case "not finite":
                return _not_finite(where, rank, world, ports[0])
        return _law(where, rank, world, *_PAIRS[name], ports[0])

    return {name: of(name, own) for name, own in ports.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The long cases run when the first of them is asked for."""
    where = tmp_path_factory.mktemp("qat")
    for name, model in MODELS.items():
        toy.hf_dir(where / name, model)
    one = run_ranks(_one_rank, 1, where, timeout_s=500, keep=True)

    @functools.cache
    def long_of_one() -> list[Found]:
        return run_ranks(_long_of_one, 1, where, timeout_s=500, keep=True)

    def of(name: str) -> list[Found]:
        if name in one[0]:
            return one
        return long_of_one() if name in _LONG_SINGLES else two(long=name in _LONG_PAIRS)

    @functools.cache
    def two(*, long: bool) -> list[Found]:
        ports = {name: [free_port() for _ in range(_PORTS)] for name in (_LONG_PAIRS if long else _QUICK_PAIRS)}
        return run_ranks(_two_ranks, 2, where, ports, timeout_s=500, keep=True)

    return lambda name: [rank[name] for rank in of(name)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[LONG] * (name not in QUICK)) for name in (*_SINGLES, *_PAIRS)]
)
def test_what_is_trained_is_what_is_served(name: str, found: Reports) -> None:
    """No element differs after optimizer steps; every covered tensor is rounded, and no other one."""
    reports = found(name)
    assert len(reports) == (1 if name in _SINGLES else 2)
    for r in reports:
        assert r["differing"] == 0, r["where"]
        assert r["trained"] == r["served"] == reports[0]["served"]
        assert r["not rounded"] == r["changed"] == [] and r["covered"] and r["trained"] != r["before"]


@pytest.mark.parametrize(
    "name", ["oracle bfloat16", *(pytest.param(f"oracle {other}", marks=LONG) for other in ("float32", "TP2"))]
)
def test_a_step_is_that_of_weights_replaced_by_hand(name: str, found: Reports) -> None:
    """The gradient of every parameter is that of the rounded weights, bit for bit, and so are the weights after the
    update, which is of the weights that were not rounded."""
    for r in found(name):
        assert r["rounded"] > 20 and r["unmoved"] == 0
        assert (r["gradients"], r["weights"]) == (0, 0)
        got, want = r["metrics"]
        assert got == want


def test_a_reference_is_rounded_like_the_policy_and_a_teacher_is_not(found: Reports) -> None:
    """Two teachers, asked in turn, are the models that were loaded; the policy keeps its bits, weights and rounded."""
    (r,) = found("copies")
    assert r["kept"] and r["again"] and not r["left"] and r["differing"] == 0
    assert r["taught"] and r["untouched"]


def test_a_checkpoint_brings_back_what_was_computed_with(found: Reports) -> None:
    """Saved while training continues, read after one further step: rounding again gives the same values."""
    assert found("copies")[0]["resumed"]


def test_inputs_are_rounded_for_every_covered_linear(found: Reports) -> None:
    """As by the formula in hooks; more than the rounding of weights alone, and the same over tensor-parallel ranks
    but for codes that the last bit of a sum moves."""
    (got,), ((want, without),) = found("inputs"), found("inputs by hand")
    for key in ("train/loss", "train/grad_norm"):
        assert got[0][key] == pytest.approx(want[key], rel=1e-6)
        assert abs(without[key] - want[key]) > 2e-3 * abs(want[key])
        for metrics in found("inputs, TP2"):
            assert metrics[0][key] == pytest.approx(got[0][key], rel=5e-4)


def test_the_law_sees_rules_that_are_wrong(found: Reports) -> None:
    for differing in found("mutated"):
        assert all(count > 0 for count in differing.values()), differing


def test_a_weight_that_is_not_finite_is_named_on_every_rank(found: Reports) -> None:
    for error in found("not finite"):
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in error
