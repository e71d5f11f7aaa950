"""Weights of every format, kept decoded or as codes: the engine computes what transformers computes on decoded values.

Why it must hold: the trainer multiplies with `decode(encode(w))`; any other value in the rollout is a mismatch that
no correction sees. That the two ways of keeping weights multiply the same numbers is exact, so it is asserted bit for
bit. Rounded inputs are held against the formula of the recipe (a power-of-two or real scale a block), written out
here. Not covered: speed (benchmarks/quantized_rollout.py), and formats on stock SGLang.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
import torch.nn.functional as F
import uvicorn
from safetensors.torch import load_file, save_file

from miles_like.types import NamedTensor
from quant.hf_config import quantized_config
from quant.qat import activation_codec
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import dequantize_stream, quantize_stream
from rollout.config import PublishConfig
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.model import plain_ops, projections
from rollout.embedded.model.layout import SequenceRows, lay_out
from rollout.embedded.model.operations import Operations
from rollout.embedded.model.projections import Codes, Linear, Scratch
from rollout.embedded.server.app import make_app, parse
from rollout.embedded.server.service import Service
from rollout.embedded.server.worker import EngineWorker
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.wire.checksum import tensor_checksum
from tests.support.chosen import checked
from tests.support.embedded_fixtures import BASE, QWEN_MOE, oracle, run, save, service, spec, with_values
from tests.support.refusals import Facts, refuses
from tests.support.spawn import free_port

Tensors = dict[str, torch.Tensor]
F8, F4 = QuantFormat.FP8, QuantFormat.NVFP4
SMALL_BLOCKS: dict[str, Any] = {"block": (16, 16)}  # several a weight in a small model
MIXED = ("kv_a_proj_with_mqa", "layers.0.mlp.gate_proj", "layers.2.mlp.experts.3")
SPECS = {
    "fp8": QuantSpec(format=F8, **SMALL_BLOCKS),
    "fp8-mixed": QuantSpec(format=F8, ignore=MIXED, **SMALL_BLOCKS),
    "fp8-ue8m0": QuantSpec(format=QuantFormat.FP8_UE8M0, **SMALL_BLOCKS),
    "int4": QuantSpec.of(QuantFormat.INT4),
    "mxfp8": QuantSpec.of(QuantFormat.MXFP8),
    "mxfp8-ct": QuantSpec.of(QuantFormat.MXFP8, convention="compressed-tensors"),
    "mxfp4": QuantSpec.of(QuantFormat.MXFP4, "all"),
    "nvfp4": QuantSpec.of(F4),
    "nvfp4-modelopt": QuantSpec.of(F4, "all", convention="modelopt"),
}
IDS = torch.tensor([5, 9, 33, 2, 71, 8, 8, 40, 21, 90, 3])
_plain: dict[int, Tensors] = {}
_scratch: Path


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _scratch
    _scratch = tmp_path_factory.mktemp("formats")
    for seed in (0, 1):
        named = load_file(save(oracle(seed), _scratch / f"s{seed}") / "model.safetensors")
        _plain[seed] = {n: t if n.endswith("bias") else t.to(torch.bfloat16) for n, t in named.items()}
    write("bf16", None)


def config_of(how: QuantSpec | None) -> dict[str, Any]:
    return quantized_config(json.loads((_scratch / "s0" / "config.json").read_text()), how, list(_plain[0]))


def write(name: str, how: QuantSpec | None, tensors: Tensors | None = None) -> Path:
    path = _scratch / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(how)))
    save_file(tensors or dict(quantize_stream(_plain[0].items(), how)), path / "model.safetensors")
    return path


def logits(s: Service) -> torch.Tensor:
    """Of the whole prompt at once."""
    cache = s.engine.cache
    pages = cache.take(cache.pages_for(len(IDS)))
    row = SequenceRows(tokens=IDS, start=0, slots=cache.slots_of(pages))
    width = 4 * s.arch.attention.cache_width
    out = s.engine.model.logits(s.engine.model.forward(lay_out([row], width_bytes=1 << 20, token_bytes=width), cache))
    cache.release(pages)
    return out


def sums(tensors: Tensors) -> dict[str, str]:
    return {n: tensor_checksum(n, t) for n, t in tensors.items()}


@pytest.mark.parametrize("name", checked(SPECS, ("fp8", "int4", "nvfp4-modelopt")))
@torch.no_grad()
def test_decoded_or_as_codes_the_engine_computes_with_the_decoded_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after an update by tensor; a batch uses some experts only, so that codes are decoded in runs."""
    monkeypatch.setattr(projections, "SMALL", 0)  # or this model would be kept decoded as a whole
    monkeypatch.setattr(projections, "_TOGETHER", 5 * 2 * 32 * 64)  # five experts
    path = write(name, SPECS[name])
    decoded, codes = service(path), service(path, weights="codes")
    for seed in (0, 1):
        tensors = dict(quantize_stream(_plain[seed].items(), SPECS[name]))
        if seed:
            for s in (decoded, codes):
                s.begin_update()
                s.update([NamedTensor(n, t) for n, t in reversed(tensors.items())], flush_cache=True, version="1")
                s.end_update()
        assert decoded.store.checksums() == codes.store.checksums() == sums(tensors)
        ours = logits(decoded)
        assert torch.equal(ours, logits(codes))
        values = {n: t.float() for n, t in dequantize_stream(tensors.items(), SPECS[name])}
        torch.testing.assert_close(ours, with_values(values)(IDS[None]).logits[0], atol=1e-4, rtol=0)
        a, b = (run(s.engine, spec([4, 50, 7], max_new_tokens=8, n=2))[0] for s in (decoded, codes))
        assert [c.reply.output_ids.tolist() for c in a] == [c.reply.output_ids.tolist() for c in b]
    plain = service(_scratch / "bf16").weights_bytes
    assert codes.weights_bytes < plain < decoded.weights_bytes


def test_nothing_is_held_twice() -> None:
    """A BF16 checkpoint is held once, in the engine's own dtype, and still says the checksums of what came."""
    s = service(_scratch / "bf16")
    elements = sum(t.numel() for t in _plain[0].values())
    assert 4 * elements <= s.weights_bytes < 4.05 * elements
    assert s.store.checksums() == sums(_plain[0])
    s.begin_update()
    s.update([NamedTensor(n, t) for n, t in _plain[1].items()], flush_cache=True, version="1")
    s.end_update()
    assert s.store.checksums() == sums(_plain[1]) and s.weights_bytes < 4.05 * elements


# ---- rounded inputs


def by_hand(x: torch.Tensor, group: int, power_of_two: bool) -> torch.Tensor:
    """e4m3(x / s) * s of the bf16 copy, s = amax / 448 of `group` columns of a row."""
    w = x.to(torch.bfloat16).float().view(len(x), -1, group)
    s = w.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    if power_of_two:
        m, e = torch.frexp(s)
        s = torch.ldexp(torch.ones(()), e - (m == 0.5).int())
    return ((w / s).to(torch.float8_e4m3fn).float() * s).to(torch.bfloat16).float().view(x.shape)


class RoundingByHand:
    """Plain operations that round the input of every linear but the head's; nothing else knows of it."""

    absorb = False
    head: torch.Tensor

    def __init__(self, group: int, power_of_two: bool) -> None:
        self.how = group, power_of_two

    def __getattr__(self, name: str) -> Any:
        return getattr(plain_ops, name)

    def linear(self, x: torch.Tensor, w: torch.Tensor, parts: int = 1) -> torch.Tensor:
        assert parts == 1
        return F.linear(x if w is self.head else by_hand(x, *self.how), w)

    def grouped_linear(self, x: torch.Tensor, w: torch.Tensor, counts: Any, parts: int = 1) -> torch.Tensor:
        assert parts == 1
        return plain_ops.grouped_linear(by_hand(x, *self.how), w, counts)


WIDE = QWEN_MOE | {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("base", "how"),
    [
        (BASE, QuantSpec.of(QuantFormat.MXFP8)),
        (WIDE, QuantSpec(format=F8)),
        (WIDE, QuantSpec(format=QuantFormat.FP8_UE8M0)),
    ],
    ids=["latent-mxfp8", "grouped-fp8", "grouped-ue8m0"],
)
@torch.no_grad()
def test_inputs_of_quantized_linears_are_rounded(base: dict[str, Any], how: QuantSpec, tmp_path: Path) -> None:
    """Of all of them, and of nothing else: router, head and embedding see what they saw."""
    path = save(oracle(0, base), tmp_path)
    named = {n: t if n.endswith("bias") else t.bfloat16() for n, t in load_file(path / "model.safetensors").items()}
    save_file(dict(quantize_stream(named.items(), how)), path / "model.safetensors")
    config = quantized_config(json.loads((path / "config.json").read_text()), how, list(named))
    (path / "config.json").write_text(json.dumps(config))
    rounded, plain = service(path, activations="fp8"), service(path)
    codes = service(path, "codes", "fp8")
    unrounded = logits(plain)
    ops = RoundingByHand(activation_codec(how).block[1], how.format is not F8)
    hand = Service(path, EngineLimits(max_total_tokens=2048, context_length=256), ops=cast(Operations, ops))
    ops.head = hand.engine.model.weights.head
    want = logits(hand)
    assert torch.equal(logits(rounded), want) and torch.equal(logits(codes), want)
    assert (want - unrounded).abs().max() > 1e-3


def test_a_fused_linear_rounds_for_its_quantized_rows_only() -> None:
    """An ignore rule may name one of two projections of an input."""
    torch.manual_seed(0)
    codec = make_codec(QuantSpec(format=F8))
    q = codec.encode({"q": torch.randn(24, 128)})["q"]
    plain, x, scratch = torch.randn(8, 128), torch.randn(5, 128), Scratch(torch.float32)
    coded = Codes(codec, {leaf: p[None] for leaf, p in q.stored.items()}, (24, 128), 1)
    for keep in (False, True):
        linear = Linear([plain, coded], keep_codes=keep, scratch=scratch, inputs=activation_codec(codec.spec))
        got = linear(x, plain_ops)
        want = [F.linear(x, plain), F.linear(by_hand(x, 128, False), codec.decode(q).float())]
        assert torch.equal(got, torch.cat(want, -1))


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("bf16", ("quantization_config",)),
        ("int4", ("int4",)),
        ("fp8", (64, 128)),
    ],
)
def test_inputs_that_cannot_be_rounded_are_refused_at_start(name: str, facts: Facts) -> None:
    path = _scratch / "bf16" if name == "bf16" else write(name, SPECS[name])
    with refuses(ValueError, *facts):
        service(path, activations="fp8")


# ---- what comes over the wire

W = "model.layers.1.mlp.experts.3.up_proj."


@pytest.mark.parametrize(
    ("sent", "facts"),
    [
        ({"weight": lambda t: _plain[1][W + "weight"]}, ("int4",)),
        (
            {"weight_packed": lambda t: t, "weight_scale": lambda t: t},
            (W + "weight_packed",),
        ),
        ({"weight_scale": lambda t: t}, (W + "weight_scale",)),
        (
            {"weight_packed": lambda t: t[:, :-1]},
            (W + "weight_packed", "torch.int32", "(32, 7)"),
        ),
        (
            {"weight_packed": lambda t: t.to(torch.uint8)},
            (W + "weight_packed", "torch.uint8"),
        ),
        ({"weight_scale_inv": lambda t: torch.ones(1, 1)}, (W + "weight_scale_inv",)),
    ],
)
def test_a_part_that_does_not_fit_is_refused_by_name(sent: dict[str, Any], facts: Facts) -> None:
    tensors = dict(quantize_stream(_plain[1].items(), SPECS["int4"]))
    s = service(write("int4", SPECS["int4"]))
    before = s.store.checksum()
    s.begin_update()
    with refuses(ValueError, *facts):
        parts = [NamedTensor(W + leaf, make(tensors.get(W + leaf))) for leaf, make in sent.items()]
        s.update(parts, flush_cache=True, version=None)
        s.end_update()
    assert s.store.checksum() == before


def test_other_weights_than_config_json_says_are_refused_at_start() -> None:
    tensors = dict(quantize_stream(_plain[0].items(), SPECS["int4"]))
    with refuses(ValueError, "model.layers.1.mlp.experts.0.down_proj.weight_shape", "quantization_config"):
        service(write("no_config", None, tensors))
    with refuses(ValueError, "int4"):
        service(write("plain", SPECS["int4"], _plain[0]))
    s = service(write("int4", SPECS["int4"]))
    with refuses(ValueError, "int4"):
        s.update_from_disk(_scratch / "bf16", flush_cache=True, version=None)
    with refuses(ValueError, "fp8", 16, 16):
        s.update_from_disk(write("fp8", SPECS["fp8"]), flush_cache=True, version=None)


@contextmanager
def server(path: Path) -> Iterator[str]:
    """The engine's server in threads of this process."""
    port = free_port()
    args = parse(["--model-path", str(path), "--port", str(port), "--weights", "codes", "--threads", "1"])
    worker = EngineWorker(service(path, weights="codes"), threads=1)
    worker.start()
    http = uvicorn.Server(uvicorn.Config(make_app(worker, args), port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        http.should_exit = True
        thread.join(20)
        worker.stop()


@pytest.mark.parametrize(
    "name", checked(["fp8-ue8m0", "int4", "mxfp8", "mxfp4", "nvfp4", "nvfp4-modelopt"], ("int4", "nvfp4-modelopt"))
)
def test_every_format_is_published_by_tensor_and_by_disk(name: str, tmp_path: Path) -> None:
    """What is held is what the quantizer gives, part by part, and it is sampled from; buckets of a few modules."""
    how, path = SPECS[name], write(name, SPECS[name])
    want = [sums(dict(quantize_stream(_plain[seed].items(), how))) for seed in (1, 0)]
    with server(path) as url, httpx.Client(base_url=url, trust_env=False) as http:
        publishers = (
            TensorPublisher(
                PublishTarget(urls=(url,), kind="embedded", spec=how, config=PublishConfig(bucket_bytes=20000)),
                send=True,
            ),
            DiskPublisher(
                PublishTarget(urls=(url,), kind="embedded", spec=how, config=PublishConfig(path="disk")),
                SharedDirectory(path=tmp_path, hf_config=config_of(None), copy_from=path),
            ),
        )
        for version, seed, publisher, held in zip((1, 2), (1, 0), publishers, want, strict=True):
            publisher.publish((NamedTensor(n, t) for n, t in _plain[seed].items()), version=version)
            assert http.get("/weights_checker").json()["ranks"][0]["checksums"] == held
            body = {"input_ids": [4, 50, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
            assert len(http.post("/generate", json=body).json()["output_ids"]) == 3
        assert http.get("/server_info").json()["weights_bytes"] > 0
