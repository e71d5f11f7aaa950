"""The part of a model's weights that one rank of a server holds.

Every divided weight is divided by rows, that is, by outputs: by heads, by channels of a gated unit, by channels of the
hidden state, by tokens of the vocabulary. A rank computes each of its outputs completely, and complete outputs are
gathered (`exchange.py`). No sum is divided over ranks, as it is where partial sums are added: with exact operations the
bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollout.embedded.families.architecture import Architecture, GroupedAttention, LatentAttention

_BY_ROWS = frozenset(
    (
        *("embed_tokens", "lm_head"),
        *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
)  # of the others, latents and norms and routers, every rank has a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Rank `rank` of `tp` ranks. The experts are divided over `ep` groups of them, and each expert over the ranks of
    its group, as in SGLang: rank r is number r % (tp / ep) of group r // (tp / ep)."""

    arch: Architecture
    rank: int = 0
    tp: int = 1
    ep: int = 1

    def of(self, rank: int) -> Slices:
        """Those of another rank of the same server."""
        return replace(self, rank=rank)

    @property
    def expert_tp(self) -> int:
        """Ranks that an expert is divided over."""
        return self.tp // self.ep

    @property
    def group(self) -> int:
        """Number of the group of ranks that has the same experts."""
        return self.rank // self.expert_tp

    def experts_of(self, group: int) -> range:
        """Numbers of the experts of a group of ranks."""
        each = self.arch.moe.experts // self.ep if self.arch.moe is not None else 0
        return range(group * each, (group + 1) * each)

    @property
    def experts(self) -> range:
        """Numbers of the experts that this rank holds, or holds a part of."""
        return self.experts_of(self.group)

    @property
    def attention(self) -> LatentAttention | GroupedAttention:
        """The heads of this rank."""
        a = self.arch.attention
        if isinstance(a, GroupedAttention):
            return replace(a, heads=a.heads // self.tp, kv_heads=a.kv_heads // self.tp)
        return replace(a, heads=a.heads // self.tp)

    def rows(self, name: str, n: int) -> range | None:
        """The rows of the weight `name`, which has `n`, that this rank holds; None: it holds nothing of it."""
        parts = name.split(".")
        if "experts" in parts:
            if int(parts[parts.index("experts") + 1]) not in self.experts:
                return None
            return _part(n, self.rank % self.expert_tp, self.expert_tp)
        return _part(n, self.rank, self.tp) if parts[-2] in _BY_ROWS else range(n)

    def holders(self, name: str) -> list[int]:
        """The ranks that hold the weight `name` or a part of it."""
        return [r for r in range(self.tp) if self.of(r).rows(name, self.tp) is not None]

    def check(self) -> None:
        """Raises ValueError, with both numbers, where the model does not divide."""
        if self.tp % self.ep:
            raise ValueError(
                f"tp_size = {self.tp} ranks are not divisible into ep_size = {self.ep} groups: choose a divisor"
            )
        a, moe = self.arch.attention, self.arch.moe if self.arch.moe_layers else None
        sizes = {"num_attention_heads": a.heads, "hidden_size": self.arch.hidden, "vocab_size": self.arch.vocab}
        if isinstance(a, GroupedAttention):
            sizes["num_key_value_heads"] = a.kv_heads
        if len(self.arch.moe_layers) < self.arch.layers:
            sizes["intermediate_size"] = self.arch.dense_ffn
        if moe is not None and moe.shared_ffn:
            sizes["the width of the shared experts"] = moe.shared_ffn
        _check_divides(sizes, self.tp, "tp_size")
        if self.ep > 1 and moe is None:
            raise ValueError(f"ep_size = {self.ep}: this model has no experts to divide; set it to 1")
        if moe is not None:
            _check_divides({"the number of experts": moe.experts}, self.ep, "ep_size")
            _check_divides({"moe_intermediate_size": moe.ffn}, self.expert_tp, "tp_size / ep_size")


def _part(n: int, i: int, parts: int) -> range:
    return range(n * i // parts, n * (i + 1) // parts)


def _check_divides(sizes: Mapping[str, int], ranks: int, key: str) -> None:
    for what, n in sizes.items():
        if n % ranks:
            raise ValueError(f"{what} = {n} is not divisible by {key} = {ranks} ranks of a server: choose a divisor")
