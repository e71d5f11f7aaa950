"""Law: an update that one rank of a server cannot take changes none of them, and the next one is taken by all.

Why it must hold: ranks with weights of two versions compute a model that exists nowhere. A directory that is damaged in
the rows of one rank alone, and a request that fails when one rank has its tensors and the others do not have theirs.
Not covered: a rank that ends (test_lost_ranks.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor, SamplingParams
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.engine.requests import PromptSpec
from rollout.embedded.model.exact_ops import ExactOps
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import WeightStore
from rollout.embedded.server.service import Service
from tests.support.exactly import MODELS, generate
from tests.support.ranked import divided
from tests.support.refusals import refuses
from tests.support.tiny_models import felt_tensors, write_checkpoint

pytestmark = pytest.mark.slow
LIMITS = EngineLimits(max_total_tokens=1024, context_length=128, prefill_tokens=48)
HALF = "model.layers.0.self_attn.o_proj.weight"  # rank 1 has the second half of its rows


def seen(s: Service) -> tuple[Any, Any]:
    """Scores of a text, and all checksums."""
    text = PromptSpec(
        rid="text", token_ids=tuple(range(5, 30)), sampling=SamplingParams(max_new_tokens=0), logprob_start=0
    )
    ((done,),) = generate(s.engine, [text])
    return done.prompt_logprobs, s.checksums()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions, and the second with a value that is not finite, in rows of rank 1."""
    where, versions = tmp_path_factory.mktemp("hf"), [felt_tensors(MODELS["mla"], seed) for seed in (0, 1)]
    damaged = {n: t.clone() for n, t in versions[1].items()}
    damaged[HALF][-1, -1] = torch.nan
    return [write_checkpoint(where / str(i), MODELS["mla"], t) for i, t in enumerate([*versions, damaged])]


def test_a_directory_that_one_rank_refuses_changes_none(paths: list[Path]) -> None:
    s = divided(paths[0], LIMITS, "ep2", ops=ExactOps())
    before = seen(s)
    with refuses(ValueError, "rank 1", HALF, 1):
        s.update_from_disk(paths[2], flush_cache=True, version="1")
    assert seen(s) == before and s.engine.version == "default"
    s.update_from_disk(paths[1], flush_cache=True, version="1")
    after = seen(s)
    assert after[0] != before[0] and s.engine.version == "1"
    assert after[1] == Service(paths[1], LIMITS).checksums()


def test_a_request_that_fails_on_its_way_to_a_rank_changes_none(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has staged its slice by then. The update cannot be ended; its repetition is taken."""
    s = divided(paths[0], LIMITS, "ep2", ops=ExactOps())
    before, tensors, cut = seen(s), [NamedTensor(n, t) for n, t in HFCheckpoint(paths[1]).stream()], WeightStore.cut

    def fails(self: WeightStore, name: str, tensor: Tensor, slices: Slices) -> Tensor | None:
        if name == HALF and slices.rank == 1:
            raise MemoryError("planted")
        return cut(self, name, tensor, slices)

    s.begin_update("1")
    with monkeypatch.context() as planted:
        planted.setattr(WeightStore, "cut", fails)
        with pytest.raises(MemoryError):
            s.update(tensors, flush_cache=False, version="1")
    with refuses(ValueError, "MemoryError: planted"):
        s.end_update("1")
    assert seen(s) == before and s.engine.version == "default"
    s.begin_update("1")
    s.update(tensors, flush_cache=False, version="1")
    s.end_update("1")
    assert seen(s)[1] == Service(paths[1], LIMITS).checksums() and s.engine.version == "1"
