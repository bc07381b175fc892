"""Pretrain, evaluate and dissect vision(-language) encoders with the SPARO readout.

These names are the public API (docs/python.md). Each one loads when it is first used (PEP 562), so `import sparo` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparo_train import __version__

if TYPE_CHECKING:
    from evals.encoders.loading import load_encoder
    from evals.encoders.masked import MaskedEncoder
    from evals.feature_store.features import FeatureStore
    from evals.report.results_file import read_records
    from evals.sets.wds import WdsSet
    from evals.slots.attend import attend
    from evals.slots.overlay import image_crop, spotlight
    from evals.slots.word_profiles import informative_slots, word_profiles
    from evals.suite.evaluate import EvalOptions, evaluate, only_slots
    from evals.tasks.result import Result
    from launch.commands.making import make_scenes
    from launch.commands.recipes import load_run as load_recipe
    from launch.commands.train import train as fit
    from sparo_train.core.contracts import CoupledObjective, Loss, Objective
    from sparo_train.models.clip_config import ClipConfig
    from sparo_train.models.clip_model import Clip
    from sparo_train.models.readout import ReadOut, ReadOutConfig, ReadOutPair, Slots, normalize_slots
    from sparo_train.models.sparo import Sparo, SparoReadOut
    from sparo_train.models.vit import Vit
    from sparo_train.models.vit_config import VitConfig
    from sparo_train.objectives.method import Method
    from sparo_train.train.run_config import RunConfig

_SOURCES = {
    "Clip": "sparo_train.models.clip_model:Clip",
    "ClipConfig": "sparo_train.models.clip_config:ClipConfig",
    "CoupledObjective": "sparo_train.core.contracts:CoupledObjective",
    "EvalOptions": "evals.suite.evaluate:EvalOptions",
    "FeatureStore": "evals.feature_store.features:FeatureStore",
    "Loss": "sparo_train.core.contracts:Loss",
    "MaskedEncoder": "evals.encoders.masked:MaskedEncoder",
    "Method": "sparo_train.objectives.method:Method",
    "Objective": "sparo_train.core.contracts:Objective",
    "ReadOut": "sparo_train.models.readout:ReadOut",
    "ReadOutConfig": "sparo_train.models.readout:ReadOutConfig",
    "ReadOutPair": "sparo_train.models.readout:ReadOutPair",
    "Result": "evals.tasks.result:Result",
    "RunConfig": "sparo_train.train.run_config:RunConfig",
    "Slots": "sparo_train.models.readout:Slots",
    "Sparo": "sparo_train.models.sparo:Sparo",
    "SparoReadOut": "sparo_train.models.sparo:SparoReadOut",
    "Vit": "sparo_train.models.vit:Vit",
    "VitConfig": "sparo_train.models.vit_config:VitConfig",
    "WdsSet": "evals.sets.wds:WdsSet",
    "attend": "evals.slots.attend:attend",
    "evaluate": "evals.suite.evaluate:evaluate",
    "fit": "launch.commands.train:train",
    "image_crop": "evals.slots.overlay:image_crop",
    "informative_slots": "evals.slots.word_profiles:informative_slots",
    "load_encoder": "evals.encoders.loading:load_encoder",
    "load_recipe": "launch.commands.recipes:load_run",
    "make_scenes": "launch.commands.making:make_scenes",
    "normalize_slots": "sparo_train.models.readout:normalize_slots",
    "only_slots": "evals.suite.evaluate:only_slots",
    "read_records": "evals.report.results_file:read_records",
    "spotlight": "evals.slots.overlay:spotlight",
    "word_profiles": "evals.slots.word_profiles:word_profiles",
}
__all__ = [
    "Clip",
    "ClipConfig",
    "CoupledObjective",
    "EvalOptions",
    "FeatureStore",
    "Loss",
    "MaskedEncoder",
    "Method",
    "Objective",
    "ReadOut",
    "ReadOutConfig",
    "ReadOutPair",
    "Result",
    "RunConfig",
    "Slots",
    "Sparo",
    "SparoReadOut",
    "Vit",
    "VitConfig",
    "WdsSet",
    "__version__",
    "attend",
    "evaluate",
    "fit",
    "image_crop",
    "informative_slots",
    "load_encoder",
    "load_recipe",
    "make_scenes",
    "normalize_slots",
    "only_slots",
    "read_records",
    "spotlight",
    "word_profiles",
]


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _SOURCES[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
