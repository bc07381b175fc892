"""Small real files that the tests write for themselves."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sparo_data.writer import write_shards
from tests.helpers.processes import THREADS
from tests.helpers.samples import sample


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which runs often during training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use one cache per test session, so that fixtures of every scope reuse what was measured once."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")
    yield
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


@pytest.fixture(scope="session", autouse=True)
def _heard_interrupts() -> Iterator[None]:
    """Restore SIGINT: a shell without job control starts background processes with SIGINT ignored, and their children inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(THREADS)
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(THREADS)
    )  # otherwise a training uses every core that the machine has free


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write 96 samples in four shards."""
    write_shards(tmp_path / "shards", (sample(i) for i in range(96)), 24)
    return tmp_path / "shards"


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(tree: dict[str, Any]) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write
