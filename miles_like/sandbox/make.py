"""Makes the sandbox of a configuration, and this process's shared one."""

from __future__ import annotations

import threading
from functools import partial

from miles_like.sandbox.bwrap import bwrap_command, missing_program
from miles_like.sandbox.config import NO_SANDBOX, SandboxConfig
from miles_like.sandbox.containers import docker_command, gvisor_command, missing_container_program
from miles_like.sandbox.pool import SandboxPool
from miles_like.sandbox.program import Program, Sandbox, SandboxLost, Status
from miles_like.sandbox.remote import RemoteSandbox, health_of

_COMMANDS = {"bwrap": bwrap_command, "docker": docker_command, "gvisor": gvisor_command}


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """Raises ValueError where the configuration names none, or one whose program is not installed."""
    check_installed(config)
    return RemoteSandbox(config) if config.kind == "remote" else make_pool(config)


def make_pool(config: SandboxConfig) -> SandboxPool:
    """A sandbox on this machine."""
    return SandboxPool(config, partial(_COMMANDS[str(config.kind)], config))


def check_installed(config: SandboxConfig) -> None:
    """Raises ValueError naming the missing program and how to install it."""
    if config.kind is None:
        raise ValueError(
            "a program of the model is to be run, but no sandbox is configured: set sandbox.kind = 'bwrap', and "
            "install it with apt-get install bubblewrap"
        )
    if config.kind == "remote":
        return
    missing = missing_program(config) if config.kind == "bwrap" else missing_container_program(config)
    if missing is not None:
        raise ValueError(f"sandbox.kind = {config.kind!r} needs {missing}")


def try_sandbox(config: SandboxConfig) -> None:
    """Run a program. Raises ValueError where the sandbox is not installed, or this machine does not grant it."""
    check_installed(config)
    if config.kind == "remote":
        health_of(config)
        return
    pool = make_pool(config.model_copy(update={"slots": 1}))
    try:
        ran = pool.run_now(Program(code="print(6 * 7)"))
    except SandboxLost as e:
        raise ValueError(
            f"sandbox.kind = {config.kind!r} runs no program on this machine ({e}): grant it user namespaces, or use "
            "another kind"
        ) from e
    finally:
        pool.end()
    if ran.status is not Status.EXIT or ran.stdout != "42\n":
        raise ValueError(
            f"sandbox.kind = {config.kind!r} ran print(6 * 7) with the end {ran.status} {ran.code} and the error "
            f"{ran.stderr[-200:]!r}: raise the limits of [sandbox], or set sandbox.python"
        )


_shared: dict[SandboxConfig, Sandbox] = {}
_settings = [NO_SANDBOX]
_lock = threading.Lock()


def use_sandbox(config: SandboxConfig) -> None:
    """The configuration of this process's `shared_sandbox`."""
    _settings[0] = config


def shared_sandbox(config: SandboxConfig | None = None) -> Sandbox:
    """This process's sandbox of a configuration, by default that of the run; it lives as long as the process. For
    environments and tools, which are made without a configuration. Raises ValueError as `make_sandbox`."""
    with _lock:
        key = _settings[0] if config is None else config
        if key not in _shared:
            _shared[key] = make_sandbox(key)
        return _shared[key]
