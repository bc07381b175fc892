"""Scores of small students relative to their teacher on Fashion-MNIST, by the size of crops and the number of images.

    python benchmarks/distill_own.py FOLDER [--seeds 0,1,2] [--quick] [--json FILE]

FOLDER is that of benchmarks/dino_own.py, which trains the teachers: `fashion_dinov2_cls_scratch_sSEED`, one per seed.
Students have width 64 and depth 3 and learn from cached tokens, 500 steps on all images or 1,500 on the first shard.
The score is 20-NN. A second call continues where the first one stopped.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from common import parser
from dino_own import sparo
from scipy import stats

RECIPE = {
    "batch_size": 64,
    "objective": {
        "kind": "distill",
        "model": {"image_size": 32, "patch_size": 8, "width": 64, "depth": 3, "heads": 2, "drop_path": 0.0,
                  "weight_init": "xavier", "readout": {"kind": "cls"}},
        "cache": "data/teacher_tokens",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    },
    "optim": {"lr": 2e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.04, "warmup_steps": 50,
              "warmup_from_zero": True, "min_lr": 1e-5, "clip_grad_norm": 3.0},
    "engine": {"device": "cpu", "precision": "fp32", "threads": 1},
}  # fmt: skip
ALL, FIRST = "data/fashion_mnist/train", "data/fashion_mnist/train/00000.tar"
# Name, smallest crop, weight of patches, shards, steps.
CASES = [
    *((f"all_{crop}_{weight:g}", crop, weight, ALL, 500) for crop in (1.0, 0.5, 0.2) for weight in (1.0, 0.0)),
    *((f"few_{crop}_1", crop, 1.0, FIRST, 1500) for crop in (1.0, 0.5)),
]
KNN = {"task": "knn", "layout": "wds", "limit": 5000, "train": "data/fashion_wds", "test": "data/fashion_wds"}


def score(folder: Path, run: str) -> float:
    """Return the 20-NN accuracy of a run in per cent."""
    results = folder / "runs" / run / "evals/results.jsonl"
    if not results.exists() or '"student_knn"' not in results.read_text():
        (folder / "distill_knn.yaml").write_text(yaml.safe_dump({"tasks": {"student_knn": KNN}}))
        sparo(folder, "eval", f"runs/{run}", "--data", "distill_knn.yaml")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    return 100 * next(r for r in reversed(records) if r["name"] == "student_knn")["metrics"]["acc1_k20"]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--seeds", default="0,1,2")
    given = flags.parse_args()
    folder, seeds = given.folder.resolve(), [int(seed) for seed in given.seeds.split(",")]
    scores: dict[str, list[float]] = {"teacher": [score(folder, f"fashion_dinov2_cls_scratch_s{s}") for s in seeds]}
    for name, crop, weight, shards, steps in CASES[:1] if given.quick else CASES:
        for seed in seeds:
            run = f"student{'_quick' if given.quick else ''}_{name}_s{seed}"
            tree = {**RECIPE, "name": run, "seed": seed, "steps": 60 if given.quick else steps}
            tree["data"] = {"workers": 0, "sources": {"images": {"shards": shards}}}
            teacher = {"checkpoint": f"runs/fashion_dinov2_cls_scratch_s{seed}"}
            more = {"teacher": teacher, "crops": {"scale": [crop, 1.0]}, "patch_weight": weight}
            tree["objective"] = {**RECIPE["objective"], **more}
            (folder / "student.yaml").write_text(yaml.safe_dump(tree))
            sparo(folder, "train", "student.yaml")
            scores.setdefault(name, []).append(score(folder, run))
    for name, values in scores.items():
        mean = sum(values) / len(values)
        half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1) if len(values) > 1 else float("nan")
        print(f"{name:12} {mean:.1f} ± {half:.1f}  {[round(v, 1) for v in values]}")
    if given.json:
        given.json.write_text(json.dumps({"seeds": seeds, "scores": scores}, indent=1))


if __name__ == "__main__":
    main()
