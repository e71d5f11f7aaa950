"""Agents that play episodes: a function of this process, and programs, by the keys of a configuration.

Not covered: what is recorded of them (tests/rollout/recorder/test_recorder.py).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from miles_like.report.reward_calls import RewardTally
from miles_like.types import EnvironmentLost, Prompt, SampleGroup, SamplingParams
from rollout.config import RolloutConfig
from rollout.episodes.runner import make_episode_runner
from rollout.recorder import agent_process
from rollout.tool_config import AgentConfig
from tests.support.chat_templates import end_ids, tokenizer
from tests.support.refusals import refuses
from tests.support.scripted import Script

pytestmark = pytest.mark.slow  # agents are programs
HERE = Path(__file__)
USER = {"role": "user", "content": "2+3?"}
PARAMS = SamplingParams(max_new_tokens=100, sampling_seed=5, stop_token_ids=end_ids("qwen3"))
LINES = ("Hello.<|im_end|>", "Again.<|im_end|>", "Once more.<|im_end|>")
# an agent as others write it, which finds the endpoint where OpenAI's clients look
PROGRAM = """
import json, os, pathlib, subprocess, sys, urllib.request

def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return json.load(urllib.request.urlopen(request))

given, how = json.load(sys.stdin), sys.argv[2]
assert os.environ.get("MINE_TOKEN") == os.environ["EXPECTED"] and "OTHER_TOKEN" not in os.environ
assert sys.argv[1] == given["messages"][-1]["content"] == "2+3?"
messages = list(given["messages"])
if how == "silent":
    sys.exit(0)
for _ in range(2):
    reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "any", "messages": messages})
    messages += [reply["choices"][0]["message"], {"role": "tool", "content": "go on", "tool_call_id": "c"}]
if how == "fails":
    sys.exit("it is broken")
if how.startswith("/"):
    pathlib.Path(how).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
if how == "waits":
    import time; time.sleep(600)
post(os.environ["MILES_LIKE_REWARD_URL"], {"reward": 0.5})
"""


def prompt() -> Prompt:
    ids = tokenizer("qwen3").encode(
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    return Prompt(id="p", token_ids=tuple(ids), answer="5", messages=(USER,))


class Broken(Script):
    async def continue_sample(self, *of: Any, **more: Any) -> Any:
        raise ConnectionError("the server is gone")


def played(n: int = 1, log: RewardTally | None = None, kind: type[Script] = Script, **agent: Any) -> SampleGroup:
    config = RolloutConfig(agent=AgentConfig(**agent), max_new_tokens=100, max_episode_tokens=400)
    engine = make_episode_runner(config, tokenizer("qwen3")).wrap(kind(*LINES), log)

    async def run() -> SampleGroup:
        try:
            (group,) = await engine.generate([prompt()], n=n, params=PARAMS)
            return group
        finally:
            await engine.close()

    return asyncio.run(run())


def program(how: str, **more: Any) -> SampleGroup:
    env = {"MINE_TOKEN": "", "EXPECTED": "mine"}
    return played(command=(sys.executable, "-c", PROGRAM, "{prompt}", how), env=env, **more)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a program gets one."""
    monkeypatch.setenv("MINE_TOKEN", "mine")
    monkeypatch.setenv("OTHER_TOKEN", "other")


async def two_rows(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0) as client:
        for system in ("Be short.", "Be long."):
            messages: Any = [{"role": "system", "content": system}, USER]
            await client.chat.completions.create(model="m", messages=messages)
    return 0.75


async def gives_up(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> None:
    raise EnvironmentLost("no browser")


async def patient(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> None:
    with suppress(Exception):
        await two_rows(prompt, base_url=base_url, api_key=api_key, seed=seed)
    await asyncio.sleep(60)


async def late(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> None:
    raise TimeoutError("its own")


async def praised(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> Any:
    await two_rows(prompt, base_url=base_url, api_key=api_key, seed=seed)
    return "good"


async def undefined(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> float:
    return float("nan")


async def broken(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> None:
    raise KeyError("a bug")


def test_a_function_gives_rows_of_one_reward() -> None:
    """The prompt of the group has the tokens with which all rows begin."""
    log = RewardTally()
    group = played(2, log, function=f"{HERE}:two_rows")
    found = {k: v for k, v in log.metrics().items() if k.startswith("perf/agent/")}
    names = ("requests", "rows", "forks", "false_forks", "rebuilt")
    assert found == dict(zip([f"perf/agent/{name}" for name in names], (4.0, 4.0, 0.0, 0.0, 0.0), strict=True))
    assert [(s.index, s.row) for s in group.samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {s.reward for s in group.samples} == {0.75}
    start = list(group.prompt.token_ids)
    assert tokenizer("qwen3").decode(start) == "<|im_start|>system\nBe "
    assert all(
        s.token_ids[: len(start)].tolist() == start and not s.loss_mask[: len(start)].any() for s in group.samples
    )


def test_a_function_that_gives_up_discards_its_episode_and_a_bug_ends_the_run() -> None:
    assert played(2, function=f"{HERE}:gives_up").discarded == {"no browser": 2}
    with refuses(RuntimeError, "rollout.agent", "p/0", "'a bug'"):
        played(function=f"{HERE}:broken")
    with refuses(RuntimeError, "rollout.agent", "p/0", "TimeoutError: its own"):
        played(function=f"{HERE}:late")


def test_a_reward_is_a_finite_number() -> None:
    with refuses(RuntimeError, "rollout.agent", "p/0", "finite", "'good'"):
        played(function=f"{HERE}:praised")
    with refuses(RuntimeError, "rollout.agent", "p/0", "finite", "nan"):
        played(function=f"{HERE}:undefined")


def test_an_error_of_the_engine_ends_the_run() -> None:
    """Also where the agent fails of it, gives up, or waits until its time is over."""
    with pytest.raises(ConnectionError, match="the server is gone"):
        program("talks", kind=Broken)
    with pytest.raises(ConnectionError, match="the server is gone"):
        played(function=f"{HERE}:two_rows", kind=Broken)
    with pytest.raises(ConnectionError, match="the server is gone"):
        played(function=f"{HERE}:patient", timeout_s=2, kind=Broken)


def test_a_program_is_recorded(tmp_path: Path) -> None:
    """Its reward is the one that it sends; what it leaves running ends with it."""
    left = tmp_path / "left"
    group = program(str(left))
    (sample,) = group.samples
    assert (sample.turns, sample.reward) == (2, 0.5)
    assert tokenizer("qwen3").decode(sample.token_ids[sample.loss_mask].tolist()) == LINES[0] + LINES[1]
    pid, until = int(left.read_text()), time.monotonic() + 5
    while (
        Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < until
    ):
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            raise ProcessLookupError
        os.kill(pid, 0)


def test_a_killed_run_leaves_no_process_of_an_agent(tmp_path: Path) -> None:
    """Nor what the agent has started."""
    note = tmp_path / "pids"
    agent = "import os, pathlib, subprocess, sys, time\npid = subprocess.Popen(['sleep', '600']).pid\n"
    agent += "pathlib.Path(sys.argv[1] + '.new').write_text(f'{os.getpid()} {pid}')\n"
    agent += "os.rename(sys.argv[1] + '.new', sys.argv[1])\ntime.sleep(600)"
    driver = "import os, subprocess, sys\nhow = dict(start_new_session=True)\n"
    driver += "subprocess.run([sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()), *sys.argv[2:]], **how)"
    words = (sys.executable, "-c", driver, agent_process.__file__, sys.executable, "-c", agent, str(note))
    with subprocess.Popen(words) as run:
        wait_until(note.exists)
        run.kill()
    for pid in note.read_text().split():
        wait_until(lambda pid=pid: has_ended(pid))


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def has_ended(pid: str) -> bool:
    """A zombie too: process 1 of a container may not wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_program_that_fails_costs_its_episode() -> None:
    assert program("fails").discarded == {"agent failed": 1}
    assert program("silent").discarded == {"agent without a request": 1}
    assert program("waits", timeout_s=1.5).discarded == {"agent timeout": 1}


def test_an_agent_that_cannot_be_used_is_refused() -> None:
    with refuses(ValueError, "rollout.agent.env.ABSENT_TOKEN", "export ABSENT_TOKEN"):
        played(command=("true",), env={"ABSENT_TOKEN": ""})
    with refuses(ValueError, "rollout.agent.command", "'/nowhere/agent'"):
        played(command=("/nowhere/agent",))
    with refuses(ValueError, "rollout.agent.function", "rollout.agent.command"):
        AgentConfig(function="a:b", command=("c",))
    with refuses(ValueError, "rollout.agent", "rollout.max_episode_tokens"):
        RolloutConfig(agent=AgentConfig(function="a:b"))
    with refuses(ValueError, "rollout.agent", "rollout.generate", "'c:d'"):
        RolloutConfig(agent=AgentConfig(function="a:b"), generate="c:d", max_episode_tokens=100)
