"""Anything that encodes images and texts: our runs, exported folders, sparo-clip and open_clip files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sparo_train.core import store
from sparo_train.core.config import parse_yaml, resolve
from sparo_train.core.errors import CheckpointError
from sparo_train.data.text import ClipTokenizer
from sparo_train.models.clip import Clip
from sparo_train.models.clip_config import OPENAI_MEAN, OPENAI_STD, ClipConfig
from sparo_train.models.describe import infer_config, read_config, read_export
from sparo_train.models.readouts import Slots
from sparo_train.models.weights import load_into, read_weights
from sparo_train.models.zero_folder import is_zero_folder, read_zero_folder
from sparo_train.objectives.clip import ClipObjective, ClipObjectiveConfig
from sparo_train.train.run import RunConfig

_BATCH = 256


class ClipEncoder:
    """A CLIP model with its preprocessing, in eval mode.

    Args:
        model: any of our CLIP models; it is put into eval mode and not changed otherwise.
        mean, std: per-channel normalisation of pixels in 0..1.
    """

    def __init__(
        self,
        model: Clip,
        mean: Sequence[float] = OPENAI_MEAN,
        std: Sequence[float] = OPENAI_STD,
        label: str = "",
    ):
        self.model, self.label = model.eval(), label
        self.assumed = ""  # what the file did not say and was taken for granted
        self.device = model.logit_scale.device
        self.mean = torch.tensor(mean, device=self.device).view(3, 1, 1)
        self.std = torch.tensor(std, device=self.device).view(3, 1, 1)
        self.tokenizer = ClipTokenizer(model.config.text.context_length)
        self.image_size = model.config.vision.image_size

    def to(self, device: str) -> ClipEncoder:
        """Move model and normalisation."""
        self.model.to(device)
        self.device = self.model.logit_scale.device
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    @torch.inference_mode()
    def image(self, pixels: Iterable[np.ndarray], batch: int = _BATCH) -> Tensor:
        """Unit-norm fp32 encodings (n, D) of (S, S, 3) uint8 images."""
        out, rows = [], []
        for array in pixels:
            rows.append(array)
            if len(rows) == batch:
                out.append(self._encode(rows))
                rows = []
        if rows:
            out.append(self._encode(rows))
        return torch.cat(out) if out else torch.zeros(0, self.model.config.width)

    @torch.inference_mode()
    def text(self, captions: Sequence[str], batch: int = _BATCH) -> Tensor:
        """Unit-norm fp32 encodings (n, D); each distinct caption is encoded once."""
        distinct = sorted(set(captions), key=lambda c: (len(c), c))
        parts = []
        for begin in range(0, len(distinct), batch):
            tokens = self.tokenizer.batch(distinct[begin : begin + batch])
            tokens = tokens[:, : int(tokens.argmax(dim=1).max()) + 1]  # exact under the causal mask
            parts.append(self.model.encode_text(tokens.to(self.device), normalize=True).float().cpu())
        where = {caption: i for i, caption in enumerate(distinct)}
        return torch.cat(parts)[[where[c] for c in captions]]

    @torch.inference_mode()
    def image_slots(self, pixels: Sequence[np.ndarray]) -> Slots:
        """Slots with attention maps of a few images; SPARO models only."""
        return self.model.visual.slots(self.pixels(pixels), need_attention=True)  # type: ignore[operator, return-value]

    @torch.inference_mode()
    def text_slots(self, captions: Sequence[str]) -> Slots:
        """Slots with attention maps of a few captions; SPARO models only."""
        tokens = self.tokenizer.batch(captions).to(self.device)
        return self.model.text.slots(tokens, need_attention=True)  # type: ignore[operator, return-value]

    def pixels(self, rows: Sequence[np.ndarray]) -> Tensor:
        """uint8 images to normalised (n, 3, S, S)."""
        stacked = torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).to(self.device)
        return stacked.float().div(255).sub(self.mean).div(self.std)

    def _encode(self, rows: Sequence[np.ndarray]) -> Tensor:
        return self.model.encode_image(self.pixels(rows), normalize=True).float().cpu()


def from_objective(objective: nn.Module) -> ClipEncoder:
    """The encoder inside a training objective, on its device."""
    assert isinstance(objective, ClipObjective)
    return ClipEncoder(objective.model, objective.config.mean, objective.config.std)


def load_encoder(checkpoint: str | Path, model: str | None = None, device: str = "cpu") -> ClipEncoder:
    """Load a checkpoint of any kind we know.

    Args:
        checkpoint: a run folder (its newest checkpoint), one of its `checkpoints/step-…` folders, an exported open_clip
            folder, a .pt/.safetensors file (ours, sparo-clip's, open_clip's), or a DeepSpeed ZeRO folder.
        model: for a file: an open_clip model name, ours included (`ViT-B-32-quickgelu`, `gap-ViT-B-16`); default: what the
            file says of itself, else what its shapes tell (then `assumed` says what was taken for granted).

    Raises:
        CheckpointError: nothing there that we can read.
    """
    path = Path(checkpoint)
    if (path / "config.yaml").is_file() or (path / "meta.json").is_file():
        encoder = _from_run(path)
    elif (path / "open_clip_config.json").is_file():
        encoder = _from_export(path)
    elif path.is_file() or is_zero_folder(path):
        encoder = _from_file(path, model)
    else:
        raise CheckpointError(
            f"{path}: no run folder, no checkpoint folder, no exported folder, no DeepSpeed folder, no weight file"
        )
    return encoder.to(device)


def read_run(path: Path) -> tuple[RunConfig, Path]:
    """The recipe of a run folder (or of one of its checkpoint folders) and the newest complete checkpoint."""
    folder = path.parent.parent if (path / "meta.json").is_file() else path
    config_file = folder / "config.yaml"
    if not config_file.is_file():
        raise CheckpointError(f"{folder}: has no config.yaml, so it is no run folder")
    config = resolve(RunConfig, parse_yaml(config_file.read_text(encoding="utf-8"), str(config_file)), str(config_file))
    step = path if (path / "meta.json").is_file() else store.CheckpointStore(folder / "checkpoints").latest()
    if step is None:
        raise CheckpointError(f"{folder}: no complete checkpoint yet")
    return config, step


def run_weights(step: Path) -> dict[str, Tensor]:
    """The model's weights in a checkpoint folder, without the objective's prefix."""
    return {n.removeprefix("model."): t for n, t in store.read_part(step, "model").items() if n.startswith("model.")}


def _from_run(path: Path) -> ClipEncoder:
    config, step = read_run(path)
    return _built(config.objective, run_weights(step), str(step))


def _built(objective: ClipObjectiveConfig, weights: dict[str, Tensor], origin: str) -> ClipEncoder:
    model = Clip(objective.model)
    load_into(model, weights, origin)
    return ClipEncoder(model, objective.mean, objective.std, origin)


def _from_export(path: Path) -> ClipEncoder:
    config, mean, std = read_export(path / "open_clip_config.json")
    model = Clip(config)
    load_into(model, read_weights(path / "open_clip_model.safetensors"), str(path))
    return ClipEncoder(model, mean, std, str(path))


def _from_file(path: Path, name: str | None) -> ClipEncoder:
    weights, assumed = read_zero_folder(path) if path.is_dir() else read_weights(path), ""
    config = _named(name) if name else None if path.is_dir() else read_config(path)
    if config is None:
        config = infer_config(weights)
        v, t = config.vision, config.text
        assumed = (
            f"{path}: told from the shapes: {config.readout.kind} read-out, ViT {v.width}x{v.layers} with patches of {v.patch_size} "
            f"and {v.width // v.head_width} heads, text {t.width}x{t.layers} with {t.heads} heads, GELU; --model NAME says otherwise"
        )
    model = Clip(config)
    load_into(model, weights, str(path))
    encoder = ClipEncoder(model, label=str(path))
    encoder.assumed = assumed
    return encoder


def _named(name: str) -> ClipConfig:
    from sparo_train import openclip  # wraps open_clip's builders: only where a name is asked for

    return openclip.config_of(name)
