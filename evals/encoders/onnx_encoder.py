"""Exports of layout `onnx` as encoders, run by onnxruntime: `onnx:FOLDER`, or `onnx:FOLDER?precision=int8`."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn

from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.files import read_bytes, read_json
from sparo_train.data.decode.bands import Bands, PixelRange
from sparo_train.data.examples.image_text import ClipTokenizer
from sparo_train.models.readout import Slots

from .encoder import Encoder, TextEncoder, encode_texts
from .pixels import MappedPixels

logger = logging.getLogger(__name__)

CONFIG = "onnx.json"
PRECISIONS = ("fp32", "fp16", "int8")
_BATCH = 64  # texts at once


class _Image(BaseModel):
    input: str
    outputs: tuple[str, ...]
    channels: int = Field(gt=0)
    size: int = Field(gt=0)
    resize: int = Field(gt=0)
    prefix: int = Field(ge=0)
    bands: Bands | None = None
    pixel_range: PixelRange = "by_type"


class _Text(BaseModel):
    input: str
    outputs: tuple[str, ...]
    context_length: int = Field(gt=2)


class OnnxFacts(BaseModel):
    """Content of `onnx.json`."""

    format: Literal[1]
    sparo: str
    name: str
    kind: str
    slots: int = Field(gt=0)
    image: _Image
    text: _Text | None = None
    logit_scale: float | None = None
    logit_bias: float | None = None
    weights: str = ""
    cosine_with_fp32: dict[str, dict[str, float]] = Field(default_factory=dict)


def runtime(key: str) -> Any:
    """Return the module onnxruntime. Raises `ConfigError`, beginning with `key`, if it or a package for exports is not installed."""
    try:
        for name in ("onnx", "onnxscript"):
            importlib.import_module(name)
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ConfigError(
            f"{key}: needs the package {error.name}. pip install -e '.[onnx]' in sparo's checkout"
        ) from None


def weights_file(program: Path) -> Path:
    """Return the file with the weights of a program that is too large for one file."""
    return program.with_name(f"{program.name}.data")


def session(path: Path) -> Any:
    """Return onnxruntime's session of a program, on the CPU with torch's number of threads."""
    ort = runtime("onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class OnnxEncoder(Encoder):
    """Image program of an export."""

    def __init__(self, folder: Path, facts: OnnxFacts, precision: str):
        # An unused layer: every encoder has a model, whose device determines where pixels go.
        channels = facts.image.channels
        super().__init__(nn.Linear(1, 1), (0.0,) * channels, (1.0,) * channels, f"onnx:{folder}?precision={precision}")
        self.facts, self._folder, self._suffix = facts, folder, "" if precision == "fp32" else f".{precision}"
        self.image_size, self.slots = facts.image.size, facts.slots
        self.transform = MappedPixels(facts.image.size, facts.image.resize, rgb_first=facts.text is None)
        self.read_like(facts.image)
        self.fixed_precision, self.exported_from = precision, facts.weights
        self.prefix_tokens = facts.image.prefix
        self._image = self._session("image")

    def to(self, device: str) -> Self:
        if device != "cpu":
            logger.warning(
                f"{self.label}: ONNX programs run on the CPU, not on {device}. To use {device}, evaluate the run that was exported."
            )
        return self

    @property
    def architecture(self) -> str:
        return self.facts.model_dump_json(exclude={"cosine_with_fp32", "name", "sparo", "weights"})

    @cached_property
    def weights(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._digest("image")

    def encode(self, pixels: Tensor) -> Tensor:
        return torch.from_numpy(self._run(self._image, self.facts.image, pixels)["encoding"])

    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Return slots with attention maps of a few images."""
        return self._slots(self._run(self._image, self.facts.image, self.stack(pixels)))

    def _slots(self, outputs: dict[str, np.ndarray]) -> Slots:
        if "attention" not in outputs:
            raise ConfigError(f"{self.label}: has no slots with attention. Export a run with a readout.")
        return Slots(
            torch.from_numpy(outputs["encoding"]).unflatten(1, (self.slots, -1)), torch.from_numpy(outputs["attention"])
        )

    def _session(self, part: str) -> Any:
        path = self._folder / f"{part}{self._suffix}.onnx"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file. Export the run again with --layout onnx.")
        return session(path)

    def _run(self, session: Any, facts: _Image | _Text, values: Tensor) -> dict[str, np.ndarray]:
        return dict(zip(facts.outputs, session.run(list(facts.outputs), {facts.input: values.numpy()}), strict=True))

    def _digest(self, part: str) -> str:
        program = self._folder / f"{part}{self._suffix}.onnx"
        digest = hashlib.sha256(read_bytes(program, CheckpointError))
        if (weights := weights_file(program)).is_file():
            with weights.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


class OnnxClipEncoder(OnnxEncoder, TextEncoder):
    """Image and text program of an export of CLIP."""

    def __init__(self, folder: Path, facts: OnnxFacts, precision: str):
        super().__init__(folder, facts, precision)
        assert facts.text is not None
        self._text_facts, self._text = facts.text, self._session("text")
        self.tokenizer = ClipTokenizer(facts.text.context_length)

    @cached_property
    def text_weights(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._digest("text")

    def text(self, captions: Sequence[str]) -> Tensor:
        def encode(tokens: Tensor) -> Tensor:
            return torch.from_numpy(self._run(self._text, self._text_facts, tokens)["encoding"])

        return encode_texts(captions, self.tokenizer.batch, encode, _BATCH)

    def text_slots(self, captions: Sequence[str]) -> Slots:
        """Return slots with attention maps of a few captions."""
        return self._slots(self._run(self._text, self._text_facts, self.tokenizer.batch(captions)))


def from_onnx(text: str) -> Encoder:
    """Return the encoder of `onnx:FOLDER` or `onnx:FOLDER?precision=int8`."""
    place, mark, precision = text.partition("?precision=")
    folder, precision = Path(place), precision if mark else "fp32"
    if precision not in PRECISIONS:
        raise ConfigError(f"onnx:{text}: precision must be one of {', '.join(PRECISIONS)}, got {precision}")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"onnx:{place}: has no {CONFIG}. Give a folder that `sparo export --layout onnx` wrote.")
    try:
        facts = OnnxFacts.model_validate(read_json(folder / CONFIG, dict, CheckpointError))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{folder / CONFIG}: {key}: {first['msg']}, got {first['input']!r:.80}. Export the run again."
        ) from None
    return (OnnxEncoder if facts.text is None else OnnxClipEncoder)(folder, facts, precision)
