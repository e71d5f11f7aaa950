"""Tokens further ahead, and which models have MTP modules."""

from __future__ import annotations

import torch

from megatron_bridge.plan.resolve import resolve
from tests.support import toy
from tests.support.refusals import refuses


def test_labels_ahead_stay_within_their_sample() -> None:
    """Row k is the label k further on: each sample by itself, nothing from the next one."""
    from megatron_bridge.device.device import init_device

    init_device()
    from megatron_bridge.model.mtp import shift_labels

    ends = torch.tensor([0, 4, 5, 8], dtype=torch.int32)
    labels = torch.arange(10, 18)
    mask = torch.tensor([False, False, True, True, True, False, True, True])
    tokens, masks = shift_labels(labels, mask, ends, 2)
    want, want_mask = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.bool)
    for a, b in ((0, 4), (4, 5), (5, 8)):
        for k in range(3):
            for t in range(a, b - k):
                want[k, t], want_mask[k, t] = labels[t + k], mask[t + k]
    assert torch.equal(tokens, want) and torch.equal(masks, want_mask)


def test_a_model_without_modules_is_refused() -> None:
    with refuses(ValueError, "mtp_coefficient", 0.1, "config.json", "num_nextn_predict_layers", 0):
        resolve(toy.config("", mtp_coefficient=0.1), toy.hf_config(), cuda=False)
    hf = toy.hf_config() | {"num_nextn_predict_layers": 1}
    assert "mtp_num_layers" not in resolve(toy.config(""), hf, cuda=False).transformer
    assert resolve(toy.config("", mtp_coefficient=0.1), hf, cuda=False).transformer["mtp_num_layers"] == 1
