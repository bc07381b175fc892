"""`sparo data …`: create, convert, check, index and benchmark shards."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparo_train.core.errors import ConfigError, DataError

from ..views.terminal import console, out
from . import convert_verb
from . import synthetic_verbs as drawn_verbs
from .convert_verb import ShareOption, UrlCache
from .given_options import ALLOW_UNKNOWN_OPTIONS, Overrides, Recipe, load_run_config, parse_part
from .synthetic_verbs import Processes, max_objects_option, print_ready

if TYPE_CHECKING:  # not imported for `sparo --help`
    from sparo_train.data.decode.bands import PixelRange


class ObjectKind(StrEnum):  # of sparo_data/synthetic/object_scenes.py, which is imported when needed
    """Kinds of scenes."""

    clevr = "clevr"
    clevrtex = "clevrtex"
    rooms = "rooms"
    rooms_background = "rooms_background"


app = typer.Typer(no_args_is_help=True, help="Create, convert, check, index and benchmark shards.")


@app.command()
def scenes(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("data/scenes"),
    train: Annotated[int, typer.Option(help="Scenes for training.")] = 8000,
    test: Annotated[
        int,
        typer.Option(
            min=20, help="Scenes of the retrieval set. The zero-shot sets and caption pairs scale with this number."
        ),
    ] = 400,
    size: Annotated[int, typer.Option(help="Width and height of the images, in pixels.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    processes: Processes = 2,
) -> None:
    """Render the captioned scenes with their evaluation sets."""
    from ..commands.making import make_scenes  # here and below: not needed for `sparo --help`

    # In the proportions of the defaults, with which published numbers here were made.
    sizes = {"retrieval": test, "per_class": test // 20, "pairs_per_kind": test * 3 // 8}
    make_scenes(folder, train, size, seed, processes, **sizes)
    console.print(f"{folder}: ready")


@app.command("scene-questions")
def scene_questions(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("data/scene_questions"),
    questions: Annotated[int, typer.Option(min=120, help="Number of questions in each set.")] = 300,
    size: Annotated[int, typer.Option(help="Width and height of the images, in pixels.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    processes: Processes = 2,
) -> None:
    """Render stand-ins of Winoground, ColorSwap, ARO, NegBench and COCO-Stuff for models that were trained on `sparo data scenes`."""
    from ..commands.making import make_scene_questions

    make_scene_questions(folder, processes, questions=questions, size=size, seed=seed)
    console.print(f"{folder}: ready")
    out.print(f"sparo eval RUN --tasks compositional --root {shlex.quote(str(folder))}", soft_wrap=True)


@app.command()
def tetrominoes(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("data/tetrominoes"),
    train: Annotated[int, typer.Option(min=1, help="Images for training.")] = 60_000,
    test: Annotated[int, typer.Option(min=1, help="Images with masks for evaluation.")] = 320,
    left_half: Annotated[
        bool, typer.Option("--left-half", help="In training images, place the pieces in the left half only.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
) -> None:
    """Generate Tetrominoes with masks (three pieces on black) for object discovery."""
    from ..commands.making import make_tetromino_set

    make_tetromino_set(folder, train=train, test=test, seed=seed, left_half=left_half)
    print_ready(folder)


@app.command()
def objects(
    kind: Annotated[
        ObjectKind,
        typer.Argument(
            help="Kind of scene. clevr: solids; clevrtex: solids with patterns; rooms: coloured rooms; rooms_background: the "
            "same, with labels for floor, sky and walls."
        ),
    ],
    folder: Annotated[Path | None, typer.Argument(help="Output folder. Default: data/KIND.")] = None,
    train: Annotated[int, typer.Option(min=1, help="Scenes for training.")] = 20_000,
    test: Annotated[int, typer.Option(min=1, help="Number of scenes in each evaluation set.")] = 500,
    size: Annotated[int, typer.Option(help="Width and height of the images, in pixels.")] = 64,
    max_objects: Annotated[
        int | None, typer.Option(min=1, help="Maximum objects per scene (clevr, clevrtex). Default: 6.")
    ] = None,
    antialias: Annotated[
        int, typer.Option(min=1, help="Rays along each side of a pixel: N gives N x N rays per pixel.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    processes: Processes = 2,
) -> None:
    """Render scenes with masks and attributes for object discovery and set prediction."""
    from ..commands.making import make_object_set

    folder = folder or Path("data") / kind.value
    options = {"train": train, "test": test, "size": size, "antialias": antialias, "seed": seed}
    options |= max_objects_option(
        max_objects, kind.value, not kind.value.startswith("rooms"), "has one to three objects"
    )
    make_object_set(folder, processes, kind=kind.value, **options)
    print_ready(folder)


app.command("movi-like")(drawn_verbs.movi_like)
app.command()(drawn_verbs.scenes3d)


@app.command()
def emoji(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("data/emoji"),
    size: Annotated[int, typer.Option(help="Width and height of the images, in pixels.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    processes: Processes = 2,
) -> None:
    """Download emoji of nine vendors through npm and write shards with captions and leak-free tests."""
    from ..commands.making import make_emoji_set

    for part, count in make_emoji_set(folder, size, seed, processes).items():
        console.print(f"{folder}/{part}: {count} samples")


@app.command()
def tissue(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("data/tissue"),
    patients: Annotated[
        int, typer.Option(min=5, help="Number of patients. A fifth of them are in the test split.")
    ] = 40,
    tiles: Annotated[int, typer.Option(min=1, help="Tiles per patient.")] = 50,
    size: Annotated[int, typer.Option(min=32, help="Width and height of the images, in pixels.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    processes: Processes = 2,
) -> None:
    """Draw tiles like stained tissue, with a table of classes, patients, counts and findings, and with masks."""
    from sparo_data.synthetic.tissue import TissueConfig, tissue_set

    config = TissueConfig(seed=seed, patients=patients, tiles=tiles, size=size)
    for split, count in tissue_set(folder, config, processes).items():
        console.print(f"{folder}: {count} tiles of split {split}")


@app.command("fashion-mnist")
def fashion_mnist(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path("data/fashion_mnist"),
    raw: Annotated[
        Path | None,
        typer.Option(help="Folder of the idx files. Default: the folder of Debian's package dataset-fashion-mnist."),
    ] = None,
) -> None:
    """Write Fashion-MNIST (Debian: dataset-fashion-mnist) as captioned shards with a zero-shot test."""
    from sparo_data.fashion_mnist import FASHION_FOLDER, make_fashion_mnist

    for part, count in make_fashion_mnist(folder, raw or FASHION_FOLDER).items():
        console.print(f"{folder}/{part}: {count} samples")


app.command()(convert_verb.convert)


@app.command()
def index(
    shards: Annotated[list[str], typer.Argument(help="Folders, globs, brace ranges or URLs.")],
    part: ShareOption = None,
    merge: Annotated[
        Path | None,
        typer.Option(
            help="Write the indexes of all shards to this one .safetensors file instead of one file per shard. Set "
            "data.sources.NAME.index to this file. Shards that already have an index are not scanned again."
        ),
    ] = None,
) -> None:
    """Index shards (NAME.tar.idx.npy), so that training starts at once."""
    from sparo_train.data.servers.remote import find_shards
    from sparo_train.data.sources.base import open_source
    from sparo_train.data.sources.shards import ShardsConfig, merge_indexes

    number, of = parse_part(part) or (0, 1)
    # Alternately, because shards of equal size take equal time.
    own = find_shards(tuple(shards))[number::of]
    if not own:
        return
    if merge is not None and part is not None:
        raise ConfigError("--merge: needs all shards. First index them with --part, then run --merge without --part.")
    source = open_source(" ".join(shards), ShardsConfig(shards=tuple(own)), write_index=merge is None, block="")
    if merge is not None:
        merge_indexes(merge, source.storages)
    console.print(
        f"{len(source.storages)} shards, {source.samples} samples, {len(source.incomplete_storages())} truncated or unreadable",
    )


@app.command()
def check(
    data: Annotated[
        list[str],
        typer.Argument(
            help="Shards (folders, globs, brace ranges or URLs), a folder of images, or a data set in another "
            "format: Parquet files, .csv, .tsv, or a folder in the format of Hugging Face Datasets, MDS, "
            "LitData or Energon."
        ),
    ],
    caption_key: Annotated[
        str | None,
        typer.Option(
            help="File extension of the caption files, or name of the caption column; '' for images without captions. Default: txt, or the usual columns."
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of Hugging Face datasets or Energon. Default: train.")
    ] = None,
    url_cache: UrlCache = None,
    processes: Processes = 2,
    pixel_range: Annotated[
        str | None,
        typer.Option(
            help="Range of pixel values, written as data.pixel_range in a recipe: by_type, percentiles, [LOW, HIGH], "
            "or one such pair per band. Default: percentiles with --bands, otherwise by_type."
        ),
    ] = None,
    bands: Annotated[
        str | None,
        typer.Option(
            help="Numbers of the bands to read, for example 1,2,3,8 (data.bands of a recipe). Default: red, green and blue."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    hash_: Annotated[
        bool, typer.Option("--hash", help="Also write SHARD.sha256, so that a run recognises changed data.")
    ] = False,
) -> None:
    """Read and decode all samples; report formats, sizes, colours, duplicates and broken samples. Exit with code 1 if anything is broken."""
    from sparo_train.core.registries import SOURCES
    from sparo_train.data.sources.detect import source_config
    from sparo_train.data.sources.folder import left_out_text
    from sparo_train.data.sources.shards import record_hash

    from ..views.progress import check_facts, check_lines, check_with_bar

    config = source_config(data, caption_key=caption_key, split=split, url_cache=url_cache)
    if hash_ and config.kind != "shards":
        raise ConfigError(f"--hash: applies to shards only, got {config.kind}. Remove it.")
    if json_file and not json_file.parent.is_dir():
        raise ConfigError(f"--json {json_file}: the folder does not exist")
    storages = SOURCES.get(config.kind).open(config, "", False)
    if not storages:
        raise DataError(f"{data[0]}: has no samples")
    report = check_with_bar(storages, config, processes, *_pixels(pixel_range, bands))
    if hash_:
        for shard in report.shards:
            record_hash(shard.url)
    lines = check_lines(report)
    if left_out := getattr(storages[0], "left_out", None):
        lines.append(f"skipped files: {left_out_text(left_out)}")
    for line in lines:
        out.print(line, soft_wrap=True)  # a truncated or wrapped name cannot be copied
    if json_file:
        json_file.write_text(json.dumps(check_facts(report), indent=1), encoding="utf-8", errors="surrogateescape")
    if report.reasons():
        raise typer.Exit(1)


def _pixels(pixel_range: str | None, bands: str | None) -> tuple[PixelRange, tuple[int, ...] | None]:
    """Return the values of --pixel-range and --bands, written as in a recipe. Raises `ConfigError`."""
    from pydantic import TypeAdapter, ValidationError

    from sparo_train.core.recipe.recipe_yaml import parse_yaml
    from sparo_train.data.decode.bands import Bands, PixelRange, check_bands, tifffile_module

    def value(option: str, kind: Any, text: str, expected: str) -> Any:
        try:
            return TypeAdapter(kind).validate_json(json.dumps(parse_yaml(text, option), default=str))
        except ValidationError:
            raise ConfigError(f"{option}: expected {expected}, got {text}. Correct it.") from None

    ranges = "by_type, percentiles, [LOW, HIGH] with LOW < HIGH, or one such pair per band"
    usual = "by_type" if bands is None else "percentiles"
    how = value("--pixel-range", PixelRange, pixel_range or usual, ranges)
    listed = "band numbers, counted from 1, such as 1,2,3,8"
    numbers = None if bands is None else value("--bands", Bands, f"[{bands.strip('[]')}]", listed)
    try:
        check_bands(numbers, how)
    except ValueError as error:
        raise ConfigError(f"--pixel-range: {str(error).partition(': ')[2]}") from None
    if numbers is not None:
        tifffile_module()
    return how, numbers


@app.command(context_settings=ALLOW_UNKNOWN_OPTIONS)
def bench(
    recipe: Recipe,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples to measure.")] = 512,
) -> None:
    """Measure samples per second of one worker, of its stages, and of the whole pipeline."""
    from sparo_data.bench import bench as run_bench
    from sparo_train.train.build import build_pipeline

    timing = run_bench(build_pipeline(load_run_config(recipe, overrides)), samples)
    out.print(f"one worker: {timing.worker_rate:.0f} samples/s, measured on {timing.samples} samples")
    for stage, share in timing.shares().items():
        out.print(
            f"  {stage:<9} {share:6.1%}  {1000 * timing.seconds[stage] / timing.samples:7.3f} ms per sample",
        )
    out.print(f"pipeline with {timing.workers} worker(s): {timing.pipeline_rate:.0f} samples/s")
