"""The published layouts of evaluation sets, written small: what is read, and errors of damaged files."""

import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image

from evals.feature_store.feature_table import Features
from evals.sets import captions as caption_sets
from evals.sets.base import Limited, Pair, published
from evals.sets.captions import SPLITS, KarpathySet, SugarCrepeSet
from evals.sets.image_files import ImageNetSet, ObjectNetSet, imagenet_templates, wordnet_ids
from evals.sets.library import ClevrSet
from evals.sets.open_set import open_set
from evals.sets.wds import WdsSet
from evals.suite import catalogue
from evals.suite.image_text_tasks import PairsTaskConfig, RetrievalTaskConfig
from evals.suite.labelled_tasks import KnnTaskConfig, ProbeTaskConfig
from evals.suite.scoring import collect_labels, facts_digest
from evals.suite.suite import Suite
from evals.suite.zeroshot_tasks import ZeroshotTaskConfig
from sparo_data.writer import write_wds_layout
from sparo_train.core.errors import ConfigError, DataError
from tests.helpers.samples import jpeg


def put(path, data=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg(len(str(path))) if data is None else data)


def test_imagenet_classes_are_those_with_a_folder_in_imagenets_order(tmp_path):
    wnids = [wordnet_ids()[i] for i in (7, 3, 900)]
    for wnid in wnids:
        for n in range(2):
            put(tmp_path / wnid / f"{wnid}_{n}.JPEG")
    found = ImageNetSet(tmp_path, expected=3)
    assert found.classnames() == [_openai(i) for i in (3, 7, 900)]
    assert [label for _, _, label in found] == [0, 0, 1, 1, 2, 2] and len(found.templates()) == 80
    with pytest.raises(DataError, match="expected 200 class folders, got 3"):
        ImageNetSet(tmp_path, expected=200)
    put(tmp_path / "val" / "x.jpg")
    with pytest.raises(
        DataError, match=r"val: is not one of ImageNet's 1,000 WordNet ids. Give the folder that contains"
    ):
        ImageNetSet(tmp_path)


def _openai(i):
    from open_clip import IMAGENET_CLASSNAMES

    return IMAGENET_CLASSNAMES[i]


def test_class_folders_name_their_classes(tmp_path):
    for split in ("train", "test"):
        for name in ("polar_bear", "cat"):
            put(tmp_path / split / name / "1.jpg")
    config = ProbeTaskConfig(task="probe", root=str(tmp_path), layout="folder")
    found = open_set(config, "label")
    assert [(key, label) for key, _, label in found] == [("cat/1.jpg", 0), ("polar_bear/1.jpg", 1)]
    assert found.classnames() == ["cat", "polar bear"] and found.templates() == ["a photo of a {c}."]
    assert len(open_set(config, "label", "train")) == 2
    with pytest.raises(DataError, match="val: missing; layout folder has a folder per split"):
        open_set(config, "label", "val")
    (tmp_path / "classnames.txt").write_text("a cat\na bear\n")
    assert found.classnames() == ["a cat", "a bear"]
    put(tmp_path / "test" / "stray.jpg")
    with pytest.raises(DataError, match=r"stray\.jpg: is outside the class folders"):
        open_set(config, "label")


def test_imagenet_v2_has_numbered_folders(tmp_path):
    for number in (0, 10, 2):
        put(tmp_path / str(number) / "a.jpeg")
    found = ImageNetSet(tmp_path, numbered=True)
    assert {key: label for key, _, label in found} == {"0/a.jpeg": 0, "2/a.jpeg": 1, "10/a.jpeg": 2}
    assert found.classnames() == [_openai(i) for i in (0, 2, 10)]


def objectnet(root):
    image = Image.new("RGB", (12, 10), (255, 0, 0))
    image.paste((0, 0, 255), (2, 2, 10, 8))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    for folder in ("air_freshener", "banana", "alarm_clock"):
        put(root / "objectnet-1.0/images" / folder / "1.png", buffer.getvalue())
    names = {"air_freshener": "Air freshener", "banana": "Banana", "alarm_clock": "Alarm clock"}
    for place, content in {
        "folder_to_objectnet_label.json": names,
        "objectnet_to_imagenet_1k.json": {"Banana": "banana", "Alarm clock": "analog clock; digital clock"},
    }.items():
        put(root / "objectnet-1.0/mappings" / place, json.dumps(content).encode())


def test_objectnet_keeps_shared_classes_and_crops_its_border(tmp_path):
    objectnet(tmp_path)
    cut, whole = ObjectNetSet(tmp_path), ObjectNetSet(tmp_path, border_crop=False)
    assert cut.classnames() == ["alarm clock", "banana"] and [label for _, _, label in cut] == [0, 1]
    assert cut.read(0)[1].size == (8, 6) and whole.read(0)[1].size == (12, 10)
    assert np.asarray(cut.read(0)[1])[..., 0].max() == 0 and np.asarray(whole.read(0)[1])[0, 0].tolist() == [255, 0, 0]
    assert cut.identity() != whole.identity()
    (tmp_path / "objectnet-1.0/mappings/objectnet_to_imagenet_1k.json").unlink()
    with pytest.raises(DataError, match=r"objectnet_to_imagenet_1k\.json: no such file"):
        ObjectNetSet(tmp_path)


COCO = {
    "images": [{"id": 7, "file_name": "b.jpg"}, {"id": 2, "file_name": "a.jpg"}, {"id": 9, "file_name": "c.jpg"}],
    "annotations": [
        {"image_id": 7, "caption": "b one"},
        {"image_id": 2, "caption": " a one "},
        {"image_id": 7, "caption": "b two, with a comma"},
    ],
}
KARPATHY = {
    "images": [
        {"filename": "a.jpg", "split": "test", "sentences": [{"raw": "a one"}]},
        {"filename": "z.jpg", "split": "train", "sentences": [{"raw": "z"}]},
        {"filename": "b.jpg", "split": "test", "sentences": [{"raw": "b one"}, {"raw": "b two, with a comma"}]},
    ]
}
FLICKR = "image,caption\na.jpg,a one\nb.jpg,b one\nb.jpg,b two, with a comma\n"


@pytest.mark.parametrize(
    ("name", "text", "empty"),
    [("coco.json", json.dumps(COCO), 1), ("own.json", json.dumps(KARPATHY), 0), ("flickr.txt", FLICKR, 0)],
)
def test_karpathy_splits_in_each_of_their_files(tmp_path, name, text, empty):
    for image in "abc":
        put(tmp_path / f"{image}.jpg")
    put(tmp_path / name, text.encode())
    found = {key: captions for key, _, captions in KarpathySet(tmp_path, tmp_path / name)}
    assert found["a.jpg"] == ["a one"] and found["b.jpg"] == ["b one", "b two, with a comma"]
    assert sum(not captions for captions in found.values()) == empty
    (tmp_path / "b.jpg").unlink()
    with pytest.raises(DataError, match=r"b\.jpg: missing; in all, 1 of \d files are missing"):
        KarpathySet(tmp_path, tmp_path / name).check()
    put(tmp_path / name, text[: len(text) // 2].encode() if name.endswith("json") else b"header\nno caption here\n")
    with pytest.raises(DataError, match=r"truncated\?|line 2 is not"):
        KarpathySet(tmp_path, tmp_path / name)


def sugar_crepe(root):
    for number, split in enumerate(SPLITS):
        rows = {
            str(i * (2 if split == "swap_obj" else 1)): {
                "filename": f"{(number + i) % 4:012d}.jpg",
                "caption": f"a {split} of {i}",
                "negative_caption": f"of {split} a {i}" if split.startswith("swap") else f"no {split} of {i}",
            }
            for i in range(3)
        }
        put(root / f"{split}.json", json.dumps(rows).encode())
    for i in range(4):
        put(root / "val2017" / f"{i:012d}.jpg")


def test_sugar_crepe_has_every_image_once_whatever_its_keys(tmp_path, monkeypatch):
    sugar_crepe(tmp_path)
    found = SugarCrepeSet(tmp_path)
    pairs = [pair for _, _, row in found for pair in row]
    assert len(found) == 4 and len(pairs) == 21 and found.version == "not published data"
    assert {p.key for p in pairs if p.kind == "swap_obj"} == {"0", "2", "4"}
    sums = {s: __import__("hashlib").sha256((tmp_path / f"{s}.json").read_bytes()).hexdigest()[:16] for s in SPLITS}
    monkeypatch.setattr(caption_sets, "CHECKSUMS", sums)
    assert SugarCrepeSet(tmp_path).version == "7,511 pairs"
    monkeypatch.setattr(caption_sets, "CHECKSUMS", {**sums, "swap_obj": "other"})
    monkeypatch.setattr(caption_sets, "OLD_SWAP_OBJ", sums["swap_obj"])
    assert SugarCrepeSet(tmp_path).version == "7,512 pairs"
    put(tmp_path / "add_obj.json", b'{"0": {"filename": "x.jpg", "caption": "a"}}')
    with pytest.raises(DataError, match=r"add_obj\.json: item 0 needs filename, caption and negative_caption"):
        SugarCrepeSet(tmp_path)
    (tmp_path / "add_obj.json").unlink()
    with pytest.raises(DataError, match=r"add_obj\.json: missing; SugarCrepe consists of seven"):
        SugarCrepeSet(tmp_path)


def replaced(tree, path, value):
    """Return a copy of nested dicts and lists with another value at one place."""
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


def places_in(tree, path=()):
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places_in(value, (*path, key))


def test_damaged_annotations_are_refused_or_read_as_text(tmp_path):
    for folder in ("val2017", "images/val", "on/images/chair"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("a.jpg", "b.jpg"):
            (tmp_path / folder / name).write_bytes(jpeg(0))
    pair = {"filename": "a.jpg", "caption": "c", "negative_caption": "d"}
    image = {"filename": "a.jpg", "split": "test", "sentences": [{"raw": "x"}]}
    coco = {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "caption": "x"}]}
    scene = {"image_filename": "a.jpg", "objects": [{"pixel_coords": [1, 2, 9.0]}] * 3}
    (tmp_path / "on/objectnet_to_imagenet_1k.json").write_text('{"Chair": "x"}')
    karpathy = ("k.json", lambda: KarpathySet(tmp_path / "val2017", tmp_path / "k.json"))
    openers = [
        (
            {"0": pair, "1": {**pair, "filename": "b.jpg"}},
            "swap_obj.json",
            lambda: SugarCrepeSet(tmp_path, ["swap_obj"]),
        ),
        (coco, *karpathy),
        ({"images": [image]}, *karpathy),
        ({"scenes": [scene]}, "scenes/CLEVR_val_scenes.json", lambda: ClevrSet(tmp_path, "distance", "test")),
        ({"chair": "Chair"}, "on/folder_to_objectnet_label.json", lambda: ObjectNetSet(tmp_path / "on")),
    ]
    numbers, names = (5, -1, 1.5, True, float("nan")), ("x", "", "../val2017/a.jpg", "/a.jpg", "a\0b", "\ud800")
    others = [None, [], {}, [1], *numbers, *names]
    (tmp_path / "scenes").mkdir()
    for tree, name, opener in openers:
        refused = 0
        for path, other in itertools.product(places_in(tree), others):
            (tmp_path / name).write_text(json.dumps(replaced(tree, path, other)))
            try:
                found = opener()
                found.identity()
                said = [row for _, _, fact in found for row in (fact if isinstance(fact, list) else [])]
            except DataError as error:
                refused += str(tmp_path) in str(error)
            else:
                assert all(isinstance(text, str) for row in said for text in ([row] if isinstance(row, str) else row))
        assert refused > 20, name


def test_several_labels_come_from_npy_members(tmp_path):
    def member(row):
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(row))
        return buffer.getvalue()

    rows = [[1, 0, 1], [0, 0, 1]]
    write_wds_layout(
        tmp_path, [(f"{i}", {"jpg": jpeg(i), "npy": member(r)}) for i, r in enumerate(rows)], classnames=list("abc")
    )
    (tmp_path / "dataset_type.txt").write_text("multilabel")
    found = WdsSet(tmp_path, "label")
    assert found.kind == "labels" and [fact for _, _, fact in found] == rows
    bad = tmp_path / "bad"
    damaged = member([0, 1]).replace(b"'descr'", b"'descr")  # a header that is not valid Python
    write_wds_layout(tmp_path / "torn", [("0", {"jpg": jpeg(0), "npy": damaged})], classnames=["a"])
    (tmp_path / "torn/dataset_type.txt").write_text("multilabel")
    with pytest.raises(DataError, match="npy cannot be read as an array"):
        WdsSet(tmp_path / "torn", "label").read(0)
    write_wds_layout(bad, [("0", {"jpg": jpeg(0), "npy": member([0.5, 1])})], classnames=["a"])
    (bad / "dataset_type.txt").write_text("multilabel")
    with pytest.raises(DataError, match="a single row, with a 0 or 1"):
        WdsSet(bad, "label").read(0)


def test_sets_that_would_score_as_something_else_are_refused_at_the_start(tmp_path):
    rows = [(f"{i}", {"jpg": jpeg(i), "cls": str(i % 2).encode()}) for i in range(4)]
    write_wds_layout(tmp_path / "braces", rows, classnames=["a", "b"], templates=["a photo of a {}."])
    with pytest.raises(DataError, match=r"'a photo of a {}\.' has no {c}"):
        Suite({"z": ZeroshotTaskConfig(root=str(tmp_path / "braces"))}).check()
    row = io.BytesIO()
    np.save(row, np.array([0, 1]))
    for split in ("train", "test"):
        write_wds_layout(
            tmp_path / "several", [("0", {"jpg": jpeg(0), "npy": row.getvalue()})], classnames=["a", "b"], split=split
        )
    (tmp_path / "several/dataset_type.txt").write_text("multilabel")
    with pytest.raises(DataError, match="has several labels per image"):
        places = {key: str(tmp_path / "several") for key in ("train", "test")}
        Suite({"k": KnnTaskConfig(layout="wds", **places)}).check()
    Suite({"p": ProbeTaskConfig(root=str(tmp_path / "several"))}).check()  # is scored by mean average precision
    ragged = Features([np.zeros((2, 3), np.float32)], ["a", "b"], [[0, 1], [1, 0, 1]])
    with pytest.raises(DataError, match="b: expected 2 labels, as for a, got 3"):
        collect_labels(ragged, WdsSet(tmp_path / "several", "label"))
    (tmp_path / "folders/cat").mkdir(parents=True)
    (tmp_path / "folders/cat/a.jpg").write_bytes(jpeg(0))
    knn = KnnTaskConfig(train=str(tmp_path / "folders"), test=str(tmp_path / "braces/test"))
    with pytest.raises(DataError, match="train: has class folders, but test has numeric labels"):
        Suite({"k": knn}).check()
    assert facts_digest(["a"], ["one"]) != facts_digest(["a"], ["two"]) != facts_digest(["b"], ["two"])
    assert facts_digest(["a"], [np.zeros((2, 2), int)]) != facts_digest(["a"], [np.eye(2, dtype=int)])


def test_a_limit_covers_all_classes_and_changes_the_identity(tmp_path):
    write_wds_layout(
        tmp_path,
        [(f"{i:02d}", {"jpg": jpeg(i), "cls": str(i // 10).encode()}) for i in range(30)],
        classnames=list("abc"),
    )
    whole = WdsSet(tmp_path, "label")
    few = Limited(whole, 6)
    assert [label for _, _, label in few] == [0, 0, 1, 1, 2, 2]
    assert few.identity() != whole.identity() and len(Limited(whole, 99)) == 30


def test_missing_annotations_are_reported_at_the_start(tmp_path):
    rows = [("0", {"jpg": jpeg(0), "cls": b"0"}), ("1", {"jpg": jpeg(1), "cls": b"1"})]
    write_wds_layout(tmp_path, rows, classnames=["a", "b"])
    probe = ProbeTaskConfig(root=str(tmp_path))
    for task, told in (
        (probe, "train/nshards.txt: missing"),
        (probe.model_copy(update={"train_split": "test", "val_split": "val"}), "val/nshards.txt: missing"),
        (ZeroshotTaskConfig(root=str(tmp_path), classes=3), "expected 3 class names, got 2"),
    ):
        with pytest.raises(DataError, match=told):
            Suite({"t": task}).check()
    Suite({"t": probe.model_copy(update={"train_split": "test"}), "z": ZeroshotTaskConfig(root=str(tmp_path))}).check()
    write_wds_layout(
        tmp_path, [("0", {"jpg": jpeg(0), "cls": b"00000000999999"}), ("1", {"jpg": jpeg(0), "cls": b"1" * 5000})]
    )
    read = WdsSet(tmp_path, "label")
    assert read.read(0)[2] == 999_999
    with pytest.raises(DataError, match="labels must be class numbers from 0"):
        read.read(1)


def test_a_layout_with_other_annotations_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="layout=imagenet: has label, but task pairs needs pairs"):
        open_set(PairsTaskConfig(task="pairs", root=str(tmp_path), layout="imagenet"), "pairs")
    with pytest.raises(ConfigError, match="layout=karpathy: needs the key `annotations`"):
        open_set(RetrievalTaskConfig(task="retrieval", root=str(tmp_path), layout="karpathy"), "captions")


def test_class_names_of_known_sets_come_from_clip_benchmark(tmp_path):
    pytest.importorskip("clip_benchmark")
    write_wds_layout(tmp_path, [("0", {"jpg": jpeg(0), "cls": b"0"})])
    config = ZeroshotTaskConfig(task="zeroshot", root=str(tmp_path), benchmark_name="vtab/eurosat")
    found = open_set(config, "label")
    assert len(found.classnames()) == 10 and len(found.templates()) == 3
    assert published("classnames", "imagenet1k") == [_openai(i) for i in range(1000)]
    assert published("templates", "imagenet1k") == imagenet_templates()
    with pytest.raises(DataError, match=r"classnames\.txt: no such file"):
        open_set(config.model_copy(update={"benchmark_name": "no such set"}), "label").classnames()


def test_the_catalogue_finds_sets_and_reports_their_problems(tmp_path):
    listed = {entry.name: entry for entry in catalogue.datasets()}
    assert sum(entry.group == "vtab" for entry in catalogue.datasets()) == 19
    assert catalogue.check_presence(listed["imagenet-a"], tmp_path).state == "absent"
    sugar_crepe(tmp_path / "sugar_crepe")
    found = catalogue.check_presence(listed["sugar_crepe"], tmp_path)
    assert found.state == "odd" and "not the published ones" in found.note
    write_wds_layout(tmp_path / "wds_vtab-pcam", [("0", {"jpg": jpeg(0), "cls": b"0"})], classnames=["a", "b"])
    found = catalogue.check_presence(listed["vtab/pcam"], tmp_path)
    assert found.state == "odd" and "1 images instead of 32,768" in found.note
    tasks = catalogue.tasks("vtab", tmp_path)
    assert list(tasks) == ["vtab/pcam"] and tasks["vtab/pcam"].root == str(tmp_path / "wds_vtab-pcam")
    assert len(catalogue.tasks("vtab", tmp_path / "empty")) == 19  # an error names the first of them
    assert catalogue.tasks("imagenet1k:probe", tmp_path)["imagenet1k:probe"].task == "probe"
    assert not catalogue.tasks("mscoco_captions:probe", tmp_path) and not catalogue.tasks("no", tmp_path)
    coco = catalogue.tasks("mscoco_captions", tmp_path)["mscoco_captions"]
    assert coco.layout == "karpathy" and coco.annotations.endswith("coco_test_karpathy.json")


def test_pairs_survive_being_stored():
    from evals.feature_store.feature_table import restore_tuples

    pairs = [Pair("swap_obj", "a", "b", "3")]
    assert restore_tuples(json.loads(json.dumps(pairs))) == pairs
    assert (
        restore_tuples(["one", "two"]) == ["one", "two"] and restore_tuples(4) == 4 and restore_tuples([1, 0]) == [1, 0]
    )
