"""Images that grow during a run, and captions that are drawn per visit: each step has its size and captions after stops and on every engine."""

import json

import pytest
import torch
from open_clip.model import resize_pos_embed

from launch.commands.train import train
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.train.build import build_objective
from sparo_train.train.dry_run import dry_run
from sparo_train.train.meter import FlopCounter
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample
from tests.parity.test_accumulate import DDP, FSDP2, ZERO_2


@pytest.fixture
def shards(tmp_path):
    """Write 96 samples of three captions each: a text, and a list of two in the JSON."""
    rows = (
        (key, {**row, "json": json.dumps({"tags": [f"tag {key}", f"word {key}"]}).encode()})
        for key, row in map(sample, range(96))
    )
    write_shards(tmp_path / "shards", rows, 24)
    return tmp_path / "shards"


def _tree(shards, folder, **changes):
    tree = tiny_recipe(shards, folder, **changes)
    tree["objective"]["model"]["vision"] |= {"image_size": 64, "patch_dropout": 0.0}
    tree["objective"]["image_sizes"] = [[0, 32], [0.5, 48], [0.75, 64]]
    tree["data"]["sources"]["a"]["captions"] = {"txt": 0.5, "json:tags": 0.5}
    return tree


def _run(tree, *words):
    return resolve(RunConfig, override(tree, list(words), RunConfig), "x")


def test_a_smaller_image_has_the_positions_of_a_smaller_model():
    torch.manual_seed(0)
    tree = {"text": {"context_length": 8, "width": 32, "heads": 2, "layers": 2}, "readout": {"kind": "token"}}
    vision = {"patch_size": 16, "width": 32, "layers": 2, "head_width": 16}
    large = Clip(ClipConfig.model_validate({**tree, "vision": {**vision, "image_size": 64}})).eval()
    small = Clip(ClipConfig.model_validate({**tree, "vision": {**vision, "image_size": 48}})).eval()
    weights = large.state_dict()
    resize_pos_embed(weights, small, antialias=True)
    small.load_state_dict(weights)
    image = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(large.encode_image(image), small.encode_image(image))
    large.encode_image(image).sum().backward()
    assert large.visual.positional_embedding.grad[1:].abs().sum(1).gt(0).all()  # all positions are trained


def test_sizes_follow_the_steps_through_a_stop(shards, tmp_path):
    tree = _tree(shards, tmp_path)
    objective = build_objective(_run(tree))
    batch = {
        "image": torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8),
        "text": torch.zeros(2, 8, dtype=torch.int64),
    }
    seen = [objective.preprocess_batch(batch, Progress(step, 12, 0))["image"] for step in range(12)]
    assert [image.shape[-1] for image in seen] == [32] * 6 + [48] * 3 + [64] * 3
    assert seen[0].dtype == torch.uint8 and torch.equal(seen[11], batch["image"])
    flat = {"image": torch.full((1, 3, 64, 64), 200, dtype=torch.uint8)}
    assert torch.equal(objective.preprocess_batch(flat, Progress(0, 12, 0))["image"], flat["image"][..., :32, :32])
    train(_run(tree, "name=whole"))
    train(_run(tree, "name=broken", "stop_after_steps=7"))
    train(_run(tree, "name=broken"))
    losses = [[r["loss"] for r in metrics.read(tmp_path / f"{n}/metrics.jsonl", "train")] for n in ("whole", "broken")]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    # Other draws make another run, so the runs above did not use one caption in every visit.
    train(_run(tree, "name=one_caption", "data.sources.a.captions=null"))
    assert metrics.read(tmp_path / "one_caption/metrics.jsonl", "train")[0]["loss"] != losses[0][0]
    whole, broken = (store.read_part(tmp_path / f"{n}/checkpoints/step-00000012", "model") for n in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    flops = FlopCounter(lambda: build_objective(_run(tree)))
    costs = [flops.per_sample(objective.preprocess_batch(batch, Progress(step, 12, 0))) for step in (0, 6, 11)]
    assert costs == sorted(set(costs))


def _on_ranks(ranks, config):
    train(config, ranks)


@pytest.mark.parametrize("engine", [DDP, FSDP2, ZERO_2])
def test_ranks_and_micro_batches_see_the_same(shards, tmp_path, engine):
    tree = _tree(shards, tmp_path, batch_size=12, steps=6)
    tree["data"] |= {"workers": 0, "streams": 12}
    train(_run(tree, "name=one"))
    run_ranks(2, _on_ranks, _run({**tree, "name": "two", "engine": engine, "micro_batch_size": 3}))
    one, two = (store.read_part(tmp_path / f"{n}/checkpoints/step-00000006", "model") for n in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["objective.image_sizes=[[0.1, 32], [0.5, 64]]"],
            r"in the list of \[start, pixels\], the `start` values must increase",
        ),
        (
            ["objective.image_sizes=[[0, 32], [0.5, 48], [0.5, 64]]"],
            r"in the list of \[start, pixels\], the `start` values must increase",
        ),
        (["objective.image_sizes=[[0, 40], [0.5, 64]]"], "multiple of patch_size=16 .* got 40"),
        (["objective.image_sizes=[[0, 80], [0.5, 64]]"], "multiple of patch_size=16 .* got 80"),
        (
            ["objective.image_sizes=[[0, 32], [0.5, 48]]"],
            "the last size must equal model.vision.image_size=64, at which the model is scored, got 48",
        ),
        (["objective.model.vision.patch_dropout=0.5"], "cannot be combined with vision.timm_model_name"),
    ],
)
def test_invalid_image_sizes_are_refused(shards, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        _run(_tree(shards, tmp_path), *words)


def test_a_size_that_no_step_reaches_is_refused(shards, tmp_path):
    late = _run(_tree(shards, tmp_path, steps=6), "objective.image_sizes=[[0, 32], [0.9, 64]]")
    for begin in (train, dry_run):
        with pytest.raises(
            ConfigError,
            match=r"the size with start 0.9 would never be used: the start of the last of the 6 steps",
        ):
            begin(late)
    assert not late.folder.exists() and dry_run(late.model_copy(update={"steps": 10})).steps == 10
