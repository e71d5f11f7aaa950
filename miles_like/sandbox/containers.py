"""The command lines of docker and gVisor sandboxes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from miles_like.limits.regular_files import replace_bytes
from miles_like.sandbox.config import SandboxConfig

_FIRST_USER = 60_000
_SPARE_MB = 64  # for the container's first process
# of gVisor's first process, as root: for files of other users, and to end their processes. Programs have none
_CAPABILITIES = [f"CAP_{name}" for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")]
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}


def docker_command(config: SandboxConfig, slot: int, inner: Sequence[str]) -> list[str]:
    """The container of a slot. It ends when its standard input ends, which it does with this process."""
    user = _FIRST_USER + slot
    disk = config.disk_mb << 20
    memory = config.memory_mb + 2 * config.disk_mb + _SPARE_MB  # files in memory count too
    words = [
        *("docker", "run", "--rm", "--interactive", "--network=none", "--read-only", "--cap-drop=ALL"),
        *("--security-opt=no-new-privileges", f"--pids-limit={config.processes + 2}", "--hostname=sandbox"),
        *(f"--memory={memory}m", f"--memory-swap={memory}m", f"--shm-size={disk}", f"--user={user}:{user}"),
        *(f"--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size={disk}", "--workdir=/tmp"),
    ]
    words += [f"--env={name}={value}" for name, value in _ENVIRONMENT.items()]
    return [*words, f"--entrypoint={config.python or 'python3'}", str(config.image), *inner]


def gvisor_command(config: SandboxConfig, slot: int, inner: Sequence[str]) -> list[str]:
    """The gVisor container of a slot, from a bundle in a directory of this user (`_bundle`)."""
    name = f"miles-like-{os.getpid()}-{slot}-{os.urandom(4).hex()}"
    words = ["runsc", "--network=none", "--platform=ptrace", f"--root={_own_directory('gvisor-state')}"]
    if os.geteuid() != 0:
        words.append("--rootless")
    return [*words, "run", f"--bundle={_bundle(config, inner)}", name]


def gvisor_bundle(config: SandboxConfig, inner: Sequence[str]) -> dict[str, object]:
    """The runtime specification (opencontainers/runtime-spec 1.0, config.json) of a container with this machine's /usr
    and `read_only`, and nothing else of it."""
    size = f"size={config.disk_mb << 20}"
    shown = ["/usr", *(f"/{n}" for n in ("lib", "lib64", "bin") if os.path.isdir(f"/{n}")), *config.read_only]
    mounts: list[dict[str, object]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts += [
        {"destination": to, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777", size]}
        for to in ("/tmp", "/dev/shm")
    ]
    mounts += [
        {"destination": path, "type": "bind", "source": os.path.realpath(path), "options": ["ro", "rbind"]}
        for path in shown
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},  # programs become another one: gVisor shows a user its other processes
            "args": [config.python or "/usr/bin/python3", *inner],
            "env": [f"{name}={value}" for name, value in _ENVIRONMENT.items()],
            "cwd": "/tmp",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": one} for one in ("pid", "network", "ipc", "uts", "mount")]},
    }


def program_user(config: SandboxConfig) -> int:
    """The user that programs become inside the sandbox; 0: they are the user of its first process."""
    return _FIRST_USER if config.kind == "gvisor" and os.geteuid() == 0 else 0


def forget_container(command: Sequence[str]) -> None:
    """Remove what runsc keeps of a container that was killed."""
    if command[0] == "runsc":
        root = next(word.partition("=")[2] for word in command if word.startswith("--root="))
        for path in Path(root).glob(f"{command[-1]}_*"):
            path.unlink(missing_ok=True)


def _bundle(config: SandboxConfig, inner: Sequence[str]) -> Path:
    """The directory of the bundle; one for each configuration, which stays for the next process."""
    text = json.dumps(gvisor_bundle(config, inner), sort_keys=True)
    directory = _own_directory(f"gvisor-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    (directory / "rootfs").mkdir(exist_ok=True)
    if not (directory / "config.json").exists():
        replace_bytes(directory / "config.json", text.encode())  # whole, for a slot that starts at the same time
    return directory


def _own_directory(name: str) -> Path:
    """A directory of mode 0700 of this user below the temporary directory. Raises ValueError where it is another's."""
    directory = Path(tempfile.gettempdir()) / f"miles-like-{os.geteuid()}" / name
    for one in (directory.parent, directory):
        one.mkdir(mode=0o700, exist_ok=True)
        found = one.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or one.is_symlink():
            raise ValueError(f"{one} is not a directory of mode 0700 of this user: remove it")
    return directory


def missing_container_program(config: SandboxConfig) -> str | None:
    """The program of the kind that is not installed, and how to install it."""
    name, remedy = {
        "docker": ("docker", "install Docker Engine, or apt-get install docker.io"),
        "gvisor": ("runsc", "apt-get install runsc, or install gVisor from its releases"),
    }[str(config.kind)]
    return None if shutil.which(name) else f"the program {name}, which is not installed: {remedy}"
