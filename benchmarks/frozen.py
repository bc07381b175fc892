"""Time saved by frozen towers, and time added by an average of weights and by Muon: steps of CLIP+SPARO ViT-S/32.

    python benchmarks/frozen.py [--quick] [--json FILE] [--rounds 9] [--batch 64]

`blocks frozen` has `vision.freeze: blocks` and `text.freeze: blocks`: norms, readouts and the temperature are trained, and
the frozen blocks run in every step. `cached tokens` also has `objective.cache`; its time includes reading shards and
tokens, but not computing the tokens once. Each case takes turns with a plain step of the same model: all parameters are
trained by AdamW, without an average and without reading data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import interleave, noise_shards, parser, report, row, seconds, training_step

from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.registries import OPTIMIZERS
from sparo_train.core.world import World
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.models.clip_config import ClipConfig
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig, EmaConfig
from sparo_train.train.build import build_engine, build_objective, build_pipeline, build_ranks
from sparo_train.train.run_config import RunConfig


class Case(NamedTuple):
    """A case; `times` multiplies --batch, because the work of Muon does not depend on the batch, and CLIP's batches are large."""

    name: str
    tower: dict[str, Any]
    objective: dict[str, Any]
    optim: dict[str, Any]
    bar: float | None
    times: int = 1


CASES = [
    Case("blocks frozen", {"freeze": "blocks"}, {}, {}, 2.0),
    Case("objective.ema", {}, {"ema": EmaConfig()}, {}, 0.9),
    Case("optim.kind=muon", {}, {}, {"kind": "muon"}, None),
    Case("optim.kind=muon", {}, {}, {"kind": "muon"}, 0.9, times=4),
]


def step(
    batch: int, tower: Mapping[str, Any], objective: Mapping[str, Any], optim: Mapping[str, Any]
) -> Callable[[], None]:
    """Return a training step of a case."""
    torch.manual_seed(0)
    model = {"backbone": "ViT-S-32", "readout": {"kind": "sparo"}, "vision": dict(tower), "text": dict(tower)}
    config = ClipObjectiveConfig(model=ClipConfig.model_validate(model), **objective)
    engine = LocalEngine(LocalEngineConfig(precision="fp32"), OPTIMIZERS.get(optim.get("kind", "adamw"))(**optim))
    engine.prepare(ClipObjective(config))
    text = torch.randint(300, 40000, (batch, 32))
    text[:, 0], text[:, -1] = 49406, 49407
    data = {"image": torch.randint(0, 255, (batch, 3, 224, 224), dtype=torch.uint8), "text": text}
    return training_step(engine, data, Progress(0, 100, 0))


def kept_steps(batch: int, folder: Path, count: int) -> Callable[[], None]:
    """Return a function that runs `count` training steps on cached tokens, including reading."""
    noise_shards(folder / "shards", 16 * batch)
    tower = {"freeze": "blocks"}
    tree = {
        "name": "kept", "out": str(folder), "batch_size": batch, "steps": 1_000_000,
        "objective": {
            "kind": "clip", "cache": str(folder / "tokens"),
            "model": {"backbone": "ViT-S-32", "readout": {"kind": "sparo"}, "vision": tower, "text": tower},
        },
        "data": {"sources": {"noise": {"shards": str(folder / "shards")}}, "workers": 0, "crop_scale": [1.0, 1.0]},
        "engine": {"precision": "fp32"},
    }  # fmt: skip
    config = resolve(RunConfig, tree, "frozen.py")
    ranks = build_ranks(config.engine, config.world_size, World())
    objective, pipeline, engine = (
        build_objective(config),
        build_pipeline(config),
        build_engine(config.engine, config.optim, ranks),
    )
    pipeline.examples.ready(objective, pipeline.sources, engine.device_context, ranks)
    engine.prepare(objective)
    batches, progress = pipeline.start(), Progress(0, 1_000_000, 0)

    def run() -> None:
        for _ in range(count):
            training_step(engine, next(batches).batch, progress)()  # type: ignore[arg-type]

    return run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--batch", type=int, default=64)
    given = arguments.parse_args()
    rounds, batch = (2, 8) if given.quick else (given.rounds, given.batch)
    plain, rows, several = step(batch, {}, {}, {}), [], 8
    with tempfile.TemporaryDirectory() as folder:
        kept = kept_steps(batch, Path(folder), several)
        pairs = interleave(lambda: several * batch / seconds(kept), lambda: batch / seconds(plain), rounds)
        name = f"cached tokens, reading included, batch {batch}"
        rows.append(row(name, pairs, None if given.quick else 20.0, "samples/s", more_is_better=True))
    for case in CASES:
        times = 1 if given.quick else case.times
        other = step(times * batch, case.tower, case.objective, case.optim)
        beside = plain if times == 1 else step(times * batch, {}, {}, {})
        size, turns = times * batch, min(rounds, max(3, rounds // times))
        pairs = interleave(
            lambda other=other, size=size: size / seconds(other),
            lambda beside=beside, size=size: size / seconds(beside),
            turns,
        )
        bar = None if given.quick else case.bar
        rows.append(row(f"{case.name}, batch {size}", pairs, bar, "samples/s", more_is_better=True))
    report("frozen towers, averages, Muon: ViT-S/32, fp32", rows, given.json)


if __name__ == "__main__":
    main()
