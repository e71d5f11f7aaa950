"""Keys of runs on given answers: what does nothing without a rollout, or with another objective, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.assemble import describe_processes
from miles_like.config_io import load_config
from miles_like.placement import plan_placement
from miles_like.rank_configs import trainer_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        (
            "tiny_sft",
            "replay.mode=r3",
            "replay.mode = 'r3' does nothing with algorithm.name = 'sft', .* set it to 'off'",
        ),
        ("tiny_sft", "rollout.embedded.threads=1", "rollout.embedded.threads = 1 does nothing"),
        ("tiny_sft", "train.samples_per_group=4", "train.samples_per_group = 4 does nothing"),
        ("tiny_sft", "buffer.max_staleness=1", "buffer.max_staleness = 1 does nothing"),
        ("tiny_sft", "reward.name=gsm8k", "reward.name = 'gsm8k' does nothing"),
        ("tiny_sft", "eval.samples=4", "eval.samples = 4 does nothing"),
        ("tiny_sft", "eval.sets={more={path='x.jsonl',greedy=true}}", "eval.sets.more.greedy = True does nothing"),
        ("tiny_sft", "algorithm.clip_low=0.3", "algorithm.clip_low = 0.3 does nothing"),
        ("tiny_sft", "alignment.deterministic=true", "alignment.deterministic = True does nothing"),
        ("tiny_sft", "supervised.beta=0.3", "supervised.beta = 0.3 does nothing with .* set algorithm.name = 'dpo'"),
        ("tiny_dpo", "supervised.aggregation=sequence_mean", "supervised.aggregation = .* set algorithm.name = 'sft'"),
        ("tiny_sft", "data.epochs=2", "data.epochs = 2 does nothing"),
        ("tiny_sft", "data.decontaminate=drop", "data.decontaminate = 'drop' does nothing"),
        ("tiny_sft", "data.curriculum.max_pass_rate=0.9", "data.curriculum = .* does nothing"),
        ("tiny_dpo", "data.answer_key=x", "data.answer_key = 'x' does nothing"),
        ("tiny_dpo", "train.mtp_coefficient=0.1", "train.mtp_coefficient = 0.1 does nothing"),
        ("tiny_reward_model", "supervised.beta=0.2", "supervised.beta = 0.2 does nothing"),
        ("tiny", "supervised.chosen_key=x", "supervised.chosen_key = 'x' does nothing with algorithm.name = 'grpo'"),
    ],
)
def test_what_does_nothing_is_refused(name: str, setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        load_config(CONFIGS / f"{name}.toml", [setting])
    assert "\n" not in str(refused.value)


def test_ipo_has_no_label_smoothing() -> None:
    settings = ["supervised.loss=ipo", "supervised.label_smoothing=0.1"]
    with pytest.raises(ValueError, match=r"label_smoothing = 0\.1 does nothing with supervised\.loss = 'ipo'"):
        load_config(CONFIGS / "tiny_dpo.toml", settings)


def test_no_server_is_planned_and_no_route_replayed() -> None:
    """Replay needs no key; DPO keeps the weights that the run began with."""
    config = load_config(CONFIGS / "tiny_dpo.toml")
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    assert config.servers is None and not plan.of("rollout") and len(plan.of("trainer")) == 2
    assert "rollout server none" in "\n".join(describe_processes(config, Path("run")))
    trainer = trainer_config(config, Path("hf"))
    assert trainer.reference and trainer.replay.mode == "off" and trainer.temperature == 1.0
    assert trainer.head == "lm" and not trainer_config(load_config(CONFIGS / "tiny_sft.toml"), Path("hf")).reference
    assert trainer_config(load_config(CONFIGS / "tiny_reward_model.toml"), Path("hf")).head == "scalar"
