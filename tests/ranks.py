"""Functions run on several gloo ranks, each in a process forked from the test's."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """`function(rank, *arguments)` on every rank of a gloo group; returns the results by rank.

    Raises:
        AssertionError: a rank failed or did not end; its traceback is repeated.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("fork")
        processes = [
            context.Process(target=_rank, args=(rank, world_size, Path(folder), function, arguments))
            for rank in range(world_size)
        ]
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


def _rank(rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    code = 1
    try:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, *arguments)
        torch.save(result, folder / f"result-{rank}")
        dist.barrier()
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    os._exit(code)
