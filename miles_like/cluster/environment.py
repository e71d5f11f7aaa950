"""Environment variables of the processes that a run starts, from their slot, their node and the configuration.

Ray's workers inherit the environment of the node's Ray process and not the driver's, so that whatever a process needs
is set here. A variable of `cluster.env` (trainer and critic ranks) or `rollout.env` (servers) replaces the default.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from miles_like.cluster.placement import Role, Slot
from miles_like.nodes.facts import NodeFacts
from miles_like.variables import inherited, is_secret


def process_environment(
    slot: Slot, facts: NodeFacts, *, env: Mapping[str, str], node_gpus: int, stage_dir: str | None, local: bool
) -> dict[str, str]:
    """Variables of the process in `slot` on the node `facts`, without secrets.

    env: `cluster.env` or `rollout.env`. node_gpus: all GPUs of the node, of which another run may have some. stage_dir:
    node-local directory for caches of compiled kernels; None: the node's scratch directory. local: Ray was started for
    this run and listens on loopback only, and so must gloo and NCCL. Raises ValueError for a GPU that is not among the
    node's devices.
    """
    for gpu in slot.gpus:
        if gpu >= len(facts.devices):
            raise ValueError(
                f"{slot.role} {slot.index} is placed on GPU {gpu} of node {facts.host}, where the run has only "
                f"{len(facts.devices)} GPUs: lower cluster.gpus_per_node, or start Ray there with more GPUs"
            )
    defaults = _defaults(
        slot.role,
        devices=",".join(str(facts.devices[gpu].index) for gpu in slot.gpus),
        interface=_loopback() if local else facts.interface,
        address=None if local else facts.address,
        threads=str(max(1, facts.cores // max(1, node_gpus))),
        caches=stage_dir or facts.scratch,
    )
    return defaults | plain_values(env)


def describe_environment(
    role: Role, *, env: Mapping[str, str], gpus_per_node: int, stage_dir: str | None
) -> dict[str, str]:
    """As `process_environment`, before the nodes are known: values that depend on a node or are secret are described in
    parentheses."""
    defaults = _defaults(
        role,
        devices="(the GPUs of its slot)" if gpus_per_node else "",
        interface="(interface of the node's address)",
        address="(the node's address)",
        threads="(cores of the node / its GPUs)",
        caches=stage_dir or "(this user's directory in the node's temporary directory)",
    )
    return defaults | plain_values(env) | dict.fromkeys(secret_names(env), "(from the driver's environment)")


def network_variables(interface: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gloo and NCCL of a rank choose their network, and the plain ones of `cluster.env`, which
    replace them. interface: that of the node's address; None: unknown, and left to the libraries."""
    return _interfaces(interface) | plain_values(env)


def plain_values(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without its secrets."""
    return {name: value for name, value in env.items() if not is_secret(name)}


def secret_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """Names in `env` whose values are secret."""
    return tuple(name for name in env if is_secret(name))


def secret_values(env: Mapping[str, str], driver: Mapping[str, str]) -> dict[str, str]:
    """The secrets of `env`, with their values in the driver's environment. They are passed to an actor as an argument,
    never in Ray's runtime_env, which Ray logs. Raises ValueError for one that the driver does not have."""
    for name in secret_names(env):
        if not driver.get(name):
            raise ValueError(
                f"the environment variable {name}, which the configuration passes to the run's processes, is not set "
                "where the run is started: export it there, or remove it from cluster.env and rollout.env"
            )
    return {name: driver[name] for name in secret_names(env)}


def driver_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """`secret_values` in the environment of this process."""
    return secret_values(env, inherited())


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def _defaults(
    role: Role, *, devices: str, interface: str | None, address: str | None, threads: str, caches: str | None
) -> dict[str, str]:
    """devices: empty for a CPU process. address: of the node; None: on loopback. caches: directory on the node's disk;
    None: the compilers' own defaults."""
    # a number is the device's in nvidia-smi, by which Ray and `NodeFacts` count; CUDA's default is fastest first
    out = {"CUDA_VISIBLE_DEVICES": devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if devices else {}
    # CPU ranks of one node share its cores; GPU ranks need them for an optimizer on the CPU and for encoding weights
    out["OMP_NUM_THREADS"] = threads if devices else "1"
    serves = role in ("rollout", "teachers")
    if devices and not serves:
        # a rank's communication and computation are launched in order; SGLang overwrites it with a value of its choice
        out["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if devices and serves and address is not None:
        # by which the parts of a server on several nodes find each other (get_local_ip_auto of SGLang 0.5.23): its own
        # choice is the interface of the default route, or what the host name resolves to
        out["SGLANG_HOST_IP"] = address
    out |= _interfaces(interface)
    return out | (_caches(role, caches) if devices and caches is not None else {})


def _interfaces(interface: str | None) -> dict[str, str]:
    """NCCL compares prefixes, eth1 with eth10 too, unless the name follows a `=`."""
    if interface is None:
        return {}
    exactly = interface if interface.startswith("(") else f"={interface}"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": exactly}


def _caches(role: Role, directory: str) -> dict[str, str]:
    """Directories of compiled kernels on the node's own disk: on a shared file system hundreds of processes would
    wait for each other's locks. The two sides have other versions of the compilers, and other directories.

    The engine's names are those of `third_party_cache_defaults` in SGLang 0.5.23, whose other caches (DeepGEMM, CuTe)
    lie under SGLANG_CACHE_DIR.
    """
    side = "engine" if role in ("rollout", "teachers") else "trainer"
    base = f"{directory.rstrip('/')}/kernels/{side}"
    out = {
        "TRITON_CACHE_DIR": f"{base}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{base}/inductor",
        "CUDA_CACHE_PATH": f"{base}/nv",
    }
    if side == "engine":
        out |= {
            "SGLANG_CACHE_DIR": base,
            "SGLANG_JIT_CACHE_DIR": f"{base}/jit",
            "FLASHINFER_WORKSPACE_BASE": base,
            "TILELANG_CACHE_DIR": f"{base}/tilelang",
        }
    return out
