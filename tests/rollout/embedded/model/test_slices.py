"""Law: the slices of all ranks together are the model, each row once, but for weights of which every rank has a copy;
and a rank reads the bytes of its slices and no others.

What ranks compute with their slices is compared in tests/rollout/embedded/ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from miles_like.hf import checkpoint as checkpoint_module
from miles_like.hf.checkpoint import HFCheckpoint
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model.exchange import check_agreement
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.tensors import expected_tensors
from rollout.embedded.model.weights import WeightStore
from tests.support.refusals import refuses
from tests.support.tiny_models import CONFIGS, random_tensors, tiny, write_checkpoint

COPIED = ("norm", "q_a_proj", "kv_a_proj_with_mqa", "mlp.gate.")


def ranks(model: str, tp: int, ep: int) -> Iterator[Slices]:
    whole = Slices(arch=architecture_of(CONFIGS[model]), tp=tp, ep=ep)
    whole.check()
    return (whole.of(rank) for rank in range(tp))


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("model", ["tiny", "biases_tied", "qwen_every_head_unnormalized", "no_q_lora_no_yarn"])
def test_every_row_is_held_once(model: str, tp: int, ep: int) -> None:
    held = list(ranks(model, tp, ep))
    for name, shape in expected_tensors(held[0].arch).items():
        rows = [r for s in held if (r := s.rows(name, shape[0])) is not None]
        if any(part in name for part in COPIED):
            assert rows == [range(shape[0])] * tp, name
        else:
            assert [i for r in rows for i in r] == list(range(shape[0])), name
            assert len(rows) == (tp // ep if ".experts." in name else tp), name


@pytest.mark.parametrize("quantized", [False, True])
def test_a_rank_reads_its_slices_alone(quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, tensors = tiny(), random_tensors(tiny())
    spec = QuantSpec.of(QuantFormat.FP8, block=(16, 16))
    if quantized:
        write_checkpoint(
            tmp_path, quantized_config(hf, spec, list(tensors)), dict(quantize_stream(tensors.items(), spec))
        )
    else:
        write_checkpoint(tmp_path, hf, tensors)
    read: list[int] = []
    stock = checkpoint_module._pread

    def counted(info: checkpoint_module.TensorInfo, skip: int, nbytes: int, buffer: memoryview | None = None) -> Tensor:
        read.append(nbytes)
        return stock(info, skip, nbytes, buffer)

    monkeypatch.setattr(checkpoint_module, "_pread", counted)
    opened, total = HFCheckpoint(tmp_path), 0
    for slices in ranks("tiny", 2, 2):
        read.clear()
        store = WeightStore.load(opened, slices.arch, slices)
        assert sum(read) == sum(t.nbytes for t in store.tensors())
        total += sum(read)
    copied = sum(opened.info(n).nbytes for n in opened.names() if any(part in n for part in COPIED))
    assert total == opened.nbytes + copied
    assert copied < 0.2 * opened.nbytes, "blind: most is copied"


class Two:
    """Rank 0 of two; the other one has `theirs`."""

    size = 2

    def __init__(self, theirs: Tensor) -> None:
        self.theirs = theirs

    def gathered(self, x: Tensor) -> Tensor:
        raise AssertionError("this gather is for rank 0 alone")

    def gathered_first(self, x: Tensor) -> Tensor:
        return torch.stack([x, self.theirs])


class Hears(Two):
    """Keeps what this rank sends."""

    def gathered_first(self, x: Tensor) -> Tensor:
        self.theirs = x
        return torch.stack([x, x])


def test_ranks_that_choose_other_experts_are_an_error() -> None:
    """Two experts that change places, or one that is another: their rows would be gathered for other experts."""
    chosen = [torch.tensor([[3, 1], [0, 2]]), torch.tensor([[1, 2], [3, 0]])]
    for wrong in ([[3, 1], [2, 0]], [[3, 1], [0, 5]], [[1, 3], [0, 2]]):
        heard = Hears(torch.zeros(1))
        check_agreement([torch.tensor(wrong), chosen[1]], heard)
        with refuses(RuntimeError, "rank 1", "rank 0"):
            check_agreement(chosen, Two(heard.theirs))
    check_agreement(chosen, Hears(torch.zeros(1)))
