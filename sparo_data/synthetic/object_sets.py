"""Writing scenes of objects as data sets.

ROOT/train/00000.tar …      key.png key.mask.png (value i + 1: object i, 0: none) key.json (`objects`, with position and attributes)
ROOT/masks/                 the same in the layout of evaluation sets, for `task: masks` and `task: objects`
ROOT/empty_room/ …          of rooms: what they are tested on out of distribution
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparo_train.core.config import Frozen, field

from ..pool import run_jobs
from ..writer import Fields, encode_image, write_manifest, write_shard, write_wds_layout
from .object_scenes import ROOM_TESTS, Kind, object_scene


class ObjectSetConfig(Frozen):
    """How much to render. Equal configs give equal bytes."""

    kind: Kind = field("clevr", "clevr: solids on grey; clevrtex: with patterns; rooms: coloured rooms of few")
    seed: int = field(0, "of all scenes")
    size: int = field(64, "pixels of an image's side", ge=16, le=4096)
    train: int = field(20_000, "scenes for training", gt=0)
    test: int = field(500, "scenes of each set that is scored", gt=0)
    max_objects: int = field(
        6, "objects of a scene, which has three at least where it may (rooms: one to three)", gt=0, le=10
    )
    per_shard: int = field(1000, "scenes in a shard", gt=0)
    antialias: int = field(1, "rays per pixel along each side", ge=1, le=8)


def render_objects(
    root: Path, config: ObjectSetConfig, processes: int = 2, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Render everything into `root`; shards that are already there are kept, so an interrupted call continues.

    Args:
        on_progress: called with (scenes done, scenes in all) whenever a shard is finished.

    Raises:
        DataError: `root` holds scenes of another config.
    """
    write_manifest(root, config, "objects.json")
    tests = ("", *(ROOM_TESTS if config.kind == "rooms" else ()))
    shards = -(-config.train // config.per_shard)
    jobs: list[tuple[Callable[..., int], tuple[Any, ...]]] = [(_shard, (root, config, i)) for i in range(shards)]
    jobs += [(_test_set, (root, config, test)) for test in tests]
    run_jobs(jobs, processes, config.train + len(tests) * config.test, on_progress)


def _shard(root: Path, config: ObjectSetConfig, number: int) -> int:
    numbers = range(number * config.per_shard, min(config.train, (number + 1) * config.per_shard))
    path = root / "train" / f"{number:05d}.tar"
    if not path.exists():
        write_shard(path, _samples(config, "train", numbers))
    return len(numbers)


def _test_set(root: Path, config: ObjectSetConfig, test: str) -> int:
    folder = root / (test or "masks")
    if not (folder / "test/nshards.txt").exists():
        write_wds_layout(folder, _samples(config, "test", range(config.test), test))
    return config.test


def _samples(config: ObjectSetConfig, split: str, numbers: range, test: str = "") -> Iterator[tuple[str, Fields]]:
    for number in numbers:
        scene, frame = object_scene(
            config.kind, config.seed, split, number, config.size, config.max_objects, config.antialias, test
        )
        fields = {"png": encode_image(frame.rgb), "mask.png": encode_image(frame.mask)}
        yield f"{number:08d}", {**fields, "json": json.dumps(scene.graph(frame)).encode()}
