"""Multi-crop: torchvision's distributions and PIL's pixels, a generator per sample, any number of parts."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torchvision.transforms import functional as F

from sparo_train.data.examples import multi_crop as augment
from sparo_train.data.examples.multi_crop import CropExamples, CropsConfig, crop, multi_crop, random_tile, stain
from sparo_train.data.read.loader import Pipeline
from sparo_train.data.sources.base import DataConfig, open_source
from sparo_train.data.sources.folder import FolderConfig
from sparo_train.data.sources.shards import ShardsConfig


@pytest.fixture(scope="module")
def image():
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 255, (13, 17, 3), dtype=np.uint8))
    return small.resize((120, 90), Image.Resampling.BICUBIC)


def apart(ours, theirs):
    difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
    return difference.max(), difference.mean()


class Fixed:
    """Returns given draws in order."""

    def __init__(self, *values, order=(0, 1, 2, 3)):
        self.values, self.order = list(values), order

    def uniform(self, low, high):
        value = self.values.pop(0)
        assert low <= value <= high
        return value

    def permutation(self, _n):
        return self.order


@pytest.mark.parametrize("factor", [0.6, 0.9, 1.4])
def test_colour_operations_are_pils_up_to_rounding(image, factor):
    x = np.asarray(image)
    strengths = np.eye(4) * 0.4
    for number, enhance in enumerate((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)):
        draws = [1.0, 1.0, 1.0, 0.0]
        draws[number] = factor
        ours = augment.jitter(x, tuple(strengths[number]), Fixed(*draws))
        assert apart(ours, enhance(image).enhance(factor))[0] <= 2, enhance
    assert apart(augment.gray(x), image.convert("L").convert("RGB"))[0] <= 1
    assert apart(augment.solarize(x), ImageOps.solarize(image))[0] == 0
    assert apart(augment.flip(x), ImageOps.mirror(image))[0] == 0


def test_hue_and_blur_are_close_to_pils(image):
    x = np.asarray(image)
    for shift in (-0.1, -0.03, 0.07):
        assert apart(augment.hue(x, shift), F.adjust_hue(image, shift))[1] < 2  # both round hues to 1/256
    for radius in (0.1, 0.7, 1.3, 2.0):
        ours = augment.blur(x, (0.1, 2.0), Fixed(radius))
        most, mean = apart(ours, image.filter(ImageFilter.GaussianBlur(radius)))
        assert most <= 8 and mean < 1, (radius, most, mean)


def test_operations_come_in_random_order(image):
    x = np.asarray(image)
    one, two = (
        augment.jitter(x, (0.4, 0.4, 0.2, 0.1), Fixed(1.4, 0.6, 1.2, 0.1, order=order))
        for order in ([0, 1, 2, 3], [3, 2, 1, 0])
    )
    assert not np.array_equal(one, two)


def test_probabilities_are_those_of_the_recipe(image):
    """Recognise each operation by its effect on the image in 2,000 draws; frequencies within four standard errors."""
    off = {"hflip": 0.0, "jitter_prob": 0.0, "gray_prob": 0.0, "blur_probs": (0.0, 0.0, 0.0), "solarize_prob": 0.0}
    whole = {"global_crops_scale": (1.0, 1.0), "local_crops_scale": (1.0, 1.0)}
    square = image.resize((24, 24))
    for change, number, wanted in [
        ({"hflip": 0.5}, 0, 0.5),
        ({"jitter_prob": 0.8}, 0, 0.8),
        ({"gray_prob": 0.2}, 3, 0.2),
        ({"blur_probs": (1.0, 0.1, 0.5), "blur_radius": (1.0, 2.0)}, 0, 1.0),
        ({"blur_probs": (1.0, 0.1, 0.5), "blur_radius": (1.0, 2.0)}, 1, 0.1),
        ({"blur_probs": (1.0, 0.1, 0.5), "blur_radius": (1.0, 2.0)}, 4, 0.5),
        ({"solarize_prob": 0.2}, 1, 0.2),
        ({"solarize_prob": 0.2}, 0, 0.0),
    ]:
        config, rng = CropsConfig(**{**off, **whole, **change}), np.random.default_rng(0)
        plain = crop(square, 24, number, CropsConfig(**{**off, **whole}), np.random.default_rng(1))
        changed = np.mean([not np.array_equal(crop(square, 24, number, config, rng), plain) for _ in range(2000)])
        assert abs(changed - wanted) <= 4 * np.sqrt(0.25 / 2000), (change, number, changed)


def test_sizes_and_draws(image):
    config = CropsConfig(local_crops_number=3, local_size=16)
    large, small = multi_crop(image, 32, config, np.random.default_rng(5)).values()
    assert large.shape == (2, 3, 32, 32) and small.shape == (3, 3, 16, 16) and large.dtype == np.uint8
    again = multi_crop(image, 32, config, np.random.default_rng(5), plain_size=48)
    assert np.array_equal(large, again["global_crops"]) and not np.array_equal(large[0], large[1])
    # Plain crops show the same regions. Without changes of colour they equal the global crops.
    assert again["plain_crops"].shape == (2, 3, 48, 48)
    shrunk = again["plain_crops"].reshape(2, 3, 16, 3, 16, 3).mean((3, 5))
    assert (
        np.corrcoef(shrunk[0].ravel(), again["global_crops"][0].reshape(3, 16, 2, 16, 2).mean((2, 4)).ravel())[0, 1]
        > 0.5
    )
    still = config.model_copy(
        update={"jitter_prob": 0, "gray_prob": 0, "blur_probs": (0, 0, 0), "solarize_prob": 0, "rotate90": 0.5}
    )
    same = multi_crop(image, 32, still, np.random.default_rng(5), plain_size=32)
    assert np.array_equal(same["plain_crops"], same["global_crops"])


def test_a_batch_does_not_depend_on_ranks_or_workers(shards):
    def batches(rank, size, workers):
        config = DataConfig(
            sources={"a": ShardsConfig(shards=str(shards))}, workers=workers, streams=4, shuffle_window=16, chunk=4
        )
        examples = CropExamples(config, CropsConfig(local_crops_number=2, local_size=16), 32, paths=4)
        stream = Pipeline(config, 8, examples, seed=3, rank=rank, world_size=size).start()
        found = [next(stream).batch for _ in range(3)]
        stream.close()
        return found

    whole, halves = batches(0, 1, 0), [batches(rank, 2, 1) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        assert {k: tuple(v.shape) for k, v in batch.items()} == {
            "global_crops": (8, 2, 3, 32, 32),
            "local_crops": (8, 2, 3, 16, 16),
            "drop": (8, 4, 4),
        }
        for key, value in batch.items():
            assert torch.equal(value, torch.cat([half[step][key] for half in halves])), key


def test_orientation_and_stain_of_histology():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    # Without a change, converting to stains and back is the identity up to rounding.
    assert np.abs(stain(pixels, 0.0, rng).astype(int) - pixels).max() <= 1
    changed = stain(pixels, 0.05, np.random.default_rng(1)).astype(int)
    assert 0 < np.abs(changed - pixels).mean() < 40
    # Pixel by pixel: optical densities, amounts of the three stains, and back.
    draws = np.random.default_rng(1)
    scale, shift = draws.uniform(0.95, 1.05, 3), draws.uniform(-0.05, 0.05, 3)
    basis = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
    for row, column in ((0, 0), (3, 17), (23, 5)):
        density = np.array([-np.log((v + 1) / 256) for v in pixels[row, column].astype(float)])
        amounts = np.linalg.solve(basis.T, density) * scale + shift
        expected = np.clip(np.rint(256 * np.exp(-(basis.T @ amounts)) - 1), 0, 255)
        assert np.abs(changed[row, column] - expected).max() <= 1
    plain = {"hflip": 0.0, "jitter_prob": 0.0, "gray_prob": 0.0, "blur_probs": (0.0, 0.0, 0.0), "solarize_prob": 0.0}
    whole = CropsConfig(global_crops_scale=(1.0, 1.0), **plain)
    base = crop(pixels, 24, 0, whole, np.random.default_rng(2))
    flipped = crop(pixels, 24, 0, whole.model_copy(update={"vflip": 1.0}), np.random.default_rng(2))
    assert (flipped == base[::-1]).all()
    turned = crop(pixels, 24, 0, whole.model_copy(update={"rotate90": 1.0}), np.random.default_rng(2))
    assert any((turned == np.rot90(base, k)).all() for k in (1, 2, 3)) and not (turned == base).all()


@pytest.mark.parametrize("decode", ["exact", "fast"])
def test_all_crops_of_a_sample_come_from_one_tile_at_full_resolution(decode, tmp_path):
    # Each pixel's colour is its position, so a crop shows its origin.
    rows, columns = np.mgrid[:250, :250].astype(np.uint8)
    slide = np.stack([rows, columns, np.zeros_like(rows)], axis=-1)
    Image.fromarray(slide).save(tmp_path / "slide.png")
    plain = {"hflip": 0.0, "jitter_prob": 0.0, "gray_prob": 0.0, "blur_probs": (0.0, 0.0, 0.0), "solarize_prob": 0.0}
    config = DataConfig(sources={"a": FolderConfig(folder=str(tmp_path))}, decode=decode)
    crops = CropsConfig(tile=40, local_crops_number=4, local_size=8, global_crops_scale=(1.0, 1.0), **plain)
    examples = CropExamples(config, crops, 40)
    fields = {"png": (tmp_path / "slide.png").read_bytes()}
    source = open_source("a", FolderConfig(folder=str(tmp_path)))
    corners = set()
    for seed in range(12):
        made = examples.prepare(fields, source, np.random.default_rng(seed))
        for kind in ("global_crops", "local_crops"):
            values = np.concatenate([view.reshape(3, -1)[:2] for view in made[kind]], axis=1).astype(int)
            assert (values.max(1) - values.min(1) < 40).all()
        whole = made["global_crops"][0]
        top, left = whole[0, 0, 0], whole[1, 0, 0]
        assert np.array_equal(whole, slide[top : top + 40, left : left + 40].transpose(2, 0, 1))
        corners.add((int(top), int(left)))
    assert len(corners) == 12
    # A side that is shorter than the tile is used as a whole.
    assert random_tile(Image.new("RGB", (30, 90)), 40, np.random.default_rng(0)).size == (30, 40)
    assert random_tile(slide[:20], 40, np.random.default_rng(0)).shape == (20, 40, 3)
