"""The residual stream in the reply to a scored prompt is that of transformers, whatever is fed beside it and in how
many pieces; only a server that was started for it gives it, of prompts that are scored whole.

Not covered: bfloat16; formats (the states are of the same forward pass as log-probs).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.types import SamplingParams
from rollout.embedded.engine import engine as engine_module
from rollout.embedded.engine.engine import Engine
from rollout.embedded.engine.requests import specs_of
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire.generate import GenerateRequest
from tests.support.embedded_fixtures import oracle, run, save, served, service, spec
from tests.support.refusals import refuses

TEXT = list(range(5, 45))


@pytest.fixture(scope="module")
def reference() -> Any:
    return oracle()


@pytest.fixture(scope="module")
def path(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("hf"))


@torch.no_grad()
def of_transformers(model: Any, ids: list[int]) -> torch.Tensor:
    """[S, L+1, D]: the embedding, and the stream after each layer, taken before the last norm."""
    seen: list[torch.Tensor] = []
    hooks = [model.model.embed_tokens.register_forward_hook(lambda m, i, out: seen.append(out[0]))]
    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(lambda m, i, out: seen.append(out[0] if out.dim() == 3 else out)))
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


def scored(ids: list[int], **more: Any) -> Any:
    return spec(ids, max_new_tokens=0, logprob_start=0, routing_start=0, states=True, **more)


def states_of(engine: Engine, *specs: Any) -> torch.Tensor:
    states = run(engine, *specs)[0][0].states
    assert states is not None
    return torch.from_numpy(states)


def test_the_states_are_those_of_transformers(reference: Any, path: Path) -> None:
    states = states_of(service(path, states=True).engine, scored(TEXT))
    layers = len(reference.model.layers)
    assert states.shape[:2] == (len(TEXT), 2 * layers + 1)
    torch.testing.assert_close(states[:, ::2], of_transformers(reference, TEXT), atol=1e-4, rtol=1e-4)
    assert not torch.equal(states[:, 1], states[:, 0]) and not torch.equal(states[:, 1], states[:, 2])


def test_they_do_not_depend_on_pieces_or_on_what_is_fed_beside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = states_of(service(path, states=True).engine, scored(TEXT))
    beside = states_of(service(path, states=True).engine, scored(TEXT), spec([9, 8, 7], n=2, max_new_tokens=5))
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=1e-4)
    warm = service(path, states=True).engine
    run(warm, spec(TEXT, max_new_tokens=2))
    torch.testing.assert_close(states_of(warm, scored(TEXT)), alone, atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(engine_module, "_PIECE", 16)
    torch.testing.assert_close(states_of(service(path, states=True).engine, scored(TEXT)), alone, atol=1e-5, rtol=1e-4)


def test_other_requests_are_refused(path: Path) -> None:
    with refuses(ValueError, "return_layer_states", "--enable-layer-states"):
        run(service(path).engine, scored(TEXT))
    whole = GenerateRequest(
        input_ids=(tuple(TEXT),),
        sampling=(SamplingParams(max_new_tokens=0),),
        return_logprob=True,
        logprob_start_len=0,
        return_layer_states=True,
    )
    assert GenerateRequest.from_json(whole.to_json()).return_layer_states and specs_of(whole)[0].states
    for change in ({"sampling": (SamplingParams(max_new_tokens=3),)}, {"logprob_start_len": 2}):
        with refuses(ValueError, "return_layer_states", "max_new_tokens", 0, "logprob_start_len", 0):
            specs_of(GenerateRequest(**{f: getattr(whole, f) for f in whole.__slots__} | change))
    with refuses(ValueError, "1,040", "1,024"):
        specs_of(
            GenerateRequest(**{f: getattr(whole, f) for f in whole.__slots__} | {"input_ids": (tuple(TEXT * 26),)})
        )


def test_the_client_gets_them_over_http(path: Path) -> None:
    text = torch.tensor(TEXT)

    async def asked(url: str, values: int = 10**6) -> Any:
        client = SGLangClient(url, routing=None)
        try:
            return await client.layer_states(text, values=values)
        finally:
            await client.close()

    opened = service(path, states=True)
    with served(opened) as url:
        states, routes = asyncio.run(asked(url))
        assert routes is None
        np.testing.assert_array_equal(states, states_of(service(path, states=True).engine, scored(TEXT)))
    with served(service(path)) as url, refuses(RolloutError, "--enable-layer-states", unrecorded="it names the port"):
        asyncio.run(asked(url))
