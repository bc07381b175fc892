"""Train every entry of `sparo.readouts` with the demo's recipe, score it, and load its export, also with open_clip."""

from pathlib import Path

import open_clip
import pytest
import torch

import sparo_train.openclip  # noqa: F401
from evals.encoders.loading import load_encoder
from evals.interop.exporting import export_run
from launch.commands.train import train
from sparo_train.core.disk import metrics
from sparo_train.core.registries import READOUTS
from sparo_train.train.run_config import load_run
from tests.helpers.samples import eval_sets

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "sparo": "slots: 8, slot_width: 16, head_width: 16", "attpool": "slots: 8, slot_width: 16", "ep": "slots: 8, slot_width: 16",
    "coca": "heads: 4, text: true", "map": "head_width: 32, text: true", "fdt": "codes: 64, width: 32", "flair": "heads: 4",
    "slot_attention": "slots: 8, slot_width: 16",
}  # fmt: skip
SIGMOID = [
    "objective.loss.kind=sigmoid",
    "objective.model.init_logit_bias=-10",
    "objective.model.init_logit_scale=2.3026",
]


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(set(READOUTS.names()) - {"cls"}))  # cls: DINO's name for token
def test_every_readout_trains_with_the_recipe_of_the_demo(kind, shards, tmp_path):
    task = eval_sets(tmp_path / "sets")["ret"]
    words = [f"objective.model.readout={{kind: {kind}, {SIZES.get(kind, '')}}}", *(SIGMOID if kind == "flair" else [])]
    small = [
        "batch_size=16",
        "steps=3",
        "optim.warmup_steps=0",
        "data.workers=0",
        "log.every_steps=1",
        "log.tensorboard=false",
    ]
    place = [
        f"data.sources.scenes.shards={shards}",
        f"out={tmp_path}",
        "name=run",
        "engine.device=cpu",
        "eval.every_steps=0",
    ]
    tasks = f"eval.tasks={{retrieval: {{task: retrieval, root: {task['root']}, k: [1], workers: 0}}}}"
    config = load_run(ROOT / "configs/clip/scenes_tiny.yaml", [*words, *small, *place, tasks])
    assert train(config).reason == "finished"
    rows = [row for row in metrics.read(tmp_path / "run/metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 3 and all(0 < row["loss"] < 100 for row in rows)
    assert (tmp_path / "run/evals/step-00000003.json").exists()
    folder = export_run(tmp_path / "run", tmp_path / "export", None)
    ours, again = load_encoder(tmp_path / "run"), load_encoder(folder)
    theirs, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    image = torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8)
    tokens = ours.tokenize(["a red cube", "two things"])
    with torch.no_grad():
        expected = ours.encode(image).clone(), ours.text(["a red cube", "two things"])
        for one, other in zip(
            expected, (again.encode(image).clone(), again.text(["a red cube", "two things"])), strict=True
        ):
            assert torch.equal(one, other)
        stock = theirs.eval().encode_image(ours.normalize(image), True), theirs.encode_text(tokens, True)
    for one, other in zip(expected, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
