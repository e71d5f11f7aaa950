"""A server of each family keeps the promises that the DeepSeek tests make: batches, routes, FP8 bytes, updates.

Why it must hold: what differs between families (the cache's content, the router, biases, a tied head) is just what
batching, sharing a prefill, pausing and publishing weights touch. The oracle of tokens, log-probs and expert ids is
transformers, on the values that the FP8 codes decode to. Not covered: what is the same code for all families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_like.types import NamedTensor
from quant.formats.codec import QuantTensor
from quant.hf_config import spec_from_hf
from quant.stream import quantize_stream
from rollout.embedded.server.service import Service
from rollout.wire.checksum import tensor_checksum
from rollout.wire.control import PauseMode
from routing_replay.trace import RoutingTrace
from tests.support.chosen import checked
from tests.support.embedded_fixtures import (
    BASE,
    GLM,
    QWEN,
    QWEN_MOE,
    oracle,
    run,
    save,
    service,
    spec,
    submit,
    with_values,
)
from tests.support.tiny_models import KIMI

Q = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
A, B = [5, 9, 33, 2, 71], list(range(10, 47))
MODELS: dict[str, dict[str, Any]] = {
    "kimi": BASE
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": 2}
    | {"n_group": 1, "topk_group": 1, "n_routed_experts": 272},
    **KIMI,
    "qwen_moe": QWEN_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "attention_bias": True},
    "qwen": QWEN | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "glm": GLM,
}


def _fp8(path: Path, base: dict[str, Any], seed: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory with block FP8 weights as the family's vendors store them, and its tensors."""
    save(oracle(seed, base), path)
    named = load_file(path / "model.safetensors")
    spec = spec_from_hf({"quantization_config": Q})
    plain = {n: t if n.endswith("correction_bias") else t.to(torch.bfloat16) for n, t in named.items()}
    tensors = dict(quantize_stream(plain.items(), spec))
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": Q}
    if base["model_type"] == "kimi_k2":  # which transformers has not: as the release says it
        config = base | {"quantization_config": Q}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path, tensors


def _oracle_of(tensors: dict[str, torch.Tensor], base: dict[str, Any]) -> Any:
    """transformers on codes times scales, written out by hand."""
    values = {}
    for name, t in tensors.items():
        if t.dtype is torch.float8_e4m3fn:
            scale = tensors[name + "_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
            values[name] = (t.float() * scale[: t.shape[0], : t.shape[1]]).to(torch.bfloat16).float()
        elif not name.endswith("_scale_inv"):
            values[name] = t.float()
    return with_values(values, base)


@torch.no_grad()
def _by_transformers(reference: Any, ids: list[int], n: int) -> tuple[list[int], np.ndarray, dict[int, torch.Tensor]]:
    """Greedy tokens, the log-probs of all tokens but the first, and the experts of each layer with any."""
    tokens = torch.tensor(ids)
    for _ in range(n):
        tokens = torch.cat([tokens, reference(tokens[None]).logits[0, -1].argmax()[None]])
    found: dict[int, torch.Tensor] = {}
    hooks = [
        m.gate.register_forward_hook(lambda _m, _i, out, i=i: found.update({i: out[2]}))
        for i, layer in enumerate(reference.model.layers)
        if hasattr(m := layer.mlp, "gate")
    ]
    logprobs = reference(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    for h in hooks:
        h.remove()
    return tokens[len(ids) :].tolist(), logprobs.numpy(), found


def _check(s: Service, reference: Any) -> None:
    """Greedy, in a batch of different lengths, joined late and retracted once: transformers' tokens and experts."""
    late = submit(s.engine, spec(A, temperature=0.0, max_new_tokens=9, logprob_start=0, n=2))
    for _ in range(3):
        s.engine.step()
    both = submit(s.engine, spec(B, temperature=0.0, max_new_tokens=6, logprob_start=0), spec(B, n=2))
    s.engine.step()
    s.engine.pause(PauseMode.RETRACT)
    assert s.engine.flush()
    s.engine.resume()
    run(s.engine)
    arch = s.arch
    for ids, got in ((A, late[0][0]), (A, late[0][1]), (B, both[0][0])):
        tokens, logprobs, experts = _by_transformers(reference, ids, len(got.reply.output_ids))
        assert got.reply.output_ids.tolist() == tokens
        np.testing.assert_allclose(got.prompt_logprobs, logprobs[: len(ids) - 1], atol=1e-4)
        np.testing.assert_allclose(got.reply.logprobs, logprobs[len(ids) - 1 :], atol=1e-4)
        if arch.moe is None:
            assert got.reply.routed_experts is None and not experts
            assert "routed_experts" not in got.reply.to_json()["meta_info"]
            continue
        assert got.reply.routed_experts is not None
        trace = RoutingTrace.from_wire(
            got.reply.routed_experts,
            tokens=torch.tensor([*ids, *tokens]),
            num_layers=arch.layers,
            layers=tuple(experts),
            top_k=arch.moe.router.top_k,
            num_experts=arch.moe.experts,
        )
        assert trace.experts.dtype == (torch.uint8 if arch.moe.experts <= 256 else torch.int16)
        for j, theirs in enumerate(experts.values()):
            assert torch.equal(trace.experts[:, j].sort(-1).values.long(), theirs.sort(-1).values)


@pytest.mark.parametrize("name", checked(MODELS, ("kimi", "qwen_moe")))
def test_fp8_weights_are_served_and_replaced(name: str, tmp_path: Path) -> None:
    base = MODELS[name]
    path, old = _fp8(tmp_path / "old", base, 0)
    _, new = _fp8(tmp_path / "new", base, 1)
    s = service(path)
    held = {n.removesuffix("_scale_inv") for n in old}
    coded = {n for n in held if isinstance(s.store[n], QuantTensor)}
    assert coded == {n for n in held if "_proj" in n and n.endswith(".weight")}, (
        "linears are codes; router, norms, biases are not"
    )
    _check(s, _oracle_of(old, base))
    before = run(s.engine, spec(B, n=3))[0]
    s.begin_update()
    s.update([NamedTensor(n, t) for n, t in reversed(new.items())], flush_cache=True, version="1")
    if base.get("tie_word_embeddings"):  # releases that store the head beside the embedding are known
        s.update([NamedTensor("lm_head.weight", torch.zeros(1))], flush_cache=True, version="1")
    s.end_update()
    assert s.store.checksums() == {n: tensor_checksum(n, t) for n, t in new.items()}
    _check(s, _oracle_of(new, base))
    s.update_from_disk(path, flush_cache=True, version="0")
    again = run(s.engine, spec(B, n=3))[0]
    assert [c.reply.output_ids.tolist() for c in again] == [c.reply.output_ids.tolist() for c in before]
