"""Names of TransformerEngine's specs -> names of megatron's local specs.

TransformerEngine's linears contain the norm before them, and its grouped linear contains all experts of a rank.
Checkpoints, converter, exporter and name patterns use only local names, so that CPU and GPU runs can read each other's
files; the names of a TransformerEngine model are translated there. Source: gpt_layer_specs.py and experts.py of
megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Within a transformer layer (of the decoder or of a multi-token-prediction depth).
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bself_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"\bself_attention\.linear_q_up_proj\.layer_norm_weight$"), "self_attention.q_layernorm.weight"),
    (re.compile(r"\bself_attention\.linear_kv_up_proj\.layer_norm_weight$"), "self_attention.kv_layernorm.weight"),
    (re.compile(r"\bmlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (
        re.compile(r"\bmlp\.experts\.linear_fc([12])\.(weight|lora_a|lora_b)(\d+)$"),
        r"mlp.experts.local_experts.\3.linear_fc\1.\2",
    ),
)

# Checkpoint keys that differ from the names in the local spec of grouped-query attention (its
# sharded_state_dict_keys_map). Latent attention's spec renames nothing.
_STORED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\binput_layernorm\.weight$"), "self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\bpre_mlp_layernorm\.weight$"), "mlp.linear_fc1.layer_norm_weight"),
)


def local_name(name: str) -> str:
    """Parameter name in a model of either spec -> in a local-spec model; layer and expert numbers do not change."""
    return _rename(_RULES, name)


def stored_key(key: str, *, latent_attention: bool) -> str:
    """Key in a sharded state of either spec -> the checkpoint key of the local spec's parameter."""
    local = local_name(key)
    return local if latent_attention else _rename(_STORED, local)


def checkpoint_state(state: Mapping[str, Any], *, latent_attention: bool, loading: bool) -> dict[str, Any]:
    """A TransformerEngine model's sharded state with the checkpoint's keys; the dictionary's names do not change, since
    `load_state_dict` needs them.

    Modules' extra state (the amax history of delayed scaling) has no local counterpart: the objects are saved empty, as
    the local spec saves its own, and are not loaded.
    """
    out: dict[str, Any] = {}
    for name, value in state.items():
        if is_extra(name):
            if loading:
                continue
            value.data = None
        value.key = stored_key(value.key, latent_attention=latent_attention)
        out[name] = value
    return out


def is_extra(name: str) -> bool:
    """Whether an entry of a state is a module's extra state."""
    return re.search(r"\._extra_state\d*$", name) is not None


def _rename(rules: tuple[tuple[re.Pattern[str], str], ...], name: str) -> str:
    for pattern, new in rules:
        name, found = pattern.subn(new, name)
        if found:
            break
    return name
