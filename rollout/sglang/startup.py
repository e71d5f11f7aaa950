"""Start one server, or its part on one node, and watch it until it answers.

The parts of one server are started at the same time, because they wait for each other. So are several servers on one
node: SGLang 0.5.23 compares the free memory of one server's GPUs before it loads (srt/distributed/bootstrap.py,
_check_tp_memory_balance) and sizes a server's cache by the free memory of that server's GPUs. Two servers never share a
GPU, so that neither start disturbs the other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from rollout.config import VLLM_VERSION
from rollout.server_key import sglang_key_file
from rollout.server_url import tls
from rollout.sglang.format_support import check_directory
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.layer_states import HOOKS
from rollout.sglang.phases import EMBEDDED, STOCK, VLLM, FollowedLog, Limit, last_error
from rollout.sglang.ports import check_ports, free_port, stock_ports
from rollout.sglang.servers import (
    ServerEnvironment,
    ServerHandle,
    ServerLaunch,
    check_port,
    embedded_command,
    sglang_command,
    start,
)
from rollout.vllm_command import VARIABLES, vllm_command
from rollout.wire import vllm_endpoints
from rollout.wire.endpoints import HEALTH

POLL_S = 0.1
_FREE_PORTS = 3  # attempts with a free port
_HEALTH_S = 5.0
_PHASES = {"embedded": EMBEDDED, "sglang": STOCK, "vllm": VLLM}
_LOOK_S = 5.0  # at most counted between two looks: a driver that builds its trainer, or is suspended, does not look


@dataclass(frozen=True, slots=True)
class Progress:
    """phase: the current phase. failure: why the start failed, at `failed_at` by the node's monotonic clock, in
    seconds."""

    url: str
    phase: str
    ready: bool = False  # it answers, or `mark_ready` was called
    failure: str | None = None
    failed_at: float = 0.0


class Startup:
    """The start of one server or part of one. `poll` advances it, and may replace the process of `handle`."""

    def __init__(self, launch: ServerLaunch) -> None:
        """Starts the process. Raises ValueError for a port in use, and for a format that the engine does not serve."""
        config = launch.config
        check_directory(config.engine, launch.model_path, config.sglang)
        self._launch, self._tries = launch, _FREE_PORTS if launch.port is None else 1
        self._up = False
        self._failure: Progress | None = None
        self._stranger = ""  # what answered at the port last, if it was not this server
        self._limits = {
            "start": (config.start_timeout_s, "rollout.start_timeout_s"),
            "load": (config.load_timeout_s, "rollout.load_timeout_s"),
            "warmup": (config.warmup_timeout_s, "rollout.warmup_timeout_s"),
        }
        self._begin()

    def _begin(self) -> None:
        port = free_port(self._launch.host) if self._launch.port is None else self._launch.port
        self.handle = begin(self._launch, port)
        self._log = FollowedLog(self.handle.log, _PHASES[self._launch.config.engine], self.handle.log_start)
        url = self.handle.url
        self._http = httpx.Client(base_url=url, timeout=_HEALTH_S, trust_env=False, verify=tls(url))
        self._spent: dict[str, float] = {}  # seconds, by the key of their limit
        self._seen = time.monotonic()

    def mark_ready(self) -> None:
        """Call when the server answers, on the part's node or on its first: from now on `poll` checks only whether the
        process lives."""
        self._up = True
        self.handle.answered()
        self._http.close()

    def poll(self) -> Progress:
        """Look at the process, its log and, on the first node, its /health. Does not wait."""
        if self._failure is not None:
            return self._failure
        phase = self._log.phase()
        if (how := self.handle.ended()) is not None:
            if not self._up and self._another_port():
                return Progress(self.handle.url, "starting")
            return self._failed(f"ended with {how}", phase.words, self.handle.ended_at or time.monotonic())
        if not self._up and not self._launch.node_rank and self._answers():
            own, others = self.handle.listeners()
            self._stranger = "" if own else _program(others[0])
            if own and (wrong := self._wrong(others)) is not None:
                return self._failed(wrong, phase.words, time.monotonic())
            if own:
                self.mark_ready()
        if self._up:
            return Progress(self.handle.url, "ready", ready=True)
        limit, key = self._limit(phase.limit)
        now = time.monotonic()
        spent = self._spent[key] = self._spent.get(key, 0.0) + min(now - self._seen, _LOOK_S)
        self._seen = now
        if spent < limit:
            return Progress(self.handle.url, phase.words)
        late = f"was not ready within {limit:g} s (raise {key} if it is only slow)"
        if self._stranger:
            late += f"; {self._stranger} answers at its port (set rollout.port to a different port)"
        return self._failed(late, phase.words, time.monotonic())

    def _failed(self, what: str, phase: str, when: float) -> Progress:
        handle, doing = self.handle, "" if self._up else f" while {phase}"
        why = f"{handle.name} {what}{doing}; its log {handle.log} says: {last_error(handle.log, handle.log_start)}"
        handle.stop()
        self._http.close()
        self._failure = Progress(handle.url, phase, failure=why, failed_at=when)
        return self._failure

    def _limit(self, phase: Limit) -> tuple[float, str]:
        """(seconds, key) of a phase's limit. Phases without their own limit share `rollout.start_timeout_s`."""
        limit, key = self._limits[phase]
        if limit is None:
            limit, key = self._limits["start"]
        assert limit is not None
        return limit, key

    def _another_port(self) -> bool:
        """Start again where a different program took the free port before the server did."""
        self._tries -= 1
        if not self._tries or "address already in use" not in self.handle.tail().casefold():
            return False
        self.handle.stop()
        self._http.close()
        self._begin()
        return True

    def _answers(self) -> bool:
        try:
            return self._http.get(HEALTH).status_code == 200
        except httpx.HTTPError:
            return False  # not listening yet

    def _wrong(self, others: Sequence[int | None]) -> str | None:
        """What is wrong with a server that answers. others: processes that listen at its port too, which the kernel
        allows to vLLM's."""
        if others:
            return (
                f"shares its port with {_program(others[0])}, so requests can reach either: set rollout.port to a "
                "different port"
            )
        return self._number_weights() if self._launch.config.engine == "vllm" else None

    def _number_weights(self) -> str | None:
        """Give the weights of a vLLM server their version, for which it has no flag. Returns why this cannot be: it is
        of another version of vLLM, or does not answer."""
        endpoint = vllm_endpoints.VERSION
        try:
            found = self._http.get(endpoint).raise_for_status().json()
            version = str(found.get("version")) if isinstance(found, dict) else "unknown"
            if version.partition("+")[0] != VLLM_VERSION:
                return f"is vLLM {version}, but this version of miles-like supports only {VLLM_VERSION}"
            endpoint = vllm_endpoints.UPDATE_VERSION
            self._http.post(endpoint, json={"new_version": str(self._launch.weight_version)}).raise_for_status()
        except (httpx.HTTPError, ValueError) as e:
            return f"did not answer {endpoint}: {e}"
        return None


def _program(pid: int | None) -> str:
    return "a process of another user" if pid is None else f"process {pid}, which is not this server's"


def begin(launch: ServerLaunch, port: int) -> ServerHandle:
    """Start the process of `launch` on `port`; does not wait for it. Raises ValueError for a port in use."""
    url, key = f"http://{launch.host}:{port}", launch.key
    if launch.config.engine == "embedded":
        check_port(port, launch.host)
        log = launch.log_dir / f"embedded_{port}.log"
        return start(
            embedded_command(launch, port),
            url=url,
            log=log,
            key=key,
            environment=ServerEnvironment(plain=launch.env, secrets=launch.secrets),
            name=_name(launch, url),
        )
    if launch.config.engine == "vllm":
        return _begin_vllm(launch, port, url)
    address, flags = launch.dist_init_addr, launch.config.sglang
    dist_init = None if address is None else int(address.rpartition(":")[2])
    ports = stock_ports(port, dist_init, attention_dp=flags.enable_dp_attention, nnodes=launch.nnodes)
    check_ports(ports, launch.host, _name(launch, url))
    command, key_file = sglang_command(launch, port), None
    if key is not None:
        key_file = sglang_key_file(key)
        command += ["--config", str(key_file)]
    log = launch.log_dir / f"sglang_{port}.{launch.node_rank}.log"
    environment = ServerEnvironment(
        plain=launch.env,
        secrets=launch.secrets,
        foreign=flags.python is not None,
        modules=HOOKS if launch.layer_states is not None else None,
    )
    name = _name(launch, url)
    return start(command, url=url, log=log, key=key, key_file=key_file, environment=environment, name=name)


def _begin_vllm(launch: ServerLaunch, port: int, url: str) -> ServerHandle:
    """Its server takes no key: whatever reaches the port can change its weights. Raises ValueError for a wildcard
    address and for a server over several nodes."""
    if launch.host in ("0.0.0.0", "::", ""):
        raise ValueError(
            "a vLLM server has no authentication and would listen on every network of this machine "
            f"({launch.host}): use the address of a closed network, or 127.0.0.1"
        )
    if launch.nnodes > 1:
        raise ValueError(
            f"a vLLM server over {launch.nnodes} nodes is not supported: use at most as many GPUs as one node has"
        )
    check_port(port, launch.host)
    flags = launch.config.vllm
    routes = launch.return_routed_experts
    command = vllm_command(flags, model_path=launch.model_path, host=launch.host, port=port, routes=routes)
    environment = ServerEnvironment(
        plain={**VARIABLES, **launch.env}, secrets=launch.secrets, foreign=flags.python is not None
    )
    log = launch.log_dir / f"vllm_{port}.log"
    return start(command, url=url, log=log, environment=environment, name=_name(launch, url))


def _name(launch: ServerLaunch, url: str) -> str:
    if launch.index is None:
        return f"server {url}"
    part = f", part {launch.node_rank} of {launch.nnodes}," if launch.nnodes > 1 else ""
    return f"{launch.title} {launch.index}{part} on node {socket.gethostname()} ({url})"


def launch_server(launch: ServerLaunch) -> ServerHandle:
    """Start a server of the engine that `launch.config` names and wait until it answers.

    Raises ValueError (port; a format that the engine does not serve) or, after stopping it, RolloutError (it did not
    come up).
    """
    startup = Startup(launch)
    up = False
    try:
        while not up:
            progress = startup.poll()
            if progress.failure is not None:
                raise RolloutError(progress.failure)
            if not (up := progress.ready):
                time.sleep(POLL_S)
    finally:
        if not up:
            startup.handle.stop()
    return startup.handle
