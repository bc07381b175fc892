"""One sample: decoding, captions, crops, tokens; compared with torchvision and open_clip."""

import io
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sparo_data.writer import write_shards
from sparo_train.core.errors import BadSampleError
from sparo_train.core.rng import generator
from sparo_train.data.examples.image_text import ClipTokenizer, decode_words
from sparo_train.data.examples.image_transforms import (
    Crop,
    eval_pixels,
    random_resized_crop_box,
    resized_crop,
    train_pixels,
)
from sparo_train.data.examples.samples import (
    caption,
    decode_image,
    list_captions,
    missing_caption_keys,
    parse_list,
)
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.shards import ShardsConfig
from tests.helpers.samples import jpeg


@pytest.mark.parametrize(
    ("key", "fields", "reason"),
    [
        ("json:say", {"json": b"{"}, "bad text"),
        ("json:say", {"json": b"{}"}, "missing caption"),
        ("json:say", {"json": b'{"say": 3}'}, "a caption that is not text: int"),
        ("txt", {"txt": b"\xff"}, "bad text"),
    ],
)
def test_unusable_captions_have_a_reason(key, fields, reason):
    with pytest.raises(BadSampleError, match=reason):
        caption(fields, ShardsConfig(shards="x", caption_key=key))


@given(st.lists(st.text(), min_size=1))
def test_lists_of_captions_that_tables_write_as_text_are_read(texts):
    for written in (json.dumps(texts), json.dumps(texts, ensure_ascii=False), str(texts)):
        assert parse_list(f" {written}\n") == texts


@pytest.mark.parametrize(
    "text", ["[dog]", "['tis the season]", "['a', 2]", "[1]", "['quoted' words 'inside']", "a [dog]"]
)
def test_a_caption_in_brackets_is_not_a_list(text):
    assert caption({"txt": text.encode()}, ShardsConfig(shards="x")) == text


def test_written_lists_are_several_captions_and_missing_values_none():
    config = ShardsConfig(shards="x", caption_key="json:say")
    fields = {"json": json.dumps({"say": "['a dog', 'a cat']"}).encode()}
    assert list_captions(fields, config) == ["a dog", "a cat"]
    with pytest.raises(BadSampleError, match="a list of captions without commas"):
        caption({"json": json.dumps({"say": "['a dog' 'a cat']"}).encode()}, config)
    for missing in ("nan", " NaN ", ["nan", ""]):
        with pytest.raises(BadSampleError, match="missing caption"):
            caption({"json": json.dumps({"say": missing}).encode()}, config)
    assert caption({"txt": b"naan bread"}, ShardsConfig(shards="x")) == "naan bread"


def test_captions_are_sampled_by_probability_without_changing_crops():
    fields = {"txt": b"short", "json": json.dumps({"long": ["one", " ", "two"], "none": ""}).encode()}
    config = ShardsConfig(shards="x", captions={"txt": 0.5, "json:long": 0.25, "json:none": 0.25})
    drawn, crops = Counter[str](), set()
    for number in range(3000):
        rng = generator(0, "augment", number)
        drawn[caption(fields, config, rng)] += 1
        again = generator(0, "augment", number)
        crops.add(rng.random() == again.random())
    # the share of what the sample lacks is divided: 2/3 and 1/3, and the list's two in equal parts
    assert drawn["short"] == pytest.approx(2000, abs=110) and drawn["one"] == pytest.approx(500, abs=80)
    assert drawn["two"] == pytest.approx(500, abs=80) and crops == {True}
    assert caption(fields, config, generator(0, "augment", 7)) == caption(fields, config, generator(0, "augment", 7))
    assert caption(fields, config) == "short" and caption({"json": fields["json"]}, config) == "one"
    with pytest.raises(BadSampleError, match="missing caption"):
        caption({"png": b""}, config)
    never = ShardsConfig(shards="x", captions={"txt": 0.0, "json:long": 1.0})
    with pytest.raises(BadSampleError, match="missing caption"):
        caption({"txt": b"short"}, never, generator(0, "augment", 0))
    for wrong in ({"txt": -0.5}, {"txt": 0.0}, {}, {"txt": 0.5}, {"txt": 0.9, "json:long": 0.5}):
        with pytest.raises(ValueError, match="captions"):
            ShardsConfig(shards="x", captions=wrong)


def test_caption_keys_that_no_sample_has_are_reported(tmp_path):
    told = [(f"{i}", {"txt": b"a", "json": json.dumps({"long": "b"} if i == 40 else {}).encode()}) for i in range(50)]
    write_shards(tmp_path, told, 20)
    mistyped = {"txt": 0.5, "json:long": 0.25, "json:lnog": 0.25, "json:other": 0.0}
    source = open_source("a", ShardsConfig(shards=str(tmp_path), captions=mistyped))
    assert missing_caption_keys(source) == ["json:lnog"] and missing_caption_keys(source, 4) == [
        "json:lnog",
        "json:long",
    ]
    assert missing_caption_keys(open_source("a", ShardsConfig(shards=str(tmp_path)))) == []


def test_a_decompression_bomb_is_a_bad_image(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadSampleError, match="too many pixels"):
        decode_image(jpeg(0))


def photo(width, height, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(300, 256), (256, 311), (64, 64), (500, 90)])
def test_pixels_equal_torchvisions_resized_crop(size):
    from torchvision.transforms.v2.functional import InterpolationMode
    from torchvision.transforms.v2.functional import resized_crop as reference

    image = photo(*size)
    box = random_resized_crop_box(size, (0.9, 1.0), generator(0, "t"))
    expected = reference(
        image, box.top, box.left, box.height, box.width, [224, 224], InterpolationMode.BICUBIC, antialias=True
    )
    assert np.array_equal(resized_crop(image, box, 224), np.asarray(expected))


@pytest.mark.parametrize("size", [(300, 256), (256, 311), (64, 64), (500, 90), (33, 70)])
def test_evaluation_pixels_equal_open_clips(size):
    from open_clip.transform import image_transform

    image = photo(*size)
    transform = image_transform(48, is_train=False, mean=(0, 0, 0), std=(1, 1, 1))
    expected = (transform(image) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert np.array_equal(eval_pixels(image, 48), expected)


def test_crops_have_the_specified_area_and_ratio():
    areas, ratios = [], []
    for i in range(500):
        box = random_resized_crop_box((300, 200), (0.3, 0.6), generator(0, "t", i))
        assert 0 <= box.left <= 300 - box.width and 0 <= box.top <= 200 - box.height
        areas.append(box.width * box.height / 60000)
        ratios.append(box.width / box.height)
    assert 0.29 < min(areas) < 0.33 and 0.57 < max(areas) < 0.61 and min(ratios) > 0.74 and max(ratios) < 1.35


def test_an_impossible_crop_falls_back_to_the_centre():
    assert random_resized_crop_box((1000, 10), (0.9, 1.0), generator(0, "t")) == Crop(493, 0, 13, 10)


def test_flipping_mirrors():
    image = photo(32, 32)
    plain, flipped = (train_pixels(image, 32, (1.0, 1.0), p, generator(0, "t")) for p in (0.0, 1.0))
    assert plain.shape == flipped.shape == (32, 32, 3)
    assert np.array_equal(train_pixels(image, 32, (1.0, 1.0), 1.0, generator(0, "t")), flipped)


@pytest.mark.parametrize("text", ["a photo of a cat.", "Ünïcode — “quotes” &amp; émoji 🎉", "word " * 100, ""])
def test_tokens_equal_open_clips(text):
    import open_clip

    ours = ClipTokenizer(77).batch([text])
    assert torch.equal(ours, open_clip.get_tokenizer("ViT-B-32")([text]))


def test_tokens_read_back():
    words = decode_words(ClipTokenizer(16)("two cyan cubes"))  # cyan is two tokens
    assert words == [("[start]", 1), ("two", 1), ("cyan", 2), ("cubes", 1), ("[end]", 1)]
    cut = decode_words(ClipTokenizer(4)("one cyan"))  # the context ends within a word
    assert cut == [("[start]", 1), ("one", 1), ("cy", 1), ("[end]", 1)]


def test_png_with_alpha_becomes_rgb():
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 4), (255, 0, 0, 10)).save(buffer, format="PNG")
    assert decode_image(buffer.getvalue()).mode == "RGB"


def test_sixteen_bit_images_keep_their_greys():
    ramp = np.linspace(0, 65535, 32 * 32).astype(np.uint16).reshape(32, 32)
    buffer = io.BytesIO()
    Image.fromarray(ramp).save(buffer, format="PNG")
    assert np.array_equal(np.asarray(decode_image(buffer.getvalue()))[..., 0], (ramp >> 8).astype(np.uint8))


def test_a_missing_caption_names_the_members_that_exist():
    with pytest.raises(BadSampleError, match="missing caption") as missing:
        caption({"jpg": b"", "caption": b"a dog"}, ShardsConfig(shards="x"))
    assert missing.value.detail == "expected the member txt, got jpg, caption"
