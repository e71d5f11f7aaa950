"""What the start of a run checks before its first stage: in what order, of which machine, and with what sentence.

Not covered: real Ray clusters and GPUs; that a right run passes them (tests/e2e).
"""

from __future__ import annotations

import contextlib
import json
import socket
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from miles_like.check_results import CheckResult, Outcome, raise_failures, run_check
from miles_like.cluster.placement import plan_placement
from miles_like.cluster.run_nodes import RunNodes
from miles_like.config.load import load_config, store_config
from miles_like.config.run import RunConfig
from miles_like.hf.checkpoint import write_hf
from miles_like.hf.tokenizer import LazyTokenizer
from miles_like.nodes import members, session, work
from miles_like.nodes.members import Node
from miles_like.nodes.probe import NodeProbe, find_engine, is_free
from miles_like.pipeline.run_directory import check_run_dir
from miles_like.pipeline.stage_names import STAGES
from miles_like.pipeline.stages import Stage, run_stages
from miles_like.preflight import examination
from miles_like.preflight import machine as preflight_machine
from miles_like.preflight.checks import ROWS, Preflight
from miles_like.preflight.run_needs import CHECKPOINTS, MADE, PUBLISHED, cache_needs, run_dir_needs
from miles_like.run.setup.run_cluster import RunCluster
from tests.support.fakes import FakeServer
from tests.support.planned import cluster_of, planned
from tests.support.refusals import Facts, check_refusal, refuses

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "tiny.toml"
ENGINE, AT = "rollout.engine=sglang", "rollout.sglang.python=/e/python"


def checks_of(config: RunConfig, run_dir: Path, to_do: Sequence[str], *, online: bool) -> Preflight:
    return Preflight(config, planned(config, run_dir), to_do, cluster_of(config, run_dir), online=online)


def start(config: RunConfig, run_dir: Path, ran: list[str], address: str | None = None) -> None:
    """The run, with stages that only note that they ran. address: of a Ray cluster that it joins."""
    stages = [
        Stage(
            name=s.name,
            what=s.what,
            key=s.key,
            directory=s.directory,
            size=s.size,
            run=_noting(s.name, ran),
            by_node=s.by_node,
        )
        for s in planned(config, run_dir)
    ]
    run_stages(
        stages,
        STAGES,
        Console(quiet=True),
        fresh=False,
        preflight=lambda to_do: Preflight(config, stages, to_do, cluster_of(config, run_dir, address), online=True),
    )


def _noting(name: str, ran: list[str]) -> Any:
    def run(out: Path, _: Any) -> Path:
        ran.append(name)
        (out / "data").mkdir(parents=True)
        return out / "data"

    return run


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A Ray cluster of one node, which answers what the test puts into the dict."""
    answers: dict[str, Any] = {"started": 0}

    def start_ray(address: str | None) -> None:
        answers["started"] += 1

    def on_every_node(probe: NodeProbe, nodes: Sequence[Node]) -> list[Mapping[str, Any]]:
        return [probe() | {k: v for k, v in answers.items() if k != "started"}]

    monkeypatch.setattr(session, "start_ray", start_ray)
    monkeypatch.setattr(work, "on_every_node", on_every_node)

    def nodes(cluster: RunCluster) -> RunNodes:
        c = cluster.config.cluster
        found = members.suitable_nodes(c.nodes, c.gpus_per_node, timeout_s=c.timeout_s, say=lambda _: None)
        return RunNodes(nodes=found, facts=(), cluster=c)

    def living_nodes() -> tuple[Node, ...]:
        return (Node(id="a", address="10.0.0.1", host="a", gpus=answers.get("gpus", 0), cores=1),)

    monkeypatch.setattr(members, "living_nodes", living_nodes)
    monkeypatch.setattr(members, "is_local", lambda: True)
    monkeypatch.setattr(RunCluster, "nodes", nodes)
    yield answers


def test_nothing_is_run_before_everything_was_checked(tmp_path: Path, one_node: dict[str, Any]) -> None:
    """The refused run has made no directory and started no cluster."""
    ran: list[str] = []
    for wrong, key in {
        "reward.name=gsmk8": "reward.name",
        "data.eval=none.jsonl": "data.eval",
        "algorithm.filter=nonzro": "algorithm.filter",
    }.items():
        with refuses(ValueError, key):
            start(load_config(TINY, [wrong]), tmp_path / "runs" / "a", ran)
    assert not ran and not one_node["started"] and not (tmp_path / "runs").exists()
    start(load_config(TINY), tmp_path / "runs" / "a", ran)
    assert ran == list(STAGES) and one_node["started"]


@pytest.mark.parametrize(
    ("sets", "answers", "facts"),
    [
        ([], {"missing": {"megatron.core": "No module named 'megatron'"}}, ("megatron.core",)),
        (["rollout.port=21000"], {"used": [21000]}, (21000, 0)),
        (
            [ENGINE, "rollout.sglang.enable_dp_attention=true", "rollout.sglang.dist_init_port=21000"],
            {"used": [21003], "engine": {"version": "0.5.23", "wrong": None}},
            (21003, "rollout server 0", "attention data parallelism", "rollout.sglang.dist_init_port"),
        ),
        (
            [ENGINE],
            {"engine": {"version": None, "wrong": "No module"}},
            ("0.5.23", "No module", "rollout.sglang.python"),
        ),
        ([ENGINE, AT], {"engine": {"version": None, "wrong": "no file"}}, ("/e/python", "0.5.23", "no file")),
        ([ENGINE, AT], {"engine": {"version": "0.5.22", "wrong": None}}, ("/e/python", "0.5.22", "0.5.23")),
        ([ENGINE, AT], {"engine": {"version": "0.5.23", "wrong": "libcuda.so.1"}}, ("/e/python", "libcuda.so.1")),
        (["cluster.env.HF_TOKEN="], {}, ("HF_TOKEN", "cluster.env")),
        (["cluster.gpus_per_node=8"], {"gpus": 1}, (1, "cluster.gpus_per_node", 8)),
        (["cluster.nodes=2"], {}, (1, "cluster.nodes")),
    ],
)
@pytest.mark.slow  # a process imports sglang
def test_what_a_node_lacks_ends_the_run_before_its_first_stage(
    tmp_path: Path,
    one_node: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    sets: list[str],
    answers: dict[str, Any],
    facts: Facts,
) -> None:
    one_node |= answers
    monkeypatch.delenv("HF_TOKEN", raising=False)
    ran: list[str] = []
    with refuses(ValueError, *facts):
        start(load_config(TINY, sets), tmp_path / "runs" / "a", ran)
    assert not ran


@pytest.mark.slow  # a process imports sglang
def test_a_node_must_see_those_directories_that_it_needs(
    tmp_path: Path, one_node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "brief_checks", lambda *_, **__: [])
    monkeypatch.setattr(members, "is_local", lambda: False)
    wanted: dict[str, bool] = {}

    def probes(probe: NodeProbe, nodes: Sequence[Node]) -> list[Mapping[str, Any]]:
        wanted.update(probe()["sees"])
        return [probe() | one_node]

    monkeypatch.setattr(work, "on_every_node", probes)
    for sees, facts in (
        ({"--run-dir": False, "--cache-dir": True}, ("node 0", "trainer ranks write their checkpoints", "--run-dir")),
        ({"--run-dir": True, "--cache-dir": False}, ("node 0", "[model.make]", "--cache-dir")),
    ):
        one_node["sees"] = sees
        with refuses(ValueError, *facts, unrecorded="it names this machine"):
            start(load_config(TINY), tmp_path / "runs" / "a", [], "10.0.0.1:6379")
    assert wanted == {"--run-dir": True, "--cache-dir": True}  # this machine sees its own
    assert not list(tmp_path.rglob(".probe-*"))
    config = load_config(TINY, ["model.make=false", "model.path=owner/name"])  # no rank loads anything of the cache
    found = checks_of(config, tmp_path / "runs" / "a", STAGES, online=True)
    one_node["sees"] = {"--run-dir": True, "--cache-dir": False}
    found.machines.ray_address = "10.0.0.1:6379"
    assert not [c for c in found.machines.cluster_checks() if c.outcome is Outcome.WRONG]


def test_a_node_s_own_disk_is_held_to_what_that_node_writes(tmp_path: Path) -> None:
    """It must be writable, and larger where the node does not see the cache, so that it keeps what it converts."""
    config = load_config(CONFIGS / "deepseek_v3_fp8.toml")
    cluster = cluster_of(config, tmp_path / "a", "10.0.0.1:6379")
    machines = Preflight(config, planned(config, tmp_path / "a"), STAGES, cluster, online=True).machines
    paths = [str(n.directory) for n in machines.needs if n.on != "here"]
    assert len(paths) == 2 and all(path.startswith("/local_nvme/miles-like/") for path in paths)

    def wrong(**changes: Any) -> list[CheckResult]:
        probe = {
            "node": "a",
            "disks": dict.fromkeys(paths, (1, 800 * 10**9)),
            "unwritable": {},
            "held": dict.fromkeys(paths, 0),
            "missing": {},
            "used": [],
            "ephemeral": (32768, 60999),
            "sees": {"--run-dir": True, "--cache-dir": True},
            "gpus": 8,
            "engine": None,
        } | changes
        checks = machines._node_checks(3, probe, here=False)  # type: ignore[arg-type]
        return [c for name, check in checks.items() if (c := run_check(name, check)).outcome is Outcome.WRONG]

    assert not wrong()
    apart = {"--run-dir": True, "--cache-dir": False}
    (full,) = wrong(sees=apart)
    check_refusal(full.text, "node 3", "convert", "stage", "cluster.stage_dir")
    assert not wrong(sees=apart, held=dict.fromkeys(paths, 100 * 10**9))  # of an interrupted run
    (unwritable,) = wrong(unwritable=dict.fromkeys(paths, "no permission in /local_nvme"))
    check_refusal(unwritable.text, "node 3", "no permission", "cluster.stage_dir")


def test_only_nodes_that_write_or_read_there_must_see_a_run_s_directory() -> None:
    for settings, needed in (
        (["publish.path=tensor"], dict.fromkeys(range(16), CHECKPOINTS)),
        (["publish.path=disk"], {n: CHECKPOINTS if n < 16 else PUBLISHED for n in range(32)}),
    ):
        apart = ["cluster.colocate=false", "cluster.nodes=32"]
        config = load_config(CONFIGS / "deepseek_v3_fp8.toml", [*apart, *settings])
        plan = plan_placement(config.cluster, config.parallel, config.servers)
        assert run_dir_needs(config, plan) == needed and not cache_needs(config, plan)
    made = load_config(TINY)
    assert set(cache_needs(made, plan_placement(made.cluster, made.parallel, made.servers)).values()) == {MADE}


@pytest.mark.slow  # a process imports sglang
def test_ports_are_those_of_the_nodes_own_ranges(
    tmp_path: Path, one_node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose range begins below this machine's is looked at again."""
    monkeypatch.setattr(examination, "brief_checks", lambda *_, **__: [])
    looked: list[tuple[int, ...]] = []
    engine = {"version": "0.5.23", "wrong": None}

    def probes(probe: NodeProbe, nodes: Sequence[Node]) -> list[Mapping[str, Any]]:
        looked.append(probe.ports)
        used = [port for port in probe.ports if port == 14999]
        return [NodeProbe(paths=probe.paths)() | {"ephemeral": (15000, 60999), "used": used, "engine": engine}]

    monkeypatch.setattr(work, "on_every_node", probes)
    with refuses(ValueError, 14999, "rollout server 0", "HTTP", "rollout.port", unrecorded="it names this machine"):
        start(load_config(TINY, [ENGINE]), tmp_path / "runs" / "a", [], "10.0.0.1:6379")
    assert looked == [(20000, 30000), (14936, 14999)]


class Scores(FakeServer):
    """Gives every request `reply`."""

    reply = b"1.0"

    def _answer(self, endpoint: str, body: Any) -> tuple[int, Any]:
        return 200, self.reply


def test_a_server_that_scores_is_asked_once(tmp_path: Path, one_node: dict[str, Any]) -> None:
    """A server that accepts connections may still answer what is no score."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound, not listening
        config = load_config(TINY, [f"reward={{name='remote',remote={{url='http://127.0.0.1:{s.getsockname()[1]}'}}}}"])
        with refuses(ValueError, "reward.remote.url"):
            start(config, tmp_path / "runs" / "a", [])
    with Scores() as server:
        config = load_config(TINY, [f"reward={{name='remote',remote={{url='{server.url}'}}}}"])
        server.reply = b"<html>"
        with refuses(ValueError, "<html>", "JSON"):
            start(config, tmp_path / "runs" / "a", [])
        server.reply = b"1.0"
        asked = len(server.calls)
        start(config, tmp_path / "runs" / "a", [])
        (body,) = [body for _, body in server.calls[asked:]]
        assert body["response"] == body["label"] and body["prompt"].endswith("=")


def test_a_reward_model_that_is_sent_tokens_waits_for_the_tokenizer(tmp_path: Path, one_node: dict[str, Any]) -> None:
    """Of a model that is fetched; what stands in for its tokenizer would send ids of another vocabulary."""
    rows = CONFIGS / "tiny" / "heldout.jsonl"
    with Scores() as server:
        server.reply = b'{"embedding": [0.5]}'
        reward = f"reward={{name='reward_model',reward_model={{url='{server.url}',send='tokens'}}}}"
        sets = ["model.make=false", "model.path=owner/name", f"data.train={rows}", f"data.eval={rows}", reward]
        config = load_config(TINY, sets)
        preflight = Preflight(
            config, planned(config, tmp_path / "runs" / "a"), STAGES, cluster_of(config, tmp_path), online=True
        )
        before = {c.name: c for c in preflight.run()}
        assert before["reward reward_model"].outcome is Outcome.NOT_CHECKED and not server.calls
        raise_failures(preflight.fetched(CONFIGS / "tiny"))
        ((endpoint, body),) = server.calls
        row = json.loads(rows.read_text().splitlines()[0])
        ids = LazyTokenizer(CONFIGS / "tiny").encode(row["prompt"] + row["answer"], add_special_tokens=False)
        assert endpoint == "/classify" and body["input_ids"] == ids


def test_at_its_start_a_run_has_a_network(tmp_path: Path, one_node: dict[str, Any]) -> None:
    """A part that finds none is refused; a dry run lists it as not checked."""
    (tmp_path / "parts.py").write_text(
        "async def wrong(prompt, sample):\n    return 1 / 0\n"
        "def offline(prompt, sample):\n    raise ConnectionRefusedError('no sandbox')\n"
    )
    for name, facts in (("wrong", ("ZeroDivisionError", "parts.py:2", 1, 0)), ("offline", ("no sandbox",))):
        with refuses(ValueError, *facts):
            start(load_config(TINY, [f"reward.name={tmp_path}/parts.py:{name}"]), tmp_path / "runs" / "a", [])


def test_rows_are_held_to_a_tokenizer_that_comes_with_the_model(tmp_path: Path, one_node: dict[str, Any]) -> None:
    """Right after the fetch, before anything is dequantized or converted."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "1" * 40, "answer": str(i), "id": str(i)}) + "\n" for i in range(3)))
    sets = ["model.make=false", "model.path=owner/name", f"data.train={rows}", "data.max_prompt_tokens=39"]
    config = load_config(TINY, [*sets, f"data.eval={rows}"])
    preflight = Preflight(
        config, planned(config, tmp_path / "runs" / "a"), STAGES, cluster_of(config, tmp_path), online=True
    )
    before = {c.name: c for c in preflight.run()}
    assert before[str(rows)].outcome is Outcome.NOT_CHECKED and "tokenizer" in before[str(rows)].text
    with refuses(ValueError, 40, "data.max_prompt_tokens", 39):
        raise_failures(preflight.fetched(CONFIGS / "tiny"))


def test_only_the_first_rows_are_read(tmp_path: Path, one_node: dict[str, Any]) -> None:
    """A large file is read whole when the run starts to train, not for a dry run."""
    rows = tmp_path / "rows.jsonl"
    text = "".join(json.dumps({"prompt": "1+1=", "answer": "2", "id": str(i)}) + "\n" for i in range(ROWS))
    rows.write_text(text + "broken\n")
    config = load_config(TINY, [f"data.train={rows}"])
    raise_failures(
        Preflight(config, planned(config, tmp_path), ["train"], cluster_of(config, tmp_path), online=False).run()
    )
    rows.write_text("broken\n" + text)
    with refuses(ValueError, 1, "JSON"):
        raise_failures(
            Preflight(config, planned(config, tmp_path), ["train"], cluster_of(config, tmp_path), online=False).run()
        )


def test_a_full_disk_is_found_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_node: dict[str, Any]
) -> None:
    monkeypatch.setattr(preflight_machine, "disk_of", lambda path: (1, 1 << 20))
    ran: list[str] = []
    with refuses(ValueError, "GiB", "GiB"):
        start(load_config(TINY), tmp_path / "runs" / "a", ran)
    assert not ran


def test_a_disk_that_fills_during_a_stage_is_named_with_free_and_needed_bytes(tmp_path: Path) -> None:
    def full(out: Path, _: Any) -> Path:
        raise RuntimeError("half of it was not written") from OSError(28, "No space left on device", "/x")

    def otherwise(out: Path, _: Any) -> Path:
        raise RuntimeError("something else")

    free = "it names the free space of the disk"
    needed = ("stage convert", "half of it was not written", "bytes free", "5,000")
    for run, facts, unrecorded in ((full, needed, free), (otherwise, ("something else",), "")):
        stage = Stage(name="convert", what="", key="k", directory=tmp_path / "c" / "d", size=5000, run=run)
        with refuses((ValueError, RuntimeError), *facts, unrecorded=unrecorded):
            run_stages([stage], ["convert"], Console(quiet=True), fresh=False)


def test_a_full_disk_under_the_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with refuses(
        ValueError, "config.toml: no space left", "--run-dir", unrecorded="it names the free space of the disk"
    ):
        store_config(load_config(TINY), tmp_path / "config.toml")


@pytest.mark.slow
def test_a_probe_says_what_this_machine_has(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        assert not is_free(port)
        probed = NodeProbe(paths=(str(tmp_path / "not" / "there"),), found=("json", "no.such"), ports=(port,))()
    assert probed["used"] == [port] and is_free(port)
    assert list(probed["missing"]) == ["no.such"] and probed["disks"][str(tmp_path / "not" / "there")][1] > 0


@pytest.mark.slow
def test_an_engine_is_asked_in_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter's packages, whatever PYTHONPATH names; the version is reported where the import fails."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "sglang.py").write_text("raise OSError('of another environment')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    venv.create(tmp_path / "engine", with_pip=False, symlinks=True)
    python = tmp_path / "engine" / "bin" / "python"
    (packages,) = (tmp_path / "engine").glob("lib/python*/site-packages")
    absent = find_engine(str(python), imports=False)
    assert absent["version"] is None and "sglang" in str(absent["wrong"])
    (packages / "sglang-0.5.22.dist-info").mkdir()
    (packages / "sglang-0.5.22.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.22\n")
    (packages / "sglang.py").touch()
    assert find_engine(str(python), imports=True) == {"version": "0.5.22", "wrong": None}
    (packages / "sglang.py").write_text("raise OSError('libcuda.so.1')")
    assert find_engine(str(python), imports=True) == {"version": "0.5.22", "wrong": "OSError: libcuda.so.1"}
    assert find_engine(str(python), imports=False) == {"version": "0.5.22", "wrong": None}
    nowhere = NodeProbe(engine=str(tmp_path / "nowhere"))()["engine"]
    assert nowhere == {"version": None, "wrong": "it cannot be run: No such file or directory"}


def test_a_dry_run_does_not_ask_for_the_secrets_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    config = load_config(TINY, ["rollout.env.HF_TOKEN="])
    found = checks_of(config, tmp_path / "runs" / "a", STAGES, online=False).run()
    (secrets,) = [c for c in found if c.name == "environment variables"]
    assert secrets.outcome is Outcome.NOT_CHECKED and "HF_TOKEN" in secrets.text


def test_findings_are_told_at_once_and_once() -> None:
    raise_failures([CheckResult("a"), CheckResult("b", Outcome.NOT_CHECKED, "elsewhere")])
    with refuses(ValueError, "b is wrong"):
        raise_failures([CheckResult("a", Outcome.WRONG, "b is wrong"), CheckResult("c", Outcome.WRONG, "b is wrong")])
    with refuses(ValueError, 2, "(1)", "(2)"):
        raise_failures([CheckResult("a", Outcome.WRONG, "b"), CheckResult("c", Outcome.WRONG, "d")])

    def missing() -> None:
        raise FileNotFoundError(2, "No such file or directory", "x.jsonl")

    assert run_check("a", missing) == CheckResult("a", Outcome.WRONG, "x.jsonl: No such file or directory")


@pytest.mark.slow
def test_the_quick_tokenizer_is_transformers_own(tmp_path: Path) -> None:
    """On the rows, the end token and a chat; a model without a tokenizer is refused."""
    quick, whole = LazyTokenizer(CONFIGS / "tiny"), AutoTokenizer.from_pretrained(CONFIGS / "tiny")
    rows = [json.loads(x)["prompt"] for x in (CONFIGS / "tiny" / "train.jsonl").read_text().splitlines()[:50]]
    for text in (*rows, "ünï <|eos|> 1\n"):
        ids = whole.encode(text, add_special_tokens=False)
        assert quick.encode(text, add_special_tokens=False) == ids
        assert quick.decode(ids, skip_special_tokens=True) == whole.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": "1+1="}]
    how = {"tokenize": False, "add_generation_prompt": True}
    assert quick.apply_chat_template(chat, **how) == whole.apply_chat_template(chat, **how)
    assert quick.eos_token_id == whole.eos_token_id
    with refuses(ValueError, "tokenizer.json"):
        LazyTokenizer(tmp_path)


def test_a_local_checkpoint_is_checked_before_it_is_fetched(tmp_path: Path, one_node: dict[str, Any]) -> None:
    write_hf(tmp_path / "model", [("a.weight", torch.ones(2, 2, dtype=torch.bfloat16))], {"model_type": "qwen3"})
    (tmp_path / "model" / "model.safetensors").write_bytes(b"short")
    config = load_config(TINY, ["model.make=false", f"model.path={tmp_path}/model"])
    found = Preflight.__new__(Preflight)
    found.config, found.online = config, True
    assert [c.outcome for c in found._model()] == [Outcome.WRONG]


def test_a_run_directory_is_refused_or_taken_before_the_first_stage(tmp_path: Path) -> None:
    """--resume goes on in one that a killed run left empty or half-written, and in no other."""
    run_dir = tmp_path / "a"
    with refuses(ValueError, "--resume"):
        check_run_dir(run_dir, "resume")
    run_dir.mkdir()
    check_run_dir(run_dir, "resume")
    (run_dir / "notes.txt").touch()
    for mode, facts in (
        ("resume", ("--resume", "--resume", "--run-dir")),
        ("auto", ("notes.txt", 1, "--run-dir")),
        ("fresh", ("notes.txt",)),
    ):
        with refuses(ValueError, *facts):
            check_run_dir(run_dir, mode)  # type: ignore[arg-type]
    (run_dir / "config.toml.partial").touch()
    check_run_dir(run_dir, "resume")
    for mode in ("auto", "resume", "fresh"):
        with refuses(ValueError, "notes.txt"):
            check_run_dir(run_dir / "notes.txt", mode)  # type: ignore[arg-type]
