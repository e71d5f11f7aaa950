"""What a run on one machine leaves open while it runs, and what it leaves when SIGTERM ends it: looked at from outside,
in the middle of one small run and after its end.

Not covered: several machines; what stock SGLang opens (tests/sglang_cpu).
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from miles_like.checkpoint.run_state import load_latest
from rollout.server_key import VARIABLE
from tests.e2e.conftest import FEW, ROOT, environment
from tests.e2e.test_faults import descendants, in_mid_run, started
from tests.support.local_run import SMALL_MODEL
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

PLANTED = "planted-4f1d8a2b9c7e"

JOIN = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("JOINED", ray.get(ray.remote(lambda: __import__("os").environ.get("SECRET_OF_THE_RUN")).remote()))
"""
ASK = """
import sys
from ray._raylet import GcsClient
print("KEYS", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=20))
"""


class Seen(NamedTuple):
    """Of the run's processes, the driver included, between two of its steps."""

    listeners: list[tuple[str, str, int]]  # process, address, port
    commands: list[str]
    environments: list[dict[str, str]]
    gcs: str
    strangers: dict[str, subprocess.CompletedProcess[str]]
    unasked: dict[str, int]  # path of the rollout server -> status, without a key
    run_dir: Path
    left: list[list[str]]  # command lines of processes that outlived the driver
    status: int | None
    output: str


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *descendants(process)]


def listening(processes: list[psutil.Process]) -> Iterator[tuple[str, str, int]]:
    for p in processes:
        for c in p.net_connections(kind="inet"):
            if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and c.laddr:  # CONN_NONE: UDP
                yield p.name(), c.laddr.ip, c.laddr.port


def of_a_small_model(where: Path) -> tuple[str, ...]:
    """Settings of a run on two ranks whose checkpoint is there: to make one takes longer than the run."""
    hf = tiny(**SMALL_MODEL)
    model = write_checkpoint(where / "hf", hf, random_tensors(hf))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(ROOT / "configs" / "tiny" / name, model / name)
    given = ("model.make=false", f"model.path={model}", "precision.format=bf16", "precision.qat=false", "parallel.dp=2")
    return tuple(word for setting in given for word in ("--set", setting))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Two trainer ranks, a server and a driver; then the run receives a signal and stops."""
    where = tmp_path_factory.mktemp("closed")
    run_dir = where / "runs" / "closed"
    with started(run_dir, *of_a_small_model(where), size=FEW, SECRET_OF_THE_RUN=PLANTED) as process:
        in_mid_run(process, run_dir)
        processes = family(process)
        listeners = list(listening(processes))
        commands = [" ".join(p.cmdline()) for p in processes]
        environments = [p.environ() for p in processes]
        gcs = next(f"127.0.0.1:{port}" for name, _, port in listeners if name == "gcs_server")
        stranger = {name: value for name, value in environment().items() if not name.startswith(("RAY_", "SECRET"))}
        stranger |= {
            "HOME": str(tmp_path_factory.mktemp("elsewhere")),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        }
        wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        asked = {"asks": (ASK, {}), "asks with another token": (ASK, wrong), "joins": (JOIN, {})}
        with ThreadPoolExecutor(len(asked)) as pool:  # each waits for an answer for some seconds
            done = [
                pool.submit(
                    subprocess.run,
                    [sys.executable, "-c", code, gcs],
                    env=stranger | more,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                for code, more in asked.values()
            ]
            strangers = {what: one.result() for what, one in zip(asked, done, strict=True)}
        url = next(c.split("--port ")[1].split()[0] for c in commands if "-m rollout.embedded.server" in c)
        with httpx.Client(base_url=f"http://127.0.0.1:{url}", trust_env=False, timeout=30) as http:
            unasked = {path: http.get(path).status_code for path in ("/health", "/model_info", "/server_info")}
            unasked |= {path: http.post(path, json={}).status_code for path in ("/pause_generation", "/generate")}
        assert process.poll() is None, "the run ended before it was looked at"
        started_by_it = descendants(process)
        process.terminate()
        output, _ = process.communicate(timeout=120)
        _, alive = psutil.wait_procs(started_by_it, timeout=20)
    left, status = [p.cmdline() for p in alive], process.returncode
    yield Seen(listeners, commands, environments, gcs, strangers, unasked, run_dir, left, status, output)


def test_every_listener_is_on_loopback(seen: Seen) -> None:
    """Of Ray, trainer ranks (store and gloo) and rollout servers; each kind must be among them, or nothing was seen."""
    names = " ".join(name for name, *_ in seen.listeners)
    for kind in ("gcs_server", "raylet", "ray::_Rank", "python"):
        assert kind in names, seen.listeners
    beyond = [
        found for found in seen.listeners if not ipaddress.ip_address(found[1].removeprefix("::ffff:")).is_loopback
    ]
    assert not beyond


def test_sigterm_saves_the_step_and_leaves_no_process(seen: Seen) -> None:
    """A batch system's signal: no server, rank or Ray process stays behind, and the step that the run is at is saved,
    whole: --resume would go on from there."""
    assert not seen.left and seen.status == 128 + signal.SIGTERM
    latest = load_latest(seen.run_dir / "checkpoints")
    assert latest is not None
    rows = (seen.run_dir / "metrics.jsonl").read_text().splitlines()
    assert latest[1].step == json.loads(rows[-1])["step"] >= 2
    assert f"stopped: SIGTERM: step {latest[1].step} is saved, --resume goes on from it" in seen.output
    assert not (seen.run_dir / ".complete.json").exists()


def test_a_process_without_the_token_is_refused_by_ray(seen: Seen) -> None:
    """Asked directly, without a token and with another one, the cluster refuses; joining fails too."""
    for what, done in seen.strangers.items():
        assert done.returncode != 0 and "KEYS" not in done.stdout and "JOINED" not in done.stdout, what
        assert PLANTED not in done.stdout + done.stderr
    for what in ("asks", "asks with another token"):
        assert "Authentication token is missing or incorrect" in seen.strangers[what].stderr, what


def secrets_of(seen: Seen) -> dict[str, str]:
    """By the variables that hold them, as the run's processes were started with them."""
    names = ("RAY_AUTH_TOKEN", "SECRET_OF_THE_RUN", VARIABLE)
    found = {name: value for e in seen.environments for name, value in e.items() if name in names}
    assert set(found) == set(names) and found["SECRET_OF_THE_RUN"] == PLANTED
    sampling, control = found.pop(VARIABLE).split()
    return found | {"the server's key": sampling, "the server's control key": control}


def test_no_secret_is_in_a_file_of_the_run_or_on_a_command_line(seen: Seen) -> None:
    secrets = secrets_of(seen)
    looked_at = 0
    for path in (p for p in seen.run_dir.rglob("*") if p.is_file()):
        content = path.read_bytes()
        looked_at += 1
        for name, value in secrets.items():
            assert value.encode() not in content, f"{name} is in {path}"
    assert looked_at > 10
    for name, value in secrets.items():
        assert not [c for c in seen.commands if value in c], name


def test_servers_do_not_inherit_ray_s_token(seen: Seen) -> None:
    servers = [e for c, e in zip(seen.commands, seen.environments, strict=True) if "-m rollout.embedded.server" in c]
    assert servers and not [e for e in servers if "RAY_AUTH_TOKEN" in e]


def test_the_run_s_server_answers_nobody_without_its_key(seen: Seen) -> None:
    assert seen.unasked == {
        "/health": 200,
        "/model_info": 401,
        "/server_info": 401,
        "/pause_generation": 401,
        "/generate": 401,
    }
