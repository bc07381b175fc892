"""Writer of shards: reproducible bytes, complete or absent."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from webdataset.writer import TarWriter

from sparo_train.core.config import Frozen, differences
from sparo_train.core.errors import DataError
from sparo_train.core.files import read_json
from sparo_train.core.recipe.renamed import with_new_names

Fields = Mapping[str, bytes]  # extension -> content
MANIFEST_NAMES = (
    "scenes.json",
    "scene_questions.json",
    "tetrominoes.json",
    "objects.json",
    "videos.json",
    "scenes3d.json",
    "tissue.json",
    "converted.json",
)  # manifest that generators write to a set's folder


def write_manifest(root: Path, config: Frozen, name: str) -> None:
    """Record in ROOT/NAME how the set is made. Raises `DataError` if it contains another set."""
    root.mkdir(parents=True, exist_ok=True)
    path, current = root / name, config.model_dump(mode="json")
    other = next((n for n in MANIFEST_NAMES if n != name and (root / n).exists()), None)
    if other or (not path.exists() and any((root / "train").glob("*.tar"))):
        raise DataError(
            f"{root}: contains another set ({other or 'train/*.tar'}), which would mix with the new one. Name an empty folder."
        )
    if path.exists():
        changed = differences(_upgrade_config(read_json(path, dict, DataError), type(config)), current)
        if changed:
            raise DataError(
                f"{root}: contains a set with other options ({'; '.join(changed)}). Remove it or choose another folder."
            )
    path.write_text(json.dumps(current), encoding="utf-8")


def _upgrade_config(stored: dict[str, Any], kind: type[Frozen]) -> dict[str, Any]:
    """Fill in defaults of keys that an older version did not write; other files are unchanged."""
    try:
        return kind.model_validate(with_new_names(kind, stored)).model_dump(mode="json")
    except ValueError:
        return stored


def encode_image(pixels: np.ndarray, format: str = "PNG", **options: int) -> bytes:
    """Encode an image: (H, W, 3) colours or (H, W) labels, uint8."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=format, **options)
    return buffer.getvalue()


def write_shard(path: Path, samples: Iterable[tuple[str, Fields]]) -> int:
    """Write samples (key, fields) to one tar and rename it into place; equal samples give equal bytes. Returns the count.

    Raises:
        DataError: a key that webdataset could not split again, or a disk that cannot be written.
    """
    # Hidden until it is complete, because a shard that a glob finds can be read.
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without times and user names, so that equal samples give equal bytes.
        with TarWriter(str(temporary), encoder=False, mtime=0, user="sparo", group="sparo") as tar:
            for key, fields in samples:
                name = key.rpartition("/")[2]
                if "." in name or not name or not key.isprintable():  # a NUL would end the name in the tar
                    raise DataError(
                        f"{path}: key {key!r} is empty or contains a dot or an unprintable character. A dot ends the key in webdataset's layout."
                    )
                tar.write({"__key__": key, **fields})
                count += 1
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error})") from None
    finally:
        if temporary.exists():
            temporary.unlink()
    return count


def write_shards(
    folder: Path, samples: Iterable[tuple[str, Fields]], per_shard: int = 1000, part: tuple[int, int] = (0, 1)
) -> list[Path]:
    """Write samples to `folder/00000.tar`, `00001.tar`, …; as `part` (i, n): to every n-th of them, from the i-th.

    If samples or the disk fail, the shards written here are removed, because half a set could be mistaken for a whole
    one.
    """
    iterator = iter(samples)
    paths: list[Path] = []
    try:
        while chunk := [s for _, s in zip(range(per_shard), iterator, strict=False)]:
            paths.append(folder / f"{part[0] + part[1] * len(paths):05d}.tar")
            write_shard(paths[-1], chunk)
    except BaseException:
        # By name, because other parts write to the same folder.
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    return paths


def write_wds_layout(
    root: Path,
    samples: Iterable[tuple[str, Fields]],
    *,
    classnames: list[str] | None = None,
    templates: list[str] | None = None,
    dataset_type: str | None = None,
    split: str = "test",
) -> None:
    """Write an evaluation set in clip-benchmark's `wds/` layout (one shard, class names, templates, type, and, last, `nshards.txt`)."""
    write_shard(root / split / "0.tar", samples)
    for name, lines in (("classnames.txt", classnames), ("zeroshot_classification_templates.txt", templates)):
        if lines is not None:
            (root / name).write_text("\n".join(" ".join(line.splitlines()) for line in lines) + "\n", encoding="utf-8")
    if dataset_type is not None:
        (root / "dataset_type.txt").write_text(dataset_type + "\n", encoding="utf-8")
    (root / split / "nshards.txt").write_text("1\n", encoding="utf-8")  # marks a complete set
