"""DINO on two small sets: with iBOT and KoLeo or without, with SPARO or without, from scratch or from the other set's backbone.

    python benchmarks/dino_own.py FOLDER [--steps 500] [--seeds 0,1,2] [--quick] [--json FILE]

The sets are Fashion-MNIST (28 pixels, enlarged to 32) and `sparo data tissue` (48 pixels, masks, patients). All runs have
the same number of images and of steps. A run that continues starts from the other set's run with the same objective,
readout and seed; its positions are resized. FOLDER keeps data, runs and scores; a second call continues where the first
one stopped. Scores: k-NN, linear probe, few-shot probe and, for tissue, a linear segmentation probe.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import yaml
from common import parser
from scipy import stats

RECIPE = {
    "batch_size": 64,
    "objective": {
        "kind": "dino",
        "model": {"patch_size": 8, "width": 96, "depth": 4, "heads": 3, "drop_path": 0.0, "weight_init": "xavier"},
        "head": {"out_dim": 512, "hidden_dim": 256, "bottleneck_dim": 64, "weight_init": "xavier"},
        "mean": [0.5, 0.5, 0.5],  # equal in both sets, because a start keeps them
        "std": [0.5, 0.5, 0.5],
        "momentum_teacher": 0.98,
        "freeze_last_layer": 0,
    },
    "data": {"workers": 1},
    "optim": {"lr": 2e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.04, "weight_decay_end": 0.4,
              "warmup_from_zero": True, "min_lr": 1e-5, "clip_grad_norm": 3.0, "clip_per": "tensor"},
    "engine": {"device": "cpu", "precision": "fp32", "threads": 1},
}  # fmt: skip
CROPS = {"local_crops_number": 2, "global_crops_scale": [0.6, 1.0], "local_crops_scale": [0.3, 0.7]}
SETS = {
    "tissue": {
        "objective": {
            "model": {"image_size": 48},
            "crops": {**CROPS, "local_size": 24, "vflip": 0.5, "rotate90": 0.75, "stain": 0.05, "jitter": [0.2, 0.2, 0.1, 0.05],
                      "gray_prob": 0.0, "solarize_prob": 0.0, "blur_probs": [0.3, 0.1, 0.2], "blur_radius": [0.1, 1.0]},
        },
        "data": {"sources": {"images": {"folder": "data/tissue/images"}}},
    },
    "fashion": {
        "objective": {
            "model": {"image_size": 32},
            "crops": {**CROPS, "local_size": 16, "jitter": [0.6, 0.6, 0.0, 0.0], "jitter_prob": 0.9, "gray_prob": 0.0,
                      "blur_probs": [0.3, 0.1, 0.2], "blur_radius": [0.1, 1.0], "solarize_prob": 0.2},
        },
        "data": {"sources": {"images": {"shards": "data/fashion_mnist/train"}}},
    },
}  # fmt: skip
SIDES = {"tissue": 48, "fashion": 28}  # pixels of the images
LOSSES = {"dino": {}, "dinov2": {"ibot": {}, "koleo": 0.1}}
READOUTS = {"cls": {"kind": "cls"}, "sparo": {"kind": "sparo", "slots": 16, "slot_width": 32, "head_width": 32}}
STARTS = ("scratch", "continued")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--steps", type=int, default=500)
    flags.add_argument("--seeds", default="0,1,2")
    given = flags.parse_args()
    folder, steps = given.folder.resolve(), 10 if given.quick else given.steps
    seeds = [int(seed) for seed in given.seeds.split(",")]
    runs = list(itertools.product(STARTS, SETS, LOSSES, READOUTS, seeds))
    if given.quick:  # two runs from scratch
        runs, seeds = [("scratch", "tissue", losses, "cls", seeds[0]) for losses in LOSSES], seeds[:1]
    make_data(folder)
    write_tasks(folder)
    for start, name, losses, readout, seed in runs:
        train(folder, steps, seed, start, name, losses, readout)
        score(folder, run_name(start, name, losses, readout, seed))
    for name in SETS:  # what the pixels themselves give
        score_once(folder, f"pixels:{SIDES[name]}", name, folder / "baseline" / name)
    rows = {name: table(folder, name, seeds) for name in SETS}
    print_rows(rows)
    if given.json:
        given.json.write_text(json.dumps({"steps": steps, "seeds": seeds, "rows": rows}, indent=1))


def make_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data/tissue/tissue.csv").exists():
        sparo(folder, "data", "tissue", "data/tissue", "--patients", "100", "--tiles", "60")
    if not (folder / "data/fashion_mnist/zeroshot").exists():
        sparo(folder, "data", "fashion-mnist", "data/fashion_mnist")
    # The same images in the layout that the few-shot probe reads.
    for split, place in (("train", "train"), ("test", "zeroshot/test")):
        shards = sorted((folder / "data/fashion_mnist" / place).glob("*.tar"))
        to = folder / "data/fashion_wds" / split
        to.mkdir(parents=True, exist_ok=True)
        (to / "nshards.txt").write_text(str(len(shards)))
        for number, shard in enumerate(shards):
            (to / f"{number}.tar").unlink(missing_ok=True)
            (to / f"{number}.tar").symlink_to(shard)


def run_name(start: str, name: str, losses: str, readout: str, seed: int) -> str:
    return f"{name}_{losses}_{readout}_{start}_s{seed}"


def train(folder: Path, steps: int, seed: int, start: str, name: str, losses: str, readout: str) -> None:
    """Train one run, unless it is finished."""
    run = run_name(start, name, losses, readout, seed)
    tree = merged(
        RECIPE, SETS[name], {"objective": LOSSES[losses]}, {"objective": {"model": {"readout": READOUTS[readout]}}}
    )
    tree |= {"name": run, "steps": steps, "seed": seed}
    tree["optim"]["warmup_steps"] = steps // 10
    if start == "continued":
        other = next(other for other in SETS if other != name)
        tree["start_from"] = f"runs/{run_name('scratch', other, losses, readout, seed)}"
    recipe = folder / "recipes" / f"{run}.yaml"
    recipe.parent.mkdir(exist_ok=True)
    recipe.write_text(yaml.safe_dump(tree))
    sparo(folder, "train", str(recipe))


def write_tasks(folder: Path) -> None:
    """Write a file of tasks per set."""
    columns = {"file": "tissue.csv", "split": "split", "group": "patient"}
    classes = columns | {"label": "{tissue}"}
    whole = {"val_proportion": 0, "weight_decay": 1e-4}  # the same for all runs, instead of a search for each
    few = {**whole, "fewshot_k": 5, "repeats": 10, "epochs": 100}
    table, tiles = {"layout": "table"}, {"train": "data/tissue", "test": "data/tissue"}
    shards, limit = {"train": "data/fashion_wds", "test": "data/fashion_wds", "layout": "wds"}, {"limit": 5000}
    tasks = {
        "tissue": {
            "knn": {"task": "knn", **table, **tiles, "columns": classes},
            "linear": {"task": "probe", **table, "root": "data/tissue", **whole, "columns": classes},
            "few_shot": {"task": "probe", **table, "root": "data/tissue", **few, "columns": classes},
            "miou": {"task": "linear_segmentation", **table, **tiles, "limit": 1000, "columns": columns | {"mask": "{mask}"}},
        },
        "fashion": {
            "knn": {"task": "knn", **shards, **limit},
            "linear": {"task": "probe", "root": "data/fashion_wds", **whole, **limit},
            "few_shot": {"task": "probe", "root": "data/fashion_wds", **few, **limit},
        },
    }  # fmt: skip
    for name, entries in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"tasks": entries}))


def score(folder: Path, run: str) -> None:
    score_once(folder, f"runs/{run}", run.partition("_")[0], folder / "runs" / run / "evals")


def score_once(folder: Path, checkpoint: str, name: str, results: Path) -> None:
    """Score the tasks of a set, unless they are scored."""
    tasks = yaml.safe_load((folder / f"{name}.yaml").read_text())["tasks"]
    done = set(values_of(results))
    lacked = {"linear_segmentation"} if checkpoint.startswith("pixels") else set()  # raw pixels have no patches
    left = [task for task, keys in tasks.items() if task not in done and keys["task"] not in lacked]
    if left:
        where = [] if checkpoint.startswith("runs/") else ["--results", str(results)]
        sparo(folder, "eval", checkpoint, "--data", f"{name}.yaml", "--tasks", ",".join(left), *where)


def values_of(results: Path) -> dict[str, float]:
    """Return the headline score of each task."""
    path = results / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {line["name"]: line["metrics"][line["headline"]] for line in lines}


def table(folder: Path, name: str, seeds: list[int]) -> list[dict]:
    """Return the rows of a set: mean over seeds, with half of its 95 % t-interval."""
    pixels = values_of(folder / "baseline" / name)
    rows = [{"run": "raw pixels", **{task: f"{100 * value:.1f}" for task, value in pixels.items()}}]
    for start, losses, readout in itertools.product(STARTS, LOSSES, READOUTS):
        runs = [values_of(folder / "runs" / run_name(start, name, losses, readout, seed) / "evals") for seed in seeds]
        if not all(runs):  # --quick
            continue
        cells = {task: mean_and_half([100 * run[task] for run in runs]) for task in runs[0]}
        rows.append({"run": f"{losses}, {readout}, {start}", **cells})
    return rows


def print_rows(rows: dict[str, list[dict]]) -> None:
    for name, lines in rows.items():
        columns = list(dict.fromkeys(key for line in lines for key in line))
        print(f"\n{name}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for line in lines:
            print(f"| {' | '.join(line.get(column, '-') for column in columns)} |")


def mean_and_half(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.1f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.1f} ± {half:.1f}"


def merged(*trees: dict) -> dict:
    out: dict = {}
    for tree in trees:
        for key, value in tree.items():
            # a readout is replaced as a whole
            out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def sparo(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "launch.cli", *words]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | {"NO_COLOR": "1"}, stdout=subprocess.PIPE, text=True, check=False
    )
    print(*result.stdout.splitlines()[-1:], flush=True)
    if result.returncode:
        sys.exit(f"{' '.join(words)}: exit code {result.returncode}\n{result.stdout}")


if __name__ == "__main__":
    main()
