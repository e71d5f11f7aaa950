"""A boundary between two requests must not fall between tensors that an engine loads together: it would serve old
values of both and answer with success. Requests of one byte put a boundary wherever one may be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_bridge.families.registry import family_of
from miles_like.types import NamedTensor
from quant.spec import CONVENTIONS, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.buckets import cut, gathered
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from tests.support.fakes import FakeServer
from tests.support.refusals import refuses
from tests.support.tiny_models import CONFIGS, KIMI, random_tensors, tiny, tiny_glm

MODELS = (
    CONFIGS
    | KIMI
    | {
        "draft_layers": tiny(num_nextn_predict_layers=2),
        "biases_draft_layer": tiny(attention_bias=True, num_nextn_predict_layers=1),
        "glm_draft_layer": tiny_glm(num_nextn_predict_layers=1),
    }
)
SPECS = [None, *(QuantSpec.of(f, "all", convention=c) for f, names in CONVENTIONS.items() for c in names)]


HALVES = ("q_a_proj", "kv_a_proj_with_mqa")


def together(stored: str, halves: bool) -> str:
    """What an engine loads at once: codes with their scales; and of DeepSeek's models the two halves of
    fused_qkv_a_proj_with_mqa, which stock SGLang 0.5.23 joins within one load call (cached_a_proj of its loader)."""
    module, _, leaf = stored.rpartition(".")
    parent, _, last = module.rpartition(".")
    if halves and last in HALVES:
        return f"{parent}.fused_qkv_a_proj_with_mqa"
    return stored if leaf.endswith("bias") else module


@pytest.mark.parametrize("name", MODELS)
def test_no_boundary_parts_what_an_engine_fuses(name: str) -> None:
    """Every family and option, with requests of one byte in every format, and for each another order of the trainer's
    tensors; larger requests in BF16 and in a third of the formats."""
    hf = MODELS[name]
    tensors = family_of(hf).bind(hf, mtp=True)
    fused, order = tensors.fused(), random.Random(0)
    whole = list(random_tensors(hf, mtp=True).items())
    halves = any(".q_a_proj." in n for n, _ in whole)
    for k, spec in enumerate(SPECS):
        order.shuffle(whole)
        weights = [NamedTensor(n, t) for n, t in whole]
        wanted = dict(quantize_stream(weights, spec))
        stream = list(quantize_stream(gathered(weights, fused), spec))
        held = dict(stream)
        assert held.keys() == wanted.keys() and all(torch.equal(held[n], t) for n, t in wanted.items())
        larger = spec is None or (k + list(MODELS).index(name)) % 3 == 0
        for size in (1, 1 << 14, 1 << 30) if larger else (1,):
            parts = list(cut(stream, size, fused))
            requests: dict[str, set[int]] = {}
            for number, part in enumerate(parts):
                for stored, _ in part:
                    requests.setdefault(together(stored, halves), set()).add(number)
            apart = [what for what, numbers in requests.items() if len(numbers) > 1]
            assert not apart, (spec, size, apart)
            assert len(parts) == 1 if size == 1 << 30 else len(parts) > 10
            sent = {stored: tensor for part in parts for stored, tensor in part}
            assert sent.keys() == held.keys() and all(sent[n] is t for n, t in held.items())


def test_a_publisher_keeps_them_in_one_request() -> None:
    """What reaches the server, request by request."""
    hf = tiny()
    weights = [NamedTensor(n, t) for n, t in random_tensors(hf).items()]
    fused = family_of(hf).bind(hf).fused()
    assert [len(names) for names in fused] == [2] * hf["num_hidden_layers"]
    requests: list[list[str]] = []
    with FakeServer() as server:
        take = server._update_weights_from_tensor

        def noting(body: Any) -> Any:
            before = set(server.weights)
            out = take(body)
            requests.append(sorted(set(server.weights) - before))
            return out

        server._update_weights_from_tensor = noting  # type: ignore[method-assign]
        config = PublishConfig(bucket_bytes=1, verify=False)
        sender = TensorPublisher(
            PublishTarget(urls=(server.url,), kind="embedded", spec=None, config=config, fused=fused), send=True
        )
        sender.publish(weights, version=1)
        assert [names for names in requests if any(".q_a_proj." in n for n in names)] == [
            sorted(names) for names in fused
        ]
        assert sum(map(len, requests)) == len(weights)


def test_half_of_a_fused_parameter_is_not_published() -> None:
    """The server would keep the old values of both halves, so the missing one is named."""
    fused = [("a.q.weight", "a.kv.weight")]
    one = NamedTensor("a.q.weight", torch.zeros(2))
    with refuses(ValueError, "a.q.weight", "a.kv.weight"):
        list(gathered([one, NamedTensor("b.weight", torch.zeros(2))], fused))
    with refuses(ValueError, "a.q.weight"):
        list(cut(gathered([one, one, NamedTensor("a.kv.weight", torch.zeros(2))], fused), 1, fused))


def test_buckets_keep_a_modules_tensors_together() -> None:
    """Codes must not arrive without their scales; apart from that no bucket is larger than asked."""
    stream = [(f"m{i}.{leaf}", torch.zeros(10, dtype=torch.uint8)) for i in range(5) for leaf in ("weight", "scale")]
    for size in (25, 15):
        names = [[t.name for t in p] for p in cut(stream, size)]
        assert names == [[f"m{i}.weight", f"m{i}.scale"] for i in range(5)]
    assert [len(p) for p in cut(stream, 40)] == [4, 4, 2]
    assert [len(p) for p in cut(stream, 1000)] == [10]
    assert list(cut([], 10)) == []
