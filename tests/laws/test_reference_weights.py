"""Reference weights are the weights the run began with, or those of the moment when they last moved, whatever was
trained, resumed or laid out since.

They share one model with the weights being trained, so every law here is one of leaving no trace: exchange is a copy of
bits, forward passes accumulate nothing, and the log-probs the loss function receives do not depend on the layout. Not
covered: pinned memory on CUDA, more than two ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.dpo import DpoLoss
from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.batch.packer import Packer
from miles_like.types import REFERENCE, Aggregation, LossInputs, LossOutput, MicroBatch, SampleGroup
from tests.support import made_samples, toy
from tests.support.layouts import EXPERTS, ROUTED
from tests.support.refusals import check_refusal, refuses
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import tiny

Found = dict[str, Any]
By = Callable[[str], Any]  # what was found, by kind or by layout
STEPS = 3
KL = ClippedLoss(clip_low=0.2, clip_high=0.28, kl_coefficient=0.1)
NO_KL = replace(KL, kl_coefficient=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"router_bias_update_rate": 1e-2},
    "bfloat16": {"router_bias_update_rate": 1e-2, "dtype": "bfloat16"},
    "bfloat16 with adapters": {"dtype": "bfloat16", "lora": {"rank": 4, "targets": ["attention", "experts"]}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"dp": 2, "ep": 2},
    "PP2": {"pp": 2},
    "PP2, interleaved": {"pp": 2, "vpp": 2},
    "TP2": {"tp": 2},
    "CP2": {"cp": 2},
}
LONG = pytest.mark.long(beside="tests/laws/test_reference_weights.py")
OF_KINDS = [pytest.param(kind, marks=[LONG] * (kind != "bfloat16")) for kind in KINDS]
OF_LAYOUTS = [pytest.param(name, marks=[LONG] * (name != "PP2, interleaved")) for name in LAYOUTS]


class Listening(toy.PolicyGradient):
    """Notes the log-probabilities that a loss function is handed."""

    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.heard.append(inputs.logprobs.detach().clone())
        return super().__call__(inputs)


def _bits(t: Any) -> dict[str, Tensor]:
    """Weights, all buffers, fp32 masters and Adam's state."""
    out = {}
    for i, model in enumerate(t.models):
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            out[f"{i}.{name}"] = x.detach().clone()
    for i, group in enumerate(t.optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            out[f"master {i}.{j}"] = p.detach().clone()
    for i, part in enumerate(t.optimizer.chained_optimizers):
        for j, state in enumerate(part.optimizer.state.values()):
            out |= {f"adam {i}.{j}.{k}": v.clone() for k, v in state.items() if torch.is_tensor(v)}
    return out


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _row(t: Any, seed: int, dp: int = 1, *, routes: bool = True) -> tuple[list[MicroBatch], int]:
    parts = toy.samples(8, seed=seed, experts=EXPERTS)
    if not routes:
        parts = [replace(p, routing=None) for p in parts]
    rows, tokens = toy.grid(parts, dp=dp, micros=2 // dp)
    return rows[t.dp_rank], tokens


def _train(t: Any, first: int, last: int, **how: Any) -> list[dict[str, float]]:
    return [dict(t.step(*_row(t, step, **how), step + 1).metrics) for step in range(first, last)]


def _refused(act: Any, kind: type[Exception] = AssertionError) -> str:
    try:
        act()
    except kind as e:
        return str(e)
    return "no error"


def _one_model(rank: int, world: int, port: int, hf: str, where: Path, kind: str) -> Found:
    """A life of one trainer, looked at between its steps."""
    cfg = toy.config(hf, lr=1e-2, reference=True, **KINDS[kind])
    start, out = where / f"start-{kind}", {}
    with toy.trainer(cfg, 0, 1, port, KL) as t:
        import megatron_bridge.weights.copies as module

        at_once = module._EXCHANGE_ELEMENTS
        module._EXCHANGE_ELEMENTS = 1000  # more than one exchange a tensor, and a remainder
        toy.scramble(t)
        t.save(start)
        t.load_weights(start)
        row, _ = _row(t, 9)
        initial = t.logprobs(row)
        out["metrics"] = _train(t, 0, STEPS)
        before = _bits(t)
        out["reference is initial"] = _same(t.logprobs(row, "reference"), initial)
        out["moved"] = not _same(t.logprobs(row), initial)
        out["no trace"] = _same(before, _bits(t))
        out["own routing"] = _same(t.logprobs([replace(b, routing=None) for b in row], "reference"), initial)
        try:
            with t.copies.swapped("reference"):
                out["there"] = not _same(before, _bits(t))
                out["refused"] = [_refused(f) for f in (lambda: t.step(row, 1, 1), lambda: t.save(where), t.export)]
                raise KeyError("body")
        except KeyError:
            out["no trace after an error"] = _same(before, _bits(t))
        t.save(where / f"trained-{kind}")
        t.copies.load("teacher", where / f"trained-{kind}")
        now = t.logprobs(row)
        out["bytes"] = [sum(x.nbytes for x in kept) for kept in t.copies._copies.values()]
        out["model's bytes"] = sum(x.nbytes for x in t.models[0].state_dict().values() if torch.is_tensor(x))
        t.copies.load("teacher", start)
        out["teacher"] = _same(t.logprobs(row, "teacher"), initial) and _same(t.logprobs(row), now)
        try:
            t.copies.load("gone", where / "nowhere")
        except ValueError:
            out["no trace of loading"] = _same(before, _bits(t)) and "gone" not in t.copies
        module._EXCHANGE_ELEMENTS = at_once
        reference_logprobs = t.logprobs(row, "reference")
        with_streams = [replace(b, streams={REFERENCE: x}) for b, x in zip(row, reference_logprobs, strict=True)]
        n = sum(int(b.loss_mask.sum()) for b in row)
        asked = t.evaluate(row, n)
        t.copies.swapped = lambda name: 1 / 0  # no second reference pass
        out["given"] = (asked, t.evaluate(with_streams, n))
        t.config, t._step.loss = t.config.model_copy(update={"reference_for_loss": False}), NO_KL
        out["not given"] = sorted(t.evaluate(row, n))
    return out


def _alone(rank: int, world: int, port: int, hf: str, wide: str, where: Path) -> Found:
    from megatron_bridge.model import logprobs

    out: Found = {}
    start = where / "start-bfloat16"
    with toy.trainer(toy.config(hf, dtype="bfloat16", mode="off"), 0, 1, free_port(), Listening()) as t:
        t.load_weights(start)
        row, tokens = _row(t, 9)
        t.evaluate(row, tokens)
        out["as the loss hears them"] = _same(t.logprobs(row), t._step.loss.heard)
    slope, out["entropies asked"] = logprobs._slope, []
    logprobs._slope = lambda *a: [out["entropies asked"].append(a[3] is not None), slope(*a)][1]
    for name, reference in {"without": False, "with": True}.items():
        with toy.trainer(toy.config(hf, dtype="bfloat16", reference=reference), 0, 1, free_port(), NO_KL) as t:
            t.load_weights(start)
            out[name] = [{k: v for k, v in m.items() if k != "train/kl_ref"} for m in _train(t, 0, STEPS)]
            out[f"{name}, bits"] = {k: v.float().double().sum().item() for k, v in _bits(t).items()}
    logprobs._slope = slope
    cfg = toy.config(hf, dtype="bfloat16", lr=1e-2, reference=True)
    with toy.trainer(cfg, 0, 1, free_port(), KL) as t:
        t.load_weights(start)
        _train(t, 0, 1)
        t.save(where / "first")
        out["uninterrupted"] = _train(t, 1, STEPS)
    with toy.trainer(cfg, 0, 1, free_port(), KL) as t:
        t.load(where / "first")
        row, tokens = _row(t, 1)
        acts = (functools.partial(t.evaluate, row, tokens), functools.partial(t.step, row, tokens, 2))
        out["no reference"] = [_refused(act, ValueError) for act in acts]
        t.load_weights(start)
        t.load(where / "first")
        out["resumed"] = _train(t, 1, STEPS)
    with toy.trainer(toy.config(wide, mode="off", lr=1e-2, reference=True), 0, 1, port, KL) as t:
        toy.scramble(t)
        t.save(where / "wide")
    out["layouts"] = _layout(0, 1, free_port(), wide, where / "wide", {})
    return out | {"moving": _moving(wide, where)}


def _keys(path: Path) -> list[str]:
    from megatron.core import dist_checkpointing

    return [key for key in dist_checkpointing.load_tensors_metadata(str(path)) if key.startswith("reference.")]


def _moving(hf: str, where: Path) -> Found:
    """A reference that is renewed after every second rollout; saved after the third."""
    cfg = toy.config(hf, mode="off", lr=1e-2, reference=True, reference_every=2)
    found: Found = {"frozen keys": _keys(where / "first"), "same": []}
    with toy.trainer(cfg, 0, 1, free_port(), KL) as t:
        t.load_weights(where / "wide")
        row, _ = _row(t, 9, routes=False)
        policy_logprobs = [t.logprobs(row)]
        for step in range(3):
            _train(t, step, step + 1, routes=False)
            policy_logprobs.append(t.logprobs(row))
            of = t.logprobs(row, "reference")
            found["same"].append([i for i, then in enumerate(policy_logprobs) if _same(of, then)])
        t.save(where / "moving")
        found["keys"], found["parameters"] = len(_keys(where / "moving")), len(list(t.models[0].parameters()))
        found["reference"] = torch.cat(of).tolist()
        found["uninterrupted"] = _train(t, 3, 5, routes=False)
        found["bits"], found["bits of it"] = _bits(t), t.logprobs(row, "reference")
    with toy.trainer(cfg, 0, 1, free_port(), KL) as t:
        found["refused"] = _refused(lambda: t.load(where / "first"), ValueError)
        t.load(where / "moving")
        assert _same(t.logprobs(row, "reference"), of)
        found["resumed"] = _train(t, 3, 5, routes=False)
        found["same bits"] = _same(found.pop("bits"), _bits(t))
        found["same bits"] &= _same(found.pop("bits of it"), t.logprobs(row, "reference"))
    return found


def _layout(rank: int, world: int, port: int, hf: str, start: Path, layout: dict[str, Any]) -> Found:
    with toy.trainer(toy.config(hf, mode="off", lr=1e-2, reference=True, **layout), rank, world, port, KL) as t:
        t.load_weights(start)
        dp = layout.get("dp", 1)
        metrics = _train(t, 0, STEPS, dp=dp, routes=False)
        row, _ = _row(t, 9, dp, routes=False)
        of_labels = torch.cat(t.logprobs(row, "reference"))
        row = [replace(m, candidates=torch.stack([m.labels, m.labels * 0 + 5], 1)) for m in row]
        both = torch.cat(t.logprobs(row, "reference", candidates=True))
        assert torch.equal(both[:, 0], of_labels) and torch.equal(torch.cat(t.logprobs(row, "reference")), of_labels)
        out = {"row": t.dp_rank, "metrics": metrics, "logprobs": of_labels.tolist(), "of token 5": both[:, 1].tolist()}
        t._step.loss = DpoLoss(beta=0.5)
        few = {"max_tokens": 32, "micro_multiple": t.config.parallel.micro_multiple} if layout else {"max_tokens": 999}
        batch = Packer(dp_size=dp, aggregation=Aggregation.SEQUENCE_MEAN, **few).examples(_pairs())
        preferred = dict(t.step(batch.grid[t.dp_rank], batch.loss_tokens, STEPS + 1).metrics)
        return out | {"preferred": preferred}


def _pairs() -> list[SampleGroup]:
    """Seven pairs: four samples' worth of tokens a micro-batch, and one that is filled up."""
    g = torch.Generator().manual_seed(5)
    out = []
    for i in range(7):
        made = [made_samples.sample(f"pair {i}", k, prompt_len=3, response_len=2 + (3 * i + k) % 7) for k in (0, 1)]
        drawn = [replace(s, token_ids=torch.randint(2, toy.VOCAB, s.token_ids.shape, generator=g)) for s in made]
        out.append(made_samples.group(drawn))
    return out


def _moving_over_two(rank: int, world: int, port: int, hf: str, where: Path) -> list[float]:
    cfg = toy.config(hf, mode="off", reference=True, reference_every=2, tp=2)
    with toy.trainer(cfg, rank, world, port, KL) as t:
        t.load(where / "moving")
        return torch.cat(t.logprobs(_row(t, 9, routes=False)[0], "reference")).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def hf(where: Path) -> str:
    return toy.hf_dir(where / "hf", toy.hf_config() | ROUTED)


@pytest.fixture(scope="module")
def wide(where: Path) -> str:
    return toy.hf_dir(where / "hf4", tiny(num_hidden_layers=4, **ROUTED))


@pytest.fixture(scope="module")
def one_model(where: Path, hf: str) -> By:
    """By kind, each when it is first asked for."""
    return functools.cache(lambda kind: run_ranks(_one_model, 1, hf, where, kind, keep=True)[0])


@pytest.fixture(scope="module")
def found(where: Path, hf: str, wide: str, one_model: By) -> Found:
    one_model("bfloat16")  # it writes the start of the others
    return run_ranks(_alone, 1, hf, wide, where, keep=True)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pair(where: Path, wide: str, found: Found) -> By:
    """What two ranks found by layout, each when it is first asked for."""
    return functools.cache(lambda name: run_ranks(_layout, 2, wide, where / "wide", LAYOUTS[name], keep=True))


@pytest.mark.parametrize("kind", OF_KINDS)
def test_after_training_the_reference_is_still_the_initial_model(one_model: By, kind: str) -> None:
    """Bitwise: log-probs under the copy after three steps are those of the untouched model before the first. The
    routing bias moves too and is part of the weights; the routes are the reference's own, so records do not matter."""
    got = one_model(kind)
    assert got["reference is initial"] and got["own routing"]
    assert got["moved"], "three steps changed nothing: the comparison says nothing"


@pytest.mark.parametrize("kind", OF_KINDS)
def test_a_swap_leaves_no_trace(one_model: By, kind: str) -> None:
    """Weights, buffers (the routing bias' counters too), fp32 masters and Adam's moments, bit for bit: after a
    reference pass, after an error inside, after a copy was loaded from disk or could not be."""
    got = one_model(kind)
    assert got["there"], "inside, the model must hold other values"
    assert got["no trace"] and got["no trace after an error"] and got["no trace of loading"]


@pytest.mark.parametrize("kind", OF_KINDS)
def test_the_model_in_exchange_may_not_be_trained_saved_or_published(one_model: By, kind: str) -> None:
    """Its optimizer's masters are another model's: a step would mix the two."""
    assert len(one_model(kind)["refused"]) == 3
    for message in one_model(kind)["refused"]:
        check_refusal(message)


@pytest.mark.parametrize("kind", OF_KINDS)
def test_a_copy_from_disk_is_that_model_and_costs_one_model(one_model: By, kind: str) -> None:
    """Two names, two models' worth of bytes, also when one is loaded over."""
    assert one_model(kind)["teacher"]
    asked, given = one_model(kind)["given"]  # log-probs that the driver has computed come with the batch
    assert asked == given and asked["train/kl_ref"] > 0
    assert "train/kl_ref" not in one_model(kind)["not given"]  # a reference for others alone costs no pass
    assert one_model(kind)["bytes"] == [one_model(kind)["model's bytes"]] * 2


def test_log_probs_are_those_the_loss_function_gets(found: Found) -> None:
    """The same pass through the model: what `logprobs` returns is what a loss function is handed, bit for bit."""
    assert found["as the loss hears them"]


def test_a_reference_pass_changes_no_step(found: Found) -> None:
    """With coefficient 0, three steps and the weights after them are bitwise those without any reference."""
    assert found["with"] == found["without"] and found["with, bits"] == found["without, bits"]


def test_an_entropy_that_is_only_reported_is_not_differentiated(found: Found) -> None:
    """The clipped loss has it among its statistics alone: backward is never asked for its gradient, so it is not
    computed, though every loss function is handed one that has it."""
    assert found["entropies asked"] and not any(found["entropies asked"])


def test_a_resumed_run_keeps_its_first_reference(found: Found) -> None:
    """The copy is made where the initial weights are read, before the checkpoint's: bitwise the uninterrupted steps."""
    assert found["resumed"] == found["uninterrupted"]
    assert found["resumed"][0]["train/kl_ref"] > 0


def test_a_checkpoint_alone_gives_no_reference(found: Found) -> None:
    """It holds the weights that were trained; a step or an evaluation says what to call first, and changes nothing
    (the resumed steps above come after)."""
    assert len(found["no reference"]) == 2
    assert all("load_weights" in message for message in found["no reference"])


@pytest.mark.parametrize("name", OF_LAYOUTS)
def test_reference_log_probs_and_penalty_do_not_depend_on_the_layout(found: Found, pair: By, name: str) -> None:
    """Each rank keeps its own part; the last stage tells the others. Within 1e-5 of one rank, equal on ranks that share
    a row; a candidate that is the label has its log-probability, bit for bit. Routes are the model's own, whose
    near-ties these seeds do not have."""
    want, ranks = found["layouts"], pair(name)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    if ranks[0]["row"] == ranks[1]["row"]:
        assert ranks[0]["logprobs"] == ranks[1]["logprobs"]
        ranks = ranks[:1]
    for key in ("logprobs", "of token 5"):
        got = [x for rank in ranks for x in rank[key]]
        assert got == pytest.approx(want[key], abs=1e-5) and min(got) < -1
    for mine, one in zip(ranks[0]["metrics"], want["metrics"], strict=True):
        assert mine["train/kl_ref"] == pytest.approx(one["train/kl_ref"], rel=1e-3, abs=1e-6)
        assert mine["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4, abs=1e-5)
    # the first step's policy is the reference, and routes by itself as the reference does
    assert want["metrics"][0]["train/kl_ref"] == 0.0 and want["metrics"][-1]["train/kl_ref"] > 1e-4


@pytest.mark.parametrize("name", OF_LAYOUTS)
def test_preferences_do_not_depend_on_the_layout(found: Found, pair: By, name: str) -> None:
    """A DPO step on pairs, in one pack by one rank and in small ones over two: rewards are log-ratios to the reference
    of whole samples, and the mean is over pairs."""
    want, got = found["layouts"]["preferred"], pair(name)[0]["preferred"]
    keys = [k for k in want if k.startswith("preference/")] + ["train/loss", "train/grad_norm"]
    assert len(keys) == 8 and abs(want["preference/margin"]) > 1e-3
    assert {k: got[k] for k in keys} == pytest.approx({k: want[k] for k in keys}, rel=2e-3, abs=1e-4)
    assert pair(name)[1]["preferred"] == got


def test_a_reference_that_moves_is_the_weights_of_every_second_rollout(found: Found) -> None:
    """By the weight version after the step, bit for bit: of versions 0 to 3 it is 0 after the first, then 2."""
    assert found["moving"]["same"] == [[0], [2], [2]]


def test_a_reference_that_moves_is_saved_and_resumed(found: Found, where: Path, wide: str) -> None:
    """A checkpoint holds it, one tensor a parameter or so, and one of a frozen reference holds none. Resumed from it
    alone, the next two steps and all weights after them are bitwise the uninterrupted ones, though the second is
    measured from a reference that was renewed in between; and over two tensor-parallel ranks it is the same model. A
    checkpoint without it is refused."""
    got = found["moving"]
    assert found["moving"]["resumed"] == got["uninterrupted"] and got["same bits"]
    assert not got["frozen keys"] and got["keys"] > 20
    over_two = run_ranks(_moving_over_two, 2, wide, where, keep=True)
    assert over_two[0] == pytest.approx(got["reference"], abs=1e-5)
    check_refusal(got["refused"], "first")
    with refuses(ValueError, "reference_every", 2):
        toy.config("", reference_every=2)
