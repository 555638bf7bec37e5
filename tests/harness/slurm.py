"""A real multi-node SLURM on this machine: separate controller, node daemons and keys, all on the loopback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from optuna_dsat.runtime.agent.processes import MARK_ENV
from tests.harness.waits import HANG_S, wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "sinfo", "scancel", "scontrol")

_CONTROLLER = """
ClusterName=dsat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={root}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=100000
ReturnToService=2
KillWait=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
MailProg=/bin/true
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=4000 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def why_no_slurm() -> str:
    """Return the reason why SLURM cannot be started here; empty if it can."""
    if os.geteuid() != 0:
        return "SLURM's daemons are started as root, and this is another user"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"SLURM is not installed ({', '.join(missing)} missing): see docs/how-to/clusters.md" if missing else ""


@dataclass(kw_only=True)
class SlurmCluster:
    """A running SLURM; its commands need the variables of ``environ``."""

    root: Path
    nodes: int
    pids: dict[str, int] = field(default_factory=dict)
    """Name of a daemon, such as ``slurmd.n1`` -> process number."""

    @property
    def environ(self) -> dict[str, str]:
        """Variables for SLURM's commands."""
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Return the output of a SLURM command."""
        environ = {**os.environ, **self.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
        return done.stdout.strip()

    @property
    def jobs(self) -> list[str]:
        """Numbers of SLURM's jobs."""
        return self.ask("squeue", "-h", "-o", "%i").split()

    def tasks(self) -> list[psutil.Process]:
        """Return the living processes of this SLURM's steps: agents, and processes started by them."""
        result = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                here = environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]
                ours = here and ("SLURM_PROCID" in environ or MARK_ENV in environ)  # ranks do not inherit SLURM_PROCID
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    result.append(process)
        return result

    def agents(self) -> list[psutil.Process]:
        """Return the living agents of nodes."""
        return [task for task in self.tasks() if "optuna_dsat.launch.places.node_agent" in _words(task)]

    def ranks(self) -> list[psutil.Process]:
        """Return torchruns, ranks and processes started by them."""
        return [task for task in self.tasks() if MARK_ENV in _environ(task)]

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this SLURM, by environment, open files or folder, except this process."""
        return [item for item in psutil.process_iter() if item.pid != os.getpid() and _lives(item) and self._has(item)]

    def end_processes(self) -> None:
        """End all processes of this SLURM, including stopped processes."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)

    def _has(self, process: psutil.Process) -> bool:
        if _environ(process).get("SLURM_CONF") == self.environ["SLURM_CONF"]:
            return True
        with suppress(OSError):  # ended, or a kernel thread
            links = [Path(f"/proc/{process.pid}/cwd"), *Path(f"/proc/{process.pid}/fd").iterdir()]
            return any(self.root in _target(link).parents for link in links)
        return False

    def idle(self) -> int:
        """Return the number of idle nodes."""
        return len(self.ask("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split())


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _target(link: Path) -> Path:
    """Return the target of a link; empty if the link no longer exists."""
    with suppress(OSError):
        return link.readlink()
    return Path()


def _environ(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; empty if it has ended."""
    with suppress(psutil.Error):
        return process.environ()
    return {}


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _ports(count: int) -> int:
    """Return the first of ``count`` consecutive unused ports."""
    begin = 21000 + os.getpid() % 400 * 20  # different from the ports that other processes try at the same time
    for first in range(begin, 30000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise RuntimeError("no ports are free")


def _write_files(cluster: SlurmCluster) -> None:
    root, nodes = cluster.root, cluster.nodes
    for name in ("state", "spool"):
        (root / name).mkdir()
    first, host = _ports(nodes + 1), socket.gethostname().partition(".")[0]
    ports = {"port": first, "first": first + 1, "last": first + nodes}
    config = _CONTROLLER.format(root=root, host=host, nodes=nodes, **ports)
    (root / "slurm.conf").write_text(config, encoding="utf-8")
    for number in (0, 1):
        os.mknod(root / f"gpu{number}", 0o020666, os.makedev(1, 3))  # not a GPU: /dev/null under another name
    lines = [f"NodeName=n{node + 1} Name=gpu File={root}/gpu[0-1]\n" for node in range(nodes)]
    (root / "gres.conf").write_text("".join(lines), encoding="utf-8")
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def _start(cluster: SlurmCluster) -> None:
    root, environ = cluster.root, {**os.environ, **cluster.environ}
    options = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    own = [f"--{name}={root / path}" for name, path in options.items()]
    commands = {"munged": ["munged", "--force", f"--seed-file={root / 'munged.seed'}", *own]}
    commands["slurmctld"] = ["slurmctld", "-c"]
    commands |= {f"slurmd.n{node}": ["slurmd", "-N", f"n{node}"] for node in range(1, cluster.nodes + 1)}
    for name, command in commands.items():
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} does not start: {done.stderr.strip()}")
        path = root / f"{name}.pid"
        wait_until(partial(_names_a_process, path), what=f"{name} has started")
        cluster.pids[name] = int(path.read_text(encoding="ascii"))
    wait_until(lambda: cluster.idle() == cluster.nodes, what="all nodes are idle")


def _names_a_process(path: Path) -> bool:
    return path.exists() and path.read_text(encoding="ascii").strip().isdigit()


def _stop(cluster: SlurmCluster) -> None:
    cluster.ask("scancel", "--user=root", "--quiet")  # else the jobs' slurmstepd outlive the cluster
    until = time.monotonic() + HANG_S
    while time.monotonic() < until and cluster.jobs:
        time.sleep(0.05)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in cluster.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + HANG_S / 10
        while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in cluster.pids.values()):
            time.sleep(0.05)
    cluster.end_processes()  # a slurmstepd that was stopped while its job was cancelled


@contextmanager
def running_slurm(root: Path, *, nodes: int = 4) -> Iterator[SlurmCluster]:
    """Start a SLURM with its files in ``root``; stop it at the end of the block.

    Args:
        root: An empty folder.
        nodes: Number of nodes.
    """
    cluster = SlurmCluster(root=root, nodes=nodes)
    _write_files(cluster)
    try:
        _start(cluster)
        yield cluster
    finally:
        _stop(cluster)
