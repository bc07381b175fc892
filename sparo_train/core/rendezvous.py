"""How a run's ranks find each other: address, port and identity from the environment, and the store in which they join."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from .errors import ConfigError, LostRankError
from .world import World, find_launcher, whole_number

_PORTS = 8  # ports that ranks try one after another
_PORT_STEP = 367
_ANSWER = timedelta(seconds=5)  # time for a store to answer; another program at the port may never do so
_POLL = 0.1  # seconds


def run_token() -> str:
    """Return an identifier of this run among others with the same port: the SLURM step, torchrun's run id, or MPI's job."""
    env = os.environ
    launcher = find_launcher(env)
    if launcher is None or launcher.name == "srun":
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "job {} step {} restart {}".format(*(env.get(name, "0") for name in names))
    job = env.get(launcher.job)
    if job is None and launcher.name == "mpiexec":
        job = _ancestor("hydra_pmi_proxy")  # MPICH has no variable that differs between two jobs
    return f"{launcher.name} {job or 'none'}"


def _ancestor(name: str) -> str | None:
    """Return the number of the nearest ancestor process with a name, or None."""
    pid = os.getpid()
    while pid > 1:
        try:
            comm, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return None
        if name.startswith(comm):  # the kernel cuts it to 15 characters
            return str(pid)
        pid = int(rest.split()[1])
    return None


def connect_store(world: World, timeout: float) -> Store:
    """Return the store of this run's ranks, once all of them are there.

    Rank 0 opens it at MASTER_PORT, or at one of the next ports if that is taken; the others look for it there.

    Args:
        world: this process.
        timeout: seconds to wait for ranks that have not started yet.

    Raises:
        ConfigError: every port is in use, by other programs or runs.
        LostRankError: some ranks did not start in time; the message names them.
    """
    end = time.monotonic() + timeout
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own, which is there already
        store = next(iter(rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=timeout))))[0]
        _require_token(store, world)
    else:
        store = _open_store(world) if world.rank == 0 else _find_store(world, end)
    _wait_for_all(store, world, end, timeout)
    return store


def _require_token(store: Store, world: World) -> None:
    own = run_token()
    if world.rank == 0:
        store.set("sparo-run", own)
    if (other := store.get("sparo-run").decode()) != own:
        raise _port_error(other, own)


def _port_error(other: str, own: str) -> ConfigError:
    return ConfigError(
        f"MASTER_PORT: port {os.environ['MASTER_PORT']} is in use by another run ({other}), so this run ({own}) cannot "
        "use it. Export another MASTER_PORT for each run."
    )


def _ports() -> Iterator[int]:
    """Return the ports to try, beginning with MASTER_PORT."""
    first = int(os.environ["MASTER_PORT"])
    for number in range(_PORTS):
        port = first + number * _PORT_STEP
        yield port if port < 65536 else 20000 + (port - 65536)


def _open_store(world: World) -> Store:
    """Open the store on rank 0, with its token, at the first free port."""
    for port in _ports():
        try:
            store = TCPStore(
                os.environ["MASTER_ADDR"], port, world.size, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
                raise
            continue
        store.set("sparo-run", run_token())
        os.environ["MASTER_PORT"] = str(port)
        return store
    raise ConfigError(
        f"MASTER_PORT: ports {', '.join(map(str, _ports()))} are all in use on {platform.node()}. Export another MASTER_PORT."
    )


def _find_store(world: World, end: float) -> Store:
    """Return the store that rank 0 of this run opened, at one of the ports. Waits until `end` (monotonic)."""
    address, own, other = os.environ["MASTER_ADDR"], run_token(), ""
    while time.monotonic() < end:
        for port in _ports():
            if not _is_listening(address, port, max(0.2, min(5.0, end - time.monotonic()))):
                continue
            store, found = _answer(address, port, world.size)
            if store is None:
                continue
            if found == own:
                os.environ["MASTER_PORT"] = str(port)
                return store
            other = found
        time.sleep(_POLL)
    if other:
        raise _port_error(other, own)
    raise LostRankError(
        f"rank {world.rank} of {world.size}: rank 0 was not found at {address}, ports {', '.join(map(str, _ports()))}. "
        f"Check that it started, and that no firewall on {address} blocks these ports for {platform.node()}."
    )


def _answer(address: str, port: int, size: int) -> tuple[Store | None, str]:
    """Return the store at a port and its token; None if another program listens there, or a store without a token."""
    answers: list[tuple[Store, str]] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):
            store = TCPStore(
                address, port, size, is_master=False, timeout=_ANSWER, wait_for_workers=False, multi_tenant=True
            )
            answers.append((store, store.get("sparo-run").decode()))

    # In a thread, because torch waits forever for a program that accepts the connection and says nothing.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _ANSWER.total_seconds())
    return answers[0] if answers else (None, "")


def _is_listening(address: str, port: int, seconds: float) -> bool:
    try:
        socket.create_connection((address, port), seconds).close()
    except OSError:
        return False
    return True


def _wait_for_all(store: Store, world: World, end: float, timeout: float) -> None:
    """Wait until all ranks have reached the store. Rank 0 looks for them, because it can name those that are missing."""
    # Several trainings of one process share a store, so every one has its own keys.
    turn = store.add(f"joins-{world.rank}", 1)
    prefix = f"join-{turn}"
    store.set(f"{prefix}-{world.rank}", os.environ.get("SLURMD_NODENAME", platform.node()))
    if world.rank:
        try:
            store.wait([f"{prefix}-done"], timedelta(seconds=max(1.0, end - time.monotonic()) + 10))
            missing = store.get(f"{prefix}-done").decode()
        except RuntimeError as error:
            raise LostRankError(
                f"rank {world.rank} of {world.size}: joining failed, because rank 0 died or did not respond "
                f"({str(error).splitlines()[0][:200]})"
            ) from None
    else:
        waiting = list(range(1, world.size))
        while waiting and time.monotonic() < end:
            waiting = [rank for rank in waiting if not store.check([f"{prefix}-{rank}"])]
            time.sleep(_POLL if waiting else 0)
        missing = ",".join(map(str, waiting))
        if missing:
            hosts = [store.get(f"{prefix}-{r}").decode() for r in range(world.size) if r not in waiting]
            missing += f" ({', '.join(dict.fromkeys(hosts))} started)"
        store.set(f"{prefix}-done", missing)
    if missing:
        error = LostRankError(
            f"rank {world.rank} of {world.size}: these ranks did not start within {timeout:g} s (engine.join_timeout): "
            f"{missing}. Read their logs, and check their nodes."
        )
        error.on_all_ranks, error.repeated = True, world.rank > 0
        raise error


def find_rendezvous() -> None:
    """Set MASTER_ADDR and MASTER_PORT if the launcher did not: the first node of a SLURM step, or this machine if it has all ranks.

    Raises:
        ConfigError: the address is not known, or the port is invalid.
    """
    env = os.environ
    launcher = find_launcher(env)
    if "MASTER_ADDR" not in env:
        if launcher is not None and launcher.name.startswith("mpi"):
            if env.get(launcher.local_size) != env[launcher.size]:
                raise ConfigError(
                    f"MASTER_ADDR: is not set, and {launcher.name} sets no variable with the address of the first machine. "
                    "Pass it on: mpirun -x MASTER_ADDR=HOST (Open MPI), or mpiexec -genv MASTER_ADDR HOST."
                )
            env["MASTER_ADDR"] = "127.0.0.1"
        else:
            env["MASTER_ADDR"] = _first_node()
    # Below the kernel's ephemeral ports; each step of an allocation, or job of MPI, has its own port.
    if launcher is not None and launcher.name.startswith("mpi"):
        offset = zlib.crc32(run_token().encode())
    else:
        job, step = (whole_number(env, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        offset = job + _PORT_STEP * step
    env.setdefault("MASTER_PORT", str(20000 + offset % 12000))
    port = whole_number(env, "MASTER_PORT", 1)
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT: expected 1 to 65535, got {port}. Unset it, or start with torchrun or srun.")


def _first_node() -> str:
    """Return the address of the first node of this SLURM step; this machine outside of SLURM."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1")
    try:
        if any(c in nodes for c in ",["):
            nodes = _scontrol("hostnames", nodes).split()[0]
        return _address(nodes)
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise ConfigError(
            f"MASTER_ADDR: is not set, and scontrol cannot resolve the first node of {nodes}. Export MASTER_ADDR."
        ) from None


def _address(node: str) -> str:
    """Return a node's name, or its address if only SLURM can resolve the name."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        addresses = [w for w in _scontrol("node", node, "-o").split() if w.startswith("NodeAddr=")]
        return addresses[0].partition("=")[2] if addresses else node
    return node


def _scontrol(*what: str) -> str:
    return subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, check=True).stdout
