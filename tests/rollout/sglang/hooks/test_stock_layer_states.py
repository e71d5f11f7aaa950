"""The files into which hooks of a stock server write the states of its layers: written when they are asked for, read as
one text's, refused where they are not. That stock SGLang calls the hooks so: tests/sglang_cpu.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.sglang.layer_states import HOOKS, StockStates, forward_hooks
from tests.support.refusals import refuses


@pytest.fixture
def norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.nn.Module]:
    """The norms of a model of two layers, as SGLang names them, with the hooks of `forward_hooks`."""
    monkeypatch.setattr(sys, "path", [str(HOOKS), *sys.path])
    import miles_like_layer_states  # type: ignore[import-not-found]

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            return x * 2 if residual is None else (x * 2, x + residual)

    found: dict[str, torch.nn.Module] = {}
    for of in json.loads(forward_hooks(tmp_path, 2)):
        (name,) = of["target_modules"]
        found[name] = Norm()
        assert of["hook_factory"] == "miles_like_layer_states:hook"
        found[name].register_forward_hook(miles_like_layer_states.hook(of["config"]))
    return found


def fed(norms: dict[str, torch.nn.Module], tokens: int) -> list[torch.Tensor]:
    """The streams of a pass in which each part adds 1."""
    stream = torch.arange(tokens * 3).reshape(tokens, 3).bfloat16()
    seen, part = [stream], torch.ones_like(stream)
    first, *rest = norms.values()
    first(stream)
    for norm in rest:
        _, stream = norm(part, stream)
        seen.append(stream)
    return seen


def info(directory: Path) -> dict[str, Any]:
    return {"forward_hooks": json.loads(forward_hooks(directory, 2))}


def test_the_streams_of_one_text_are_written_and_read(norms: dict[str, torch.nn.Module], tmp_path: Path) -> None:
    assert next(iter(norms)) == "model.layers.0.input_layernorm" and list(norms)[-1] == "model.norm"
    fed(norms, 7)
    assert list(tmp_path.iterdir()) == [], "they were not asked for"
    states = StockStates.of("http://h:1", info(tmp_path))
    with states.written():
        first, second = fed(norms, 4), fed(norms, 3)  # a chunked prefill
    got = states.read(7)
    want = torch.stack([torch.cat(pair) for pair in zip(first, second, strict=True)], 1)
    assert got.dtype == torch.float32 and torch.equal(got, want.float())
    assert list(tmp_path.iterdir()) == []
    fed(norms, 7)
    assert list(tmp_path.iterdir()) == []


def test_states_of_other_tokens_or_of_none_are_refused(norms: dict[str, torch.nn.Module], tmp_path: Path) -> None:
    states = StockStates.of("http://h:1", info(tmp_path))
    with states.written():
        fed(norms, 4)
        fed(norms, 4)
    with refuses(ValueError, "http://h:1", 8, 4):
        states.read(4)
    with states.written():
        pass
    with refuses(ValueError, "http://h:1", 0, 4, "CUDA graph"):
        states.read(4)
    with states.written():
        fed(norms, 4)
    next(tmp_path.glob("*.2.safetensors")).write_bytes(b"x")
    with refuses(ValueError, "state 2", tmp_path, unrecorded="it has the library's words"):
        states.read(4)


def test_a_server_without_the_hooks_or_on_another_disk_is_refused(tmp_path: Path) -> None:
    for without in ({}, {"forward_hooks": None}, {"forward_hooks": [{"hook_factory": "other:hook"}]}):
        with refuses(ValueError, "http://h:1", "--forward-hooks", "--layers"):
            StockStates.of("http://h:1", without)
    with refuses(ValueError, "http://h:1", tmp_path / "no", "--run-dir", unrecorded="it names the directory"):
        StockStates.of("http://h:1", info(tmp_path / "no"))
