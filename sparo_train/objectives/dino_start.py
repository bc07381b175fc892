"""Initial weights of DINO: backbones of other programs and sizes, and trainings of the official code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..core.contracts import FileWeights, Objective
from ..models.dino_head import DinoNet
from ..models.timm_backbone import TimmBackbone
from ..models.vit import Vit
from ..models.vit_config import VitConfig
from ..models.weight_files.dino_files import is_dino, read_dino, read_dino_training
from ..models.weight_files.vit_fit import FittedVit, fit_vit
from .dino_config import DinoObjectiveConfig

logger = logging.getLogger(__name__)


class DinoStart(Objective):
    """The part of DINO's objective that takes initial weights."""

    config: DinoObjectiveConfig
    student: DinoNet

    def remap_encoder_weights(self, weights: Mapping[str, Tensor], source: nn.Module) -> dict[str, Tensor]:
        """Load a backbone of any supported program into both student and teacher, resized to this model."""
        if self.config.model.timm_model_name is not None:
            backbone = self.student.backbone
            assert isinstance(backbone, TimmBackbone)
            fitted = backbone.fit(weights)
            return {f"{net}.backbone.model.{name}": t for net in ("student", "teacher") for name, t in fitted.items()}
        return self._backbone_pair(weights, source.config if isinstance(source, Vit) else None)

    def _backbone_pair(self, weights: Mapping[str, Tensor], theirs: VitConfig | None) -> dict[str, Tensor]:
        fitted = self._fit(weights, theirs)
        for line in fitted.size_changes:
            logger.info(f"start_from: resized {line}")
        if fitted.unused:
            logger.info(f"start_from: the readout replaces {fitted.unused[0].rpartition('.')[0]} and later blocks")
        return {f"{net}.backbone.{name}": t for net in ("student", "teacher") for name, t in fitted.weights.items()}

    def weights_of_file(self, content: Any, key: str | None) -> FileWeights | None:
        """Return student, teacher and centre of a training of the official code, or a backbone for both.

        The number of heads is the run's, because files do not contain it.
        """
        backbone = self.student.backbone
        if isinstance(backbone, TimmBackbone):
            known = backbone.model.state_dict().keys()
            if key is not None or not isinstance(content, Mapping) or not known <= content.keys():
                return None
            # Nothing in the file says which normalization it was trained with.
            return FileWeights(self.remap_encoder_weights(content, backbone), self.config.mean, self.config.std)
        if not is_dino(content):
            return None
        file = read_dino(content, "the file", key)
        training = read_dino_training(content) if key is None else None
        if training is None:
            weights: Mapping[str, Tensor] = self._backbone_pair(file.backbone, file.config)
        else:
            theirs = None if file.config is None else self.config.model_copy(update={"model": file.config})
            weights = self.adapt_to_resolution(training, theirs)
        return FileWeights(weights, *file.normalisation)

    def _fit(self, weights: Mapping[str, Tensor], theirs: VitConfig | None) -> FittedVit:
        return fit_vit(weights, self.config.model, theirs, mask_token=self.config.ibot is not None)

    def adapt_to_resolution(self, weights: Mapping[str, Tensor], theirs: Any = None) -> Mapping[str, Tensor]:
        """Resize the backbones of another run's weights to this model's image, patch and bands."""
        if self.config.model.timm_model_name is not None:
            return weights
        # The earlier teacher of Gram anchoring is copied from the teacher instead.
        fitted = {n: t for n, t in weights.items() if ".backbone." not in n and not n.startswith("earlier.")}
        for net in ("student", "teacher"):
            own = f"{net}.backbone."
            backbone = {name.removeprefix(own): t for name, t in weights.items() if name.startswith(own)}
            fitted |= {
                f"{own}{name}": t
                for name, t in self._fit(backbone, None if theirs is None else theirs.model).weights.items()
            }
        return fitted
