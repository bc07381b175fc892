"""What objectives share that train a `student` with a backbone: its initial weights, and its layers for the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.contracts import FileWeights, Objective
from ..core.registries import READOUTS
from ..models.timm_backbone import TimmBackbone
from ..models.vit import Vit
from ..models.vit_config import VitConfig
from ..models.weight_files.dino_files import is_dino, read_dino, read_dino_training
from ..models.weight_files.vit_fit import FittedVit, fit_vit, hidden_keys

logger = logging.getLogger(__name__)


def encoder_less_parts(*networks: str) -> tuple[str, ...]:
    """Return the patterns of parameters in the backbones of these networks that no other encoder has."""
    parts = ("backbone.mask_token", "backbone.readout_norm.*", *(f"backbone.{kind}.*" for kind in READOUTS.names()))
    return tuple(f"{net}.{part}" for net in networks for part in parts)


class BackboneObjective(Objective):
    """Objective whose `config.model` describes the backbone of `student`.

    Attributes:
        networks: names of the modules whose backbones begin with the same initial weights.
    """

    networks: ClassVar[tuple[str, ...]]
    config: Any
    student: Any

    def remap_encoder_weights(self, weights: Mapping[str, Tensor], source: nn.Module) -> dict[str, Tensor]:
        """Load a backbone of any supported program into all networks, resized to this model."""
        if self.config.model.timm_model_name is not None:
            backbone = self.student.backbone
            assert isinstance(backbone, TimmBackbone)
            fitted = backbone.fit(weights)
            return {f"{net}.backbone.model.{name}": t for net in self.networks for name, t in fitted.items()}
        return self._backbones(weights, source.config if isinstance(source, Vit) else hidden_keys(source))

    def _backbones(
        self, weights: Mapping[str, Tensor], theirs: VitConfig | Mapping[str, Any] | None
    ) -> dict[str, Tensor]:
        fitted = self._fit(weights, theirs)
        for line in fitted.size_changes:
            logger.info(f"start_from: resized {line}")
        if fitted.unused:
            block = ".".join(fitted.unused[0].split(".")[:2])
            logger.info(
                f"start_from: {block} and later blocks of the checkpoint are not used; the new readout replaces them"
            )
        return {f"{net}.backbone.{name}": t for net in self.networks for name, t in fitted.weights.items()}

    def weights_of_file(self, content: Any, key: str | None) -> FileWeights | None:
        """Return a backbone for all networks, or student, teacher and centre of a training of DINO's official code.

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
        training = read_dino_training(content) if key is None and "teacher" in self.networks else None
        if training is None:
            weights: Mapping[str, Tensor] = self._backbones(file.backbone, file.config)
        else:
            theirs = None if file.config is None else self.config.model_copy(update={"model": file.config})
            weights = self.adapt_to_resolution(training, theirs)
        return FileWeights(weights, *file.normalisation)

    def _fit(self, weights: Mapping[str, Tensor], theirs: VitConfig | Mapping[str, Any] | None) -> FittedVit:
        return fit_vit(weights, self.config.model, theirs, mask_token=hasattr(self.student.backbone, "mask_token"))

    def adapt_to_resolution(self, weights: Mapping[str, Tensor], theirs: Any = None) -> Mapping[str, Tensor]:
        """Resize the backbones of another run's weights to this model's image, patch and bands."""
        if self.config.model.timm_model_name is not None:
            return weights
        # The earlier teacher of Gram anchoring is copied from the teacher instead.
        fitted = {n: t for n, t in weights.items() if ".backbone." not in n and not n.startswith("earlier.")}
        for net in self.networks:
            own = f"{net}.backbone."
            backbone = {name.removeprefix(own): t for name, t in weights.items() if name.startswith(own)}
            fitted |= {
                f"{own}{name}": t
                for name, t in self._fit(backbone, None if theirs is None else theirs.model).weights.items()
            }
        return fitted

    def layer_ids(self) -> Mapping[str, int]:
        """Return the number of layers above each parameter of the student's backbone, see `ParamGroups`."""
        backbone, found = self.student.backbone, {}
        if isinstance(backbone, TimmBackbone):
            return {}
        for name, _ in backbone.named_parameters():
            first, _, rest = name.partition(".")
            stem = first in ("cls_token", "pos_embed", "patch_embed", "register_tokens", "mask_token", "norm_pre")
            layer = 0 if stem else 1 + int(rest.split(".")[0]) if first == "blocks" else len(backbone.blocks) + 1
            found[f"student.backbone.{name}"] = len(backbone.blocks) + 1 - layer
        return found
