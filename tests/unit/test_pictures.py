"""Images that people have: every mode as stock open_clip shows it, EXIF, transparency, 16 bits and floats, rare formats, thin images."""

import io
import subprocess
import sys
import zlib

import cv2
import numpy as np
import pytest
import torch
from open_clip.transform import image_transform
from PIL import Image, features

from evals.encoders.baselines import PixelEncoder
from evals.encoders.pixels import LibraryPixels, MappedPixels, Pixels
from evals.encoders.selection import MaskedEncoder
from evals.sets import pictures
from evals.sets.base import lines, read_batches
from evals.sets.image_files import FileSet
from evals.sets.pictures import open_image
from evals.slots.overlay import image_crop
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.decode.decoding import decode, formats, notes, open_picture, suffixes
from sparo_train.data.examples import image_transforms as thin
from sparo_train.data.examples.image_transforms import centre, eval_pixels
from sparo_train.data.examples.samples import decode_image
from sparo_train.data.sources.base import DataConfig

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (40, 60, 3), dtype=np.uint8)


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def modes():
    """Return files in every mode that Pillow opens: (name, bytes)."""
    rgb = Image.fromarray(COLOURS)
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(RNG.integers(0, 256, (40, 60), dtype=np.uint8)))
    deep = Image.fromarray(RNG.integers(0, 65536, (40, 60)).astype(np.uint16))
    palette = rgb.quantize(16)
    yield from {
        "RGB": saved(rgb, "PNG"),
        "L": saved(rgb.convert("L"), "PNG"),
        "1": saved(rgb.convert("1"), "PNG"),
        "P": saved(palette, "PNG"),
        "P of a GIF": saved(palette, "GIF"),
        "P with transparency": saved(palette, "PNG", transparency=3),
        "LA": saved(alpha.convert("LA"), "PNG"),
        "RGBA": saved(alpha, "PNG"),
        "RGBA of a WebP": saved(alpha, "WEBP", lossless=True),
        "YCbCr": saved(rgb.convert("YCbCr"), "TIFF"),
        "CMYK": saved(rgb.convert("CMYK"), "TIFF"),
        "CMYK of a JPEG": saved(rgb.convert("CMYK"), "JPEG"),
        "I;16": saved(deep, "PNG"),
        "I;16 of a TIFF": saved(deep, "TIFF"),
        "I": saved(Image.fromarray(RNG.integers(0, 300, (40, 60)).astype(np.int32)), "TIFF"),
        "F": saved(Image.fromarray((255 * RNG.random((40, 60))).astype(np.float32)), "TIFF"),
    }.items()


@pytest.mark.parametrize(("name", "data"), list(modes()), ids=[name for name, _ in modes()])
@pytest.mark.parametrize("size", [24, 48])
def test_evaluation_shows_every_mode_as_stock_open_clip_does(name, data, size, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(data)
    stock = image_transform(size, is_train=False, mean=(0,) * 3, std=(1,) * 3)
    expected = np.rint(stock(Image.open(path)).permute(1, 2, 0).numpy() * 255)
    library = LibraryPixels(stock.transforms, "open_clip")
    for pixels in (Pixels(size, size), library):
        assert np.array_equal(pixels(open_image(path)), expected), name
    assert Pixels(size, size, rgb_first=True)(open_image(path)).shape == (size, size, 3)


def turned(orientation):
    """Return an image that is 30 x 20, left half red and right half blue when upright, and stored rotated."""
    upright = np.zeros((20, 30, 3), np.uint8)
    upright[:, :15, 0] = upright[:, 15:, 2] = 255
    stored = {1: upright, 3: upright[::-1, ::-1], 6: np.rot90(upright), 8: np.rot90(upright, -1)}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_training_turns_photos_upright_and_evaluation_leaves_them_as_open_clip_does(orientation):
    data = turned(orientation)
    pixels = np.asarray(decode_image(data))
    assert pixels.shape == (20, 30, 3) and pixels[:, :15, 0].min() == 255 and pixels[:, 15:, 2].min() == 255
    assert pictures.decode_image(data, "x").size == Image.open(io.BytesIO(data)).size
    assert ("rotated by EXIF" in notes(open_picture(data))) == (orientation != 1)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_training_shows_transparency_on_white(mode):
    image = Image.new("RGBA", (8, 8), (10, 20, 30, 255))
    image.paste((90, 0, 0, 0), (0, 0, 4, 8))
    data = saved(image.quantize(4) if mode == "P" else image.convert(mode), "PNG")
    pixels = np.asarray(decode_image(data))
    assert pixels[:, :4].min() == 255 and pixels[:, 4:].max() < 60 and "transparent" in notes(open_picture(data))


RAMP = np.linspace(0, 4095, 40 * 60).reshape(40, 60)


def test_sixteen_bits_and_floats_are_mapped_by_the_key_and_refused_where_they_cannot_be():
    grey = saved(Image.fromarray(RAMP.astype(np.uint16)), "PNG")
    colour = cv2.imencode(".png", np.dstack([RAMP.astype(np.uint16)] * 3))[1].tobytes()
    real = saved(Image.fromarray((RAMP / 4095).astype(np.float32)), "TIFF")
    assert np.asarray(decode_image(grey)).max() == 15  # the type has 16 bits, so the upper byte is used
    for data in (grey, colour, saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF")):
        found = np.asarray(decode_image(data, pixel_range=(0.0, 4095.0)))
        assert found.min() == 0 and found.max() == 255 and "more than 8 bits" in notes(open_picture(grey))
        found = np.asarray(decode_image(data, pixel_range="percentiles"))
        assert found.min() == 0 and found.max() == 255 and abs(found.mean() - 127.5) < 2
    assert np.asarray(decode_image(real)).max() == 255 and "float" in notes(open_picture(real))
    eight = saved(Image.fromarray(COLOURS), "PNG")
    assert np.array_equal(np.asarray(decode_image(eight, pixel_range=(0.0, 4095.0))), COLOURS)
    for values, detail in (
        (RAMP.astype(np.float32), "float pixels from 0 to 4095"),
        (RAMP.astype(np.int32) - 5, "32-bit pixels from -5"),
    ):
        with pytest.raises(BadSampleError, match="pixel range") as bad:
            decode_image(saved(Image.fromarray(values), "TIFF"))
        assert detail in bad.value.detail and "data.pixel_range" in bad.value.full_message()
    lost = np.full((4, 4), np.nan, np.float32)
    for how in ("by_type", "percentiles", (0.0, 1.0)):
        with pytest.raises(BadSampleError, match="pixel range"):
            decode_image(saved(Image.fromarray(lost), "TIFF"), pixel_range=how)
    with pytest.raises(ValueError, match="low < high"):
        DataConfig(sources={}, pixel_range=[5.0, 1.0])


def bands(count):
    """Return a TIFF of 16 x 16 pixels with this number of 16-bit bands."""
    done, data = cv2.imencodemulti(".tiff", [np.zeros((16, 16, count), np.uint16)]) if count <= 4 else (False, None)
    if done:
        return data.tobytes()
    entries = [
        (256, 16),
        (257, 16),
        (258, 16),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, count),
        (278, 16),
        (279, 16 * 16 * 2 * count),
    ]
    body = bytes(16 * 16 * 2 * count)
    head = b"II*\0" + (8 + len(body)).to_bytes(4, "little")
    table = len(entries).to_bytes(2, "little") + b"".join(
        tag.to_bytes(2, "little") + (3).to_bytes(2, "little") + (1).to_bytes(4, "little") + value.to_bytes(4, "little")
        for tag, value in entries
    )
    return head + body + table + bytes(4)


def test_unreadable_pictures_name_file_and_cause(tmp_path, monkeypatch):
    (tmp_path / "six.tif").write_bytes(bands(6))
    with pytest.raises(
        DataError,
        match=r"six\.tif: bad image \(6 bands of 16 bits \(integer\), expected 1 or 3; data\.bands chooses bands\)",
    ):
        open_image(tmp_path / "six.tif").load()
    pages = [Image.fromarray(COLOURS)] * 3
    several = saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    with pytest.raises(BadSampleError, match="several pages") as bad:
        decode_image(several)
    assert bad.value.detail == "expected one page, got 3"
    pyramid = saved(pages[0], "TIFF", save_all=True, append_images=[pages[0].resize((30, 20))])
    assert decode_image(pyramid).size == (60, 40)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for data in (saved(pages[0], "PNG"), saved(pages[0].resize((600, 400)), "PNG")):
        with pytest.raises(BadSampleError, match="too many pixels"):
            decode_image(data)


RARER = {
    ".gif": "GIF",
    ".jfif": "JPEG",
    ".tiff": "TIFF",
    ".bmp": "BMP",
    ".avif": "AVIF",
    ".jp2": "JPEG2000",
    ".ico": "ICO",
}


@pytest.mark.parametrize(("suffix", "kind"), RARER.items())
def test_rarer_formats_are_read_and_none_starts_a_program(suffix, kind):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    assert suffix in suffixes()
    assert decode(saved(Image.fromarray(COLOURS).resize((32, 32)), kind)).mode == "RGB"
    assert not {"EPS", "WMF", "FPX", "PDF"} & set(formats())


def test_random_bytes_are_refused_as_an_image():
    rng = np.random.default_rng(1)
    for _ in range(200):
        with pytest.raises(BadSampleError):
            decode_image(rng.bytes(int(rng.integers(1, 400))))


@pytest.mark.parametrize("shape", [(700, 1), (1, 700), (900, 3), (5, 901), (400, 2)])
def test_the_centre_of_a_thin_image_is_computed_alone_with_the_same_pixels(shape, monkeypatch):
    image = Image.fromarray(RNG.integers(0, 256, (*shape, 3), dtype=np.uint8))
    for resize in (32, 40):
        whole = eval_pixels(image, 32, resize)
        stock = LibraryPixels(image_transform(32, is_train=False, mean=(0,) * 3, std=(1,) * 3).transforms, "x")
        by_library = stock(image)
        labels = Image.fromarray(RNG.integers(0, 9, shape).astype(np.int32))
        nearest = eval_pixels(labels, 32, resize, Image.Resampling.NEAREST)
        with monkeypatch.context() as patch:
            patch.setattr(thin, "_MAX_PIXELS", 1000)
            assert thin.thin_centre(image, 32, resize, Image.Resampling.BICUBIC) is not None
            assert np.array_equal(np.asarray(centre(image, 32, resize)), whole)
            assert np.array_equal(stock(image), by_library)
            assert np.array_equal(eval_pixels(labels, 32, resize, Image.Resampling.NEAREST), nearest)


def test_a_thin_image_takes_little_memory():
    code = (
        "import resource, numpy as np; from PIL import Image; from sparo_train.data.examples.image_transforms import eval_pixels\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert eval_pixels(Image.fromarray(np.zeros((12000, 1, 3), np.uint8)), 224).shape == (224, 224, 3)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200 * 1024


def test_encoders_take_arrays_and_names_are_read_as_clip_benchmark_reads_them(tmp_path):
    encoder = PixelEncoder(8)
    assert np.array_equal(encoder.images([COLOURS]), encoder.images([Image.fromarray(COLOURS)]))
    (tmp_path / "classnames.txt").write_text("\n  cat \n\n dog\n \n")
    assert lines(tmp_path / "classnames.txt") == ["cat", "dog"]


def test_an_encoder_of_a_run_maps_deep_pixels_as_its_training_did(tmp_path):
    deep = RAMP.astype(np.uint16)
    cv2.imwrite(str(tmp_path / "grey.png"), deep)
    cv2.imwrite(str(tmp_path / "colour.png"), np.dstack([deep, deep[::-1], deep[:, ::-1]]))
    Image.fromarray(RAMP.astype(np.float32) - 1).save(tmp_path / "real.tif")
    files = FileSet(tmp_path, ["grey.png", "colour.png"], [0, 1], "label")
    for pixel_range in ("percentiles", (0.0, 4095.0), "by_type"):
        encoder = PixelEncoder(8)
        assert encoder.transform(Image.fromarray(deep)).mean() > 230  # as in stock open_clip: clipped
        encoder.read_like(DataConfig.model_construct(pixel_range=pixel_range))
        found = next(read_batches(files, encoder.transform, [[0, 1]], 0)).pixels
        for row, name in zip(found, ("grey.png", "colour.png"), strict=True):
            trained = decode_image((tmp_path / name).read_bytes(), pixel_range=pixel_range)
            assert np.array_equal(row.permute(1, 2, 0), Pixels(8, 8, rgb_first=True)(trained)), (name, pixel_range)
        assert torch.equal(encoder.images([deep]), encoder.encode(found[:1]))
        assert MaskedEncoder(encoder, torch.ones(192)).decoding.pixel_range == pixel_range
        shown = np.asarray(image_crop(encoder, Image.fromarray(deep)).image)
        assert shown.dtype == np.uint8 and len(np.unique(shown)) > 10
        assert encoder.transform_with_resize(16) == MappedPixels(8, 16, True, pixel_range)
    with pytest.raises(DataError, match=r"real\.tif: pixel range .*data.pixel_range"):
        next(read_batches(FileSet(tmp_path, ["real.tif"], [0], "label"), encoder.transform, [[0]], 0))
    with pytest.raises(DataError, match="image 0: cannot be encoded by pixels:8: pixel range"):
        encoder.images([Image.open(tmp_path / "real.tif")])


def test_arrays_of_every_dtype_are_converted_or_refused():
    encoder = PixelEncoder(8)
    expected = encoder.images([COLOURS])
    wide = COLOURS.astype(np.uint16) * 257
    for values in (wide, COLOURS / 255, (COLOURS / 255).astype(np.float32), Image.fromarray(COLOURS)):
        assert torch.equal(encoder.images([values]), expected)
    grey = encoder.images([Image.fromarray(COLOURS[..., 0])])
    for values in (
        COLOURS[..., 0],
        COLOURS[..., :1],
        wide[..., 0],
        COLOURS[..., 0] / 255,
        Image.fromarray(wide[..., 0]),
    ):
        assert torch.equal(encoder.images([values]), grey)
    for values, reason in (
        (COLOURS.astype(np.int64), "dtype int64"),
        (COLOURS.astype(np.float32), "float pixels from 0 to 255"),
        (COLOURS[None], r"shape \(1, 40, 60, 3\)"),
        (COLOURS[..., :2], r"shape \(40, 60, 2\)"),
        (COLOURS[:0], "shape"),
    ):
        with pytest.raises(DataError, match=f"image 1: cannot be encoded by pixels:8: .*{reason}"):
            encoder.images([COLOURS, values])


RANGES = ("by_type", "percentiles", (0.0, 65535.0))


@pytest.mark.parametrize("how", RANGES)
def test_deep_pictures_keep_orientation_and_transparency(how):
    exif = Image.Exif()
    exif[0x0112] = 6  # stored rotated; upright it is 40 wide and 30 high
    stored = np.zeros((40, 30), np.uint16)
    stored[:20] = 65535  # the right half when upright
    colours = cv2.imencode(".png", np.dstack([stored] * 3))[1].tobytes()
    chunk = exif.tobytes().removeprefix(b"Exif\0\0")
    body = len(chunk).to_bytes(4, "big") + b"eXIf" + chunk + zlib.crc32(b"eXIf" + chunk).to_bytes(4, "big")
    for data in (
        saved(Image.fromarray(stored), "PNG", exif=exif),
        saved(Image.fromarray(stored), "TIFF", exif=exif),
        colours[:33] + body + colours[33:],
    ):
        found = np.asarray(decode_image(data, pixel_range=how))
        assert found.shape == (30, 40, 3) and found[:, 20:].min() == 255 and found[:, :20].max() == 0
    opaque = np.dstack([stored, stored, stored, np.where(stored > 0, 65535, 0).astype(np.uint16)])
    clear = Image.fromarray(stored)
    for data in (cv2.imencode(".png", opaque)[1].tobytes(), saved(clear, "PNG", transparency=0)):
        assert np.asarray(decode_image(data, pixel_range=how)).min() == 255


@pytest.mark.parametrize(
    "sizes", [[(30, 20), (31, 20), (33, 20)], [(30, 20), (15, 10), (30, 20)], [(30, 20), (29, 19)]]
)
def test_tiffs_of_several_pages_are_refused_whatever_their_sizes(sizes):
    pages = [Image.new("L", size, 90) for size in sizes]
    with pytest.raises(BadSampleError, match="several pages"):
        decode_image(saved(pages[0], "TIFF", save_all=True, append_images=pages[1:]))


def test_a_pyramid_is_one_picture():
    pages = [Image.new("L", size, 90) for size in ((64, 48), (32, 24), (16, 12))]
    assert decode_image(saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])).size == (64, 48)
