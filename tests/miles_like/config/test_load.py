"""Configuration in and out, and every shipped configuration."""

from pathlib import Path

import pytest

from miles_like.cluster.placement import plan_placement
from miles_like.config.load import dump_config, load_config, parse_override
from miles_like.config.ranks import trainer_config
from miles_like.config.sections.flat import values
from tests.support.made_samples import packed, sample
from tests.support.refusals import Facts, refuses

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "tiny.toml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_configuration_loads_places_and_comes_back(path: Path, tmp_path: Path) -> None:
    """A recipe that does not validate costs its user a cluster's start. Not covered: whether it trains well."""
    config = load_config(path)
    plan = plan_placement(config.cluster, config.parallel, config.rollout)
    assert len(plan.of("trainer")) == config.parallel.world_size
    copy = tmp_path / "config.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("train.stps=3", ("train.stps", "train.steps")),
        ("trian.steps=3", ("trian", "train")),
        ("model.make.sed=1", ("model.make.sed", "model.make.seed")),
        ("steps=3", ("steps", "train.steps")),
        ("temperature=3", ("rollout.temperature", "eval.temperature")),
        ("data=false", ("data",)),
        ("rollout.embedded.thread=1", ("rollout.embedded.thread", "rollout.embedded.threads")),
        ("train.steps=-1", ("train.steps", 0, -1)),
        ("parallel.ep=3", ("parallel.ep", "parallel.etp", 3, 2)),
        ("replay.mode=r4", ("replay.mode",)),
        ("replay={mode='off',gates=true}", ("replay.gates", "replay.mode", "off")),
        ("train.steps_per_rollout=3", ("train.steps_per_rollout", 3, "train.groups_per_step", 64)),
        ("nonsense", ("section.key",)),
        ("rollout.environment=a:b", ("rollout.environment", "a:b", "rollout.max_turns")),
        ("rollout.max_turns=2", ("rollout.max_turns", 2, "rollout.environment")),
        ("rollout.episode_timeout_s=2", ("rollout.episode_timeout_s", 2, "rollout.environment")),
        ("rollout.environment_threads=2", ("rollout.environment_threads", 2, "rollout.environment")),
        ("rollout.environment_timeout_s=2", ("rollout.environment_timeout_s", 2, "rollout.environment")),
        ("rollout={generate='a:b',max_turns=2}", ("rollout.max_turns", 2, "rollout.environment")),
        ("rollout={generate='a:b',environment='a:b'}", ("rollout.generate", "rollout.environment")),
        ("rollout={generate='a:b',max_episode_tokens=4}", ("rollout.max_new_tokens", 5)),
        ("rollout={generate='a:b',max_episode_tokens=9000}", ("rollout.max_episode_tokens", 9000)),
        ("rollout={generate='a:b',max_episode_tokens=900}", (1412, "rollout.embedded.context_length")),
        ("precision.format=bf16", ("precision.qat", "precision.format", "bf16")),
        ("precision.format=int5", ("precision.format",)),
        ("precision.activations=int8", ("precision.activations",)),
    ],
)
def test_a_wrong_override_says_what_where_and_the_nearest_key(override: str, facts: Facts) -> None:
    with refuses(ValueError, *facts) as e:
        load_config(TINY, [override])
    assert "\n" not in str(e.value)


def test_a_path_beside_an_inherited_make_is_refused(tmp_path: Path) -> None:
    """The run would make and train the inherited model, whatever the path says. A layer that says what is made instead
    names it as well, and `model.make = false` drops it."""
    for path in ("owner/does-not-exist", "gpt2", str(tmp_path)):
        with refuses(ValueError, "--set", "model.path", "[model.make]", "tiny-deepseek-v3", "model.make"):
            load_config(TINY, [f"model.path={path}"])
        for order in ([f"model.path={path}", "model.make=false"], ["model.make=false", f"model.path={path}"]):
            model = load_config(TINY, order).model
            assert model.path == path and model.make is None
    child = tmp_path / "child.toml"
    child.write_text(f'extends = "{TINY}"\n[model]\npath = "Qwen/Qwen3-0.6B"\n')
    with refuses(ValueError, "child.toml", "model.path", "Qwen/Qwen3-0.6B"):
        load_config(child)
    child.write_text(f'extends = "{TINY}"\n[model]\npath = "Qwen/Qwen3-0.6B"\nmake = false\n')
    assert load_config(child).model.make is None
    make = load_config(TINY, ["model.path=renamed", "model.make.config=other.json"]).model
    assert make.path == "renamed" and make.make is not None
    both = tmp_path / "both.toml"
    both.write_text(dump_config(load_config(TINY)).replace('path = "tiny-deepseek-v3"', 'path = "Qwen/Qwen3-0.6B"'))
    with refuses(ValueError, "model.path", "Qwen/Qwen3-0.6B", "[model.make]"):
        load_config(both)


def test_a_child_drops_what_it_inherits(tmp_path: Path) -> None:
    """`false` drops a section or an entry of a table of sections; a section that is not there may be dropped too."""
    base, child = tmp_path / "base.toml", tmp_path / "child.toml"
    sets = '[eval.sets.a]\npath = "a.jsonl"\n[eval.sets.b]\npath = "b.jsonl"\n'
    base.write_text(f'extends = "{TINY}"\n{sets}[rollout.sglang]\ntp_size = 2\n')
    child.write_text(
        'extends = "base.toml"\n[eval.sets]\na = false\n[rollout]\nsglang = false\n[data]\ncurriculum = false\n'
    )
    found = load_config(child)
    assert list(found.eval.sets) == ["b"] and found.rollout.sglang.tp_size == 1 and found.data.curriculum is None
    assert list(load_config(base, ["eval.sets.b=false"]).eval.sets) == ["a"]
    assert not load_config(base, ["eval.sets=false"]).eval.sets
    assert load_config(base, ["precision.qat=false"]).precision.qat is False


def test_false_unsets_an_optional_key_that_is_no_truth_value(tmp_path: Path) -> None:
    """So that a child evaluates nothing, or stages where the run directory is."""
    child = tmp_path / "child.toml"
    child.write_text(f'extends = "{TINY}"\n[data]\neval = false\n[cluster]\nstage_dir = false\n')
    config = load_config(child)
    assert config.data.eval is None and config.eval_sets == () and config.cluster.stage_dir is None
    assert load_config(TINY, ["cluster.colocate=false"]).cluster.colocate is False
    with refuses(ValueError, "train.on_nonfinite", False):
        load_config(TINY, ["train.on_nonfinite=false"])
    assert (
        load_config(TINY, ["algorithm.clip_dual=3", "algorithm.clip_dual=false"]).algorithm
        == load_config(TINY).algorithm
    )


def test_the_schedule_ends_with_the_last_optimizer_step() -> None:
    """Learning rates are of optimizer steps; a run of 10 rollouts with 4 of them each has 40."""
    changes = ["train.steps=10", "train.steps_per_rollout=4", "optimizer.schedule=linear", "optimizer.warmup_steps=20"]
    assert trainer_config(load_config(TINY, changes), CONFIGS).optimizer.decay_steps == 40
    with refuses(ValueError, "decay_steps", 10):
        load_config(TINY, [c for c in changes if "rollout" not in c])


def test_four_bits_that_the_trainer_does_not_know_of_are_asked_for_explicitly() -> None:
    changes = ["precision.format=int4", "precision.qat=false"]
    with refuses(ValueError, "precision.qat", "precision.allow_without_qat"):
        load_config(TINY, changes)
    assert load_config(TINY, [*changes, "precision.allow_without_qat=true"]).precision.spec() is not None


def test_extends_merges_by_section_and_paths_are_relative_to_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    elsewhere = TINY.read_text().replace('"./tiny', f'"{CONFIGS}/tiny').replace('"tiny/', f'"{CONFIGS}/tiny/')
    (tmp_path / "base" / "base.toml").write_text(elsewhere)
    (tmp_path / "child.toml").write_text(
        'extends = "base/base.toml"\n[data]\ntrain = "./mine.jsonl"\n[train]\nsteps = 7\n'
    )
    config = load_config(tmp_path / "child.toml")
    assert config.data.train == str(tmp_path / "mine.jsonl")
    assert config.data.eval == f"{CONFIGS}/tiny/heldout.jsonl"
    assert (config.train.steps, config.train.groups_per_step) == (7, 64)


def test_a_relative_path_keeps_a_symbolic_link(tmp_path: Path) -> None:
    """The Python of a virtual environment is one, and its target finds other packages."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "python").symlink_to("/usr/bin/env")
    (tmp_path / "run.toml").write_text(
        f'extends = "{TINY}"\nrollout.engine = "sglang"\nrollout.sglang.python = "./engine/python"\n'
    )
    python = load_config(tmp_path / "run.toml", ["replay.mode=off"]).rollout.sglang.python
    assert python == str(tmp_path.resolve() / "engine" / "python")


def test_an_algorithm_is_named_in_short_beside_keys_that_are_set_elsewhere(tmp_path: Path) -> None:
    base, run = tmp_path / "base.toml", tmp_path / "run.toml"
    base.write_text(f'extends = "{TINY}"\n[algorithm]\nname = "gspo"\nclip_high = 0.3\n')
    run.write_text('extends = "base.toml"\nalgorithm = "dapo"\n')
    found = load_config(run).algorithm
    assert values(found).items() >= {"name": "dapo", "filter": "nonzero_std", "clip_high": 0.3}.items()
    assert values(load_config(base, ["algorithm=grpo", "algorithm.clip_low=0.1"]).algorithm)["clip_low"] == 0.1
    with refuses(ValueError, "dapo"):
        load_config(TINY, ["algorithm=dap"])


def test_a_circle_of_extends_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with refuses(ValueError, "a.toml", "b.toml", "a.toml"):
        load_config(tmp_path / "a.toml")


def test_a_missing_or_broken_file_is_one_sentence(tmp_path: Path) -> None:
    with refuses(ValueError, "none.toml", "--config", "TOML"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[train\n")
    with refuses(ValueError, "broken.toml", "TOML"):
        load_config(tmp_path / "broken.toml")


def test_override_values_are_toml_and_fall_back_to_text() -> None:
    assert parse_override("a.b=3") == {"a": {"b": 3}}
    assert parse_override("a.b=3e-4") == {"a": {"b": 3e-4}}
    assert parse_override("a=true") == {"a": True}
    assert parse_override("a.b=grpo") == {"a": {"b": "grpo"}}
    assert parse_override('a="x=y"') == {"a": "x=y"}


def test_context_parallel_ranks_share_a_pack() -> None:
    """The limit is one rank's memory: over cp ranks a pack, and a sample, may be that many times longer."""
    config = load_config(TINY, ["parallel.cp=2", "parallel.dp=1", "parallel.ep=1"])
    assert config.max_pack_tokens == 2 * config.train.max_tokens_per_rank


def test_no_rollout_can_give_a_sample_that_is_too_long_to_train() -> None:
    """Else a run ends at its first long answer, after its rollout. The limit is the packer's own: a prompt and an
    answer of the most tokens allowed are packed, and where one more is allowed the configuration is refused."""
    prompt, new = 40, 25
    limit = prompt + new - 1
    keys = [f"data.max_prompt_tokens={prompt}", f"rollout.max_new_tokens={new}"]
    load_config(TINY, [*keys, f"train.max_tokens_per_rank={limit}"])
    load_config(TINY, [*keys, f"train.max_tokens_per_rank={limit // 2}", "parallel.cp=2"])
    longest = sample(prompt_len=prompt, response_len=new)
    packed(longest, max_tokens=limit)
    with refuses(ValueError, limit):
        packed(longest, max_tokens=limit - 1)
    keys_and_numbers = ("data.max_prompt_tokens", 40, "rollout.max_new_tokens", 25, 64, 63, "train.max_tokens_per_rank")
    with refuses(ValueError, *keys_and_numbers):
        load_config(TINY, [*keys, f"train.max_tokens_per_rank={limit - 1}"])


def test_a_stock_server_must_not_retract_what_is_replayed() -> None:
    """It would send routes of the new weights for tokens of the old; the embedded engine keeps them."""
    keys = ["buffer.max_staleness=1", "publish.pause_mode=retract"]
    load_config(TINY, keys)
    stock = [*keys, "rollout.engine=sglang"]
    with refuses(ValueError, "buffer.max_staleness", 1, "publish.pause_mode", "retract", "in_place"):
        load_config(TINY, stock)
    for way_out in (
        "publish.pause_mode=in_place",
        "publish.pause_mode=abort",
        "buffer.max_staleness=0",
        "replay.mode=off",
    ):
        assert load_config(TINY, [*stock, way_out]).routes_belong_to_their_log_probs == (way_out != "replay.mode=off")


def test_gates_are_returned_where_they_are_replayed() -> None:
    """Only by the embedded engine, and only where a trainer replays them."""
    load_config(TINY, ["replay.gates=true", "rollout.embedded.return_gates=true"])
    load_config(TINY, ["replay.gates=true", "replay.mode=r2"])
    for keys, facts in (
        (["replay.gates=true"], ("rollout.embedded.return_gates",)),
        (["rollout.embedded.return_gates=true"], ("rollout.embedded.return_gates",)),
        (["replay.gates=true", "rollout.engine=sglang"], ("tiny.toml", "replay.gates", "replay.mode")),
    ):
        with refuses(ValueError, *facts):
            load_config(TINY, keys)


def test_a_directory_beside_a_section_that_makes_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without '/' in its name, which is otherwise the made model's own."""
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    sets = ["model.path=checkpoint", f"model.make.config={TINY.parent}/tiny/model.json"]
    with refuses(ValueError, "model.path", "checkpoint"):
        load_config(TINY, sets)
    (tmp_path / "checkpoint").rmdir()
    assert load_config(TINY, sets).model.path == "checkpoint"


@pytest.mark.parametrize(
    ("settings", "takes"),
    [
        ((), False),  # CPU ranks keep their concurrency
        (("cluster.colocate=true",), True),
        (("cluster.colocate=false",), False),
        (("cluster.gpus_per_node=2",), False),  # the engine is on the CPU
        (("cluster.gpus_per_node=2", "cluster.colocate=true"), True),
        (("cluster.gpus_per_node=2", "rollout.engine=sglang"), True),
        (("cluster.gpus_per_node=2", "rollout.engine=sglang", "rollout.sglang.enable_memory_saver=true"), True),
        (("cluster.gpus_per_node=4", "cluster.nodes=2", "rollout.engine=sglang", "cluster.colocate=false"), False),
    ],
)
def test_who_takes_turns(settings: tuple[str, ...], takes: bool) -> None:
    assert load_config(TINY, ["replay.mode=off", *settings]).takes_turns is takes


def test_supervised_runs_take_no_turns() -> None:
    config = load_config(CONFIGS / "tiny_sft.toml")
    assert not config.takes_turns


def test_servers_that_take_turns_can_release_their_memory() -> None:
    """Without the memory saver a stock server answers a release and frees nothing."""
    settings = ["replay.mode=off", "cluster.gpus_per_node=2", "rollout.engine=sglang"]
    with refuses(ValueError, "rollout.sglang.enable_memory_saver", "false", "cluster.colocate"):
        load_config(TINY, [*settings, "rollout.sglang.enable_memory_saver=false"])


def test_a_process_group_has_one_member_on_a_gpu() -> None:
    """NCCL refuses a second one, when the servers are asked to join."""
    settings = ["replay.mode=off", "cluster.gpus_per_node=2", "rollout.engine=sglang", "publish.path=distributed"]
    with refuses(ValueError, "publish.path", "distributed", "cluster.colocate", "tensor"):
        load_config(TINY, settings)
    apart = ["cluster.gpus_per_node=4", "cluster.nodes=2", "cluster.colocate=false"]
    assert load_config(TINY, [*settings, *apart]).publish.path == "distributed"
    on_cpus = ["publish.path=distributed", "cluster.colocate=true"]
    assert load_config(TINY, on_cpus).takes_turns, "over gloo"


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["publish.path=reshard"], ("publish.path", "reshard", "disk")),
        (
            [
                *("publish.path=distributed", "rollout.engine=sglang"),
                *("cluster.gpus_per_node=8", "cluster.nodes=2", "cluster.colocate=false"),
            ],
            ("publish.path", "distributed", "disk"),
        ),
        (["buffer.max_staleness=0"], ("buffer.max_staleness", 0, 1)),
        (["cluster.colocate=true"], ("cluster.colocate", "true")),
        (
            [
                "distillation.mode=added",
                "distillation.teachers.own={kind='self',weights='current',prompt='{answer}. {prompt}'}",
            ],
            ("distillation.teachers.own", "reference"),
        ),
    ],
)
def test_servers_load_beside_training_where_nothing_needs_them(settings: list[str], facts: Facts) -> None:
    beside = ["publish.during_training=true", "publish.path=disk", "buffer.max_staleness=1"]
    for path in ("disk", "delta", "tensor", "distributed"):
        assert load_config(TINY, [*beside, f"publish.path={path}"]).publish.during_training
    with refuses(ValueError, "publish.during_training", *facts):
        load_config(TINY, [*beside, *settings])
