"""The shipped distillation config: a made teacher on a server of the run's own, whose likeliest tokens are candidates.

Small and short: what it learns is in docs/studies/distillation.md. The other kinds of teachers: test_pipeline.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from tests.e2e.conftest import ROOT, Run
from tests.e2e.test_pipeline import metrics

CONFIG = ROOT / "configs" / "tiny_opd.toml"
CHEAP = (
    *("--set", "model.make.max_steps=4"),
    *("--set", "model.make.check_every=4"),
    *("--set", "distillation.teachers.clean.make.max_steps=8"),
    *("--set", "distillation.teachers.clean.make.check_every=8"),
    *("--set", "train.groups_per_step=24"),
    *("--set", "train.steps=2"),
    *("--set", "eval.max_prompts=12"),
)


@pytest.mark.long(beside="tests/miles_like/experience/test_teachers.py")
def test_the_shipped_config_distils_from_a_made_teacher_s_candidates(run: Run, home: Path) -> None:
    """Every sampled token is taught, by another model that leaves some probability beside its candidates."""
    assert load_config(CONFIG).distillation.top_k > 0, "the config no longer covers this"
    done = run("--config", str(CONFIG), "--run-dir", str(home / "opd"), *CHEAP)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = metrics(home / "opd")
    assert [r["step"] for r in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["distill/tokens"] == row["distill/tokens/clean"] == row["rollout/tokens"] > 0
        assert row["train/grad_norm"] > 0 and 0 < row["distill/teacher_others"] < 1
        assert row["distill/candidates_divergence"] > 0 and math.isfinite(row["distill/reverse_kl"])
