"""`sparo export --layout onnx`: towers as ONNX programs in fp32, fp16 and int8, with tokenizer and preprocessing, for use without torch."""

from __future__ import annotations

import importlib
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train import __version__
from sparo_train.core.files import whole_file, write_whole
from sparo_train.data.examples.image_text import EOT, SOT
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.dino_head import build_backbone
from sparo_train.models.weight_files.weights import weights_sha256
from sparo_train.objectives.clip import scored_weights

from ..encoders.onnx_encoder import CONFIG, runtime, session, weights_file
from .backbone_exports import BackboneProgram, backbone_weights
from .exporting import Export, TrainedWeights
from .tokenizer_file import tokenizer_json

_OPSET = 18
_LARGEST_FILE = 2_000_000_000  # bytes of weights in one file: protobuf's limit is 2 GiB, with the graph
_LARGE = 256  # elements of a weight from which 16 bits save space
_EXAMPLES = 32  # images and captions on which precisions are compared
_LOAD = """import onnxruntime

session = onnxruntime.InferenceSession("PLACE/image.onnx")
outputs = [output.name for output in session.get_outputs()]
found = dict(zip(outputs, session.run(None, {"pixels": pixels})))  # uint8 (n, channels, size, size); see onnx.json"""


class _Program(NamedTuple):
    """A module to export.

    Attributes:
        module: the module.
        inputs: an example of each input, by name.
        dynamic: names of the dynamic dimensions of each input.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    dynamic: dict[str, dict[int, str]]

    @property
    def outputs(self) -> list[str]:
        """Return the names of its outputs: those of the module's list that exist."""
        names: Any = self.module.outputs
        with torch.no_grad():
            return list(names[: len(self.module(*self.inputs.values()))])


class _ImageTower(nn.Module):
    """CLIP's image tower: uint8 pixels (n, 3, S, S) to unit-norm encodings, and attention of slots, or patches that texts pool."""

    def __init__(self, clip: Clip, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.tower, self.local = clip.visual, clip.config.readout.conditioned
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("encoding", "patches" if self.local else "attention")

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        tower = self.tower
        hidden = tower.hidden((pixels.float() / 255 - self.get_buffer("mean")) / self.get_buffer("std"))
        if self.local:
            tokens = tower(None, hidden=hidden, local=True)
            return F.normalize(tokens[:, 0], dim=-1), tokens[:, 1:]
        if not tower.read_by:
            return (F.normalize(tower(None, hidden=hidden), dim=-1),)
        slots = tower._read(hidden, True)
        flat = slots.flat() if tower.proj is None else slots.flat() @ tower.proj
        return F.normalize(flat, dim=-1), *_optional(slots.attention)


class _TextTower(nn.Module):
    """CLIP's text tower: token ids (n, t) to encodings, and attention of slots; unit norm unless texts pool patches."""

    outputs = ("encoding", "attention")

    def __init__(self, clip: Clip):
        super().__init__()
        self.tower, self.raw = clip.text, clip.config.readout.conditioned

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        tower = self.tower
        hidden = tower.hidden(tokens)
        attention = tower.slots(tokens, True, hidden).attention if tower.read_by else None
        encoding = tower(tokens, hidden)
        return encoding if self.raw else F.normalize(encoding, dim=-1), *_optional(attention)


def _optional(attention: Tensor | None) -> tuple[Tensor, ...]:
    """Return the further outputs of a program: attention, unless the readout has none."""
    return () if attention is None else (attention,)


class _Scores(nn.Module):
    """FLAIR's cosine of texts (t, D) with images (n, N, D) as pooled by each text, (n, t)."""

    outputs = ("cosine",)

    def __init__(self, clip: Clip):
        super().__init__()
        self.pool: Any = clip.visual.get_submodule(clip.config.readout.kind)

    def forward(self, patches: Tensor, texts: Tensor) -> tuple[Tensor]:
        pooled = F.normalize(self.pool.conditioned(patches, texts), dim=-1)
        return (torch.einsum("ntd,td->nt", pooled, F.normalize(texts, dim=-1)),)


class _Backbone(BackboneProgram):
    """DINO's backbone: uint8 pixels to the encoding, patches, and attention if there is a readout."""

    outputs = ("encoding", "patches", "attention")

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return super().forward(pixels)[: 2 if self.vit.read_by is None else 3]


def _onnx(trained: TrainedWeights, folder: Path) -> Path:
    runtime("--layout onnx")
    clip = isinstance(getattr(trained.objective, "model", None), ClipConfig)
    programs, facts = (_clip if clip else _backbone)(trained)
    folder.mkdir(parents=True, exist_ok=True)
    agreement: dict[str, Any] = {}
    for name, program in programs.items():
        # Beyond protobuf's limit, weights are in NAME.onnx.data, where onnxruntime finds them.
        separate = sum(t.nbytes for t in program.module.state_dict().values()) > _LARGEST_FILE
        _write(program, folder / f"{name}.onnx", separate)
        agreement[name] = _write_small(folder, name, program, separate)
    if clip:
        context_length = facts["text"]["context_length"]
        write_whole(folder / "tokenizer.json", json.dumps(tokenizer_json(context_length), ensure_ascii=False))
    write_whole(folder / CONFIG, json.dumps({**facts, "cosine_with_fp32": agreement}, indent=1) + "\n")
    return folder


def _clip(trained: TrainedWeights) -> tuple[dict[str, _Program], dict[str, Any]]:
    """Return the programs of a CLIP model, and the facts for `onnx.json`."""
    objective, weights = trained.objective, scored_weights(trained.weights)
    model = Clip(objective.model)
    model.load_state_dict(weights)
    model.eval()
    config, size = objective.model, objective.model.vision.image_size
    image, text = _ImageTower(model, objective.mean, objective.std), _TextTower(model)
    tokens = torch.tensor([[SOT, 320, 1125, EOT, 0, 0], [SOT, 320, EOT, 0, 0, 0]])[:, : config.text.context_length]
    programs = {
        "image": _Program(image, {"pixels": _images(2, 3, size)}, {"pixels": {0: "images"}}),
        "text": _Program(text, {"tokens": tokens}, {"tokens": {0: "texts", 1: "length"}}),
    }
    if config.readout.conditioned:
        width = config.embed_dim
        inputs = {"patches": torch.randn(2, 9, width), "texts": torch.randn(3, width)}
        dynamic = {"patches": {0: "images", 1: "patches"}, "texts": {0: "texts"}}
        programs["score"] = _Program(_Scores(model), inputs, dynamic)
    facts = {
        **_facts(trained, model, size, size, 3, model.visual.prefix, config.slots),
        "text": {"input": "tokens", "outputs": programs["text"].outputs, "context_length": config.text.context_length},
        "logit_scale": float(model.logit_scale.detach().exp()),
        "logit_bias": None if model.logit_bias is None else float(model.logit_bias.detach()),
    }
    _complete(facts, programs["image"])
    return programs, facts


def _backbone(trained: TrainedWeights) -> tuple[dict[str, _Program], dict[str, Any]]:
    """Return the program of a DINO backbone, and the facts for `onnx.json`."""
    config, weights = backbone_weights(trained)
    backbone = build_backbone(config)
    backbone.load_state_dict(weights)
    module = _Backbone(backbone.eval(), torch.tensor(trained.objective.mean), torch.tensor(trained.objective.std))
    size, bands = config.image_size, config.bands
    program = _Program(module, {"pixels": _images(2, bands, size)}, {"pixels": {0: "images"}})
    facts = _facts(trained, backbone, size, round(size * 256 / 224), bands, backbone.prefix, config.slots)
    _complete(facts, program)
    return {"image": program}, facts


def _facts(
    trained: TrainedWeights, model: nn.Module, size: int, resize: int, bands: int, prefix: int, slots: int
) -> dict[str, Any]:
    data = trained.data
    return {
        "format": 1,
        "sparo": __version__,
        "name": trained.name,
        "kind": trained.objective.kind,
        "slots": slots,
        "weights": weights_sha256(model.state_dict()),  # by which a selection of slots belongs to the export, too
        "image": {
            "input": "pixels",
            "outputs": [],
            "channels": bands,
            # The shorter side is resized to `resize` (bicubic, antialiased), and the centre of `size` pixels is cut out.
            "size": size,
            "resize": resize,
            # Bands of a file, from 1, and how values become 8 bits; null: an image in red, green and blue.
            "bands": None if data is None else data.bands,
            "pixel_range": "by_type" if data is None else data.pixel_range,
            # Values of `attention` before those of the patches.
            "prefix": prefix,
        },
    }


def _complete(facts: dict[str, Any], program: _Program) -> None:
    """Add the outputs of the image program, and correct the number of tokens before the patches if the readout excludes them."""
    image = facts["image"]
    image["outputs"] = program.outputs
    if "attention" in image["outputs"]:
        with torch.no_grad():
            length = program.module(*program.inputs.values())[image["outputs"].index("attention")].shape[-1]
        patches = length - image["prefix"]
        image["prefix"] = image["prefix"] if math.isqrt(max(0, patches)) ** 2 == patches else 0


def _images(count: int, bands: int, size: int) -> Tensor:
    """Return smooth random images (count, bands, size, size) uint8, always the same ones."""
    random = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, bands, 5, 5, generator=random)
    return (F.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


def _write(program: _Program, path: Path, separate: bool) -> None:
    dims = {name: torch.export.Dim(name, min=1) for parts in program.dynamic.values() for name in parts.values()}
    shapes = tuple({at: dims[name] for at, name in program.dynamic[key].items()} for key in program.inputs)
    with _quiet(), torch.no_grad():
        exported: Any = torch.onnx.export(
            program.module.eval(),
            tuple(program.inputs.values()),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=list(program.inputs),
            output_names=program.outputs,
            opset_version=_OPSET,
            verbose=False,
        )
    with _whole_program(path) as temporary:
        exported.save(temporary, external_data=separate)


@contextmanager
def _whole_program(path: Path) -> Iterator[Path]:
    """Give a path of the same name in a temporary folder; at the end, the program and the file with its weights, if any, replace those at `path`."""
    weights = weights_file(path)
    with whole_file(path) as temporary, tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx-") as place:
        yield Path(place) / path.name
        if (written := Path(place) / weights.name).is_file():
            written.replace(weights)
        else:  # of an earlier, larger model
            weights.unlink(missing_ok=True)
        (Path(place) / path.name).replace(temporary)


def _write_small(folder: Path, name: str, program: _Program, separate: bool) -> dict[str, float]:
    """Write a program in fp16 and int8; return the lowest cosine of their first output with that in fp32, on generated inputs."""
    onnx, quantization = importlib.import_module("onnx"), importlib.import_module("onnxruntime.quantization")
    source, half, quarter = (folder / f"{name}{suffix}.onnx" for suffix in ("", ".fp16", ".int8"))
    with _quiet():
        with _whole_program(half) as temporary:
            weights = {"save_as_external_data": separate, "location": weights_file(half).name}
            onnx.save(_half_weights(onnx.load(source)), temporary, **weights)
        with _whole_program(quarter) as temporary:
            # Unsigned, because products with signed weights overflow 16 bits on CPUs without VNNI instructions.
            kind = quantization.QuantType.QUInt8
            quantization.quantize_dynamic(source, temporary, weight_type=kind, use_external_data_format=separate)
    inputs = {key: value.numpy() for key, value in _make_more_inputs(program.inputs).items()}
    exact, *others = (torch.from_numpy(session(path).run(None, inputs)[0]) for path in (source, half, quarter))
    cosines = [round(float(F.cosine_similarity(exact, other).min()), 6) for other in others]
    return dict(zip(("fp16", "int8"), cosines, strict=True))


def _half_weights(model: Any) -> Any:
    """Store the larger weights of a program in 16 bits; it computes in fp32, because onnxruntime's fp16 kernels for CPUs are incomplete."""
    onnx = importlib.import_module("onnx")
    casts = []
    for weight in model.graph.initializer:
        if weight.data_type != onnx.TensorProto.FLOAT or np.prod(weight.dims) < _LARGE:
            continue
        name, values = weight.name, onnx.numpy_helper.to_array(weight)
        limit = np.finfo(np.float16).max
        weight.CopyFrom(onnx.numpy_helper.from_array(values.clip(-limit, limit).astype(np.float16), f"{name}.fp16"))
        casts.append(onnx.helper.make_node("Cast", [weight.name], [name], to=onnx.TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    # Types that the exporter noted for weights.
    kept = [info for info in model.graph.value_info if info.name not in {cast.output[0] for cast in casts}]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    return model


def _make_more_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return more inputs of the same kinds: images, captions of random words, or the same floats."""
    random = torch.Generator().manual_seed(1)
    more: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if name == "pixels":
            value = _images(_EXAMPLES, value.shape[1], value.shape[2])
        elif name == "tokens":
            value = torch.randint(1, SOT, (_EXAMPLES, value.shape[1]), generator=random)
            value[:, 0], value[:, -1] = SOT, EOT
        more[name] = value
    return more


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries that log each unusual node of a graph."""
    names = ("torch.onnx", "onnxscript", "onnx_ir", "root", "torch.onnx._internal.exporter._core")
    loggers = [logging.getLogger(None if name == "root" else name) for name in names]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


ONNX = Export(_onnx, "onnx", _LOAD, folder=True, library="onnx")
