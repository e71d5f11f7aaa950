"""Server processes: started, awaited, stopped, and never left behind. The servers are stand-ins of a few lines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.config import EmbeddedFlags, RolloutConfig, SGLangFlags
from rollout.sglang import servers, startup
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.ports import free_port
from rollout.sglang.servers import ServerHandle, ServerLaunch, check_port, embedded_command, sglang_command
from rollout.sglang.startup import launch_server
from tests.fuzz.pool import watchdog
from tests.support.chosen import later
from tests.support.fakes import wait_until
from tests.support.refusals import Facts, refuses

HTTP = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"

LAUNCH = ServerLaunch(model_path=Path("/m"), config=RolloutConfig(), log_dir=Path("/logs"))


def words(line: str) -> list[str]:
    return line.split(" ")


def start(tmp_path: Path, code: str, port: int | None = None) -> ServerHandle:
    port = port or free_port()
    command = [sys.executable, "-c", code, str(port)]
    return servers.start(command, url=f"http://127.0.0.1:{port}", log=tmp_path / "logs" / "server.log")


def gone(pid: int) -> bool:
    """No such process, or one that has ended and is not yet collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(p) for p in text.read_text().split()] if text.exists() else []


def test_a_server_is_awaited_and_stopped(tmp_path: Path) -> None:
    """Its whole group is gone afterwards; stopping twice is harmless."""
    with start(tmp_path, HTTP) as server:
        server.await_ready(20)
        assert server.alive()
        pids = [server.pid, *children(server.pid)]
        assert len(pids) == 2
    assert not server.alive() and all(gone(p) for p in pids)
    assert "listening" in server.log.read_text()
    server.stop()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """A hung engine ignores it; the port and memory must come back all the same."""
    server = start(tmp_path, STUBBORN)
    assert wait_until(lambda: "up" in server.log.read_text(), 20)
    (child,) = children(server.pid)
    server.stop(grace_s=0.3)
    assert wait_until(lambda: gone(child)) and not server.alive()


def test_a_server_that_sigterm_does_not_reach_is_killed_at_once(tmp_path: Path) -> None:
    """Under Slurm it is blocked in all that Ray starts, so that a run is saved before its servers end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        server = start(tmp_path, HTTP)
        server.await_ready(20)
        os.killpg(server.pid, signal.SIGTERM)
        assert server.alive()
        with watchdog(60):
            server.stop(grace_s=600.0)
        assert not servers.living(server.pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_stopped_server_has_no_process_left_when_stop_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader has ended by itself; a worker takes its time to end, as one that frees a GPU does."""
    server = start(tmp_path, f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])")
    assert wait_until(lambda: "up" in server.log.read_text() and not server.alive(), 20)
    (worker,) = servers.living(server.pid)

    def later(group: int, number: int) -> None:
        threading.Timer(0.7, os.kill, (worker, number)).start()

    monkeypatch.setattr(servers, "os", SimpleNamespace(**{**vars(os), "killpg": later}))
    server.stop()
    assert gone(worker) and not servers.living(server.pid)


def test_a_server_that_dies_says_why(tmp_path: Path) -> None:
    """The reason is at the end of its log, and the wait ends at once, not at the time limit."""
    with start(tmp_path, "import sys; print('CUDA out of memory'); sys.exit(3)") as server:
        with refuses(RolloutError, 3, "server.log", "CUDA"):
            server.await_ready(20)
        assert not server.alive()
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with start(tmp_path, killed) as server, refuses(RolloutError, "SIGKILL"):
        server.await_ready(20)


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    """Named with the setting to raise."""
    server = start(tmp_path, STUBBORN)
    with refuses(
        RolloutError, "not ready within 0.3 s", "rollout.start_timeout_s", unrecorded="the log may still be empty"
    ):
        server.await_ready(0.3)
    server.stop(grace_s=0.1)


PARENT = """
import sys, time
from pathlib import Path
from rollout.sglang import servers, startup
h = servers.start([sys.executable, "-c", "import time; time.sleep(60)"], url="http://x", log=Path(sys.argv[1]))
print(h.pid, flush=True)
time.sleep(60)
"""


def test_a_guard_imports_no_torch() -> None:
    """Each server waits for its guard: torch takes seconds and 200 MB."""
    code = "import sys, rollout.guard; print('torch' in sys.modules, 'numpy' in sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout.split() == ["False", "False"], done.stderr


SEES = "import json, os, sys; print(json.dumps([dict(os.environ), sys.prefix]), flush=True)"


def test_a_server_of_another_environment_inherits_none_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's packages would hide the engine's, whose compilers look for `ninja` in PATH."""
    venv.create(tmp_path / "engine", with_pip=False, symlinks=True)
    python = str(tmp_path / "engine" / "bin" / "python")
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, os.environ.get(name, str(tmp_path)))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    secrets = {"HF_TOKEN": "a-secret-of-the-hub"}
    for foreign in (True, False):
        log = tmp_path / f"{foreign}.log"
        environment = servers.ServerEnvironment(plain={"NCCL_DEBUG": "INFO"}, secrets=secrets, foreign=foreign)
        with servers.start([python, "-c", SEES], url="http://x", log=log, environment=environment):
            wait_until(lambda log=log: log.read_text().endswith("\n"))
        assert "a-secret" not in log.read_text() and "a-secret" not in repr(environment)
        seen, prefix = json.loads(log.read_text())
        assert prefix == str(tmp_path / "engine")
        assert (seen["NCCL_DEBUG"], seen["HF_TOKEN"]) == ("INFO", "<secret>")
        assert foreign is not bool({"PYTHONPATH", "VIRTUAL_ENV", "PYTHONSTARTUP"} & set(seen))
        assert foreign is (seen["PATH"].split(os.pathsep)[0] == str(Path(python).parent))


def test_a_server_gets_the_variables_of_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines; that of a stock server runs in the named interpreter's environment, and its flags follow."""
    given: list[tuple[list[str], servers.ServerEnvironment]] = []

    def start(command: list[str], *, environment: servers.ServerEnvironment, **_: object) -> None:
        given.append((command, environment))

    monkeypatch.setattr(startup, "start", start)
    stock = RolloutConfig(engine="sglang", sglang=SGLangFlags(python="/e/bin/python"))
    for config in (RolloutConfig(), RolloutConfig(engine="sglang"), stock):
        startup.begin(replace(LAUNCH, config=config, env={"A": "1"}, secrets={"MY_KEY": "x"}), free_port())
    assert [command[0] for command, _ in given] == [sys.executable, sys.executable, "/e/bin/python"]
    assert [e.foreign for _, e in given] == [False, False, True]
    assert all((e.plain, e.secrets) == ({"A": "1"}, {"MY_KEY": "x"}) for _, e in given)


def test_an_interpreter_that_nothing_runs_is_refused() -> None:
    with refuses(ValueError, "rollout.sglang.python", "'/e/bin/python'", "rollout.engine"):
        RolloutConfig(sglang=SGLangFlags(python="/e/bin/python"))
    with refuses(ValueError, "rollout.sglang.python", "'python3.12'"):
        SGLangFlags(python="python3.12")


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize(
    "killed", later(["parent", "guard"], ["parent"], beside="tests/rollout/sglang/test_servers.py")
)
def test_no_server_outlives_who_started_it(tmp_path: Path, killed: str) -> None:
    """SIGKILL leaves no chance to clean up; a left-over server would hold its port and memory. Ray kills the guards
    itself, as children of workers whose driver is gone."""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        guard = int(parent.stdout.readline())
        assert wait_until(lambda: len(children(guard)) == 1, 20)
        (child,) = children(guard)
        assert not gone(child)
        os.kill(parent.pid if killed == "parent" else guard, signal.SIGKILL)
        assert wait_until(lambda: gone(child), 10)
        parent.kill()
    assert wait_until(lambda: gone(guard), 10)


def test_a_port_in_use_is_said_before_starting(tmp_path: Path) -> None:
    """Otherwise a server of another run would answer /health in our server's place."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with refuses(ValueError, port, "rollout.port"):
            check_port(port)
        with refuses(ValueError, port):
            launch_server(replace(LAUNCH, port=port, log_dir=tmp_path))
        assert not list(tmp_path.iterdir())
    check_port(port)


def test_a_failed_launch_leaves_no_process(tmp_path: Path) -> None:
    """The embedded engine with a model that is not there: RolloutError, and nothing runs on."""
    before = set(children(os.getpid()))
    with refuses(RolloutError, "ended with exit code 1", "no_model", unrecorded="the log is named by a free port"):
        launch_server(replace(LAUNCH, model_path=tmp_path / "no_model", log_dir=tmp_path))
    assert not [c for c in set(children(os.getpid())) - before if not gone(c)]


def test_embedded_command() -> None:
    """The whole command line, as the engine's own parser takes it."""
    config = RolloutConfig(
        embedded=EmbeddedFlags(
            dtype="bfloat16",
            weights="codes",
            threads=3,
            max_running_requests=7,
            max_total_tokens=4096,
            context_length=256,
        )
    )
    command = embedded_command(replace(LAUNCH, config=config, weight_version=5, activations="fp8"), 31000)
    assert command[1:] == words(
        "-m rollout.embedded.server --model-path /m --host 127.0.0.1 --port 31000 --threads 3 --dtype bfloat16 "
        "--weights codes --activations fp8 --max-total-tokens 4096 --max-running-requests 7 --context-length 256 "
        "--weight-version 5 --enable-return-routed-experts --disable-radix-cache"
    )
    without = embedded_command(replace(LAUNCH, config=config, return_routed_experts=False), 31000)
    assert "--enable-return-routed-experts" not in without
    for key, exact, uncached in ((True, (1, 1), True), (None, (1, 1), False), (False, None, False)):
        config = RolloutConfig(embedded=EmbeddedFlags(disable_radix_cache=key))
        flags = embedded_command(replace(LAUNCH, config=config, exact=exact), 31000)
        assert ("--disable-radix-cache" in flags) == uncached


def test_sglang_command_on_one_node() -> None:
    """Golden: flags are spelt by hand after SGLang 0.5.23's --help. That the server takes them is not covered here."""
    assert sglang_command(replace(LAUNCH, config=RolloutConfig(engine="sglang")), 30000)[1:] == words(
        "-m sglang.launch_server --model-path /m --host 127.0.0.1 --port 30000 --tp-size 1 --ep-size 1 "
        "--mem-fraction-static 0.8 --kv-cache-dtype auto --weight-version 0 --skip-tokenizer-init "
        "--enable-return-routed-experts"
    )


def test_sglang_command_over_nodes() -> None:
    """An engine of four nodes with attention data parallelism and DeepEP, as the large configurations start it."""
    config = RolloutConfig(
        engine="sglang",
        sglang=SGLangFlags(
            tp_size=32,
            ep_size=32,
            dp_size=32,
            enable_dp_attention=True,
            moe_a2a_backend="deepep",
            deepep_mode="low_latency",
            mem_fraction_static=0.7,
            kv_cache_dtype="fp8_e4m3",
            chunked_prefill_size=65536,
            max_running_requests=1024,
            context_length=32768,
            attention_backend="fa3",
            enable_memory_saver=True,
            enable_deterministic_inference=True,
        ),
    )
    launch = replace(
        LAUNCH,
        config=config,
        host="10.0.0.2",
        node_rank=1,
        nnodes=4,
        dist_init_addr="10.0.0.1:20064",
        weight_version=3,
        return_routed_experts=False,
    )
    assert sglang_command(launch, 30000)[1:] == words(
        "-m sglang.launch_server --model-path /m --host 10.0.0.2 --port 30000 --tp-size 32 --ep-size 32 "
        "--mem-fraction-static 0.7 --kv-cache-dtype fp8_e4m3 --weight-version 3 --attn-dp-size 32 "
        "--moe-a2a-backend deepep --deepep-mode low_latency --chunked-prefill-size 65536 --max-running-requests 1024 "
        "--context-length 32768 --attention-backend fa3 --nnodes 4 --node-rank 1 --dist-init-addr 10.0.0.1:20064 "
        "--skip-tokenizer-init --enable-memory-saver --enable-deterministic-inference"
    )


@pytest.mark.parametrize(
    ("flags", "nnodes", "facts"),
    [
        ({"dp_size": 2}, 1, ("rollout.sglang.dp_size", 2)),
        ({"tp_size": 8, "dp_size": 3, "enable_dp_attention": True}, 1, ("rollout.sglang.dp_size", 3, "tp_size", 8)),
        ({}, 2, (2, "dist_init_addr")),
    ],
)
def test_flags_that_contradict_each_other(flags: dict[str, object], nnodes: int, facts: Facts) -> None:
    """Each would fail on the server minutes later, after loading the model."""
    config = RolloutConfig(engine="sglang", sglang=SGLangFlags.model_validate(flags))
    with refuses(ValueError, *facts):
        sglang_command(replace(LAUNCH, config=config, nnodes=nnodes), 1)
