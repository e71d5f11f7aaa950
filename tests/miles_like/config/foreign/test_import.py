"""Configurations of other projects become one of this project: each key is mapped or has a reason.

Why it must hold: a key that is dropped without a word, or whose default differs here, changes what is trained. The
files in `inputs` are written for this test with the projects' keys; each cites its source. Not covered: whether two
projects train the same weights.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from miles_like.cli import app
from miles_like.config.foreign import prime_rl, slime, verl
from miles_like.config.foreign.reading import read_foreign
from miles_like.config.foreign.report import imported_lines, translated
from miles_like.config.foreign.translation import Rule, Translation
from miles_like.config.load import checked, dotted_keys
from miles_like.config.run import RunConfig
from tests.support.cli_runner import CliRunner
from tests.support.refusals import Facts, check_refusal, refuses

INPUTS = Path(__file__).with_name("inputs")
FILES = sorted(INPUTS.iterdir())


def of(name: str) -> Translation:
    return translated(*read_foreign(INPUTS / name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_is_mapped_or_has_a_reason(path: Path) -> None:
    project, given = read_foreign(path)
    t = translated(project, given)
    assert path.stem.replace("_rl", "-rl").startswith(project)
    mapped = {name for row in t.rows for name in row.theirs.split(" + ")}
    there = {key for key, value in given.items() if value is not None}
    assert there - mapped - t.left.keys() == set() and "no key corresponds" not in t.left.values()
    assert {name for name in mapped if not name.endswith(" (default)")} <= given.keys()


# of an imported file -> what is still to be decided, as `--set`
DECIDED = {
    "verl_ppo": ["cluster.colocate=false", "cluster.nodes=2", "rollout.servers=2"],  # vLLM takes no turns here
    "prime_rl": ["data.train=./a.jsonl", "publish.pause_mode=abort"],
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_printed_is_toml_of_a_run(path: Path) -> None:
    """Except for what the comments leave to the user."""
    assert tomllib.loads("\n".join(imported_lines(path, None))) == of(path.name).tree
    lines = list(imported_lines(path, None, DECIDED.get(path.stem, [])))
    checked(RunConfig, tomllib.loads("\n".join(lines)), "imported")
    assert any("not a valid configuration" in line for line in imported_lines(path, None)) == (path.stem in DECIDED)


VERL = {
    "rollout.max_new_tokens": 6144,
    "train.groups_per_step": 128,
    "train.steps_per_rollout": 4,  # 128 prompts in mini-batches of 32
    "algorithm.clip_low": 0.2,  # verl's clip_ratio
    "algorithm.clip_high": 0.28,
    "algorithm.clip_dual": 3.0,  # verl's default; here: none
    "algorithm.kl_estimator": "k3",  # low_var_kl
    "optimizer.beta2": 0.999,  # verl's default; here: 0.95
    "replay.mode": "r3",
    "parallel.dp": 8,  # 16 GPUs, TP2
    "rollout.servers": 4,  # 16 GPUs, 4 of each
    "kernels.offload_optimizer": 0.5,
    "eval.greedy": False,
    "reward.name": "./rewards/math.py:score",
    "reward.style": "verl",
    "checkpoint.every": 20,
    "eval.every": 0,
}
SLIME = {
    "model.path": "/data/GLM-4.5-Air",
    "rollout.max_new_tokens": 8192,  # $((8 * 1024))
    "train.steps_per_rollout": 2,  # 64 x 8 samples, 256 in a step
    "buffer.over_sampling": 0.5,
    "algorithm.loss": "gspo",
    "algorithm.clip_high": 4e-4,
    "algorithm.filter": "nonzero_std",
    "algorithm.aggregation": "sequence_mean",  # slime's without --calculate-per-token-loss
    "correction.kind": "tis",
    "replay.mode": "r3",
    "parallel.dp": 4,  # 32 GPUs, TP4 x PP2
    "rollout.servers": 4,
    "eval.sets.aime.max_new_tokens": 16384,
    "precision.format": "bf16",
    "data.template": "chat",
}
MILES = {
    "reward.name": "my_project.rewards:last_number",
    "reward.style": "slime",
    "algorithm.advantage": "reinforce_pp",
    "algorithm.kl_in": "reward",
    "lora.alpha": 64,
    "buffer.max_staleness": 2,
    "cluster.nodes": 2,  # 4 GPUs of ranks and 4 of servers, on nodes of 4
    "rollout.servers": 2,
    "algorithm.aggregation": "token_mean",
}
PRIME_RL = {
    "train.groups_per_step": 16,  # 256 samples in groups of 16
    "algorithm.normalize_std": False,
    "buffer.max_staleness": 4,
    "precision.format": "fp8",
    "parallel.dp": 8,  # 16 GPUs, CP2
    "cluster.nodes": 3,
    "rollout.servers": 4,
    "publish.path": "disk",
    "rollout.vllm.gpu_memory_utilization": 0.9,
}
PPO = {
    "data.sources.source1.path": "/data/b.parquet",
    "critic.lr": 9e-6,
    "algorithm.gae_lambda": 0.95,
    "algorithm.kl_in": "reward",
    "algorithm.kl_estimator": "k1",
    "optimizer.beta2": 0.99,
    "publish.path": "disk",
}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("verl_moe.sh", VERL),
        ("verl_ppo.yaml", PPO),
        ("slime_moe.sh", SLIME),
        ("miles_lora.txt", MILES),
        ("prime_rl.toml", PRIME_RL),
    ],
)
def test_a_key_becomes_what_it_means_here(name: str, wanted: dict[str, Any]) -> None:
    assert {key: of(name).ours.get(key) for key in wanted} == wanted


def test_a_value_without_a_counterpart_is_to_be_decided() -> None:
    """A default in its place would be another algorithm."""
    t = of("verl_ppo.yaml")
    assert "algorithm.loss" not in t.ours and any("geo_mean" in line for line in t.to_do)
    assert any(line.startswith("train.steps") for line in t.to_do)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (
            "policy_loss.loss_mode=clip_cov policy_loss.clip_cov_ratio=0.001 policy_loss.clip_cov_ub=4",
            {"loss": "clip_cov", "cov_ratio": 0.001, "cov_low": 1.0, "cov_high": 4, "clip_low": 0.2, "clip_high": 0.2},
        ),
        (
            "policy_loss.loss_mode=kl_cov policy_loss.kl_cov_ratio=0.002 policy_loss.clip_cov_lb=2 clip_ratio_low=0.1",
            {"loss": "kl_cov", "cov_ratio": 0.002, "cov_coefficient": 0.1},  # verl's default; here: 1
        ),
        (
            "policy_loss.loss_mode=vanilla policy_loss.clip_cov_lb=2 tau_pos=1.0 tau_neg=1.05",
            {"loss": "clipped", "clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0},
        ),
    ],
    ids=["clip_cov", "kl_cov", "vanilla"],
)
def test_a_loss_of_verl_has_its_keys_and_no_others(tmp_path: Path, keys: str, wanted: dict[str, Any]) -> None:
    """Of verl/trainer/config/actor/actor.yaml, commit b178a3c. What the loss does not read is left with a reason."""
    model, script = "actor_rollout_ref.model.path=org/m", " ".join(f"{verl.A}.{key}" for key in keys.split())
    (tmp_path / "a.sh").write_text(f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {model} {script}\n")
    t = translated(*read_foreign(tmp_path / "a.sh"))
    ours = {
        key: value for key, value in t.ours.items() if key.startswith(("algorithm.loss", "algorithm.c", "algorithm.t"))
    }
    assert ours == {f"algorithm.{key}": value for key, value in wanted.items()}
    lines = list(imported_lines(tmp_path / "a.sh", None, ["rollout.engine=sglang"]))
    checked(RunConfig, tomllib.loads("\n".join(lines)), "imported")
    assert (t.left.get("actor_rollout_ref.actor.policy_loss.clip_cov_lb") is None) == (wanted["loss"] == "clip_cov")


@pytest.mark.parametrize("project", [verl, slime, prime_rl], ids=lambda module: module.__name__.rpartition(".")[2])
def test_rules_name_keys_of_a_run(project: Any) -> None:
    rules: dict[str, Rule] = project.RULES
    assert {rule.ours for rule in rules.values()} - {""} <= set(dotted_keys(RunConfig))


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("a.sh", "echo hello", ("a.sh", "--name")),
        ("a.yaml", "a: [1", ("a.yaml", "line", 1)),
        ("a.yaml", "a: &x 1\nb: *x", ("a.yaml", 2, "alias")),
        ("a.yaml", "- 1", ("a.yaml",)),
        ("a.toml", "x = ", ("a.toml",)),
        (
            "a.sh",
            "python3 train.py --rollout-batch-size many --global-batch-size 4",
            ("a.sh", "rollout-batch-size", "many"),
        ),
        ("a.sh", "python3 train.py --global-batch-size 4 --kl-coef x", ("a.sh", "kl-coef", "x")),
        ("a.sh", "python3 -m verl.trainer.sft_trainer data.train_files=a optim.lr=1e-5", ("a.sh", "main_ppo")),
        ("a.sh", "python3 train.py --eval-prompt-data 5", ("a.sh", "slime")),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str, facts: Facts) -> None:
    (tmp_path / name).write_text(text)
    with refuses(ValueError, *facts):
        list(imported_lines(tmp_path / name, None))


def test_the_command_prints_toml_that_set_changes(tmp_path: Path) -> None:
    words = ["config", "import", str(INPUTS / "slime_moe.sh"), "--set", "train.steps=7", "--from", "miles"]
    done = CliRunner().invoke(app, words)
    assert (
        done.exit_code == 0
        and tomllib.loads(done.stdout)["train"]["steps"] == 7
        and "# Imported from miles's" in done.stdout
    )
    refused = CliRunner().invoke(app, [*words[:3], "--from", "trl"])
    assert refused.exit_code == 2
    check_refusal(refused.stderr, "trl", "prime-rl")
    check_refusal(CliRunner().invoke(app, ["config", "import", str(tmp_path / "no.sh")]).stderr, tmp_path / "no.sh")
