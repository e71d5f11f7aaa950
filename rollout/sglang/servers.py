"""Server processes of both engines: started and stopped. Their command lines are pure functions of ServerLaunch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import httpx
import psutil

from miles_like.hf.checkpoint import read_config
from rollout.config import PublishConfig, RolloutConfig
from rollout.guard import Task
from rollout.server_key import ServerKey, environment_with
from rollout.server_url import tls
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.layer_states import forward_hooks
from rollout.sglang.ports import listeners
from rollout.wire.bodies import request_bytes
from rollout.wire.endpoints import HEALTH
from rollout.wire.layer_states import FLAG

_POLL_S = 0.1
_ENDED_S = 30.0  # time limit for killed processes to end: the driver frees a GPU's memory first
_LOG_LINES = 20
SERVER_PROMPTS = 64  # of context length, the embedded server's default limit for one request


class ServerHandle:
    """A running server process and its child processes. As a context manager it stops them on exit.

    key_file: read by the server when it starts; removed once the server answers or is stopped. name: for messages.
    log_start: byte of the log from which the lines are this server's.
    """

    def __init__(
        self,
        url: str,
        process: subprocess.Popen[bytes],
        log: Path,
        key_file: Path | None = None,
        name: str | None = None,
        log_start: int = 0,
    ) -> None:
        self.url = url
        self.log = log
        self.log_start = log_start
        self.name = name or f"server {url}"
        self.ended_at: float | None = None  # by the monotonic clock, in seconds
        self._ended = threading.Event()
        self._process = process
        self._key_file = key_file
        threading.Thread(target=self._note_end, daemon=True, name="server end").start()

    def _note_end(self) -> None:
        with contextlib.suppress(ChildProcessError):  # collected by `stop`
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.ended_at = time.monotonic()
        self._ended.set()

    def await_end(self) -> None:
        """Waits until the process has ended."""
        self._ended.wait()

    @property
    def pid(self) -> int:
        """The leader of the process group, which is rollout.guard."""
        return self._process.pid

    def alive(self) -> bool:
        return self._exit_code() is None

    def _exit_code(self) -> int | None:
        """None while it runs. An ended leader stays a zombie until `stop`, so that its group's id is not reused."""
        if self._process.returncode is not None:
            return self._process.returncode
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status

    def listeners(self) -> tuple[bool, list[int | None]]:
        """(whether a process of this server listens at its port, other processes that do; None: of another user). A
        server that answers there may be another run's. Where the system does not say, it is taken for this one."""
        parts = urlsplit(self.url)
        found = listeners(parts.hostname or "", parts.port or 0)
        own = {*living(self.pid)}
        with contextlib.suppress(psutil.Error):
            own |= {child.pid for child in psutil.Process(self.pid).children(recursive=True)}
        return not found or any(pid in own for pid in found), [pid for pid in found if pid not in own]

    def await_ready(self, timeout_s: float) -> None:
        """Wait until /health of this server answers 200. Raises RolloutError with the end of the log if it does not."""
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False, verify=tls(self.url)) as http:
            while time.monotonic() < deadline:
                self.check_alive()
                try:
                    if http.get(HEALTH).status_code == 200 and self.listeners()[0]:
                        self.answered()
                        return
                except httpx.HTTPError:
                    pass  # not listening yet
                time.sleep(_POLL_S)
        raise RolloutError(
            f"server {self.url} was not ready within {timeout_s:g} s: raise rollout.start_timeout_s, or see "
            f"{self.log}, which ends:\n{self.tail()}"
        )

    def check_alive(self) -> None:
        """Raises RolloutError with the end of the log if the process has ended."""
        if (how := self.ended()) is not None:
            raise RolloutError(f"{self.name} ended with {how}; {self.log} ends:\n{self.tail()}")

    def ended(self) -> str | None:
        """The exit code or signal with which the process has ended; None while it runs."""
        code = self._exit_code()
        if code is None:
            return None
        return f"exit code {code}" if code <= 128 else f"signal {signal.Signals(code - 128).name}"

    def tail(self) -> str:
        """The end of the log."""
        return log_tail(self.log)

    def answered(self) -> None:
        """Call when the server has read its key file, which is then removed."""
        self._remove_key_file()

    def _remove_key_file(self) -> None:
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)

    def stop(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM to the process group and SIGKILL after `grace_s` seconds; return when all its processes have
        ended, and with them their memory and ports. Does nothing if it was stopped before. Where this process blocks
        SIGTERM, as under Slurm (miles_like/launch/slurm.sh), the server does too: SIGKILL is sent at once."""
        self._remove_key_file()
        if self._process.returncode is not None:
            return
        if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            grace_s = 0.0
        if self.alive():
            os.killpg(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        # Even if the leader has ended: worker processes of the server (SGLang's detokenizer) may be left in the group.
        os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _ENDED_S
        while living(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._process.wait()  # last, because the group's id may be reused then

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def living(group: int) -> list[int]:
    """Processes of a process group that have not ended. Empty where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def log_tail(log: Path, lines: int = _LOG_LINES) -> str:
    """The last `lines` lines of a server's log, which usually contain the reason why it ended."""
    if not log.exists():
        return "(no log)"
    with log.open("rb") as f:
        f.seek(max(0, log.stat().st_size - 16384))
        return "\n".join(f.read().decode("utf-8", "replace").splitlines()[-lines:]) or "(an empty log)"


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raises ValueError if the port is in use. A server would detect this only after loading the model."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            s.bind((host, port))
        except OSError as e:
            raise ValueError(
                f"port {port} on {host} cannot be used ({e.strerror}): set rollout.port to a different port, or "
                "remove it to use any free port"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEnvironment:
    """Additions to the environment of a server beyond that of the process that starts it.

    foreign: the server is run by the Python of another virtual environment, whose packages this one's variables hide.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    foreign: bool = False
    modules: Path | None = None  # a folder whose modules the server imports too


def start(
    command: list[str],
    *,
    url: str,
    log: Path,
    key: ServerKey | None = None,
    key_file: Path | None = None,
    environment: ServerEnvironment | None = None,
    name: str | None = None,
) -> ServerHandle:
    """Start `command` in a separate process group that ends with this process. stdout and stderr go to `log`.

    key: passed in the server's environment, and redacted in the log, as the secrets of `environment` are.
    """
    environment = environment or ServerEnvironment()
    log.parent.mkdir(parents=True, exist_ok=True)
    modules = "" if environment.modules is None else str(environment.modules)
    task = Task(os.getpid(), environment.foreign, tuple(environment.secrets), command, modules)
    guard = [sys.executable, "-m", "rollout.guard", *task.words()]
    with log.open("ab") as out:
        log_start = out.tell()
        process = subprocess.Popen(
            guard,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment_with(key), **environment.plain, **environment.secrets},
        )
    return ServerHandle(url, process, log, key_file, name, log_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """How to start one rollout server, or the part of it that runs on one node. It can be pickled."""

    model_path: Path
    config: RolloutConfig
    log_dir: Path
    port: int | None = None  # None: any free one
    host: str = "127.0.0.1"
    weight_version: int = 0
    return_routed_experts: bool = True  # False for a model without experts: stock SGLang then fails with the flag
    key: ServerKey | None = None  # required of requests; None: no key, and the server listens on loopback only
    env: Mapping[str, str] = field(default_factory=dict)  # variables of the server's process
    secrets: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # variables that are neither printed nor logged
    # the embedded engine only
    activations: str = "none"  # "fp8": round the inputs of quantized linears, as the trainer does
    exact: tuple[int, int] | None = None  # tensor- and expert-tensor-parallel ranks of a deterministic trainer
    bucket_bytes: int = PublishConfig().bucket_bytes  # of the tensors that the run publishes in one request
    title: str = "rollout server"  # and its number in its run, for messages
    index: int | None = None  # None: it is named by its URL
    # a stock server that spans several nodes
    node_rank: int = 0
    nnodes: int = 1
    traces: Path | None = None  # folder for the spans of the embedded engine; None: it records none
    layer_states: Path | None = None  # give the residual stream at every layer; a stock server writes it there
    dist_init_addr: str | None = None  # HOST:PORT of its first node; None on a single node: SGLang takes a free port


def embedded_command(launch: ServerLaunch, port: int) -> list[str]:
    """Command line of the embedded engine. With `exact` it uses the operations of the deterministic trainer."""
    config, exact = launch.config, launch.exact
    e = config.embedded
    uncached = exact is None if e.disable_radix_cache is None else e.disable_radix_cache
    limits: list[str] = []  # where the run sends more than the server accepts by default
    if config.prompts_per_request > SERVER_PROMPTS:
        most = request_bytes(prompts=config.prompts_per_request, context_length=e.context_length)
        limits += ["--max-request-bytes", str(most)]
    if launch.bucket_bytes > PublishConfig().bucket_bytes:
        limits += ["--bucket-bytes", str(launch.bucket_bytes)]
    return [
        *(sys.executable, "-m", "rollout.embedded.server"),
        *("--model-path", str(launch.model_path)),
        *("--host", launch.host),
        *("--port", str(port)),
        *("--threads", str(e.threads)),
        *(("--tp-size", str(e.tp_size), "--ep-size", str(e.ep_size)) if e.tp_size > 1 or e.ep_size > 1 else ()),
        *(("--device", e.device) if e.device != "cpu" else ()),
        *("--dtype", e.dtype or ("float32" if exact is None and e.device == "cpu" else "bfloat16")),
        *("--weights", e.weights),
        *("--activations", launch.activations),
        *("--max-total-tokens", str(e.max_total_tokens)),
        *("--max-running-requests", str(e.max_running_requests)),
        *("--context-length", str(e.context_length)),
        *("--weight-version", str(launch.weight_version)),
        *(("--enable-return-routed-experts",) if launch.return_routed_experts else ()),
        *(("--enable-return-routed-weights",) if e.return_gates else ()),
        *((FLAG,) if launch.layer_states is not None else ()),
        *(("--disable-radix-cache",) if uncached else ()),
        *(("--exact-parts", *map(str, exact)) if exact is not None else ()),
        *(("--traces", str(launch.traces), _traced_as(launch)) if launch.traces is not None else ()),
        *limits,
    ]


def _traced_as(launch: ServerLaunch) -> str:
    """The name of the server's process in traces."""
    return f"{launch.title}{'' if launch.index is None else launch.index}".replace(" ", "_")


def sglang_command(launch: ServerLaunch, port: int) -> list[str]:
    """Command line of a stock SGLang 0.5.23 server, for node `node_rank` of the `nnodes` that it spans.

    Attention data parallelism is `--attn-dp-size`: the older `--dp-size N --enable-dp-attention` means the same in
    0.5.23 but is deprecated, and `--dp-size` now means whole replicas, which refuse weight updates. The server runs
    without a tokenizer: requests and replies hold token ids, and the client makes the text.
    Raises ValueError for flags that contradict each other.
    """
    f = launch.config.sglang
    if f.dp_size > 1 and not f.enable_dp_attention:
        raise ValueError(
            f"rollout.sglang.dp_size = {f.dp_size} replicas inside one server accept no weight updates: set "
            "rollout.sglang.enable_dp_attention = true, or dp_size = 1 and raise rollout.servers"
        )
    if f.enable_dp_attention and f.tp_size % f.dp_size:
        raise ValueError(f"rollout.sglang.dp_size = {f.dp_size} does not divide tp_size = {f.tp_size}")
    if launch.nnodes > 1 and launch.dist_init_addr is None:
        raise ValueError(f"a server over {launch.nnodes} nodes needs dist_init_addr, HOST:PORT of its first node")
    flags: list[tuple[str, object]] = [
        ("--model-path", launch.model_path),
        ("--host", launch.host),
        ("--port", port),
        ("--tp-size", f.tp_size),
        ("--ep-size", f.ep_size),
        ("--mem-fraction-static", f.mem_fraction_static),
        ("--kv-cache-dtype", f.kv_cache_dtype),
        ("--weight-version", launch.weight_version),
    ]
    if f.enable_dp_attention:
        flags.append(("--attn-dp-size", f.dp_size))
    if f.moe_a2a_backend != "none":
        flags += [("--moe-a2a-backend", f.moe_a2a_backend), ("--deepep-mode", f.deepep_mode)]
    optional: list[tuple[str, object]] = [
        ("--moe-dense-tp-size", f.moe_dense_tp_size),
        ("--chunked-prefill-size", f.chunked_prefill_size),
        ("--max-running-requests", f.max_running_requests),
        ("--context-length", f.context_length),
        ("--attention-backend", f.attention_backend),
    ]
    flags += [(flag, value) for flag, value in optional if value is not None]
    if launch.nnodes > 1:
        flags += [("--nnodes", launch.nnodes), ("--node-rank", launch.node_rank)]
    if launch.dist_init_addr is not None:
        flags.append(("--dist-init-addr", launch.dist_init_addr))
    return [
        *(f.python or sys.executable, "-m", "sglang.launch_server"),
        *(str(x) for pair in flags for x in pair),
        "--skip-tokenizer-init",
        *(("--enable-return-routed-experts",) if launch.return_routed_experts else ()),
        *(("--enable-memory-saver",) if f.enable_memory_saver else ()),
        *(("--enable-deterministic-inference",) if f.enable_deterministic_inference else ()),
        *_state_hooks(launch),
    ]


def _state_hooks(launch: ServerLaunch) -> list[str]:
    if launch.layer_states is None:
        return []
    layers = int(read_config(launch.model_path)["num_hidden_layers"])
    return ["--forward-hooks", forward_hooks(launch.layer_states, layers)]
