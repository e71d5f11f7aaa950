"""Memory of a stock SGLang 0.5.23 server: weights by format and sharding, KV cache, and what stays allocated while the
server is released.

Sources in sglang/srt: `_profile_available_bytes` of mem_cache/kv_cache_configurator.py (the cache takes what
mem_fraction_static leaves of the memory that was free before the weights were loaded), `_compute_cell_size` of
model_executor/pool_configurator.py (bytes of a token), models/deepseek_v2.py, qwen3_moe.py and glm4_moe.py (sharding).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_bridge.config import PrecisionConfig
from megatron_bridge.families.base import Entry, HFConfig, Split, TensorMap, Where
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.precision import served_spec
from miles_like.device_table import Device
from miles_like.planning.memory.allowances import COMMUNICATOR, CONTEXT, deepep_low_latency, deepep_normal
from miles_like.planning.memory.parts import GIB, MIB, Part
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from rollout.config import RolloutConfig, SGLangFlags

_BF16 = 2
# bytes of an element of the cache by rollout.sglang.kv_cache_dtype, with scales; of others those of the model's dtype
_CACHE_BYTES = {
    "fp8_e5m2": 1.0,
    "fp8_e4m3": 1.0,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "fp4_mx_block16": 0.5 + 1 / 16,
}
# defaults of SGLang's handle_gpu_memory_settings by device memory: (less than MiB, prefill chunk, running requests of
# a graph with tp < 4, with more)
_DEFAULTS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (90, 8192, 256, 512), (160, 8192, 256, 512))
_LARGEST = (16384, 512, 512)
_PER_TOKEN = 3 * MIB // 2  # of a prefill chunk: reserved_mem += activation_tokens * 1.5
_PER_REQUEST = 2 * MIB  # reserve_for_graph_mb
_META = 512 * MIB
_LATENT = 3 * GIB // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Bytes on one GPU of a server; `tokens` is a number of tokens, `cell` bytes per token."""

    weights: int
    cache: int  # of keys and values; 0 or less: the weights leave no room for it
    runtime: int  # activations, graphs and workspaces while it generates
    fixed: dict[Part, int]  # kept also while everything is released
    cell: int  # bytes of a token in the cache of one GPU
    tokens: int  # that the whole server's cache holds
    least_fraction: float  # mem_fraction_static below which there is no cache at all

    def generating(self) -> dict[Part, int]:
        own: dict[Part, int] = {"engine weights": self.weights, "KV cache": max(self.cache, 0)}
        return own | {"engine runtime": self.runtime} | self.fixed

    def publishing(self, bucket: int) -> dict[Part, int]:
        """Bytes by part during a publication: the weights and the tensors of one request of `bucket` bytes, without
        cache and graphs."""
        own: dict[Part, int] = {"engine weights": self.weights, "engine runtime": bucket}
        return own | self.fixed

    def asleep(self) -> dict[Part, int]:
        return dict(self.fixed)


class EngineWeights:
    """The weights of one GPU of a server, by the sharding of its modules."""

    def __init__(self, hf: HFConfig, spec: QuantSpec | None, flags: SGLangFlags) -> None:
        self.tensors = TensorMap(family_of(hf), hf)
        self.dims, self.spec, self.flags = self.tensors.dims, spec, flags
        self.heads: int = hf["num_attention_heads"]
        self.codec = codec_or_none(spec)

    @property
    def attention_ranks(self) -> int:
        return self.flags.tp_size // (self.flags.dp_size if self.flags.enable_dp_attention else 1)

    def nbytes(self) -> int:
        shards = (math.ceil(whole / self._shards(e, i, self._ranks(e))) for e, i, whole in self._whole())
        return sum(shards) + self._absorbed()

    def stored(self) -> int:
        """Bytes of the whole checkpoint, as it is published."""
        return sum(whole for _, _, whole in self._whole())

    def _whole(self) -> Iterator[tuple[Entry, int, int]]:
        """(row of the family's table, which of its tensors, bytes of all experts') of each layer."""
        for entry in self.tensors.entries:
            for layer in self.tensors.layers_of(entry):
                for index, shape in enumerate(self.tensors.shapes(entry)):
                    name = entry.hf[index].format(i=layer, e=0 if entry.per_expert else None)
                    yield entry, index, self._stored(name, shape, entry) * self.tensors.experts_of(entry)

    def _stored(self, name: str, shape: tuple[int, ...], entry: Entry) -> int:
        if self.codec is not None and self.spec is not None and self.spec.covers(name, shape):
            return sum(math.prod(s) * dtype.itemsize for dtype, s in self.codec.layout(shape, name).values())
        return int(math.prod(shape) * self.tensors.dtype(entry).itemsize)

    def _ranks(self, entry: Entry) -> int:
        """Ranks that divide a sharded module: those of attention, of the whole server, or one."""
        name, flags = entry.megatron, self.flags
        if ".self_attention." in name or name.startswith("embedding."):
            return self.attention_ranks
        if ".shared_experts." in name and flags.moe_a2a_backend == "deepep":
            return 1
        if entry.where is Where.DENSE and ".mlp." in name:
            return flags.moe_dense_tp_size or flags.tp_size
        return flags.tp_size  # experts too: ep_size ranks of tp_size / ep_size shards

    def _shards(self, entry: Entry, index: int, ranks: int) -> int:
        if entry.split is Split.REPLICATED:
            return 1
        if entry.split is Split.QKV and index > 0:
            return min(ranks, self.dims["kv_heads"])  # with more ranks than heads each rank has one head
        return ranks

    def _absorbed(self) -> int:
        """Latent attention keeps kv_b_proj again as w_kc and w_vc, in BF16 (deepseek_weight_loader.py)."""
        if "kv_lora" not in self.dims:
            return 0
        per_layer = self.dims["kv_out"] * self.dims["kv_lora"] * _BF16
        return self.dims["layers"] * per_layer // self.attention_ranks

    def cell(self) -> int:
        """Bytes that one token takes in the cache of one GPU."""
        size = _CACHE_BYTES.get(self.flags.kv_cache_dtype, float(_BF16))
        if "kv_lora" in self.dims:
            numbers = self.dims["kv_down"]
        else:
            numbers = 2 * max(1, self.dims["kv_heads"] // self.attention_ranks) * self.dims["head"]
        return math.ceil(numbers * self.dims["layers"] * size)


def published_bytes(precision: PrecisionConfig, hf: HFConfig) -> int:
    """Of the whole model, encoded. hf: as in `engine_plan`."""
    return EngineWeights(hf, served_spec(precision, hf), SGLangFlags()).stored()


def engine_plan(
    rollout: RolloutConfig, precision: PrecisionConfig, hf: HFConfig, device: Device, *, routes: bool
) -> EnginePlan:
    """The memory of each GPU of a server. hf: config.json of the served checkpoint. routes: servers return them."""
    flags = rollout.sglang
    weights = EngineWeights(hf, served_spec(precision, hf), flags)
    nbytes, cell, fixed = weights.nbytes(), weights.cell(), _fixed(flags, weights)
    free = device.memory - fixed["CUDA context"] - fixed.get("NCCL", 0)  # before weights are loaded
    cache = int(flags.mem_fraction_static * free) - nbytes
    replicas = flags.dp_size if flags.enable_dp_attention else 1
    return EnginePlan(
        weights=nbytes,
        cache=cache,
        runtime=_runtime(flags, weights, device, routes=routes),
        fixed=fixed,
        cell=cell,
        tokens=max(cache, 0) // cell * replicas,
        least_fraction=nbytes / free,
    )


def _fixed(flags: SGLangFlags, weights: EngineWeights) -> dict[Part, int]:
    groups = sum(n > 1 for n in (flags.tp_size, weights.attention_ranks, flags.ep_size))
    out: dict[Part, int] = {"CUDA context": CONTEXT, "NCCL": COMMUNICATOR * groups}
    if flags.moe_a2a_backend == "deepep" and flags.ep_size > 1:
        hidden, buffers = weights.dims["hidden"], 0
        if flags.deepep_mode != "low_latency":
            buffers += deepep_normal(flags.ep_size, 2 * hidden)
        if flags.deepep_mode != "normal":
            buffers += deepep_low_latency(flags.ep_size, hidden, weights.dims["experts"])
        out["DeepEP"] = buffers
    return {part: n for part, n in out.items() if n}


def _runtime(flags: SGLangFlags, weights: EngineWeights, device: Device, *, routes: bool) -> int:
    chunk, few, many = next((d[1:] for d in _DEFAULTS if device.memory < d[0] * GIB), _LARGEST)
    chunk = flags.chunked_prefill_size or chunk
    requests = many if flags.tp_size >= 4 else few
    if flags.max_running_requests is not None:
        requests = min(requests, flags.max_running_requests)
    replicas = flags.dp_size if flags.enable_dp_attention else 1
    chunk, requests = -(-chunk // replicas), -(-requests // replicas)
    out = _META + _PER_TOKEN * max(chunk, 2048) + _PER_REQUEST * requests
    if "kv_lora" in weights.dims:
        out += _LATENT
    if routes and weights.dims.get("experts"):
        rows = max(chunk, requests) * replicas
        out += rows * weights.dims["layers"] * weights.dims["top_k"] * 4
    return out
