"""`sparo demo`: render scenes, train CLIP and CLIP+SPARO of equal size, score them, and draw a page."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

from evals.encoders.clip_encoder import ClipEncoder
from evals.encoders.loading import load_encoder
from evals.report.results_file import load_predictions, read_records
from evals.sets.base import Pair
from evals.sets.wds import WdsSet
from evals.tasks import textonly
from evals.tasks.result import Result
from sparo_data.synthetic.scenes import training_scene
from sparo_train.core.disk.metrics import read
from sparo_train.train.run_config import RunConfig, load_run

from ..recipes import recipe
from ..views.demo_page import six_rows, text_only_note, write_page
from ..views.results_table import rows_table
from ..views.terminal import console, out
from .making import make_scenes
from .train import exit_if_stopped, train

READOUTS = {
    "CLIP": "{kind: token}",
    "CLIP+SPARO": "{kind: sparo, slots: 32, slot_width: 32, head_width: 32}",
}
_CORPUS = 4000


def run_demo(folder: Path, quick: bool) -> dict[str, dict[str, Result]]:
    """Run the demo in `folder`; if interrupted, the same command continues. Return the printed scores."""
    begin = time.monotonic()
    data = folder / "scenes"
    sizes = {"per_class": 4, "retrieval": 60, "pairs_per_kind": 12} if quick else {}
    make_scenes(data, 400 if quick else 8000, 64, 0, **sizes)
    configs = {name: _config(name, folder, data, quick) for name in READOUTS}
    for name, config in configs.items():
        console.rule(f"training {name}")
        exit_if_stopped(train(config))
    encoders = {name: load_encoder(config.folder) for name, config in configs.items()}
    records = {name: {r.task: r for r in read_records([config.folder])} for name, config in configs.items()}
    # A training evaluates at its end.
    results = {name: {task: one.result for task, one in by_task.items()} for name, by_task in records.items()}
    text_only = score_text_only(data)  # the score of captions without images, which a model has to exceed
    model_sizes = {name: f"{sum(p.numel() for p in e.model.parameters()) / 1e6:.1f} M" for name, e in encoders.items()}
    curves = {name: read(config.folder / "metrics.jsonl", "train") for name, config in configs.items()}
    sparo = encoders["CLIP+SPARO"]
    assert isinstance(sparo, ClipEncoder)
    zeroshot = load_predictions(records["CLIP+SPARO"]["zeroshot"])
    config = next(iter(configs.values()))
    facts = {key: getattr(config, key) for key in ("steps", "batch_size", "seed")}
    facts |= {"scenes": 400 if quick else 8000, "quick": quick, "sizes": model_sizes}
    page = write_page(folder, results, text_only, zeroshot, curves, sparo, data, facts)
    out.print(rows_table(six_rows(results), model_sizes, "sparo demo: per cent with 95 % intervals, one seed"))
    out.print(text_only_note(text_only))
    out.print(
        f"page: {page}   picture: {page.with_name('demo.png')}   {time.monotonic() - begin:.0f} s", soft_wrap=True
    )
    run = shlex.quote(str(configs["CLIP+SPARO"].folder))
    out.print(f"next: sparo slots explore {run}   own data: docs/tutorials/own_images.md", soft_wrap=True)
    return results


def score_text_only(data: Path) -> Result:
    """Score text-only guessers on the caption pairs; `macro` is the best of them, comparable to the models' accuracy."""
    facts: list[Pair] = [pair for _, _, row in WdsSet(data / "pairs", "pairs") for pair in row]
    # Captions with the seed of training, because a guesser may know all that a model could have read.
    corpus = [training_scene(0, index)[1] for index in range(_CORPUS)]
    text_score = textonly.score([f.caption for f in facts], [f.negative_caption for f in facts], corpus)
    return Result("pairs", text_score.n, "macro", {"macro": text_score.value}, text_score.chance)


def _yaml_string(path: Path) -> str:
    """Return a string as YAML; JSON would escape characters beyond 16 bits as surrogates."""
    return json.dumps(str(path), ensure_ascii=False)


def _config(name: str, folder: Path, data: Path, quick: bool) -> RunConfig:
    overrides = [
        f"name={name.lower().replace('+', '_')}",
        f"out={_yaml_string(folder)}",  # quoted: `x #1` would end at the number sign
        f"objective.model.readout={READOUTS[name]}",
        f"data.sources.scenes.shards={_yaml_string(data / 'train')}",
    ]
    for task in ("zeroshot", "heldout", "retrieval", "pairs"):
        root = data / ("zeroshot_heldout" if task == "heldout" else task)
        overrides.append(f"eval.tasks.{task}.root={_yaml_string(root)}")
    overrides += ["steps=200", "eval.every_steps=0"]  # both trainings take minutes on two slow cores
    if quick:
        overrides += [
            "steps=15",
            "optim.warmup_steps=5",
            "log.every_steps=5",
            "checkpoint.every_steps=0",
        ]
    return load_run(recipe("clip/scenes_tiny.yaml"), overrides)
