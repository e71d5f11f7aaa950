"""What a run on one machine leaves open while it runs, looked at from outside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from rollout.server_key import VARIABLE
from tests.e2e.conftest import environment

PLANTED = "planted-4f1d8a2b9c7e"
SECRET = "SECRET_OF_THE_RUN"  # the variable that holds it

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
    strangers: dict[str, subprocess.CompletedProcess[str]]
    unasked: dict[str, int]  # path of the rollout server -> status, without a key

    def secrets(self) -> dict[str, str]:
        """By the variables that hold them, as the run's processes were started with them."""
        names = ("RAY_AUTH_TOKEN", SECRET, VARIABLE)
        found = {name: value for e in self.environments for name, value in e.items() if name in names}
        assert set(found) == set(names) and found[SECRET] == PLANTED
        sampling, control = found.pop(VARIABLE).split()
        return found | {"the server's key": sampling, "the server's control key": control}


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def look(process: subprocess.Popen[str], elsewhere: Path) -> Seen:
    """At a run that is stopped meanwhile. elsewhere: the home of strangers, without a token of Ray."""
    driver = psutil.Process(process.pid)
    driver.suspend()
    try:
        processes = [driver, *descendants(process)]
        listeners = list(_listening(processes))
        commands = [" ".join(p.cmdline()) for p in processes]
        gcs = next(f"127.0.0.1:{port}" for name, _, port in listeners if name == "gcs_server")
        return Seen(
            listeners, commands, [p.environ() for p in processes], _strangers(gcs, elsewhere), _unasked(commands)
        )
    finally:
        driver.resume()


def _listening(processes: list[psutil.Process]) -> Iterator[tuple[str, str, int]]:
    for p in processes:
        for c in p.net_connections(kind="inet"):
            if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and c.laddr:  # CONN_NONE: UDP
                yield p.name(), c.laddr.ip, c.laddr.port


def _strangers(gcs: str, home: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Processes without the run's token that ask its Ray, at the address `gcs`, or join it."""
    variables = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
    variables |= {
        "HOME": str(home),
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
                env=variables | more,
                capture_output=True,
                text=True,
                timeout=120,
            )
            for code, more in asked.values()
        ]
        return {what: one.result() for what, one in zip(asked, done, strict=True)}


def _unasked(commands: list[str]) -> dict[str, int]:
    port = next(c.split("--port ")[1].split()[0] for c in commands if "-m rollout.embedded.server" in c)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as http:
        got = {path: http.get(path).status_code for path in ("/health", "/model_info", "/server_info")}
        return got | {path: http.post(path, json={}).status_code for path in ("/pause_generation", "/generate")}
