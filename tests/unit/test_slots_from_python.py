"""Slots of one image in Python, and another number of slots than in training."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from evals.encoders.loading import load_encoder
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.train.run_config import RunConfig
from tests.helpers.processes import sparo
from tests.helpers.recipes import slots_recipe, tiny_recipe


def trained(shards, out, slot_init):
    tree = slots_recipe(shards, out, steps=3, name=slot_init, eval={})
    tree["objective"]["model"]["grouping"]["slot_init"] = slot_init
    config = resolve(RunConfig, tree, "x")
    train(config)
    return str(config.folder)


@pytest.fixture
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))


def test_objects_of_an_image_have_slots_masks_and_shares(shards, tmp_path, image):
    run = trained(shards, tmp_path, "gaussian")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    encoder = load_encoder(run)
    assert torch.equal(torch.rand(3), expected)  # a loop that evaluates keeps its own random numbers
    found = encoder.objects(image)
    assert found.slots.shape == (3, 16) and found.masks.shape == (3, 16, 16) and found.shares.shape == (3,)
    torch.testing.assert_close(found.masks.sum(0), torch.ones(16, 16))
    assert float(found.shares.sum()) == pytest.approx(1)
    pixels = encoder.stack([np.asarray(encoder.transform(image))])
    labels = encoder.masks(pixels)[0]
    assert found.shares.tolist() == pytest.approx([float((labels == k).float().mean()) for k in range(3)])
    assert torch.equal(found.slots.flatten(), encoder.images([image])[0])


def test_sampled_slots_may_be_more_than_in_training(shards, tmp_path, image):
    run = trained(shards, tmp_path, "gaussian")
    more = load_encoder(run, slots=6)
    assert more.slots == 6 and more.label.endswith("?slots=6") and len(more.objects(image).shares) == 6
    assert torch.equal(load_encoder(f"{run}?slots=6").images([image]), more.images([image]))
    assert torch.equal(load_encoder(run, slots=3).images([image]), load_encoder(run).images([image]))
    assert more.architecture != load_encoder(run).architecture  # so that stored features are not mixed up
    step = f"{run}/checkpoints/step-00000003"
    assert load_encoder(f"{step}?slots=5").slots == 5


def test_a_number_that_does_not_fit_is_refused(shards, tmp_path):
    learned = trained(shards, tmp_path, "learned")
    with pytest.raises(ConfigError, match=r"\?slots=4: the model has 3 slots with slot_init=learned"):
        load_encoder(learned, slots=4)
    assert load_encoder(learned, slots=3).slots == 3
    config = resolve(RunConfig, tiny_recipe(shards, tmp_path, steps=4, name="clip"), "x")
    train(config)
    with pytest.raises(
        ConfigError, match=r"only in models whose slots compete for tokens \(slot attention\), got objective\.kind=clip"
    ):
        load_encoder(config.folder, slots=4)
    with pytest.raises(ConfigError, match="expected a number of slots from 1 to 4096, got 'many'"):
        load_encoder(f"{learned}?slots=many")
    with pytest.raises(ConfigError, match="expected a number of slots from 1 to 4096, got '0'"):
        load_encoder(learned, slots=0)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_encoder(f"{tmp_path}/nothing?slots=4")
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="only runs of slot models accept a number of slots"):
        load_encoder(f"{tmp_path}/weights.pt?slots=4")


def test_the_command_line_scores_a_run_with_more_slots(shards, tmp_path):
    run = trained(shards, tmp_path, "gaussian")
    tasks = {"tasks": {"drawn": {"task": "reconstruction", "root": "set"}}}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    done = sparo("eval", f"{run}?slots=5", "--tasks", "nothing", cwd=tmp_path)
    assert done.returncode == 2 and "nothing" in done.stderr and "Traceback" not in done.stderr
