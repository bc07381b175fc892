"""VTAB's sets as published, small: torchvision's folders and binary files, SUN397, CLEVR."""

import hashlib
import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from evals.sets import base
from evals.sets.library import open_library
from evals.sets.open_set import open_set
from evals.suite import catalogue
from evals.suite.labelled_tasks import ProbeTaskConfig
from evals.suite.zeroshot_tasks import ZeroshotTaskConfig
from sparo_train.core.errors import ConfigError, DataError
from tests.helpers.samples import jpeg


def png(seed):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (seed, 100, 20)).save(buffer, "PNG")
    return buffer.getvalue()


def ppm(seed):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (seed, 100, 20)).save(buffer, "PPM")
    return buffer.getvalue()


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def cifar(root, monkeypatch):
    """Write CIFAR-100's three pickles, and replace the expected checksums by theirs."""
    names = [f"class_{i}" for i in range(100)]
    for name, labels in (("train", [5, 6, 7, 8]), ("test", [3, 99])):
        pixels = np.arange(len(labels) * 3072).reshape(len(labels), 3072).astype(np.uint8)
        put(root / "cifar-100-python" / name, pickle.dumps({"data": pixels, "fine_labels": labels}))
    put(root / "cifar-100-python/meta", pickle.dumps({"fine_label_names": names}))
    sums = {name: md5(root / "cifar-100-python" / name) for name in ("train", "test", "meta")}
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(datasets.CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": sums["meta"]})


def test_cifar_is_read_and_its_sums_are_checked_before_anything_is_unpickled(tmp_path, monkeypatch):
    cifar(tmp_path, monkeypatch)
    found = open_library(tmp_path, "vtab/cifar100", "test")
    assert [(key, image.size, label) for key, image, label in found] == [
        ("test/000000", (32, 32), 3),
        ("test/000001", (32, 32), 99),
    ]
    assert np.asarray(found.read(0)[1])[0, 1].tolist() == [1, 1025 % 256, 2049 % 256]
    assert found.classnames()[3] == "class_3" and len(open_library(tmp_path, "vtab/cifar100", "train")) == 4
    assert found.identity() != open_library(tmp_path, "vtab/cifar100", "train").identity()
    with pytest.raises(DataError, match=r"cifar100, split val: known splits are train, test"):
        open_library(tmp_path, "vtab/cifar100", "val")
    (tmp_path / "classnames.txt").write_text("\n".join(f"own {i}" for i in range(100)))
    assert found.classnames()[3] == "own 3"
    touched = tmp_path / "touched"
    bomb = pickle.dumps(Bomb(str(touched)))
    put(tmp_path / "cifar-100-python/test", bomb)
    with pytest.raises(DataError, match=r"cifar100, split test: Dataset not found or corrupted. Download it yourself"):
        open_library(tmp_path, "vtab/cifar100", "test")
    assert not touched.exists()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_names_and_prompts_are_those_of_clip_benchmarks_builder(tmp_path, monkeypatch):
    builder = pytest.importorskip("clip_benchmark.datasets.builder")
    cifar(tmp_path, monkeypatch)
    found, theirs = open_library(tmp_path, "vtab/cifar100", "test"), builder.build_dataset(
        "cifar100", str(tmp_path), split="test", download=False
    )  # fmt: skip
    assert (found.classnames(), found.templates()) == (theirs.classes, theirs.templates)
    assert [label for _, _, label in found] == [label for _, label in theirs]


def test_folders_of_dtd_pets_and_flowers(tmp_path, monkeypatch):
    for i, name in enumerate(("dotted/dotted_1.jpg", "banded/banded_2.jpg")):
        put(tmp_path / "dtd/dtd/images" / name, jpeg(i))
        put(tmp_path / f"dtd/dtd/labels/{('test', 'train')[i]}1.txt", name + "\n")
        put(tmp_path / f"dtd/dtd/labels/{('train', 'test')[i]}1.txt", "".join(sorted(("dotted/dotted_1.jpg\n", "banded/banded_2.jpg\n"))))  # fmt: skip
    dtd = open_library(tmp_path, "vtab/dtd", "test")
    assert [label for _, _, label in dtd] == [0, 1] and dtd.classnames() == ["banded", "dotted"]
    put(tmp_path / "oxford-iiit-pet/images/Pug_1.jpg", jpeg(3))
    put(tmp_path / "oxford-iiit-pet/annotations/test.txt", "Pug_1 1 2 1\n")
    pets = open_library(tmp_path, "vtab/pets", "test")
    assert [label for _, _, label in pets] == [0] and len(pets.templates()) > 0
    for i in (1, 2):
        put(tmp_path / f"flowers-102/jpg/image_0000{i}.jpg", jpeg(i))
    savemat(tmp_path / "flowers-102/imagelabels.mat", {"labels": [[102, 7]]})
    savemat(tmp_path / "flowers-102/setid.mat", {"trnid": [[1, 2]], "valid": [[1, 2]], "tstid": [[2, 1]]})
    files = {"label": "imagelabels.mat", "setid": "setid.mat"}
    sums = {key: (name, md5(tmp_path / "flowers-102" / name)) for key, name in files.items()}
    with pytest.raises(DataError, match="flowers, split test: Dataset not found or corrupted"):
        open_library(tmp_path, "vtab/flowers", "test")
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", sums | {"image": ("102flowers.tgz", "")})
    assert [label for _, _, label in open_library(tmp_path, "vtab/flowers", "test")] == [6, 101]
    before = dtd.stamp()
    (tmp_path / "dtd/dtd/images/banded/banded_2.jpg").write_bytes(b"no image")
    again = open_library(tmp_path, "vtab/dtd", "test")
    assert again.stamp() != before and again.identity() != dtd.identity()
    with pytest.raises(DataError, match="vtab/dtd, sample 0: cannot be read"):
        again.read(0)


def test_svhn_has_zero_for_ten(tmp_path, monkeypatch):
    pixels = np.arange(32 * 32 * 3 * 2).reshape(32, 32, 3, 2).astype(np.uint8)
    savemat(tmp_path / "test_32x32.mat", {"X": pixels, "y": np.array([[10], [7]], np.uint8)})
    monkeypatch.setitem(datasets.SVHN.split_list, "test", ["", "test_32x32.mat", md5(tmp_path / "test_32x32.mat")])
    found = open_library(tmp_path, "vtab/svhn", "test")
    assert [label for _, _, label in found] == [0, 7] and found.classnames()[:2] == ["zero", "one"]
    assert np.asarray(found.read(1)[1]).tolist() == pixels[..., 1].tolist()


def open_known(root, name):
    config = ZeroshotTaskConfig(task="zeroshot", root=str(root), layout="torchvision", benchmark_name=name)
    return open_set(config, "label")


def write_recognition_sets(root):
    """Write two test images of each set of DataComp that torchvision reads, of classes 0 and 1."""
    for i in range(2):
        put(root / f"country211/country211/test/{('AD', 'AE')[i]}/{i}.jpg", jpeg(i))
        put(root / f"food101/food-101/images/apple_pie/{i}.jpg", jpeg(i))
        put(root / f"renderedsst2/rendered-sst2/test/{('negative', 'positive')[i]}/{i}.png", png(i))
        put(root / f"gtsrb/gtsrb/GTSRB/Final_Test/Images/0000{i}.ppm", ppm(i))
        put(root / f"fgvc_aircraft/fgvc-aircraft-2013b/data/images/{i}.jpg", jpeg(i))
        put(root / f"cars/stanford_cars/cars_test/{i}.jpg", jpeg(i))
    put(root / "gtsrb/gtsrb/GT-final_test.csv", "Filename;Width;ClassId\n00000.ppm;4;0\n00001.ppm;4;1\n")
    put(
        root / "food101/food-101/meta/test.json",
        json.dumps({"baby_back_ribs": ["apple_pie/1"], "apple_pie": ["apple_pie/0"]}),
    )
    aircraft = root / "fgvc_aircraft/fgvc-aircraft-2013b/data"
    put(aircraft / "variants.txt", "707-320\nF-16A/B\n")
    put(aircraft / "images_variant_test.txt", "0 707-320\n1 F-16A/B\n")
    cars = root / "cars/stanford_cars"
    (cars / "devkit").mkdir()
    savemat(cars / "devkit/cars_meta.mat", {"class_names": np.array([["AM General", "Audi"]], object)})
    annotation = np.array([("0.jpg", 1), ("1.jpg", 2)], dtype=[("fname", object), ("class", object)])
    savemat(cars / "cars_test_annos_withlabels.mat", {"annotations": annotation})
    gray = np.arange(2 * 28 * 28).astype(np.uint8)
    put(
        root / "mnist/MNIST/raw/t10k-images-idx3-ubyte",
        bytes.fromhex("00000803000000020000001c0000001c") + gray.tobytes(),
    )
    put(root / "mnist/MNIST/raw/t10k-labels-idx1-ubyte", bytes.fromhex("0000080100000002") + bytes([0, 1]))
    for name in ("images-idx3", "labels-idx1"):
        put(root / f"mnist/MNIST/raw/train-{name}-ubyte", b"not read")
    put(root / "stl10/stl10_binary/test_X.bin", np.arange(2 * 3 * 96 * 96).astype(np.uint8).tobytes())
    put(root / "stl10/stl10_binary/test_y.bin", bytes([1, 2]))
    put(root / "stl10/stl10_binary/class_names.txt", "airplane\nbird\n")


RECOGNITION = {
    "cars": ["AM General", "Audi"], "country211": ["AD", "AE"], "fgvc_aircraft": ["707-320", "F-16A/B"],
    "food101": ["apple pie", "baby back ribs"], "gtsrb": [], "mnist": ["0 - zero", "1 - one"],
    "renderedsst2": ["negative", "positive"], "stl10": ["airplane", "bird"],
}  # fmt: skip


def test_sets_of_datacomp_as_torchvision_reads_them(tmp_path, monkeypatch):
    write_recognition_sets(tmp_path)
    monkeypatch.setattr(datasets.STL10, "test_list", [
        [name, md5(tmp_path / "stl10/stl10_binary" / name)] for name in ("test_X.bin", "test_y.bin")
    ])  # fmt: skip
    monkeypatch.setattr(datasets.STL10, "train_list", [])
    for name, classes in RECOGNITION.items():
        found = open_library(tmp_path / name, name, "test")
        assert sorted((label, image.mode) for _, image, label in found) == [(0, "RGB"), (1, "RGB")], name
        assert found.own_classnames()[:2] == classes and len(found.identity()) == 64
        assert name in {entry.name for entry in catalogue.datasets()}
    mnist = open_library(tmp_path / "mnist", "mnist", "test")
    assert np.asarray(mnist.read(0)[1])[1, 0].tolist() == [28] * 3
    pytest.importorskip("clip_benchmark")
    assert mnist.classnames()[1] == "1"  # clip-benchmark's names, not torchvision's
    # With damaged annotations, torchvision may raise any exception.
    savemat(tmp_path / "cars/stanford_cars/cars_test_annos_withlabels.mat", {"other": 1})
    put(tmp_path / "gtsrb/gtsrb/GT-final_test.csv", "Name;ClassId\n0;0\n")
    put(tmp_path / "fgvc_aircraft/fgvc-aircraft-2013b/data/images_variant_test.txt", "0 unknown\n")
    put(tmp_path / "food101/food-101/meta/test.json", "[1, 2]")
    for name in ("cars", "gtsrb", "fgvc_aircraft", "food101"):
        with pytest.raises(DataError, match=f"{name}, split test: .+ Download it yourself"):
            open_library(tmp_path / name, name, "test")


def voc(root, objects):
    """Write one test image of VOC 2007 with these (class, left, top, right, bottom)."""
    put(root / "VOCdevkit/VOC2007/ImageSets/Main/aeroplane_test.txt", "000001  1\n")
    put(root / "VOCdevkit/VOC2007/JPEGImages/000001.jpg", jpeg(5, (40, 36)))
    boxes = "".join(
        f"<object><name>{name}</name><difficult>1</difficult><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax>"
        f"<ymax>{d}</ymax></bndbox></object>"
        for name, a, b, c, d in objects
    )
    put(root / "VOCdevkit/VOC2007/Annotations/000001.xml", f"<annotation>{boxes}</annotation>")


def test_objects_of_voc_2007_are_cropped_as_in_clip_benchmark(tmp_path):
    voc(tmp_path, [("dog", 3, 4, 20, 30), ("tvmonitor", 1, 1, 40, 36)])
    found = open_library(tmp_path, "voc2007", "test")
    assert [(key, image.size, label) for key, image, label in found] == [
        ("JPEGImages/000001.jpg#3,4,20,30", (17, 26), 11), ("JPEGImages/000001.jpg#1,1,40,36", (39, 35), 19),
    ]  # fmt: skip
    theirs = pytest.importorskip("clip_benchmark.datasets.voc2007").PASCALVoc2007Cropped(root=str(tmp_path), set="test")
    assert theirs.classes == found.own_classnames()
    for (_, image, label), (other, number) in zip(found, theirs, strict=True):
        assert label == number and np.array_equal(np.asarray(image), np.asarray(other))
    before = found.identity()
    voc(tmp_path, [("dog", 3, 4, 21, 30)])
    assert open_library(tmp_path, "voc2007", "test").identity() != before
    for objects in ([("unicorn", 1, 1, 2, 2)], [("dog", "x", 1, 2, 2)], [("dog", "inf", 1, 2, 2)]):
        voc(tmp_path, objects)
        with pytest.raises(DataError, match=r"000001\.xml: is not an annotation of VOC 2007"):
            open_library(tmp_path, "voc2007", "test")
    for text in ("<annotation>", ""):
        put(tmp_path / "VOCdevkit/VOC2007/Annotations/000001.xml", text)
        with pytest.raises(DataError, match="is not an annotation"):
            open_library(tmp_path, "voc2007", "test")


def clevr(root):
    depth = [[12.0, 8.0, 9.0], [8.2, 11.0, 30.0, 9.9], [10.5] * 10]
    scenes = [
        {"image_filename": f"CLEVR_val_{i:06d}.png", "objects": [{"pixel_coords": [1, 2, d]} for d in found]}
        for i, found in enumerate(depth)
    ]
    put(root / "CLEVR_v1.0/scenes/CLEVR_val_scenes.json", json.dumps({"scenes": scenes[::-1]}))
    for scene in scenes:
        put(root / "CLEVR_v1.0/images/val" / scene["image_filename"], jpeg(1))


def test_clevr_is_labelled_as_vtab_does(tmp_path):
    clevr(tmp_path)
    count = open_known(tmp_path, "vtab/clevr_count_all")
    assert [(key, label) for key, _, label in count][1] == ("CLEVR_val_000001.png", 1)
    assert [label for _, _, label in count] == [0, 1, 7] and count.classnames()[7] == "ten"
    distance = open_library(tmp_path, "vtab/clevr_closest_object_distance", "test")
    assert [label for _, _, label in distance] == [0, 1, 5] and distance.identity() != count.identity()
    put(tmp_path / "CLEVR_v1.0/scenes/CLEVR_val_scenes.json", "[]")
    with pytest.raises(DataError, match=r"CLEVR_val_scenes\.json: not CLEVR's scenes \(TypeError"):
        open_library(tmp_path, "vtab/clevr_count_all", "test")


def test_sun397_is_in_one_order_and_knows_its_classes(tmp_path):
    put(tmp_path / "SUN397/ClassName.txt", "/a/abbey\n/a/apse/indoor\n/b/back_yard\n")
    for name in ("b/back_yard/sun_b.jpg", "a/apse/indoor/sun_a.jpg", "a/abbey/sun_z.jpg"):
        put(tmp_path / "SUN397" / name, jpeg(2))
    found = open_library(tmp_path, "sun397", "test")
    assert [(key, label) for key, _, label in found] == [
        ("a/abbey/sun_z.jpg", 0), ("a/apse/indoor/sun_a.jpg", 1), ("b/back_yard/sun_b.jpg", 2),
    ]  # fmt: skip
    assert found.classnames() == ["abbey", "apse indoor", "back yard"]
    theirs = datasets.SUN397(tmp_path)
    assert {str(f.relative_to(tmp_path / "SUN397")): n for f, n in zip(theirs._image_files, theirs._labels, strict=True)} == {
        key: label for key, _, label in found
    }  # fmt: skip
    with pytest.raises(DataError, match="SUN397 as published has no split train"):
        open_library(tmp_path, "sun397", "train")
    put(tmp_path / "SUN397/c/cave/sun_c.jpg", jpeg(2))
    with pytest.raises(DataError, match=r"sun_c\.jpg: its folder is not a class of .*ClassName\.txt"):
        open_library(tmp_path, "sun397", "test")


def test_missing_files_and_unknown_sets_are_reported(tmp_path, monkeypatch):
    config = ZeroshotTaskConfig(task="zeroshot", root=str(tmp_path), layout="torchvision", benchmark_name="vtab/pet")
    with pytest.raises(ConfigError, match="benchmark_name=vtab/pet: did you mean 'vtab/pets'"):
        open_set(config, "label")
    with pytest.raises(DataError, match=r"vtab/pets, split test: Dataset not found. Download it yourself"):
        open_set(config.model_copy(update={"benchmark_name": "vtab/pets"}), "label")
    clevr(tmp_path)
    monkeypatch.setattr(base, "read_set_texts", lambda *_: None)
    found = open_known(tmp_path, "vtab/clevr_count_all")
    with pytest.raises(DataError, match=r"classnames\.txt: no such file"):
        found.classnames()
    with pytest.raises(DataError, match="Install clip-benchmark, which contains the prompts for vtab/clevr_count_all"):
        found.templates()


def test_the_catalogue_finds_published_files(tmp_path, monkeypatch):
    cifar(tmp_path / "vtab/cifar100", monkeypatch)
    listed = {entry.name: entry for entry in catalogue.datasets()}["vtab/cifar100"]
    assert catalogue.check_presence(listed, tmp_path) == ("odd", "2 images instead of 10,000")
    assert catalogue.check_presence(listed.model_copy(update={"n": 2}), tmp_path) == ("intact", "2 images")
    (probe,) = catalogue.tasks("vtab/cifar100:probe", tmp_path).values()
    assert isinstance(probe, ProbeTaskConfig) and len(open_set(probe, "label", probe.train_split)) == 4
    put(tmp_path / "vtab/cifar100/cifar-100-python/test", b"truncated")
    assert catalogue.check_presence(listed, tmp_path).state == "odd"
