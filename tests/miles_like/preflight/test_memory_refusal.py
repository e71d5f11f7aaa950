"""A run that does not fit its devices is refused before anything starts, and every twin on CPU ranks is accepted.

Not covered: the numbers of the plan (tests/miles_like/planning).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result

from miles_like.cli import app
from miles_like.config.load import load_config
from tests.support import sglang_metadata
from tests.support.cli_runner import CliRunner
from tests.support.plans import CONFIGS, shipped
from tests.support.refusals import check_refusal

TOO_MUCH = "rollout.sglang.mem_fraction_static=0.95"
TWINS = sorted((CONFIGS / "cpu").glob("*.toml"))


def dry(tmp_path: Path, config: Path, *options: str) -> Result:
    command = ["train", str(config), "--run-dir", str(tmp_path / "run"), "--dry-run", *options]
    return CliRunner().invoke(app, command, env={"COLUMNS": "500", "RAY_ADDRESS": ""})


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dry run looks for SGLang."""
    sglang_metadata.install(monkeypatch, tmp_path / "installed")


def test_what_does_not_fit_is_refused_with_what_does(tmp_path: Path) -> None:
    done = dry(tmp_path, CONFIGS / "qwen3_4b.toml", "--set", TOO_MUCH)
    assert done.exit_code == 2
    check_refusal(done.stderr.strip(), "79.6", "KV cache", "rollout.sglang.mem_fraction_static", 0.75, "--force")
    assert not (tmp_path / "run").exists()


def test_force_starts_it_as_it_is(tmp_path: Path) -> None:
    done = dry(tmp_path, CONFIGS / "qwen3_4b.toml", "--set", TOO_MUCH, "--force")
    assert done.exit_code == 0, done.output
    assert "memory: does not fit: trainer stage 0 needs " in done.stdout


def test_what_fits_has_its_verdict_in_the_first_lines(tmp_path: Path) -> None:
    done = dry(tmp_path, CONFIGS / "qwen3_4b.toml")
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stdout.splitlines()[:10] if line.startswith("memory: ")]
    assert "fits, with" in line


@pytest.mark.parametrize("twin", TWINS, ids=lambda path: path.stem)
def test_a_twin_on_cpu_ranks_is_accepted(twin: Path, tmp_path: Path) -> None:
    done = dry(tmp_path, twin)
    assert done.exit_code == 0, done.output
    assert load_config(twin).cluster.gpus_per_node == 0


def test_every_model_and_format_has_a_twin() -> None:
    """Configurations of one model and format for fewer or other GPUs have one twin."""
    names = {name.removesuffix("_node").removesuffix("_24gb") for name in shipped() if not name.startswith("rehearsal")}
    assert names == {path.stem for path in TWINS}
