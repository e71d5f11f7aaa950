"""Weights into servers, against servers that keep SGLang's rules about sessions, pauses and flushes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.types import NamedTensor
from quant.hf_config import spec_from_hf
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.publish.transports import Inline
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from tests.support.fakes import FakeServer
from tests.support.refusals import refuses

SPEC = QuantSpec(format=QuantFormat.FP8, block=(4, 4))


def weights(seed: int = 0) -> list[NamedTensor]:
    g = torch.Generator().manual_seed(seed)
    names = ["model.embed_tokens.weight"]
    for i in range(4):
        names += [f"model.layers.{i}.self_attn.o_proj.weight", f"model.layers.{i}.input_layernorm.weight"]
    return [NamedTensor(n, torch.randn(6 if "norm" in n else (6, 8), generator=g).bfloat16()) for n in names]


def same(a: dict[str, torch.Tensor], b: list[tuple[str, torch.Tensor]]) -> bool:
    def raw(t: torch.Tensor) -> tuple[Any, ...]:
        return t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).tolist()

    return {n: raw(t) for n, t in a.items()} == {n: raw(t) for n, t in b}


def publisher(servers: list[FakeServer], **options: Any) -> TensorPublisher:
    config = PublishConfig(
        **{k: options.pop(k) for k in ("bucket_bytes", "hold_bytes", "verify", "pause_mode") if k in options}
    )
    send = options.pop("send", True)
    defaults: dict[str, Any] = {"kind": "embedded", "spec": SPEC, "timeout_s": 5.0}
    target = PublishTarget(urls=tuple(s.url for s in servers), config=config, **(defaults | options))
    return TensorPublisher(target, send=send)


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
@pytest.mark.parametrize("hold_bytes", [1, 1 << 20])
def test_every_server_holds_the_encoded_stream(kind: str, hold_bytes: int) -> None:
    """What the servers hold is, bit for bit, what the quantizer gives, whichever buckets and encoding carried it."""
    encoded = list(quantize_stream(weights(), SPEC))
    assert any(t.dtype is torch.float8_e4m3fn for _, t in encoded)
    with FakeServer() as a, FakeServer() as b:
        report = publisher([a, b], kind=kind, bucket_bytes=150, hold_bytes=hold_bytes).publish(weights(), version=4)
        assert same(a.weights, encoded) and same(b.weights, encoded)
        assert (a.version, b.version, a.paused, a.in_session) == ("4", "4", "", False)
        updates = [body for e, body in a.calls if e == endpoints.UPDATE_FROM_TENSOR]
    assert report.version == 4 and report.bytes == sum(t.nbytes for _, t in encoded)
    assert 0 < report.pause_seconds <= report.seconds
    assert len(updates) > 2
    assert {u["load_format"] for u in updates} == {"safetensors" if kind == "embedded" else None}
    assert [u["weight_version"] for u in updates] == [None] * (len(updates) - 1) + ["4"]  # not before it is whole


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_order_of_requests(mode: str) -> None:
    """SGLang refuses updates outside a session, and any flush while paused in place with running requests."""
    with FakeServer(busy=True) as server:
        publisher([server], pause_mode=mode).publish(weights(), version=1)
        flush = [] if mode == "in_place" else [endpoints.FLUSH_CACHE]
        assert server.endpoints() == [
            endpoints.MODEL_INFO,
            endpoints.PAUSE,
            endpoints.BEGIN_UPDATE,
            endpoints.UPDATE_FROM_TENSOR,
            endpoints.END_UPDATE,
            *flush,
            endpoints.CHECKSUM,
            endpoints.CONTINUE,
            endpoints.SERVER_INFO,  # what a server is that has these weights
        ]
        bodies = dict(server.calls)
    assert bodies[endpoints.PAUSE] == {"mode": mode}
    assert bodies[endpoints.UPDATE_FROM_TENSOR]["flush_cache"] is False
    assert bodies[endpoints.UPDATE_FROM_TENSOR]["weight_version"] == "1"


def test_the_report_has_the_share_of_servers_in_which_kernels_decode() -> None:
    """As their replies to the last request of a publication say; a server that failed before it has no part."""
    with FakeServer() as a, FakeServer() as b, FakeServer() as lost:
        assert publisher([a, b]).publish(weights(), version=1).decoding is None
        a.triton, b.triton, lost.triton = True, False, True
        lost.fault[endpoints.END_UPDATE] = "http_500"
        report = publisher([a, b, lost], goes_on=True).publish(weights(), version=2)
    assert report.decoding == 0.5 and [fault.url for fault in report.failed] == [lost.url]


def test_encoding_comes_before_the_pause() -> None:
    """Servers should not wait for the trainer's gathers; only what exceeds hold_bytes is made while they are paused."""
    with FakeServer() as server:
        calls: list[int] = []

        def stream() -> Iterator[NamedTensor]:
            for t in weights():
                calls.append(len(set(server.endpoints()) - {endpoints.MODEL_INFO}))
                yield t

        publisher([server]).publish(stream(), version=1)
        assert set(calls) == {0}
    with FakeServer() as server:
        calls.clear()
        publisher([server], spec=None, bucket_bytes=1, hold_bytes=1).publish(stream(), version=2)
        assert calls[0] == 0 and calls[-1] > 1


def test_ranks_that_do_not_send_only_drain() -> None:
    """The stream is collective: a rank that stopped early would leave the others hanging."""
    with FakeServer() as server:
        stream = iter(weights())
        report = publisher([server], send=False).publish(stream, version=1)
        assert not server.calls and next(stream, None) is None
    assert (report.bytes, report.pause_seconds) == (0, 0.0)


def patience(fault: str) -> float:
    """Of a request: nothing but what hangs is late on a busy machine."""
    return 0.5 if fault == "hang" else 20.0


SENT = [endpoints.PAUSE, endpoints.BEGIN_UPDATE, endpoints.UPDATE_FROM_TENSOR, endpoints.END_UPDATE]


@pytest.mark.parametrize("endpoint", SENT)
@pytest.mark.parametrize("fault", ["reset", "http_500", "hang", "refuse"])
@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_after_a_failure_no_server_samples_from_parts_of_two_versions(endpoint: str, fault: str, kind: str) -> None:
    """It names the server. Those whose weights have not changed serve the version before; an embedded server holds an
    update back until its end. The other trainer ranks must not be left in a collective."""
    if (endpoint, fault) == (endpoints.PAUSE, "refuse"):
        return  # a pause has no such answer
    with FakeServer() as good, FakeServer() as bad:
        bad.fault = {endpoint: fault}
        stream = iter(weights())
        made = publisher([good, bad], kind=kind, timeout_s=patience(fault), bucket_bytes=100, hold_bytes=1)
        with refuses(RuntimeError, 2, bad.url, "--resume") as caught:
            made.publish(stream, version=2)
        assert next(stream, None) is None
        changed = SENT.index(endpoint) > (2 if kind == "embedded" else 1)
        assert bool(good.paused) == changed == (endpoints.CONTINUE not in good.endpoints())
        assert ("remain paused" in str(caught.value)) == changed
        if not changed:
            assert good.version == "0" and not good.in_session
    assert good.url not in str(caught.value)


@pytest.mark.parametrize("endpoint", [*SENT, endpoints.CHECKSUM, endpoints.CONTINUE])
@pytest.mark.parametrize("fault", ["reset", "http_500", "hang", "refuse"])
def test_a_publication_may_go_on_without_a_server(endpoint: str, fault: str) -> None:
    """The report says which, and whether it can be asked again. The others serve the version."""
    if fault == "refuse" and endpoint not in SENT[1:]:
        return
    with FakeServer() as good, FakeServer() as bad:
        bad.fault = {endpoint: fault}
        made = publisher([good, bad], goes_on=True, timeout_s=patience(fault), bucket_bytes=100)
        report = made.publish(weights(), version=2)
        assert [f.url for f in report.failed] == [bad.url] and bad.url in report.failed[0].why
        assert report.failed[0].answers == (fault in ("http_500", "refuse"))
        assert same(good.weights, list(quantize_stream(weights(), SPEC))) and (good.version, good.paused) == ("2", "")
        assert bad.endpoints()[-1] == endpoint, "nothing is sent to it afterwards"


class _AsAGroup(Inline):
    """Loses a publication with any server that fails, as a process group does."""

    def _send(self, payload: Sequence[str], servers: ServerSet, version: str | None) -> None:
        super()._send(payload, servers, version)
        if servers.lost:
            raise RolloutError("; ".join(fault.why for fault in servers.lost))


@pytest.mark.parametrize("fault", ["reset", "http_500", "refuse"])
def test_a_group_that_a_server_leaves_has_lost_the_publication_at_all_servers(fault: str) -> None:
    """Those that answer can be asked again. Where the only failure is a refusal, the weights are at fault."""
    with FakeServer() as good, FakeServer() as bad:
        bad.fault = {endpoints.UPDATE_FROM_TENSOR: fault}
        made = publisher([good, bad], goes_on=True, timeout_s=patience(fault), bucket_bytes=100)
        made._transport = _AsAGroup(made._target)
        if fault == "refuse":
            with refuses(RuntimeError, 2, bad.url, "previous version"):
                made.publish(weights(), version=2)
            assert (good.version, good.paused) == ("0", "")
            return
        report = made.publish(weights(), version=2)
        assert {f.url: f.answers for f in report.failed} == {good.url: True, bad.url: fault != "reset"}
        assert report.bytes == 0 and all(bad.url in f.why for f in report.failed) and good.version == "0"
        bad.fault = {}
        assert not made.publish(weights(), version=2).failed and (good.version, bad.version) == ("2", "2")


def test_where_all_servers_refuse_the_weights_are_at_fault() -> None:
    """Servers that do not answer can be replaced, all of them."""
    with FakeServer() as a, FakeServer() as b:
        a.fault = b.fault = {endpoints.UPDATE_FROM_TENSOR: "refuse"}
        with refuses(RuntimeError, 2, a.url, b.url):
            publisher([a, b], goes_on=True).publish(weights(), version=2)
        assert not a.paused and not b.paused
    with FakeServer() as a, FakeServer() as b:
        a.fault = b.fault = {endpoints.UPDATE_FROM_TENSOR: "reset"}
        stream = iter(weights())
        report = publisher([a, b], goes_on=True).publish(stream, version=2)
        assert {f.url for f in report.failed} == {a.url, b.url} and next(stream, None) is None
        assert not any(f.answers for f in report.failed) and report.checksums == ()


@pytest.mark.parametrize("path", ["tensor", "disk"])
def test_a_version_that_goes_back_is_refused_before_anything_is_encoded(path: Any, tmp_path: Path) -> None:
    with FakeServer(version="7") as server:
        stream = iter(weights())
        made: Any = publisher([server])
        if path == "disk":
            target = PublishTarget(urls=(server.url,), kind="embedded", spec=None, config=PublishConfig(path="disk"))
            made = DiskPublisher(target, SharedDirectory(path=tmp_path / "w", hf_config={}, copy_from=None))
        with refuses(RuntimeError, 6, 7, server.url):
            made.publish(stream, version=6)
        assert server.endpoints() == [endpoints.MODEL_INFO] and next(stream, None) is None
        assert not (tmp_path / "w").exists()


def test_of_three_servers_the_one_that_differs_is_left_out() -> None:
    """Of stock ones, whose hashes are not those of what was sent. Of two that differ either may be wrong."""
    with FakeServer() as a, FakeServer() as b, FakeServer() as c:
        b.corrupt = True
        stock: dict[str, Any] = {"kind": "sglang", "goes_on": True}
        report = publisher([a, b, c], **stock).publish(weights(), version=1)
        assert [f.url for f in report.failed] == [b.url] and not a.paused and not c.paused and b.paused
        with refuses(RuntimeError, a.url, b.url, "model.embed_tokens.weight"):
            publisher([a, b], **stock).publish(weights(), version=1)


@pytest.mark.parametrize(("fault", "fact"), [("large", "67,108,864"), ("gzip", "gzip")])
def test_an_answer_without_an_end_or_compressed_is_not_read(fault: str, fact: str) -> None:
    with FakeServer() as bad:
        bad.fault = {endpoints.BEGIN_UPDATE: fault}
        with refuses(RuntimeError, bad.url, fact):
            publisher([bad], timeout_s=20).publish(iter(weights()), version=2)


def test_different_or_damaged_weights_are_found() -> None:
    """SGLang ignores unknown names with HTTP 200, so success is believed only after the checksums."""
    with FakeServer() as a, FakeServer() as b:
        b.corrupt = True
        with refuses(RuntimeError, "model.embed_tokens.weight"):
            publisher([a, b]).publish(weights(), version=1)
        with refuses(RuntimeError, b.url, "model.embed_tokens.weight"):
            publisher([b]).publish(weights(), version=1)
        assert b.paused
        publisher([a, b], verify=False).publish(weights(), version=2)
    stale = {"stale.weight": torch.zeros(2)}
    with FakeServer(weights=stale) as server, refuses(RuntimeError, 1, "stale.weight"):
        publisher([server]).publish(weights(), version=1)


def test_an_engine_may_skip_draft_layers() -> None:
    """An engine that does not draft holds no multi-token-prediction layer; that is no lost weight."""
    with FakeServer() as server:
        take = server._update_weights_from_tensor

        def skipping(body: Any) -> Any:
            out = take(body)
            server.weights.pop("model.layers.3.input_layernorm.weight", None)
            return out

        server._update_weights_from_tensor = skipping  # type: ignore[method-assign]
        publisher([server]).publish(weights(), version=1)
        assert not server.paused


def test_weights_that_cannot_be_published() -> None:
    """Refused before any server is paused; the message of a later fault reports that the servers are paused."""
    with FakeServer() as server:
        with refuses(ValueError, "model.embed_tokens.weight"):
            publisher([server]).publish(weights() + weights()[:1], version=1)
        with refuses(ValueError):
            publisher([server]).publish([], version=1)
        bad = weights()
        bad[1].tensor[0, 0] = float("nan")
        with refuses(ValueError, "model.layers.0.self_attn.o_proj.weight"):
            publisher([server]).publish(bad, version=1)
        assert set(server.endpoints()) == {endpoints.MODEL_INFO}
        late = [*weights(), *weights()[:1]]
        with refuses(RuntimeError, 1, "model.embed_tokens.weight", "--resume"):
            publisher([server], spec=None, hold_bytes=1, bucket_bytes=1).publish(late, version=1)
    with refuses(ValueError, "rollout.servers", 1):
        PublishTarget(urls=(), kind="embedded", spec=None, config=PublishConfig())


def test_disk_publication(tmp_path: Path) -> None:
    """Every server reads the same directory; only the newest is kept."""
    encoded = list(quantize_stream(weights(), SPEC))
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    with FakeServer() as a, FakeServer() as b:
        target = PublishTarget(urls=(a.url, b.url), kind="embedded", spec=SPEC, config=PublishConfig(path="disk"))
        hf = {"model_type": "deepseek_v3"}
        shared = SharedDirectory(path=tmp_path / "weights", hf_config=hf, copy_from=source)
        pub = DiskPublisher(target, shared)
        for version in (1, 2):
            report = pub.publish(weights(), version=version)
        assert same(a.weights, encoded) and same(b.weights, encoded)
        assert (a.version, b.version, a.paused) == ("2", "2", "")
        before = (
            endpoints.MODEL_INFO,
            endpoints.SERVER_INFO,
            endpoints.CHECKSUM,
        )  # what is served is asked first
        assert [e for e in a.endpoints() if e not in before][:2] == [endpoints.PAUSE, endpoints.UPDATE_FROM_DISK]
        assert report.bytes == sum(t.nbytes for _, t in encoded)
        assert [p.name for p in (tmp_path / "weights").iterdir()] == ["version_2"]
        config = json.loads((tmp_path / "weights/version_2/config.json").read_text())
        assert config["model_type"] == "deepseek_v3" and spec_from_hf(config) == SPEC
        b.fault = {endpoints.UPDATE_FROM_DISK: "refuse"}
        with refuses(RuntimeError, b.url, "--resume"):
            pub.publish(weights(1), version=3)
        assert (a.version, a.paused, b.version, b.paused) == ("2", "", "2", ""), "what was loaded before is again"
        assert same(a.weights, encoded)
