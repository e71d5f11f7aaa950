"""The command lines of docker and gVisor sandboxes, and gVisor's bundle: what they must have, whatever the keys.

Not covered: docker and runsc themselves.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.containers import docker_command, gvisor_bundle, gvisor_command

INNER = ("-s", "-B", "-c", "code")


def test_a_docker_container() -> None:
    config = SandboxConfig(kind="docker", image="python:3.12-slim", memory_mb=100, disk_mb=10, processes=4)
    words = docker_command(config, 3, INNER)
    assert words[:3] == ["docker", "run", "--rm"] and words[-5:] == ["python:3.12-slim", *INNER]
    assert {
        *("--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--interactive"),
        *("--pids-limit=6", "--memory=184m", "--memory-swap=184m", "--user=60003:60003", "--entrypoint=python3"),
        *("--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size=10485760", "--shm-size=10485760"),
    } <= set(words)
    assert not [word for word in words if word.startswith(("--privileged", "--volume", "-v", "--mount", "--pid="))]


def test_a_gvisor_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = SandboxConfig(kind="gvisor", disk_mb=10, read_only=("/opt/data",))
    bundle: Any = gvisor_bundle(config, INNER)
    assert bundle["process"]["args"] == ["/usr/bin/python3", *INNER] and bundle["process"]["noNewPrivileges"]
    capabilities = {one for names in bundle["process"]["capabilities"].values() for one in names}
    assert not capabilities & {"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_MKNOD", "CAP_NET_RAW"}
    assert bundle["root"]["readonly"]
    assert {one["type"] for one in bundle["linux"]["namespaces"]} == {"pid", "network", "ipc", "uts", "mount"}
    binds = {one["destination"]: one["options"] for one in bundle["mounts"] if one["type"] == "bind"}
    assert {"/usr", "/opt/data"} <= set(binds) <= {"/usr", "/lib", "/lib64", "/bin", "/opt/data"}
    assert all("ro" in options for options in binds.values())
    words = gvisor_command(config, 0, INNER)
    assert words[0] == "runsc" and "--network=none" in words and words[-3] == "run"
    directory = words[-2].partition("=")[2]
    assert directory.startswith(str(tmp_path)) and os.stat(directory).st_mode & 0o077 == 0
    assert gvisor_command(config, 1, INNER)[-2] == words[-2] and gvisor_command(config, 1, INNER)[-1] != words[-1]
