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
from megatron_bridge.weights.export import ExportPlan
from miles_like.types import NamedTensor
from tests.support.refusals import refuses
from tests.support.tiny_models import random_tensors, tiny, tiny_qwen

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


def _state(dtype: torch.dtype = torch.bfloat16, hf: dict[str, Any] = HF, *, mtp: bool = False) -> dict[str, Tensor]:
    """A single rank's parameters of `random_tensors`."""
    values, tensors = random_tensors(hf, mtp=mtp), family_of(hf).bind(hf, mtp=mtp)
    state: dict[str, Tensor] = {}
    for place in tensors.places():
        kept = torch.float32 if place.megatron_name.endswith("expert_bias") else dtype
        whole = state.setdefault(place.megatron_name, torch.empty(tensors.megatron_shape(place.entry), dtype=kept))
        for theirs, ours, rows in tensors.runs(place.entry, place.index):
            whole[ours : ours + rows] = values[place.hf_name][theirs : theirs + rows]
    return state


def _export(*states: dict[str, Tensor], hf: dict[str, Any] = HF, **kwargs: Any) -> list[NamedTensor]:
    models: Any = [_Model(state) for state in states]
    return list(ExportPlan(models, family_of(hf), hf, GROUPS, **kwargs).export())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_have_the_checkpoints_dtype(dtype: torch.dtype) -> None:
    """fp32 parameters are published as bf16 (here they are bf16 values, so exactly), the routing bias never is."""
    wanted = random_tensors(HF)
    got = dict(_export(_state(dtype)))
    assert got.keys() == wanted.keys()
    assert all(got[k].dtype is wanted[k].dtype and got[k].equal(wanted[k]) for k in wanted)
    assert got["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is torch.float32


def test_a_second_holder_of_a_parameter_is_not_a_second_tensor() -> None:
    """The last stage's head repeats a tied embedding, and the last of two chunks with draft layers the embedding."""
    hf = tiny_qwen(tie_word_embeddings=True)
    wanted = random_tensors(hf)
    state = _state(hf=hf)
    embedding = state["embedding.word_embeddings.weight"]
    head = {"output_layer.weight": embedding, "embedding.word_embeddings.weight": embedding + 1}
    names = [name for name, _ in _export(state, head, hf=hf)]
    assert sorted(names) == sorted(wanted)
    got = dict(_export(state, head, hf=hf))
    assert all(got[k].equal(wanted[k]) for k in wanted)


def test_draft_layers_go_out_with_what_their_checkpoint_repeats() -> None:
    hf = tiny(num_nextn_predict_layers=2)
    wanted = random_tensors(hf, mtp=True)
    got = dict(_export(_state(hf=hf, mtp=True), hf=hf, mtp=True))
    assert got.keys() == wanted.keys()
    assert all(got[k].equal(wanted[k]) for k in wanted)
    assert got["model.layers.4.shared_head.head.weight"].equal(got["lm_head.weight"])
    with refuses(ValueError, "mtp.layers.0.enorm.weight"):  # a trainer that holds them must say so
        _export(_state(hf=hf, mtp=True), hf=hf)


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
    with refuses(ValueError, "decoder.layers.0.mlp.linear_fc1.lora_a"):
        _export(state)


def test_missing_parameter_is_refused() -> None:
    state = _state()
    del state["decoder.layers.2.mlp.experts.local_experts.7.linear_fc2.weight"]
    with refuses(AssertionError, 138, 139):
        _export(state)


def test_wrong_shape_is_refused() -> None:
    state = _state()
    state["decoder.final_layernorm.weight"] = torch.zeros(127, dtype=torch.bfloat16)
    with refuses(AssertionError, "decoder.final_layernorm.weight"):
        _export(state)
