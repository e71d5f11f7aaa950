"""`miles-like simulate`: from a configuration, or a run, to a table, a file and a picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from miles_like.cli import app
from miles_like.config.load import load_config
from miles_like.run.simulation_inputs import known_keys, loop_settings, read_assumptions
from miles_like.simulation.inputs.assumptions import Assumptions
from tests.support.cli_runner import CliRunner
from tests.support.refusals import check_refusal

ROOT = Path(__file__).parents[3]
TINY, CLUSTER = ROOT / "configs" / "tiny.toml", ROOT / "configs" / "deepseek_v3_fp8.toml"
GIVEN = (
    "simulation.engine.step_s=0.01",
    "simulation.engine.token_s=0.0002",
    "simulation.train.token_s=0.00005",
    "simulation.publish.seconds=0.1",
    "simulation.lengths.mean=20",
    "simulation.lengths.prompt_tokens=8",
    "train.steps=6",
    "train.groups_per_step=8",
    "rollout.max_new_tokens=64",
)


def command(config: Path, *settings: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    words = ["simulate", str(config), *(x for s in settings for x in ("--set", s)), *arguments]
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


def test_the_command_writes_figures_and_a_picture(tmp_path: Path) -> None:
    """A picture is a PNG of some size; the figures are of the steps that were asked for, twice the same."""
    files = ("--json", str(tmp_path / "out" / "a.json"), "--gantt", str(tmp_path / "out" / "a.png"))
    status, out = command(TINY, *GIVEN, "buffer.max_staleness=1", arguments=files)
    assert status == 0 and "seconds per step" in out and "staleness" in out
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    assert found["steps"] == 6 and len(found["rows"]) == 6 and set(found["staleness"]) == {"0", "1"}
    assert found["assumptions"]["engine"]["step_s"] == 0.01 and found["groups"]["trained"] == 48
    png = (tmp_path / "out" / "a.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", png[16:24])) > 200
    again = ("--json", str(tmp_path / "b.json"))
    assert command(TINY, *GIVEN, "buffer.max_staleness=1", arguments=again)[0] == 0
    assert json.loads((tmp_path / "b.json").read_text()) == found


def test_a_run_is_simulated_from_its_records(tmp_path: Path) -> None:
    from tests.miles_like.simulation.test_calibration import made_run

    made_run(tmp_path, steps=9)
    status, out = command(TINY, "train.steps=5", arguments=("--from", str(tmp_path)))
    assert status == 0 and "seconds per step" in out
    made_run(tmp_path, steps=9, buffer="[buffer]\nmax_staleness = 2\n")
    status, out = command(TINY, "train.steps=5", arguments=("--from", str(tmp_path)))
    assert status == 2
    check_refusal(" ".join(out.split()), "buffer.max_staleness", 0, "--from", unrecorded="it has the run's path")


def test_answers_are_those_of_recorded_samples(tmp_path: Path) -> None:
    """Of a run of any kind, whose seconds are not read: every step trains recorded lengths, all of them in time."""
    from tests.miles_like.simulation.test_calibration import made_run

    made_run(tmp_path, steps=4, buffer="[buffer]\nmax_staleness = 2\n")
    (tmp_path / "metrics.jsonl").unlink()
    rollouts = tmp_path / "rollouts"
    given = [s for s in GIVEN if "lengths" not in s]
    tokens = {}
    for name, extra in (("recorded", ()), ("shifted", ("rollout.max_new_tokens=2",))):
        files = ("--lengths-from", str(rollouts), "--json", str(tmp_path / f"{name}.json"))
        status, out = command(TINY, *given, "train.samples_per_group=3", *extra, arguments=files)
        assert status == 0, out
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["assumptions"]["lengths"]["kind"] == "recorded"
        tokens[name] = sum(row["tokens"] for row in found["rows"])
    # the groups of step n have answers of 1 + n, 2 + n and 3 + n tokens; cut off at 2 each has 2
    groups = 6 * 8
    assert tokens["shifted"] == groups * 3 * 2
    assert tokens["recorded"] % 3 == 0 and groups * (2 + 3 + 4) <= tokens["recorded"] <= groups * (5 + 6 + 7)


def test_samples_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    arguments = ("--lengths-from", str(tmp_path))
    status, out = command(TINY, *GIVEN[:4], arguments=arguments)
    assert status == 2
    check_refusal(" ".join(out.split()), "--lengths-from", "step_N.jsonl", unrecorded="it has a path")
    (tmp_path / "step_1.jsonl").write_text('{"prompt_id": "a"}\n')
    status, out = command(TINY, *GIVEN[:4], arguments=arguments)
    assert status == 2
    check_refusal(" ".join(out.split()), "line 1", "loss_mask", unrecorded="it has a path")
    sample = {"prompt_id": "a", "index": 0, "loss_mask": [0, 1, 1]}
    (tmp_path / "step_1.jsonl").write_text(json.dumps(sample) + "\n")
    status, out = command(TINY, *GIVEN[:4], "simulation.lengths.kind=fixed", arguments=arguments)
    assert status == 2
    check_refusal(" ".join(out.split()), "--lengths-from", "simulation.lengths.kind", "'fixed'", unrecorded="a path")


def test_files_are_checked_before_the_work() -> None:
    for option in ("--json", "--gantt"):
        status, out = command(TINY, *GIVEN, arguments=(option, "/proc/nothing/x"))
        assert status == 2 and "seconds per step" not in out
        check_refusal(" ".join(out.split()).removeprefix("error: "), "/proc/nothing/x")


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (("simulation.foo=1",), ("'simulation.foo'",)),
        ((*GIVEN, "simulation.engine.kv_tokens=71"), ("simulation.engine.kv_tokens", 71, 72)),
        ((*GIVEN, "rollout.embedded.max_total_tokens=71"), ("rollout.embedded.max_total_tokens", 71)),
        (GIVEN[1:2], ("simulation.train", "simulation.publish", "simulation.lengths", "--from")),
        (GIVEN[1:], ("simulation.engine.step_s",)),
        ((*GIVEN, "simulation.engine.step=1"), ("'simulation.engine.step'", "'simulation.engine.step_s'")),
        ((*GIVEN, "simulation.lengths.kind=uniform"), ("simulation.lengths.kind",)),
        (
            (*GIVEN, "simulation.publish.pause_s=1"),
            ("simulation.publish.pause_s", "simulation.publish.seconds", 1, 0.1),
        ),
        ((*GIVEN, "train.stepss=1"), ("'train.stepss'", "'train.steps'")),
    ],
)
def test_what_is_missing_or_unknown_is_refused(settings: tuple[str, ...], facts: tuple[object, ...]) -> None:
    status, out = command(TINY, *settings)
    assert status == 2
    check_refusal(" ".join(out.split()).replace(f"{TINY}: ", "").removeprefix("error: "), *facts)


def test_supervised_training_has_no_loop() -> None:
    status, out = command(ROOT / "configs" / "tiny_sft.toml", *GIVEN[:6])
    assert status == 2
    check_refusal(" ".join(out.split()).removeprefix("error: "), "algorithm.name", "'sft'")


def test_settings_are_the_configuration_s() -> None:
    """Of a cluster's configuration: colocated servers take turns, and a stock server has no limit of its cache."""
    assumed = read_assumptions(
        {
            "engine": {"step_s": 1},
            "train": {},
            "publish": {"seconds": 0},
            "lengths": {"mean": 9, "prompt_tokens": 1},
        }
    )
    config = load_config(CLUSTER)
    found = loop_settings(config, assumed)
    assert (found.groups, found.samples) == (config.train.groups_per_step, config.train.samples_per_group)
    assert found.takes_turns == config.takes_turns and found.kv_tokens is None
    assert found.servers == config.rollout.servers and found.shards == config.parallel.dp
    tiny = loop_settings(load_config(TINY, ["buffer.max_staleness=2"]), assumed)
    assert tiny.in_flight_at_publication and tiny.prompt_per_request and tiny.slots == 512 and tiny.reserves_limit
    assert not loop_settings(load_config(TINY), assumed).prompt_per_request


def test_every_assumption_is_documented() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    assert [key for key in known_keys() if f"`{key.removeprefix('simulation.')}`" not in page] == []
    assert len(known_keys()) > 40 and set(Assumptions.model_fields) <= {k.split(".")[1] for k in known_keys()}
