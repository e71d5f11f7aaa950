"""The engine serves an FP8 checkpoint's exact decoded values, and replaces weights wholly or not at all.

Why it must hold: trainer and rollout agree on weights through these bytes; a half-applied update is a model that was
never trained. The oracle of decoding is codes times scales written out by hand, and transformers running on those
values. Not covered: other formats than block FP8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_like.types import NamedTensor
from quant.formats.codec import QuantTensor
from quant.hf_config import spec_from_hf
from quant.stream import quantize_stream
from rollout.embedded.server.service import Service
from rollout.wire.checksum import tensor_checksum
from tests.support.embedded_fixtures import oracle, run, save, service, spec
from tests.support.refusals import Facts, refuses

Tensors = dict[str, torch.Tensor]
BLOCK = 16  # several blocks a weight in a small model
Q = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
CODE = "model.layers.1.mlp.experts.3.up_proj.weight"
SCALE = CODE + "_scale_inv"
NORM = "model.norm.weight"


def fp8_tensors(seed: int) -> Tensors:
    """An oracle's weights as DeepSeek stores them: FP8 codes and scales, the rest bfloat16, the bias float32."""
    reference = oracle(seed)
    named = {
        k: v.clone() if k.endswith("bias") else v.to(torch.bfloat16)
        for k, v in load_file(save(reference, _scratch / f"s{seed}") / "model.safetensors").items()
    }
    return dict(quantize_stream(named.items(), spec_from_hf({"quantization_config": Q})))


def write(path: Path, tensors: Tensors) -> Path:
    path.mkdir(exist_ok=True)
    config = json.loads((_scratch / "s0" / "config.json").read_text()) | {"quantization_config": Q}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


_scratch: Path


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _scratch
    _scratch = tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def old(scratch: None) -> Tensors:
    return fp8_tensors(0)


@pytest.fixture(scope="module")
def new(old: Tensors) -> Tensors:
    return fp8_tensors(1)


@pytest.fixture(scope="module")
def path(old: Tensors) -> Path:
    return write(_scratch / "fp8", old)


def by_hand(tensors: Tensors) -> Tensors:
    out = {}
    for name, t in tensors.items():
        if t.dtype is torch.float8_e4m3fn:
            scale = tensors[name + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            out[name] = (t.float() * scale[: t.shape[0], : t.shape[1]]).to(torch.bfloat16).float()
        elif not name.endswith("_scale_inv"):
            out[name] = t.float()
    return out


def greedy(s: Service) -> list[int]:
    return run(s.engine, spec([4, 50, 60, 7], temperature=0.0, max_new_tokens=24))[0][0].reply.output_ids.tolist()


def items(tensors: Tensors) -> list[NamedTensor]:
    return [NamedTensor(n, t) for n, t in tensors.items()]


def test_codes_are_kept_and_decoded_exactly(path: Path, old: Tensors) -> None:
    s = service(path)
    want = by_hand(old)
    for name, values in want.items():
        assert torch.equal(s.store.decoded(name, torch.float32), values), name
    held = s.store[CODE]
    assert isinstance(held, QuantTensor)
    assert held.stored["weight"].dtype is torch.float8_e4m3fn
    assert torch.equal(s.store.decoded(CODE, torch.bfloat16), want[CODE].to(torch.bfloat16))
    moe = s.engine.model.weights.layers[1].mlp
    assert torch.equal(moe.gate_up.dense()[3, 32:], want[CODE])
    assert moe.router.dtype is torch.float32
    assert s.store.checksums() == {n: tensor_checksum(n, t) for n, t in old.items()}


@torch.no_grad()
def test_transformers_on_the_decoded_values_says_the_same(path: Path, old: Tensors, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((_scratch / "s0" / "config.json").read_text())
    save_file({n: t.contiguous() for n, t in by_hand(old).items()}, plain / "model.safetensors", {"format": "pt"})
    reference = type(oracle()).from_pretrained(plain)
    ids = torch.tensor([4, 50, 60, 7])
    for _ in range(24):
        ids = torch.cat([ids, reference(ids[None]).logits[0, -1].argmax()[None]])
    assert greedy(service(path)) == ids[4:].tolist()


def test_an_update_in_any_order_equals_a_fresh_load(path: Path, old: Tensors, new: Tensors, tmp_path: Path) -> None:
    s = service(path)
    before, want = greedy(s), greedy(service(write(tmp_path / "new", new)))
    assert before != want
    stream = items(dict(sorted(new.items(), reverse=True)))  # scales come before their codes
    s.begin_update()
    s.update(stream[:40], flush_cache=True, version="3")
    assert greedy(s) == before, "nothing is served before the end"
    assert s.engine.version == "default"
    s.update(stream[40:], flush_cache=True, version=None)
    s.end_update()
    assert greedy(s) == want
    assert s.engine.version == "3"
    assert s.store.checksums() == {n: tensor_checksum(n, t) for n, t in new.items()}
    s.update_from_disk(path, flush_cache=True, version="4")
    assert greedy(s) == before
    assert (s.engine.version, s.model_path) == ("4", path)


def test_part_of_the_weights_can_be_sent(path: Path, old: Tensors, new: Tensors, tmp_path: Path) -> None:
    some = {n: new[n] for n in (CODE, SCALE, NORM, "lm_head.weight", "model.layers.2.mlp.gate.weight")}
    s = service(path)
    s.begin_update()
    s.update(items(some), flush_cache=True, version=None)
    s.end_update()
    assert greedy(s) == greedy(service(write(tmp_path / "mixed", old | some)))
    assert s.engine.version == "default"


def _bad(tensor: torch.Tensor, value: float) -> torch.Tensor:
    out = tensor.clone()
    out.view(-1)[0] = value
    return out


@pytest.mark.parametrize(
    ("sent", "facts"),
    [
        (lambda t: {"nope": t[NORM]}, ("nope",)),
        (lambda t: {NORM: t[NORM][:-1]}, (NORM, "[63]", "[64]")),
        (lambda t: {NORM: t[NORM].long()}, (NORM, "torch.int64")),
        (lambda t: {NORM: _bad(t[NORM], float("nan"))}, (NORM, 1)),
        (lambda t: {CODE: t[CODE].to(torch.bfloat16)}, (CODE, "torch.bfloat16", "fp8")),
        (lambda t: {NORM: t[NORM].to(torch.float8_e4m3fn)}, (NORM,)),
        (lambda t: {CODE: t[CODE]}, (CODE, SCALE)),
        (
            lambda t: {SCALE: t[SCALE]},
            (SCALE, CODE),
        ),
        (lambda t: {CODE: t[CODE], SCALE: t[SCALE][:1]}, (SCALE,)),
        (lambda t: {CODE: t[CODE], SCALE: _bad(t[SCALE], float("inf"))}, (SCALE,)),
    ],
)
def test_a_bad_update_leaves_the_old_weights_whole(
    path: Path, new: Tensors, sent: Callable[[Tensors], Tensors], facts: Facts
) -> None:
    """Good tensors sent beside the bad one must not get in either, nor later ones of the same session."""
    s = service(path)
    before = s.store.checksum()

    def attempt() -> None:
        s.update(items(sent(new)), flush_cache=True, version="9")
        s.end_update()

    s.begin_update()
    s.update(items({"lm_head.weight": new["lm_head.weight"]}), flush_cache=True, version=None)
    with refuses(ValueError, *facts):
        attempt()
    with refuses(ValueError):
        s.end_update()
    assert s.store.checksum() == before
    assert s.engine.version == "default"
    s.begin_update()
    s.end_update()


def test_session_rules(path: Path, new: Tensors) -> None:
    s = service(path)
    with refuses(ValueError, "/begin_weight_update"):
        s.update(items({NORM: new[NORM]}), flush_cache=True, version=None)
    with refuses(ValueError, "/begin_weight_update"):
        s.end_update()
    s.begin_update()
    with refuses(ValueError):
        s.begin_update()
    s.update(items({NORM: new[NORM]}), flush_cache=True, version=None)
    with refuses(ValueError, NORM):
        s.update(items({NORM: new[NORM]}), flush_cache=True, version=None)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda t: t.pop(SCALE), (CODE, SCALE)),
        (lambda t: t.pop(NORM), (NORM,)),
        (lambda t: t.update({"model.layers.7.x.weight": t[NORM].clone()}), ("model.layers.7.x.weight",)),
        (lambda t: t.update({NORM: _bad(t[NORM], float("inf"))}), (NORM, 1)),
        (lambda t: t.update({NORM: t[NORM][:3].clone()}), (NORM, "[3]")),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    old: Tensors, tmp_path: Path, change: Callable[[Tensors], Any], facts: Facts
) -> None:
    tensors = dict(old)
    change(tensors)
    with refuses(ValueError, *facts):
        service(write(tmp_path / "bad", tensors))


def test_multi_token_prediction_layers_are_skipped(path: Path, old: Tensors, tmp_path: Path) -> None:
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(4, 4), "model.layers.3.embed_tokens.weight": torch.zeros(2)}
    where = write(tmp_path / "mtp", old | extra)
    config = json.loads((where / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (where / "config.json").write_text(json.dumps(config))
    s = service(where)
    assert greedy(s) == greedy(service(path))
    s.begin_update()
    s.update(items(extra), flush_cache=True, version=None)
    s.end_update()
    assert not set(s.store.checksums()) & set(extra)
