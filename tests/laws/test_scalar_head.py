"""A model that ends in one number a token is transformers' ...ForSequenceClassification, on its way in, out and back.

Others serve and train what we save (a reward model), and a critic starts from a language model's weights: a head that
is lost, stale or read as a vocabulary gives numbers that look like any others. That loss and gradients do not depend on
the layout is in test_parallel_invariance. Not covered: TransformerEngine's modules, values in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.types import LossInputs, LossOutput
from tests.support import layouts, toy
from tests.support.chosen import chosen, later
from tests.support.refusals import check_refusal, refuses
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import felt_tensors, write_checkpoint

Found = dict[str, Any]
MODELS = {"mla": layouts.MLA | {"tie_word_embeddings": True}, "gqa": layouts.MODELS["gqa"]}
NAMES = {"mla": "DeepseekV3ForSequenceClassification", "gqa": "Qwen3MoeForSequenceClassification"}
LAYOUTS: dict[str, dict[str, Any]] = {"TP2": {"tp": 2}, "PP2": {"pp": 2}}
HERE = "tests/laws/test_scalar_head.py"
OF_MODELS = later(MODELS, ["mla"], beside=HERE)


class Squares(toy.PolicyGradient):
    """A critic's: squared distance to a goal, which is `advantages` here."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        assert not inputs.entropy.any()
        return (inputs.logprobs - inputs.advantages).square(), {}


def _config(hf: Path, **more: Any) -> Any:
    return toy.config(str(hf), mode="off", head="scalar", lr=1e-2, **more)


def _row(model: str, seed: int) -> Any:
    layers = (1, 2, 3)
    (row,), tokens = toy.grid(toy.samples(6, seed=seed, layers=layers, experts=layouts.EXPERTS), dp=1, micros=2)
    return row, tokens


def _values(t: Any, model: str) -> list[Tensor]:
    return t.logprobs(_row(model, 9)[0])  # type: ignore[no-any-return]


def _theirs(directory: Path, model: str, eps: float) -> list[Tensor]:
    """[T] of each micro-batch, by transformers' own class; its pooled answer is that of the last token."""
    from transformers import AutoModelForSequenceClassification

    theirs = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    assert type(theirs).__name__ == NAMES[model] and theirs.config.num_labels == 1
    for name, module in theirs.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = eps
    out = []
    for m in _row(model, 9)[0]:
        ends, parts = m.cu_seqlens.tolist(), []
        for a, b in pairwise(ends):
            ids = m.tokens[None, a:b]
            with torch.no_grad():
                parts.append(theirs.score(theirs.model(ids).last_hidden_state)[0, :, 0])
                torch.testing.assert_close(theirs(ids).logits[0], parts[-1][-1:])
        out.append(torch.where(m.loss_mask, torch.cat(parts), 0.0))
    return out


def _life(rank: int, world: int, port: int, where: Path, model: str) -> Found:
    """From a language model: a new head, steps, saved, out to transformers, and back from there."""
    from megatron_bridge.convert.to_hf import to_hf
    from megatron_bridge.convert.to_megatron import to_megatron

    hf, out = where / "hf", {}
    write_checkpoint(hf, MODELS[model], felt_tensors(MODELS[model]))
    to_megatron(hf, where / "lm")
    with toy.trainer(_config(hf), rank, world, free_port(), Squares()) as t:
        toy.scramble(t)
        t.load_weights(where / "lm")
        out["new"] = [float(x.abs().max()) for x in _values(t, model)]
        out["losses"] = [t.step(*_row(model, 0), i + 1).metrics["train/loss"] for i in range(6)]
        t.save(where / "saved")
        values = _values(t, model)
        out["next"] = [dict(t.step(*_row(model, i), 9).metrics) for i in (1, 2)]
        row, tokens = _row(model, 0)
        row[0] = layouts.with_candidates(0, (1, 2, 3), 1, 4)[0][0][0]
        out["refused"] = _refused(lambda: t.step(row, tokens, 9))
    to_hf(where / "saved", where / "classifier", hf_config=hf)
    out["config"] = json.loads((where / "classifier" / "config.json").read_text())
    theirs = _theirs(where / "classifier", model, MODELS[model]["rms_norm_eps"])
    out["gaps"] = [float((a - b).abs().max()) for a, b in zip(theirs, values, strict=True)]
    out["sizes"] = [float(x.abs().max()) for x in values]
    to_megatron(where / "classifier", where / "back")
    for name in (hf, where / "classifier"):  # marked as a classifier by the key alone, and by config.json too
        with toy.trainer(_config(name), rank, world, free_port(), Squares()) as t:
            t.load_weights(where / "back")
            again = _values(t, model)
            out[f"back, {name.name}"] = all(torch.equal(a, b) for a, b in zip(again, values, strict=True))
            exported = dict(t.export())
            out["exported"] = sorted(n for n in exported if not n.startswith("model.layers."))
    out["as a language model"] = _refused(lambda: _enter(toy.config(str(where / "classifier"))))
    return out


def _enter(config: Any) -> None:
    with toy.trainer(config, 0, 1, free_port()):
        pass


def _refused(act: Any) -> str:
    try:
        act()
    except ValueError as e:
        return str(e)
    return "no error"


def _alone(rank: int, world: int, port: int, where: Path, models: Sequence[str]) -> Found:
    return {model: _life(rank, world, port, where / model, model) for model in models}


def _pair(rank: int, world: int, port: int, where: Path, ports: dict[str, int]) -> Found:
    """The steps after the save, in other layouts."""
    out = {}
    for name, layout in ((name, LAYOUTS[name]) for name in ports):
        with toy.trainer(_config(where / "mla" / "hf", **layout), rank, world, ports[name], Squares()) as t:
            t.load(where / "mla" / "saved")
            out[name] = [dict(t.step(*_row("mla", i), 9).metrics) for i in (1, 2)]
    return out


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    where = tmp_path_factory.mktemp("scalar")
    models = dict.fromkeys(("mla", *chosen(request, "model", MODELS)))  # the first is resumed, and refuses
    out: Found = run_ranks(_alone, 1, where, list(models), keep=True)[0]
    ports = {name: free_port() for name in chosen(request, "name", LAYOUTS)}
    return out | {"pair": run_ranks(_pair, 2, where, ports, keep=True)[0] if ports else {}}


@pytest.mark.parametrize("model", OF_MODELS)
def test_its_values_are_those_of_transformers(found: Found, model: str) -> None:
    """In fp32, of every token under loss after six steps, from the directory that `convert to-hf` makes of what the
    trainer saved: its config.json is the language model's with another architecture. Tied embeddings have no head to
    lose."""
    got = found[model]
    assert max(got["gaps"]) < 2e-5 and min(got["sizes"]) > 0.1, (got["gaps"], got["sizes"])
    assert got["config"]["architectures"] == [NAMES[model]] and got["config"]["num_labels"] == 1
    assert got["exported"] == ["model.embed_tokens.weight", "model.norm.weight", "score.weight"]


@pytest.mark.parametrize("model", OF_MODELS)
def test_a_language_model_gets_a_new_head_and_learns(found: Found, model: str) -> None:
    """Every value is 0 at first, also where the head held something before; squares then shrink."""
    assert found[model]["new"] == [0.0, 0.0]
    losses = found[model]["losses"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("model", OF_MODELS)
def test_a_round_trip_keeps_every_bit(found: Found, model: str) -> None:
    """Saved, written for transformers, converted back and loaded: the same values, bit for bit."""
    assert found[model]["back, hf"] and found[model]["back, classifier"]


@pytest.mark.parametrize("name", later(LAYOUTS, ["TP2"], beside=HERE))
def test_it_is_resumed_in_other_layouts(found: Found, name: str) -> None:
    """Head, optimizer state and all: the next two steps are the uninterrupted ones to fp32 rounding."""
    for want, got in zip(found["mla"]["next"], found["pair"][name], strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert got[key] == pytest.approx(want[key], rel=1e-4), key


def test_what_a_scalar_head_cannot_do_is_refused(found: Found) -> None:
    check_refusal(found["mla"]["refused"])
    check_refusal(found["mla"]["as a language model"], "head", "scalar")
    for more, word in (({"mtp_coefficient": 0.1}, "mtp_coefficient"), ({"lora": {"rank": 2}}, "lora.rank")):
        with refuses(ValueError, word):
            toy.config("", head="scalar", **more)
