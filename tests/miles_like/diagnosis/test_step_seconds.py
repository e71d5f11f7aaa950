"""The seconds of a step are divided without a rest, by planted traces whose parts are known; remedies name keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from miles_like.config.keys import rows, sections
from miles_like.config.load import load_config, store_config
from miles_like.config.run import RunConfig
from miles_like.diagnosis.describe import step_lines
from miles_like.diagnosis.seconds import REMEDIES, shares, tail_of_lengths, traced_steps
from miles_like.report.traces.chrome import write_trace
from miles_like.report.traces.parts import TracedSpan

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"


def span(process: str, name: str, start: float, end: float, **args: Any) -> TracedSpan:
    return TracedSpan(
        process=process,
        pid=1,
        name=name,
        start=int(start * 1e9),
        took=int((end - start) * 1e9),
        beside=False,
        args=args,
    )


NAMES = [f"p{i}/0" for i in range(10)]


def step(at: float, number: int) -> list[TracedSpan]:
    """20 s: wait 10 s, of which the last sample takes 3 s more than the ninth and its reward 1 s after it; training
    6 s, of which ranks wait 0.5 s for the batch; publication 2 s; the driver 2 s."""
    sampled = [
        span("driver", "generate", at, at + (6.0 if i < 9 else 9.0), samples=[name], tokens=[7])
        for i, name in enumerate(NAMES)
    ]
    ranks = [
        one
        for rank, tokens in ((0, 100), (1, 60))
        for one in (
            span(f"trainer_rank{rank}", "train", at + 10, at + 16, version=number, tokens=tokens, micros=3, samples=[]),
            span(f"trainer_rank{rank}", "meet", at + 10, at + 10.5),
        )
    ]
    return [
        span("driver", "rollout", at, at + 10, step=number),
        *sampled,
        *(span("driver", "reward", at + 6, at + 10 if name == NAMES[9] else at + 7, samples=[name]) for name in NAMES),
        span("driver", "train", at + 10, at + 16, step=number, samples=NAMES),
        *ranks,
        span("driver", "publish", at + 16, at + 18, step=number),
    ]


PHASES = {"rollout": 10.0, "train": 6.0, "publish": 2.0, "experience": 0.0}
ROWS = [
    {"step": float(n), "perf/step_s": 20.0, **{f"perf/{phase}_s": seconds for phase, seconds in PHASES.items()}}
    for n in (1, 2, 3)
]
SPANS = [one for n in (1, 2, 3) for one in step(100.0 * n, n)]


def test_a_traced_step_is_divided_as_it_was_planted() -> None:
    found = {s.what: s.seconds for s in shares(ROWS, traced_steps(SPANS))}
    busy = 5.5
    assert found == pytest.approx(
        {
            "sampling": 6.0,
            "longest samples": 3.0,
            "rewards after the last sample": 1.0,
            "ranks that wait for the batch": 0.5,
            "packing waste": busy * 0.2,  # the ranks have 80 tokens in the mean, and one has 100
            "training": busy * 0.8,
            "publication": 2.0,
            "driver": 2.0,
        }
    )
    assert sum(found.values()) == pytest.approx(20.0)
    order = [s.seconds for s in shares(ROWS, traced_steps(SPANS))]
    assert order == sorted(order, reverse=True)


def test_a_pipeline_has_a_bubble() -> None:
    """(stages - 1) / (micro-batches + stages - 1) of training: 2 stages, 3 micro-batches."""
    found = {s.what: s.seconds for s in shares(ROWS, traced_steps(SPANS), stages=2)}
    assert found["pipeline bubble"] == pytest.approx(5.5 / 4)
    assert sum(found.values()) == pytest.approx(20.0)


def test_without_traces_the_tail_follows_from_lengths() -> None:
    assert tail_of_lengths([[10] * 9 + [40], [20] * 9 + [40]]) == pytest.approx(0.625)
    assert tail_of_lengths([[10] * 19 + [40]]) == pytest.approx(0.75)
    assert tail_of_lengths([[], [0]]) is None
    found = {s.what: s.seconds for s in shares(ROWS, {}, 0.25)}
    assert found == pytest.approx({"sampling": 9.0, "longest samples": 3.0, "training": 6.0, "publication": 2.0})


def test_a_run_without_rollout_has_no_sampling() -> None:
    """Of given examples: training, and what the driver does between two of them."""
    given = [{"step": row["step"], "perf/step_s": 8.0, "perf/train_s": 6.0} for row in ROWS]
    assert {s.what: s.seconds for s in shares(given, {})} == pytest.approx({"training": 6.0, "packing": 2.0})
    ranks = [s for s in SPANS if s.name in ("train", "meet")]
    found = {s.what: s.seconds for s in shares(given, traced_steps(ranks))}
    assert found == pytest.approx(
        {"training": 5.5 * 0.8, "packing waste": 5.5 * 0.2, "ranks that wait for the batch": 0.5, "packing": 2.0}
    )


def test_every_remedy_names_keys_that_exist() -> None:
    known: set[str] = set()

    def add(model: Any, name: str) -> None:
        inner = sections(model)
        known.update(f"{name}{row.key}" for row in rows(model))
        for key, (of, _) in inner.items():
            known.add(f"{name}{key}")
            add(of, f"{name}{key}.")

    add(RunConfig, "")
    for what, remedy in REMEDIES.items():
        named = set(
            re.findall(
                r"\b[a-z]+\.[a-z_.]+[a-z]\b", remedy.replace("docs/weight_sync.md", "").replace("docs/rewards.md", "")
            )
        )
        assert not named - known, what


def test_the_command_prints_the_largest_part_first(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"step": int(row["step"])}) + "\n" for row in ROWS)
    )
    store_config(load_config(TINY), tmp_path / "config.toml")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_3.jsonl").write_text('{"tokens": 10}\n{"tokens": 40}\n')
    lines = step_lines(tmp_path)
    assert lines[1].split("  ")[-1].startswith("sampling: rollout.servers") and "trace.on=true" in lines[-1]
    write_trace(tmp_path / "traces" / "steps_000001-000003.json", SPANS, {})
    lines = step_lines(tmp_path)
    assert lines[0] == "A step takes 20.0 s (mean of the last 3 steps but the first):"
    assert lines[1] == f"  6.000 s   30%  sampling: {REMEDIES['sampling']}"
    assert len(lines) == 9 and "trace.on" not in lines[-1]


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no step with perf/step_s yet"):
        shares([{"step": 0.0}], {})
