"""Writer of generated videos as data sets.

ROOT/train/00000.tar …      episodes in the format of sparo_train/data/video/episode.py
ROOT/clips/                 the same in the layout of evaluation sets, for tasks on clips
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparo_train.core.config import Frozen, field

from ..episodes import episode_fields
from ..pool import run_jobs
from ..writer import write_manifest, write_shard, write_wds_layout
from .video_scenes import Kind, episode

# Data of configs/video/*_tiny.yaml, which train in minutes: kind a with few, large, smooth solids.
SMALL: dict[str, Any] = {"kind": "a", "size": 32, "max_objects": 3, "size_scale": 2.0, "antialias": 2, "train": 1600}


class VideoSetConfig(Frozen):
    """Options of rendering. Equal configs give equal bytes with the same version of pybullet."""

    kind: Kind = field("a", "An entry of `KINDS` in sparo_data/synthetic/video_scenes.py.")
    seed: int = field(0, "Random seed of all episodes.")
    size: int = field(64, "Side of a frame in pixels.", ge=16, le=4096)
    frames: int = field(24, "Frames per episode, at 12 per second.", gt=0, le=1000)
    train: int = field(2000, "Number of episodes for training.", gt=0)
    test: int = field(200, "Episodes for evaluation.", gt=0)
    max_objects: int = field(
        10,
        "Maximum number of solids per episode, for kinds a, b and c. The minimum is three, or max_objects if that is lower.",
        gt=0,
        le=30,
    )
    size_scale: float = field(1.0, "Size of solids relative to CLEVR's.", gt=0, le=4)
    per_shard: int = field(200, "Episodes per shard.", gt=0)
    antialias: int = field(1, "Rays along each side of a pixel: N gives N x N rays per pixel.", ge=1, le=8)


def render_videos(
    root: Path, config: VideoSetConfig, processes: int = 2, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Render everything to `root`; existing shards are kept, so an interrupted call can be continued.

    Args:
        root, config, processes: folder, options, number of processes.
        on_progress: called with (finished episodes, number of episodes) after each shard.

    Raises:
        DataError: `root` contains videos of another config.
        ConfigError: pybullet is not installed.
    """
    write_manifest(root, config, "videos.json")
    shards = -(-config.train // config.per_shard)
    jobs: list[tuple[Callable[..., int], tuple[Any, ...]]] = [(_shard, (root, config, i)) for i in range(shards)]
    # Evaluation data first, so that an interrupted set can be inspected.
    run_jobs([(_test_set, (root, config)), *jobs], processes, config.train + config.test, on_progress)


def _shard(root: Path, config: VideoSetConfig, number: int) -> int:
    numbers = range(number * config.per_shard, min(config.train, (number + 1) * config.per_shard))
    path = root / "train" / f"{number:05d}.tar"
    if not path.exists():
        write_shard(path, (_sample(config, "train", index) for index in numbers))
    return len(numbers)


def _test_set(root: Path, config: VideoSetConfig) -> int:
    if not (root / "clips/test/nshards.txt").exists():
        write_wds_layout(root / "clips", (_sample(config, "test", index) for index in range(config.test)))
    return config.test


def _sample(config: VideoSetConfig, split: str, index: int) -> tuple[str, dict[str, bytes]]:
    c = config
    video = episode(c.kind, c.seed, split, index, c.frames, c.size, c.max_objects, c.antialias, c.size_scale)
    return video.key, episode_fields(video)
