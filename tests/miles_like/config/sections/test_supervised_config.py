"""Keys of runs on given answers: one that has no effect without a rollout, or with another objective, is refused, and
the message names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.cluster.placement import plan_placement
from miles_like.config.load import load_config
from miles_like.config.ranks import trainer_config
from miles_like.run.assemble import describe_processes, known_model
from tests.support.refusals import Facts, refuses

CONFIGS = Path(__file__).parents[4] / "configs"


@pytest.mark.parametrize(
    ("name", "setting", "facts"),
    [
        (
            "tiny_sft",
            "replay.mode=r3",
            ("replay.mode", "r3", "algorithm.name", "sft", "off"),
        ),
        ("tiny_sft", "rollout.embedded.threads=1", ("rollout.embedded.threads", 1)),
        ("tiny_sft", "train.samples_per_group=4", ("train.samples_per_group", 4)),
        ("tiny_sft", "buffer.max_staleness=1", ("buffer.max_staleness", 1)),
        ("tiny_sft", "reward.name=gsm8k", ("reward.name", "gsm8k")),
        ("tiny_sft", "eval.samples=4", ("eval.samples", 4)),
        ("tiny_sft", "eval.sets={more={path='x.jsonl',greedy=true}}", ("eval.sets.more.greedy", "True")),
        ("tiny_sft", "algorithm.clip_low=0.3", ("algorithm.clip_low", 0.3)),
        ("tiny_sft", "alignment.deterministic=true", ("alignment.deterministic", "True")),
        ("tiny_sft", "supervised.beta=0.3", ("supervised.beta", 0.3, "algorithm.name", "dpo")),
        ("tiny_dpo", "supervised.aggregation=sequence_mean", ("supervised.aggregation", "algorithm.name", "sft")),
        ("tiny_sft", "data.epochs=2", ("data.epochs", 2)),
        ("tiny_sft", "data.decontaminate=drop", ("data.decontaminate", "drop")),
        ("tiny_sft", "data.curriculum.max_pass_rate=0.9", ("data.curriculum",)),
        ("tiny_kto", "train.groups_per_step=1", ("train.groups_per_step", 1, "kto")),
        ("tiny_kto", "train.mtp_coefficient=0.1", ("train.mtp_coefficient", 0.1)),
        ("tiny_kto", "supervised.margin=1", ("supervised.margin", 1.0, "simpo", "kto")),
        ("tiny_simpo", "supervised.loss=ipo", ("supervised.loss", "ipo", "dpo", "simpo")),
        ("tiny_orpo", "supervised.label_smoothing=0.1", ("supervised.label_smoothing", 0.1, "orpo")),
        ("tiny_process_reward", "supervised.beta=0.2", ("supervised.beta", 0.2)),
        ("tiny_process_reward", "supervised.chosen_key=x", ("supervised.chosen_key", "x", "process_reward")),
        ("tiny_sft", "supervised.steps_key=x", ("supervised.steps_key", "x", "process_reward")),
        ("tiny_orpo", "data.answer_key=x", ("data.answer_key", "x")),
        ("tiny_dpo", "data.answer_key=x", ("data.answer_key", "x")),
        ("tiny_dpo", "train.mtp_coefficient=0.1", ("train.mtp_coefficient", 0.1)),
        ("tiny_reward_model", "supervised.beta=0.2", ("supervised.beta", 0.2)),
        ("tiny", "supervised.chosen_key=x", ("supervised.chosen_key", "x", "algorithm.name", "grpo")),
    ],
)
def test_what_does_nothing_is_refused(name: str, setting: str, facts: Facts) -> None:
    with refuses(ValueError, *facts) as refused:
        load_config(CONFIGS / f"{name}.toml", [setting])
    assert "\n" not in str(refused.value)


def test_ipo_has_no_label_smoothing() -> None:
    settings = ["supervised.loss=ipo", "supervised.label_smoothing=0.1"]
    with refuses(ValueError, "supervised.label_smoothing", 0.1, "supervised.loss", "ipo"):
        load_config(CONFIGS / "tiny_dpo.toml", settings)


def test_a_configuration_whose_sides_take_turns_becomes_a_supervised_one() -> None:
    """`false` for what belongs to the rollout: its GPUs are the trainer's alone."""
    path, settings = CONFIGS / "qwen3_4b.toml", ["algorithm=sft", "rollout=false", "reward=false"]
    config = load_config(path, [*settings, "cluster.colocate=false"])
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    assert len(plan.of("trainer")) == 8 and not plan.of("rollout") and not config.takes_turns
    with pytest.raises(ValueError, match=r"cluster\.colocate = True"):
        load_config(path, settings)


def test_no_server_is_planned_and_no_route_replayed() -> None:
    """Replay needs no key; DPO keeps the weights that the run began with."""
    config = load_config(CONFIGS / "tiny_dpo.toml")
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    assert config.servers is None and not plan.of("rollout") and len(plan.of("trainer")) == 2
    assert "rollout server none" in "\n".join(
        describe_processes(config, Path("run"), known_model(config), Path("run") / "stage-1")
    )
    trainer = trainer_config(config, Path("hf"))
    assert trainer.reference and trainer.replay.mode == "off" and trainer.temperature == 1.0
    assert trainer_config(load_config(CONFIGS / "tiny_kto.toml"), Path("hf")).reference
    for name in ("tiny_orpo", "tiny_simpo"):
        assert not trainer_config(load_config(CONFIGS / f"{name}.toml"), Path("hf")).reference
    assert trainer_config(load_config(CONFIGS / "tiny_process_reward.toml"), Path("hf")).head == "scalar"
    assert trainer.head == "lm" and not trainer_config(load_config(CONFIGS / "tiny_sft.toml"), Path("hf")).reference
    assert trainer_config(load_config(CONFIGS / "tiny_reward_model.toml"), Path("hf")).head == "scalar"
