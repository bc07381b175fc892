"""Functions that run on several gloo ranks, each in a separate process."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparo_train.core.distributed import Ranks
from sparo_train.core.world import World
from tests.helpers.processes import CONTEXT


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """Run `function(ranks, *arguments)` on every rank of a gloo group; return the results by rank.

    Raises:
        AssertionError: a rank failed or did not end; its traceback is repeated.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = (world_size, free_port(), Path(folder), function, arguments)
        processes = [CONTEXT.Process(target=_rank, args=(rank, *common)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        assert not errors and not hung, f"ranks {hung} did not end\n" + "\n".join(errors)
        return [torch.load(Path(folder) / f"result-{rank}", weights_only=False) for rank in range(world_size)]


def _rank(
    rank: int, size: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        ranks = Ranks(World(rank, size, rank), "gloo", 60)
        torch.save(function(ranks, *arguments), folder / f"result-{rank}")
        ranks.all_reduce_max([0])  # no rank ends before all have finished
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    os._exit(code)
