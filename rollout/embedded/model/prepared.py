"""Weights as the model uses them: projections of the same input fused, experts stacked.

Letters: D hidden, I expert width, E experts, H heads, Hk key/value heads, C latent rank. On one of several ranks H, Hk,
I, E, the rows of `out` and `down` and the tokens of `embed` and `head` are those of the rank's slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

import torch
from torch import Tensor

from quant.qat import activation_codec
from rollout.embedded.families.architecture import GroupedAttention, LatentAttention, Moe
from rollout.embedded.model.projections import Experts, Linear, Scratch
from rollout.embedded.model.weights import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentWeights:
    down: Linear  # [q_lora + C + rope, D]: q_a | kv_a; without q_lora [H * head + C + rope, D]: q | kv_a
    down_bias: Tensor | None  # of the rows of `down`
    q_norm: Tensor | None  # [q_lora]
    q_up: Linear | None  # [H * head, q_lora]
    kv_norm: Tensor  # [C]
    kv_up: Linear  # [H * (nope + v), C]
    out: Linear  # [D, H * v]
    out_bias: Tensor | None  # [D]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedWeights:
    qkv: Linear  # [(H + 2 Hk) * head, D]: query heads, key heads, value heads
    qkv_bias: Tensor | None  # [(H + 2 Hk) * head]
    q_norm: Tensor | None  # [head]
    k_norm: Tensor | None  # [head]
    out: Linear  # [D, H * head]
    out_bias: Tensor | None  # [D]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpWeights:
    gate_up: Linear  # [2I, D]
    down: Linear  # [D, I]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeWeights:
    router: Tensor  # [E, D] fp32
    bias: Tensor | None  # [E] fp32, added to the scores for the choice of experts only
    gate_up: Experts  # [E, 2I, D]
    down: Experts  # [E, D, I]
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    attention: LatentWeights | GroupedWeights
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    embed: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]


class Preparation:
    """Prepares the weights of a store for the model.

    dtype: of activations and weights. device: of the store's tensors and all that is made of them. wide: keep the
    weights of products in fp32. weights: keep "decoded" copies beside the codes, or the "codes" alone. activations:
    "fp8" rounds the inputs of quantized linears with their codec; `prepare` raises ValueError where that is not
    defined.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        weights: Literal["decoded", "codes"] = "decoded",
        activations: Literal["none", "fp8"] = "none",
        wide: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.product_dtype = torch.float32 if wide else dtype
        self.keep_codes = weights == "codes"
        self.rounds_inputs = activations == "fp8"
        self.scratch = Scratch(self.product_dtype, device)

    def prepare(
        self, store: WeightStore, *, old: ModelWeights | None = None, changed: Iterable[str] = ()
    ) -> ModelWeights:
        """The weights of the whole store; with `old`, only layers with a name in `changed` are prepared again."""
        return _Builder(self, store).model(old, changed)


class _Builder:
    """Builds the model's weights from a store. Tensors that would be in memory twice are shared with the store."""

    def __init__(self, options: Preparation, store: WeightStore) -> None:
        self.options = options
        self.store = store
        if options.rounds_inputs and store.spec is None:
            raise ValueError(
                "precision.activations rounds the inputs of quantized linears, but the checkpoint has no "
                "quantization_config: serve a quantized checkpoint, or set precision.activations = 'none'"
            )
        self.inputs = activation_codec(store.spec) if options.rounds_inputs and store.spec is not None else None

    # ---- kinds of weights

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        value = self.store.decoded(name, dtype or self.options.dtype)
        self.store.share(name, value)
        return value

    def linear(self, *names: str) -> Linear:
        options = self.options
        pieces = [self.store.codes([n], own=options.keep_codes) or self.plain_piece(n) for n in names]
        linear = Linear(pieces, keep_codes=options.keep_codes, scratch=options.scratch, inputs=self.inputs)
        if linear.rounds_inputs:
            self.check_columns(names[0], linear.shape[1])
        for name, rows in zip(names, linear.rows(), strict=False):
            self.store.share(name, rows)
        return linear

    def plain_piece(self, name: str) -> Tensor:
        value = self.store[name]
        assert isinstance(value, Tensor)
        return value

    def experts(self, names: list[str], experts: int) -> Experts:
        """names: the fused weights of the first expert, then of the second, ..."""
        options = self.options
        codes = self.store.codes(names, own=options.keep_codes)
        if codes is None:
            return self._decoded_experts(names, experts)
        if self.inputs is not None:
            self.check_columns(names[0], codes.shape[1])
        return Experts(codes, experts, keep_codes=options.keep_codes, scratch=options.scratch, inputs=self.inputs)

    def _decoded_experts(self, names: list[str], experts: int) -> Experts:
        """All experts decoded, as not all of them are quantized."""
        if self.inputs is not None and (some := [n for n in names if self.store.is_coded(n)]):
            other = next(n for n in names if not self.store.is_coded(n))
            raise ValueError(
                f"{some[0]} is quantized and {other} is not: with precision.activations = 'fp8', either all "
                "experts of a layer or none must be quantized: change the ignore rules"
            )
        rows, columns = self.store.shape(names[0])
        options = self.options
        dense = torch.empty(len(names), rows, columns, dtype=options.product_dtype, device=options.device)
        for name, into in zip(names, dense.unbind(), strict=True):
            into.copy_(self.store.decoded(name, self.options.product_dtype))
            self.store.share(name, into)
        stacked = dense.view(experts, -1, columns)
        return Experts(stacked, experts, keep_codes=False, scratch=self.options.scratch)

    def check_columns(self, name: str, columns: int) -> None:
        assert self.inputs is not None
        group = self.inputs.block[1]
        if columns % group:
            raise ValueError(
                f"{name} has inputs of {columns} columns, not a multiple of the {group} that share a scale: set "
                "precision.activations = 'none'"
            )

    # ---- modules

    def model(self, old: ModelWeights | None, changed: Iterable[str]) -> ModelWeights:
        embed = self.plain("model.embed_tokens.weight")
        prefixes = {".".join(n.split(".")[:3]) for n in changed}
        arch = self.store.arch
        layers = tuple(
            self.layer(i) if old is None or f"model.layers.{i}" in prefixes else old.layers[i]
            for i in range(arch.layers)
        )
        return ModelWeights(
            embed=embed,
            layers=layers,
            norm=self.plain("model.norm.weight"),
            head=embed if arch.tied else self.plain("lm_head.weight", self.options.product_dtype),
        )

    def layer(self, i: int) -> LayerWeights:
        p, arch = f"model.layers.{i}.", self.store.arch
        a, moe = arch.attention, arch.moe if i in arch.moe_layers else None
        attention = p + "self_attn."
        return LayerWeights(
            input_norm=self.plain(p + "input_layernorm.weight"),
            post_norm=self.plain(p + "post_attention_layernorm.weight"),
            attention=self.latent(a, attention) if isinstance(a, LatentAttention) else self.grouped(a, attention),
            mlp=self.mlp(p + "mlp.") if moe is None else self.moe(moe, p + "mlp."),
        )

    def latent(self, a: LatentAttention, p: str) -> LatentWeights:
        lora, options = a.q_lora is not None, self.options
        first = p + ("q_a_proj.weight" if lora else "q_proj.weight")
        bias = None
        if a.bias:
            rows = self.store.shape(first)[0]
            of_q = (
                self.plain(p + "q_a_proj.bias")
                if lora
                else torch.zeros(rows, dtype=options.dtype, device=options.device)
            )
            bias = torch.cat([of_q, self.plain(p + "kv_a_proj_with_mqa.bias")])
        return LatentWeights(
            down=self.linear(first, p + "kv_a_proj_with_mqa.weight"),
            down_bias=bias,
            q_norm=self.plain(p + "q_a_layernorm.weight") if lora else None,
            q_up=self.linear(p + "q_b_proj.weight") if lora else None,
            kv_norm=self.plain(p + "kv_a_layernorm.weight"),
            kv_up=self.linear(p + "kv_b_proj.weight"),
            out=self.linear(p + "o_proj.weight"),
            out_bias=self.plain(p + "o_proj.bias") if a.bias else None,
        )

    def grouped(self, a: GroupedAttention, p: str) -> GroupedWeights:
        biases = [f"{p}{n}_proj.bias" for n in "qkv"]
        return GroupedWeights(
            qkv=self.linear(*(f"{p}{n}_proj.weight" for n in "qkv")),
            qkv_bias=torch.cat([self.plain(n) for n in biases]) if a.qkv_bias else None,
            q_norm=self.plain(p + "q_norm.weight") if a.qk_norm else None,
            k_norm=self.plain(p + "k_norm.weight") if a.qk_norm else None,
            out=self.linear(p + "o_proj.weight"),
            out_bias=self.plain(p + "o_proj.bias") if a.out_bias else None,
        )

    def mlp(self, p: str) -> MlpWeights:
        gate_up = self.linear(p + "gate_proj.weight", p + "up_proj.weight")
        return MlpWeights(gate_up=gate_up, down=self.linear(p + "down_proj.weight"))

    def moe(self, m: Moe, p: str) -> MoeWeights:
        numbers = self.store.slices.experts
        bias = p + "gate.e_score_correction_bias"
        return MoeWeights(
            router=self.plain(p + "gate.weight", torch.float32),
            bias=self.plain(bias, torch.float32) if m.selection_bias else None,
            gate_up=self.experts(
                [f"{p}experts.{e}.{n}_proj.weight" for e in numbers for n in ("gate", "up")], len(numbers)
            ),
            down=self.experts([f"{p}experts.{e}.down_proj.weight" for e in numbers], len(numbers)),
            shared=self.mlp(p + "shared_experts.") if m.shared_ffn else None,
        )


def held(weights: object) -> Iterator[Tensor]:
    """Yields every tensor that prepared weights keep in memory; no tensor for None."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, Linear | Experts):
        yield from weights.held()
    elif isinstance(weights, tuple):
        for w in weights:
            yield from held(w)
    elif is_dataclass(weights):
        for f in fields(weights):
            yield from held(getattr(weights, f.name))
