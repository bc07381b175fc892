"""Conversion of a folder of your own images to shards, with a test set that shares no image with training."""

from __future__ import annotations

import io
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evals.sets.base import lines
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.files import escape_control_chars, read_bytes
from sparo_train.data.decode.decoding import PUBLISHED, decode, has_16bit_channels, notes, open_picture, suffixes
from sparo_train.data.sources.folder import (
    class_folder,
    class_order,
    is_split,
    left_out_text,
    list_pictures,
    refuse_other_order,
    refuse_splits,
)

from .captioned_sets import CaptionedImage, ConversionResult, Share, is_in_part, write_dataset

logger = logging.getLogger(__name__)


_OF_PNG = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # modes of Pillow that PNG stores without loss
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def convert_folder(
    source: Path,
    out: Path,
    template: str = "a photo of a {c}",
    per_shard: int = 1000,
    part: Share | None = None,
    test: int = 0,
) -> ConversionResult:
    """Convert an image folder: `CLASS/…/name.jpg` captioned by `template`, or `name.jpg` with `name.txt`.

    Classes are those of `sparo_train.data.sources.folder`; a `classnames.txt` in `source` names them, one per line in
    their order.

    Args:
        source, out: folders.
        template: caption of images in class folders; `{c}` is the class.
        per_shard: samples per shard.
        part: write only the i-th of n parts; all parts together write the same bytes as one conversion.
        test: number of images to keep from training; `out` then has `train/` and a set to score: `zeroshot/` if every
            caption comes from a class folder, otherwise `retrieval/`.

    Raises:
        DataError: no images, an image without class folder and caption file (it is named), fewer images than the test
            set needs, or shards in `out` already.
    """
    if "{c}" not in template:
        raise ConfigError(f"--template {template!r}: has no {{c}}, which stands for the class")
    _refuse_shards(source, "*.tar", "*/*.tar", "*.tar.gz", "*.tgz")
    # In the order of names, so that parts made on several machines fit together.
    images, left_out = list_pictures(source)
    if not images:
        _refuse_shards(source, "**/*.tar")
        others = f", got {left_out_text(left_out)}" if left_out else ""
        raise DataError(f"{source}: no readable image in this folder{others}.")
    refuse_metadata(source, images)
    class_names = _class_names(source, images)
    several_lines: list[str] = []

    def samples() -> Iterator[tuple[int, CaptionedImage]]:
        for number, name in enumerate(images):
            if is_in_part(number, per_shard, part):
                sample = _load_folder_sample(source, name, template, class_names)
                if not several_lines and isinstance(sample.caption, bytes) and b"\n" in sample.caption.strip():
                    several_lines.append(name)
                    logger.warning(
                        f"{source / name}: the caption file has several lines. They are read as one caption. For several captions per image, convert a "
                        "table with a row for each. Further files of this kind are not reported."
                    )
                yield number, sample

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
            f"{source}: contains shards already, got {len(tars)} such as {tars[0].name}. Check them with `sparo data check {folder}`, and "
            f"train with data.sources='{{mine: {{shards: {folder}}}}}'."
        )


def refuse_metadata(source: Path, images: Sequence[str]) -> None:
    """Raise `DataError` for a folder with a table of captions, as Hugging Face's imagefolder has it; class names would be the captions."""
    folders = dict.fromkeys([source, *(source / name.partition("/")[0] for name in images if "/" in name)])
    for table in (folder / f"metadata.{suffix}" for folder in folders for suffix in ("csv", "jsonl", "parquet")):
        if table.is_file() and not all(_caption_file(source / name) for name in images):
            convert = f"Convert the table: `sparo data convert {shlex.quote(str(table))} OUT`"
            as_csv = "Write its file names and captions to a .csv file with the columns file_name and caption, and convert that file"
            raise DataError(
                f"{table}: has captions or labels, which the conversion of a folder ignores. {convert if table.suffix == '.csv' else as_csv}."
            )


def _check_classes(source: Path, classes: Sequence[str]) -> None:
    """Warn of a single class, and raise `DataError` for names of splits: captions from class folders would say nothing."""
    if len(classes) == 1:
        logger.warning(
            f"{source}: the only class folder is {escape_control_chars(classes[0])}, so all images get the same caption. For other captions, write each to "
            "NAME.txt next to its image, or convert a table of images and captions."
        )
    elif is_split(classes):
        raise DataError(
            f"{source}: contains splits whose images have no captions: {', '.join(classes)}. Convert the folder of one split."
        )


def _caption_file(path: Path) -> Path | None:
    """Return the text file with the caption of an image, if there is one."""
    return next((file for suffix in (".txt", ".TXT") if (file := path.with_suffix(suffix)).is_file()), None)


def _class_names(source: Path, images: Sequence[str]) -> dict[str, str]:
    """Return the name of each class folder, in the order of their labels: from classnames.txt, otherwise the folder's own name."""
    classes = class_order(label for name in images if (label := class_folder(name)) is not None)
    refuse_splits(source, classes)
    if (
        classes
        and (len(classes) == 1 or is_split(classes))
        and not any(_caption_file(source / name) for name in images)
    ):
        _check_classes(source, classes)
    listed = source / "classnames.txt"
    if not listed.is_file() or not classes:
        return {name: name.replace("_", " ") for name in classes}
    names = lines(listed)
    if len(names) != len(classes):
        raise DataError(
            f"{listed}: must name every class folder in order, got {len(names)} names for {len(classes)} folders."
        )
    refuse_other_order(listed, names, classes)
    return dict(zip(classes, names, strict=True))


def _load_folder_sample(source: Path, name: str, template: str, class_names: Mapping[str, str]) -> CaptionedImage:
    path = source / name
    caption_file, suffix = _caption_file(path), suffixes()[path.suffix.lower()]
    sample = apply_exif_orientation(read_bytes(path, DataError), suffix)
    if caption_file is not None:
        text = caption_file.read_bytes()
        if not text.strip():
            raise DataError(
                f"{caption_file}: is empty, so {path.name} has no caption. Write a caption, or remove both files."
            )
        if text[:2] in _UTF16:
            raise DataError(f"{caption_file}: expected UTF-8, got UTF-16. Convert it with: iconv -f utf-16 -t utf-8")
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{caption_file}: expected UTF-8, got the byte {text[error.start]:#x}. Convert it, for example with: iconv -f latin1 -t utf-8"
            ) from None
        return sample._replace(caption=text.removeprefix(b"\xef\xbb\xbf"))
    folder = class_folder(name)
    if folder is None:
        raise DataError(
            f"{path}: has no caption, because there is neither a class folder nor {path.stem}.txt. Add one of them."
        )
    label = class_names[folder]
    if label.encode(errors="replace").decode() != label:  # a name that is not UTF-8
        raise DataError(
            f"{escape_control_chars(str(source / folder))}: the folder's name would be the caption, but is not valid UTF-8. Rename the folder."
        )
    return sample._replace(caption=template.replace("{c}", label), label=folder)


def apply_exif_orientation(image: bytes, suffix: str) -> CaptionedImage:
    """Return an image without a caption yet; one that is stored rotated, according to EXIF, is rotated and encoded again.

    Readers then show it upright even if they ignore EXIF.
    """
    try:
        picture = open_picture(image)
        # Pillow would write 16-bit colours with 8 bits; our readers rotate such images themselves.
        if has_16bit_channels(picture) or "rotated by EXIF" not in notes(picture):
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
        suffix = "png"  # the extension of every other member; readers look at the content
        upright.save(buffer, format="PNG" if upright.mode in _OF_PNG else "TIFF")
    return CaptionedImage(suffix, buffer.getvalue(), turned=True)
