"""Law: a server one of whose ranks ends, or stops, ends too, with one sentence that names the rank; none of its
processes is left. A model that does not divide is refused before any process is started.

Why it must hold: ranks wait for each other, so a server that stays without one answers nothing and says nothing, until
every limit of its clients has passed. Each way in the middle of requests, and without any. Not covered: what a run does
then (tests/e2e/test_faults.py).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rollout.config import EmbeddedFlags, RolloutConfig
from rollout.embedded.server.app import main
from rollout.sglang.ports import free_port
from rollout.sglang.servers import ServerHandle, ServerLaunch, embedded_command, living, start
from tests.support.exactly import MODELS
from tests.support.fakes import wait_until
from tests.support.refusals import check_refusal
from tests.support.tiny_models import random_tensors, write_checkpoint

LIMIT_S = 4  # without a beat
LONG = {"input_ids": [5, 9, 2], "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hf"), MODELS["mla"], random_tensors(MODELS["mla"]))


@dataclass
class Running:
    server: ServerHandle
    others: list[int]  # process ids of ranks 1, ...

    def generating(self) -> threading.Thread:
        """A request that takes longer than the test, once it is under way."""
        thread = threading.Thread(target=self._ask)
        thread.start()
        assert wait_until(lambda: self._generated() > 5, 30)
        return thread

    def _ask(self) -> None:
        self.answer = httpx.post(f"{self.server.url}/generate", json=LONG, timeout=60)

    def _generated(self) -> int:
        info = httpx.get(f"{self.server.url}/server_info", timeout=60).json()
        return int(info["internal_states"][0]["generated_tokens"])

    def ends(self) -> str:
        """The last line of the log, once no process is left."""
        assert wait_until(lambda: not self.server.alive() and not living(self.server.pid), 30)
        assert self.server.ended() == "exit code 1"
        return self.server.log.read_text().strip().splitlines()[-1]


@contextmanager
def running(path: Path, logs: Path, *more: str) -> Iterator[Running]:
    flags = EmbeddedFlags(tp_size=2, ep_size=2, threads=1)
    launch = ServerLaunch(model_path=path, config=RolloutConfig(embedded=flags), log_dir=logs)
    port = free_port()
    command = [*embedded_command(launch, port), *more]
    with start(command, url=f"http://127.0.0.1:{port}", log=logs / "server.log") as server:
        server.await_ready(60)
        info = httpx.get(f"{server.url}/server_info", timeout=60).json()
        assert (info["tp_size"], info["ep_size"]) == (2, 2)
        yield Running(server, [rank["pid"] for rank in info["ranks"]][1:])


def test_a_rank_that_is_killed_ends_the_server(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path) as r:
        thread = r.generating()
        os.kill(r.others[0], signal.SIGKILL)
        check_refusal(r.ends(), "rank 1", "SIGKILL")  # within half of the limit on a silent rank
        thread.join()
        assert r.answer.status_code == 503 and "rank 1" in r.answer.text


def test_a_rank_that_is_stopped_ends_the_server(path: Path, tmp_path: Path) -> None:
    with running(path, tmp_path, "--rank-timeout", str(LIMIT_S)) as r:
        os.kill(r.others[0], signal.SIGSTOP)
        check_refusal(r.ends(), "rank 1", LIMIT_S, "--rank-timeout")


def test_the_other_ranks_end_with_rank_0(path: Path, tmp_path: Path) -> None:
    """Killed: it ends nothing itself."""
    with running(path, tmp_path) as r:
        first = int(Path(f"/proc/{r.others[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: not Path(f"/proc/{r.others[0]}").exists(), 30)


def test_a_server_that_is_stopped_leaves_no_rank(path: Path, tmp_path: Path) -> None:
    """SIGTERM reaches all ranks at once: those that end with rank 0 are no failure."""
    with running(path, tmp_path) as r:
        os.killpg(r.server.pid, signal.SIGTERM)
        assert wait_until(lambda: not r.server.alive() and not living(r.server.pid), 30)
        assert "error" not in r.server.log.read_text()


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        (("3", "1"), ("num_attention_heads", 4, "tp_size", 3)),
        (("2", "4"), ("ep_size", 4, "tp_size", 2)),
    ],
)
def test_a_model_that_does_not_divide_is_refused(
    sizes: tuple[str, str], facts: tuple[object, ...], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model-path", str(path), "--port", str(free_port()), "--tp-size", sizes[0], "--ep-size", sizes[1]]
    assert main(words) == 1
    check_refusal(capsys.readouterr().err, *facts)
