"""JPEG decoding without Pillow, torch's resizing, and the shared memory through which workers pass batches."""

import functools
import io
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_clip import get_tokenizer
from PIL import Image, ImageOps

from sparo_train.core.errors import BadSampleError
from sparo_train.core.recipe.renamed import with_new_names
from sparo_train.core.rng import generator
from sparo_train.data.decode import decoding
from sparo_train.data.decode.decoding import PUBLISHED, TRAINING, decode, decode_pixels
from sparo_train.data.decode.jpeg import decode_jpeg
from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
from sparo_train.data.examples.image_transforms import eval_pixels, planes, train_pixels
from sparo_train.data.examples.multi_crop import CropsConfig, multi_crop
from sparo_train.data.read import ring
from sparo_train.data.read.loader import Pipeline
from sparo_train.data.sources.base import DataConfig
from sparo_train.data.sources.shards import ShardsConfig
from sparo_train.train.run_config import RunConfig


def picture(width, height, mode="RGB", seed=0):
    """Return an image with smooth colours and some noise."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height), 3)
    values = np.asarray(smooth).astype(int) + rng.integers(-9, 10, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def xmp(orientation):
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    mode=st.sampled_from(["RGB", "L", "CMYK"]),
    quality=st.integers(1, 100),
    subsampling=st.sampled_from([0, 1, 2]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "progressive": st.booleans(),
            "restart_marker_blocks": st.integers(1, 5),
            "comment": st.binary(max_size=20),
            "icc_profile": st.binary(min_size=1, max_size=70_000),
            "keep_rgb": st.just(True),
        },
    ),
    orientation=st.sampled_from([None, 0, 1, 2, 3, 6, 8, 9]),
    in_xmp=st.booleans(),
    upright=st.booleans(),
    rgb=st.booleans(),
)
def test_pixels_are_pillows_whatever_the_file(
    size, mode, quality, subsampling, options, orientation, in_xmp, upright, rgb
):
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options |= {"xmp": xmp(orientation)} if in_xmp else {"exif": exif.tobytes()}
    subsampling = 0 if "keep_rgb" in options else subsampling
    data = encoded(picture(*size, mode), quality=quality, subsampling=subsampling, **options)
    with Image.open(io.BytesIO(data)) as image:
        rotated = image.getexif().get(0x0112, 1) not in (0, 1)
        whole = ImageOps.exif_transpose(image) if upright else image.copy()
    expected = np.asarray(whole.convert("RGB") if rgb else whole)
    if mode != "CMYK":
        pixels = decode_jpeg(data, upright, rgb)
        assert (pixels is None) == (upright and rotated)
        assert pixels is None or np.array_equal(pixels, expected)
    how = TRAINING._replace(upright=upright, rgb=rgb)
    out = decode(data, how)
    assert np.array_equal(np.asarray(out), expected) and out.mode == ("RGB" if rgb else mode)


def test_damaged_files_are_read_or_refused_as_by_pillow_alone(monkeypatch):
    data = encoded(picture(64, 48), quality=80)
    rng = np.random.default_rng(0)
    files = [data[:end] for end in range(0, len(data), 97)] + [data + b"\xff\xff more", b"\xff\xd8\xff", data * 2]
    for _ in range(150):
        changed = bytearray(data)
        for place in rng.integers(0, len(data), rng.integers(1, 6)):
            changed[place] = rng.integers(256)
        files.append(bytes(changed))
    files += [
        data[:20] + b"\xff\xfe\x00\x02" + data[20:],
        data[:2] + b"\xff" * 9 + data[2:],
        data[:2] + b"\0\0" + data[2:],
    ]

    def outcome(file, how):
        try:
            return np.asarray(decode(file, how)).tobytes()
        except BadSampleError as bad:
            return str(bad), bad.detail

    fast = [outcome(file, how) for file in files for how in (TRAINING, PUBLISHED)]
    monkeypatch.setattr(decoding, "decode_jpeg", lambda *_, **__: None)
    assert fast == [outcome(file, how) for file in files for how in (TRAINING, PUBLISHED)]
    assert sum(isinstance(one, bytes) for one in fast) > 20 < sum(isinstance(one, tuple) for one in fast)


def test_a_bomb_is_refused_before_its_pixels_are_decoded(monkeypatch):
    data = encoded(picture(64, 48))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 48 - 1)
    with pytest.raises(BadSampleError, match="too many pixels"):
        decode_pixels(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # Pillow's value for no limit
    assert decode_pixels(data).shape == (48, 64, 3)


@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP", "AVIF", "GIF"])
@pytest.mark.parametrize("size", [(300, 256), (90, 400), (224, 224), (100, 80)])
def test_fast_pixels_are_at_most_two_levels_from_exact_ones(suffix, size):
    buffer = io.BytesIO()
    picture(*size).save(buffer, suffix)
    data = buffer.getvalue()
    for transform in (
        lambda image: train_pixels(image, 96, (0.3, 1.0), 0.5, generator(0, "t")),
        lambda image: eval_pixels(image, 96),
        lambda image: eval_pixels(image, 80, 96),
    ):
        exact, fast = transform(decode(data)), transform(decode_pixels(data))
        difference = np.abs(exact.astype(int) - fast)
        share = 0.3 if min(size) < 96 else 0.005  # in enlarged images, many values differ by one level
        assert difference.max() <= 2 and (difference > 0).mean() < share and exact.shape == fast.shape
        assert np.array_equal(planes(fast), fast.transpose(2, 0, 1))
    crops = CropsConfig(local_crops_number=2, local_size=48, jitter_prob=0, solarize_prob=0, blur_probs=(0, 0, 0))
    pairs = (multi_crop(image, 96, crops, generator(0, "t")).values() for image in (decode(data), decode_pixels(data)))
    for exact, fast in zip(*pairs, strict=True):
        assert np.abs(exact.astype(int) - fast).max() <= 2


def test_the_centre_of_a_thin_array_takes_little_memory():
    thin = np.asarray(picture(1, 12000))
    assert np.array_equal(eval_pixels(thin, 224), eval_pixels(Image.fromarray(thin), 224))


def test_scaled_decoding_keeps_twice_the_size():
    data = encoded(picture(1000, 700))
    assert decode(data, TRAINING, 170).size == (250, 175) and decode_pixels(data, TRAINING, 170).shape == (175, 250, 3)
    assert decode_pixels(data, TRAINING, 200).shape == (263, 375, 3) and decode(data, TRAINING, 200).size == (500, 350)
    assert decode_pixels(data, TRAINING, 701).shape == (700, 1000, 3)


def test_an_old_run_keeps_its_decoder():
    old = {"data": {"sources": {"a": {"shards": "x"}}}}
    assert with_new_names(RunConfig, old)["data"]["decode"] == "exact"
    new = {"data": {"sources": {"a": {"shards": "x"}}, "decode": "fast"}}
    assert with_new_names(RunConfig, new)["data"]["decode"] == "fast"


@functools.cache
def tokenizers():
    return get_tokenizer("ViT-B-32"), ClipTokenizer(77)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=126), max_size=60))
def test_tokens_of_ascii_are_open_clips(text):
    theirs, ours = tokenizers()
    expected, ids = theirs([text])[0].tolist(), ours(text)
    assert ids == expected[: len(ids)] and not any(expected[len(ids) :])


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_in_shared_memory_are_not_overwritten(shards, prefetch):
    def read(workers):
        config = DataConfig(sources={"a": ShardsConfig(shards=str(shards))}, workers=workers, prefetch=prefetch)
        batches = Pipeline(config, 16, ImageTextExamples(config, 32, 16, ClipTokenizer(16)), 0).start()
        out = list(itertools.islice(batches, 9))  # kept while workers prepare later ones
        batches.close()
        return out

    for one, two in zip(read(0), read(2), strict=True):
        assert one.batch.keys() == two.batch.keys() and one.cursor == two.cursor
        assert all(torch.equal(one.batch[name], two.batch[name]) for name in one.batch)


def test_tensors_that_do_not_fit_are_sent_by_torch(monkeypatch):
    monkeypatch.setattr(ring, "SLOT_BYTES", 4096)
    memory = ring.Ring(2, 2)
    fits = {"a": torch.arange(6).view(2, 3), "b": torch.tensor([1.5]), "empty": torch.zeros(0, 4)}
    places = [memory.put(1, number, {**fits, "a": fits["a"] + number}) for number in range(3)]
    assert all(isinstance(place, ring.Place) for place in places)
    assert [memory.get(place)["a"][0, 0].item() for place in places] == [
        2,
        1,
        2,
    ]  # the third uses the memory of the first
    assert memory.get(places[1])["empty"].shape == (0, 4) and memory.get(places[1])["b"].item() == 1.5
    large = {"a": torch.zeros(4097, dtype=torch.uint8)}
    assert memory.put(0, 0, large) is large and memory.get(large) is large
    monkeypatch.setattr(ring.mmap, "mmap", lambda *_: (_ for _ in ()).throw(OSError("no address space")))
    assert ring.Ring(2, 2).put(0, 0, fits) is fits
