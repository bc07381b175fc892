"""`sparo_train`: everything that trains. See docs/architecture.md for the map.

The names in `__all__` are what programs import; each is loaded when it is first used (PEP 562), torch with it.
"""

# pyright: reportUnsupportedDunderAll=false
from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_HOMES = {
    "Sparo": "sparo_train.models.sparo",
    "SparoReadOut": "sparo_train.models.sparo",
    "ReadOut": "sparo_train.models.readout",
    "ReadOutConfig": "sparo_train.models.readout",
    "ReadOutPair": "sparo_train.models.readout",
    "Slots": "sparo_train.models.readout",
    "normalize_slots": "sparo_train.models.readout",
    "Clip": "sparo_train.models.clip_model",
    "ClipConfig": "sparo_train.models.clip_config",
    "Vit": "sparo_train.models.vit",
    "VitConfig": "sparo_train.models.vit_config",
    "Objective": "sparo_train.core.contracts",
    "CoupledObjective": "sparo_train.core.contracts",
    "Loss": "sparo_train.core.contracts",
    "Method": "sparo_train.objectives.method",
    "RunConfig": "sparo_train.train.run_config",
    "load_run": "launch.commands.recipes",
    "load_encoder": "evals.encoders.loading",
    "fit": "launch.commands.train",  # not `train`: the package of that name takes its place as soon as it is imported
}
__all__ = [
    "Clip",
    "ClipConfig",
    "CoupledObjective",
    "Loss",
    "Method",
    "Objective",
    "ReadOut",
    "ReadOutConfig",
    "ReadOutPair",
    "RunConfig",
    "Slots",
    "Sparo",
    "SparoReadOut",
    "Vit",
    "VitConfig",
    "__version__",
    "fit",
    "load_encoder",
    "load_run",
    "normalize_slots",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), "train" if name == "fit" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
