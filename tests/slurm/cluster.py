#!/usr/bin/env python3
"""A real SLURM on one machine, for tests and experiments: munged, slurmctld and a slurmd per virtual node.

    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
    eval "$(python tests/slurm/cluster.py start)"
    sbatch … ; sinfo ; sparo launch train RECIPE --cluster test --nodes 2
    python tests/slurm/cluster.py stop

`start` prints the line that points SLURM's commands at this cluster; it is idempotent. `--accounting` adds slurmdbd on
a MariaDB of its own (packages slurmdbd mariadb-server). No systemd, no cgroups, nothing in /etc: every daemon is
stopped through its own pid file. Needs root (munged and slurmd do). The names of the nodes, n1 to n4, resolve for SLURM alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

NODES = tuple(f"n{i}" for i in range(1, 5))
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SLURM_CONF = """\
ClusterName=sparo
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job is held before it may start again (default 120 s)
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
SlurmctldPort={ctld_port}
# jobs of two clusters on one machine have numbers, and so ports, of their own
FirstJobId={first_job}
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
# faults are noticed soon, waits are short
SlurmctldTimeout=10
SlurmdTimeout=5
MessageTimeout=5
KillWait=15
MinJobAge=3600
BatchStartTimeout=10
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=0,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# a job that is preempted gets the signal it asked for, not SIGTERM alone
SlurmctldParameters=preempt_send_user_signal
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# nodes may have more processors than this machine
SlurmdParameters=config_overrides
{accounting}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=24:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n[1-{nodes}] MaxTime=24:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageEnforce=associations
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={root}/run/munge.socket"""
DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=sparo
StorageLoc=slurm_acct_db
"""


class Cluster:
    """The daemons of one cluster.

    Args:
        root: its folder: etc, run, log, state, spool.
        port: the first of the TCP ports it uses.
        accounting: with slurmdbd.
    """

    def __init__(self, root: Path, port: int = 16800, accounting: bool = False):
        self.root, self.port, self.accounting = root, port, accounting
        self.conf = root / "etc/slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"{PATH}:{os.environ.get('PATH', '')}"}

    @staticmethod
    def missing(accounting: bool = False) -> str | None:
        """Return why it cannot run here, or None."""
        needed = (*DAEMONS, "slurmdbd", "mariadbd") if accounting else DAEMONS
        absent = [name for name in needed if shutil.which(name, path=PATH) is None]
        if absent:
            return f"no {', '.join(absent)} here: apt-get install the packages that tests/slurm/cluster.py names"
        return None if os.geteuid() == 0 else "munged and slurmd need root"

    def start(self) -> None:
        """Start what is not running yet, and wait until every node accepts jobs."""
        for name in ("etc", "run", "log", "state", "spool"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        self._configure()
        run = self.root / "run"
        if not self._alive("munged"):
            for stale in run.glob("munge.socket*"):
                stale.unlink()
            self.do("munged", f"--key-file={self.root}/etc/munge.key", f"--socket={run}/munge.socket",
                    f"--pid-file={run}/munged.pid", f"--log-file={self.root}/log/munged.log",
                    f"--seed-file={run}/munge.seed", "--num-threads=4")  # fmt: skip
            self.wait(10, lambda: self.works("munge", "-n", "-S", f"{run}/munge.socket"), "munged")
        if self.accounting:
            self._start_accounting()
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        up = {"idle", "mix", "alloc", "comp"}
        self.wait(60, lambda: [s in up for s in self._states()] == [True] * len(NODES), "nodes")

    def stop(self) -> None:
        """Cancel all jobs, stop every daemon, and forget all jobs."""
        if self._alive("slurmctld"):
            self.says("scancel", "-f", "-u", "root")
            end = time.monotonic() + 8
            while self.says("squeue", "-h") and time.monotonic() < end:
                time.sleep(0.1)
        daemons = ["slurmctld", *(f"slurmd.{node}" for node in NODES)]
        for name in daemons:
            self._signal(name, signal.SIGTERM)
        for name in [*daemons, "slurmdbd", "mariadbd", "munged"]:
            self._end(name)
        for pid in self._processes(None):
            _kill(pid)
        for name in ("state", "spool"):
            shutil.rmtree(self.root / name, ignore_errors=True)

    def start_controller(self) -> None:
        if not self._alive("slurmctld"):
            self.do("slurmctld", *([] if any((self.root / "state").iterdir()) else ["-c"]))
        self.wait(30, lambda: self.works("scontrol", "ping"), "slurmctld")

    def stop_controller(self) -> None:
        """Stop the daemons in order, so that their state is written."""
        self._signal("slurmctld", signal.SIGTERM)
        self._end("slurmctld")

    def start_node(self, node: str, without: Path | None = None) -> None:
        """Start a node's daemon. `without` names a folder that its jobs find empty, as if a file system were not mounted."""
        if not self._alive(f"slurmd.{node}"):
            (self.root / "spool" / node).mkdir(parents=True, exist_ok=True)
            if without is None:
                self.do("slurmd", "-N", node)
            else:
                self.do("unshare", "-m", "sh", "-c", f"mount -t tmpfs none {without} && exec slurmd -N {node}")

    def kill_daemon(self, node: str) -> None:
        """Kill the slurmd of a node. Its processes continue, and cannot be reached."""
        self._signal(f"slurmd.{node}", signal.SIGKILL)
        (self.root / f"run/slurmd.{node}.pid").unlink(missing_ok=True)

    def kill_node(self, node: str) -> None:
        """Kill a node: its slurmd, the job steps and every task."""
        self.kill_daemon(node)
        for pid in self._processes(node):
            _kill(pid)

    def freeze_node(self, node: str) -> list[int]:
        """Disconnect a node: kill its daemon and suspend its processes; return these for `thaw`."""
        self.kill_daemon(node)
        pids = self._processes(node)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    @staticmethod
    def thaw(pids: list[int]) -> None:
        """Let the processes continue."""
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)

    def idle(self, seconds: float = 60) -> None:
        """Wait until there are no jobs and every node accepts one; restart daemons that died."""
        for node in NODES:
            self.start_node(node)
        self.wait(seconds, lambda: not self.says("squeue", "-h", "-o", "%i")
                  and self.says("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * len(NODES), "idle nodes")  # fmt: skip

    def do(self, *command: str) -> None:
        """Run a SLURM command; show its output only if it fails."""
        with (self.root / "log/commands.log").open(
            "a+"
        ) as log:  # daemons keep their stderr open, so it must not be one of our pipes
            code = subprocess.run(command, env=self.env, cwd=self.root, stdin=subprocess.DEVNULL, stdout=log,
                                  stderr=log, check=False).returncode  # fmt: skip
            if code:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)}: ended with {code}\n" + "".join(log.readlines()[-10:]))

    def says(self, *command: str) -> str:
        """Return the output of a command; empty if it fails or hangs."""
        try:
            done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=15, check=False)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    def works(self, *command: str) -> bool:
        try:
            return subprocess.run(command, env=self.env, capture_output=True, timeout=15, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    @staticmethod
    def wait(seconds: float, ready: Callable[[], bool], what: str) -> None:
        """Wait for `ready()`; a SystemExit names what was missing."""
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                raise SystemExit(f"{what}: not there after {seconds:g} s")
            time.sleep(0.05)

    def _states(self) -> list[str]:
        """Return the states of the nodes."""
        return self.says("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split()

    def _configure(self) -> None:
        key = self.root / "etc/munge.key"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
        facts = {"root": self.root, "host": os.uname().nodename.split(".")[0], "nodes": len(NODES),
                 "first_job": 10 * (self.port - 16800) + 1, "ctld_port": self.port + 17, "dbd_port": self.port + 19, "sql_port": self.port + 60,
                 "first": self.port + 201, "last": self.port + 200 + len(NODES)}  # fmt: skip
        accounting = ACCOUNTING.format(**facts) if self.accounting else "AccountingStorageType=accounting_storage/none"
        self.conf.write_text(SLURM_CONF.format(accounting=accounting, **facts))
        database = self.root / "etc/slurmdbd.conf"
        database.touch(0o600)
        database.write_text(DBD_CONF.format(**facts))

    def _start_accounting(self) -> None:
        data, run = self.root / "mysql", self.root / "run"
        run.chmod(0o777)
        mysql = ("mariadb", "-uroot", "-S", f"{run}/mysql.sock", "-e")
        if not (data / "mysql").is_dir():
            data.mkdir(exist_ok=True)
            shutil.chown(data, "mysql")
            self.do("mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}",
                    "--auth-root-authentication-method=socket", "--skip-test-db")  # fmt: skip
        if not self._alive("mariadbd"):
            command = ["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={data}", f"--socket={run}/mysql.sock",
                       "--bind-address=127.0.0.1", f"--port={self.port + 60}", f"--pid-file={run}/mariadbd.pid",
                       "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0",
                       "--innodb-lock-wait-timeout=900"]  # fmt: skip
            with (self.root / "log/mariadbd.log").open("a") as log:
                subprocess.Popen(command, env=self.env, cwd=data, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True)  # fmt: skip
            self.wait(30, lambda: self.works(*mysql, "select 1"), "mariadbd")
        users = "; ".join(f"create user if not exists slurm@'{h}' identified by 'sparo'; grant all on slurm_acct_db.* to slurm@'{h}'"
                          for h in ("127.0.0.1", "localhost"))  # fmt: skip
        self.do(*mysql, f"create database if not exists slurm_acct_db; {users}")
        if not self._alive("slurmdbd"):
            self.do("slurmdbd")
        self.wait(30, lambda: self.works("sacctmgr", "-n", "list", "cluster"), "slurmdbd")
        if "sparo" not in self.says("sacctmgr", "-n", "list", "cluster"):
            self.do("sacctmgr", "-i", "add", "cluster", "sparo")
            self.do("sacctmgr", "-i", "add", "account", "lab", "Description=lab", "Organization=lab")
            self.do("sacctmgr", "-i", "add", "user", "root", "Account=lab")

    def _pid(self, name: str) -> int | None:
        """Return the daemon's pid if it runs and belongs to that program."""
        try:
            pid = int((self.root / f"run/{name}.pid").read_text())
            return pid if Path(f"/proc/{pid}/comm").read_text().strip() == name.split(".")[0] else None
        except (OSError, ValueError):
            return None

    def _alive(self, name: str) -> bool:
        return self._pid(name) is not None

    def _signal(self, name: str, number: int) -> None:
        pid = self._pid(name)
        if pid is not None:
            os.kill(pid, number)

    def _end(self, name: str) -> None:
        """Send SIGTERM, and SIGKILL after ten seconds."""
        self._signal(name, signal.SIGTERM)
        end = time.monotonic() + 10
        while self._alive(name) and time.monotonic() < end:
            time.sleep(0.05)
        self._signal(name, signal.SIGKILL)

    def _processes(self, node: str | None) -> list[int]:
        """Return the job steps of this cluster and their tasks, on one node or on all."""
        found: set[int] = set()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                environment = dict(
                    entry.split("=", 1)
                    for entry in (folder / "environ").read_text(errors="replace").split("\0")
                    if "=" in entry
                )
                step = (folder / "comm").read_text().strip() == "slurmstepd"
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if environment.get("SLURM_CONF") != str(self.conf):
                continue
            if step and node is None:
                found.add(int(folder.name))
            elif "SLURMD_NODENAME" in environment and node in (None, environment["SLURMD_NODENAME"]):
                found.add(int(folder.name))
                if (
                    Path(f"/proc/{parent}/comm").exists()
                    and Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd"
                ):
                    found.add(parent)
        return sorted(found - {os.getpid()})


def _kill(pid: int) -> None:
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("start", "stop", "status", "kill-daemon", "kill-node", "start-node"))
    parser.add_argument("node", nargs="?", choices=NODES)
    parser.add_argument("--root", type=Path, default=Path("/tmp/sparo-slurm"))
    parser.add_argument("--accounting", action="store_true")
    options = parser.parse_args()
    cluster = Cluster(options.root, accounting=options.accounting)
    problem = Cluster.missing(options.accounting)
    if problem:
        raise SystemExit(problem)
    if options.action == "status":
        print(cluster.says("sinfo", "-N", "-l") or "slurmctld does not answer")
    elif options.action in ("start", "stop"):
        getattr(cluster, options.action)()
    elif options.node is None:
        parser.error(f"{options.action} needs a node")
    else:
        getattr(cluster, options.action.replace("-", "_"))(options.node)
    if options.action == "start":
        print(f"export SLURM_CONF={cluster.conf}")


if __name__ == "__main__":
    sys.exit(main())
