"""First process of a node of tests/support/namespaces.py: prepares the node's mounts and waits until its stdin ends.

python node_init.py SPEC, in new network, UTS, mount and PID namespaces; SPEC is a JSON object with the keys of
`NodeInit`. Prints the process's number as the outer namespace counts it. Standard library alone: it starts in
30 ms. As process 1 of its PID namespace it takes all processes of the node with it when it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

_FITHAW = 0xC0045878  # linux/fs.h


class NodeInit(TypedDict):
    """What a node gets."""

    name: str  # host name
    binds: dict[str, str]  # file of the node -> the file that takes its place
    tmpfs: dict[str, int | None]  # directory of the node -> MiB of a file system in memory; None: the kernel's default
    ext4: dict[str, str]  # directory of the node -> the file with its file system


def main(spec: NodeInit) -> None:
    pid = os.readlink("/proc/self")  # of the outer namespace, whose /proc is still mounted
    _mount("-t", "proc", "proc", "/proc")
    socket.sethostname(spec["name"])
    for there, file in spec["binds"].items():
        _mount("--bind", file, there)
    for directory, mib in spec["tmpfs"].items():
        Path(directory).mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", *([] if mib is None else ["-o", f"size={mib}m"]), "tmpfs", directory)
    for directory, image in spec["ext4"].items():
        _mount("-t", "ext4", "-o", "loop", image, directory)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are reaped by the kernel
    print(pid, flush=True)
    sys.stdin.buffer.read()
    for directory in spec["ext4"]:
        _thaw(directory)


def _thaw(directory: str) -> None:
    """Of a file system that hangs, the processes that write would outlive their node, and so would it."""
    there = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # it does not hang
        fcntl.ioctl(there, _FITHAW, 0)
    os.close(there)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
