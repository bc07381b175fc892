"""A checkpoint in the explorer: its tasks as arrays, attention, and the images on the page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from evals.encoders.encoder import Encoder, TextEncoder
from evals.sets.base import EvalSet
from evals.sets.pictures import decode_image
from evals.sets.task_config import TaskConfig
from evals.slots.attend import attend_pixels, caption_per_image, preprocess_image
from evals.slots.eval_inputs import open_images
from evals.slots.overlay import ImageCrop, image_crop, jpeg, thumbnail
from evals.slots.page_arrays import LIMIT, Arrays, limit_task
from evals.slots.slot_search import DIFFERENT, Match, rank_for_text, search_slots
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.core.registries import TASKS
from sparo_train.data.decode.decoding import display_image, to_8bit

from ..commands.slot_work import Bench

SIZE = 320  # pixels of the longer side on the page
MAX_ADDED_IMAGES = 100  # number of images that a user may add
_MAX_BYTES = 256 << 20  # bytes of all added files
_MAX_ASPECT_RATIO = 50  # largest aspect ratio; anything longer is not a picture, and slow


class Picture(NamedTuple):
    """Name and caption of an image (without a caption if the model reads no text), and whether a user added it."""

    key: str
    caption: str
    own: bool


class Pictures:
    """Images by number: `count` of a task's, evenly spaced, then added ones.

    `numbers`: their numbers in the task, in the order of its features.
    """

    def __init__(self, task: TaskConfig, encoder: Encoder, count: int):
        self._decoding = encoder.decoding
        # More than a page scores by default, unless --limit or the recipe says less.
        more = count if count > LIMIT and getattr(task, "limit", None) is None else None
        self.source: EvalSet = open_images(limit_task(task, more))
        count = min(count, len(self.source))
        self.numbers = [i * len(self.source) // count for i in range(count)]
        self._caption = caption_per_image(task, self.source, "texts" in encoder.offers)
        self.entries: list[Picture] = []
        self._adding = threading.Lock()  # requests come from several threads
        self._own: list[bytes] = []  # as files, because a few decoded ones would fill the memory

    def set_metadata(self, keys: list[str], facts: list) -> None:
        """Set keys and annotations from the feature store, so that images are only decoded when they are viewed."""
        self.entries = [Picture(keys[i], self._caption(facts[i]) or "", False) for i in self.numbers]

    def image(self, number: int) -> Image.Image:
        """Return an image; with `data.bands`, in the file's own mode. Raises `ConfigError` for an unknown number, `DataError` for an unreadable image."""
        self.check(number)
        first = len(self.numbers)
        if number < first:
            image = self.source.read(self.numbers[number])[1]
            return image if self._decoding.bands else to_8bit(image, self._decoding.pixel_range or "by_type")
        return decode_image(self._own[number - first], self.entries[number].key, self._decoding)

    def check(self, number: int) -> None:
        """Raise `ConfigError` for an unknown number."""
        if not 0 <= number < len(self.entries):
            raise ConfigError(f"image {number}: expected a number below {len(self.entries)}")

    def jpeg(self, number: int, size: int = SIZE) -> bytes:
        """Return a JPEG at the page's size."""
        image = display_image(self.image(number), self._decoding)
        return jpeg(thumbnail(ImageCrop(image, (0, 0, image.width, image.height)), size))

    def add(self, data: bytes, name: str, caption: str) -> int:
        """Add a user's image; return its number. Raises `DataError` if it is not an image."""
        # Decode before storing, so that invalid files are refused at once.
        try:
            image = display_image(decode_image(data, name, self._decoding), self._decoding)
        except BadSampleError as bad:
            raise DataError(f"{name}: {bad.full_message()}") from None
        if max(image.size) > _MAX_ASPECT_RATIO * min(image.size):
            raise ConfigError(
                f"{name}: one side may be at most {_MAX_ASPECT_RATIO} times as long as the other, got {image.width} x "
                f"{image.height} pixels. Crop the longer side first."
            )
        with self._adding:
            if len(self._own) >= MAX_ADDED_IMAGES:
                raise ConfigError(
                    f"{name}: {MAX_ADDED_IMAGES} images were added already. Restart `sparo slots explore` to add others."
                )
            # Under the lock, because two simultaneous uploads must not both take the last place.
            if sum(map(len, self._own)) + len(data) > _MAX_BYTES:
                raise ConfigError(
                    f"{name}: the added images exceed {_MAX_BYTES >> 20} MB. Restart `sparo slots explore` to add others."
                )
            self._own.append(data)
            self.entries.append(Picture(name, caption, True))
            return len(self.entries) - 1


KINDS = ("zeroshot", "pairs", "choice", "matching", "paraphrases", "retrieval", "knn")
MAX_TEXTS = 200  # captions per request
_NUM_ALIKE = 8  # images that are alike in some units


class SearchHit(NamedTuple):
    """A slot's part of a query: `score`, see `Side.search`, and the images that agree most with it in this slot."""

    slot: int
    score: float
    best: list[int]


class Side:
    """A checkpoint with its tasks and images.

    Raises:
        ConfigError: units that cannot be switched one by one, or neither a fitting task nor images.
    """

    def __init__(self, bench: Bench, tasks: dict[str, TaskConfig], pictures: Pictures):
        self.bench, self.encoder, self.units = bench, bench.encoder, bench.units
        able = supported_tasks(tasks, bench)
        if not able and not self.has_attention_maps:
            raise ConfigError(
                f"{bench.checkpoint}: supports none of the tasks ({', '.join(tasks)}). Name others with --tasks."
            )
        self.arrays: dict[str, Arrays] = bench.arrays(able)
        # From the store, because the page shows hundreds of images and encodes none of them twice.
        features = bench.images(pictures.source)
        self.pictures = pictures
        self._keys, self._facts = features.keys, features.facts
        self.vectors = self.units.images(features.rows(torch.tensor(pictures.numbers)))
        self._own: dict[int, Tensor] = {}

    def set_picture_metadata(self) -> None:
        """Set the names and captions of the pictures."""
        self.pictures.set_metadata(self._keys, list(self._facts))

    @property
    def has_text_tower(self) -> bool:
        """Return whether there is a text tower."""
        return isinstance(self.encoder, TextEncoder)

    @property
    def has_attention_maps(self) -> bool:
        """Return whether its slots have attention maps."""
        return self.units.kind == "slots" and hasattr(self.encoder, "image_slots")

    @property
    def edits(self) -> list[str]:
        """Return the edits of slots that the decoder supports: delete, move, scale; empty without a decoder of images."""
        from object_centric.tasks.slot_editing import supported_edits

        return supported_edits(self.encoder) if self.units.kind == "slots" else []

    def edit(self, number: int, edit: dict[str, Any]) -> bytes:
        """Return a JPEG of an image as drawn after an edit: `slot`, `move` [dx, dy], `scale`, `delete`. Raises `ConfigError`."""
        from object_centric.pictures.edits import draw_edit
        from object_centric.tasks.slot_editing import SlotEdit, check_edit, editable

        model = editable(self.encoder)
        try:
            dx, dy = (float(part) for part in edit["move"])
            one = SlotEdit(int(edit["slot"]), (dx, dy), float(edit["scale"]), edit.get("delete") is True)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError("edit: expected the keys `slot`, `move` ([dx, dy]), `scale` and `delete`") from None
        check_edit(model, one)
        return jpeg(draw_edit(model, self.pictures.image(number), one, SIZE))

    def facts(self) -> dict[str, Any]:
        """Return the data that the page needs first."""
        return {
            "label": self.bench.checkpoint,
            "weights": self.encoder.weights,
            "units": self.units.kind,
            "count": self.units.number,
            "reads": self.has_text_tower,
            "looks": self.has_attention_maps,
            "edits": self.edits,
            "classifier_slots": self.bench.options.classifier_slots,
            "tasks": [_task_facts(name, arrays) for name, arrays in self.arrays.items()],
        }

    def attention(self, number: int) -> dict[str, Any]:
        """Return the attention of slots on one image and its caption; `maps` (L, g, g), `weights` (L, T) and `cosine` (L,) as fp32."""
        image, caption = self.pictures.image(number), self.pictures.entries[number].caption
        payload: dict[str, Any] = {"maps": None, "words": [], "box": [0, 0, 1, 1]}
        if not self.has_attention_maps:
            return payload
        with torch.inference_mode():
            (one,) = attend_pixels(
                self.encoder, [preprocess_image(self.encoder, image)], [caption] if self.has_text_tower else None
            )
        (whole, (left, top, right, bottom)) = image_crop(self.encoder, image)
        payload["box"] = [left / whole.width, top / whole.height, right / whole.width, bottom / whole.height]
        payload |= {
            "maps": one.maps.numpy(),
            "side": one.maps.shape[-1],
            "on_class": one.on_class.numpy(),
            "words": one.words,
        }
        if one.words:
            payload |= {"weights": one.weights.numpy(), "cosine": one.cosine.numpy()}
        return payload

    def captions(self, number: int, texts: Sequence[str]) -> dict[str, Any]:
        """Return for captions of one image: `shares` (C, U), each unit's part of their similarity, and `squares` (U,), the image's squared norms.

        With units S selected, the similarity is the sum of their shares divided by the root of the sum of their
        squares, as in `sparo eval`.
        """
        if not 0 < len(texts) <= MAX_TEXTS:
            raise ConfigError(f"expected 1 to {MAX_TEXTS} captions, got {len(texts)}")
        vector = self._vector(number)
        read = self.units.texts(self._texts(texts))
        return {"shares": (vector * read).sum(-1).numpy(), "squares": vector.square().sum(-1).numpy()}

    def search(self, text: str) -> list[SearchHit]:
        """Rank units by how well they separate the images that match a text from the others.

        An image matches by its similarity to the text minus that to an empty text, because all texts have a part in
        common (benchmarks/slot_search.py). The score is that of `rank_for_text`.
        """
        if not text.strip():
            raise ConfigError("the text is empty. Type what to search for.")
        query, nothing = self.units.texts(self._texts([text, ""]))
        ranking = rank_for_text(self.vectors, query - nothing)
        images = ranking.shares.argsort(dim=0, descending=True, stable=True)[:6].T.tolist()
        order = ranking.parts.argsort(descending=True, stable=True).tolist()
        return [SearchHit(slot, float(ranking.parts[slot]), images[slot]) for slot in order]

    def find_alike(self, number: int, units: Sequence[int]) -> list[Match]:
        """Return the images of the page that are most like an image in these units, and different from it in the others.

        Raises:
            ConfigError: units that do not exist.
        """
        if not units or not all(0 <= unit < self.units.number for unit in units):
            raise ConfigError(f"slots: expected numbers below {self.units.number}")
        return search_slots([self.vectors], self._vector(number), units, DIFFERENT, _NUM_ALIKE, number)

    def _vector(self, number: int) -> Tensor:
        """Return (U, d) of an image."""
        if number < len(self.vectors):
            return self.vectors[number]
        if number not in self._own:
            pixels = self.encoder.stack([preprocess_image(self.encoder, self.pictures.image(number))])
            with torch.inference_mode():
                self._own[number] = self.units.images(self.encoder.encode(pixels).flatten(1).cpu())[0]
        return self._own[number]

    def _texts(self, texts: Sequence[str]) -> Tensor:
        if not isinstance(self.encoder, TextEncoder):
            raise ConfigError(
                f"{self.encoder.label} has no text tower, so it cannot encode a text. Open a CLIP checkpoint."
            )
        return self.encoder.text(list(texts)).cpu()


def supported_tasks(tasks: dict[str, TaskConfig], bench: Bench) -> dict[str, TaskConfig]:
    """Return the tasks whose scores the page can compute, and that the encoder supports."""
    return {
        name: task
        for name, task in tasks.items()
        if task.task in KINDS and set(TASKS.get(task.task).needs) <= bench.encoder.offers
    }


def _task_facts(name: str, arrays: Arrays) -> dict[str, Any]:
    layout, offset = [], 0
    for key, array in arrays.arrays.items():
        layout.append({"name": key, "dtype": array.dtype.kind, "shape": list(array.shape), "offset": offset})
        offset += array.nbytes
    return {
        "name": name, "kind": arrays.kind, "metric": arrays.metric, "n": arrays.n, "images": arrays.images, "of": arrays.of,
        "data": arrays.data, "facts": arrays.facts, "layout": layout, "bytes": offset,
    }  # fmt: skip
