"""Checks of GPUs, memory, limits, ports and disks of nodes, against each other and against a run's needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from miles_like.check_results import Outcome
from miles_like.doctor.disks import DiskFacts
from miles_like.doctor.examiner import NodeReport
from miles_like.doctor.findings import Finding, Needs, by_value, gib, listed, one_row, rate
from miles_like.doctor.gpus import GpuFacts
from miles_like.nodes.facts import ServerPort

Reports = Mapping[str, NodeReport]

_GIB = 1 << 30
USED_OF_GPU = 0.05  # most used share of a GPU's memory before a run
USED_MIB = 3 << 10  # and of a small GPU: a desktop may be drawn by it
# soft limits that a node with and without GPUs needs: Ray's documentation asks for 65536 descriptors; RDMA pins memory
_LEAST = {"nofile": (65536, 4096), "memlock": (1 << 40, 0), "nproc": (16384, 2048), "stack": (8 << 20, 1 << 20)}
_REMEDY = {
    "nofile": "raise it for the user that starts Ray (ulimit -n 65536; LimitNOFILE of a service), and start Ray again",
    "memlock": "set it to unlimited for the user that starts Ray (ulimit -l unlimited; --ulimit memlock=-1 of docker)",
    "nproc": "raise it for the user that starts Ray (ulimit -u), and start Ray again",
    "stack": "set it to 8 MiB (ulimit -s 8192), and start Ray again",
}
_LEAST_PIDS = 4096
_NCCL_SHM = 1 * _GIB  # NCCL's documentation runs containers with --shm-size=1g
_DIFFER = 0.1  # share by which sizes of nodes may differ without a remark
_SLOW = 50e6  # bytes a second, below which staging a checkpoint takes days
_FULL = 64 << 20


def check_gpus(reports: Reports, needs: Needs, ray_gpus: Mapping[str, int]) -> list[Finding]:
    """ray_gpus: GPUs that Ray was started with on each node; empty without Ray."""
    out: list[Finding] = []
    wanted = needs.gpus_per_node or 0
    with_gpus = {n: gpus for n, r in reports.items() if not isinstance(gpus := r["gpus"], str) and gpus}
    without = {n: r["gpus"] if isinstance(r["gpus"], str) else "none" for n, r in reports.items() if n not in with_gpus}
    short = {n: have for n in reports if wanted > 0 and (have := ray_gpus.get(n, len(with_gpus.get(n, [])))) < wanted}
    remedy = "lower it, or start Ray on nodes with that many GPUs"
    enough = len(reports) - len(short)
    if short and enough < (needs.nodes or len(reports)):
        out += [
            _wrong("GPUs", node, str(have), f"{node} has {have} GPUs, but cluster.gpus_per_node = {wanted}: {remedy}")
            for node, have in short.items()
        ]
    if without:
        reason = "no GPU: not checked"
        out += [
            Finding(check="GPUs", where=row.where, found=row.found, outcome=Outcome.NOT_CHECKED, text=reason)
            for row in by_value("GPUs", without)
        ]
    kinds = {n: f"{len(g)} x {g[0]['name']}, {g[0]['memory_mib']:,} MiB" for n, g in with_gpus.items()}
    out += _odd_ones("GPUs", kinds, "a run's ranks need equal GPUs: remove the others from the cluster")
    out += _odd_ones(
        "CUDA driver", {n: g[0]["driver"] for n, g in with_gpus.items()}, "install the same driver on all nodes"
    )
    for node, gpus in with_gpus.items():
        for g in gpus:
            free = f"{g['free_mib']:,} MiB free"
            out += [_wrong(f"GPU {g['index']}", node, free, fault) for fault in _gpu_faults(node, g)]
        off = [str(g["index"]) for g in gpus if g["persistence"] == "Disabled"]
        if off:
            text = f"persistence mode is off on GPU {listed(off)} of {node}: nvidia-smi -pm 1 saves seconds per process"
            out.append(Finding(check="GPU persistence", where=(node,), found="Disabled", text=text))
    return out


def _gpu_faults(node: str, gpu: GpuFacts) -> list[str]:
    name, out = f"GPU {gpu['index']} of {node}", []
    if gpu["processes"]:
        out.append(f"{name} is used by process {listed(gpu['processes'])}: stop it, or exclude the GPU from Ray")
    elif gpu["memory_mib"] - gpu["free_mib"] > max(USED_OF_GPU * gpu["memory_mib"], USED_MIB):
        out.append(
            f"{name} has {gpu['free_mib']:,} of {gpu['memory_mib']:,} MiB free, but nvidia-smi lists no process: "
            "stop the process of another container, or reset the GPU"
        )
    if gpu["mig"] == "Enabled":
        out.append(f"{name} is in MIG mode: disable it with nvidia-smi -i {gpu['index']} -mig 0")
    if gpu["ecc_errors"].isdecimal() and int(gpu["ecc_errors"]):
        out.append(f"{name} has {gpu['ecc_errors']} uncorrected ECC errors: reset it, and replace it if they return")
    if gpu["compute_mode"] not in ("", "Default"):
        mode = f"run nvidia-smi -i {gpu['index']} -c 0, because trainer and server share the GPU"
        out.append(f"{name} is in compute mode {gpu['compute_mode']}: {mode}")
    return out


def check_memory(reports: Reports, object_store: Mapping[str, int]) -> list[Finding]:
    """Host memory, cores and shared memory. object_store: bytes of Ray's object store on each node."""
    machines = {n: r["machine"] for n, r in reports.items()}
    out = [
        Finding(check="memory", where=(n,), found=f"{gib(m['memory_available'])} of {gib(m['memory'])} available")
        for n, m in machines.items()
    ]
    out += _near("memory", {n: float(m["memory"]) for n, m in machines.items()}, gib)
    out += by_value("cores", {n: str(m["cores"]) for n, m in machines.items()})
    out += _near("cores", {n: float(m["cores"]) for n, m in machines.items()}, lambda v: f"{v:g}")
    wrong = {}
    for node, m in machines.items():
        gpus = reports[node]["gpus"]
        several = not isinstance(gpus, str) and len(gpus) > 1  # one rank alone has no peer in NCCL
        need = max(object_store.get(node, 0), _NCCL_SHM if several else 0)
        if m["shm"] < need:
            wrong[node] = (
                f"/dev/shm of {node} has {gib(m['shm'])}; Ray's object store and NCCL need {gib(need)}: enlarge it "
                "(--shm-size of docker, emptyDir with medium Memory of Kubernetes)"
            )
    return out + one_row("/dev/shm", {n: gib(m["shm"]) for n, m in machines.items()}, wrong)


def check_limits(reports: Reports) -> list[Finding]:
    """ulimits and cgroup limits."""
    out: list[Finding] = []
    for name, least in _LEAST.items():
        values = {n: r["machine"]["ulimits"][name] for n, r in reports.items()}
        wrong = {}
        for node, value in values.items():
            need = least[0] if not isinstance(gpus := reports[node]["gpus"], str) and gpus else least[1]
            if 0 <= value < need:
                wanted = "unlimited" if name == "memlock" else str(need)
                wrong[node] = f"{node}: the limit {name} is {value}, but {wanted} is needed: {_REMEDY[name]}"
        shown = {n: "unlimited" if v < 0 else str(v) for n, v in values.items()}
        out += one_row(f"ulimit {name}", shown, wrong)
    for node, report in reports.items():
        out += _cgroup(node, report)
    return out


def _cgroup(node: str, report: NodeReport) -> list[Finding]:
    m, gpus = report["machine"], report["gpus"]
    remarks = []
    if 0 < m["cgroup_memory"] < 0.9 * m["memory"]:
        remarks.append(
            f"{node}: the cgroup allows {gib(m['cgroup_memory'])} of {gib(m['memory'])} memory, which a run must "
            "fit into"
        )
    if 0 < m["cgroup_cpus"] < m["cores"]:
        remarks.append(
            f"{node}: the cgroup allows {m['cgroup_cpus']:g} of {m['cores']} cores, so programs that start "
            "one thread per core are slow"
        )
    found = f"{m['cgroup']}: memory {gib(m['cgroup_memory'])}, pids " + (
        "no limit" if m["cgroup_pids"] < 0 else str(m["cgroup_pids"])
    )
    if 0 <= m["cgroup_pids"] < _LEAST_PIDS and gpus and not isinstance(gpus, str):
        text = (
            f"{node}: its cgroup allows {m['cgroup_pids']} processes and threads, but {_LEAST_PIDS} are needed: "
            "raise pids.max"
        )
        return [_wrong("cgroup", node, found, f"{text} (--pids-limit of docker, podPidsLimit of Kubernetes)")]
    return [Finding(check="cgroup", where=(node,), found=found, text="; ".join(remarks))]


def check_ports(
    reports: Reports, planned: Mapping[str, Sequence[ServerPort]] | str, used: Mapping[str, Sequence[int]]
) -> list[Finding]:
    """Ports of the run's servers: free, and outside of the range from which the kernel takes those of connections.

    planned: node -> what its servers bind; a text: why there is no room for them. used: node -> those in use.
    """
    ranges = {n: "{}-{}".format(*r["machine"]["ephemeral_ports"]) for n, r in reports.items()}
    out = by_value("ephemeral ports", ranges)
    if isinstance(planned, str):
        return [*out, Finding(check="ports", where=tuple(reports), found="", outcome=Outcome.WRONG, text=planned)]
    for node, ports in planned.items():
        first, last = reports[node]["machine"]["ephemeral_ports"]
        by_server: dict[str, list[int]] = {}
        for port in ports:
            of = f"{node}: port {port.number} of {port.server} ({port.purpose})"
            if port.number in used.get(node, ()):
                text = f"{of} is in use: stop the process that listens there, or set {port.key}"
                out.append(_wrong(f"port {port.number}", node, "in use", text))
            elif first <= port.number <= last:
                text = f"{of} is within {first}-{last}, the kernel's ports for outgoing connections: set {port.key}"
                text += " to a port below, or raise net.ipv4.ip_local_port_range"
                out.append(_wrong(f"port {port.number}", node, "for connections", text))
            else:
                by_server.setdefault(port.server, []).append(port.number)
        out += [
            Finding(check=f"ports of {server}", where=(node,), found=f"{', '.join(map(str, numbers))} free")
            for server, numbers in by_server.items()
        ]
    return out


def check_disks(
    reports: Reports, needs: Needs, seen: Mapping[str, Mapping[str, tuple[str, ...]]], chosen: Sequence[str]
) -> list[Finding]:
    """seen: path -> node -> nodes whose marker file it sees there. chosen: the nodes of the run, in its order."""
    out: list[Finding] = []
    for path in needs.paths:
        disks = {n: r["disks"][path] for n, r in reports.items() if path in r["disks"]}
        faults = {n: fault for n, d in disks.items() if (fault := _disk_fault(n, path, d))}
        values = {n: _disk(d) for n, d in disks.items()}
        rows = one_row(f"disk {path}", values, faults)
        out += [replace(row, text=row.text or _disk_remark(path, row, disks)) for row in rows]
        out += _reach(path, seen.get(path, {}), needs, chosen)
    return out


def _disk(disk: DiskFacts) -> str:
    speeds = f"writes {rate(disk['write'])}, reads {rate(disk['read'])}"
    return f"{disk['kind']}, {gib(disk['free'])} free, {speeds}"


def _disk_fault(node: str, path: str, disk: DiskFacts) -> str:
    if disk["free"] < _FULL:
        return (
            f"{node}: the file system of {path} has {disk['free'] >> 20} MiB free: free some space, or choose "
            "another path"
        )
    if disk["error"]:
        return f"{node}: {path} cannot be written ({disk['error']}): correct its permissions, or choose another path"
    return ""


def _disk_remark(path: str, row: Finding, disks: Mapping[str, DiskFacts]) -> str:
    """A speed is that of a moment, in which other work may have used the disk."""
    here = [disks[node] for node in row.where]
    if any(min(disk["write"], disk["read"]) < _SLOW for disk in here):
        return (
            f"{path} is slow on {listed(row.where)}: {row.found}; below {rate(_SLOW)} staging a large "
            "checkpoint takes days"
        )
    if any(disk["kind"] == "tmpfs" for disk in here):
        return f"{path} is an in-memory file system: files there use the node's memory"
    return ""


def _reach(path: str, seen: Mapping[str, tuple[str, ...]], needs: Needs, chosen: Sequence[str]) -> list[Finding]:
    """Whether all nodes see one directory, or each has its own."""
    if len(seen) < 2:
        return []
    apart = [n for n, others in seen.items() if set(others) != set(seen)]
    check, where = f"reach of {path}", tuple(seen)
    whys = {chosen[i]: why for i, why in needs.shared.get(path, {}).items() if i < len(chosen) and chosen[i] in seen}
    blind = [n for n in whys if not whys.keys() <= set(seen[n])]
    if blind:
        text = (
            f"{path} must be one directory on {listed(list(whys))}, because {whys[blind[0]]}, but {blind[0]} sees "
            f"there only the files of {listed(seen[blind[0]]) or 'none'}: mount the shared file system on every "
            "node, or choose a path on it"
        )
        return [Finding(check=check, where=where, found="not shared", outcome=Outcome.WRONG, text=text)]
    if path in needs.local and not apart:
        text = (
            f"{path} is the same directory on all nodes, and each node would write its copies there: set "
            "cluster.stage_dir to a path on the nodes' own disks"
        )
        return [Finding(check=check, where=where, found="shared", outcome=Outcome.WRONG, text=text)]
    text = ""
    if path in needs.either and apart:
        text = (
            f"{path} is a separate directory on each node: each node keeps what it converts there or in "
            "cluster.stage_dir, and gets the rest over the network"
        )
    return [Finding(check=check, where=where, found="local" if apart else "shared", text=text)]


def _near(check: str, values: Mapping[str, float], show: Callable[[float], str]) -> list[Finding]:
    """A remark where the nodes differ much."""
    if not values or min(values.values()) >= (1 - _DIFFER) * max(values.values()):
        return []
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    text = f"{least} has {show(values[least])}, but {most} {show(values[most])}: the smallest node limits the run"
    return [Finding(check=f"{check} of the nodes", where=(least, most), found="differs", text=text)]


def _odd_ones(check: str, values: Mapping[str, str], remedy: str) -> list[Finding]:
    rows = by_value(check, values)
    if not rows:
        return []
    most = max(rows, key=lambda row: len(row.where))
    return [
        row
        if row is most
        else Finding(
            check=check,
            where=row.where,
            found=row.found,
            outcome=Outcome.WRONG,
            text=f"{check}: {listed(row.where)} has {row.found}, but {listed(most.where)} {most.found}: {remedy}",
        )
        for row in rows
    ]


def _wrong(check: str, node: str, found: str, text: str) -> Finding:
    return Finding(check=check, where=(node,), found=found, outcome=Outcome.WRONG, text=text)
