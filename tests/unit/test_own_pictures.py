"""Users' folders and tables: the same classes in training, conversion and evaluation; skipped files are counted."""

import gzip
import io
import json
import shutil
import tarfile
import zlib

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from evals.sets.image_files import FolderSet, ImageNetSet
from evals.sets.open_set import open_images
from evals.sets.wds import WdsSet
from evals.sets.wds import open_images as evals_wds
from sparo_data.check import check_storage
from sparo_data.convert import convert_folder
from sparo_data.convert_table import convert_csv
from sparo_data.official.folders import clevr, coco
from sparo_data.official.published import PublishedConfig, write_published
from sparo_data.writer import write_shards
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.examples.samples import decode_image, image_bytes
from sparo_train.data.sources.base import DataConfig, open_source
from sparo_train.data.sources.folder import class_order, list_pictures, open_folder
from sparo_train.data.sources.shards import ShardsConfig, open_shards
from sparo_train.train.fit import source_lines
from sparo_train.train.reporting import pixel_statistics
from tests.helpers.processes import sparo
from tests.helpers.samples import jpeg


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def classes_by_bytes(folder):
    """Return what each reader finds in a folder: {bytes of an image: class name}."""
    found = FolderSet(folder)
    names = found.own_classnames()
    yield {(folder / key).read_bytes(): names[label] for key, _, label in found}
    shown = open_images(str(folder), "label", "test")
    yield {(folder / key).read_bytes(): shown.classes[label] for key, _, label in shown}
    out = folder.parent / "converted"
    convert_folder(folder, out, test=2)
    scored = WdsSet(out / "zeroshot", "label")
    names, by_bytes = scored.classnames(), {}
    for storage in scored.source.storages:
        for number in range(len(storage)):
            _, fields = storage.read(number)
            by_bytes[fields["jpg"]] = names[int(fields["cls"])]
    for storage in open_source(
        "x", DataConfig(sources={"x": {"kind": "shards", "shards": str(out / "train")}}).sources["x"]
    ).storages:
        for number in range(len(storage)):
            _, fields = storage.read(number)
            by_bytes[fields["jpg"]] = fields["txt"].decode().removeprefix("a photo of a ")
    yield by_bytes


def test_the_class_is_the_first_folder_for_every_reader(tmp_path):
    root = tmp_path / "pictures"
    for number, name in enumerate(
        ["dog/2019/a.jpg", "dog/2020/deep/b.jpg", "cat/2019/a.jpg", "cat/b.jpg", ".cache/c.jpg", "dog/.x/d.jpg"]
    ):
        put(root / name, jpeg(number))
    put(tmp_path / "elsewhere" / "far.jpg", jpeg(90))
    (root / "lion").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(root)
    by_folder, by_probe, converted = classes_by_bytes(root)
    assert by_folder == by_probe and set(by_folder.values()) == {"cat", "dog", "lion"}
    assert converted == by_folder


@pytest.mark.parametrize(
    "names", [[str(i) for i in range(12)], [f"{i:03d}" for i in range(12)], ["01", "2", "10", "0"]]
)
def test_numbered_class_folders_are_in_the_order_of_their_numbers(names, tmp_path):
    root = tmp_path / "pictures"
    for number, name in enumerate(names):
        put(root / name / "a.jpg", jpeg(number))
    written = sorted(names, key=int)
    (root / "classnames.txt").write_text("".join(f"name{int(name)}\n" for name in written))
    (folder, probe, converted) = classes_by_bytes(root)
    named = FolderSet(root).classnames()
    for key, _, label in FolderSet(root):
        assert named[label] == f"name{int(key.split('/')[0])}"
    assert {int(name) for name in probe.values()} == {int(name) for name in names} == {int(n) for n in folder.values()}
    for data, name in converted.items():
        assert name == f"name{int(probe[data])}"
    assert class_order(["b", "10", "9"]) == ["10", "9", "b"]
    with pytest.raises(DataError, match="01 and 1 are the same number"):
        class_order(["1", "01"])


def test_imagenets_numbered_folders_may_be_padded(tmp_path):
    for name in ("007", "010", "900"):
        put(tmp_path / name / "a.jpg", jpeg(int(name)))
    assert [label for _, _, label in ImageNetSet(tmp_path, numbered=True)] == [0, 1, 2]


def test_a_folder_of_splits_is_refused_as_classes(tmp_path):
    for split in ("train", "val"):
        put(tmp_path / split / "dog/a.jpg", jpeg(len(split)))
    for read in (
        FolderSet,
        lambda root: convert_folder(root, tmp_path / "out"),
        lambda root: open_images(str(root), "label", "test"),
    ):
        with pytest.raises(DataError, match=r"contains splits, not classes, got train, val\. Give .*train"):
            read(tmp_path)
        put(tmp_path / "meta/dog/a.jpg", jpeg(3))
        with pytest.raises(DataError, match=r"contains splits, not classes, got meta, train, val\. Give .*train"):
            read(tmp_path)
        shutil.rmtree(tmp_path / "meta")
        for name in ("dog", "cat"):
            put(tmp_path / f"wrapped/images/{name}/a.jpg", jpeg(len(name)))
        with pytest.raises(DataError, match=r"got a single folder images that contains 2 folders\. Give .*images"):
            read(tmp_path / "wrapped")
        shutil.rmtree(tmp_path / "wrapped")


def picture(kind):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(len(kind)).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
        buffer, format=kind
    )
    return buffer.getvalue()


def test_every_readable_format_is_read_and_the_rest_is_counted_everywhere(tmp_path):
    root = tmp_path / "pictures"
    kinds = {
        ".jpg": "JPEG",
        ".jfif": "JPEG",
        ".gif": "GIF",
        ".tiff": "TIFF",
        ".bmp": "BMP",
        ".png": "PNG",
        ".webp": "WEBP",
    }
    for number, (suffix, kind) in enumerate(kinds.items()):
        put(root / f"c{number % 2}" / f"{number}{suffix}", picture(kind))
    for name in ("a.heic", "b.HEIC", "c.mov"):
        put(root / "c0" / name, b"x")
    for name in ("c0/notes.txt", "c0/Thumbs.db", "c0/.hidden.jpg"):
        put(root / name, b"x")
    left_out = {".heic": 2, ".mov": 1}
    assert list_pictures(root).left_out == left_out
    made = convert_folder(root, tmp_path / "out")
    assert made.train == len(kinds) and made.left_out == left_out
    parts = open_folder(root)
    assert sum(map(len, parts)) == len(kinds) == len(FolderSet(root))
    for part in parts:
        for number in range(len(part)):
            _, fields = part.read(number)
            assert decode_image(next(data for name, data in fields.items() if name != "cls")).mode == "RGB"
    source = open_source("mine", DataConfig(sources={"mine": {"kind": "folder", "folder": str(root)}}).sources["mine"])
    assert any("2 .heic (pip install pillow-heif), 1 .mov" in line for line in source_lines([source], 10))
    (tmp_path / "tasks.yaml").write_text(
        json.dumps({"tasks": {"near": {"task": "knn", "train": str(tmp_path / "bank"), "test": str(root), "k": [1]}}})
    )
    for number in range(4):
        put(tmp_path / "bank" / f"c{number % 2}" / f"{number}.jpg", jpeg(number + 50))
    done = sparo("eval", "pixels:8", "--data", str(tmp_path / "tasks.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout and "2 .heic" in " ".join(done.stdout.split())
    for path in root.rglob("*"):
        if path.suffix in kinds:
            path.unlink()
    with pytest.raises(DataError, match=r"no readable image in this folder, got 2 \.heic"):
        open_folder(root)


def exif(orientation, kind="JPEG"):
    upright = np.zeros((40, 60, 3), np.uint8)
    upright[:, :30, 0] = upright[:, 30:, 2] = 255
    stored, told = {6: np.rot90(upright), 1: upright}[orientation], Image.Exif()
    told[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(stored)).save(buffer, format=kind, exif=told)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_converting_turns_photos_and_leaves_upright_ones_as_they_are(kind, tmp_path):
    root, suffix = tmp_path / "pictures", {"JPEG": "jpg"}.get(kind, kind.lower())
    put(root / "a" / f"turned.{suffix}", exif(6, kind))
    upright = put(root / "b" / f"upright.{suffix}", exif(1, kind))
    made = convert_folder(root, tmp_path / "out")
    assert made.turned == 1
    source = open_source(
        "x", DataConfig(sources={"x": {"kind": "shards", "shards": str(tmp_path / "out")}}).sources["x"]
    )
    for number in range(2):
        key, fields = source.storages[0].read(number)
        stored = np.asarray(
            Image.open(io.BytesIO(fields[suffix])).convert("RGB")
        )  # whether or not the reader applies EXIF
        assert stored.shape == (40, 60, 3) and stored[:, :25, 0].min() > 200 and stored[:, 35:, 2].min() > 200, key
    assert fields[suffix] == upright.read_bytes()


DEEP = {
    "F": np.float32(1) * np.arange(600).reshape(20, 30),
    "I": np.arange(600, dtype=np.int32).reshape(20, 30) * 999,
    "I;16": np.arange(600, dtype=np.uint16).reshape(20, 30) * 99,
    "CMYK": np.arange(2400, dtype=np.uint8).reshape(20, 30, 4),
    "YCbCr": np.arange(1800, dtype=np.uint8).reshape(20, 30, 3),
}


@pytest.mark.parametrize("mode", DEEP)
def test_converting_turns_pictures_that_no_png_holds(mode, tmp_path):
    image = Image.fromarray(DEEP[mode], mode="YCbCr" if mode == "YCbCr" else None)
    turned = Image.Exif()
    turned[0x0112] = 6
    (tmp_path / "in/a").mkdir(parents=True)
    image.save(tmp_path / "in/a/x.tiff", exif=turned)
    how = {"pixel_range": (0.0, 65535.0)}
    expected = decode_image((tmp_path / "in/a/x.tiff").read_bytes(), **how)
    assert convert_folder(tmp_path / "in", tmp_path / "out").turned == 1
    with tarfile.open(tmp_path / "out/00000.tar") as tar:
        data = tar.extractfile("000000000.png").read()
    assert np.array_equal(decode_image(data, **how), expected) and expected.size == (20, 30)
    assert Image.open(io.BytesIO(data)).getexif().get(0x0112, 1) == 1


def test_converting_keeps_all_bits_of_turned_sixteen_bit_colours(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    chunk = b"eXIf" + turned.tobytes().removeprefix(b"Exif\0\0")
    pixels = np.arange(1800, dtype=np.uint16).reshape(20, 30, 3) * 33
    data = cv2.imencode(".png", pixels)[1].tobytes()
    data = data[:33] + (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + data[33:]
    put(tmp_path / "in/a/x.png", data)
    convert_folder(tmp_path / "in", tmp_path / "out")
    with tarfile.open(tmp_path / "out/00000.tar") as tar:
        assert tar.extractfile("000000000.png").read() == data  # readers rotate it
    assert decode_image(data).size == (20, 30)


def test_pictures_that_no_reader_takes_are_counted_as_they_are_converted(tmp_path):
    put(tmp_path / "in/a/x.png", jpeg(1))
    put(tmp_path / "in/a/broken.png", b"no picture")
    large = io.BytesIO()
    Image.new("1", (13312, 13312)).save(large, format="PNG")
    put(tmp_path / "in/a/large.png", large.getvalue())
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(whole, format="PNG")
    put(tmp_path / "in/a/short.png", whole.getvalue()[:60])  # Pillow opens it, and fails when it looks for EXIF
    made = convert_folder(tmp_path / "in", tmp_path / "out")
    assert made.train == 4 and made.refused == {"bad image": 2, "too many pixels": 1}
    done = sparo("data", "convert", str(tmp_path / "in"), str(tmp_path / "line"))
    assert (
        "unusable images: 3 (bad image, too many pixels). Training skips them, but stops if their share exceeds"
        in done.stderr
    )
    report = check_storage(
        open_shards([str(tmp_path / "out/00000.tar")], False)[0], ShardsConfig(shards=str(tmp_path / "out"))
    )
    assert sorted(reason for _, reason in report.bad) == ["bad image", "bad image", "too many pixels"]


def test_rarer_members_of_shards_are_read_in_training_checks_and_evaluation(tmp_path):
    kinds = {"gif": "GIF", "tiff": "TIFF", "bmp": "BMP", "jfif": "JPEG"}
    rows = []
    for number, (suffix, kind) in enumerate(kinds.items()):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), (40 * number, 90, 0)).save(buffer, format=kind)
        rows.append((f"{number:03d}", {suffix: buffer.getvalue(), "txt": b"a caption", "cls": b"0"}))
    write_shards(tmp_path / "rare", rows, 8)
    report = check_storage(
        open_shards([str(tmp_path / "rare/00000.tar")], False)[0], ShardsConfig(shards=str(tmp_path / "rare"))
    )
    assert not report.bad and report.samples == 4
    assert [image.size for _, image, _ in evals_wds(str(tmp_path / "rare"), "label", "test")] == [(8, 8)] * 4
    with pytest.raises(BadSampleError, match="missing image"):
        image_bytes({"txt": b"x", "mask.png": b"x"}, ("jpg",))


def test_rows_without_an_image_are_named_or_skipped(tmp_path):
    for number in range(6):
        put(tmp_path / "im" / f"{number}.jpg", jpeg(number))
    table = tmp_path / "t.csv"
    rows = [f"im/{number}.jpg,a picture {number}" for number in range(6)]
    table.write_text("image,caption\n" + "\n".join([*rows[:3], "im/gone.jpg,gone", *rows[3:]]) + "\n")
    with pytest.raises(DataError, match=r"line 5: no such image, got 'im/gone\.jpg'\..*--skip-missing"):
        convert_csv(table, tmp_path / "all")
    made = convert_csv(table, tmp_path / "some", skip_missing=True, test=2)
    assert (made.train, made.test, made.missing) == (4, 2, 1)
    done = sparo("data", "convert", str(table), str(tmp_path / "line"), "--skip-missing")
    assert done.returncode == 0 and "1 rows without an image" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image,caption\n".encode("utf-16"), r"is UTF-16, not UTF-8\. Convert it with: iconv -f utf-16 -t utf-8"),
        ("image,caption\n".encode("utf-16-le"), "is UTF-16"),
        (
            b"name,caption\na.jpg,x\n",
            r"no column for the picture, got the columns name, caption\. Rename the matching column to image",
        ),
        (
            b"image,words\na.jpg,x\n",
            r"no column for the caption, got the columns image, words\. Rename the matching column to caption",
        ),
    ],
)
def test_errors_of_a_table_name_the_cause(content, message, tmp_path):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        convert_csv(tmp_path / "t.csv", tmp_path / "out")


def test_column_names_ignore_case(tmp_path):
    put(tmp_path / "a.jpg", jpeg(0))
    (tmp_path / "T.CSV").write_text("Image, Caption\na.jpg, one\n")
    assert convert_csv(tmp_path / "T.CSV", tmp_path / "out").train == 1
    assert sparo("data", "convert", str(tmp_path / "T.CSV"), str(tmp_path / "line")).returncode == 0


def test_shards_need_no_conversion(tmp_path, shards):
    with pytest.raises(
        DataError, match=r"contains shards already, got \d+ such as .*\.tar\. Check them with `sparo data check"
    ):
        convert_folder(shards, tmp_path / "out")
    put(tmp_path / "deep/x/y/0.tar", b"")
    with pytest.raises(DataError, match=r"contains shards already, got 1 such as 0\.tar.*sparo data check .*deep/x/y`"):
        convert_folder(tmp_path / "deep", tmp_path / "out")
    done = sparo("data", "convert", str(put(tmp_path / "t.csv.gz", b"x")), str(tmp_path / "out"))
    assert done.returncode == 2 and "t.csv.gz: is compressed. Unpack it: gunzip -k" in done.stderr
    packed = put(tmp_path / "x.tar.gz", gzip.compress(b"x"))
    done = sparo("data", "convert", str(packed), str(tmp_path / "out"))
    assert done.returncode == 2 and "x.tar.gz: is compressed. Unpack it: gunzip -k" in done.stderr


SQUARE = [2, 2, 10, 2, 10, 10, 2, 10]


def annotations(tmp_path, objects):
    """Write COCO annotations of one 16 x 16 image whose file name has dots, as exporters write them."""
    folder = tmp_path / "train"
    put(folder / "img.rf.0a1b.png", picture("PNG"))
    tree = {
        "images": [{"id": 1, "file_name": "img.rf.0a1b.png", "height": 32, "width": 32}],
        "annotations": [{"id": i, "image_id": 1, **one} for i, one in enumerate(objects)],
    }
    (tmp_path / "annotations").mkdir()
    path = tmp_path / "annotations" / "instances_train.json"
    path.write_text(json.dumps(tree))
    return path


def test_coco_skips_objects_without_an_outline_and_renumbers_categories(tmp_path):
    objects = [
        {"category_id": 7, "segmentation": [SQUARE]},
        {"category_id": 0, "segmentation": [[4, 20, 9, 20, 9, 28], [1, 1, 2, 2]]},  # one polygon of two points
        {"category_id": 7, "segmentation": []},
        {"category_id": 7, "segmentation": None},
        {"category_id": 7},
        {"category_id": 300, "segmentation": [20, 20, 28, 20, 28, 28]},  # a polygon without the outer list
        {"category_id": None, "segmentation": [SQUARE]},
        {"segmentation": [SQUARE]},
        {"category_id": 7, "segmentation": {}},
        {"category_id": 7, "segmentation": [None]},
    ]
    path = annotations(tmp_path, objects)
    (scene,) = coco(path)
    assert sorted(np.unique(scene.label)) == [0, 1, 2, 3] and sorted(np.unique(scene.semantic)) == [0, 1, 2, 3]
    assert [(o["id"], o["category"], o["class"]) for o in scene.metadata["objects"]] == [
        (1, 7, 2),
        (2, 0, 1),
        (3, 300, 3),
    ]
    assert "." not in scene.key and scene.metadata["file"] == "img.rf.0a1b.png"
    out = tmp_path / "out"
    written = write_published(out, coco(path), PublishedConfig(source="coco", files=["x"]))
    assert written.left_out == {
        "objects without an outline": 5,
        "polygons of fewer than three points": 2,
        "objects without a category": 2,
    }
    assert json.loads((out / "categories.json").read_text()) == {"1": 0, "2": 7, "3": 300}
    done = sparo("data", "convert", str(path), str(tmp_path / "line"), "--as", "coco")
    assert done.returncode == 0 and "left out: 5 objects without an outline" in done.stderr, done.stderr


def test_cocos_own_categories_keep_their_numbers(tmp_path):
    path = annotations(tmp_path, [{"category_id": 90, "segmentation": [SQUARE]}])
    (scene,) = coco(path)
    assert set(np.unique(scene.semantic)) == {0, 90}
    write_published(tmp_path / "out", coco(path), PublishedConfig(source="coco", files=["x"]))
    assert not (tmp_path / "out/categories.json").exists()


@pytest.mark.parametrize("place", ["../images/val", "../images", "images/val", "images", "val", "."])
def test_clevr_images_may_be_next_to_or_below_the_scenes(place, tmp_path):
    scenes = tmp_path / "scenes" / "CLEVR_val_scenes.json"
    scenes.parent.mkdir()
    scenes.write_text(json.dumps({"scenes": [{"image_filename": "a.png", "split": "val", "objects": []}]}))
    with pytest.raises(DataError, match=r"image a\.png is in none of"):
        list(clevr(scenes))
    put(scenes.parent / place / "a.png", picture("PNG"))
    assert len(list(clevr(scenes))) == 1


def test_check_counts_unusual_pictures_and_names_causes(tmp_path):
    alpha = io.BytesIO()
    Image.new("RGBA", (16, 16), (1, 2, 3, 0)).save(alpha, "PNG")
    samples = [
        ("a", {"jpg": exif(6), "txt": b"a"}),
        ("b", {"png": alpha.getvalue(), "txt": b"b"}),
        ("c", {"jpg": jpeg(1), "txt": b"c"}),
    ]
    samples.append(("d", {"jpg": b"\xff\xd8broken", "txt": b"d"}))
    write_shards(tmp_path / "s", iter(samples), 10)
    done = sparo("data", "check", str(tmp_path / "s"))
    words = " ".join(done.stdout.split())
    assert "usable, but unusual: 1 rotated by EXIF, 1 transparent" in words, words
    assert "bad image: 1 (d: " in words


def test_the_pixel_range_is_detected_in_the_first_batch():
    batch = {"image": torch.full((2, 3, 4, 4), 15, dtype=torch.uint8)}
    assert "pixels from 15 to 15, mean 15.0. The images are nearly black" in pixel_statistics(batch)
    batch["image"][0, 0, 0, 0] = 255
    assert pixel_statistics(batch).startswith(
        "first batch: pixels from 15 to 255"
    ) and "Nearly" not in pixel_statistics(batch)
    assert pixel_statistics({"text": torch.zeros(1)}) == ""
