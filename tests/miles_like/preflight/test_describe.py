"""The first lines of a dry run say the plan with its bytes, for every configuration that is shipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from miles_like.cli import app
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.config.sections.loop import CheckpointConfig
from miles_like.pipeline.stage_names import STAGES
from miles_like.pipeline.stages import StageFunctions, plan_stages
from miles_like.preflight.describe import decimal, describe_checkpoints, describe_plan
from miles_like.run.assemble import known_model, stage_functions
from miles_like.run.setup.run_cluster import RunCluster
from tests.support.cli_runner import CliRunner
from tests.support.refusals import check_refusal

CONFIGS = Path(__file__).parents[3] / "configs"
FP8, BF16 = 673_150_611_808, 1_342_052_868_096  # DeepSeek-V3's 671 B parameters without the draft layer


def functions_of(config: RunConfig) -> StageFunctions:
    cluster = RunCluster(config, Path("run"), Console(quiet=True), None)
    return stage_functions(config, known_model(config), Console(quiet=True), cluster)


def described(name: str, run_dir: Path, *settings: str) -> list[str]:
    config = load_config(CONFIGS / name, list(settings))
    functions = functions_of(config)
    return describe_plan(config, functions.sizes, plan_stages(config, run_dir, functions), STAGES)


def test_deepseek_v3(tmp_path: Path) -> None:
    """Each of 16 nodes has a part of a server, so the whole FP8 checkpoint; of the shards, a pair of nodes has one of
    eight stages, with half of its routed experts each. All that is staged is a third of sixteen times everything."""
    lines = dict(line.split(": ", 1) for line in described("deepseek_v3_fp8.toml", tmp_path / "run"))
    assert list(lines) == ["layout", "nodes", "servers", "bytes", "staged by need", "checkpoints", "disks"]
    assert lines["layout"] == "TP8 x PP8 x CP1 x DP2, EP16 x ETP1: 128 trainer ranks"
    assert lines["nodes"] == "16 x 8 GPUs: 16 with trainer ranks, 16 with rollout servers, 16 with both"
    assert lines["servers"] == "4 x sglang, each of 32 GPUs over 4 nodes"
    assert lines["bytes"] == "fetch 673 GB, dequantize 1.34 TB, convert 1.34 TB, stage 12.1 TB"
    assert re.match(r"nodes 0-1: 725 GB \(served 673 GB, shards 52.3 GB\); nodes 2-13: 767 GB", lines["staged by need"])
    # 14 bytes a parameter: BF16 weights, FP32 masters and two moments
    assert lines["checkpoints"] == (
        "one is 9.39 TB, every 20 steps, keeps the last 2: at most 3 with the one being written, 28.2 TB"
    )
    assert lines["disks"].startswith(f"{tmp_path}/cache 3.36 TB, {tmp_path} 28.2 TB, /local_nvme/miles-like of each")
    functions = functions_of(load_config(CONFIGS / "deepseek_v3_fp8.toml"))
    assert functions.sizes is not None
    nodes = functions.sizes.nodes
    assert (functions.sizes.fetched, functions.sizes.bf16) == (FP8, BF16)
    # an expert is on one node, everything else of a stage on both nodes of the stage
    assert BF16 < sum(n.shards for n in nodes) < 1.05 * BF16 and {n.served for n in nodes} == {FP8}


def test_servers_on_their_own_nodes_need_no_shards_and_ranks_no_checkpoint(tmp_path: Path) -> None:
    settings = ("cluster.colocate=false", "cluster.nodes=32")
    lines = dict(line.split(": ", 1) for line in described("deepseek_v3_fp8.toml", tmp_path, *settings))
    assert lines["nodes"] == "32 x 8 GPUs: 16 with trainer ranks, 16 with rollout servers, 0 with both"
    assert "nodes 16-31: 673 GB (served 673 GB, shards 0 B)" in lines["staged by need"]
    assert "nodes 0-1: 52.3 GB (served 0 B, shards 52.3 GB)" in lines["staged by need"]


def test_nodes_of_a_cluster_may_have_their_own_disks(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "deepseek_v3_fp8.toml")
    functions = functions_of(config)
    planned = plan_stages(config, tmp_path / "run", functions)
    *_, line = describe_plan(config, functions.sizes, planned, STAGES, joins_cluster=True)
    assert line.endswith(f"/local_nvme/miles-like of each node that does not see {tmp_path}/cache up to 85.0 GB more")
    assert describe_plan(config, functions.sizes, planned, ["train"], joins_cluster=True)[-1].count("of each node") == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_every_configuration_is_said_in_few_lines(path: Path, tmp_path: Path) -> None:
    lines = described(path.name, tmp_path)
    assert len(lines) <= 10 and all("\n" not in line for line in lines)
    assert {"layout", "nodes", "servers", "bytes", "checkpoints", "disks"} <= {x.split(":")[0] for x in lines}


def test_the_command_says_it_first(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(CONFIGS / "tiny.toml"), "--run-dir", str(tmp_path / "r"), "--dry-run"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("layout: TP1 x PP1") and lines[lines.index("") + 1].strip().startswith("cache")


def test_the_configuration_is_printed_where_it_is_asked_for(tmp_path: Path) -> None:
    """After the plan, and of it what differs from the defaults."""
    words = ["train", str(CONFIGS / "tiny.toml"), "--run-dir", str(tmp_path / "r")]
    plan = CliRunner().invoke(app, [*words, "--dry-run"]).stdout
    asked = CliRunner().invoke(app, [*words, "--dry-run", "--show-config", "--set", "train.steps=3"]).stdout
    assert "[train]" not in plan and "steps = 3 " in asked and "groups_per_step" not in asked
    assert asked.index("[model]") > asked.index("environment of a trainer rank")
    refused = CliRunner().invoke(app, [*words, "--show-config"])
    assert refused.exit_code == 2
    check_refusal(refused.stderr, "--show-config", "--dry-run")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": 20}, "every 20 steps, keeps the last 2: at most 3 with the one being written, 30.0 GB"),
        ({"every": 20, "keep": 1, "keep_every": 50}, "keeps the last 1 and those of every 50 steps: at most 3 with"),
        ({"every": 20, "keep_best": "eval/x/avg@1"}, "the best by eval/x/avg@1: at most 4 with"),
        ({}, "one is 10.0 GB, after the last step, keeps the last 2: at most 1 with the one being written, 10.0 GB"),
    ],
)
def test_checkpoints_and_what_is_kept_of_them(settings: dict[str, object], expected: str) -> None:
    """Of a run of 100 steps: a multiple of 20 and 50 is step 100 alone."""
    assert expected in describe_checkpoints(CheckpointConfig.model_validate(settings), 100, 10_000_000_000)
    assert "adapters" in describe_checkpoints(CheckpointConfig.model_validate(settings), 100, None)


def test_decimal() -> None:
    assert [decimal(n) for n in (0, 999, 1000, 99_960, 671_000_000_000, 9_394_000_000_000, 999_600)] == [
        "0 B", "999 B", "1.00 kB", "100 kB", "671 GB", "9.39 TB", "1.00 MB",
    ]  # fmt: skip
