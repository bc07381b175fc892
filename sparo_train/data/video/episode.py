"""Episodes in shards: one member per frame and plane, so that a clip only decodes its own frames; and the choice of a clip's frames."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image
from pydantic import field_validator

from ...core.config import Frozen, between, field
from ...core.errors import BadSampleError
from ..decode.bands import PixelRange
from ..decode.decoding import TRAINING, decode, refuse_unclear_rotation, unscale_labels


class FramesConfig(Frozen):
    """Number and spacing of the frames that a clip takes from an episode."""

    count: int = field(6, "Number of frames of a clip, T.", gt=0, le=10_000)
    stride: Annotated[tuple[int, int], between(1, 10_000, rising=True)] = field(
        (1, 1),
        "Smallest and largest distance from one frame of a clip to the next, in frames of the episode; a single number "
        "is both. The distance is drawn for each clip, and limited by the length of the episode.",
    )
    starts: Literal["any", "tiles"] = field(
        "any",
        "First frame of a clip. any: any frame. tiles: a multiple of the number of frames that a clip spans, so "
        "that clips do not overlap (SAVi's random strided window).",
    )

    @field_validator("stride", mode="before")
    @classmethod
    def _accept_one_distance(cls, value: Any) -> Any:
        return [value, value] if isinstance(value, int) else value

    def window(self, length: int, rng: np.random.Generator) -> range:
        """Return the frames of a clip from an episode of `length`.

        Raises:
            BadSampleError: the episode is too short.
        """
        low, high = self.stride
        if self.reach(low) > length:
            raise BadSampleError(f"shorter than frames.count={self.count}" + (f" at stride {low}" if low > 1 else ""))
        # The largest stride that fits, so that short episodes give slow clips instead of none.
        most = min(high, (length - 1) // (self.count - 1)) if self.count > 1 else high
        stride = int(rng.integers(low, most + 1))
        last, step = length - self.reach(stride), self.reach(stride) if self.starts == "tiles" else 1
        start = step * int(rng.integers(0, last // step + 1))
        return range(start, start + self.reach(stride), stride)

    def reach(self, stride: int) -> int:
        """Return the number of frames from a clip's first to its last, inclusive."""
        return (self.count - 1) * stride + 1


IMAGE_KEYS = ("png", "jpg", "jpeg", "webp")
PLANES = ("mask", "depth", "flow", "forward")
_FRAME = re.compile(r"(\d{3,7})\.([a-z0-9]+)")
_FIRST_FRAME = re.compile(rf"0{{3,7}}\.(?:{'|'.join(IMAGE_KEYS)})")
_CAPTION = re.compile(r"\d+\.txt")
_LONG_NUMBER = re.compile(r"^(0\d{3,6})\.")
_MAX_RANGE = 1e30  # limit of a range: fp32 with headroom for arithmetic
_MAX_NPY_BYTES = 1 << 30  # limit in bytes for an unpacked gzip array


def member(frame: int, plane: str = "") -> str:
    """Return the extension of a frame's member: of its image, or of a plane of `PLANES`."""
    return f"{frame:03d}.{plane}.png" if plane else f"{frame:03d}.png"


def is_episode(fields: Mapping[str, bytes]) -> bool:
    """Return whether these members are those of a video."""
    if any(_CAPTION.fullmatch(name) for name in fields):  # images with numbers after a dot in their names
        return False
    return any(name in ("video.npy", "video.npy.gz") or _FIRST_FRAME.fullmatch(name) for name in fields)


def _with_three_digits(fields: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the members with the names of `member`, because ffmpeg and other programs number frames with four digits or more."""
    names = {name: _LONG_NUMBER.sub(lambda match: f"{int(match[1]):03d}.", name) for name in fields}
    return fields if all(name == new for name, new in names.items()) else {names[n]: data for n, data in fields.items()}


class Episode:
    """Members of a video.

    Args:
        fields: members by extension.
        image_keys: extensions of frames; the first that a video has is used.
        pixel_range: how frames with more than 8 bits become 8 bits; None: `picture` keeps them.

    Raises:
        BadSampleError: no frames, or a missing one; from its methods: a plane that is missing, damaged, or of another
            size.
    """

    def __init__(
        self,
        fields: Mapping[str, bytes],
        image_keys: Sequence[str] = IMAGE_KEYS,
        pixel_range: PixelRange | None = "by_type",
    ):
        self.fields, self._key = _with_three_digits(fields), ""
        self._decoding = TRAINING._replace(pixel_range=pixel_range, rgb=pixel_range is not None)
        self._arrays: dict[str, np.ndarray] = {}
        # An array's header has its length; single frames must be counted.
        if (video := self._array("video")) is not None:
            if video.ndim != 4 or video.shape[-1] != 3 or video.dtype != np.uint8 or not len(video):
                raise BadSampleError("video.npy is not (T, H, W, 3) uint8")
            self._length = len(video)
            return
        frame_ids: dict[str, list[int]] = {}
        for name in self.fields:
            if (match := _FRAME.fullmatch(name)) and match[2] in image_keys:
                frame_ids.setdefault(match[2], []).append(int(match[1]))
        self._key = next((key for key in image_keys if key in frame_ids), "")
        if not self._key:
            raise BadSampleError("missing frames")
        self._length = len(frame_ids[self._key])
        # A gap would shift later frames against their planes.
        if sorted(frame_ids[self._key]) != list(range(self._length)):
            raise BadSampleError("a frame is missing")

    def __len__(self) -> int:
        return self._length

    def picture(self, t: int) -> Image.Image:
        """Return a frame, in RGB if `pixel_range` is set."""
        if not self._key:
            return Image.fromarray(self._arrays["video"][t])
        return decode(self.fields[f"{t:03d}.{self._key}"], self._decoding)

    def image(self, t: int) -> np.ndarray:
        """Return frame `t` (H, W, 3) uint8."""
        return np.asarray(self.picture(t))

    @cached_property
    def _planes(self) -> frozenset[str]:
        planes = {name for name in PLANES if any(member(t, name) in self.fields for t in range(self._length))}
        return frozenset(planes | ({"mask"} if self._array("segmentations") is not None else set()))

    def has(self, plane: str) -> bool:
        """Return whether one of its frames has a plane of `PLANES`; then all must have it."""
        return plane in self._planes

    def check_structure(self) -> None:
        """Raise `BadSampleError` if the JSON describes more frames than there are, or boxes are invalid."""
        declared_length = self.metadata.get("frames", self._length)
        if declared_length != self._length:
            raise BadSampleError("the number of frames in the json differs from that of the video")
        if self._array("boxes") is not None:
            _ = self.boxes

    def check(self, t: int) -> None:
        """Decode all planes of a frame. Raises `BadSampleError` if one is damaged, or has another size than the image."""
        size = self.image(t).shape[:2]
        planes = {
            "depth": self.depth,
            "flow": self.flow,
            "forward": partial(self.flow, forward=True),
            "mask": self.labels,
        }
        for name, read in planes.items():
            # The first or last frame may lack a flow, because it has no neighbour there.
            end = {"flow": 0, "forward": self._length - 1}.get(name)
            if t == end and member(t, name) not in self.fields:
                continue
            if self.has(name) and read(t).shape[:2] != size:
                raise BadSampleError(f"{name} of another size than its frame")

    def labels(self, t: int) -> np.ndarray:
        """Return (H, W) integers: the object's number per pixel, 0 for none."""
        self._refuse_unclear_rotation(t)
        if (table := self._array("segmentations")) is not None:
            table = table[..., 0] if table.ndim == 4 else table
            if len(table) != self._length or table.ndim != 3 or table.dtype.kind not in "iub":
                raise BadSampleError("segmentations.npy is not an array (T, H, W) of integers")
            plane = table[t]
        else:
            plane = self._plane(t, "mask")
        # Larger numbers would wrap around to other objects, or to the background.
        if plane.size and not (int(plane.min()) >= 0 and int(plane.max()) < 1 << 31):
            raise BadSampleError("labels must be from 0 to 2^31 - 1; the labels of objects must start at 1")
        return plane

    def depth(self, t: int) -> np.ndarray:
        """Return (H, W) fp32, world units."""
        return self._dequantize(t, "depth")

    def flow(self, t: int, forward: bool = False) -> np.ndarray:
        """Return (H, W, 2) fp32: rows and columns from a pixel to its position in the previous frame, or in the next if `forward`."""
        stacked = self._dequantize(t, "forward" if forward else "flow")
        if len(stacked) % 2:
            raise BadSampleError(
                "a flow image must have an even height, with vertical displacements in the upper half and horizontal ones below"
            )
        return np.stack([stacked[: len(stacked) // 2], stacked[len(stacked) // 2 :]], axis=-1)

    @property
    def boxes(self) -> np.ndarray:
        """Return (T, K, 4) fp32: top, left, bottom, right in 0..1; zeros if an object is not visible."""
        table = self._array("boxes")
        if table is None:
            raise BadSampleError("missing boxes.npy")
        if table.ndim != 3 or table.shape[0] != self._length or table.shape[2] != 4 or table.dtype.kind != "f":
            raise BadSampleError("boxes.npy is not an array (T, K, 4) of fractions of the image")
        if not np.isfinite(table).all():
            raise BadSampleError("boxes.npy has numbers that are not finite")
        return table.astype(np.float32, copy=False)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Return the episode's JSON; empty if it has none."""
        try:
            parsed = json.loads(self.fields.get("json", b"{}"))
        except (ValueError, RecursionError):
            raise BadSampleError("bad json") from None
        if not isinstance(parsed, dict):
            raise BadSampleError("bad json")
        return parsed

    def _refuse_unclear_rotation(self, t: int) -> None:
        if self._key:
            refuse_unclear_rotation(self.fields[f"{t:03d}.{self._key}"])

    def _dequantize(self, t: int, plane: str) -> np.ndarray:
        """Convert a 16-bit plane to its units."""
        self._refuse_unclear_rotation(t)
        ranges = self.metadata.get("ranges")
        bounds = ranges.get(plane) if isinstance(ranges, dict) else None
        if not (isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(b, int | float) for b in bounds)):
            raise BadSampleError(f"json has no pair of numbers in ranges.{plane}")
        # JSON allows NaN, which would make every pixel NaN.
        if not all(-_MAX_RANGE < b < _MAX_RANGE for b in bounds):
            raise BadSampleError(f"json has ranges.{plane} that are not finite")
        low, high = np.float32(bounds[0]), np.float32(bounds[1])
        # fp32 throughout, so that pixels are the same on every machine.
        return self._plane(t, plane).astype(np.float32) / np.float32(65535) * (high - low) + low

    def _plane(self, t: int, plane: str) -> np.ndarray:
        data = self.fields.get(member(t, plane))
        if data is None:
            raise BadSampleError(f"missing {plane} of a frame")
        try:
            with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
                table = np.asarray(picture)
        except Exception:  # decoders raise many kinds of errors
            raise BadSampleError(f"bad {plane}") from None
        if table.ndim != 2 or table.dtype.kind not in "iub":
            raise BadSampleError(f"{plane} is not a two-dimensional array of numbers")
        return unscale_labels(table, data) if plane == "mask" else table

    def _array(self, name: str) -> np.ndarray | None:
        """Return the array in NAME.npy without copying it, or in NAME.npy.gz, unpacked once."""
        if name not in self._arrays:
            data = self.fields.get(f"{name}.npy")
            try:
                if data is None and f"{name}.npy.gz" in self.fields:
                    # Limited, because a gzip of kilobytes may unpack to terabytes.
                    data = gzip.GzipFile(fileobj=io.BytesIO(self.fields[f"{name}.npy.gz"])).read(_MAX_NPY_BYTES)
                if data is None:
                    return None
                self._arrays[name] = _array_view(data)
            except Exception:  # gzip and numpy's header parser may raise anything
                raise BadSampleError(f"bad {name}.npy") from None
        return self._arrays[name]


def _array_view(data: bytes) -> np.ndarray:
    """Return a .npy file's array as a view of its bytes. Raises `ValueError` if it is not one, or contains objects."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError("a newer layout")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("objects")
    # Without a copy, because a clip takes a few frames of hundreds.
    flat = np.frombuffer(data, dtype, int(np.prod(shape)), stream.tell())
    return flat.reshape(shape[::-1]).transpose() if fortran else flat.reshape(shape)
