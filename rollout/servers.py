"""Start, await and stop server processes, embedded or stock SGLang; both command lines are pure functions."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx

from miles_like.server_url import tls
from rollout.client import RolloutError
from rollout.config import PublishConfig, RolloutConfig
from rollout.served import check_directory
from rollout.server_key import ServerKey, environment_with, sglang_key_file
from rollout.wire import HEALTH
from rollout.wire_bodies import request_bytes

_FREE_PORTS = 3  # that are tried
_POLL_S = 0.1
_LOG_LINES = 20
SERVER_PROMPTS = 64  # of the context length that the embedded server takes in one request by itself


class ServerHandle:
    """A running server process and all that it has started. As a context manager it is stopped at the end.

    key_file: read by the server when it starts; removed once it answers, or is stopped.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path, key_file: Path | None = None) -> None:
        self.url = url
        self.log = log
        self._process = process
        self._key_file = key_file

    @property
    def pid(self) -> int:
        """Of the process group's leader, which waits for the server."""
        return self._process.pid

    def alive(self) -> bool:
        return self._exit_code() is None

    def _exit_code(self) -> int | None:
        """None while it runs. An ended leader stays a zombie until `stop`, so that no other group gets its number."""
        if self._process.returncode is not None:
            return self._process.returncode
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status

    def await_ready(self, timeout_s: float) -> None:
        """Wait until /health answers 200. Raises RolloutError with the end of the log when it does not come up."""
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False, verify=tls(self.url)) as http:
            while time.monotonic() < deadline:
                self.check_alive()
                try:
                    if http.get(HEALTH).status_code == 200:
                        self._forget_key()
                        return
                except httpx.HTTPError:
                    pass  # not listening yet
                time.sleep(_POLL_S)
        raise RolloutError(
            f"server {self.url} was not ready within {timeout_s:g} s: raise rollout.start_timeout_s or read {self.log}"
            f", which ends:\n{log_tail(self.log)}"
        )

    def check_alive(self) -> None:
        """Raises RolloutError with the end of the log when the process has ended."""
        code = self._exit_code()
        if code is not None:
            how = f"exit code {code}" if code <= 128 else f"signal {signal.Signals(code - 128).name}"
            raise RolloutError(f"server {self.url} ended with {how}; {self.log} ends:\n{log_tail(self.log)}")

    def _forget_key(self) -> None:
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to its process group, SIGKILL after `grace_s`; nothing when it was stopped before."""
        self._forget_key()
        if self._process.returncode is not None:
            return
        if self.alive():
            os.killpg(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        # Also when the leader ended by itself: a worker process of the server may be left in the group.
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def log_tail(log: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a log; the reason a server died is there."""
    if not log.exists():
        return "(no log)"
    with log.open("rb") as f:
        f.seek(max(0, log.stat().st_size - 16384))
        return "\n".join(f.read().decode("utf-8", "replace").splitlines()[-lines:]) or "(an empty log)"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raises ValueError when something listens there: said before a server is started that would find out late."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            s.bind((host, port))
        except OSError as e:
            raise ValueError(
                f"port {port} on {host} cannot be used ({e.strerror}): set rollout.port to another one, "
                "or leave it out for any free port"
            ) from None


def start(
    command: list[str], *, url: str, log: Path, key: ServerKey | None = None, key_file: Path | None = None
) -> ServerHandle:
    """Start `command` in a process group of its own that ends when this process does; both outputs go to `log`.

    key: put into the server's environment, and struck out of the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, "-m", "rollout.guard", str(os.getpid()), *command]
    with log.open("ab") as out:
        process = subprocess.Popen(
            guard,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment_with(key),
        )
    return ServerHandle(url, process, log, key_file)


def embedded_command(
    model_path: Path,
    config: RolloutConfig,
    *,
    port: int,
    host: str = "127.0.0.1",
    weight_version: int = 0,
    activations: str = "none",
    exact: tuple[int, int] | None = None,
    return_routed_experts: bool = True,
    bucket_bytes: int = PublishConfig().bucket_bytes,
) -> list[str]:
    """Command line of the CPU engine. activations: "fp8" rounds the inputs of quantized linears. exact: it computes by
    the operations of a deterministic trainer of that many tensor- and expert-tensor-parallel ranks."""
    e = config.embedded
    uncached = exact is None if e.disable_radix_cache is None else e.disable_radix_cache
    more: list[str] = []  # where the run sends more than the server expects by itself
    if config.prompts_per_request > SERVER_PROMPTS:
        most = request_bytes(prompts=config.prompts_per_request, context_length=e.context_length)
        more += ["--max-request-bytes", str(most)]
    if bucket_bytes > PublishConfig().bucket_bytes:
        more += ["--bucket-bytes", str(bucket_bytes)]
    return [
        *(sys.executable, "-m", "rollout.embedded.server"),
        *("--model-path", str(model_path)),
        *("--host", host),
        *("--port", str(port)),
        *("--threads", str(e.threads)),
        *("--dtype", e.dtype or ("float32" if exact is None else "bfloat16")),
        *("--weights", e.weights),
        *("--activations", activations),
        *("--max-total-tokens", str(e.max_total_tokens)),
        *("--max-running-requests", str(e.max_running_requests)),
        *("--context-length", str(e.context_length)),
        *("--weight-version", str(weight_version)),
        *(("--enable-return-routed-experts",) if return_routed_experts else ()),
        *(("--enable-return-routed-weights",) if e.return_gates else ()),
        *(("--disable-radix-cache",) if uncached else ()),
        *(("--exact-parts", *map(str, exact)) if exact is not None else ()),
        *more,
    ]


def sglang_command(
    config: RolloutConfig,
    model_path: Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    node_rank: int = 0,
    nnodes: int = 1,
    dist_init_addr: str | None = None,
    weight_version: int = 0,
    return_routed_experts: bool = True,
) -> list[str]:
    """Command line of a stock SGLang 0.5.23 server on one of the `nnodes` nodes it spans.

    Attention data parallelism is asked for as `--attn-dp-size`: the older `--dp-size N --enable-dp-attention` means the
    same in 0.5.23 but is deprecated, and `--dp-size` now means whole replicas, which refuse weight updates.
    The tokenizer is left out: token ids go in and come out, and the text is made on this side.
    Raises ValueError for flags that contradict each other.
    """
    f = config.sglang
    if f.dp_size > 1 and not f.enable_dp_attention:
        raise ValueError(
            f"rollout.sglang.dp_size = {f.dp_size} replicas inside one server take no weight updates: set "
            "rollout.sglang.enable_dp_attention = true, or dp_size = 1 and raise rollout.servers"
        )
    if f.enable_dp_attention and f.tp_size % f.dp_size:
        raise ValueError(f"rollout.sglang.dp_size = {f.dp_size} does not divide tp_size = {f.tp_size}")
    if nnodes > 1 and dist_init_addr is None:
        raise ValueError(f"a server over {nnodes} nodes needs dist_init_addr, HOST:PORT of its first node")
    flags: list[tuple[str, object]] = [
        ("--model-path", model_path),
        ("--host", host),
        ("--port", port),
        ("--tp-size", f.tp_size),
        ("--ep-size", f.ep_size),
        ("--mem-fraction-static", f.mem_fraction_static),
        ("--kv-cache-dtype", f.kv_cache_dtype),
        ("--weight-version", weight_version),
    ]
    if f.enable_dp_attention:
        flags.append(("--attn-dp-size", f.dp_size))
    if f.moe_a2a_backend != "none":
        flags += [("--moe-a2a-backend", f.moe_a2a_backend), ("--deepep-mode", f.deepep_mode)]
    optional = (
        "moe_dense_tp_size",
        "chunked_prefill_size",
        "max_running_requests",
        "context_length",
        "attention_backend",
    )
    flags += [(f"--{k.replace('_', '-')}", getattr(f, k)) for k in optional if getattr(f, k) is not None]
    if nnodes > 1:
        flags += [("--nnodes", nnodes), ("--node-rank", node_rank), ("--dist-init-addr", dist_init_addr)]
    command = [sys.executable, "-m", "sglang.launch_server", *(str(x) for pair in flags for x in pair)]
    command.append("--skip-tokenizer-init")
    if return_routed_experts:
        command.append("--enable-return-routed-experts")
    switches = ("enable_memory_saver", "enable_deterministic_inference")
    command += [f"--{name.replace('_', '-')}" for name in switches if getattr(f, name)]
    return command


def launch_embedded(
    model_path: Path,
    config: RolloutConfig,
    *,
    port: int | None,
    log_dir: Path,
    host: str = "127.0.0.1",
    weight_version: int = 0,
    activations: str = "none",
    exact: tuple[int, int] | None = None,
    return_routed_experts: bool = True,
    bucket_bytes: int = PublishConfig().bucket_bytes,
    key: ServerKey | None = None,
) -> ServerHandle:
    """Start a CPU engine and wait until it answers. key: which it then asks for; without one it serves loopback only.

    Raises ValueError (port; a format it does not serve) or RolloutError (it did not come up).
    """
    check_directory("embedded", model_path, config.sglang)

    def on(port: int) -> ServerHandle:
        command = embedded_command(
            model_path,
            config,
            port=port,
            host=host,
            weight_version=weight_version,
            activations=activations,
            exact=exact,
            return_routed_experts=return_routed_experts,
            bucket_bytes=bucket_bytes,
        )
        log = log_dir / f"embedded_{port}.log"
        return started(command, f"http://{host}:{port}", log, config.start_timeout_s, key=key)

    return on_a_port(port, host, on)


def launch_sglang(
    model_path: Path,
    config: RolloutConfig,
    *,
    port: int | None,
    log_dir: Path,
    host: str = "127.0.0.1",
    node_rank: int = 0,
    nnodes: int = 1,
    dist_init_addr: str | None = None,
    weight_version: int = 0,
    return_routed_experts: bool = True,
    key: ServerKey | None = None,
) -> ServerHandle:
    """Start this node's part of a stock server; on its first node wait until it answers (the others speak no HTTP).

    Raises ValueError (port; a format it does not serve) or RolloutError (it did not come up).
    """
    check_directory("sglang", model_path, config.sglang)

    def on(port: int) -> ServerHandle:
        command = sglang_command(
            config,
            model_path,
            port=port,
            host=host,
            node_rank=node_rank,
            nnodes=nnodes,
            dist_init_addr=dist_init_addr,
            weight_version=weight_version,
            return_routed_experts=return_routed_experts,
        )
        url, log = f"http://{host}:{port}", log_dir / f"sglang_{port}.{node_rank}.log"
        key_file = None
        if key is not None:
            key_file = sglang_key_file(key)
            command += ["--config", str(key_file)]
        if node_rank:
            return start(command, url=url, log=log, key=key, key_file=key_file)
        return started(command, url, log, config.start_timeout_s, key=key, key_file=key_file)

    return on_a_port(port, host, on)


def on_a_port(port: int | None, host: str, launch: Callable[[int], ServerHandle]) -> ServerHandle:
    """`launch` on `port`, ValueError when something listens there; None: on a free one, and on another when somebody
    took that before the server did (a port that nobody reserves may be any program's next connection)."""
    if port is not None:
        check_port(port, host)
        return launch(port)
    for _ in range(_FREE_PORTS - 1):
        try:
            return launch(free_port(host))
        except RolloutError as e:
            if "address already in use" not in str(e).casefold():
                raise
    return launch(free_port(host))


def started(
    command: list[str],
    url: str,
    log: Path,
    timeout_s: float,
    *,
    key: ServerKey | None = None,
    key_file: Path | None = None,
) -> ServerHandle:
    """`start`, and wait until it answers. Raises RolloutError."""
    handle = start(command, url=url, log=log, key=key, key_file=key_file)
    ready = False
    try:
        handle.await_ready(timeout_s)
        ready = True
    finally:
        if not ready:
            handle.stop()
    return handle
