"""Pictures of slots: attention is drawn at the right place, the paper's filter works as described, and foreign text is escaped."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from evals.encoders.pixels import Pixels, SquarePixels
from evals.slots.attend import Attended, attend, filter_slots, gallery
from evals.slots.overlay import image_crop, overlay
from launch.views.slot_report import choose_example_slots
from object_centric.pictures.panels import background_label, colour_labels, colour_slots
from sparo_train.core.errors import ConfigError
from tests.unit.test_slot_studies import clip


class Cut:
    """An encoder with the parts that drawing needs."""

    label = "cut"

    def __init__(self, transform):
        self.transform = transform


@pytest.mark.parametrize("size", [(90, 60), (60, 90), (61, 60), (60, 60)])
@pytest.mark.parametrize("resize", [32, 40])
def test_the_box_is_the_area_of_the_model_input(size, resize):
    """A white pixel on black: its place after the transform equals the place that the box gives."""
    encoder = Cut(Pixels(32, resize))
    what = image_crop(encoder, Image.new("RGB", size))
    left, top, right, bottom = what.box
    for x in range(8, size[0] - 8, 7):
        image = Image.new("RGB", size)
        image.paste((255, 255, 255), (x - 4, 0, x + 4, size[1]))
        found = np.asarray(encoder.transform(image))[..., 0].mean(0)
        centre = (x - left) / (right - left) * 32
        if 4 < centre < 28:
            assert abs(float((found * (np.arange(32) + 0.5)).sum() / found.sum()) - centre) < 1
    assert right - left == pytest.approx(bottom - top)
    whole = image_crop(Cut(SquarePixels(32, 32)), Image.new("RGB", size))
    assert whole.box == (0, 0, *size)


def test_attention_overlays_keep_attended_colours_and_dim_the_rest():
    what = image_crop(Cut(Pixels(32, 32)), Image.new("RGB", (96, 48), (255, 255, 255)))
    heat = torch.zeros(4, 4)
    heat[0, 3] = 0.9  # top right of the middle square
    drawn = np.asarray(overlay(what, heat, 0.9, size=96)).astype(int)
    assert drawn.shape == (48, 96, 3) and (drawn[:, :24] == 38).all() and (drawn[:, 72:] == 38).all()
    brightest = np.unravel_index(drawn[..., 0].argmax(), (48, 96))
    assert brightest[0] < 12 and 60 <= brightest[1] < 72
    nothing = np.asarray(overlay(what, torch.zeros(4, 4), 0.0, size=96))
    assert (nothing[:, 24:72] == nothing[0, 24]).all()


def one(weights, cosine):
    nothing = torch.zeros(len(weights))
    maps = torch.zeros(len(weights), 2, 2)
    return Attended(
        maps, nothing, ["[start]", "red", "heart", "[end]"], torch.tensor(weights), torch.tensor(cosine), nothing
    )


def test_the_filter_follows_the_paper():
    weights = [
        [0.1, 0.8, 0.1, 0.0],  # red
        [0.0, 0.9, 0.1, 0.0],  # red again, agrees more
        [0.1, 0.1, 0.7, 0.1],  # heart
        [0.9, 0.1, 0.0, 0.0],  # the start
        [0.0, 0.1, 0.0, 0.9],  # the end
        [0.3, 0.4, 0.3, 0.0],  # not sharp
        [0.0, 0.0, 1.0, 0.0],  # agrees too little
    ]
    cosine = [0.8, 0.9, 0.78, 0.99, 0.99, 0.95, 0.75]
    assert filter_slots(one(weights, cosine)) == [1, 2]
    assert filter_slots(one(weights, cosine), cosine=0.79) == [1]
    assert filter_slots(one(weights, cosine), cosine=0.5, share=0.95) == [6]
    wanted = SimpleNamespace(cosine=0.75, share=0.5)
    weak = one(weights, [c - 0.8 for c in cosine])
    assert choose_example_slots([one(weights, cosine), weak], None, wanted)[0] == [[1, 2], []]
    shown, note = choose_example_slots([weak], None, wanted)  # a page without slots would explain nothing
    assert shown == [[3, 4, 5, 1, 0, 2]] and note.startswith("No slot passes --min-share 0.5 and --min-cosine 0.75")


def test_a_gallery_has_most_middle_and_least():
    found = gallery(torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7]), 2)
    assert (found.most, found.median, found.least) == ([1, 4], [4, 2], [0, 3])
    assert len(found.random) == 2 and gallery(torch.tensor([0.5]), 4).median == [0]


def test_attention_of_a_model_adds_up():
    encoder = clip({"kind": "sparo", "slots": 4, "slot_width": 6})
    images = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "green")]
    found = attend(encoder, images, ["a red heart", "blue", "green grass grows"])
    assert [len(f.words) for f in found] == [5, 3, 5] and found[0].words[1:4] == ["a", "red", "heart"]
    for f in found:
        assert f.maps.shape == (4, 4, 4) and torch.allclose(f.maps.sum((1, 2)) + f.on_class, torch.ones(4), atol=1e-5)
        assert torch.allclose(f.weights.sum(1), torch.ones(4), atol=1e-5) and bool(
            ((f.sharp >= 0) & (f.sharp <= 1)).all()
        )
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, upright = io.BytesIO(), images[0].convert("RGB")
    upright.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=exif)
    (one,), (other,) = (attend(encoder, [image], None) for image in (Image.open(turned), np.asarray(upright)))
    assert torch.equal(one.maps, other.maps)  # upright, as in `Encoder.images`, and arrays are images, too
    alone = attend(encoder, images, None)
    assert alone[0].words == [] and torch.equal(alone[0].maps, found[0].maps)
    with pytest.raises(ConfigError, match="has no slots with attention"):
        attend(clip({"kind": "token"}), images, None)


def test_labels_of_any_number_are_visible_and_pixels_without_a_score_are_white():
    colours = colour_labels(np.array([[1, 200, 1001, 255, 0]])).movedim(0, -1)[0]
    assert (colours[3] == 1).all() and (colours[:3].max(-1).values > 0.1).all()


def test_the_slot_on_the_border_is_drawn_as_background():
    labels = np.full((6, 6), 2)
    labels[2:4, 1:5] = 0
    labels[3, 0] = 1
    assert background_label(labels) == 2 and background_label(np.stack([labels, labels])) == 2
    colours = colour_slots(labels, 2)
    grey = torch.full((3,), 110 / 255)
    assert (colours[:, labels == 2] == grey[:, None]).all() and not (colours[:, labels != 2] == grey[:, None]).all(
        0
    ).any()
    assert not torch.equal(colours[:, 2, 2], colours[:, 3, 0])
