"""What leaves the trainer is decided by the table alone: a parameter the table does not know must stop the run, since
it would be trained and never served; a missing one too, since the rollout would keep its old weights.

One rank, over a stand-in that has only a state dict and layer numbers. Real models, every layout and the bits are the
weight round trip's law.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.families.registry import family_of
from megatron_bridge.hf_export import export_hf
from miles_like.types import NamedTensor
from tests.megatron_bridge.tiny_models import random_tensors, tiny

HF = tiny()


class _One:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


GROUPS: Any = SimpleNamespace(tp_group=_One(), etp_group=_One(), ep_group=_One(), pp_group=_One())


class _Model:
    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=i + 1) for i in range(3)])

    def state_dict(self, keep_vars: bool) -> dict[str, Tensor]:
        assert keep_vars
        return self.state


def _state(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    hf = random_tensors(HF)
    parts: dict[str, list[Tensor]] = {}
    for place in family_of(HF).bind(HF).places():
        parts.setdefault(place.megatron_name, []).append(hf[place.hf_name])
    return {k: torch.cat(v) if k.endswith("expert_bias") else torch.cat(v).to(dtype) for k, v in parts.items()}


def _export(state: dict[str, Tensor], **kwargs: Any) -> list[NamedTensor]:
    models: Any = [_Model(state)]
    return list(export_hf(models, family_of(HF), HF, GROUPS, **kwargs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_have_the_checkpoints_dtype(dtype: torch.dtype) -> None:
    """fp32 parameters are published as bf16 (here they are bf16 values, so exactly), the routing bias never is."""
    wanted = random_tensors(HF)
    got = dict(_export(_state(dtype)))
    assert got.keys() == wanted.keys()
    assert all(got[k].dtype is wanted[k].dtype and got[k].equal(wanted[k]) for k in wanted)
    assert got["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is torch.float32


def test_padding_of_the_vocabulary_is_cut() -> None:
    state = _state()
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[name] = torch.cat([state[name], torch.full((5, 128), 9.0, dtype=torch.bfloat16)])
    got = dict(_export(state))
    assert got["lm_head.weight"].shape == (128, 128)
    assert got["model.embed_tokens.weight"].equal(random_tensors(HF)["model.embed_tokens.weight"])


def test_objects_beside_the_weights_are_not_tensors_of_the_model() -> None:
    state: dict[str, Any] = {**_state(), "decoder.layers.0.self_attention.linear_proj._extra_state": None}
    assert len(_export(state)) == len(random_tensors(HF))


def test_unknown_parameter_is_refused_by_name() -> None:
    state = {**_state(), "decoder.layers.0.mlp.linear_fc1.lora_a": torch.zeros(2)}
    with pytest.raises(ValueError, match="lora_a"):
        _export(state)


def test_missing_parameter_is_refused() -> None:
    state = _state()
    del state["decoder.layers.2.mlp.experts.local_experts.7.linear_fc2.weight"]
    with pytest.raises(AssertionError, match="138 tensors, the config has 139"):
        _export(state)


def test_wrong_shape_is_refused() -> None:
    state = _state()
    state["decoder.final_layernorm.weight"] = torch.zeros(127, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="final_layernorm"):
        _export(state)
