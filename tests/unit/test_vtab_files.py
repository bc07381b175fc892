"""VTAB's sets from record files of TensorFlow Datasets and from the authors' own files: the same images, labels and splits."""

import gzip
import hashlib
import io
import struct

import numpy as np
import pytest
from PIL import Image

from evals.sets.base import published
from evals.sets.library import open_library
from evals.sets.tfds_set import md5_order, vehicle_class
from sparo_train.core.errors import DataError
from tests.unit.test_tfrecord import tfrecords


def png(array) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def image(seed, shape=(8, 8, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def example(features):
    """Return features in the form that the TFRecord library accepts."""
    kinds = {int: "int", float: "float", bytes: "byte"}
    return {name: (values, kinds[type(values[0])]) for name, values in features.items()}


def write_records(folder, builder, split, examples, shards=3):
    """Write the examples in the given order in consecutive shards, like TensorFlow Datasets."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [round(len(examples) * k / shards) for k in range(shards + 1)]
    for k in range(shards):
        path = folder / f"{builder}-{split}.tfrecord-{k:05d}-of-{shards:05d}"
        tfrecords(path, [example(features) for features in examples[bounds[k] : bounds[k + 1]]])


def content(eval_set):
    return [(np.asarray(picture.convert("RGB")).tobytes(), label) for _, picture, label in eval_set]


def test_md5_order_is_that_of_tensorflow_datasets():
    # Computed with another program from the definition: ascending md5 of the names of split and example.
    sizes = {"AnnualCrop": 3000, "Forest": 3000, "HerbaceousVegetation": 3000, "Highway": 2500, "Industrial": 2500, "Pasture": 2000,
             "PermanentCrop": 2500, "Residential": 3000, "River": 2500, "SeaLake": 3000}  # fmt: skip
    keys = [f"{name}_{name}_{i}.jpg" for name, count in sizes.items() for i in range(1, count + 1)]
    test = [keys[i] for i in md5_order("train", keys)[21600:]]
    assert [key.split("_", 1)[1] for key in test[:3]] == [
        "Pasture_1875.jpg",
        "Residential_150.jpg",
        "AnnualCrop_1282.jpg",
    ]
    assert len(test) == 5400 and sum(key.startswith("Pasture") for key in test) == 397
    norb = md5_order("test", [str(i) for i in range(24300)])[12150:]
    assert norb[:4] == [299, 2838, 15595, 9948] and norb[-1] == 4202


@pytest.mark.parametrize("name", ["vtab/eurosat", "vtab/resisc45"])
def test_class_folders_and_records_have_the_same_test_images(name, tmp_path):
    builder, top = name.rpartition("/")[2], {"vtab/eurosat": "2750", "vtab/resisc45": "NWPU-RESISC45"}[name]
    keys, pictures = [], {}
    for label, kind in enumerate(("Forest", "River", "SeaLake")):
        for i in range(11):
            path = tmp_path / f"raw/{top}/{kind}/{kind}_{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image(20 * label + i)).save(path)
            keys.append(f"{kind}_{path.name}")
            pictures[keys[-1]] = {"image": [path.read_bytes()], "label": [label], "filename": [path.name.encode()]}
    ordered = sorted(keys, key=lambda key: hashlib.md5(b"train" + key.encode()).hexdigest())
    folder = tmp_path / f"tfds/{builder}/rgb/2.0.0"
    write_records(folder, builder, "train", [pictures[key] for key in ordered])
    (folder / "label.labels.txt").write_text("Forest\nRiver\nSeaLake\n")
    for split, count in (("test", 7), ("validation", 6), ("train", 20)):
        raw, records = (open_library(tmp_path / place, name, split) for place in ("raw", "tfds"))
        assert content(raw) == content(records) and len(raw) == count
        assert raw.own_classnames() == records.own_classnames() == ["Forest", "River", "SeaLake"]
        assert raw.identity() != records.identity() and raw.check() is None
    with pytest.raises(DataError, match=r"has no split val\. Name one of train, validation, test"):
        open_library(tmp_path / "raw", name, "val")


def test_dsprites_from_the_authors_array_and_from_records(tmp_path):
    n = 60
    images = np.random.default_rng(0).integers(0, 2, (n, 64, 64), dtype=np.uint8)
    latents = np.stack(
        [np.zeros(n), np.zeros(n), np.zeros(n), np.arange(n) % 40, np.arange(n) % 32, np.zeros(n)], 1
    ).astype(np.int64)
    (tmp_path / "raw").mkdir()
    np.savez_compressed(
        tmp_path / "raw/dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz", imgs=images, latents_classes=latents
    )
    order = sorted(range(n), key=lambda i: hashlib.md5(f"train{i}".encode()).digest())
    rows = [
        {"image": [png(images[i])], "label_orientation": [int(latents[i, 3])], "label_x_position": [int(latents[i, 4])]} for i in order
    ]  # fmt: skip
    write_records(tmp_path / "tfds", "dsprites", "train", rows)
    for name, column, classes in (("orientation", 3, 40), ("x_position", 4, 32)):
        raw, records = (
            open_library(tmp_path / place, f"vtab/dsprites_label_{name}", "test") for place in ("raw", "tfds")
        )
        assert (
            content(raw) == content(records) and [label for _, _, label in raw] == latents[order[54:], column].tolist()
        )
        assert set(np.unique(np.asarray(raw.read(0)[1]))) == {0, 255} and len(raw.own_classnames()) == classes
    (tmp_path / "raw/dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz").write_bytes(b"PK no")
    with pytest.raises(DataError, match=r"is damaged .* Fetch it again"):
        open_library(tmp_path / "raw", "vtab/dsprites_label_orientation", "test")


@pytest.mark.parametrize("packed", [False, True])
def test_smallnorb_from_the_authors_arrays_and_from_records(packed, tmp_path):
    n, stem = 20, "smallnorb-5x01235x9x18x6x2x96x96-testing"
    cameras = np.random.default_rng(0).integers(0, 256, (n, 2, 6, 6), dtype=np.uint8)
    info = np.stack([np.arange(n), np.arange(n) % 9, 2 * (np.arange(n) % 18), np.zeros(n)], 1).astype("<i4")

    def write(part, array, magic):
        shape = [*array.shape, *[1] * (3 - array.ndim)]
        data = struct.pack(f"<{2 + len(shape)}i", magic, array.ndim, *shape) + array.tobytes()
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / f"raw/{stem}-{part}.mat{'.gz' if packed else ''}").write_bytes(
            gzip.compress(data) if packed else data
        )

    write("dat", cameras, 0x1E3D4C55)
    write("info", info, 0x1E3D4C54)
    order = sorted(range(n), key=lambda i: hashlib.md5(f"test{i}".encode()).digest())
    rows = [
        {"image": [png(cameras[i, 0])], "image2": [png(cameras[i, 1])], "label_azimuth": [int(info[i, 2] // 2)], "label_elevation": [int(info[i, 1])]}
        for i in order
    ]  # fmt: skip
    write_records(tmp_path / "tfds", "smallnorb", "test", rows)
    for name in ("vtab/smallnorb_label_azimuth", "vtab/smallnorb_label_elevation"):
        raw, records = (open_library(tmp_path / place, name, "test") for place in ("raw", "tfds"))
        assert content(raw) == content(records) and len(raw) == 10
    write("dat", cameras[:-1], 0x1E3D4C55)
    with pytest.raises(DataError, match=r"differs from the number of labels \(20\)"):
        content(open_library(tmp_path / "raw", name, "test"))


def test_kitti_is_split_by_video_and_labelled_by_the_closest_vehicle(tmp_path):
    cases = [
        ([0], [8.0], 0),
        ([0, 1], [30.0, 8.1], 1),
        ([2], [20.5], 2),
        ([3], [1.0], 3),
        ([], [], 3),
        ([0], [20.0], 1),
    ]
    for types, depths, label in cases:
        assert vehicle_class(types, depths) == label
    n, videos = 40, [f"2011_09_{i:02d}" for i in range(12)]
    order = np.random.default_rng(1).permutation(n) + 1
    (tmp_path / "mapping").mkdir()
    (tmp_path / "mapping/train_rand.txt").write_text(",".join(map(str, order)))
    (tmp_path / "mapping/train_mapping.txt").write_text("\n".join(f"2011 {videos[i % 12]} {i:010d}" for i in range(n)))
    for i in range(n):
        for folder in ("image_2", "label_2"):
            (tmp_path / f"training/{folder}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image(i)).save(tmp_path / f"training/image_2/{i:06d}.png")
        kind, depth = (("Car", 5.0), ("Van", 12.0), ("Truck", 40.0), ("Cyclist", 2.0), ("DontCare", -1000.0))[i % 5]
        box = " ".join(["0"] * 10)
        (tmp_path / f"training/label_2/{i:06d}.txt").write_text(f"{kind} {box} 0 0 {depth} 0\n")
    seeded = np.random.RandomState(123)
    test = set(seeded.choice(sorted(videos), 1, replace=False))
    expected = [i for i in range(n) if videos[(order[i] - 1) % 12] in test]
    found = open_library(tmp_path, "vtab/kitti_closest_vehicle_distance", "test")
    assert [int(key.rpartition("/")[2][:6]) for key, _, _ in found] == expected
    assert [label for _, _, label in found] == [(0, 1, 2, 3, 3)[i % 5] for i in expected]
    sizes = [
        len(open_library(tmp_path, "vtab/kitti_closest_vehicle_distance", split))
        for split in ("train", "validation", "test")
    ]
    assert sum(sizes) == n


def test_official_splits_of_record_files(tmp_path):
    rows = [{"image": [png(image(i))], "label": [i % 5], "name": [b"x"]} for i in range(9)]
    folder = tmp_path / "diabetic_retinopathy_detection/btgraham-300/3.0.0"
    write_records(folder, "diabetic_retinopathy_detection", "test", rows, 2)
    found = open_library(tmp_path, "vtab/diabetic_retinopathy", "test")
    assert [label for _, _, label in found] == [i % 5 for i in range(9)] and found.read(4)[0] == "test/000004"
    (folder / "diabetic_retinopathy_detection-test.tfrecord-00001-of-00002").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 00002 files, such as .*-00001-of-00002"):
        open_library(tmp_path, "vtab/diabetic_retinopathy", "test")
    with pytest.raises(DataError, match=r"has neither caltech101-test\.tfrecord-\* \(TensorFlow Datasets\) nor"):
        open_library(tmp_path, "vtab/caltech101", "test")
    write_records(
        tmp_path / "x/3.0.0", "caltech101", "test", [{"image": [b"no image"], "label": [0]}, {"other": [1]}], 1
    )
    bad = open_library(tmp_path / "x", "vtab/caltech101", "test")
    with pytest.raises(DataError, match=r"record 0"):
        bad.read(0)
    with pytest.raises(DataError, match=r"record 1: is not an example of caltech101"):
        bad.read(1)


def test_names_of_caltech_are_those_of_vtab():
    names = published("classnames", "vtab/caltech101")
    assert names is None or (len(names) == 102 and names[4] == "background")
