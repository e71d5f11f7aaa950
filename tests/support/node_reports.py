"""A node's report to `miles-like doctor` with nothing wrong in it, to be changed in one place by a test."""

from __future__ import annotations

from miles_like.doctor.disks import DiskFacts
from miles_like.doctor.examiner import NodeReport
from miles_like.doctor.gpus import GpuFacts
from miles_like.doctor.machine import MachineFacts
from miles_like.doctor.software import Software

GIB = 1 << 30


def healthy(index: int = 0, *, gpus: int = 8) -> NodeReport:
    """gpus: 0: a node without nvidia-smi."""
    return {
        "machine": machine(index),
        "software": software(),
        "engine": software(),
        "gpus": [gpu(i) for i in range(gpus)] if gpus else "no nvidia-smi",
        "disks": {"/shared": disk(), "/local": disk()},
        "sandbox": None,
    }


def machine(index: int = 0) -> MachineFacts:
    return {
        "cores": 96,
        "memory": 2000 * GIB,
        "memory_available": 1900 * GIB,
        "shm": 1000 * GIB,
        "shm_free": 1000 * GIB,
        "ulimits": {"nofile": 1 << 20, "memlock": -1, "nproc": 1 << 20, "stack": 8 << 20},
        "cgroup": "v2",
        "cgroup_memory": -1,
        "cgroup_pids": -1,
        "cgroup_cpus": -1.0,
        "ephemeral_ports": (32768, 60999),
        "name_resolves_to": [f"192.168.0.{index + 1}"],
        "interface": "bond0",
    }


def software() -> Software:
    packages = {
        "python": "3.11.7",
        "torch": "2.14.1",
        "cuda": "13.0",
        "megatron-core": "0.16.1",
        "transformer-engine": "2.20.2",
        "transformer-engine-cuda": "2.20.2",
        "ray": "2.60.0",
        "sglang": "0.5.23",
    }
    return {
        "packages": packages,
        "distributions": {n: n for n in packages} | {"transformer-engine-cuda": "transformer-engine-cu13"},
        "requires": {"sglang": ["torch==2.14.1"], "transformer-engine": ["transformer-engine-cu13==2.20.2"]},
        "glibc": "2.39",
        "glibc_needed": {"sglang": "2.34"},
    }


def gpu(index: int = 0) -> GpuFacts:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81559,
        "free_mib": 81079,
        "driver": "580.95.05",
        "persistence": "Enabled",
        "mig": "Disabled",
        "ecc": "Enabled",
        "ecc_errors": "0",
        "compute_mode": "Default",
        "processes": [],
    }


def disk() -> DiskFacts:
    return {"free": 4000 * GIB, "kind": "ext4", "write": 2e9, "read": 3e9, "error": ""}
