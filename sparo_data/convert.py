"""One's own pictures to shards: folders and tables of images with captions, and a test set that shares no image with training."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evals.sets.set_texts import lines
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.untrusted import escape_control_chars
from sparo_train.data.read.decoding import PUBLISHED, decode, has_16bit_channels, notes, open_picture, suffixes
from sparo_train.data.read.folder import class_of, class_order, left_out_text, list_pictures, refuse_splits

from .caption_tables import table_rows
from .captioned_sets import CaptionedImage, ConversionResult, Share, is_in_part, write_dataset

_OF_PNG = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # modes that PNG holds without loss, of those that Pillow writes
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def convert_folder(
    source: Path,
    out: Path,
    template: str = "a photo of a {c}",
    per_shard: int = 1000,
    part: Share | None = None,
    test: int = 0,
) -> ConversionResult:
    """Convert an image folder: `CLASS/…/name.jpg` captioned by `template`, or `name.jpg` beside `name.txt`.

    Classes are those of `sparo_train.data.read.folder`; a `classnames.txt` in `source` names them, one per line in their order.

    Args:
        part: write only the i-th of n parts; all of them together write the same bytes as one conversion.
        test: images to keep from training; `out` then has `train/` and a set to score: `zeroshot/` where every caption is of a
            class folder, `retrieval/` otherwise.

    Raises:
        DataError: no images, an image without class folder and caption file (it is named), fewer images than the test wants, or
            shards in `out` already.
    """
    if "{c}" not in template:
        raise ConfigError(f"--template {template!r}: has no {{c}}, which stands for the class")
    _refuse_shards(source, "*.tar", "*/*.tar", "*.tar.gz", "*.tgz")
    # In the order of names, so that parts made on several machines fit together.
    images, left_out = list_pictures(source)
    if not images:
        _refuse_shards(source, "**/*.tar")
        others = f", got {left_out_text(left_out)}" if left_out else ""
        raise DataError(f"{source}: no picture that can be read below this folder{others}.")
    class_names = _class_names(source, images)

    def samples() -> Iterator[tuple[int, CaptionedImage]]:
        for number, name in enumerate(images):
            if is_in_part(number, per_shard, part):
                yield number, _load_folder_sample(source, name, template, class_names)

    settings: dict[str, object] = {"source": str(source), "template": template}
    result = write_dataset(samples, out, per_shard, part, test, settings, template, class_names)
    return result._replace(
        left_out=left_out, numbered=bool(class_names) and all(name.isdecimal() for name in class_names.values())
    )


def _refuse_shards(source: Path, *patterns: str) -> None:
    """Raise `DataError` for a folder of shards, which need no conversion."""
    tars = [path for pattern in patterns for path in sorted(source.glob(pattern))]
    if tars:
        folder = shlex.quote(str(tars[0].parent))
        raise DataError(
            f"{source}: holds shards already, got {len(tars)} such as {tars[0].name}. Look at them with `sparo data check {folder}`, and "
            f"train with data.sources='{{mine: {{shards: {folder}}}}}'."
        )


def _class_names(source: Path, images: Sequence[str]) -> dict[str, str]:
    """Return the name of each class folder, in the order of their labels: from classnames.txt, else the folder's own."""
    classes = class_order(label for name in images if (label := class_of(name)) is not None)
    refuse_splits(source, classes)
    listed = source / "classnames.txt"
    if not listed.is_file() or not classes:
        return {name: name.replace("_", " ") for name in classes}
    names = lines(listed)
    if len(names) != len(classes):
        raise DataError(
            f"{listed}: must name every class folder in order, got {len(names)} names for {len(classes)} folders."
        )
    return dict(zip(classes, names, strict=True))


def _load_folder_sample(source: Path, name: str, template: str, class_names: Mapping[str, str]) -> CaptionedImage:
    path = source / name
    caption_file, suffix = path.with_suffix(".txt"), suffixes()[path.suffix.lower()]
    sample = _apply_exif_orientation(path.read_bytes(), suffix)
    if caption_file.is_file():
        text = caption_file.read_bytes()
        if not text.strip():
            raise DataError(f"{caption_file}: is empty, so {path.name} has no caption; write one, or take both away")
        if text[:2] in _UTF16:
            raise DataError(f"{caption_file}: is UTF-16, captions are UTF-8. Convert it with: iconv -f utf-16 -t utf-8")
        return sample._replace(caption=text.removeprefix(b"\xef\xbb\xbf"))
    folder = class_of(name)
    if folder is None:
        raise DataError(f"{path}: no class folder and no {caption_file.name} beside it, so it has no caption")
    label = class_names[folder]
    if label.encode(errors="replace").decode() != label:  # a name that is not UTF-8
        raise DataError(
            f"{escape_control_chars(str(source / folder))}: its name is not UTF-8 and would be the caption; rename the folder"
        )
    return sample._replace(caption=template.replace("{c}", label), label=folder)


def _apply_exif_orientation(image: bytes, suffix: str) -> CaptionedImage:
    """Return a picture without a caption yet; one that is stored turned, as its EXIF says, is turned and encoded again.

    Readers then show it upright even if they ignore EXIF.
    """
    try:
        picture = open_picture(image)
        # Written by Pillow, 16-bit colours would lose their lower half; every reader of ours turns such a picture itself.
        if "turned by EXIF" not in notes(picture) or has_16bit_channels(picture):
            return CaptionedImage(suffix, image)
        upright = decode(image, PUBLISHED._replace(upright=True))
    except BadSampleError as bad:
        return CaptionedImage(suffix, image, refused=str(bad))
    buffer = io.BytesIO()
    if suffix == "jpg" and upright.mode in ("RGB", "L", "CMYK"):
        upright.save(buffer, format="JPEG", quality=95, subsampling=0)
    elif suffix == "webp":
        upright.save(buffer, format="WEBP", lossless=True)
    else:
        suffix = "png"  # the name of every other member; readers look at its content
        upright.save(buffer, format="PNG" if upright.mode in _OF_PNG else "TIFF")
    return CaptionedImage(suffix, buffer.getvalue(), turned=True)


def convert_csv(
    table: Path,
    out: Path,
    image_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    per_shard: int = 1000,
    part: Share | None = None,
    test: int = 0,
    skip_missing: bool = False,
) -> ConversionResult:
    """A table with image paths (relative to it) and captions.

    Args:
        image_column, caption_column, separator: as of `table_rows`.
        part, test: as for `convert_folder`; the test set is one of retrieval, an image's captions together.
        skip_missing: leave out rows whose picture is not there, and count them.

    Raises:
        DataError: no such file, not UTF-8, a missing column, a row without image or caption (the line is named), fewer images
            than the test wants, or shards in `out` already.
    """
    if not table.is_file():
        raise DataError(f"{table}: no such file")

    def samples() -> Iterator[tuple[int, CaptionedImage]]:
        for number, (line, *row) in enumerate(table_rows(table, image_column, caption_column, separator)):
            if is_in_part(number, per_shard, part):
                if (sample := _load_table_sample(table, line, *row, skip_missing=skip_missing)) is not None:
                    yield number, sample
                else:
                    missing.add(line)  # the table is read twice where a test set is kept

    missing: set[int] = set()
    settings: dict[str, object] = {"source": str(table), "columns": f"{image_column}, {caption_column}"}
    if skip_missing:
        settings["skip_missing"] = True
    try:
        return write_dataset(samples, out, per_shard, part, test, settings)._replace(missing=len(missing))
    except UnicodeDecodeError as error:
        raise DataError(f"{table}: not UTF-8 ({error}); convert it, e.g. with iconv -f latin1 -t utf-8") from None


def _load_table_sample(table: Path, line: int, image: str, caption: str, skip_missing: bool) -> CaptionedImage | None:
    if not image.strip() or not caption.strip():
        raise DataError(f"{table}, line {line}: no image or no caption")
    path = table.parent / image
    suffix = suffixes().get(path.suffix.lower())
    if not path.is_file():
        if skip_missing:
            return None
        here = (
            " It is there below the folder you are in; paths are relative to the table."
            if Path(image).is_file()
            else ""
        )
        raise DataError(
            f"{table}, line {line}: no such picture, got {image!r}.{here} Correct the row, or leave such rows out with --skip-missing."
        )
    if suffix is None:
        raise DataError(
            f"{table}, line {line}: no picture that can be read, got {image!r}. Convert it, or remove the row."
        )
    # The file's own bytes where it is upright: decoded and written again, a JPEG would lose a little.
    return _apply_exif_orientation(path.read_bytes(), suffix)._replace(caption=caption)
