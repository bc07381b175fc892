"""`sparo data movi-like` and `sparo data scenes3d`: generated videos and scenes; and options that generated sets share."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sparo_train.core.errors import ConfigError

from ..views.terminal import console, out

Processes = Annotated[int, typer.Option(min=1, help="Number of processes.")]
Train = Annotated[
    int | None, typer.Option(min=1, help="Number of episodes for training. Default: depends on the kind.")
]
Test = Annotated[int | None, typer.Option(min=1, help="Episodes for evaluation. Default: depends on the kind.")]
Size = Annotated[
    int | None,
    typer.Option(help="Width and height of the frames, in pixels. Default: 32 for --kind small, otherwise 64."),
]
Rays = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rays along each side of a pixel: N gives N x N rays per pixel. Default: 2 for --kind small, otherwise 1.",
    ),
]


class VideoKind(StrEnum):  # of sparo_data/synthetic/video_scenes.py, which is imported when needed
    """Kinds of videos, after MOVi-A to MOVi-E."""

    small = "small"
    a = "a"
    b = "b"
    c = "c"
    d = "d"
    e = "e"


class SceneKind(StrEnum):  # of sparo_data/synthetic/viewed_scenes.py
    """Kinds of scenes with several cameras."""

    small = "small"
    simple = "simple"
    nature_ego = "nature_ego"


def print_ready(folder: Path) -> None:
    """Print a summary and the command that checks all samples."""
    console.print(f"{folder}: ready")
    out.print(f"sparo data check {shlex.quote(str(folder / 'train'))}", soft_wrap=True)


def max_objects_option(max_objects: int | None, kind: str, counts: bool, instead: str) -> dict[str, int]:
    """Return the value of `--max-objects`, if given. Raises `ConfigError` for kinds with a fixed number of objects."""
    if max_objects is not None and not counts:
        raise ConfigError(
            f"--max-objects {max_objects}: cannot be set for kind {kind}, which always {instead}. Remove it."
        )
    return {} if max_objects is None else {"max_objects": max_objects}


def _merge_kind_options(small: dict[str, Any], kind: StrEnum, **options: Any) -> dict[str, Any]:
    """Return the options that were given, over the defaults of the kind; `small` is another kind at a smaller size."""
    overrides = {name: value for name, value in options.items() if value is not None}
    return {**(small if kind.value == "small" else {"kind": kind.value}), **overrides}


def movi_like(
    folder: Annotated[Path | None, typer.Argument(help="Output folder. Default: data/movi_KIND.")] = None,
    kind: Annotated[
        VideoKind,
        typer.Option(
            help="Kind of video. small: three large solids, for training on two cores; a: CLEVR's solids; b: solids "
            "and ground in any colour; c: like a, with patterns on solids and ground; d: like c, with many objects; "
            "e: like d, with a moving camera."
        ),
    ] = VideoKind.small,
    train: Train = None,
    test: Test = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Frames per episode, at 12 per second. Default: 24.")
    ] = None,
    size: Size = None,
    max_objects: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of objects per episode. Default: 3 for --kind small, otherwise 10. Not available for --kind d and e.",
        ),
    ] = None,
    size_scale: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=4, help="Size of solids relative to CLEVR's. Default: 2 for --kind small, otherwise 1."
        ),
    ] = None,
    antialias: Rays = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    processes: Processes = 2,
) -> None:
    """Render videos of solids that fall, slide and collide, with masks, flows, depth, boxes and attributes."""
    from sparo_data.synthetic.video_sets import SMALL

    from ..commands.making import make_video_set

    folder = folder or Path("data") / f"movi_{kind.value}"
    options = {
        "train": train,
        "test": test,
        "frames": frames,
        "size": size,
        "size_scale": size_scale,
        "antialias": antialias,
    }
    options |= max_objects_option(max_objects, kind.value, kind.value not in "de", "has 11 to 23 objects")
    make_video_set(folder, processes, seed=seed, **_merge_kind_options(SMALL, kind, **options))
    print_ready(folder)


def scenes3d(
    folder: Annotated[Path | None, typer.Argument(help="Output folder. Default: data/scenes3d_KIND.")] = None,
    kind: Annotated[
        SceneKind,
        typer.Option(
            help="simple: solids on a plane, five cameras; small: like simple, with fewer scenes, fewer frames and smaller "
            "images; nature_ego: rooms, six moving cameras."
        ),
    ] = SceneKind.small,
    train: Train = None,
    test: Test = None,
    frames: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Frames per episode, at 12 per second. Default: 12 for --kind small, 24 for nature_ego, otherwise 32.",
        ),
    ] = None,
    size: Size = None,
    max_objects: Annotated[
        int | None, typer.Option(min=1, help="Maximum objects per episode. Default: 4; nature_ego: 5.")
    ] = None,
    antialias: Rays = None,
    blender: Annotated[
        str | None,
        typer.Option(
            help="Render colours by Blender's Cycles, with this Python interpreter, which needs the package bpy. Masks "
            "and depth still come from the built-in ray tracer."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="With --blender: samples per pixel. Default: 32.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    processes: Processes = 2,
) -> None:
    """Render moving scenes from several cameras with known poses, with masks, depth and attributes."""
    from sparo_data.synthetic.viewed_sets import SMALL

    from ..commands.making import make_viewed_set

    folder = folder or Path("data") / f"scenes3d_{kind.value}"
    options = {
        "train": train,
        "test": test,
        "frames": frames,
        "size": size,
        "max_objects": max_objects,
        "antialias": antialias,
    }
    options["samples"] = samples or (32 if blender else 0)
    make_viewed_set(folder, processes, blender, seed=seed, **_merge_kind_options(SMALL, kind, **options))
    print_ready(folder)
