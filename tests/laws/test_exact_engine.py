"""Law: with exact operations the engine gives a sample the same tokens and log-probabilities in any company.

In which batch a sample is decoded, in how many pieces its prompt is fed, whether it was interrupted and prefilled
again, whether tokens were decoded or scored, what the cache's pages are, in what form weights are kept and how many
threads there are: none of these changes a bit. Not covered: other processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine import engine as engine_module
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.engine.requests import PromptSpec
from rollout.embedded.model.exact_ops import ExactOps
from rollout.embedded.server.service import Service
from rollout.wire.control import PauseMode
from tests.support.chosen import checked
from tests.support.exactly import MODELS, generate, prompt_specs
from tests.support.tiny_models import random_tensors, write_checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Sampled = list[tuple[list[int], list[float]]]  # of each sample


@pytest.fixture(scope="module", params=["mla", "gqa"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = MODELS[request.param]
    tensors = {n: t * 3 if t.dim() > 1 else t + 1 for n, t in random_tensors(hf).items()}
    how = QuantSpec.of(QuantFormat.FP8, block=(16, 16))
    stored = dict(quantize_stream(tensors.items(), how))
    return write_checkpoint(tmp_path_factory.mktemp("exact"), quantized_config(hf, how, list(tensors)), stored)


def _engine(path: Path, dtype: str, *, weights: Any = "decoded", parts: int = 1, **limits: int) -> Engine:
    wanted = EngineLimits(**({"max_total_tokens": 4096, "context_length": 256} | limits))
    return Service(path, wanted, dtype=DTYPES[dtype], weights=weights, ops=ExactOps(parts)).engine


def _sampled(engine: Engine, specs: list[PromptSpec]) -> Sampled:
    done = generate(engine, specs)
    return [(c.reply.output_ids.tolist(), list(c.reply.logprobs)) for group in done for c in group]  # type: ignore[arg-type]


def _together(path: Path, dtype: str, **how: Any) -> Sampled:
    return _sampled(_engine(path, dtype, **how), prompt_specs(0))


def _one_by_one(path: Path, dtype: str) -> Sampled:
    engine = _engine(path, dtype)
    return [
        sampled
        for spec in prompt_specs(0)
        for i in range(spec.n)
        for sampled in _sampled(engine, [replace(spec, n=1, first_index=i)])
    ]


@contextmanager
def _pieces(tokens: int) -> Iterator[None]:
    stock = engine_module._PIECE
    engine_module._PIECE = tokens
    try:
        yield
    finally:
        engine_module._PIECE = stock


def _in_pieces(path: Path, dtype: str) -> Sampled:
    with _pieces(7):
        return _together(path, dtype)


def _interrupted(path: Path, dtype: str) -> Sampled:
    """The tokens decoded before the interruption are a part of the prompt of the second prefill."""
    engine, out = _engine(path, dtype), []
    groups: list[Any] = [[] for _ in prompt_specs(0)]
    for spec, into in zip(prompt_specs(0), groups, strict=True):
        engine.submit(spec, into.extend)
    for _ in range(5):
        engine.step()
    engine.pause(PauseMode.RETRACT)
    engine.resume()
    while engine.step():
        pass
    for group in groups:
        out += [(c.reply.output_ids.tolist(), list(c.reply.logprobs)) for c in group]
    return out


def _with_threads(threads: int, path: Path, dtype: str) -> Sampled:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _together(path, dtype)
    finally:
        torch.set_num_threads(before)


WAYS: dict[str, Callable[[Path, str], Sampled]] = {
    "one by one": _one_by_one,
    "four at a time": lambda path, dtype: _together(path, dtype, max_running=4),
    "prompts in pieces of 7": _in_pieces,
    "few prompts at once": lambda path, dtype: _together(path, dtype, prefill_tokens=40),
    "pages of 4": lambda path, dtype: _together(path, dtype, page=4),
    "codes alone": lambda path, dtype: _together(path, dtype, weights="codes"),
    "interrupted": _interrupted,
    "two threads": partial(_with_threads, 2),
    "four threads": partial(_with_threads, 4),
}


@pytest.fixture(scope="module")
def together(checkpoint: Path) -> dict[str, Sampled]:
    return {dtype: _together(checkpoint, dtype) for dtype in DTYPES}


@pytest.mark.parametrize("dtype", checked(DTYPES, ("bfloat16",)))
@pytest.mark.parametrize("way", WAYS)
def test_a_sample_is_the_same_in_any_company(
    way: str, dtype: str, checkpoint: Path, together: dict[str, Sampled]
) -> None:
    assert WAYS[way](checkpoint, dtype) == together[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_scored_as_they_were_decoded(dtype: str, checkpoint: Path, together: dict[str, Sampled]) -> None:
    engine, scores = _engine(checkpoint, dtype), []
    prompts = [s for s in prompt_specs(0) for _ in range(s.n)]
    for spec, (ids, _) in zip(prompts, together[dtype], strict=True):
        whole = (*spec.token_ids, *ids)
        asked = replace(spec, token_ids=whole, n=1, sampling=replace(spec.sampling, max_new_tokens=0), logprob_start=0)
        [[done]] = generate(engine, [asked])
        scores.append(list(done.prompt_logprobs[-len(ids) :]))
    assert scores == [logprobs for _, logprobs in together[dtype]]


def test_the_law_is_not_blind(checkpoint: Path, together: dict[str, Sampled]) -> None:
    """Sums in two parts are other sums."""
    other = _together(checkpoint, "float32", parts=2)
    pairs = zip(other, together["float32"], strict=True)
    assert sum(a != b for (_, one), (_, two) in pairs for a, b in zip(one, two, strict=True)) > 60
