"""`data.bands`: images with other channels than red, green and blue, from the file to training, scores and exports."""

import io

import cv2
import numpy as np
import pytest
import tifffile
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from evals.encoders.baselines import PixelEncoder
from evals.encoders.loading import load_encoder
from evals.sets.base import read_batches
from evals.sets.image_files import FileSet
from evals.sets.pictures import open_image
from evals.slots.overlay import image_crop
from evals.suite.linear_probe import _Crops
from launch.recipes import load_run
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.decode.bands import as_rgb
from sparo_train.data.decode.decoding import TRAINING, decode_pixels
from sparo_train.data.examples.multi_crop import CropsConfig, multi_crop
from sparo_train.data.sources.base import DataConfig
from sparo_train.models.timm_backbone import TimmBackbone
from sparo_train.models.vit_config import VitConfig
from tests.helpers.processes import sparo

VALUES = np.random.default_rng(0).integers(0, 10_000, (40, 50, 5)).astype(np.uint16)
CONTIGUOUS = {"photometric": "minisblack", "planarconfig": "contig", "extrasamples": ["unspecified"] * 4}


def tiff(values: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, **options)
    return stream.getvalue()


def encoded(values: np.ndarray, suffix: str) -> bytes:
    return cv2.imencode(suffix, values)[1].tobytes()


def read(data: bytes, bands=(1, 3, 5), pixel_range=(0.0, 10_000.0)) -> np.ndarray:
    return decode_pixels(data, TRAINING._replace(bands=bands, pixel_range=pixel_range))


def mapped(values: np.ndarray) -> np.ndarray:
    return np.rint(values / 10_000 * 255).astype(np.uint8)


def output(*arguments: str, code: int = 0) -> str:
    done = sparo(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


PLANES = np.moveaxis(VALUES, -1, 0)
LAYOUTS = {
    "contiguous": (VALUES, CONTIGUOUS),
    "planes": (PLANES, {"photometric": "minisblack", "planarconfig": "separate"}),
    "pages": (PLANES, {"photometric": "minisblack", "metadata": None}),
    "tiles": (VALUES, {**CONTIGUOUS, "tile": (16, 32), "compression": "zlib"}),
    "lzw": (VALUES, {**CONTIGUOUS, "compression": "lzw", "predictor": 2}),
    "big endian": (VALUES, {**CONTIGUOUS, "byteorder": ">"}),
    "BigTIFF": (VALUES, {**CONTIGUOUS, "bigtiff": True}),
    "ImageJ": (PLANES, {"imagej": True}),
    "signed": (VALUES.astype(np.int16), CONTIGUOUS),
    "float": (VALUES.astype(np.float32), CONTIGUOUS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bands_of_tiff_files_in_all_layouts(layout):
    values, options = LAYOUTS[layout]
    assert np.array_equal(read(tiff(values, **options)), mapped(VALUES[..., [0, 2, 4]]))


def test_channels_of_other_formats():
    colours = np.random.default_rng(1).integers(0, 256, (30, 20, 4), dtype=np.uint8)
    rgba = encoded(cv2.cvtColor(colours, cv2.COLOR_RGBA2BGRA), ".png")
    assert np.array_equal(read(rgba, (4, 1)), colours[..., [3, 0]])  # opacity is a band; the image is not composited
    deep = VALUES[..., :3]
    assert np.array_equal(read(encoded(deep[..., ::-1], ".png"), (1, 3)), mapped(deep[..., [0, 2]]))
    assert np.array_equal(read(encoded(deep[..., 0], ".png"), (1,)), mapped(deep[..., :1]))
    gray = encoded(colours[..., 0], ".jpg")
    assert np.array_equal(read(gray, (1,))[..., 0], np.asarray(Image.open(io.BytesIO(gray))))
    with pytest.raises(BadSampleError, match="missing band"):
        read(gray, (2,))


def test_values_become_8_bits_by_band():
    data = tiff(VALUES, **CONTIGUOUS)
    pairs = ((0.0, 100.0), (0.0, 20_000.0))
    found = read(data, (1, 2), pairs)
    assert np.array_equal(found[..., 0], np.rint((VALUES[..., 0] / 100.0 * 255).clip(0, 255)))
    assert np.array_equal(found[..., 1], np.rint(VALUES[..., 1] / 20_000 * 255))
    assert np.array_equal(read(data, (2,), "by_type")[..., 0], VALUES[..., 1] >> 8)
    scaled = np.stack([VALUES[..., 0], VALUES[..., 0] * 3.0], -1).astype(np.float32)
    one, other = np.moveaxis(
        read(tiff(scaled, planarconfig="contig", photometric="minisblack"), (1, 2), "percentiles"), -1, 0
    )
    assert np.array_equal(one, other) and one.min() == 0 and one.max() == 255
    missing = VALUES.astype(np.float32)
    missing[:5], missing[5:8] = np.nan, np.inf
    found = read(tiff(missing, **CONTIGUOUS))
    assert not found[:8].any() and np.array_equal(found[8:], mapped(VALUES[8:][..., [0, 2, 4]]))
    with pytest.raises(BadSampleError, match="pixel range"):
        read(tiff(missing, **CONTIGUOUS), pixel_range="by_type")


def test_value_ranges_ignore_pixels_without_data(tmp_path):
    for number, values in enumerate((VALUES / 3.0, VALUES.astype(np.int16) - 9, VALUES.astype(np.uint32) * 100)):
        folder = tmp_path / str(number)
        folder.mkdir()
        marked = values.astype(np.float32 if number == 0 else values.dtype)
        marked[:10] = -9999 if number < 2 else 0
        nodata = (42113, "s", 0, str(int(marked[0, 0, 0])), True)
        for i in range(8):
            (folder / f"{i}.tif").write_bytes(tiff(marked, **CONTIGUOUS, extratags=[nodata]))
        ranges = load_run("own_images", [f"data={folder}", "auto=cpu", "data.bands=[1,3]", "epochs=1"]).data.pixel_range
        low, high = np.percentile(values[10:, :, 0], (1, 99))
        assert ranges[0] == pytest.approx((low, high), rel=0.02, abs=0.02 * high)


def test_gray_with_opacity_and_inverted_gray():
    gray = np.random.default_rng(4).integers(0, 65536, (9, 8), dtype=np.uint16)
    stream = io.BytesIO()
    Image.merge("LA", [Image.fromarray((gray >> 8).astype(np.uint8))] * 2).save(stream, "PNG")
    assert read(stream.getvalue(), (1, 2)).shape == (9, 8, 2)
    white = tiff(gray, photometric="miniswhite")
    assert np.array_equal(read(white, (1,), "by_type")[..., 0], (65535 - gray) >> 8)
    with pytest.raises(BadSampleError, match="bad image"):
        read(tiff((gray >> 8).astype(np.uint8), photometric="palette", colormap=np.zeros((3, 256), np.uint16)), (1,))


def test_files_without_bands_are_refused(monkeypatch):
    for data in (
        tiff(np.zeros((2, 3, 8, 8), np.uint16), imagej=True),  # a stack of images with several channels
        tiff(np.zeros((8, 8), np.complex64)),
        tiff(VALUES, **CONTIGUOUS)[:90],
        b"II*\0",
        b"II*\0" + bytes(100),
        b"no image",
    ):
        with pytest.raises(BadSampleError):
            read(data, (1,))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BadSampleError, match="too many pixels"):
        read(tiff(VALUES, **CONTIGUOUS))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(LAYOUTS)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=5),
    st.floats(0, 1),
)
def test_damaged_files_end_in_one_error(layout, changes, kept):
    values, options = LAYOUTS[layout]
    data = bytearray(tiff(values, **options))
    for place, byte in changes:
        data[place] = byte
    try:
        found = read(bytes(data[: max(1, int(len(data) * min(1.0, 2 * kept)))]))
    except BadSampleError:
        return
    assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3


@pytest.mark.parametrize("bands", [1, 2, 3, 5, 13])
def test_crops_of_any_number_of_bands(bands):
    plane = np.random.default_rng(2).integers(0, 256, (60, 70, 1), dtype=np.uint8)
    crops = CropsConfig(
        local_size=16, jitter=(0.4, 0.4, 0, 0), gray_prob=0, vflip=0.5, rotate90=0.5, local_crops_number=6
    )
    views = multi_crop(np.repeat(plane, bands, -1), 32, crops, np.random.default_rng(3), plain_size=32)
    assert views["global_crops"].shape == (2, bands, 32, 32) and views["local_crops"].shape == (6, bands, 16, 16)
    assert views["plain_crops"].shape == (2, bands, 32, 32)
    one = multi_crop(plane, 32, crops, np.random.default_rng(3), plain_size=32)
    for key, view in views.items():
        assert all(np.array_equal(view[:, i], view[:, 0]) for i in range(bands)), key
        # Only the contrast's mean over three channels differs, because it is their rounded luma.
        assert np.abs(view[:, 0].astype(int) - one[key][:, 0]).max() <= (1 if bands == 3 else 0), key


def test_first_three_bands_are_shown():
    assert as_rgb(VALUES).shape == (40, 50, 3) and np.array_equal(as_rgb(VALUES)[..., 2], VALUES[..., 2])
    assert np.array_equal(as_rgb(VALUES[..., :2])[..., 2], VALUES[..., 0])


def test_encoders_read_bands_like_training_and_others_name_the_file(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.tif").write_bytes(tiff(VALUES + i, **CONTIGUOUS))
    files = FileSet(tmp_path, ["0.tif", "1.tif"], [0, 1], "label")
    encoder = PixelEncoder(8)
    with pytest.raises(DataError, match=r"0\.tif: bad image \(5 bands of 16 bits .*data\.bands"):
        next(read_batches(files, encoder.transform, [[0]], 0))
    encoder.read_like(DataConfig.model_construct(pixel_range=(0.0, 10_000.0), bands=(5, 1, 2, 3)))
    pixels = next(read_batches(files, encoder.transform, [[0, 1]], 0)).pixels
    assert pixels.shape == (2, 4, 8, 8) and pixels.dtype == torch.uint8
    (row,) = encoder.preprocess([VALUES])  # the array as a user's library reads it
    assert np.array_equal(row.transpose(2, 0, 1), pixels[0])
    with pytest.raises(DataError, match="band 5 of 3"):
        encoder.preprocess([VALUES[..., :3]])
    with pytest.raises(DataError, match=r"expected \(height, width, bands\)"):
        encoder.preprocess([PLANES])
    for layout in ("planes", "pages"):
        values, options = LAYOUTS[layout]
        (tmp_path / "planes.tif").write_bytes(tiff(values, **options))
        assert np.array_equal(encoder.preprocess([tmp_path / "planes.tif"])[0], row)
    crops = _Crops(files, 8, 0, 0, encoder.decoding)
    assert crops.read(0)[1].shape == (8, 8, 4)
    crop = image_crop(encoder, open_image(tmp_path / "0.tif"))
    assert crop.image.mode == "RGB" and crop.image.size == (50, 40)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Write 24 images of two land covers, which differ in the fourth band only."""
    folder = tmp_path_factory.mktemp("scenes")
    for i in range(24):
        cover = ("water", "forest")[i % 2]
        levels = np.array([1000, 900, 800, 300 if cover == "water" else 3000])
        noise = np.random.default_rng(i).normal(0, 60, (44, 48, 4))
        path = folder / cover / f"{i}.tif"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            tiff((levels + noise).clip(0).astype(np.uint16), **{**CONTIGUOUS, "extrasamples": ["unspecified"] * 3})
        )
    return folder


@pytest.mark.long
def test_a_satellite_run_from_files_to_scores_and_exports(scenes, tmp_path):
    words = (
        f"data={scenes}",
        "data.bands=[1,2,3,4]",
        f"out={tmp_path}",
        "name=sat",
        "auto=cpu",
        "steps=4",
        "log.pictures=2",
    )
    output(
        "train",
        "own_satellite",
        *words,
        "objective.ibot={}",
        "objective.model.image_size=16",
        "objective.model.patch_size=8",
    )
    config = load_run("own_satellite", list(words))
    assert config.objective.model.bands == 4 and len(config.objective.mean) == 4 and len(config.data.pixel_range) == 4
    low, high = config.data.pixel_range[3]
    assert 100 < low < 300 and 3000 < high < 3300
    table = tmp_path / "probe.yaml"
    table.write_text(f"tasks:\n  cover: {{task: knn, layout: folder, train: {scenes}, test: {scenes}, k: [3]}}\n")
    run = tmp_path / "sat"
    assert "100.0" in output("eval", str(run), "--data", str(table))
    image = tifffile.imread(scenes / "water" / "0.tif")
    encoder = load_encoder(str(run))
    described = encoder.describe([image])
    assert described.attention.shape == (1, 32, 4) and torch.equal(described.encoding, encoder.images([image]))
    pixels = encoder.stack(encoder.preprocess([image]))
    output("export", str(run), "--layout", "torch")
    program = torch.export.load(run / "export" / "backbone.pt2").module()
    assert torch.allclose(program(pixels)[0], described.encoding, atol=1e-5)
    output("export", str(run), "--layout", "timm")
    model = timm.create_model(f"local-dir:{run}/export/timm", pretrained=True).eval()
    with torch.no_grad():
        features = model.forward_features(encoder.normalize(pixels))
    assert torch.allclose(features[:, 1:], described.patches, atol=1e-4) or features.shape[1] == 5
    output("export", str(run), "--layout", "onnx")
    exported = load_encoder(str(run / "export" / "onnx"))
    assert torch.allclose(exported.images([scenes / "water" / "0.tif"]), described.encoding, atol=1e-5)
    assert "for bands 1, 2, 3, 4 of an image" in (run / "export" / "onnx" / "README.md").read_text()
    output("export", str(run), "--layout", "dino", code=2)
    # Continue with other bands: the patch embedding is adapted.
    more = output("train", "own_satellite", *words[:1], "data.bands=[4,1]", *words[2:3], "name=two", "auto=cpu", "steps=1",
                 f"init={run}/export/timm/model.safetensors", "objective.model.heads=4", "objective.model.readout={kind: cls}")  # fmt: skip
    assert "patch embedding from 4 to 2 bands" in more


def test_check_reports_bands_and_their_ranges(scenes):
    report = output("data", "check", str(scenes), "--bands", "1,4")
    assert "24 TIFF uint16, 4 bands" in report and "data.pixel_range=[[" in report
    assert report.partition("objective.mean=[")[2].partition("]")[0].count(",") == 1
    assert "--bands: expected band numbers" in output("data", "check", str(scenes), "--bands", "red", code=2)
    refused = output("data", "check", str(scenes), "--bands", "1,4", "--pixel-range", "[[0,1],[0,1],[0,1]]", code=2)
    assert "3 ranges, but bands names 2 bands" in refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.bands=[]"], "at least 1 item"),
        (["data.bands=[0]"], "greater than or equal to 1"),
        (["data.bands=[1,9]"], "band 9 of 4"),
        (["data.bands=[1,4]", "data.decode=exact"], "decode=exact"),
        (["data.bands=[1,4]", "objective.crops.jitter=[0.4,0.4,0.4,0]"], "objective: crops.jitter: changes colours"),
        (["data.bands=[1,4]", "objective.crops.stain=0.1"], "crops.stain: changes colours"),
        (
            ["data.bands=[1,4]", "objective.model.bands=3"],
            "objective.model.bands=3: data.bands gives 2 bands|mean: expected 3",
        ),
        (["data.bands=[1,4]", "objective.mean=[0.5,0.5,0.5]"], r"mean: expected 2 numbers \(model.bands\), got 3"),
        (["data.bands=[1,4]", "data.pixel_range=[[0,1]]"], "has 1 ranges, but bands names 2 bands"),
        (["data.pixel_range=[]"], "expected \\[low, high\\]"),
        (["data.bands=[1,4]", "data.scaled_decoding=true"], "scaled_decoding=true: applies only to JPEG"),
        (
            [
                "objective.model.bands=4",
                "objective.mean=[0,0,0,0]",
                "objective.std=[1,1,1,1]",
                "auto=off",
                "batch_size=8",
                "epochs=1",
                "objective.crops.jitter=[0,0,0,0]",
                "objective.crops.gray_prob=0",
            ],
            "data.bands is not set, so images have 3 bands",
        ),
        (["data.pixel_range=[[0,1]]"], "but bands is not set"),
        ([], "no image can be read; .*4 bands of 16 bits.*data.bands"),
    ],
)
def test_keys_that_do_not_fit_are_named(scenes, words, message):
    with pytest.raises((ConfigError, DataError), match=message):
        load_run("own_images", [f"data={scenes}", "auto=cpu", *words])


def test_objectives_of_colour_images_refuse_bands():
    distilled = ["auto=off", "objective.teacher.checkpoint=x", "epochs=1", "batch_size=1"]
    for recipe, more in (("cc15m_sparo", []), ("own_distilled", distilled)):
        with pytest.raises(
            ConfigError, match=r"data\.bands: does not apply to objective\.kind=\w+, which reads RGB images"
        ):
            load_run(recipe, ["data.bands=[1,2,3,4]", *more])


def test_timm_models_of_other_bands_start_from_weights_of_three():
    config = VitConfig.model_validate({"timm_model_name": "resnet18", "image_size": 32, "bands": 5})
    backbone = TimmBackbone(config)
    assert backbone(torch.zeros(2, 5, 32, 32)).shape == (2, 512)
    weights = timm.create_model("resnet18", num_classes=0).state_dict()
    fitted = backbone.fit(weights)
    expected = timm.models.adapt_input_conv(5, weights["conv1.weight"])
    assert torch.equal(fitted["conv1.weight"], expected)
    backbone.model.load_state_dict(fitted)
