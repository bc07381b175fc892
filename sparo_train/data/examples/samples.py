"""Members of one sample as pixels and a caption. A bad sample raises a short reason, which the loader counts."""

from __future__ import annotations

import ast
import json
import re
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
from PIL import Image

from ...core.errors import BadSampleError
from ..decode.bands import PixelRange
from ..decode.decoding import TRAINING, decode, decode_pixels, suffixes
from ..sources.base import DataConfig, Source, SourceConfig
from .image_transforms import Picture

MAX_WORD_CHARS, MAX_CAPTION_CHARS = (
    400,
    100_000,
)  # limits for a word, within which byte pairs are merged, and for a caption
_STRING_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_WRITTEN_LIST = re.compile(r"""\[\s*['"].*['"]\s*\]$""", re.DOTALL)
_PLANES = (
    *"0123456789",
    "mask.",
    "semantic.",
    "depth.",
    "flow.",
)  # extensions with a dot: frames, and planes of an image


def image_bytes(fields: Mapping[str, bytes], keys: Sequence[str]) -> bytes:
    """Return the image member: the first of `keys`, otherwise one of another image format. Raises `BadSampleError('missing image')`."""
    for key in keys:
        if key in fields:
            return fields[key]
    if (rarer := next((name for name in fields if f".{name}" in suffixes()), None)) is not None:
        return fields[rarer]
    if "000.png" in fields:
        raise BadSampleError("missing image: this sample is a video. To use its first frame, set image_keys=[000.png]")
    raise _missing_error("missing image", fields, keys)


def _missing_error(reason: str, fields: Mapping[str, bytes], keys: Sequence[str]) -> BadSampleError:
    """Return the error for a member that is missing, or has another extension because the file's name contains an additional dot."""
    numbered = any(re.fullmatch(r"\d+\.txt", name) for name in fields)  # captions of frames do not exist
    names = [name for name in fields if "." in name and (numbered or not name.startswith(_PLANES))]
    dotted = next((name for name in names if name.rpartition(".")[2] in keys), None)
    if dotted is None:
        got = ", ".join(list(fields)[:6]) or "none"
        return BadSampleError(reason, detail=f"expected the member {' or '.join(keys[:3])}, got {got}")
    return BadSampleError(f"{reason}: dots in names", detail=f"a key ends at the first dot, got the member {dotted!r}")


def decode_image(data: bytes, pixel_range: PixelRange = "by_type") -> Image.Image:
    """Decode to an upright RGB image, transparency on white. Arguments and errors are those of `decoding.decode`."""
    return decode(data, TRAINING._replace(pixel_range=pixel_range))


def decode_for_training(data: bytes, config: DataConfig, size: int | None) -> Picture:
    """Decode to an upright RGB picture, or to `data.bands`: an image for Pillow's filters, or an array for torch's (`data.decode`).

    Args:
        data: the file.
        config: the recipe's `data` block.
        size: pixels per side of the model's input. With `data.scaled_decoding`, at least twice as many are decoded.
            None: all of them.

    Raises:
        BadSampleError: as `decoding.decode` does.
    """
    shrink_to = 2 * size if config.scaled_decoding and size is not None else None
    how = TRAINING._replace(pixel_range=config.pixel_range, bands=config.bands)
    return decode(data, how, shrink_to) if config.decode == "exact" else decode_pixels(data, how, shrink_to)


def caption(fields: Mapping[str, bytes], config: SourceConfig, rng: np.random.Generator | None = None) -> str:
    """Return a sample's caption for this visit: the field `caption_key`, or a field that is drawn from `captions`; of a list, a random entry.

    Args:
        fields: members of the sample.
        config: the recipe's `data` block.
        rng: random stream of the visit, which is not advanced, so that crops do not depend on the number of captions.
            None: return the first caption.

    Raises:
        BadSampleError: there is none, or it is not UTF-8 or only white space.
    """
    if config.captions is None:
        texts = _texts(fields, config, config.caption_key)
        if rng is None or len(texts) == 1:
            return texts[0]
        caption_rng = rng.spawn(1)[0]
    else:
        texts_by_key = {key: texts for key in config.captions if (texts := _texts_or_empty(fields, config, key))}
        if not texts_by_key:
            raise BadSampleError("missing caption")
        shares = np.array([config.captions[key] for key in texts_by_key])
        if not shares.sum():
            raise BadSampleError("missing caption")
        caption_rng = None if rng is None else rng.spawn(1)[0]
        key = (
            next(iter(texts_by_key))
            if caption_rng is None
            else list(texts_by_key)[caption_rng.choice(len(texts_by_key), p=shares / shares.sum())]
        )
        texts = texts_by_key[key]
    return texts[0] if caption_rng is None or len(texts) == 1 else texts[caption_rng.integers(len(texts))]


def list_captions(fields: Mapping[str, bytes], config: SourceConfig) -> list[str]:
    """Return all captions that visits of a sample may draw. Raises `BadSampleError` if there is none."""
    if config.captions is None:
        return _texts(fields, config, config.caption_key)
    texts = [text for key, share in config.captions.items() if share for text in _texts_or_empty(fields, config, key)]
    if not texts:
        raise BadSampleError("missing caption")
    return texts


def missing_caption_keys(source: Source, num_samples: int = 64) -> list[str]:
    """Return keys of `captions` that are missing in all of `num_samples` evenly spaced samples. A mistyped key gives its share to the others."""
    missing_keys = {key for key, share in (source.config.captions or {}).items() if share}
    total, begins = source.samples, [0, *accumulate(map(len, source.storages))]
    for at in sorted({i * total // num_samples for i in range(num_samples)}):
        if not missing_keys:
            break
        shard = bisect_right(begins, at) - 1
        with suppress(BadSampleError):
            _, fields = source.storages[shard].read(at - begins[shard])
            missing_keys = {key for key in missing_keys if not _texts_or_empty(fields, source.config, key)}
    return sorted(missing_keys)


def _texts(fields: Mapping[str, bytes], config: SourceConfig, key: str) -> list[str]:
    """Return the captions at a key: one, or the non-empty entries of a JSON list. Raises `BadSampleError` if there is none."""
    member, field = config.caption_member(key)
    if member not in fields:
        raise _missing_error("missing caption", fields, [member])
    try:
        text = fields[member].decode("utf-8")
        if field:
            text = json.loads(text)[field]
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise BadSampleError("bad text") from None
    except (KeyError, TypeError):
        raise BadSampleError("missing caption") from None
    if not isinstance(text, str | list | None):
        raise BadSampleError(f"a caption that is not text: {type(text).__name__}")
    entries = text if isinstance(text, list) else [text]
    if isinstance(text, str) and (written := parse_list(text)) is not None:
        entries = written
    texts = [one.strip() for one in entries if isinstance(one, str) and not is_missing(one)]
    if not texts:
        raise BadSampleError("missing caption")
    return texts


def is_missing(text: str) -> bool:
    """Return whether a caption is empty or `nan`, as pandas writes a missing value that was converted to text before."""
    return text.strip() in ("", "nan", "NaN")


def parse_list(text: str) -> list[str] | None:
    """Return the entries of a list of strings that was written as text, in JSON or as Python's `str` does; None for other texts.

    Tables without a type for lists have several captions in this form. Raises `BadSampleError` for the form of numpy arrays, which
    is ambiguous.
    """
    text = text.strip()
    if not _WRITTEN_LIST.match(text):
        return None
    entries: Any = None
    with suppress(ValueError, RecursionError):
        entries = json.loads(text, strict=False)
    if entries is None:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of other texts
            entries = ast.literal_eval(text)
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return None
    # Python joins neighbouring strings without a comma between them, as in numpy's ['a' 'b'].
    if len(_STRING_LITERAL.findall(text)) != len(entries):
        raise BadSampleError("a list of captions without commas between them", detail=f"got {text[:80]}")
    return entries


def _texts_or_empty(fields: Mapping[str, bytes], config: SourceConfig, key: str) -> list[str]:
    try:
        return _texts(fields, config, key)
    except BadSampleError:
        return []
