"""Which stored tensors a tensor of a stock SGLang server is made of, and the hash that the server reports of it.

As SGLang 0.5.23 has them on one tensor- and pipeline-parallel rank without quantization: stacked parameters are rows
of their parts (`stacked_params_mapping` and `cached_a_proj` of models/qwen3_moe.py, models/glm4_moe.py and
models/deepseek_common/deepseek_weight_loader.py), those of routed experts have a first axis of experts
(layers/moe/fused_moe_triton). On a CPU a hash is the first 8 bytes of SHA-256 over a tensor's bytes
(managers/mm_utils.py, `tensor_hash`); on CUDA it is another function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

_STACKED: Mapping[str, tuple[str, ...]] = {
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EXPERTS: Mapping[str, tuple[str, ...]] = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def made_of(served: str, names: Container[str]) -> tuple[tuple[str, ...], ...]:
    """Stored names of the parts of the tensor that the server calls `served`: its rows, in a tuple for each expert
    where the tensor has an axis of experts, else in one. Empty for a tensor that is made of `names` in no known way."""
    if served in names:
        return ((served,),)
    module, _, leaf = served.rpartition(".")
    parent, _, last = module.rpartition(".")
    if leaf in _EXPERTS:
        found, e = [], 0
        while f"{module}.{e}.down_proj.weight" in names:
            found.append(tuple(f"{module}.{e}.{part}.weight" for part in _EXPERTS[leaf]))
            e += 1
        return tuple(found)
    parts = tuple(f"{parent}.{part}.{leaf}" for part in _STACKED.get(last, ()))
    return (parts,) if parts and all(n in names for n in parts) else ()


def stock_checksum(parts: tuple[tuple[str, ...], ...], read: Callable[[str], Tensor]) -> str:
    """16 hex digits, of the tensor of which `made_of` gives the parts; `read` gives a stored tensor."""
    digest = hashlib.sha256()  # a stacked tensor's bytes are those of its parts, one after the other
    for name in (name for rows in parts for name in rows):
        digest.update(read(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
