"""Question sets whose published files need more than a table's columns: VALSE, What'sUp, SVO-Probes, and WinoGAViL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparo_train.core.errors import DataError
from sparo_train.core.files import parse_json, read_text

from .base import Layout
from .question_table import present_questions
from .questions import AssociationSet, ImageRef, Item, QuestionSet
from .table_rows import table_rows
from .task_config import TableColumns

# Instruments of VALSE (Parcalabescu et al. 2022) by published file, and the folders of their images, as in its scripts.
VALSE = {
    "existence": "visual7w/images",
    "plurals": "plurals/test_images",
    "counting-hard": "visual7w/images",
    "counting-small-quant": "visual7w/images",
    "counting-adversarial": "visual7w/images",
    "relations": "relations/test_images",
    "action-replacement": "actions/images_512",
    "actant-swap": "actions/images_512",
    "coreference-standard": "coref/release_too_many_is_this_in_color/images",
    "coreference-hard": "coref/release_v18/test_images",
    "foil-it": "COCO/val2014",
}
_VOTES = 2  # of three annotators who chose the caption, for a valid item
_OPPOSITE = {"left": "right", "right": "left", "on": "under", "under": "on", "in-front": "behind", "behind": "in-front"}


def open_valse(root: Path) -> QuestionSet:
    """Open the instruments of VALSE that exist: `INSTRUMENT.json` below root or root/data, and their image folders.

    Only items that at least two annotators judged valid are read. An image folder may also be root/INSTRUMENT.

    Raises:
        DataError: none of the eleven files exists, or one has another format.
    """
    items: list[Item] = []
    missing: list[str] = []
    for name, folder in VALSE.items():
        count = len(items)
        path = _first_file(root / f"{name}.json", root / "data" / f"{name}.json")
        rows = {} if path is None else parse_json(read_text(path, DataError), str(path), dict, DataError)
        images = ""
        for key, row in rows.items():
            try:
                valid = row["mturk"]["caption"] >= _VOTES
                image, caption, foil = (str(row[word]) for word in ("image_file", "caption", "foil"))
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{path}: item {key}: does not have the form of VALSE ({error!r}). Fetch the file again."
                ) from None
            if not images:  # root/plurals exists in both layouts, because its folder of the scripts is below it
                images = name if (root / name / image).is_file() else folder
            if valid:
                items.append(Item((ImageRef(f"{images}/{image}"),), (caption, foil), name, str(key)))
        if len(items) == count:
            missing.append(name)
    if not items:
        raise DataError(f"{root}: has none of VALSE's files, such as existence.json. Copy VALSE's folder `data` here.")
    found = QuestionSet(root, items, root)
    if missing:
        found.incomplete = f"{len(missing)} of {len(VALSE)} instruments are missing: {', '.join(missing)}"
    return found


def open_whatsup(root: Path, columns: TableColumns | None) -> QuestionSet:
    """Open What'sUp A or B (Kamath et al. 2023): a JSON file with four captions per image; the first is right.

    Metrics of groups: `pair` (both images of opposite prepositions are right) and `set` (all four of the same objects).

    Raises:
        DataError: the file does not exist, or has another format.
    """
    path = root / ("controlled_images_dataset.json" if columns is None else columns.file)
    items = []
    for row in parse_json(read_text(path, DataError), str(path), list, DataError):
        try:
            image, captions = Path(str(row["image_path"])), tuple(map(str, row["caption_options"]))
            # beer-bottle_on_armchair.jpeg, mug_left_of_plate.jpeg
            first, relation, *_, last = image.stem.split("_")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: {row!r:.80}: is not an item of What'sUp ({error!r}). Fetch it again.") from None
        objects = f"{first} {last}"
        pair = f"{objects} {min(relation, _OPPOSITE.get(relation, relation))}"
        groups = (("pair", pair), ("set", objects))
        # The published path begins with the authors' folder.
        ref = ImageRef(f"{image.parent.name}/{image.name}")
        items.append(Item((ref,), captions, relation, image.stem, 0, groups))
    return QuestionSet(root, items, path)


def open_svo(root: Path) -> QuestionSet:
    """Open SVO-Probes (Hendricks and Nematzadeh 2021): `svo_probes.csv`, and images/ID.jpg, which are fetched from its links.

    The sentence is right for the first image; the second differs in its subject, verb or object. Rows with several
    differences are not read, as in the authors' notebook. Rows whose images do not exist are skipped.

    Raises:
        DataError: the table lacks a column, or no row has both images.
    """
    path = root / "svo_probes.csv"
    return present_questions(root, list(_svo_items(path)), path)


def _svo_items(path: Path) -> Iterator[Item]:
    for number, row in enumerate(table_rows(read_text(path, DataError), path)):
        try:
            kinds = [kind for kind in ("subj", "verb", "obj") if _is_true(row, f"{kind}_neg")]
            images = tuple(
                ImageRef(f"images/{_to_integer(row[name])}.jpg") for name in ("pos_image_id", "neg_image_id")
            )
            sentence = str(row["sentence"])
        except KeyError as missing:
            raise DataError(f"{path}: row {number + 1}: no column {missing}. Fetch it again.") from None
        if len(kinds) == 1:
            yield Item(images, (sentence,), kinds[0], str(number))


def _is_true(row: Mapping[str, Any], name: str) -> bool:
    return str(row[name]).strip().lower() in ("true", "1", "1.0")


def _to_integer(text: Any) -> str:
    # pandas writes numbers of columns with gaps as 12.0.
    return str(text).strip().removesuffix(".0")


def open_winogavil(root: Path) -> AssociationSet:
    """Open WinoGAViL (Bitton et al. 2022): `winogavil_dataset.csv`, and the candidates' images in winogavil_images/ or images/.

    The kind of a question is 5-6 or 10-12, the number of candidates as in the authors' tables.

    Raises:
        DataError: the table lacks a column, or no image exists.
    """
    path, folder = root / "winogavil_dataset.csv", "images" if (root / "images").is_dir() else "winogavil_images"
    items = []
    for number, row in enumerate(table_rows(read_text(path, DataError), path)):
        try:
            candidates, right = (json.loads(row[name]) for name in ("candidates", "associations"))
            cue, key = str(row["cue"]).lower(), str(row["ID"])
            images = sorted(dict.fromkeys(map(str, candidates)), key=lambda name: name not in right)
            count = sum(name in right for name in images)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path}: row {number + 1}: does not have the form of WinoGAViL ({error!r}). Fetch the file again."
            ) from None
        # As in DataComp's script.
        prompt = f"{'An' if cue[:1] in tuple('aeiou') else 'A'} {cue}"
        refs = tuple(ImageRef(f"{folder}/{name}.jpg") for name in images)
        kind = "5-6" if len(images) < 7 else "10-12" if len(images) >= 10 else str(len(images))
        items.append(Item(refs, (prompt,), kind, key, count))
    return AssociationSet(root, items, path)


def _first_file(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


VALSE_LAYOUT = Layout(("questions",), lambda config, _kind, _split: open_valse(Path(config.root)))
WHATSUP_LAYOUT = Layout(("questions",), lambda config, _kind, _split: open_whatsup(Path(config.root), config.columns))
WINOGAVIL_LAYOUT = Layout(("associations",), lambda config, _kind, _split: open_winogavil(Path(config.root)))
SVO_LAYOUT = Layout(("questions",), lambda config, _kind, _split: open_svo(Path(config.root)))
