"""The counts of a model that its step time depends on, derived once from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.families.base import HFConfig
from megatron_bridge.families.registry import family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Elements of matrices and channels of activations; norms, biases and other vectors are not counted."""

    layers: int
    moe_layers: frozenset[int]
    """Numbers of the layers with routed experts."""
    hidden: int
    vocab: int
    tied: bool
    """Whether the embedding is the output head too."""
    attention: int
    """Elements of a layer's attention matrices."""
    latent: int
    """Of these, the elements of MLA's down projections, which every tensor-parallel rank holds whole; 0 without MLA."""
    up: int
    """Of these, the elements of MLA's up projections; 0 without MLA."""
    core: int
    """Channels of queries and of values, over all heads: causal attention of n tokens takes n (n + 1) x this FLOPs."""
    heads: int
    kv_channels: int
    """Channels of keys and values that context-parallel ranks exchange."""
    cached: int
    """Elements a token and layer in an engine's cache: keys and values, or MLA's latent with its rotary channels."""
    kv_heads: int
    """Key-value heads, over which an engine's tensor-parallel ranks divide the cache; 1 for MLA: not divided."""
    decode_core: int
    """FLOPs of a decoded token's attention a cached token and layer. MLA attends to the latent itself, with its up
    projections absorbed (DeepSeek-V2, arXiv:2405.04434, section 2.1.2)."""
    dense: int
    """Elements of a dense layer's SwiGLU."""
    expert: int
    """Elements of one routed expert's SwiGLU."""
    expert_ffn: int
    shared: int
    """Elements of a layer's shared experts."""
    router: int
    experts: int
    top_k: int
    drafts: int
    """Draft layers of the checkpoint."""

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)

    @property
    def sparse(self) -> int:
        """Number of layers with routed experts."""
        return len(self.moe_layers)

    @property
    def embeddings(self) -> int:
        """Elements of embedding and head."""
        return self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def routed(self) -> int:
        """Elements of all routed experts."""
        return self.sparse * self.experts * self.expert

    @property
    def others(self) -> int:
        """Elements outside of the routed experts, embedding and head included."""
        layers = self.layers * self.attention + (self.layers - self.sparse) * self.dense
        return layers + self.sparse * (self.shared + self.router) + self.embeddings

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        return self.routed + self.others

    @property
    def active(self) -> int:
        """Elements of the matrices that a token is multiplied with, the head included."""
        lookup = 0 if self.tied else self.hidden * self.vocab
        return self.others - lookup + self.sparse * self.top_k * self.expert


def model_shape(hf: HFConfig) -> ModelShape:
    """The shape of the model with this config.json. Raises ValueError for a model of no known family."""
    family = family_of(hf)
    d = family.dims(hf)
    hidden, heads, latent = d["hidden"], int(hf["num_attention_heads"]), "kv_lora" in d
    value = d.get("o_in", d["q_out"])
    if latent:
        query = (hidden + d["q_out"]) * d["q_lora"] if d["q_lora"] else hidden * d["q_out"]
        attention = query + hidden * d["kv_down"] + d["kv_lora"] * d["kv_out"] + value * hidden
        down = hidden * (d["q_lora"] + d["kv_down"])
        up = d["q_lora"] * d["q_out"] + d["kv_lora"] * d["kv_out"]
        rotary = d["kv_down"] - d["kv_lora"]
        # a query against latent and rotary channels, and the weighted sum of latents: 2 FLOPs each, for every head
        decode = 2 * heads * (2 * d["kv_lora"] + rotary)
    else:
        attention, down, up = hidden * (2 * d["q_out"] + 2 * d["kv_out"]), 0, 0
        decode = 2 * (d["q_out"] + value)
    experts = d.get("experts", 0)
    return ModelShape(
        layers=d["layers"],
        moe_layers=frozenset(family.moe_layers(hf)),
        hidden=hidden,
        vocab=d["vocab"],
        tied=bool(d.get("tied", 0)),
        attention=attention,
        latent=down,
        up=up,
        core=d["q_out"] + value,
        heads=heads,
        kv_channels=d["q_out"] + value if latent else 2 * d["kv_out"],  # MLA's keys and values have all heads
        cached=d["kv_down"] if latent else 2 * d["kv_out"],
        kv_heads=1 if latent else d["kv_heads"],
        decode_core=decode,
        dense=3 * hidden * d["dense_ffn"],
        expert=3 * hidden * d.get("moe_ffn", 0),
        expert_ffn=d.get("moe_ffn", 0),
        shared=3 * hidden * d.get("shared_ffn", 0),
        router=hidden * experts,
        experts=experts,
        top_k=d.get("top_k", 0),
        drafts=d.get("mtp", 0),
    )
