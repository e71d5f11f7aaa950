"""Names of TransformerEngine's specs -> names of megatron's local specs.

TransformerEngine's linears own the norm before them, and its grouped linear owns all experts of a rank. Checkpoints,
converter, exporter and name patterns speak local names only, so that a CPU run and a GPU run read each other's files: a
model of TransformerEngine's spec is renamed at these edges. Source: gpt_layer_specs.py and experts.py of
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
    (re.compile(r"\bmlp\.experts\.linear_fc([12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.linear_fc\1.weight"),
)

# How a checkpoint names what the local spec of query-group attention calls otherwise (its sharded_state_dict_keys_map).
# Latent attention's spec renames nothing.
_STORED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\binput_layernorm\.weight$"), "self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\bpre_mlp_layernorm\.weight$"), "mlp.linear_fc1.layer_norm_weight"),
)


def local_name(name: str) -> str:
    """Parameter name in a model of either spec -> in one of the local spec; the layer's and expert's numbers stay."""
    return _rename(_RULES, name)


def stored_key(key: str, *, latent_attention: bool) -> str:
    """Key of a sharded state of either spec -> the key that the local spec's parameter has in a checkpoint."""
    local = local_name(key)
    return local if latent_attention else _rename(_STORED, local)


def checkpoint_state(state: Mapping[str, Any], *, latent_attention: bool, loading: bool) -> dict[str, Any]:
    """A TransformerEngine model's sharded state with the checkpoint's keys; the state's own names stay, since
    `load_state_dict` wants them.

    What modules keep beside their parameters (the amax history of delayed scaling) has no place under local names: the
    objects are written empty, as the local spec writes its own, and not asked for again.
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
    """Whether a state's entry is what a module keeps beside its parameters."""
    return re.search(r"\._extra_state\d*$", name) is not None


def _rename(rules: tuple[tuple[re.Pattern[str], str], ...], name: str) -> str:
    for pattern, new in rules:
        name, found = pattern.subn(new, name)
        if found:
            break
    return name
