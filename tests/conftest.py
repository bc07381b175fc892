"""Small real files that the tests write for themselves."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from sparo_data.writer import write_shards, write_wds_layout
from tests.processes import Started

# Of every process that computes; two at once with two threads each would wait for each other on two cores.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
WORDS = ["red", "blue", "green", "dark", "bright", "square", "circle", "plain"]


def pytest_collection_finish() -> None:
    """What was imported stays: trainings collect garbage often, and need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all of a session, fixtures of any scope included: what is measured once has to be found again."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")
    yield
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


@pytest.fixture(scope="session", autouse=True)
def _heard_interrupts() -> Iterator[None]:
    """A shell without job control lets what it starts in the background ignore SIGINT, and its children inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(THREADS)
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # else a training takes as many as the machine has free


def jpeg(seed: int, size: tuple[int, int] = (40, 36)) -> bytes:
    rng = np.random.default_rng(seed)
    base = np.full((size[1], size[0], 3), rng.integers(0, 255, 3), dtype=np.uint8)
    noise = rng.integers(0, 40, base.shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(base.astype(int) + noise, 0, 255).astype(np.uint8)).save(buffer, format="JPEG", quality=92)
    return buffer.getvalue()


def sample(i: int) -> tuple[str, dict[str, bytes]]:
    return f"{i:06d}", {"jpg": jpeg(i), "txt": f"a {WORDS[i % 8]} {WORDS[(i // 8) % 8]} number {i}".encode()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """96 samples in four shards."""
    write_shards(tmp_path / "shards", (sample(i) for i in range(96)), 24)
    return tmp_path / "shards"


def eval_sets(root: Path) -> dict[str, dict[str, str]]:
    """A zero-shot, a retrieval and a pairs set of twelve images each; returns a recipe's `eval.tasks`."""
    images = [jpeg(1000 + i) for i in range(12)]
    zero = [(f"{i:03d}", {"jpg": data, "cls": str(i % 3).encode()}) for i, data in enumerate(images)]
    write_wds_layout(
        root / "zero", zero, classnames=["red square", "blue circle", "plain"], templates=["a {c}", "the {c}"]
    )
    pair = b'{"kind": "%s", "caption": "a red square", "negative_caption": "a blue square"}'
    write_wds_layout(
        root / "ret", [(f"{i:03d}", {"jpg": d, "txt": f"a thing {i}".encode()}) for i, d in enumerate(images)]
    )
    kinds = [b"replace_att", b"swap_att"]
    write_wds_layout(
        root / "pairs", [(f"{i:03d}", {"jpg": d, "json": pair % kinds[i % 2]}) for i, d in enumerate(images)]
    )
    return {
        "zero": {"task": "zeroshot", "root": str(root / "zero")},
        "ret": {"task": "retrieval", "root": str(root / "ret")},
        "pairs": {"task": "pairs", "root": str(root / "pairs")},
    }


def tiny_recipe(shards: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """A recipe that takes a second: two-layer towers on 32-pixel images."""
    tree = {
        "name": "tiny",
        "out": str(out),
        "batch_size": 8,
        "steps": 12,
        "objective": {
            "kind": "clip",
            "model": {
                "vision": {
                    "image_size": 32,
                    "patch_size": 16,
                    "width": 32,
                    "layers": 2,
                    "head_width": 16,
                    "patch_dropout": 0.25,
                },
                "text": {"context_length": 16, "width": 32, "heads": 2, "layers": 2},
                "embed_dim": 16,
                "readout": {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8},
            },
        },
        "data": {
            "sources": {"a": {"shards": str(shards)}},
            "workers": 1,
            "streams": 4,
            "shuffle_window": 16,
            "chunk": 4,
            "hflip": 0.5,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "engine": {"device": "cpu", "precision": "fp32"},
        "checkpoint": {"every_steps": 3},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    return {**tree, **changes}


def dino_recipe(shards: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """The same for DINO+SPARO: three blocks less one, on 32-pixel crops and 16-pixel ones, with drop path."""
    tree = tiny_recipe(shards, out, name="dino")
    tree["objective"] = {
        "kind": "dino",
        "model": {
            "image_size": 32,
            "patch_size": 8,
            "width": 32,
            "depth": 3,
            "heads": 2,
            "drop_path": 0.2,
            "readout": {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8},
        },
        "head": {"out_dim": 64, "hidden_dim": 32, "bottleneck_dim": 16},
        "crops": {"local_crops_number": 2, "local_size": 16},
        "warmup_teacher_temp": 0.02,
        "warmup_teacher_temp_epochs": 2,
    }
    tree["samples_per_epoch"] = 32
    del tree["data"]["hflip"]
    tree["optim"] = {
        "lr": 1e-3,
        "weight_decay": 0.04,
        "weight_decay_end": 0.4,
        "warmup_steps": 2,
        "warmup_from_zero": True,
        "clip_grad_norm": 0.3,
        "clip_per": "tensor",
    }
    return {**tree, **changes}


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(tree: dict[str, Any]) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def start_sparo(*arguments: str, cwd: Path | None = None, program: str | None = None, **environment: str) -> Started:
    """`sparo …` (or a program around it) in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), **environment}
    return Started(arguments, env, cwd, program)


def sparo(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start_sparo(*arguments, cwd=cwd, **environment)
    stdout, stderr = process.communicate(timeout=500)
    return subprocess.CompletedProcess(arguments, process.returncode or 0, stdout, stderr)


def slots_recipe(shards: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """The same for a slot autoencoder with frames, on 16-pixel images."""
    tree = tiny_recipe(shards, out, name="slots")
    tree["objective"] = {
        "kind": "slots",
        "model": {
            "image_size": 16,
            "encoder": {"channels": [8, 8], "strides": [1, 2], "kernel": 3},
            "features": 16,
            "grouping": {"preset": "isa", "slots": 3, "width": 16, "slot_init": "learned", "mlp_width": 16},
            "frame": {"scales": True, "hidden": 16},
            "decoder": {"kind": "mlp", "hidden": [16, 16]},
        },
    }
    return {**tree, **changes}
