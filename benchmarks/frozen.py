"""What leaving towers untrained saves, and what averaging and Muon cost: steps of CLIP+SPARO ViT-S/32, in turn with a plain step.

    python benchmarks/frozen.py [--quick] [--json FILE] [--rounds 9] [--batch 64]

`blocks frozen` is `vision.freeze: blocks` and `text.freeze: blocks`: norms, read-outs and the temperature are trained, towers run on the fly.
`theirs` is the plain step of the same model: all of it trained by AdamW, no average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import interleave, parser, report, row, seconds, training_step

from sparo_train.core.contracts import Progress
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import OptimConfig
from sparo_train.models.clip_config import ClipConfig
from sparo_train.objectives.averaging import EmaConfig
from sparo_train.objectives.clip import ClipObjective, ClipObjectiveConfig

# (name, keys of towers, keys of the objective, keys of optim, least ratio of speeds)
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], float]] = [
    ("blocks frozen", {"freeze": "blocks"}, {}, {}, 2.0),
    ("objective.ema", {}, {"ema": EmaConfig()}, {}, 0.9),
    ("optim.muon", {}, {}, {"muon": {}}, 0.9),
]


def step(
    batch: int, tower: Mapping[str, Any], objective: Mapping[str, Any], optim: Mapping[str, Any]
) -> Callable[[], None]:
    """A training step of one case."""
    torch.manual_seed(0)
    model = {"backbone": "ViT-S-32", "readout": {"kind": "sparo"}, "vision": dict(tower), "text": dict(tower)}
    config = ClipObjectiveConfig(model=ClipConfig.model_validate(model), **objective)
    engine = LocalEngine(LocalEngineConfig(precision="fp32"), OptimConfig(**optim))
    engine.prepare(ClipObjective(config))
    text = torch.randint(300, 40000, (batch, 32))
    text[:, 0], text[:, -1] = 49406, 49407
    data = {"image": torch.randint(0, 255, (batch, 3, 224, 224), dtype=torch.uint8), "text": text}
    return training_step(engine, data, Progress(0, 100, 0))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--batch", type=int, default=64)
    given = arguments.parse_args()
    rounds, batch = (3, 32) if given.quick else (given.rounds, given.batch)
    plain, rows = step(batch, {}, {}, {}), []
    for name, tower, objective, optim, bar in CASES:
        other = step(batch, tower, objective, optim)
        pairs = interleave(lambda other=other: batch / seconds(other), lambda: batch / seconds(plain), rounds)
        rows.append(
            row(f"{name}, batch {batch}", pairs, None if given.quick else bar, "samples/s", more_is_better=True)
        )
    report("frozen towers, averages, Muon: ViT-S/32, fp32", rows, given.json)


if __name__ == "__main__":
    main()
