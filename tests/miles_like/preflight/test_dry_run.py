"""What a dry run refuses and what it lists as not checked, through the command.

Not covered: the checks that only the start of a run makes (test_preflight.py), and that they pass in a real run
(tests/e2e).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_like.cli import app
from tests.support.cli_runner import CliRunner
from tests.support.refusals import Facts, check_refusal

CONFIGS = Path(__file__).parents[3] / "configs"
PARTS = """
import asyncio, socket, time

def right(prompt, sample):
    assert prompt.messages == () and prompt.text.endswith("=") and sample.text == prompt.answer
    return 1.0

def raises(prompt, sample):
    return 1 / 0

def text(prompt, sample):
    return "good"

def endless(prompt, sample):
    while True:
        time.sleep(0.05)

def offline(prompt, sample):
    raise ConnectionRefusedError("no sandbox")

async def later(prompt, sample):
    await asyncio.sleep(0)
    return 1 / 0

async def asleep(prompt, sample):
    await asyncio.sleep(3600)

async def unresolved(prompt, sample):
    raise socket.gaierror(-3, "Temporary failure in name resolution")

async def both_refused(prompt, sample):
    refused = [ConnectionRefusedError(111, "::1"), ConnectionRefusedError(111, "127.0.0.1")]
    raise RuntimeError("no sandbox") from ExceptionGroup("all attempts", refused)

def one_advantage(groups):
    return [[0.0] for _ in groups]

def loss_without_gradient(*, logprobs, advantages, **_):
    return -(logprobs.detach() * advantages), {}

def says_seven(group):
    return 7

class Environment:
    def __init__(self, prompt, *, seed):
        self.asked = prompt.text

    def __call__(self, sample, reply):
        raise KeyError(self.asked)

class AsyncEnvironment(Environment):
    async def __call__(self, sample, reply):
        await asyncio.sleep(0)
        raise KeyError(self.asked)

async def no_samples(engine, prompt, *, n, params):
    return (await engine.generate([prompt], n=n, params=params))[0].samples[1:]
"""
AWAY = "http://127.0.0.1:9"
PLAYED = "max_turns=2,max_episode_tokens=20"

Dry = Callable[..., SimpleNamespace]


@pytest.fixture
def dry(tmp_path: Path) -> Dry:
    """The dry run of a configuration: exit status, output, and stderr in one line. It leaves nothing behind."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")

    def files() -> list[Path]:
        """Without the bytecode that the interpreter may keep of a user's file."""
        return sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts)

    def run(*more: str, config: str = "tiny", **sets: str) -> SimpleNamespace:
        given = [x for key, value in sets.items() for x in ("--set", f"{key.replace('__', '.')}={value}")]
        given = [g.replace("{here}", str(tmp_path)) for g in given]
        runs = tmp_path / "runs" / "a"
        how = ["train", str(CONFIGS / f"{config}.toml"), "--run-dir", str(runs), "--dry-run", *given, *more]
        before = files()
        done = CliRunner().invoke(app, how, env={"COLUMNS": "500", "RAY_ADDRESS": ""})
        assert files() == before
        assert done.exit_code in (0, 2) and len(done.stderr.splitlines()) <= 1, (done.stderr, done.exception)
        return SimpleNamespace(status=done.exit_code, out=done.stdout, err=done.stderr)

    return run


@pytest.mark.parametrize(
    ("sets", "facts"),
    [
        ({"reward__name": "gsmk8"}, ("reward.name", "gsmk8", "gsm8k")),
        ({"reward__name": "{here}/none.py:f"}, ("reward.name", "none.py")),
        ({"reward__name": "{here}/parts.py:rigth"}, ("rigth", "right")),
        ({"reward__name": "{here}/parts.py:raises"}, ("parts.py:9", 1, 0)),
        ({"reward__name": "{here}/parts.py:later"}, ("parts.py", "later", 1, 0)),
        ({"reward__name": "{here}/exits.py:f"}, ("exits.py", "SystemExit", 3)),
        ({"cache_dir": "{here}/parts.py"}, ("parts.py", "--run-dir", "--cache-dir")),
        ({"reward__name": "{here}/parts.py:text"}, ("reward", "parts.py:text", "good")),
        ({"reward": "{name='',parts={exact=1.0,'{here}/parts.py:raises'=0.5}}"}, ("ZeroDivisionError",)),
        ({"eval__sets__hard": "{path='./configs/tiny/heldout.jsonl',reward='exat'}"}, ("reward.name", "exat")),
        ({"algorithm__advantage": "grop:x"}, ("algorithm.advantage", "grop")),
        ({"algorithm__advantage": "{here}/parts.py:one_advantage"}, ("algorithm.advantage", "[1]", "[8]")),
        (
            {"algorithm__loss": "{here}/parts.py:loss_without_gradient"},
            ("algorithm.loss",),
        ),
        ({"algorithm__filter": "{here}/parts.py:says_seven"}, ("algorithm.filter", "parts.py:says_seven", "None")),
        (
            {"rollout": f"{{environment='{{here}}/parts.py:Environment',{PLAYED}}}"},
            ("parts.py", "KeyError"),
        ),
        ({"rollout": f"{{environment='{{here}}/parts.py:AsyncEnvironment',{PLAYED}}}"}, ("KeyError", "self.asked")),
        ({"rollout": "{generate='{here}/parts.py:no_samples'}"}, ("rollout.generate", "[]", 0, 0)),
        ({"data__train": "{here}/none.jsonl"}, ("none.jsonl",)),
        ({"data__eval": "none.jsonl"}, ("none.jsonl", "data.train", "data.eval")),
        ({"data__prompt_key": "question"}, (2, "(1)", "(2)", "question")),
        ({"data__max_prompt_tokens": "3"}, ("data.max_prompt_tokens", 3)),
        ({"model__make": "false", "model__path": "{here}/none"}, ("model.path", "none")),
        ({"rollout__engine": "sglang"}, ("rollout.engine", "sglang")),
    ],
)
def test_what_is_wrong_here_is_refused(
    dry: Dry, monkeypatch: pytest.MonkeyPatch, sets: dict[str, str], facts: Facts
) -> None:
    """In a run each of these was found after fetch, dequantize, convert and stage."""
    done = dry(**sets)
    assert done.status == 2
    check_refusal(done.err, *facts)
    assert done.err.count("parts.py:9 in raises") < 2, done.err


def test_what_belongs_to_another_kind_of_run_is_checked_too(dry: Dry, tmp_path: Path) -> None:
    """Supervised examples, a teacher's template and its files."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "2"}\n')
    same = dry(config="tiny_dpo", data__train=f"{tmp_path}/pairs.jsonl")
    check_refusal(same.err, "pairs.jsonl", "chosen", "rejected")
    hinted = "{mode='alone',teachers={t={kind='self',prompt='{prompt}{hint}'}}}"
    check_refusal(dry(config="tiny_bf16", distillation=hinted).err, "distillation.teachers.t.prompt", "hint")
    (tmp_path / "taught.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "source": "sums"}\n')
    own = {"data__train": f"{tmp_path}/taught.jsonl"}
    only = "{mode='alone',teachers={t={kind='self',prompt='{prompt}{answer}',sources=['%s']}}}"
    taught = dry(config="tiny_bf16", distillation=only % "sums", **own)
    assert taught.status == 0, taught.err  # the evaluation's rows, of other sources, have no teacher
    check_refusal(dry(config="tiny_bf16", distillation=only % "sets", **own).err, "sums")
    make = {"distillation__teachers__clean__make__corpus": f"{tmp_path}/none.jsonl"}
    check_refusal(dry(config="tiny_opd", **make).err, "none.jsonl")
    weights = "{mode='alone',teachers={t={kind='weights',path='/none/there'}}}"
    check_refusal(dry(config="tiny_bf16", distillation=weights).err, "distillation.teachers.t.path", "/none/there")


def test_a_ray_address_that_does_not_answer_and_a_run_that_is_not_there_are_refused(dry: Dry) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"127.0.0.1:{s.getsockname()[1]}"
        check_refusal(dry("--ray-address", address).err, address)
        s.listen()
        done = dry("--ray-address", address)
        assert done.status == 0 and f"those of the Ray cluster at {address}" in done.out
    check_refusal(dry("--ray-address", "nonsense").err, "--ray-address", "nonsense")
    done = dry("--ray-address", "auto")
    assert done.status == 0 and "Ray at auto: Ray finds the cluster itself" in done.out
    check_refusal(dry("--resume").err, "--resume")


def test_a_port_in_use_is_refused(dry: Dry) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        check_refusal(dry(rollout__port=str(port)).err, port, 0)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        ({"data__eval": "owner/name"}, "owner/name: its rows are on the hub"),
        ({"reward__name": "{here}/parts.py:unresolved"}, "had no network access (reward of prompt"),
        ({"reward__name": "{here}/parts.py:both_refused"}, "had no network access (reward of prompt"),
        ({"reward__name": "{here}/parts.py:offline"}, "had no network access (reward of prompt"),
        ({"reward": "{name='remote',remote={url='http://127.0.0.1:9'}}"}, "reward remote: the server at http://127.0"),
        (
            {"reward": f"{{name='reward_model',reward_model={{url='{AWAY}',send='chat',tokenizer='owner/name'}}}}"},
            "reward reward_model: the server at http://127.0",
        ),
        ({"cluster__gpus_per_node": "8"}, "the run needs 8 GPUs, but this machine has 0"),
        ({"cluster__nodes": "2"}, "the run needs 2 nodes"),
        ({"model__make": "false", "model__path": "owner/name", "data__train": "{here}/long.jsonl"}, "tokenizer is not"),
    ],
)
def test_what_cannot_be_told_from_here_is_listed_with_status_0(
    dry: Dry, tmp_path: Path, sets: dict[str, str], reason: str
) -> None:
    (tmp_path / "long.jsonl").write_text('{"prompt": "' + "1" * 2000 + '", "answer": "1"}\n')
    done = dry(**sets)
    listed = done.out.partition("not checked by this dry run, but by the run before its first stage:")[2]
    assert done.status == 0 and reason in listed, (done.err, listed)


def test_a_call_has_a_time_limit(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_like.preflight.checks.DRY_CALL_S", 0.2)
    for name in ("endless", "asleep"):
        done = dry(reward__name=f"{{here}}/parts.py:{name}")
        assert done.status == 0 and "no reward within 0.2 s" in done.out


@pytest.mark.parametrize("config", ["tiny", "deepseek_v3_fp8", "kimi_k2_int4_qat"])
def test_neither_network_nor_heavy_libraries_are_needed(dry: Dry, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """A laptop on a train. Not covered: what a user's own part imports."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run connects to nothing")

    for name in ("ray", "transformers", "datasets", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    done = dry(config=config)
    assert done.status == 0, done.err
    assert ("not checked by this dry run" in done.out) == (config != "tiny")


def test_a_right_part_is_called_with_a_row_and_passes(dry: Dry) -> None:
    done = dry(reward__name="{here}/parts.py:right")
    assert done.status == 0 and "not checked" not in done.out, done.err


def test_a_relative_run_directory_is_one_path_on_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes have other working directories. Without a cluster it stays as it was given."""
    monkeypatch.chdir(tmp_path)
    how = ["train", str(CONFIGS / "tiny.toml"), "--run-dir", "runs/a", "--dry-run"]
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        joined = ["--ray-address", f"127.0.0.1:{cluster.getsockname()[1]}"]
        there, here = (
            CliRunner().invoke(app, [*how, *more], env={"COLUMNS": "500", "RAY_ADDRESS": ""}).stdout
            for more in (joined, [])
        )
    for stage in ("fetch", "convert", "stage"):
        assert f"-> {tmp_path}/runs/cache/{stage}-" in there and f"-> runs/cache/{stage}-" in here
    assert f"-> {tmp_path}/runs/a " in there and "-> runs/a " in here
