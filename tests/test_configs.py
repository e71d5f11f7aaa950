"""Every configuration shipped is one that a run would take: it loads, its layout fits, its engine can serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_bridge.layout import check_layout
from megatron_bridge.precision import served_spec
from miles_like.assemble import describe_processes
from miles_like.config_io import dump_config, load_config
from miles_like.engine_fit import check_engine

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_configuration_plans(path: Path, tmp_path: Path) -> None:
    """What `--dry-run` does after reading: kernels, precision, placement and the servers' commands are all resolved."""
    config = load_config(path)
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config
    hf_path = Path(config.model.config or config.model.make.config)
    hf = json.loads(hf_path.read_text())
    check_layout(config.parallel, hf)
    check_engine(config.rollout, config.precision, hf)
    assert served_spec(config.precision, hf) is None or config.precision.format != "bf16"
    assert describe_processes(config, tmp_path)
