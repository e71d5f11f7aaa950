"""Launches of a shipped configuration, for tests of their renderers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_like.config.load import load_config
from miles_like.launch.layout import Asked, Launch, plan_launch

V3 = Path("configs/deepseek_v3_fp8.toml")


def planned(*overrides: str, config: Path = V3, run_dir: Path = Path("/shared/run"), **asked: Any) -> Launch:
    """asked: the other fields of `Asked`."""
    loaded = load_config(config, overrides)
    variables = loaded.cluster.env | loaded.rollout.env
    return plan_launch(Asked(config, run_dir, overrides, **asked), loaded.cluster, loaded.checkpoint, variables)
