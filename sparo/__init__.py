"""Pretrain, evaluate and dissect vision(-language) encoders with the SPARO readout.

These names are the public API (docs/reference/python_api.md). Each one loads when it is first used (PEP 562), so `import sparo` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparo_train import __version__

if TYPE_CHECKING:
    from evals.encoders.loading import load_encoder as load_encoder
    from evals.encoders.selection import MaskedEncoder as MaskedEncoder
    from evals.feature_store.features import FeatureStore as FeatureStore
    from evals.interop.backbone_exports import load_readout as load_readout
    from evals.report.results_file import read_records as read_records
    from evals.sets.task_config import SetTaskConfig as SetTaskConfig
    from evals.sets.wds import WdsSet as WdsSet
    from evals.slots.attend import attend as attend
    from evals.slots.attend import informative_slots as informative_slots
    from evals.slots.attend import word_profiles as word_profiles
    from evals.slots.overlay import image_crop as image_crop
    from evals.slots.overlay import overlay as overlay
    from evals.suite.answers import Answers as Answers
    from evals.suite.answers import answers_task as answers_task
    from evals.suite.eval_options import EvalOptions as EvalOptions
    from evals.suite.evaluate import evaluate as evaluate
    from evals.suite.evaluate import only_slots as only_slots
    from evals.tasks.result import Result as Result
    from launch.commands.making import make_scenes as make_scenes
    from launch.commands.train import train as fit  # noqa: F401
    from launch.recipes import load_run as load_recipe  # noqa: F401
    from sparo_train.core.config import field as field
    from sparo_train.core.contracts import CoupledObjective as CoupledObjective
    from sparo_train.core.contracts import Loss as Loss
    from sparo_train.core.contracts import Objective as Objective
    from sparo_train.core.contracts import ParamGroups as ParamGroups
    from sparo_train.core.ema import Follow as Follow
    from sparo_train.engine.optim import OptimConfig as OptimConfig
    from sparo_train.models.clip_config import ClipConfig as ClipConfig
    from sparo_train.models.clip_model import Clip as Clip
    from sparo_train.models.readout import ReadOut as ReadOut
    from sparo_train.models.readout import ReadOutConfig as ReadOutConfig
    from sparo_train.models.readout import ReadOutPair as ReadOutPair
    from sparo_train.models.readout import Slots as Slots
    from sparo_train.models.readout import normalize_slots as normalize_slots
    from sparo_train.models.sparo import Sparo as Sparo
    from sparo_train.models.sparo import SparoReadOut as SparoReadOut
    from sparo_train.models.vit import Vit as Vit
    from sparo_train.models.vit_config import VitConfig as VitConfig
    from sparo_train.objectives.clip import METHOD as CLIP_METHOD  # noqa: F401
    from sparo_train.objectives.clip import ClipObjective as ClipObjective
    from sparo_train.objectives.clip_config import ClipObjectiveConfig as ClipObjectiveConfig
    from sparo_train.objectives.contrastive import ContrastiveLoss as ContrastiveLoss
    from sparo_train.objectives.method import Method as Method
    from sparo_train.train.run_config import RunConfig as RunConfig

_SOURCES = {
    "Answers": "evals.suite.answers:Answers",
    "CLIP_METHOD": "sparo_train.objectives.clip:METHOD",
    "Clip": "sparo_train.models.clip_model:Clip",
    "ClipConfig": "sparo_train.models.clip_config:ClipConfig",
    "ClipObjective": "sparo_train.objectives.clip:ClipObjective",
    "ClipObjectiveConfig": "sparo_train.objectives.clip_config:ClipObjectiveConfig",
    "ContrastiveLoss": "sparo_train.objectives.contrastive:ContrastiveLoss",
    "CoupledObjective": "sparo_train.core.contracts:CoupledObjective",
    "EvalOptions": "evals.suite.eval_options:EvalOptions",
    "FeatureStore": "evals.feature_store.features:FeatureStore",
    "Follow": "sparo_train.core.ema:Follow",
    "Loss": "sparo_train.core.contracts:Loss",
    "MaskedEncoder": "evals.encoders.selection:MaskedEncoder",
    "Method": "sparo_train.objectives.method:Method",
    "Objective": "sparo_train.core.contracts:Objective",
    "OptimConfig": "sparo_train.engine.optim:OptimConfig",
    "ParamGroups": "sparo_train.core.contracts:ParamGroups",
    "ReadOut": "sparo_train.models.readout:ReadOut",
    "ReadOutConfig": "sparo_train.models.readout:ReadOutConfig",
    "ReadOutPair": "sparo_train.models.readout:ReadOutPair",
    "Result": "evals.tasks.result:Result",
    "RunConfig": "sparo_train.train.run_config:RunConfig",
    "SetTaskConfig": "evals.sets.task_config:SetTaskConfig",
    "Slots": "sparo_train.models.readout:Slots",
    "Sparo": "sparo_train.models.sparo:Sparo",
    "SparoReadOut": "sparo_train.models.sparo:SparoReadOut",
    "Vit": "sparo_train.models.vit:Vit",
    "VitConfig": "sparo_train.models.vit_config:VitConfig",
    "WdsSet": "evals.sets.wds:WdsSet",
    "answers_task": "evals.suite.answers:answers_task",
    "attend": "evals.slots.attend:attend",
    "evaluate": "evals.suite.evaluate:evaluate",
    "field": "sparo_train.core.config:field",
    "fit": "launch.commands.train:train",
    "image_crop": "evals.slots.overlay:image_crop",
    "informative_slots": "evals.slots.attend:informative_slots",
    "load_encoder": "evals.encoders.loading:load_encoder",
    "load_readout": "evals.interop.backbone_exports:load_readout",
    "load_recipe": "launch.recipes:load_run",
    "make_scenes": "launch.commands.making:make_scenes",
    "normalize_slots": "sparo_train.models.readout:normalize_slots",
    "only_slots": "evals.suite.evaluate:only_slots",
    "read_records": "evals.report.results_file:read_records",
    "overlay": "evals.slots.overlay:overlay",
    "word_profiles": "evals.slots.attend:word_profiles",
}
__all__ = ["__version__", *_SOURCES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _SOURCES[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
