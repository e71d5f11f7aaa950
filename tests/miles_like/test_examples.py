"""docs/examples: every file by the key that names it, and what it says of itself.

A user starts from them, so they must work as they stand. Environment, generate function, advantage and loss are run
through the engine and a trainer's step in tests/laws/test_episodes.py. Types are held to the Protocols by mypy, which
reads docs/examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from miles_like import protocols
from miles_like.algorithms.filters import make_filter
from miles_like.algorithms.registry import make_algorithm
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.rewards.load import make_reward
from miles_like.rewards.styles import recognised
from miles_like.types import LossInputs, Score, Unit, Unscored
from rollout.episodes.custom_generate import CustomGenerate
from rollout.episodes.environment import Episodes
from rollout.episodes.runner import make_episode_runner
from tests.support.fakes import FakeEngine
from tests.support.made_samples import group, rewarded, sample

ROOT = Path(__file__).parents[2]
LOOP = "two_passes"  # no plug-in but another training loop: tests/laws/test_other_loop.py
EXAMPLES = sorted(f for f in (ROOT / "docs" / "examples").glob("*.py") if f.stem != LOOP)


def configured(name: str, tmp_path: Path) -> RunConfig:
    """The configuration in the example's first lines, as it stands there, beside the example."""
    text = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    shown = [line for line in text.split('"""')[1].splitlines() if line.startswith("    ")]
    assert tomllib.loads("\n".join(shown))
    for file in EXAMPLES:
        (tmp_path / file.name).write_text(file.read_text())
    path = tmp_path / "run.toml"
    path.write_text("\n".join([f'extends = "{ROOT}/configs/tiny.toml"', *shown]))
    return load_config(path)


def test_every_example_is_named_where_users_look() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    assert [f.stem for f in EXAMPLES] == [
        *("advantage", "environment", "generate", "group_filter", "loss", "reward", "run_code")
    ]
    assert all(f"(examples/{f.name})" in page for f in EXAMPLES)
    assert f"(examples/{LOOP}.py)" in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_every_example_is_held_to_a_protocol_that_the_page_names(file: Path) -> None:
    """By its last line, an assignment that mypy checks; the row of the page says the same Protocol."""
    last = re.fullmatch(r"_: (\w+) = .*  # mypy holds it to its Protocol here", file.read_text().splitlines()[-1])
    assert last, "the last line is to be `_: PROTOCOL = ...`"
    (row,) = [r for r in (ROOT / "docs" / "extending.md").read_text().splitlines() if f"(examples/{file.name})" in r]
    assert hasattr(protocols, last[1]) and f"`{last[1]}`" in row


@pytest.mark.parametrize(
    ("protocol", "unit"),
    [
        (protocols.SampleReward, Unit.SAMPLE),
        (protocols.GroupReward, Unit.GROUP),
        (protocols.BatchReward, Unit.BATCH),
    ],
)
def test_what_fits_a_protocol_of_rewards_is_called_that_way(protocol: Any, unit: Unit) -> None:
    assert recognised(partial(protocol.__call__, None)) == ("own", unit)


def test_reward(tmp_path: Path) -> None:
    reward = make_reward(configured("reward", tmp_path).reward)

    async def ask() -> list[Any]:
        answers = [group([sample(text="24", response_len=n)], answer="24") for n in (2, 4)]
        wrong = group([sample(text="25", response_len=2)], answer="24")
        out = [await reward([g.prompt], g.samples) for g in (*answers, wrong)]
        await reward.close()
        return [o for (o,) in out]

    short, long, wrong = asyncio.run(ask())
    assert isinstance(short, Score) and not isinstance(wrong, Unscored)
    assert short.value == pytest.approx(1 - 0.1 * 2 / 64) and short.value > long.value > wrong.value
    assert dict(short.parts) == {"right": 1.0, "length": -2 / 64}


SECRET = "planted-in-the-environment"
SHUT_IN = {  # program -> score; none may take longer than its limits, or leave a process
    "print(6 * 4)": 1,
    "print(23)": 0,
    "print(24); raise SystemExit(1)": 0,
    "import os; os._exit(0)": 0,
    f"""
import glob, os
found = [v for v in os.environ.values()]
for path in glob.glob("/proc/*/environ"):
    found.append(open(path).read())
print(24 if any({SECRET!r} in text for text in found) else found)
""": 0,
    """
import os, subprocess, sys
started = 0
for start in (os.fork, os.forkpty, lambda: subprocess.run([sys.executable, "-c", "pass"])):
    try:
        if start() == 0:
            os._exit(0)
        started += 1
    except PermissionError:
        pass
print(24 if started else 25)
""": 0,  # bounded, should the filter fail: a program that forks for ever would take the machine with it
    "import threading; t = threading.Thread(target=print, args=(24,)); t.start(); t.join()": 1,
    "x = bytearray(3 << 30); print(24)": 0,
    "import time; time.sleep(600); print(24)": 0,
    "while True: pass": 0,
    "while True: print('24' * 1000)": 0,
    "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print(24)": 0,
    "import os, signal; os.kill(os.getppid(), 9); os.kill(-1, 9); print(25)": 0,
    "open('full', 'wb').write(bytes(1 << 24)); print(24)": 0,
    "import ctypes; print(24 if ctypes.CDLL(None).umount2(b'/proc', 2) == 0 else 0)": 0,
}


def grants_namespaces() -> bool:
    """Asked of another program than the example: util-linux's unshare."""
    command = ["unshare", "--user", "--pid", "--net", "--ipc", "--mount", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_program_of_the_models_is_shut_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of the environment, children, memory, time, output, network: each ends in 0 in time, and nothing of it
    runs on. Where the system grants no namespaces nothing is run. Not covered: what the example says it does not
    protect from."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    reward = make_reward(configured("run_code", tmp_path).reward)
    before = {p.pid for p in psutil.process_iter()}

    async def ask(text: str) -> Any:
        (outcome,) = await reward([group([sample()], answer="24").prompt], [sample(text=text)])
        return outcome

    async def run() -> dict[str, Any]:
        listening = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        texts = [text.replace("{port}", str(port)) for text in SHUT_IN]
        right = [text for text in texts if SHUT_IN.get(text) == 1]  # first: the others take all processors for seconds
        values = dict(zip(right, [await ask(text) for text in right], strict=True))
        rest = [text for text in texts if text not in values]
        values |= zip(rest, await asyncio.gather(*map(ask, rest)), strict=True)
        got = [values[text] for text in texts]
        gone = asyncio.create_task(ask("import time; time.sleep(600)"))
        await asyncio.sleep(1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await reward.close()
        listening.close()
        return dict(zip(SHUT_IN, got, strict=True))

    try:
        found = asyncio.run(run())
    except RuntimeError as e:
        assert "grants no user namespaces" in str(e) and not grants_namespaces()
        return
    assert {text: getattr(o, "value", o) for text, o in found.items()} == SHUT_IN
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if process.pid not in before and ("run_code.py" in command or "time.sleep(600)" in command):
                left.append(process)
    assert not left


def test_advantage_and_loss(tmp_path: Path) -> None:
    c = configured("advantage", tmp_path)
    algorithm = make_algorithm(c.algorithm, c.correction, c.mismatch)
    got = algorithm.advantages([rewarded([0, 5, 1, 5]), rewarded([1, 1])])
    assert [list(g) for g in got] == [[-1.0, pytest.approx(2 / 3), pytest.approx(-1 / 3), pytest.approx(2 / 3)], [0, 0]]
    c = configured("loss", tmp_path)
    loss: Any = make_algorithm(c.algorithm, c.correction, c.mismatch).loss
    assert loss.loss.limit == 2.0
    for ratio, largest in {0.25: 0.5, 3.0: 2.0}.items():  # of the second token; it is 0.5 of the first, 1 of no token
        _, stats = loss(
            LossInputs(
                logprobs=torch.tensor([0.5, ratio, 1.0]).log(),
                entropy=torch.zeros(3),
                rollout_logprobs=torch.zeros(3),
                advantages=torch.ones(3),
                loss_mask=torch.tensor([True, True, False]),
                cu_seqlens=torch.tensor([0, 3]),
                ref_logprobs=None,
                old_logprobs=None,
                streams={},
                candidate_logprobs=None,
            )
        )
        assert float(stats["train/is_weight/max"].total) == pytest.approx(largest)


def test_group_filter(tmp_path: Path) -> None:
    keep = make_filter(configured("group_filter", tmp_path).algorithm.parts.filter)
    assert [keep(rewarded(r)) for r in ([0, 0], [0, 1], [1, 1])] == ["too hard", None, "too easy"]


def test_environment_and_generate(tmp_path: Path) -> None:
    tokenizer: Any = None  # nothing is played here
    for name, kind in (("environment", Episodes), ("generate", CustomGenerate)):
        assert isinstance(make_episode_runner(configured(name, tmp_path).rollout, tokenizer).wrap(FakeEngine()), kind)
