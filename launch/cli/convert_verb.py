"""`sparo data convert`: convert published sets or your own images to shards."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparo_train.core.errors import ConfigError, did_you_mean

from ..views.terminal import console, out
from .given_options import parse_part

if TYPE_CHECKING:  # not needed for `sparo --help`
    from sparo_data.captioned_sets import ConversionResult

ShareOption = Annotated[
    str | None, typer.Option(help="I/N: process only part I of N, counted from 0. Set by `sparo launch data`.")
]
UrlCache = Annotated[
    str | None,
    typer.Option(
        help="For a table with the URLs of images: folder that stores the downloaded images (url_cache of a recipe)."
    ),
]
_TEMPLATE = "a photo of a {c}"
_DEFAULT_FOLDER = Path("data/mine")  # default of configs/clip/own_pairs.yaml


def convert(
    place: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Input: an image folder, a .csv/.tsv file, Parquet files, or a folder in one of these formats: "
            "Hugging Face datasets, MDS, LitData, Energon. With --to, the input can also be shards. "
            "With --as, it is the files of a published set.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    test: Annotated[
        int,
        typer.Option(
            min=0,
            help="Hold out this many images for evaluation, chosen by a hash of their content. With --as, the first scenes "
            "(or videos, with --videos) are held out instead.",
        ),
    ] = 0,
    image_column: Annotated[
        str | None,
        typer.Option(help="Column of images. Default: image, jpg, filepath and similar names."),
    ] = None,
    caption_column: Annotated[
        str | None,
        typer.Option(
            help="Column of captions. Default: the first existing column of `caption`, `text`, `txt`, `captions`, `title` and `sentence`."
        ),
    ] = None,
    separator: Annotated[str | None, typer.Option(help="Column separator. Default: detected in the header.")] = None,
    skip_missing: Annotated[
        bool,
        typer.Option("--skip-missing", help="Skip table rows whose image is missing, and report their number."),
    ] = False,
    split: Annotated[
        str | None, typer.Option(help="Split of Hugging Face datasets or Energon. Default: train.")
    ] = None,
    url_cache: UrlCache = None,
    to: Annotated[
        Literal["shards", "parquet", "dataset", "mds", "litdata", "table"],
        typer.Option(
            help="Output format: webdataset shards, Parquet, a Hugging Face dataset, MosaicML's MDS, LitData, or a table with image files."
        ),
    ] = "shards",
    template: Annotated[str, typer.Option(help="Caption for CLASS/ folders; {c} is the class.")] = _TEMPLATE,
    per_shard: Annotated[
        int | None, typer.Option(min=1, help="Samples per shard. Default: 1000; with --videos: 100.")
    ] = None,
    part: ShareOption = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Published set with masks, objects or cameras: clevr_with_masks, tetrominoes, objects_room, objects_room_background, "
            "multi_dsprites, clevr, clevrtex, coco, movi, npy, lmdb, davis, youtube_vis, nerf, clevr3d, sunds.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --as: maximum number of scenes.")] = None,
    scenes: Annotated[
        str | None, typer.Option(metavar="A:B", help="With --as clevr3d: scenes A to B-1 (ObSuRF trains on 0:70000).")
    ] = None,
    max_objects: Annotated[
        int | None, typer.Option(min=0, help="With --as: skip scenes with more than this many objects (6 for CLEVR6).")
    ] = None,
    crop: Annotated[
        str,
        typer.Option(
            help="How to crop images of 240 x 320 pixels: none, clevr (rows 29:221) or center192 (rows 24:216), both with columns 64:256. Needs --as."
        ),
    ] = "none",
    size: Annotated[int | None, typer.Option(help="With --as: pixels per side.")] = None,
    near: Annotated[
        float | None, typer.Option(help="With --as nerf or clevr3d: nearest distance that cameras see, in world units.")
    ] = None,
    far: Annotated[
        float | None, typer.Option(help="With --as nerf or clevr3d: farthest distance that cameras see.")
    ] = None,
    videos: Annotated[
        bool,
        typer.Option(
            "--videos", help="With --as movi, npy, davis or youtube_vis: one sample per video instead of one per frame."
        ),
    ] = False,
) -> None:
    """Convert a folder or table of images with captions, a data set of another library, or a published set, to shards or to another library's format."""
    source, own, per_shard = Path(place), parse_part(part), per_shard or (100 if videos else 1000)
    published: dict[str, Any] = {
        "limit": limit, "scenes": _parse_scene_range(scenes), "max_objects": max_objects, "crop": crop, "size": size, "near": near,
        "far": far, "videos": videos,
    }  # fmt: skip
    file_options = {"--separator": separator, "--skip-missing": skip_missing, "--template": template != _TEMPLATE}
    column_options = {
        "--image-column": image_column, "--caption-column": caption_column, "--split": split, "--url-cache": url_cache,
    }  # fmt: skip
    if own is not None and (kind is not None or test):
        what = "published sets are" if kind is not None else "with --test, the set is"
        raise ConfigError(f"--part: {what} converted as a whole. Remove --part.")
    if kind is not None:
        _refuse_options({**column_options, **file_options, "--to": to != "shards"}, "folders and tables")
        _convert_published(source, folder, kind, {**published, "test": test, "per_shard": per_shard})
        return
    # Zero is a value.
    given = {
        f"--{name.replace('_', '-')}": value not in ("none", None) and value is not False
        for name, value in published.items()
    }
    _refuse_options(given, "--as NAME")
    from sparo_data.convert import convert_folder
    from sparo_data.convert_table import convert_csv
    from sparo_train.data.sources.detect import source_block

    data_set = next(iter(source_block([place])))
    if to != "shards" and data_set == "folder":
        _refuse_captioned_folder(source, to)
    if to != "shards" or url_cache or data_set not in ("shards", "table", "folder"):
        _refuse_options(file_options, "folders and tables of files that become shards")
        keys: dict[str, Any] = {"caption_key": caption_column, "split": split, "url_cache": url_cache}
        keys["image_keys"] = image_column and (image_column,)
        converted = _convert_data_set(place, folder, keys, to, per_shard, own, test)
    elif source.is_dir():
        _refuse_options({"--split": split}, "Hugging Face datasets and Energon")
        converted = convert_folder(source, folder, template, per_shard, own, test)
    elif data_set == "table":
        _refuse_options({"--split": split}, "Hugging Face datasets and Energon")
        converted = convert_csv(
            source, folder, image_column, caption_column, separator, per_shard, own, test, skip_missing
        )
    else:
        raise ConfigError(_conversion_error(source))
    _print_summary(folder, converted, own is None, to)


def _refuse_captioned_folder(folder: Path, to: str) -> None:
    """Raise `ConfigError` for a folder with captions, which are read from shards only, so that other formats would lack them."""
    from sparo_data.convert import refuse_metadata
    from sparo_train.data.sources.folder import list_pictures

    images, _ = list_pictures(folder)
    refuse_metadata(folder, images)
    texts = (folder / name for name in images)
    if path := next((path for image in texts if (path := image.with_suffix(".txt")).is_file()), None):
        raise ConfigError(
            f"--to {to}: caption files in a folder, such as {path.name}, are not read. Run `sparo data convert "
            f"{shlex.quote(str(folder))} SHARDS`, then `sparo data convert SHARDS OUT --to {to}`."
        )


def _refuse_options(options: Mapping[str, object], applies_to: str) -> None:
    """Raise `ConfigError` for the first option that was given."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name}: applies to {applies_to} only. Remove {name}.")


def _conversion_error(source: Path) -> str:
    """Return the message for a file that is not converted."""
    if not source.exists():
        siblings = [path.name for path in source.absolute().parent.glob("*")]
        return f"{source}: no such file or folder; {did_you_mean(source.name, siblings)}"
    if source.suffix == ".tar":
        return f"{source}: is a shard already. Train with data.sources='{{mine: {{shards: {source}}}}}'."
    if source.suffix in (".gz", ".tgz"):
        return f"{source}: is compressed. Unpack it: gunzip -k {shlex.quote(str(source))}"
    return (
        f"{source}: cannot be converted. Name an image folder, a .csv or .tsv file or a data set, or pass --as NAME for a "
        "published set."
    )


def _convert_data_set(
    place: str,
    folder: Path,
    keys: dict[str, Any],
    to: str,
    per_shard: int,
    part: tuple[int, int] | None,
    test: int,
) -> ConversionResult:
    """Convert a data set of another library to shards, or any data set to another library's format."""
    from sparo_data.convert_rows import write_rows
    from sparo_data.convert_source import convert_source
    from sparo_train.data.sources.base import open_source
    from sparo_train.data.sources.detect import source_config

    if to != "shards" and (part is not None or test):
        raise ConfigError(f"--to {to}: writes the whole data set. Remove --test and --part.")
    source = open_source("", source_config([place], all_columns=True, **keys), block="")
    if to != "shards":
        return write_rows(source, folder, to, per_shard)
    return convert_source(source, folder, per_shard, part, test)


def _parse_scene_range(scenes: str | None) -> tuple[int, int] | None:
    """Parse A:B into (A, B). Raises `ConfigError`."""
    if scenes is None:
        return None
    first, _, last = scenes.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise ConfigError(f"--scenes {scenes}: expected A:B, as in 0:70000 for scenes 0 to 69999.")
    return int(first), int(last)


def _convert_published(source: Path, folder: Path, kind: str, options: dict[str, Any]) -> None:
    """Convert a published set and print a summary."""
    from ..commands.making import convert_published_set

    written = convert_published_set(source, folder, kind, **options)
    what = "videos" if options["videos"] else "scenes"
    console.print(
        f"{folder}: {written.train} {what} for training, {written.test} for evaluation, {written.without_objects} without an object",
        soft_wrap=True,
    )
    for reason, count in written.left_out.items():
        console.print(f"left out: {count} {reason}", soft_wrap=True)
    if written.train:
        out.print(f"sparo data check {shlex.quote(str(folder / 'train'))}", soft_wrap=True)


def _print_summary(folder: Path, converted: ConversionResult, whole: bool, to: str = "shards") -> None:
    """Print a summary, and the next commands to type."""
    from sparo_train.core.recipe.config_keys import value_text
    from sparo_train.data.sources.folder import left_out_text

    scored = f", {converted.test} images for evaluation ({converted.task})" if converted.task else ""
    console.print(
        f"{folder}: {converted.train} samples{' for training' if converted.task else ''}{scored}", soft_wrap=True
    )
    for reason, count in converted.skipped.items():
        console.print(f"left out: {count} samples ({reason})", soft_wrap=True)
    if converted.turned:
        console.print(f"{converted.turned} images were rotated according to EXIF")
    if unusable := max(converted.broken, sum(converted.refused.values())):
        reasons = ", ".join(converted.refused) or "bad image"
        scored = ", and they are not scored" if converted.broken else ""
        console.print(
            f"unusable images: {unusable} ({reasons}). Training skips them{scored}, but stops if their share exceeds "
            "data.max_bad_share (default: 1 %). `sparo data check` names them.",
            soft_wrap=True,
        )
    if converted.left_out:
        console.print(
            f"left out because they are not readable images: {left_out_text(converted.left_out)}", soft_wrap=True
        )
    if converted.missing:
        console.print(f"left out: {converted.missing} rows without an image")
    if converted.numbered:
        console.print(
            "Captions contain the numbers of classes instead of names. To use names, write them to classnames.txt in the source folder, one per line "
            "in the order of the classes.",
            soft_wrap=True,
        )
    if converted.copies:
        console.print(f"left out of training: {converted.copies} copies of evaluation images", soft_wrap=True)
    if not whole:
        return
    shards = folder / "train" if converted.task else folder / "table.tsv" if to == "table" else folder
    out.print(f"sparo data check {shlex.quote(str(shards))}", soft_wrap=True)
    command = ["sparo", "train", "own_pairs"]
    if folder != _DEFAULT_FOLDER:  # a separate run folder, because another data set is another run
        name = re.sub("[^A-Za-z0-9._-]+", "_", folder.name).lstrip("._-") or "mine"
        command.append(f"name={value_text(name)}")  # as YAML, because 2024 would become a number
    if shards != _DEFAULT_FOLDER / "train":
        command.append(f"data.sources={value_text({'mine': {to: str(shards)}})}")
    if converted.task != "retrieval" or folder != _DEFAULT_FOLDER:
        tasks = (
            {converted.task: {"task": converted.task, "root": str(folder / converted.task)}} if converted.task else {}
        )
        command.append(f"eval.tasks={value_text(tasks)}")
    out.print(shlex.join(command), soft_wrap=True)
