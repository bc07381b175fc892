"""`crop_area` of masks and reconstruction, and the Voronoi baseline."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from evals.encoders.loading import load_encoder
from evals.sets.base import EvalSet
from object_centric.tasks.cropped_set import CroppedSet
from object_centric.tasks.mask_task import MasksTaskConfig
from sparo_data.synthetic.tetrominoes import TetrominoesConfig, make_tetrominoes
from sparo_train.core.errors import ConfigError
from tests.helpers.processes import sparo


class OneImage(EvalSet):
    """Return an image whose label map has the numbers of its pixels."""

    def __init__(self, width, height, key):
        self.image, self.key = Image.fromarray(numbered(width, height)), key
        self.root, self.kind = "memory", "masks"

    def __len__(self):
        return 1

    def read(self, number):
        return self.key, self.image, numbers(self.image)

    def identity(self):
        return self.key

    def stamp(self):
        return ""


def numbers(image):
    table = np.asarray(image).astype(np.int64)
    return table[..., 0] + 256 * table[..., 1]


def numbered(width, height):
    place = np.arange(width * height).reshape(height, width)
    return np.stack([place % 256, place // 256, place * 0], -1).astype(np.uint8)


@given(width=st.integers(2, 60), height=st.integers(2, 60), area=st.floats(0.01, 1), key=st.text(max_size=9))
@settings(max_examples=60, deadline=None)
def test_a_crop_is_a_square_of_the_area_with_its_own_labels(width, height, area, key):
    whole = OneImage(width, height, key)
    cropped = CroppedSet(whole, area)
    name, image, labels = cropped.read(0)
    side = image.width
    assert name == key and image.size == (side, side) and labels.shape == (side, side)
    assert side == min(width, height) or side**2 >= area * width * height - 2 * side
    # Image and labels show the same pixels.
    assert np.array_equal(labels, numbers(image))
    again = cropped.read(0)
    assert np.array_equal(again[2], labels), "equal at every reading"
    assert cropped.identity() not in (whole.identity(), CroppedSet(whole, area / 2).identity())


@pytest.mark.parametrize("area", [0, 1.5, -1])
def test_an_impossible_area_is_refused(area):
    with pytest.raises(ValueError, match="crop_area"):
        MasksTaskConfig.model_validate({"task": "masks", "root": "x", "crop_area": area})


def test_voronoi_masks_are_the_nearest_points_whatever_the_batch():
    encoder = load_encoder("voronoi:5@16")
    pixels = torch.randint(0, 255, (3, 3, 16, 16), dtype=torch.uint8)
    masks, points = encoder.masks(pixels).view(3, 16, 16), encoder.encode(pixels).view(3, 5, 2)
    for image, row, column in ((0, 0, 0), (1, 15, 3), (2, 7, 7)):
        place = torch.tensor([(row + 0.5) / 16, (column + 0.5) / 16])
        assert int(masks[image, row, column]) == int((points[image] - place).norm(dim=-1).argmin())
    assert torch.equal(encoder.masks(pixels[1:2])[0], masks[1].flatten())
    assert not torch.equal(points[0], points[1])
    for wrong in ("5", "5@", "0@16", "5@16@16", "x@y", "9999@16"):
        with pytest.raises(ConfigError, match="expected voronoi:SLOTS@SIZE"):
            load_encoder(f"voronoi:{wrong}")


def test_both_are_scored_from_the_command_line(tmp_path):
    make_tetrominoes(tmp_path / "t", TetrominoesConfig(train=8, test=20))
    tasks = {
        name: {"task": "masks", "root": str(tmp_path / "t/masks"), **keys}
        for name, keys in (("whole", {}), ("cropped", {"crop_area": 0.25}))
    }
    (tmp_path / "tasks.yaml").write_text(json.dumps({"tasks": tasks}))
    done = sparo("eval", "voronoi:4@35", "--data", "tasks.yaml", "--results", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "found/results.jsonl").read_text().splitlines()]
    whole, cropped = (next(line for line in lines if line["name"] == name) for name in tasks)
    assert 0 < whole["metrics"]["fg_ari"] < 0.9 and whole["metrics"] != cropped["metrics"]
    assert cropped["options"]["crop_area"] == 0.25 and "crop_area" not in whole["options"]
    assert whole["data"] != cropped["data"]
    done = sparo("eval", "voronoi:4@35", "--data", "tasks.yaml", "--tasks", "whole", "--limit", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
