"""`sparo data movi-like`, `sparo data scenes3d`: what moves, drawn by our own ray tracer; and what all drawn sets' verbs share."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sparo_train.core.errors import ConfigError

from ..views.terminal import console, out

Processes = Annotated[int, typer.Option(min=1)]
Train = Annotated[int | None, typer.Option(min=1, help="training episodes; default: the kind's")]
Test = Annotated[int | None, typer.Option(min=1, help="episodes that are scored; default: the kind's")]
Size = Annotated[int | None, typer.Option(help="pixels per side; default: 64, small: 32")]
Rays = Annotated[int | None, typer.Option(min=1, help="rays per pixel along each side; default: 1, small: 2")]


class VideoKind(StrEnum):  # sparo_data/synthetic/video_scenes.py's, which is not imported before it is needed
    """What videos are of, after MOVi-A to E."""

    small = "small"
    a = "a"
    b = "b"
    c = "c"
    d = "d"
    e = "e"


class SceneKind(StrEnum):  # sparo_data/synthetic/viewed_scenes.py's
    """What several cameras see."""

    small = "small"
    simple = "simple"
    nature_ego = "nature_ego"


def print_ready(folder: Path) -> None:
    """Say so, and the line that looks at every sample."""
    console.print(f"{folder}: ready")
    out.print(f"sparo data check {shlex.quote(str(folder / 'train'))}", soft_wrap=True)


def max_objects_option(max_objects: int | None, kind: str, counts: bool, instead: str) -> dict[str, int]:
    """`--max-objects` where it was given. Raises `ConfigError` for a kind that has as many objects as it has."""
    if max_objects is not None and not counts:
        raise ConfigError(f"--max-objects {max_objects}: kind {kind} {instead} whatever is asked for; leave it away")
    return {} if max_objects is None else {"max_objects": max_objects}


def _merge_kind_options(small: dict[str, Any], kind: StrEnum, **options: Any) -> dict[str, Any]:
    """What was typed, over the kind: the small one is another's in smaller numbers."""
    overrides = {name: value for name, value in options.items() if value is not None}
    return {**(small if kind.value == "small" else {"kind": kind.value}), **overrides}


def movi_like(
    folder: Annotated[Path | None, typer.Argument(help="default: data/movi_KIND")] = None,
    kind: Annotated[
        VideoKind,
        typer.Option(
            help="small: a few large solids, for two cores; a: CLEVR's solids; b: any colour; c: patterns; d: a crowd; e: and a moving camera"
        ),
    ] = VideoKind.small,
    train: Train = None,
    test: Test = None,
    frames: Annotated[int | None, typer.Option(min=1, help="of an episode, 12 a second; default: 24")] = None,
    size: Size = None,
    max_objects: Annotated[
        int | None, typer.Option(min=1, help="solids of an episode (not d and e); default: 10, small: 3")
    ] = None,
    size_scale: Annotated[
        float | None, typer.Option(min=0.1, max=4, help="solids' sizes, times CLEVR's; default: 1, small: 2")
    ] = None,
    antialias: Rays = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
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
    options |= max_objects_option(max_objects, kind.value, kind.value not in "de", "has a crowd")
    make_video_set(folder, processes, seed=seed, **_merge_kind_options(SMALL, kind, **options))
    print_ready(folder)


def scenes3d(
    folder: Annotated[Path | None, typer.Argument(help="default: data/scenes3d_KIND")] = None,
    kind: Annotated[
        SceneKind,
        typer.Option(
            help="small: simple's, for two cores; simple: solids on a plain, five cameras; nature_ego: rooms, six cameras that move"
        ),
    ] = SceneKind.small,
    train: Train = None,
    test: Test = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="of an episode, 12 a second; default: 32, small: 12, nature_ego: 24")
    ] = None,
    size: Size = None,
    max_objects: Annotated[
        int | None, typer.Option(min=1, help="objects of an episode; default: 4, nature_ego: 5")
    ] = None,
    antialias: Rays = None,
    blender: Annotated[
        str | None,
        typer.Option(help="a Python that has bpy: Blender's Cycles draws colours, masks and depth stay our tracer's"),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="--blender: paths per pixel; default: 32")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    processes: Processes = 2,
) -> None:
    """Render moving scenes as several posed cameras see them, with masks, depth and attributes."""
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
