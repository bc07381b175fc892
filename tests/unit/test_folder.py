"""Image folders as training data and as labelled images."""

import numpy as np
import pytest

from evals.sets import base
from evals.sets.base import read_batches, split_batches
from evals.sets.wds import open_images
from sparo_train.core.config import resolve
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.examples.multi_crop import CropExamples, CropsConfig
from sparo_train.data.read.loader import Pipeline
from sparo_train.data.sources.base import DataConfig, open_source
from sparo_train.data.sources.fingerprint import fingerprint
from sparo_train.data.sources.folder import FolderConfig, open_folder
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.helpers.samples import jpeg


@pytest.fixture
def folder(tmp_path):
    """Write two classes of twelve images, and files that are not images."""
    for number in range(24):
        path = tmp_path / "images" / f"class{number % 2}" / "deep" / f"{number:03d}.JPG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    (tmp_path / "images/class0/notes.txt").write_text("x")
    (tmp_path / "images/class0/.hidden.jpg").write_text("x")
    return tmp_path / "images"


def test_every_image_is_there_once_with_its_class(folder):
    (part,) = open_folder(folder)
    found = [part.read(i) for i in range(len(part))]
    assert len({key for key, _ in found}) == 24
    assert all(fields["cls"] == key[5].encode() and set(fields) == {"jpg", "cls"} for key, fields in found)
    assert [key for key, _ in found] != sorted(key for key, _ in found)  # the order mixes classes
    assert [open_folder(folder)[0].read(i)[0] for i in range(24)] == [key for key, _ in found]


def test_it_trains_like_shards_and_knows_when_it_changed(folder):
    config = DataConfig(
        sources={"a": FolderConfig(folder=str(folder))}, workers=1, streams=4, shuffle_window=8, chunk=2
    )
    pipeline = Pipeline(config, 8, CropExamples(config, CropsConfig(local_crops_number=1, local_size=16), 32), seed=1)
    assert pipeline.plan.epoch_size == 24
    with_cursor = pipeline.start()
    first, second = next(with_cursor), next(with_cursor)
    with_cursor.close()
    again = pipeline.start(first.cursor)
    assert np.array_equal(next(again).batch["global_crops"], second.batch["global_crops"])
    again.close()
    before = fingerprint(pipeline.sources)
    (folder / "class0/deep/000.JPG").rename(folder / "class0/deep/999.JPG")
    assert fingerprint([open_source("a", config.sources["a"])]) != before


def test_a_deleted_file_is_a_bad_sample(folder):
    source = open_source("a", FolderConfig(folder=str(folder)))
    for path in folder.glob("*/*/*"):
        path.unlink()
    with pytest.raises(BadSampleError, match="unreadable file"):
        source.storages[0].read(3)


def test_mistakes(folder, tmp_path, shards):
    with pytest.raises(DataError, match=r"data\.sources\.a\.folder: .*nowhere is not a folder"):
        open_source("a", FolderConfig(folder=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no readable image"):
        open_source("a", FolderConfig(folder=str(tmp_path / "empty")))
    both = dino_recipe(shards, tmp_path)
    both["data"]["sources"]["a"]["folder"] = str(folder)
    with pytest.raises(ConfigError, match=r"set exactly one of shards, folder, .*got shards and folder"):
        resolve(RunConfig, both, "x")
    pairs = tiny_recipe(shards, tmp_path)
    pairs["data"]["sources"]["a"] = {"folder": str(folder)}
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.folder: has no captions"):
        resolve(RunConfig, pairs, "x")


def test_labelled_images_have_a_fixed_order_and_named_errors(folder, tmp_path, monkeypatch):
    def small(image):
        return np.asarray(image.resize((8, 8)))

    images = open_images(str(folder), "label", "train")
    assert len(images) == 24 and sorted(label for _, _, label in images) == [0] * 12 + [1] * 12
    keys = [key for key, _, _ in images]
    batches = list(read_batches(images, small, split_batches(range(24), 7), workers=1))
    assert [len(b.keys) for b in batches] == [7, 7, 7, 3] and [key for b in batches for key in b.keys] == keys
    assert batches[0].pixels.shape == (7, 3, 8, 8)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat/a.png").write_bytes(jpeg(0))
    with pytest.raises(DataError, match="has no label"):
        open_images(str(tmp_path / "flat"), "label", "train").read(0)
    next(folder.glob("class1/*/*")).write_bytes(b"no image")
    broken = open_images(str(folder), "label", "train")
    with pytest.raises(DataError, match="bad image"):
        list(broken)
    monkeypatch.setattr(base, "_FEW", 0)
    with pytest.raises(DataError) as told:
        list(read_batches(broken, small, split_batches(range(24), 6), workers=1))
    assert "bad image" in str(told.value) and "Traceback" not in str(told.value)
