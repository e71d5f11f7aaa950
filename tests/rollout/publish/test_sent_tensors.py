"""Law: a tensor whose bytes the servers hold is not sent again, and the servers hold all bytes of each version all the
same.

Why it must hold: with adapters nearly all of a model is frozen; a tensor left out wrongly is one of an old version. Not
covered: which tensors a configuration freezes (tests/laws/test_frozen_weights.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from miles_like.types import NamedTensor
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.wire import endpoints
from rollout.wire.control import decode_safetensors
from tests.support.fakes import FakeServer
from tests.support.refusals import refuses

SPEC = QuantSpec(format=QuantFormat.FP8, block=(4, 4))
O_PROJ, NORM = "model.layers.{}.self_attn.o_proj.weight", "model.layers.{}.input_layernorm.weight"


def weights(**steps: int) -> list[NamedTensor]:
    """steps: last part of a name -> how often it was updated."""
    g = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens.weight", *(n.format(i) for i in range(3) for n in (O_PROJ, NORM))]
    return [
        NamedTensor(
            n, (torch.randn(6 if "norm" in n else (6, 8), generator=g) + steps.get(n.split(".")[-2], 0)).bfloat16()
        )
        for n in names
    ]


def publisher(*servers: FakeServer, **config: Any) -> TensorPublisher:
    target = PublishTarget(
        urls=tuple(s.url for s in servers), kind="embedded", spec=SPEC, config=PublishConfig(**config), timeout_s=5.0
    )
    return TensorPublisher(target, send=True)


def sent(server: FakeServer) -> set[str]:
    """Names in the requests since the last call."""
    bodies = [body for endpoint, body in server.calls if endpoint == endpoints.UPDATE_FROM_TENSOR]
    server.calls.clear()
    return {name for b in bodies for name, _ in decode_safetensors(b["serialized_named_tensors"][0])}


def holds(server: FakeServer, stream: list[NamedTensor]) -> bool:
    want = dict(quantize_stream(stream, SPEC))
    return server.weights.keys() == want.keys() and all(
        server.weights[n].view(torch.uint8).equal(t.contiguous().view(torch.uint8)) for n, t in want.items()
    )


@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("verify", [True, False])
def test_only_modules_that_changed_are_sent_again(bucket_bytes: int, verify: bool) -> None:
    with FakeServer() as a, FakeServer() as b:
        pub = publisher(a, b, bucket_bytes=bucket_bytes, verify=verify)
        everything = {n for n, _ in quantize_stream(weights(), SPEC)}
        whole = pub.publish(weights(), version=1).bytes
        assert sent(a) == sent(b) == everything
        for version, steps in enumerate(({"o_proj": 1}, {"o_proj": 2}, {"o_proj": 2, "input_layernorm": 1}), start=2):
            report = pub.publish(weights(**steps), version=version)
            names = sent(a)
            leaves = {"input_layernorm.weight"} if version == 4 else {"o_proj.weight", "o_proj.weight_scale_inv"}
            assert {n.split(".", 3)[-1].removeprefix("self_attn.") for n in names} == leaves, "codes with their scales"
            assert holds(a, weights(**steps)) and holds(b, weights(**steps))
            assert (a.version, b.version, a.paused) == (str(version), str(version), "")
            assert report.bytes == sum(a.weights[n].nbytes for n in names) < whole
            assert (len(report.checksums[0]) == len(everything)) if verify else not report.checksums


def test_a_publication_in_which_nothing_changed_has_the_version_alone() -> None:
    with FakeServer() as server:
        pub = publisher(server)
        pub.publish(weights(), version=1)
        report = pub.publish(weights(), version=2)
        assert (report.bytes, server.version, server.paused, server.in_session) == (0, "2", "", False)
        assert holds(server, weights())
        assert endpoints.FLUSH_CACHE in server.endpoints(), "samples of version 2 begin as after any publication"
        with refuses(ValueError):
            pub.publish([], version=3)


@pytest.mark.parametrize("change", ["started again", "another version", "a failure"])
def test_a_server_that_may_hold_something_else_gets_everything(change: str) -> None:
    with FakeServer() as a, FakeServer() as b:
        pub = publisher(a, b, timeout_s=1.0) if change == "" else publisher(a, b)
        pub.publish(weights(), version=1)
        if change == "started again":
            b.started_ts, b.weights = b.started_ts + 1, {}
        elif change == "another version":
            b.version, b.weights = "0", {}
        else:
            b.fault = {endpoints.UPDATE_FROM_TENSOR: "http_500"}
            with refuses(RuntimeError, b.url):
                pub.publish(weights(o_proj=1), version=2)
            b.fault, a.in_session, b.in_session, b.weights = {}, False, False, {}
        sent(a), sent(b)
        pub.publish(weights(o_proj=2), version=2)
        assert sent(a) == sent(b) == set(b.weights)
        assert holds(a, weights(o_proj=2)) and holds(b, weights(o_proj=2))
        pub.publish(weights(o_proj=3), version=3)
        assert len(sent(b)) == 6, "once"


def test_a_tensor_that_was_not_sent_is_compared_all_the_same() -> None:
    with FakeServer() as server:
        pub = publisher(server)
        pub.publish(weights(), version=1)
        server.weights[NORM.format(1)] = torch.zeros(6).bfloat16()
        with refuses(RuntimeError, server.url, NORM.format(1), 2):
            pub.publish(weights(o_proj=1), version=2)


def test_a_tensor_that_occurs_twice_is_refused_in_each_publication() -> None:
    with FakeServer() as server:
        pub = publisher(server)
        pub.publish(weights(), version=1)
        for again in (0, -1):
            with refuses((ValueError, RuntimeError), weights()[again].name):
                pub.publish([*weights(), weights()[again]], version=2)


def test_stock_servers_get_everything() -> None:
    """Their checksums are of fused tensors, so that what was left out could not be compared."""
    with FakeServer() as server:
        target = PublishTarget(urls=(server.url,), kind="sglang", spec=SPEC, config=PublishConfig(), timeout_s=5.0)
        pub = TensorPublisher(target, send=True)
        whole = pub.publish(weights(), version=1).bytes
        assert pub.publish(weights(), version=2).bytes == whole
