"""`miles-like plan` says how long a step takes, and with --search writes the best layout that it finds.

Not covered: predictions and rankings, which tests/miles_like/timing and tests/miles_like/layout_search hold.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from miles_like.cli import app
from miles_like.config.load import load_config
from tests.support.cli_runner import CliRunner
from tests.support.refusals import check_refusal

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/qwen3_4b.toml"  # dense: its search is short


def planned(*options: str | Path, config: Path = CONFIG) -> Result:
    return CliRunner().invoke(app, ["plan", str(config), *map(str, options)])


def step_s(where: Path, *options: str) -> dict[str, float]:
    done = planned("--json", where / "plan.json", *options)
    assert done.exit_code == 0, done.output
    found: dict[str, float] = json.loads((where / "plan.json").read_text())["step_s"]
    return found


def test_the_plan_has_the_seconds_of_a_step(tmp_path: Path) -> None:
    """The total is the sum of the phases of a synchronous run, and each phase is the sum of its terms."""
    found = step_s(tmp_path)
    phases = [name for name in found if ":" not in name and name != "total"]
    assert {"rollout", "train", "turns", "publish"} <= set(phases)
    assert found["total"] == pytest.approx(sum(found[name] for name in phases))
    for phase in phases:
        terms = sum(seconds for name, seconds in found.items() if name.startswith(f"{phase}: "))
        assert found[phase] == pytest.approx(terms)
    out = planned().output
    assert "Predicted step time in seconds" in out and f"{found['total']:,.0f} s, limited by" in out


def test_the_disk_is_that_of_the_stages(tmp_path: Path) -> None:
    """Of Qwen3-4B, 8.04 GB in BF16: fetched, converted, checkpoints of seven times that, and staged on each node."""
    planned("--json", tmp_path / "plan.json")
    found, bf16 = json.loads((tmp_path / "plan.json").read_text())["disk_gib"], 8.04e9 / (1 << 30)
    assert found["shared"]["fetch"] == found["shared"]["convert"] == pytest.approx(bf16, rel=0.01)
    assert found["checkpoint"] == pytest.approx(7 * bf16, rel=0.01)
    assert sum(found["node"].values()) >= bf16 and found["node_disk"] == pytest.approx(30.72e12 / (1 << 30), rel=0.1)


def test_what_is_known_of_the_data_changes_the_seconds(tmp_path: Path) -> None:
    usual = step_s(tmp_path)
    longer = step_s(tmp_path, "--prompt", "1000", "--response", "6000")
    remote = ("reward.name=remote", "reward.remote.url=http://127.0.0.1:9", "reward.concurrency=100000")
    at_once = (*(word for key in remote for word in ("--set", key)), "--reward-seconds", "50")
    scored, queued = step_s(tmp_path, *at_once), step_s(tmp_path, "--reward-seconds", "50")
    assert longer["train"] > usual["train"] and longer["rollout"] > usual["rollout"]
    assert scored["reward"] == 50.0 and scored["rollout"] == usual["rollout"]
    assert queued["reward"] > 50.0  # calls wait for each other
    faster = step_s(tmp_path, "--device", "B200")
    assert faster["train"] < usual["train"] and faster["rollout"] < usual["rollout"]


def test_what_the_seconds_leave_out_is_named(tmp_path: Path) -> None:
    """A critic's work; and all of a run without a rollout, which publishes nothing."""
    critic = planned("--set", "algorithm.name=ppo")
    assert critic.exit_code == 0 and "not included in these seconds: the critic's passes and steps" in critic.output
    assert "not included in these seconds" not in planned().output
    tuned = planned("--json", tmp_path / "plan.json", config=_supervised(tmp_path))
    assert "no step time" in tuned.output and "algorithm.name = 'sft'" in tuned.output
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["step_s"] is None and all("publishing" not in stage["phases"] for stage in found["stages"])


def _supervised(where: Path) -> Path:
    """A run on GPUs that trains on given answers."""
    path = where / "sft.toml"
    config = ROOT / "configs/qwen3_4b/config.json"
    path.write_text(
        f"""
[model]
path = "Qwen/Qwen3-4B"
config = "{config}"
[data]
train = "x.jsonl"
[parallel]
dp = 8
[algorithm]
name = "sft"
[cluster]
gpus_per_node = 8
"""
    )
    return path


def test_adapters_have_few_gradients(tmp_path: Path) -> None:
    """Their optimizer's step and their gradients take less of a step than those of all weights."""
    local = ("--set", "kernels.rope_fusion=false", "--set", "kernels.spec=local")
    whole, adapters = step_s(tmp_path, *local), step_s(tmp_path, *local, "--set", "lora.rank=16")
    assert adapters["train: optimizer"] < 0.1 * whole["train: optimizer"]


def test_experts_on_every_rank_are_planned() -> None:
    """Without tensor-, pipeline- or expert-parallel ranks nothing is gathered for a publication."""
    layout = ("parallel.tp=1", "parallel.dp=8", "parallel.ep=1")
    done = planned(
        "--device",
        "H200",
        *(word for key in layout for word in ("--set", key)),
        config=ROOT / "configs/moonlight_16b_a3b.toml",
    )
    assert done.exit_code == 0 and "fits" in done.output, done.output


def test_a_search_divides_the_gpus_of_the_configuration() -> None:
    """Of one GPU there is one division; pools, which it would not keep, are refused."""
    done = planned("--search", config=ROOT / "configs/qwen3_0_6b.toml")
    assert done.exit_code == 0 and "one rank" in done.output
    pools = ("cluster.nodes=2", 'cluster.pools.trainer.nodes="0"')
    done = planned("--search", *(word for key in pools for word in ("--set", key)))
    assert done.exit_code == 2
    check_refusal(done.output, "cluster.pools.trainer", "cluster.pools")


def test_a_run_on_cpu_ranks_has_no_seconds(tmp_path: Path) -> None:
    done = planned("--json", tmp_path / "plan.json", config=ROOT / "configs/tiny.toml")
    assert done.exit_code == 0 and "Predicted step time" not in done.output
    assert json.loads((tmp_path / "plan.json").read_text())["step_s"] is None


def test_the_search_writes_a_configuration_that_runs(tmp_path: Path) -> None:
    """It is planned again from its file, with the seconds that the search predicted."""
    chosen, listed = tmp_path / "best.toml", tmp_path / "search.json"
    done = planned("--search", "--write", chosen, "--json", listed)
    assert done.exit_code == 0, done.output
    assert "Layouts by predicted speed" in done.output and "rejected by" in done.output
    first = json.loads(listed.read_text())["layouts"][0]
    run = load_config(chosen)
    assert run.cluster.nodes == load_config(CONFIG).cluster.nodes
    again = CliRunner().invoke(app, ["plan", str(chosen), "--json", str(tmp_path / "plan.json")])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "plan.json").read_text())["step_s"] == pytest.approx(first["step_s"])


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (("--nodes", "4"), ("--nodes", 4, "--search")),
        (("--by", "cost"), ("--by", "cost", "--search")),
        (("--search", "--by", "price"), ("--by", "price", "cost")),
        (("--search", "--nodes", "2,x"), ("--nodes", "2,x")),
        (("--search", "--nodes", "0"), ("--nodes", 0)),
        (("--formats", "fp8"), ("--formats", "fp8", "--search")),
        (("--search", "--formats", "fp7"), ("--formats", "fp7", "fp8")),
        (("--response", "100000"), (100000,)),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: tuple[str, ...], facts: tuple[object, ...]) -> None:
    done = planned(*options)
    assert done.exit_code == 2
    check_refusal(done.stderr, *facts)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (("--response", "99999"), ("99999", 8192)),
        (("--json", "/proc/nothing/x"), ("/proc/nothing/x",)),
        (("--search", "--write", "/proc/nothing/x"), ("/proc/nothing/x",)),
    ],
)
def test_options_are_checked_before_anything_is_printed(options: tuple[str, ...], facts: tuple[object, ...]) -> None:
    done = planned(*options)
    assert done.exit_code == 2
    assert done.output.startswith("error: ") and done.output.count("\n") == 1, done.output
    check_refusal(" ".join(done.output.split()).removeprefix("error: "), *facts)
