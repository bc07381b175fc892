"""Model FLOP/s of whole training steps, and their share of the GPU's dense bf16 peak.

    python benchmarks/mfu.py [--quick] [--models B/32 B/16] [--rounds 9] [--json FILE]

The model FLOPs of a sample are three times the matrix products and attention of its forward pass, counted from the executed
operations (sparo_train/train/meter.py); recomputation is not counted. Published values for CLIP, counted by other rules:
9 to 15 per cent on A100 (open_clip), 39 (NeMo, g/14). Batches are on the device. "theirs" is the same step without
compilation (on a CPU, neither is compiled).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import interleave, parser, report, row, seconds, training_step

from sparo_train.core.contracts import Objective, Progress
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.vit_config import VitConfig
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import DinoObjectiveConfig
from sparo_train.train.meter import FlopCounter, utilisation


def clip(backbone: str) -> Callable[[], Objective]:
    model = ClipConfig.model_validate({"backbone": backbone, "readout": {"kind": "sparo"}})
    return lambda: ClipObjective(ClipObjectiveConfig(model=model))


def dino() -> Objective:
    model = VitConfig.model_validate({"arch": "vit_small", "readout": {"kind": "sparo"}, "drop_path": 0.0})
    return DinoObjective(DinoObjectiveConfig(model=model))


def images_and_texts(batch: int) -> dict[str, torch.Tensor]:
    text = torch.randint(300, 40000, (batch, 77))
    text[:, 0], text[:, -1] = 49406, 49407
    return {"image": torch.randint(0, 255, (batch, 3, 224, 224), dtype=torch.uint8), "text": text}


def crops(batch: int) -> dict[str, torch.Tensor]:
    return {
        "global_crops": torch.randint(0, 255, (batch, 2, 3, 224, 224), dtype=torch.uint8),
        "local_crops": torch.randint(0, 255, (batch, 8, 3, 96, 96), dtype=torch.uint8),
    }


CASES: list[tuple[str, Callable[[], Objective], Callable[[int], dict[str, torch.Tensor]], int]] = [
    ("CLIP+SPARO ViT-B/32", clip("ViT-B-32"), images_and_texts, 1024),
    ("CLIP+SPARO ViT-B/16", clip("ViT-B-16"), images_and_texts, 384),
    ("CLIP+SPARO ViT-L/14", clip("ViT-L-14"), images_and_texts, 128),
    ("DINO+SPARO ViT-S/16", dino, crops, 64),
]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", help="only models whose name contains one of these")
    flags.add_argument("--rounds", type=int, help="default: 3 with --quick, 9 without")
    options = flags.parse_args()
    on_gpu = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []
    cases = CASES[:1] if options.quick else CASES
    for name, build, make, size in cases:
        if options.models and not any(part in name for part in options.models):
            continue
        batch = size if on_gpu else 4
        data, steps = make(batch), {}
        for compiled in (True, False) if on_gpu else (False,):
            torch.manual_seed(0)
            engine = LocalEngine(LocalEngineConfig(precision="bf16", compile=compiled), AdamWConfig())
            engine.prepare(build())
            steps[compiled] = training_step(engine, engine.device_context.to_device(data), Progress(0, 100, 0))
            del engine  # its step keeps it
        flops, device = FlopCounter(build).per_sample(data) * batch, torch.device("cuda" if on_gpu else "cpu")
        compiled = steps.get(True, steps[False])
        pairs = interleave(
            lambda f=compiled, n=flops: n / seconds(f) / 1e12,
            lambda f=steps[False], n=flops: n / seconds(f) / 1e12,
            options.rounds or (3 if options.quick else 9),
        )
        found = row(f"{name}, batch {batch}", pairs, None, "TFLOP/s", True)
        shares = [utilisation(1e12 * found[side], device) for side in ("ours", "theirs")]
        if shares[0] is not None:
            found["name"] += f", MFU {shares[0]:.1%} (without compile {shares[1]:.1%})"
        rows.append(found)
        del steps, compiled
        if on_gpu:
            torch.cuda.empty_cache()
    report("training steps, bf16: compiled blocks / not compiled", rows, options.json)


if __name__ == "__main__":
    main()
