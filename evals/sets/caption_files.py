"""Retrieval sets in their published files: long captions (Urban-1k, DCI, DOCCI, ShareGPT4V-1k) and other languages (Crossmodal-3600, XTD10)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sparo_train.core.errors import ConfigError, DataError, did_you_mean
from sparo_train.core.files import parse_json, read_text

from .base import Layout, sha256
from .image_files import FileSet
from .task_config import SetTaskConfig

_SHARE_GPT = "share-captioner_coco_lcs_sam_1246k_1107.json"
_SHARE_GPT_COUNT = 1000  # the first ones, as in Long-CLIP's script
# Folders of XTD10's captions by language; French and German are those of MIC, Japanese those of STAIR.
_XTD = {
    **dict.fromkeys(("en", "de", "fr"), "MIC"),
    "jp": "STAIR",
    **dict.fromkeys(("es", "it", "ko", "pl", "ru", "tr", "zh"), "XTD10"),
}


class CaptionedFiles(FileSet):
    """Image files with captions; a file with the same content as in another set is encoded once."""

    shares_images = True

    def __init__(self, root: Path, rows: dict[str, list[str]], text: str):
        super().__init__(root, list(rows), list(rows.values()), "captions", sha256(text).encode())


def urban(root: Path, _part: str) -> CaptionedFiles:
    """Read Urban-1k: `image/NAME.jpg` with the first line of `caption/NAME.txt`, as in Long-CLIP's script."""
    folder = next((p for p in (root, root / "Urban1k") if (p / "caption").is_dir()), root)
    rows = {}
    for path in sorted((folder / "caption").glob("*.txt")):
        first = read_text(path, DataError).split("\n", 1)[0].strip()
        if not first:
            raise DataError(f"{path}: has no caption in its first line. Fetch it again.")
        rows[f"image/{path.stem}.jpg"] = [first]
    if not rows:
        raise DataError(f"{folder}: has no caption/*.txt. Fetch Urban1k.zip.")
    return CaptionedFiles(folder, rows, "urban")


def dci(root: Path, _part: str) -> CaptionedFiles:
    """Read Densely Captioned Images: all annotations with `short_caption` and `extra_caption`, joined as in LoTLIP's script."""
    folder = next((p for p in (root, root / "densely_captioned_images") if (p / "annotations").is_dir()), root)
    rows = {}
    for path in sorted((folder / "annotations").glob("*.json")):
        content = parse_json(read_text(path, DataError), str(path), dict, DataError)
        try:
            image, text = str(content["image"]), f"{content['short_caption']}\n{content['extra_caption']}"
        except KeyError as missing:
            raise DataError(f"{path}: lacks {missing}. Fetch it again.") from None
        for mark in ("\n", "</s>"):
            text = text.replace(mark, ".")
        rows[f"photos/{image}"] = [". ".join(part.strip() for part in text.split(".") if part.strip())]
    if not rows:
        raise DataError(f"{folder}: has no annotations/*.json. Fetch dci.tar.gz.")
    return CaptionedFiles(folder, rows, "dci")


def docci(root: Path, part: str) -> CaptionedFiles:
    """Read DOCCI: `docci_descriptions.jsonlines`, the split `part`, and `images/`."""
    path = root / "docci_descriptions.jsonlines"
    rows = {}
    # Not `splitlines`, which also splits at line separators within a description.
    for number, line in enumerate(read_text(path, DataError).split("\n"), 1):
        content = parse_json(line, f"{path}, line {number}", dict, DataError) if line.strip() else {}
        if content.get("split") != part:
            continue
        try:
            rows[f"images/{content['image_file']}"] = [str(content["description"])]
        except KeyError as missing:
            raise DataError(f"{path}, line {number}: lacks {missing}. Fetch it again.") from None
    if not rows:
        raise DataError(
            f"{path}: has no line of split {part}. Choose one of the splits `train`, `test`, `qual_dev` and `qual_test`."
        )
    return CaptionedFiles(root, rows, f"docci {part}")


def share_gpt(root: Path, _part: str) -> CaptionedFiles:
    """Read the first 1,000 entries of ShareGPT4V's captions of SA-1B, as in Long-CLIP's script."""
    path = root / _SHARE_GPT
    rows = {}
    for number, item in enumerate(
        parse_json(read_text(path, DataError), str(path), list, DataError)[:_SHARE_GPT_COUNT]
    ):
        try:
            rows[str(item["image"])] = [str(item["conversations"][1]["value"]).replace("\n", " ")]
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{path}: entry {number}: does not have the form of ShareGPT4V ({error!r}). Fetch the file again."
            ) from None
    return CaptionedFiles(root, rows, _SHARE_GPT)


def crossmodal(root: Path, language: str) -> CaptionedFiles:
    """Read Crossmodal-3600: `captions.jsonl` and `images/KEY.jpg`; the first caption in a language, as in clip-benchmark."""
    path = root / "captions.jsonl"
    rows = {}
    for number, line in enumerate(read_text(path, DataError).split("\n"), 1):
        if not line.strip():
            continue
        content = parse_json(line, f"{path}, line {number}", dict, DataError)
        try:
            rows[f"images/{content['image/key']}.jpg"] = [str(content[language]["caption"][0])]
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{path}, line {number}: has no caption in {language} ({error!r}). Correct the language."
            ) from None
    return CaptionedFiles(root, rows, f"{path.name} {language}")


def xtd(root: Path, language: str) -> CaptionedFiles:
    """Read XTD10: `XTD10/test_image_names.txt`, a file of captions per language, and COCO's images."""
    if language not in _XTD:
        raise ConfigError(f"split: XTD10 has no language {language}; {did_you_mean(language, _XTD)}")
    names = read_text(root / "XTD10/test_image_names.txt", DataError).split()
    path = root / _XTD[language] / f"test_1kcaptions_{language}.txt"
    # Not `splitlines`, which also splits at line separators within a caption.
    captions = [line.strip() for line in read_text(path, DataError).rstrip("\n").split("\n")]
    if len(names) != len(captions):
        raise DataError(f"{path}: has {len(captions)} lines, but there are {len(names)} images. Fetch it again.")
    rows = {f"{_coco_folder(root, name)}/{name}": [text] for name, text in zip(names, captions, strict=True)}
    return CaptionedFiles(root, rows, json.dumps([language, captions]))


def _coco_folder(root: Path, name: str) -> str:
    own = "train2014" if "train2014" in name else "val2014"
    return own if (root / own / name).is_file() else "images" if (root / "images" / name).is_file() else own


_READERS: dict[str, Callable[[Path, str], CaptionedFiles]] = {
    "urban1k": urban,
    "dci": dci,
    "docci": docci,
    "sharegpt4v_1k": share_gpt,
    "crossmodal3600": crossmodal,
    "xtd10": xtd,
}


def _open(config: SetTaskConfig, split: str) -> CaptionedFiles:
    name = (config.benchmark_name or "").partition("/")[0]
    if name not in _READERS:
        raise ConfigError(f"layout=captions: benchmark_name={name}: {did_you_mean(name, _READERS)}")
    return _READERS[name](Path(config.root), split)


CAPTIONS = Layout(("captions",), lambda config, _kind, split: _open(config, split))
