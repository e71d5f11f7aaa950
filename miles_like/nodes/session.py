"""Join a Ray cluster, or start a local one for this process."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Mapping
from typing import TypedDict

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from miles_like.stopping import end_in_order

_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
_ours = False  # this module initialized Ray, and not code that uses Ray itself
_before_local: dict[str, str | None] = {}  # values of _AUTH from before this process started a local Ray


class _Logging(TypedDict):
    """Keywords of ray.init that keep its own messages out of a run's output."""

    logging_level: int
    log_to_driver: bool


class NoClusterError(ValueError):
    """No Ray cluster answers at an address, yet or again."""


def start_ray(address: str | None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS; without either start a local one for this process.

    A local one listens on loopback only and accepts only processes that hold its token, which is generated here. For a
    cluster, Ray's environment variables and token file apply unchanged. Raises NoClusterError when the cluster does not
    answer, ValueError when it refuses this process, RuntimeError when the local one does not start.
    """
    global _ours
    if ray.is_initialized():
        return
    _ours = True
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 would slow the training down
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # each rank has another environment: none is idle
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: _Logging = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        _start_local(quiet)
        end_in_order()
        return
    _check_answers(address)
    try:
        ray.init(address=address, **quiet)
        end_in_order()
    except (AuthenticationError, ConnectionError, RuntimeError) as e:
        if _refused(e):
            raise ValueError(
                f"the Ray cluster at {address} rejects this process's token: set RAY_AUTH_MODE=token, and the "
                "cluster's token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            ) from e
        raise NoClusterError(
            f"no Ray cluster answers at {address}: start one with `ray start --head`, or remove --ray-address"
        ) from e


def _refused(error: BaseException | None) -> bool:
    """Whether the error is Ray's authentication error, which it wraps in others."""
    return error is not None and (
        isinstance(error, AuthenticationError)
        or "InvalidAuthToken" in str(error)
        or _refused(error.__cause__ or error.__context__)
    )


def _start_local(quiet: _Logging) -> None:
    """Raises RuntimeError, with no process left, when Ray does not start."""
    _before_local.update({name: os.environ.get(name) for name in _AUTH})
    _apply_auth(
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    )
    try:
        ray.init(address="local", include_dashboard=False, object_store_memory=512 << 20, **quiet)
    except Exception as e:  # Ray raises a plain Exception for a node that does not start in time
        stop_ray()
        reason = " ".join((str(e).splitlines() or [type(e).__name__])[0].split())
        raise RuntimeError(
            f"Ray did not start on this machine ({reason}): its logs are in /tmp/ray/session_latest/logs; free memory "
            "and processors and run again, or join a running cluster with --ray-address"
        ) from e
    # Ray has read it and its processes have inherited it; other child processes must not
    os.environ.pop("RAY_AUTH_TOKEN", None)


def _apply_auth(values: Mapping[str, str | None]) -> None:
    """Set the variables in _AUTH, and make Ray, which read some of them at import, read them again.

    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 makes every process of Ray 2.60 listen on 127.0.0.1, on Linux too
    (`_node_ip_address="127.0.0.1"` does not: Ray resolves it back to the machine's address).
    """
    for name in _AUTH:
        value = values.get(name)
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ray_constants.ENABLE_RAY_CLUSTER = values.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _check_answers(address: str) -> None:
    """Raises NoClusterError where nothing listens at HOST:PORT; Ray would retry for minutes and print a page."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "//" in address:
        return  # "auto" or a ray:// client address: left to Ray
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as e:
        raise NoClusterError(
            f"no Ray cluster answers at {address} ({e.strerror or e}): start one (`ray start --head`) or "
            "remove --ray-address"
        ) from None


def stop_ray() -> None:
    """Leave the cluster, end a local one, and restore this process's environment. Nothing, where `start_ray` found Ray
    in use."""
    global _ours
    if not _ours:
        return
    _ours = False
    ray.shutdown()
    if _before_local:
        _apply_auth(_before_local)
        _before_local.clear()


def is_local() -> bool:
    """Whether this process started the Ray that it uses."""
    return bool(_before_local)
