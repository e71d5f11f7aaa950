"""Teachers as read from the configuration and the files that it names. Nothing is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_like.config.load import load_config
from miles_like.experience.teachers import MovedScores, ServerTeacher
from miles_like.hf.tokenizer import load_tokenizer
from miles_like.pipeline.cache import cache_of, fetch_directory
from miles_like.run.assemble import describe_processes
from miles_like.run.setup import teachers as run_teachers
from miles_like.run.setup.rollout_side import teacher_model
from miles_like.run.setup.teachers import check_same_shapes, privileged
from miles_like.types import Prompt
from rollout.server_key import ServerKey
from rollout.sglang.ports import HTTP_PORT
from tests.support.refusals import refuses

TINY = Path(__file__).parents[4] / "configs" / "tiny"
ASKED = Prompt(id="a", token_ids=(1,), answer="24", text="48/2=", source="gsm8k", meta={"level": "3"})


def shape(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TINY / name).read_text())
    return found


@pytest.mark.slow  # starts the process that renders a chat template
def test_a_privileged_prompt_holds_what_its_template_names() -> None:
    tokenizer = load_tokenizer(TINY)
    ids = privileged("t", "{level}{source}: {answer}, {prompt}", tokenizer, ASKED)
    assert tokenizer.decode(ids) == "3gsm8k: 24, 48/2="
    with refuses(ValueError, "distillation.teachers.t.prompt", "hint", "a"):
        privileged("t", "{prompt}{hint}", tokenizer, ASKED)
    with refuses(ValueError, "answer", "a"):
        privileged("t", "{prompt}{answer}", tokenizer, replace(ASKED, answer=""))


@pytest.mark.parametrize("engine", ["sglang", "embedded"])
def test_servers_of_teachers_are_stock_ones_on_gpus_and_embedded_ones_on_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """A stock one keeps its memory while the rollout's release theirs in turns with the trainer."""
    pools = ["cluster.pools.trainer.gpus=0-3", "cluster.pools.rollout.gpus=0-3", "cluster.pools.teachers.nodes=1"]
    pools += ["cluster.pools.teachers.gpus=4-7"] if engine == "sglang" else ["rollout.sglang.tp_size=1"]
    sets = ["distillation.mode=added", "parallel.dp=2", "rollout.servers=4", f"rollout.engine={engine}", *pools]
    sets += ["rollout.env.SGLANG_LOG_MS=1"]
    teachers = [f"distillation.teachers.{name}={{path='owner/{name}',sources=['{name}']}}" for name in "ab"]
    config = load_config(TINY.parent / "qwen3_30b_a3b.toml", [*sets, *teachers])
    started: list[Any] = []
    monkeypatch.setattr(run_teachers, "RayServers", lambda *given: started.append(given))
    given: dict[str, Any] = {"student": {}, "tokenizer": None, "console": None, "key": None, "nodes": lambda: "nodes"}
    found = run_teachers.RunTeachers(config, tmp_path, **given)
    found._paths = {name: tmp_path / name for name in "ab"}
    found.launch()
    ((launches, nodes, _, share),) = started
    assert nodes == "nodes" and [launch.model_path.name for _, launch in launches] == ["a", "b"]
    stock = engine == "sglang"
    assert [(s.role, s.node, s.gpus) for s, _ in launches] == [
        ("teachers", 1, gpus if stock else ()) for gpus in ((4, 5), (6, 7))
    ]
    for _, launch in launches:
        assert launch.config.engine == engine and not launch.return_routed_experts
        assert not stock or launch.config.sglang.enable_memory_saver is False
        assert launch.env == {"SGLANG_LOG_MS": "1"}
    assert config.takes_turns and (not stock or share == (4, 6))
    printed = describe_processes(config, tmp_path, None, tmp_path / "stage-1")
    at = [n for n, line in enumerate(printed) if line.startswith("server of a teacher: ")]
    assert len(at) == 2 and not any("--enable-memory-saver" in printed[n + 1] for n in at)
    for number, n in enumerate(at):
        of = config.model_copy(update={"model": teacher_model("ab"[number], f"owner/{'ab'[number]}")})
        assert str(fetch_directory(of, cache_of(config, tmp_path))[1] / "data") in printed[n + 1].split()
        assert f"--port {HTTP_PORT + 4 + number if stock else 0}" in printed[n + 1]


def test_a_rollout_worker_asks_the_servers_that_the_run_knows(tmp_path: Path) -> None:
    """One that the run has started by its URL there, a running one by that of the configuration, and for the policy all
    servers of the rollout; a teacher whose weights the trainer has scores elsewhere. The worker starts none again."""
    kinds = {
        "ours": "{path='owner/t',sources=['o']}",
        "theirs": "{kind='server',url='http://10.0.0.1:9',sources=['r']}",
        "policy": "{kind='self',weights='current',prompt='{answer}{prompt}',sources=['p']}",
        "trainer": "{kind='weights',path='there'}",
    }
    sets = [f"distillation.teachers.{name}={what}" for name, what in kinds.items()]
    config = load_config(TINY.parent / "tiny.toml", ["distillation.mode=added", *sets])
    given: dict[str, Any] = {"student": {"vocab_size": 128}, "tokenizer": None, "console": None, "nodes": None}
    key = ServerKey.new()
    driver, worker = (run_teachers.RunTeachers(config, tmp_path, key=key, **given) for _ in range(2))
    driver._urls, driver._vocabularies = {"ours": "http://10.0.0.2:5"}, {"ours": 200}
    rollout: Any = [SimpleNamespace(url="http://10.0.0.3:1"), SimpleNamespace(url="http://10.0.0.4:1")]
    found = worker.of_worker(driver.places, rollout)._teachers
    assert isinstance(found.pop("trainer"), MovedScores)
    servers = {name: t for name, t in found.items() if isinstance(t, ServerTeacher)}
    assert {name: ([c.url for c in t.servers], t.own, t.early) for name, t in servers.items()} == {
        "ours": (["http://10.0.0.2:5"], True, False),
        "theirs": (["http://10.0.0.1:9"], True, True),
        "policy": ([one.url for one in rollout], False, False),
    }
    assert not any(t.started for t in servers.values())


def test_weights_of_another_architecture_are_refused_by_their_first_tensor() -> None:
    check_same_shapes("t", shape("model.json"), shape("model.json"))
    with refuses(ValueError, "model.embed_tokens.weight", "[128, 192]", "[128, 128]", "server"):
        check_same_shapes("t", shape("model_2m.json"), shape("model.json"))
    more = shape("model.json") | {"num_hidden_layers": 4}
    for there, here, facts in (
        (more, shape("model.json"), ("t", "model.layers.3.input_layernorm.weight", "[128]")),
        (shape("model.json"), more, ("t", "model.layers.3.input_layernorm.weight", "[128]")),
    ):
        with refuses(ValueError, *facts):
            check_same_shapes("t", there, here)
