"""Published object-centric sets in files as their authors' tools write them: read completely, and refused if damaged."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coder

from sparo_data.official.formats import FORMATS, SETS, convert_published, find_source_files
from sparo_data.official.published import PublishedConfig, PublishedScene, write_published
from sparo_data.writer import encode_image
from sparo_train.core.errors import ConfigError, DataError
from tests.helpers.processes import sparo
from tests.unit.test_tfrecord import tfrecords

RNG = np.random.default_rng(0)


def pixels(array):
    """Write records like the official files: every pixel is a separate string."""
    return [bytes([value]) for value in array.ravel()], "byte"


def scene(name, objects=2):
    (height, width), background, last = SETS[name]
    count = background + objects
    owner = RNG.integers(0, count, (height, width))
    masks = (np.arange(count)[:, None, None] == owner) * np.uint8(255)
    image = RNG.integers(0, 256, (height, width, 3)).astype(np.uint8)
    stored = masks.transpose(1, 2, 0) if last else masks
    factors = {"x": (RNG.normal(size=count).tolist(), "float"), "shape": pixels(np.arange(count).astype(np.uint8)),
               "visibility": ([1.0] * (count - 1) + [0.0], "float"), "color": (RNG.normal(size=3 * count).tolist(), "float")}  # fmt: skip
    return image, np.maximum(owner - background + 1, 0), {"image": pixels(image), "mask": pixels(stored), **factors}


def read(place, name, **options):
    (source,) = find_source_files(place, name)
    return list(FORMATS[name].read(source))


def test_gray_images_of_the_binarized_sprites_are_read(tmp_path):
    image, label, stored = scene("multi_dsprites")
    stored["image"] = pixels(image[..., 0])
    (found,) = read(tfrecords(tmp_path / "m.tfrecords", [stored], gzip.compress), "multi_dsprites")
    assert np.array_equal(found.image, image[..., :1].repeat(3, axis=2)) and np.array_equal(found.label, label)


@pytest.mark.parametrize("name", SETS)
def test_multi_object_datasets(tmp_path, name):
    made = [scene(name) for _ in range(2)]
    path = tfrecords(tmp_path / "m.tfrecords", [stored for *_, stored in made], gzip.compress)
    for found, (image, label, stored) in zip(read(path, name), made, strict=True):
        assert np.array_equal(found.image, image) and np.array_equal(found.label, label)
        (first,) = found.metadata["objects"]  # the last one is not visible
        at = SETS[name].background
        assert first["id"] == 1 and first["shape"] == at and first["x"] == pytest.approx(stored["x"][0][at])
        assert len(first["color"]) == 3
    other = next(n for n in SETS if SETS[n].side != SETS[name].side)
    with pytest.raises(DataError, match="Check whether the files belong to another set"):
        read(path, other)
    tfrecords(tmp_path / "n.tfrecords", [{"video": ([b"x"], "byte")}])
    with pytest.raises(DataError, match="has no field 'image' that contains bytes"):
        read(tmp_path / "n.tfrecords", name)


def test_clevr_and_its_objects(tmp_path):
    (tmp_path / "images/val").mkdir(parents=True)
    (tmp_path / "scenes").mkdir()
    thing = {"size": "large", "material": "metal", "shape": "cube", "color": "red", "3d_coords": [0, 1, 2]}
    rows = [{"image_filename": f"C_{i}.png", "split": "val", "objects": [thing] * i} for i in range(3)]
    for row in rows:
        (tmp_path / "images/val" / row["image_filename"]).write_bytes(encode_image(np.zeros((4, 6, 3), np.uint8)))
    path = tmp_path / "scenes/CLEVR_val_scenes.json"
    path.write_text(json.dumps({"scenes": rows}))
    found = read(path, "clevr")
    assert (
        [len(s.metadata["objects"]) for s in found] == [0, 1, 2]
        and found[0].label is None
        and found[1].image.shape == (4, 6, 3)
    )
    nobody_says = {**rows[0], "objects": None}
    for bad in (
        {"scenes": [{"image_filename": "../x.png", "split": "val"}]},
        {"scenes": [3]},
        {},
        {"scenes": [nobody_says]},
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(DataError, match="scenes"):
            read(path, "clevr")


def test_clevrtex_with_palettes_and_colours(tmp_path):
    folder = tmp_path / "clevrtex_full/0"
    folder.mkdir(parents=True)
    label = np.array([[0, 1], [2, 2]], np.uint8)
    coloured = np.array([[[0, 0, 0], [255, 0, 0]], [[0, 9, 0], [0, 9, 0]]], np.uint8)
    for i, mask in enumerate((label, coloured)):
        (folder / f"T_{i}.png").write_bytes(encode_image(np.zeros((2, 2, 3), np.uint8)))
        (folder / f"T_{i}_flat.png").write_bytes(encode_image(mask))
        (folder / f"T_{i}.json").write_text('{"objects": []}')
    palette = Image.fromarray(label, "P")
    palette.putpalette([9, 9, 9, 1, 2, 3, 4, 5, 6])
    palette.save(folder / "T_0_flat.png")
    found = read(tmp_path / "clevrtex_full", "clevrtex")
    assert found[0].label.tolist() == label.tolist() and found[1].label.tolist() == [[0, 2], [1, 1]]
    (folder / "T_1_flat.png").unlink()
    with pytest.raises(DataError, match=r"T_1_flat\.png"):
        read(tmp_path, "clevrtex")


def test_coco_ignores_shared_pixels_and_crowds(tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val2017").mkdir()
    (tmp_path / "val2017/a.jpg").write_bytes(encode_image(np.zeros((10, 12, 3), np.uint8), "JPEG"))
    square = [[1.0, 1.0, 6.0, 1.0, 6.0, 6.0, 1.0, 6.0]]
    packed = np.zeros((10, 12), np.uint8)
    packed[4:8, 4:10] = 1
    rle = coder.encode(np.asfortranarray(packed))
    crowd = {"counts": [100, 20], "size": [10, 12]}
    rows = [{"image_id": 7, "category_id": 3, "segmentation": square, "iscrowd": 0},
            {"image_id": 7, "category_id": 5, "segmentation": {"counts": rle["counts"].decode(), "size": rle["size"]}, "iscrowd": 0},
            {"image_id": 7, "category_id": 5, "segmentation": crowd, "iscrowd": 1}]  # fmt: skip
    tree = {"images": [{"id": 7, "file_name": "a.jpg", "height": 10, "width": 12}], "annotations": rows}
    path = tmp_path / "annotations/instances_val2017.json"
    path.write_text(json.dumps(tree))
    (found,) = read(path, "coco")
    first = coder.decode(coder.merge(coder.frPyObjects(square, 10, 12))).astype(bool)
    expected = np.zeros((10, 12), np.uint8)
    expected[first], expected[packed == 1] = 1, 2
    expected[first & (packed == 1)] = 255
    expected[:, 10:] = 255
    assert np.array_equal(found.label, expected)
    assert set(np.unique(found.semantic)) == {0, 3, 5, 255} and (found.semantic[found.label == 2] == 5).all()
    image = {"id": 7, "file_name": "a.jpg", "height": 10, "width": 12}
    for changed, told in (
        ({"images": [{**image, "id": "7"}]}, "is not the number of an image"),
        ({"annotations": {}}, "annotations are not a list"),
        ({"images": [{**image, "id": i, "file_name": f"{i}/a.jpg"} for i in (7, 8)]}, "2 images are called a.jpg"),
    ):
        path.write_text(json.dumps({**tree, **changed}))
        with pytest.raises(DataError, match=told):
            read(path, "coco")
    (tmp_path / "val2017/x").mkdir()
    (tmp_path / "val2017/x/a.jpg").write_bytes(encode_image(np.full((10, 12, 3), 200, np.uint8), "JPEG"))
    path.write_text(json.dumps({**tree, "images": [{**image, "file_name": "x/a.jpg"}]}))
    assert read(path, "coco")[0].image.mean() == 200
    for change, told in (
        ({"segmentation": {"counts": "o" * 99, "size": [10, 12]}}, "exceeds the size of any image"),
        ({"segmentation": 3}, "has no usable segmentation"),
        (
            {"segmentation": [[1.0, None, 6.0, 1.0, 6.0, 6.0]]},
            "has no usable segmentation",
        ),  # pycocotools would end the process
        ({"segmentation": [[1.0, 1e300, 6.0, 1.0, 6.0, 6.0]]}, "is outside the image"),  # would fill the memory
        ({"segmentation": {"counts": [100, 21], "size": [10, 12]}}, "do not match the image"),
        ({"segmentation": {"counts": [130, -10], "size": [10, 12]}}, "do not match the image"),
        ({"segmentation": {"counts": "\u00ff0", "size": [10, 12]}}, "has no usable segmentation"),
        ({"category_id": "x"}, "category_id that is not a number"),
    ):
        path.write_text(json.dumps({**tree, "annotations": [{**rows[0], **change}]}))
        with pytest.raises(DataError, match=told):
            read(path, "coco")


def test_clips_can_be_converted_to_still_images(tmp_path):
    video, masks = RNG.integers(0, 256, (3, 8, 8, 3)).astype(np.uint8), RNG.integers(0, 5, (3, 8, 8)).astype(np.uint8)
    stored = {"video": ([encode_image(f) for f in video], "byte"), "segmentations": ([encode_image(m) for m in masks], "byte"),
              "metadata/video_name": ([b"vi.deo/7"], "byte")}  # fmt: skip
    path = tfrecords(tmp_path / "movi_a-train.tfrecord-00000-of-00001", [stored])
    found = read(tmp_path, "movi")
    assert [s.key for s in found] == ["vi_deo_7_000", "vi_deo_7_001", "vi_deo_7_002"]
    for s, image, label in zip(found, video, masks, strict=True):
        assert np.array_equal(s.image, image) and np.array_equal(s.label, label)
    made = [PublishedScene(f"{i}", video[0], masks[0], {"video": "a" if i < 3 else "b"}) for i in range(5)]
    held = write_published(tmp_path / "two", made, PublishedConfig(source="movi", test=1))  # no video is in both splits
    assert (held.test, held.train) == (3, 2)
    tfrecords(tmp_path / "movi_a-test.tfrecord-00000-of-00001", [stored])
    with pytest.raises(DataError, match="contains several splits"):
        find_source_files(tmp_path, "movi")
    assert find_source_files(tmp_path / "movi_a-train", "movi") == [
        path
    ]  # one split by its name, because TFDS writes several into a folder
    path.unlink()
    with tarfile.open(tmp_path / "v.tar", "w") as tar:
        for name, array, pack in (
            ("0.video.npy", video, bytes),
            ("0.segmentations.npy.gz", masks[..., None], gzip.compress),
            ("1.video.npy", video, bytes),
        ):
            buffer = io.BytesIO()
            np.save(buffer, array)
            data = pack(buffer.getvalue())
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    again = read(tmp_path, "npy")
    assert len(again) == 6 and np.array_equal(again[1].label, masks[1]) and again[5].label is None
    whole = (tmp_path / "v.tar").read_bytes()
    (tmp_path / "v.tar").write_bytes(whole[:700])
    with pytest.raises(DataError, match=r"v\.tar"):
        read(tmp_path, "npy")


@pytest.mark.long
def test_conversion_cuts_splits_and_counts(tmp_path):
    made = [scene("clevr_with_masks", objects=1 + i) for i in range(3)]
    empty = scene("clevr_with_masks", objects=0)
    tfrecords(tmp_path / "c.tfrecords", [s[-1] for s in (*made, empty)], gzip.compress)
    line = (
        "data",
        "convert",
        "c.tfrecords",
        "out",
        "--as",
        "clevr_with_masks",
        "--test",
        "1",
        "--crop",
        "clevr",
        "--size",
        "32",
    )
    done = sparo(*line, cwd=tmp_path)
    assert (
        done.returncode == 0
        and "out: 3 scenes for training, 1 for evaluation, 1 without an object" in done.stdout + done.stderr
    )
    with tarfile.open(tmp_path / "out/masks/test/0.tar") as tar:
        held = {m.name.partition(".")[2]: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    cut = Image.fromarray(made[0][1][29:221, 64:256].astype(np.uint8)).resize((32, 32), Image.Resampling.NEAREST)
    with Image.open(io.BytesIO(held["mask.png"])) as mask:
        assert np.array_equal(np.asarray(mask), np.asarray(cut))
    assert json.loads((tmp_path / "out/converted.json").read_text())["files"] == ["c.tfrecords"]
    refused = {
        ("--as", "clever"): "did you mean 'clevr'",
        ("--as", "objects_room"): "Check whether the files belong to another set",
        ("--crop", "middle"): "crop",
    }
    for change, told in refused.items():
        changed = list(line)
        changed[changed.index(change[0]) + 1] = change[1]
        changed[3] = f"other{len(told)}"
        done = sparo(*changed, cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    for change, told in (
        (["--size", "8"], "--size: applies to --as NAME"),
        (["--as", "clevr", "--template", "x"], "--template: applies to folders and tables"),
    ):
        done = sparo("data", "convert", ".", "more", *change, cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr, done.stderr
    for place in ("clevr", "coco"):
        with pytest.raises(DataError, match="is a folder; --as"):
            find_source_files(tmp_path, place)
    again = sparo(*line, cwd=tmp_path)
    assert again.returncode == 2 and "contains shards already" in again.stderr
    with pytest.raises(DataError, match=r"nothing\.tfrecords: no such file"):
        find_source_files(tmp_path / "nothing.tfrecords", "tetrominoes")
    with pytest.raises(ConfigError, match="--as nosuch"):
        find_source_files(tmp_path, "nosuch")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="found none"):
        find_source_files(tmp_path / "none", "movi")
    tfrecords(tmp_path / "e.tfrecords", [])
    with pytest.raises(DataError, match="no scene"):
        convert_published(
            [tmp_path / "e.tfrecords"], tmp_path / "e", PublishedConfig(source="tetrominoes", files=("e.tfrecords",))
        )
    assert not (tmp_path / "e").exists()
    # An interrupted conversion leaves nothing that could be scored as complete, and the folder is free for the next attempt. Other files stay.
    (tmp_path / "half/train").mkdir(parents=True)
    (tmp_path / "half/train/mine.txt").write_text("mine")
    whole = (tmp_path / "c.tfrecords").read_bytes()
    (tmp_path / "c.tfrecords").write_bytes(whole[: len(whole) * 3 // 4])
    line = (*line[:3], "half", *line[4:])
    done = sparo(*line, cwd=tmp_path)
    assert done.returncode == 2 and [p.name for p in (tmp_path / "half").rglob("*") if p.is_file()] == ["mine.txt"]
    (tmp_path / "c.tfrecords").write_bytes(whole)
    assert sparo(*line, cwd=tmp_path).returncode == 0 and (tmp_path / "half/masks/test/nshards.txt").exists()


def test_scenes_with_too_many_objects_are_skipped(tmp_path):
    def scenes():
        for number in range(12):
            label = np.zeros((8, 8), np.uint8)
            label[: number % 4 + 1, 0] = range(1, number % 4 + 2)
            label[-1] = 255  # pixels without an owner are not an object
            yield PublishedScene(f"{number}", np.zeros((8, 8, 3), np.uint8), label, {})

    def kept(name):
        with tarfile.open(next((tmp_path / name / "train").glob("*.tar"))) as tar:
            return sorted({int(member.split(".")[0]) for member in tar.getnames()})

    few = PublishedConfig(source="clevr_with_masks", max_objects=2)
    assert write_published(tmp_path / "few", scenes(), few).train == 6 and kept("few") == [0, 1, 4, 5, 8, 9]
    first = PublishedConfig(source="clevr_with_masks", max_objects=2, limit=3, test=1)
    assert write_published(tmp_path / "first", scenes(), first)[:2] == (2, 1) and kept("first") == [1, 4]
    listed = (s._replace(label=None, metadata={"objects": [{}] * (int(s.key) % 4)}) for s in scenes())
    assert write_published(tmp_path / "listed", listed, few).train == 9
