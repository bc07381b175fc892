"""What one rank of `sparo launch check` tests: interpreter, packages, folder, devices, and exchange between ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError, SparoError
from sparo_train.core.files import write_whole
from sparo_train.core.world import find_world, whole_number

from ..jobs.job import GPUS

_PACKAGES = ("torch", "torchvision", "open_clip_torch", "timm", "submitit")
_JOIN_SECONDS = 60.0
_MEGABYTES = 64


class RankCheck:
    """The tests of this rank; its results so far are in FOLDER/ranks/RANK.json, also if a test never returns.

    Args:
        folder: the folder of the check, which all nodes must see.
    """

    def __init__(self, folder: Path):
        self.folder, self.world = folder, find_world()
        self.facts: dict[str, Any] = {
            "rank": self.world.rank,
            "ranks": self.world.size,
            "node": os.environ.get("SLURMD_NODENAME", platform.node()),
            "python": platform.python_version(),
            "interpreter": sys.executable,
            "problem": "",
        }

    def run(self) -> None:
        """Run all tests in order.

        Raises:
            ConfigError: a test failed; it is in the file, too.
        """
        for name in ("packages", "devices", "join", "exchange"):
            self._write({"stage": name})
            try:
                self._write(getattr(self, f"_{name}")())
            except SparoError as error:
                self._fail(name, str(error))
            except Exception as error:  # of torch, NCCL or gloo, in many forms
                self._fail(name, f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}")
        self._write({"stage": "done"})

    def _write(self, facts: dict[str, Any]) -> None:
        self.facts |= facts
        path = self.folder / "ranks" / f"{self.world.rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.facts, indent=1))

    def _fail(self, name: str, problem: str) -> None:
        self._write({"problem": f"{name}: {problem}"})
        raise ConfigError(f"{self.facts['node']}: {name}: {problem}")

    def _packages(self) -> dict[str, Any]:
        missing = []
        versions = {}
        for name in _PACKAGES:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
        if missing:
            raise ConfigError(f"{sys.executable} lacks {', '.join(missing)}. Install sparo in this environment.")
        import open_clip  # noqa: F401
        import torch  # noqa: F401

        return {"versions": versions}

    def _devices(self) -> dict[str, Any]:
        import torch

        from sparo_train.core.accelerator import available_device, device_name

        wanted, count = whole_number(os.environ, GPUS, 0), torch.accelerator.device_count()
        if wanted and not count:
            raise ConfigError(
                f"the job asked for {wanted} GPU(s), but torch {torch.__version__} sees none. Is it a CUDA build, and does "
                "its CUDA version fit the driver?"
            )
        kind = available_device().type
        names = [device_name(torch.device(kind, number)) or kind for number in range(count)]
        return {"devices": names or ["CPU"], "cores": len(os.sched_getaffinity(0))}

    def _join(self) -> dict[str, Any]:
        from sparo_train.core.accelerator import available_device, collectives
        from sparo_train.core.distributed import Ranks

        begin = time.monotonic()
        self.backend = collectives(available_device())
        self.ranks = Ranks(self.world, self.backend, _JOIN_SECONDS, _JOIN_SECONDS)
        return {"backend": self.backend if self.world.size > 1 else "", "join_seconds": time.monotonic() - begin}

    def _exchange(self) -> dict[str, Any]:
        """Sum 64 MB over ranks, on the device that training would use."""
        if self.world.size == 1:
            return {}
        import torch
        import torch.distributed as dist

        from sparo_train.core.accelerator import available_device, is_streaming

        device = available_device()
        if on_gpu := is_streaming(device):
            device = torch.device(device.type, self.world.local_rank % torch.accelerator.device_count())
        numbers = torch.full((_MEGABYTES << 18,), float(self.world.rank + 1), device=device)
        first = numbers[:1].clone()
        dist.all_reduce(first)  # connects
        first.item()  # waits for the device
        begin = time.monotonic()
        dist.all_reduce(numbers)
        numbers[0].item()
        seconds, expected = time.monotonic() - begin, self.world.size * (self.world.size + 1) / 2
        if not bool((numbers == expected).all()):
            raise ConfigError(f"the sum over ranks is wrong, got {numbers[0].item():g} instead of {expected:g}")
        # The number of a device differs from its identity if every rank sees only its own.
        facts = torch.get_device_module(device).get_device_properties(device) if on_gpu else None
        hosts = self.ranks.gather((self.facts["node"], str(getattr(facts, "uuid", ""))))
        self.ranks.close()
        shared = [host for host in set(hosts) if host[1] and hosts.count(host) > 1]
        if shared:
            raise ConfigError(f"two ranks use the same GPU ({shared[0][1]} on {shared[0][0]})")
        return {"exchange_gb_per_s": _MEGABYTES / 1024 / max(seconds, 1e-9)}
