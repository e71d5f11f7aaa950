"""Given answers and pairs through the command: five stages, Ray and trainer ranks, no server.

Steps are few: that they are the right ones is test_supervised_resume's, that a wrong row is named is
test_supervised_data's, that they learn docs/supervised.md's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_like.report.traces.chrome import read_trace
from miles_like.report.traces.writer import trace_files
from tests.e2e.conftest import ROOT, SMALL, Run

MADE = SMALL[:4]  # the checkpoint that other files' runs make too
FEW = (
    *("--set", "train.steps=2"),
    *("--set", "trace.on=true"),
    *("--set", "train.groups_per_step=6"),
    *("--set", "eval.max_prompts=6"),
)
LONG = pytest.mark.long(beside="tests/laws/test_supervised_resume.py")
FIGURES = [
    pytest.param("sft", "eval/heldout/answer_prob", id="sft", marks=LONG),
    *(
        pytest.param(name, "eval/pairs_heldout/accuracy", id=name, marks=LONG)
        for name in ("dpo", "kto", "orpo", "simpo", "reward_model")
    ),
    pytest.param("process_reward", "eval/steps_heldout/accuracy", id="process_reward", marks=LONG),
]


@pytest.mark.parametrize(("name", "figure"), FIGURES)
def test_a_run_without_rollout_leaves_what_any_run_does(run: Run, home: Path, name: str, figure: str) -> None:
    config, out = str(ROOT / "configs" / f"tiny_{name}.toml"), home / name
    done = run("--config", config, "--run-dir", str(out), *MADE, *FEW)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert figure in rows[0] and figure in rows[2] and figure not in rows[1]
    for left in ("config.toml", "report.html", "checkpoints/latest"):
        assert (out / left).is_file(), left
    assert list((out / "tensorboard").iterdir())
    assert sorted(p.name for p in (out / "logs").iterdir()) == ["trainer_rank0.log", "trainer_rank1.log"]
    spans = [span for path in trace_files(out) for span in read_trace(path)]
    assert {s.process for s in spans} == {"driver", "trainer_rank0", "trainer_rank1"}
    for process in ("trainer_rank0", "trainer_rank1"):
        trained = [s for s in spans if (s.name, s.process) == ("train", process)]
        assert [s.args["version"] for s in trained] == [1, 2] and all(s.args["samples"] for s in trained)
        assert {"forward and backward", "optimizer"} <= {s.name for s in spans if s.process == process}
    assert [s.args["step"] for s in spans if (s.name, s.process) == ("step", "driver")] == [1, 2]
