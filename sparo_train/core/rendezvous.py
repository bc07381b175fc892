"""Address, port and identity of a run's ranks before they join, from the environment of torchrun or srun."""

from __future__ import annotations

import os
import socket
import subprocess

from .errors import ConfigError
from .world import whole_number


def run_token() -> str:
    """Return an identifier of this run among others with the same port: the SLURM step that started the ranks, or torchrun's run id."""
    env = os.environ
    if "WORLD_SIZE" in env:
        return f"torchrun {env.get('TORCHELASTIC_RUN_ID', 'none')}"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "job {} step {} restart {}".format(*(env.get(name, "0") for name in names))


def find_rendezvous() -> None:
    """Set MASTER_ADDR and MASTER_PORT if srun started the ranks without them: the first node of the step, and a port from the job id."""
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1")
        try:
            if any(c in nodes for c in ",["):
                nodes = _scontrol("hostnames", nodes).split()[0]
            os.environ["MASTER_ADDR"] = _address(nodes)
        except (OSError, subprocess.CalledProcessError, IndexError):
            raise ConfigError(
                f"MASTER_ADDR: is not set, and scontrol cannot resolve the first of {nodes}. Export it."
            ) from None
    # Below the kernel's ephemeral ports; each step of an allocation has its own port.
    job, step = (whole_number(os.environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    os.environ.setdefault("MASTER_PORT", str(20000 + (job + 367 * step) % 12000))
    _refuse_port()


def _refuse_port() -> None:
    """Raise `ConfigError` for an invalid MASTER_PORT."""
    port = whole_number(os.environ, "MASTER_PORT", 1)
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT: expected 1 to 65535, got {port}. Unset it, or start with torchrun or srun.")


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
