"""Law: a server of several ranks is one server: with exact operations its answers, routes and checksums are those of
one rank bit for bit, and together its ranks hold the weights once, but for copies of what each of them reads whole.

Why it must hold: a trainer is compared with the server bit by bit, whatever the server's layout; and ranks that hold
more than their slices are no help for a model that does not fit on one. Tokens, log-probs, prompt scores, routes and
gate weights of both kinds of attention, with experts and without, in two dtypes, with weights of every format and with
rounded inputs, before and after a publication from tensors and one from disk.

Not covered: ranks that end (test_lost_ranks.py), the prefix cache and pauses (tests/laws/test_prefix_cache.py), speed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor, SamplingParams
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.engine.requests import PromptSpec
from rollout.embedded.model.exact_ops import ExactOps
from rollout.embedded.server.service import Service
from rollout.wire.bodies import MemoryTag
from tests.support.exactly import MODELS, PROMPTS, generate, prompt_specs
from tests.support.ranked import divided
from tests.support.refusals import refuses
from tests.support.tiny_models import CONFIGS, random_tensors, write_checkpoint

pytestmark = pytest.mark.slow
LIMITS = EngineLimits(max_total_tokens=1024, context_length=128, max_running=8, prefill_tokens=48, gates=True)
NEW = 4  # tokens a sample: every pass is some exchanges between processes
HF = {**CONFIGS, **MODELS}
BLOCKS = {"block": (16, 16)}  # several in a weight of a small model
FORMATS = {
    "fp8": QuantSpec.of(QuantFormat.FP8, **BLOCKS),  # type: ignore[arg-type]
    "fp8, large blocks": QuantSpec.of(QuantFormat.FP8),  # slices lie within one block
    "int4": QuantSpec.of(QuantFormat.INT4),
    "nvfp4": QuantSpec.of(QuantFormat.NVFP4),
    "fp8-ue8m0": QuantSpec.of(QuantFormat.FP8_UE8M0, **BLOCKS),  # type: ignore[arg-type]
    "mxfp8": QuantSpec.of(QuantFormat.MXFP8),
    "mxfp8, inputs too": QuantSpec.of(QuantFormat.MXFP8),
    "mxfp4": QuantSpec.of(QuantFormat.MXFP4),
}
CASES = [  # model, format, dtype, layout
    ("mla", None, "float32", "ep2"),
    ("gqa", "fp8, large blocks", "bfloat16", "tp2"),
    ("glm", "int4", "float32", "ep2"),
    ("dense", None, "bfloat16", "tp2"),
]
LONG = [
    *((model, None, "float32", "tp2") for model, hf in CONFIGS.items() if hf["num_key_value_heads"] % 2 == 0),
    *((model, None, "float32", "ep2") for model in ("tiny", "biases_tied", "qwen_biases", "glm_groups")),
    *(("mla", how, "bfloat16", layout) for how in ("fp8", "int4", "nvfp4") for layout in ("tp2", "ep2", "tp4, ep2")),
    *(("mla", how, "bfloat16", "ep2") for how in ("fp8-ue8m0", "mxfp4", "mxfp8, inputs too")),
    ("gqa", "mxfp8, inputs too", "bfloat16", "ep2"),
    ("gqa", "mxfp8", "bfloat16", "tp2"),
    ("mla, mtp", None, "float32", "tp2"),
]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def written(where: Path, model: str, how: str | None = None, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    tensors = {
        n: (t * 3 + 0.1 * seed * torch.randn_like(t)).bfloat16() if t.dim() > 1 else t + 1
        for n, t in random_tensors(HF[model]).items()
    }
    if how is None:
        return write_checkpoint(where, HF[model], tensors)
    spec = FORMATS[how]
    config = quantized_config(HF[model], spec, list(tensors))
    return write_checkpoint(where, config, dict(quantize_stream(tensors.items(), spec)))


def answers(s: Service) -> list[Any]:
    """All that a client sees of some samples, and of two prompts that are scored."""
    scored = [
        PromptSpec(
            rid="scored",
            token_ids=tuple(ids),
            sampling=SamplingParams(max_new_tokens=0),
            logprob_start=start,
            top=3,
            routing_start=0,
            gates=True,
        )
        for ids, start in zip(PROMPTS[1:3], (0, 5), strict=True)
    ]
    out: list[Any] = []
    sampled = [replace(p, sampling=replace(p.sampling, max_new_tokens=NEW), gates=True) for p in prompt_specs(0)]
    for group in generate(s.engine, [*sampled, *scored]):
        for c in group:
            r = c.reply
            top = None if c.prompt_top is None else (c.prompt_top.ids.tolist(), c.prompt_top.logprobs.tolist())
            assert r.logprobs is not None
            out.append((r.output_ids.tolist(), r.logprobs.tolist(), r.routed_experts, r.routed_weights))
            out.append((c.prompt_logprobs, top))
    return out


def publish(s: Service, path: Path, version: str) -> None:
    """In requests of three tensors, in the order of their names from the last on."""
    s.begin_update(version)
    tensors = sorted(HFCheckpoint(path).stream(), key=lambda t: t.name, reverse=True)
    for i in range(0, len(tensors), 3):
        s.update([NamedTensor(n, t) for n, t in tensors[i : i + 3]], flush_cache=False, version=version)
    s.end_update(version)


def states(s: Service, other: Path, third: Path) -> list[Any]:
    """Answers and checksums at the start, after a publication of tensors, after one from disk, and after a release."""
    out = [answers(s), s.checksums()]
    publish(s, other, "1")
    out += [answers(s), s.checksums()]
    s.update_from_disk(third, flush_cache=True, version="2")
    out += [answers(s), s.checksums()]
    s.release(tuple(MemoryTag))
    assert s.held() == dict.fromkeys(s.held(), 0)
    s.resume(tuple(MemoryTag))
    publish(s, other, "3")
    return [*out, answers(s), s.checksums()]


@pytest.mark.parametrize(
    ("model", "how", "dtype", "layout"),
    [
        *(pytest.param(*case, id=" ".join(map(str, case))) for case in CASES),
        *(
            pytest.param(
                *case,
                id=" ".join(map(str, case)),
                marks=pytest.mark.long(beside="tests/rollout/embedded/ranks/test_ranks.py"),
            )
            for case in LONG
        ),
    ],
)
def test_ranks_answer_as_one(model: str, how: str | None, dtype: str, layout: str, tmp_path: Path) -> None:
    paths = [written(tmp_path / str(i), model, how, seed=i) for i in range(3)]
    named: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "ops": ExactOps(),
        "weights": "codes" if how == "fp8" else "decoded",
        "activations": "fp8" if how == "mxfp8, inputs too" else "none",
    }
    one = Service(paths[0], LIMITS, **named)
    several = divided(paths[0], LIMITS, layout, **named)
    want, got = states(one, *paths[1:]), states(several, *paths[1:])
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a == b, f"state {i} differs"
    assert want[0] != want[2] != want[4], "blind: the publications changed no answer"


def test_a_slice_that_cuts_a_block_is_refused(tmp_path: Path) -> None:
    """192 rows of queries; one rank's would end, and the other's begin, within the second block of 128."""
    path = written(tmp_path, "glm", "fp8, large blocks")
    with refuses(ValueError, "model.layers.0.self_attn.q_proj.weight", 96, 192, 128, "tp_size"):
        divided(path, LIMITS, "tp2")


def test_the_ranks_hold_the_weights_once(tmp_path: Path) -> None:
    path = written(tmp_path, "mla")
    one, several = (Service(path, LIMITS), divided(path, LIMITS, "ep2"))
    shapes = one.store.whole_shapes
    slices = several.part.slices
    copied = sum(
        4 * int(np.prod(shape))
        for name, shape in shapes.items()
        if len(slices.rows(name, 8) or ()) == 8 and "experts." not in name
    )
    held = several.held_by_rank()
    total = one.held_by_rank()[0].weights
    assert sum(r.weights for r in held) == total + copied
    assert max(r.weights for r in held) < 0.6 * total
    assert copied < 0.1 * total
