"""Distillation with and without cached tokens: steps of ViT-S/16 (CLS) that learns from a frozen ViT-L/14 at 224 pixels.

    python benchmarks/distill.py [--quick] [--json FILE] [--rounds 5] [--batch 8] [--device cpu|cuda]

Both runs read JPEG files from the same shards in the training process. `theirs` runs the teacher in every step; `ours`
reads its tokens (fp16) from the cache, whose filling is not timed. bf16 on a GPU, fp32 on a CPU. The teacher has random weights.
--quick uses ViT-S/14 as the teacher and ViT-T/16 as the student.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from common import device_flag, interleave, noise_shards, parser, report, row, seconds, training_step

from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.world import World
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from sparo_train.train.build import build_engine, build_objective, build_pipeline, build_ranks
from sparo_train.train.run_config import RunConfig


def steps(folder: Path, batch: int, device: str, student: str, cached: bool) -> Callable[[], None]:
    """Return a training step, reading included."""
    tree = {
        "name": "distilled", "out": str(folder), "batch_size": batch, "steps": 1_000_000,
        "objective": {
            "kind": "distill", "model": {"arch": student, "readout": {"kind": "cls"}},
            "teacher": {"checkpoint": str(folder / "teacher.pth"), "image_size": 224},
            "cache": str(folder / "tokens") if cached else None,
        },
        "data": {"sources": {"noise": {"shards": str(folder / "shards")}}, "workers": 0},
        "engine": {"precision": "bf16" if device == "cuda" else "fp32", "device": device},
    }  # fmt: skip
    config = resolve(RunConfig, tree, "distill.py")
    ranks = build_ranks(config.engine, config.world_size, World())
    objective, pipeline = build_objective(config), build_pipeline(config)
    engine = build_engine(config.engine, config.optim, ranks)
    if cached:
        pipeline.examples.ready(objective, pipeline.sources, engine.device_context, ranks)
    engine.prepare(objective)
    batches, progress = pipeline.start(), Progress(1, 1_000_000, 0)
    return lambda: training_step(engine, dict(next(batches).batch), progress)()


def main() -> None:
    arguments = device_flag(parser(__doc__))
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--batch", type=int, default=8)
    given = arguments.parse_args()
    rounds, batch = (2, 2) if given.quick else (given.rounds, given.batch)
    teacher, student = ("vit_small", "vit_tiny") if given.quick else ("vit_large", "vit_small")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        noise_shards(folder / "shards", 8 * batch)
        torch.save(Vit(VitConfig(arch=teacher, patch_size=14)).state_dict(), folder / "teacher.pth")
        ours = steps(folder, batch, given.device, student, cached=True)
        theirs = steps(folder, batch, given.device, student, cached=False)
        pairs = interleave(lambda: batch / seconds(ours), lambda: batch / seconds(theirs), rounds)
    title = f"{student} from cached tokens of {teacher}, reading included, batch {batch}"
    rows = [row(title, pairs, None if given.quick else 5.0, "samples/s", more_is_better=True)]
    report(f"distillation, {given.device}", rows, given.json)


if __name__ == "__main__":
    main()
