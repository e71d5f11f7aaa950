"""Every shipped configuration that trains TransformerEngine's modules on GPUs, at its true shapes and in its layout.

The first rank of each kind of pipeline stage is built of the package's own modules, with the configuration's own
kernels, and holds, publishes and asks a checkpoint for what the same rank of megatron's local modules does. Tensors are
on the meta device and process groups have no other members (tests/support/built_ranks.py). Not covered: what the
modules compute (tests/laws/test_te_modules.py), and FP8 parameters, which no configuration has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.config import KernelsConfig, TrainerConfig
from megatron_bridge.fake.stages import distinct_stages, first_rank
from megatron_bridge.plan.kernels import choose_spec
from miles_like.config.load import load_config
from miles_like.config.ranks import trainer_config
from tests.support.built_ranks import BuiltRank, build_configured
from tests.support.chosen import chosen, later
from tests.support.plans import model_of, path_of, shipped
from tests.support.spawn import run_ranks
from tests.support.te.process import init_te

HERE = "tests/megatron_bridge/families/test_te_stages.py"
FIRST = ("deepseek_v3_fp8",)


def _of(name: str) -> tuple[TrainerConfig, dict[str, Any]]:
    run = load_config(path_of(name))
    hf = dict(model_of(run).hf)
    return trainer_config(run, Path()), hf


def _names() -> list[str]:
    return [name for name in shipped() if choose_spec(*_of(name), cuda=True, te=True, capability=(9, 0)) == "te"]


NAMES = _names()


def _ranks(config: TrainerConfig, hf: dict[str, Any]) -> list[int]:
    return [first_rank(config.parallel, stage.number) for stage in distinct_stages(config, hf)]


def _local(config: TrainerConfig) -> TrainerConfig:
    return config.model_copy(update={"kernels": KernelsConfig(spec="local")})


def _build(rank: int, world: int, port: int, names: list[str], te: bool) -> dict[str, list[BuiltRank]]:
    """Of TransformerEngine's modules or of local ones."""
    from megatron_bridge.device.device import init_device

    init_device()
    out = {}
    for name in names:
        config, hf = _of(name)
        config = config if te else _local(config)
        out[name] = build_configured(config, hf, _ranks(config, hf), te=te)
    return out


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> tuple[dict[str, list[BuiltRank]], dict[str, list[BuiltRank]]]:
    names = chosen(request, "name", NAMES)
    (te,) = run_ranks(_build, 1, names, True, begin=init_te, timeout_s=900.0)
    (local,) = run_ranks(_build, 1, names, False, keep=True, timeout_s=900.0)
    return te, local


@pytest.mark.parametrize("name", later(NAMES, FIRST, beside=HERE))
def test_each_stage_of_a_configuration_is_that_of_local_modules(name: str, built: Any) -> None:
    """Parameters by their global local-spec names, with shapes and dtypes; the tensors that are published; and the keys
    and boxes of a checkpoint."""
    te, local = (ranks[name] for ranks in built)
    assert len(te) == len(local) > 0
    for mine, want in zip(te, local, strict=True):
        assert sorted(mine.tensors, key=str) == sorted(want.tensors, key=str)
        assert sorted(mine.exported, key=str) == sorted(want.exported, key=str)
        assert {(s.name, s.key, s.shape, s.offset, s.sizes, s.dtype, s.main) for s in mine.shares} == {
            (s.name, s.key, s.shape, s.offset, s.sizes, s.dtype, s.main) for s in want.shares
        }


def test_the_configurations_are_these() -> None:
    """Else fewer are built than are shipped."""
    assert set(FIRST) <= set(NAMES) and len(NAMES) >= 5, NAMES
