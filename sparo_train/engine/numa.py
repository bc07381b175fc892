"""Binding of a process to the CPU cores near its GPU, on machines with several CPU sockets."""

from __future__ import annotations

import multiprocessing
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from ..core.distributed import Ranks

_SYSFS = Path("/sys")


def bind_to_socket(device: torch.device, ranks: Ranks, sysfs: Path = _SYSFS) -> str | None:
    """Bind this process and its loader workers to the cores of the CPU socket that its GPU is attached to.

    Nothing is bound if a socket of this machine would be without a rank, because its cores would be idle, or if the
    launcher has chosen cores of a single socket. All ranks call it together.

    Args:
        device: this rank's device, in use.
        ranks: the ranks, of this machine and of others.
        sysfs: where Linux describes its devices.

    Returns:
        A line for the log, also if the system refuses; None if nothing has to be bound.
    """
    own, sockets = gpu_socket(device, sysfs), allowed_cores(sysfs)
    here = platform.node()
    used = {socket for node, socket in ranks.gather((here, own)) if node == here}
    if own is None or len(sockets) < 2 or not used >= sockets.keys():
        return None
    cores, place = sockets[own], f"socket {own}, {len(sockets[own])} of {sum(map(len, sockets.values()))} cores"
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        return f"engine.bind_cores: cannot bind to {place} ({error.strerror or error}); training continues on all cores"
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        with suppress(OSError):  # threads and workers end at any time, and a run must not fail because it is not bound
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    os.sched_setaffinity(int(task.name), cores)
    return f"engine.bind_cores: {place}"


def allowed_cores(sysfs: Path = _SYSFS) -> dict[int, set[int]]:
    """Return the cores that this process may use, by socket; empty if the system does not report it."""
    sockets: dict[int, set[int]] = {}
    try:
        for core in os.sched_getaffinity(0):
            text = (sysfs / f"devices/system/cpu/cpu{core}/topology/physical_package_id").read_text()
            sockets.setdefault(int(text), set()).add(core)
    except (AttributeError, OSError, ValueError):  # macOS has no affinity
        return {}
    return sockets


def gpu_socket(device: torch.device, sysfs: Path = _SYSFS) -> int | None:
    """Return the CPU socket that a GPU is attached to; None if unknown."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        # Such as `0-15,64-79`; -1 if the machine has a single node.
        first = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().replace(",", "-").split("-")[0]
        return int((sysfs / f"devices/system/cpu/cpu{int(first)}/topology/physical_package_id").read_text())
    except (OSError, ValueError):
        return None
