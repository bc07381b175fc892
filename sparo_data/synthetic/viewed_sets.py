"""Writer of generated scenes with several cameras as data sets.

ROOT/train/00000.tar …      scenes in the format of sparo_train/data/video/views.py
ROOT/scenes/                the same in the layout of evaluation sets, for tasks on scenes
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparo_train.core.config import Frozen, field
from sparo_train.core.errors import ConfigError

from ..episodes import MAX_DEPTH, Video, quantize, scene_fields
from ..pool import run_jobs
from ..tracer.cycles import Cycles
from ..writer import write_manifest, write_shard, write_wds_layout
from .viewed_scenes import Kind, multi_view_episode

# Data of configs/scenes3d/*_tiny.yaml, which train in minutes.
SMALL: dict[str, Any] = {"kind": "simple", "size": 32, "frames": 12, "antialias": 2, "train": 600, "test": 100}


class MultiViewSetConfig(Frozen):
    """Options of rendering. Equal configs give equal bytes with the same version of pybullet."""

    kind: Kind = field("simple", "An entry of `KINDS` in sparo_data/synthetic/viewed_scenes.py.")
    seed: int = field(0, "Random seed of all episodes.")
    size: int = field(64, "Side of a view in pixels.", ge=16, le=4096)
    frames: int | None = field(
        None, "Frames per episode, at 12 per second. Default: 32 or 24, depending on the kind.", gt=0, le=1000
    )
    train: int = field(1800, "Number of episodes for training.", gt=0)
    test: int = field(200, "Episodes for evaluation.", gt=0)
    max_objects: int | None = field(
        None, "Maximum number of objects per episode. Default: 4 or 5, depending on the kind.", gt=0, le=10
    )
    per_shard: int = field(50, "Episodes per shard.", gt=0)
    antialias: int = field(1, "Rays along each side of a pixel: N gives N x N rays per pixel.", ge=1, le=8)
    samples: int = field(
        0, "Samples per pixel of Blender's Cycles. 0: render with the built-in ray tracer.", ge=0, le=65536
    )


def render_multi_view(
    root: Path,
    config: MultiViewSetConfig,
    processes: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
    blender: str | None = None,
) -> None:
    """Render everything to `root`; existing shards are kept, so an interrupted call can be continued.

    Args:
        root, config, processes: folder, options, number of processes.
        on_progress: called with (finished episodes, number of episodes) after each shard.
        blender: a Python interpreter with bpy, if the config has samples.

    Raises:
        DataError: `root` contains scenes of another config.
        ConfigError: pybullet is not installed, samples were given without an interpreter, or the interpreter has no
            bpy.
    """
    cycles = None
    if config.samples:
        if blender is None:
            raise ConfigError(
                f"samples={config.samples}: Cycles needs a Python interpreter with bpy. Give --blender PYTHON."
            )
        cycles = Cycles(blender, config.samples)
        # Before the folder is claimed, so that an interpreter without bpy leaves nothing behind.
        cycles.check()
    write_manifest(root, config, "scenes3d.json")
    shards = -(-config.train // config.per_shard)
    jobs: list[tuple[Callable[..., int], tuple[Any, ...]]] = [
        (_shard, (root, config, i, cycles)) for i in range(shards)
    ]
    run_jobs([(_test_set, (root, config, cycles)), *jobs], processes, config.train + config.test, on_progress)


def _shard(root: Path, config: MultiViewSetConfig, number: int, cycles: Cycles | None) -> int:
    numbers = range(number * config.per_shard, min(config.train, (number + 1) * config.per_shard))
    path = root / "train" / f"{number:05d}.tar"
    if not path.exists():
        write_shard(path, (_sample(config, "train", index, cycles) for index in numbers))
    return len(numbers)


def _test_set(root: Path, config: MultiViewSetConfig, cycles: Cycles | None) -> int:
    if not (root / "scenes/test/nshards.txt").exists():
        write_wds_layout(root / "scenes", (_sample(config, "test", index, cycles) for index in range(config.test)))
    return config.test


def _sample(
    config: MultiViewSetConfig, split: str, index: int, cycles: Cycles | None = None
) -> tuple[str, dict[str, bytes]]:
    c = config
    episode = multi_view_episode(c.kind, c.seed, split, index, c.size, c.frames, c.antialias, c.max_objects, cycles)
    # One range for all views, because there is one JSON.
    depth = quantize(np.stack([[np.minimum(f.depth, MAX_DEPTH) for f in row] for row in episode.frames]))
    views = [
        Video(
            episode.key,
            np.stack([f.rgb for f in row]),
            np.stack([f.mask for f in row]),
            None,
            {},
            depth._replace(levels=levels),
        )
        for row, levels in zip(episode.frames, depth.levels, strict=True)
    ]
    return episode.key, scene_fields(views, episode.metadata)
