"""Slurm on the nodes of tests/support/namespaces.py: munged and slurmd on each, slurmctld on the first.

    with slurm(cluster, work) as batch:
        job = batch.submit(script)
        batch.wait(job, "COMPLETED")

Every daemon is Debian's (tests/debian_packages.txt) and ends with its node. munge's key and socket, and what slurmd
spools, are on the node's own disk; slurm.conf and the state of slurmctld are in `work`, which all nodes see.

GPUs are counted by Slurm and are no devices. Not covered: accounting, cgroups, and users other than root.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.debian import need_programs
from tests.support.namespaces import Cluster

_UP_S = 60.0
_CONF = """
ClusterName=tests
SlurmctldHost={head}({address})
AuthType=auth/munge
AuthInfo=socket={disk}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={work}/state
SlurmdSpoolDir={disk}/spool
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={disk}/slurmd.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/slurmd.%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
InactiveLimit=0
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=600
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """What a user of the cluster does, on its first node."""

    def __init__(self, cluster: Cluster, conf: Path) -> None:
        self._cluster, self._conf = cluster, conf

    def run(self, *command: str) -> str:
        """Standard output of a command of Slurm's."""
        out: str = self._cluster[0].run(list(command), env={"SLURM_CONF": str(self._conf)}).stdout
        return out

    def submit(self, *words: str) -> str:
        """The number of the job. words: of sbatch, which end with a script."""
        return self.run("sbatch", "--parsable", *words).strip()

    def job(self, job: str) -> Mapping[str, str]:
        """What `scontrol show job` shows."""
        shown = self.run("scontrol", "show", "job", job)
        return dict(found.split("=", 1) for found in re.findall(r"(?:^|\s)(\S+=\S*)", shown))

    def wait(self, job: str, *states: str, limit_s: float = 60.0) -> Mapping[str, str]:
        """Until the job is in one of the states; what scontrol shows then."""
        until = time.monotonic() + limit_s
        while (shown := self.job(job))["JobState"] not in states:
            printed = Path(shown["StdOut"])
            assert time.monotonic() < until, f"job {job} is not {states} after {limit_s:g} s: {shown}\n" + (
                printed.read_text() if printed.exists() else "it has printed nothing"
            )
            time.sleep(0.2)
        return shown


@contextmanager
def slurm(cluster: Cluster, work: Path, *, gpus: int = 0) -> Iterator[Slurm]:
    """Slurm on all nodes of the cluster. gpus: of each node."""
    need_programs("munged", "slurmctld", "slurmd", "sbatch")
    (work / "state").mkdir(parents=True)
    conf = work / "slurm.conf"
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs=2 RealMemory=2000 State=UNKNOWN"
        + (f" Gres=gpu:{gpus}" if gpus else "")
        for node in cluster
    ]
    head = cluster[0]
    conf.write_text(
        _CONF.format(head=head.name, address=head.address, disk=cluster.disk, work=work, nodes="\n".join(lines))
    )
    (work / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n")
    for k in range(gpus):
        (work / f"gpu{k}").touch()
    (work / "gres.conf").write_text(f"Name=gpu File={work}/gpu[0-{gpus - 1}]\n" if gpus else "")
    key = os.urandom(128)
    daemons: list[subprocess.Popen[str]] = []

    def start(k: int, *command: str) -> None:
        with (work / f"{command[0]}.{k}.out").open("w") as out:
            daemons.append(cluster[k].popen(list(command), stdout=out, stderr=out, env={"SLURM_CONF": str(conf)}))

    try:
        for k, node in enumerate(cluster):
            own = cluster.disk / "munge"
            node.run(["install", "-d", "-m", "755", str(own), str(cluster.disk / "spool")])
            node.run(["python3", "-c", f"open({str(own / 'key')!r}, 'wb').write({key!r})"])
            node.run(["chmod", "600", str(own / "key")])
            files = [f"--key-file={own}/key", f"--socket={own}/socket", f"--seed-file={own}/seed"]
            start(k, "munged", "--foreground", "--force", *files, f"--pid-file={own}/pid", f"--log-file={own}/log")
        for node in cluster:
            node.run(
                [
                    "sh",
                    "-c",
                    f"until [ -S {cluster.disk}/munge/socket ]; do sleep 0.1; done",
                ]
            )
        start(0, "slurmctld", "-D", "-f", str(conf))
        for k in range(len(cluster)):
            start(k, "slurmd", "-D", "-f", str(conf))
        made = Slurm(cluster, conf)
        _wait_until_idle(made, len(cluster), work)
        yield made
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _wait_until_idle(batch: Slurm, number: int, work: Path) -> None:
    until = time.monotonic() + _UP_S
    while True:
        shown = batch._cluster[0].run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
            check=False,
            env={"SLURM_CONF": str(batch._conf)},
        )
        if shown.stdout.split() == ["idle"] * number:
            return
        assert time.monotonic() < until, (
            f"nodes are {shown.stdout.split()} after {_UP_S:g} s: {shown.stderr}\n"
            + "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(work.glob("*.log")))
        )
        time.sleep(0.2)
