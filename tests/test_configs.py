"""Every configuration shipped is one that a run would take: it loads, its layout fits, its engine can serve."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from megatron_bridge.config import TrainerConfig
from megatron_bridge.plan.layout import check_layout
from megatron_bridge.plan.precision import served_spec
from miles_like.config.load import dump_config, load_config
from miles_like.config.ranks import critic_config, trainer_config
from miles_like.pipeline.first_layers import shortened
from miles_like.run.assemble import describe_processes, known_model
from miles_like.run.setup.engine_support import check_engine
from tests.support.refusals import refuses

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_configuration_plans(path: Path, tmp_path: Path) -> None:
    """What `--dry-run` does after reading: kernels, precision, placement and the servers' commands are all resolved."""
    config = load_config(path)
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config
    hf_path = Path(config.model.config or config.model.make.config)
    hf = json.loads(hf_path.read_text())
    if config.model.first_layers is not None:
        hf = shortened(hf, config.model.first_layers)
    check_layout(config.parallel, hf)
    check_engine(config.rollout, config.precision, hf)
    assert served_spec(config.precision, hf) is None or config.precision.format != "bf16"
    assert describe_processes(config, tmp_path, known_model(config), tmp_path / "stage-1")


@pytest.mark.parametrize("name", ["tiny", "qwen3_30b_a3b_fp8"])
def test_a_dry_run_prints_the_environment_of_each_kind_of_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables and the defaults; of a secret its name, wherever its value is set."""
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-hub")
    settings = ["algorithm.name=ppo", "cluster.env.NCCL_DEBUG=INFO", "rollout.env.HF_TOKEN="]
    config = load_config(CONFIGS[0].with_name(f"{name}.toml"), settings)
    lines = describe_processes(config, tmp_path, known_model(config), tmp_path / "stage-1")
    found = {line.split()[3]: set(line.split(" ")) for line in lines if line.startswith("environment of")}
    assert set(found) == {"trainer", "critic", "rollout"}
    assert "NCCL_DEBUG=INFO" in found["trainer"] & found["critic"] and "NCCL_DEBUG=INFO" not in found["rollout"]
    assert "HF_TOKEN=(from" in found["rollout"] and "HF_TOKEN=(from" not in found["trainer"]
    assert all("NCCL_SOCKET_IFNAME=(interface" in words for words in found.values())
    assert "a-secret" not in "\n".join(lines) + dump_config(config)


def test_servers_that_differ_in_their_places_are_one_command_that_can_be_copied(tmp_path: Path) -> None:
    """With their number, and the files where the run will have them."""
    config = load_config(CONFIGS[0].with_name("qwen3_30b_a3b.toml"))
    lines = describe_processes(config, tmp_path, known_model(config), tmp_path / "cache" / "stage-1f")
    (at,) = [n for n, line in enumerate(lines) if line.startswith("rollout server: ")]
    assert lines[at].startswith(
        "rollout server: 8 x, --host $NODE0, $NODE0, ..., $NODE1, --port 30000, 30001, ..., 30007"
    )
    words = shlex.split(lines[at + 1])
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"] and sum("sglang" in line for line in lines) == 1
    assert words[words.index("--model-path") + 1] == "/local_nvme/miles-like/stage-1f/hf"
    assert not any("..." in word for word in words)
    alone = load_config(CONFIGS[0].with_name("tiny.toml"), ["rollout.servers=2"])
    lines = describe_processes(alone, tmp_path, known_model(alone), tmp_path / "a b" / "stage-1f")
    (at,) = [n for n, line in enumerate(lines) if line.startswith("rollout server: 2 x, --port")]
    assert str(tmp_path / "a b" / "stage-1f" / "data" / "hf") in shlex.split(lines[at + 1])
    assert "$" not in lines[at + 1]


def test_the_order_of_a_turn_is_printed_where_turns_are_taken(tmp_path: Path) -> None:
    """In one line; and the servers are started so that their memory can be released."""
    for name, settings, turns in (
        ("deepseek_v3_fp8", [], True),
        ("deepseek_v3_fp8", ["cluster.colocate=false", "cluster.nodes=32"], False),
        ("tiny", [], False),
        ("tiny", ["cluster.colocate=true"], True),
    ):
        config = load_config(CONFIGS[0].with_name(f"{name}.toml"), settings)
        lines = describe_processes(config, tmp_path, known_model(config), tmp_path / "stage-1")
        assert sum(line.startswith("turns: ") for line in lines) == turns
    stock = load_config(CONFIGS[0].with_name("qwen3_30b_a3b.toml"), ["rollout.sglang={tp_size=8}", "rollout.servers=2"])
    assert any(
        "--enable-memory-saver" in line
        for line in describe_processes(stock, tmp_path, known_model(stock), tmp_path / "stage-1")
    )


@pytest.mark.parametrize("name", ["tiny", "tiny_int4_qat", "qwen3_30b_a3b_fp8", "deepseek_v3_fp8"])
def test_a_critic_beside_any_of_them(name: str, tmp_path: Path) -> None:
    """Whatever the policy is rounded, adapted or replayed to, the critic is a model that its ranks can build."""
    settings = ["algorithm.name=ppo", "critic.lr=1e-3"]
    config = load_config(CONFIGS[0].with_name(f"{name}.toml"), settings)
    assert "a rank of the critic beside each" in "\n".join(
        describe_processes(config, tmp_path, known_model(config), tmp_path / "stage-1")
    )
    trainer = trainer_config(config, tmp_path)
    critic = critic_config(config, trainer)
    assert critic is not None and TrainerConfig.model_validate(critic.model_dump()) == critic
    assert (critic.head, critic.optimizer.lr, critic.replay.mode, critic.lora.rank) == ("scalar", 1e-3, "off", 0)
    assert critic.parallel == trainer.parallel
    plain = load_config(CONFIGS[0].with_name(f"{name}.toml"))
    assert critic_config(plain, trainer) is None
    with refuses(ValueError, "critic.lr", 1e-09, "optimizer.min_lr", 1e-07):
        load_config(
            CONFIGS[0].with_name(f"{name}.toml"),
            [*settings, "critic.lr=1e-9", "optimizer.min_lr=1e-7", "optimizer.schedule=cosine"],
        )
