"""Users' own evaluation sets: decoded as in training, unlike published ones, and mistakes that would score something else."""

import io
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from evals.encoders.baselines import PixelEncoder
from evals.encoders.encoder import encode_texts
from evals.encoders.loading import load_encoder
from evals.encoders.pixels import MappedPixels
from evals.sets.base import read_batches
from evals.sets.open_set import open_labelled, open_set
from evals.sets.table_rows import TableRow, table_rows
from evals.suite import catalogue
from evals.suite.labelled_tasks import KnnTaskConfig, ProbeTaskConfig
from evals.suite.suite import Suite
from evals.suite.zeroshot_tasks import ZeroshotTaskConfig
from sparo_data.convert import apply_exif_orientation, convert_folder
from sparo_data.convert_table import convert_csv
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.data.decode.decoding import decode, decode_own, notes, open_picture, to_8bit
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.detect import source_config
from sparo_train.data.sources.folder import FolderConfig
from sparo_train.data.sources.shards import ShardsConfig
from tests.helpers.samples import jpeg
from tests.unit.test_pictures import saved, turned


def transparent():
    """Return a PNG with a blue square on transparent black."""
    image = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    image.paste((0, 0, 255, 255), (5, 5, 15, 15))
    return saved(image, "PNG")


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def pixels(source, size=20):
    """Return what an encoder with `size` pixels gets from each image of a set."""
    (batch,) = read_batches(source, MappedPixels(size, size), [range(len(source))], 0)
    return batch.pixels.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("layout", ["folder", "table", "knn"])
def test_own_images_are_decoded_as_in_training_and_published_ones_as_by_open_clip(tmp_path, layout):
    files = {"a/clear.png": transparent(), "b/turned.png": turned(6)}
    write(tmp_path / "set", files)
    (tmp_path / "set/t.csv").write_text("image,label\na/clear.png,a\nb/turned.png,b")
    columns = {"columns": {"file": "t.csv", "images": ["{image}"], "label": "{label}"}} if layout == "table" else {}
    for published in (None, True):
        if layout == "knn":
            place = str(tmp_path / "set")
            _, source = open_labelled(KnnTaskConfig(train=place, test=place, published=published))
        else:
            config = {"root": str(tmp_path / "set"), "layout": layout, "published": published, **columns}
            source = open_set(ZeroshotTaskConfig.model_validate(config), "label")
        clear, upright = pixels(source)
        assert clear[0, 0].tolist() == ([0] * 3 if published else [255] * 3) and clear[10, 10, 2] == 255
        red_left = upright[10, 2, 0] == 255 and upright[10, -2, 2] == 255
        assert red_left == (not published)
        for got, data in zip((clear, upright), files.values(), strict=True):
            trained = MappedPixels(20, 20)(decode(data))
            assert np.array_equal(got, trained) == (not published)


def test_the_catalogues_own_sets_are_published_and_a_users_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/datasets").mkdir(parents=True)
    entry = {"group": "own", "task": "zeroshot", "options": {"layout": "folder"}}
    (tmp_path / "configs/datasets/mine.yaml").write_text(json.dumps({"mine": entry}))
    entries = {listed.name: listed for listed in catalogue.datasets()}
    published = {
        name: catalogue.make_task(entries[name], tmp_path, "zeroshot").published for name in ("mine", "imagenet1k")
    }
    assert published == {"mine": False, "imagenet1k": True}


def test_paths_and_images_of_python_have_the_same_encoding(tmp_path):
    encoder = PixelEncoder(20)
    for data in (transparent(), turned(6), jpeg(3)):
        path = write(tmp_path, {"x.img": data}) / "x.img"
        by_path, by_image = encoder.images([path]), encoder.images([Image.open(io.BytesIO(data))])
        assert np.allclose(by_path, by_image)
    array = np.asarray(Image.open(io.BytesIO(transparent())))
    assert array.shape[2] == 4 and np.allclose(encoder.images([array]), encoder.images([Image.fromarray(array)]))


def test_tensors_and_arrays_of_any_kind_are_encoded_and_other_objects_refused():
    encoder, values = PixelEncoder(8), np.random.default_rng(0).integers(0, 1000, (9, 9), dtype=np.uint16)
    assert torch.equal(encoder.images([values.astype(">u2")]), encoder.images([values]))
    floats = torch.rand(9, 9, 3, dtype=torch.bfloat16).requires_grad_()
    assert torch.equal(encoder.images([floats]), encoder.images([floats.detach().float()]))
    for other in (b"jpeg", io.BytesIO(), None):
        with pytest.raises(
            DataError, match=r"images: expected paths, PIL images, arrays or tensors, got (bytes|BytesIO|NoneType)"
        ):
            encoder.images([other])


def test_deep_images_are_mapped_before_they_are_rotated():
    values = np.linspace(0, 65535, 30 * 20).reshape(20, 30).astype(np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.fromarray(values), "PNG", exif=exif)
    for how in ("by_type", (0.0, 65535.0)):
        shown = np.asarray(to_8bit(decode_own(data), how))
        assert shown.shape == (30, 20, 3) and abs(int(shown[0, -1, 0])) <= 1 and shown[-1, 0, 0] >= 254
    inverted = saved(Image.fromarray(values), "TIFF", tiffinfo={262: 0})
    assert (
        np.asarray(decode(inverted))[0, 0, 0] == 255
        and np.asarray(to_8bit(decode_own(inverted), "by_type"))[0, 0, 0] == 255
    )


def test_sixteen_bit_colours_are_noticed_wherever_exif_is():
    cv2 = pytest.importorskip("cv2")
    data = cv2.imencode(".png", np.full((8, 8, 3), 4031, np.uint16))[1].tobytes()
    assert "more than 8 bits" in notes(open_picture(data))
    exif = b"MM\x00\x2a\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00"
    chunk = len(exif).to_bytes(4, "big") + b"eXIf" + exif + __import__("zlib").crc32(b"eXIf" + exif).to_bytes(4, "big")
    late = data[:-12] + chunk + data[-12:]
    assert apply_exif_orientation(late, "png").image == late


def test_a_folder_with_a_table_of_captions_or_with_splits_invents_no_captions(tmp_path, caplog):
    images = {f"train/{i}.jpg": jpeg(i) for i in range(3)} | {f"test/{i}.jpg": jpeg(9 + i) for i in range(3)}
    write(tmp_path / "hf", images)
    with pytest.raises(DataError, match="contains splits whose images have no captions"):
        convert_folder(tmp_path / "hf", tmp_path / "out")
    (tmp_path / "hf/train/metadata.csv").write_text("file_name,caption\n0.jpg,a dog\n1.jpg,a cat\n2.jpg,a cow")
    with pytest.raises(DataError, match=r"metadata.csv: has captions or labels.*sparo data convert .*metadata.csv OUT"):
        convert_folder(tmp_path / "hf", tmp_path / "out")
    assert convert_csv(tmp_path / "hf/train/metadata.csv", tmp_path / "out").train == 3
    write(tmp_path / "one", {f"images/{i}.jpg": jpeg(i) for i in range(3)})
    assert convert_folder(tmp_path / "one", tmp_path / "same").train == 3
    assert "the only class folder is images, so all images get the same caption" in caplog.text
    write(tmp_path / "one", {f"images/{i}.TXT": b"a dog" for i in range(3)})
    assert convert_folder(tmp_path / "one", tmp_path / "more").train == 3
    (tmp_path / "one/images/1.TXT").write_bytes("un café".encode("latin1"))
    with pytest.raises(DataError, match=r"1.TXT: expected UTF-8, got the byte 0xe9.*iconv"):
        convert_folder(tmp_path / "one", tmp_path / "again")


def test_class_names_in_another_order_are_refused(tmp_path):
    write(tmp_path / "set", {f"{name}/{i}.jpg": jpeg(i) for name in ("ant", "bee", "cat") for i in range(2)})
    (tmp_path / "set/classnames.txt").write_text("cat\nbee\nant")
    with pytest.raises(
        DataError,
        match=r"classnames.txt: its class names are not in the order of the classes, got 'cat' for the class 'ant'",
    ):
        convert_folder(tmp_path / "set", tmp_path / "out")
    with pytest.raises(DataError, match="not in the order of the classes"):
        open_set(ZeroshotTaskConfig(root=str(tmp_path / "set"), layout="folder"), "label").classnames()
    (tmp_path / "set/classnames.txt").write_text("an ant\na bee\na cat")
    assert convert_folder(tmp_path / "set", tmp_path / "out").train == 6


def test_tables_have_one_column_of_a_name_and_one_spelling_of_a_number(tmp_path):
    path = tmp_path / "t.csv"
    with pytest.raises(DataError, match="has several columns named 'label'"):
        list(table_rows("image,label,label\na.jpg,x,y", path))
    write(tmp_path, {"a.jpg": jpeg(0), "b.jpg": jpeg(1)})
    path.write_text("image,label\na.jpg,007\nb.jpg,7")
    config = {
        "root": str(tmp_path),
        "layout": "table",
        "columns": {"file": "t.csv", "images": ["{image}"], "label": "{label}"},
    }
    with pytest.raises(DataError, match="007 and 7 are the same number"):
        open_set(ZeroshotTaskConfig.model_validate(config), "label")


def test_a_caption_is_preferred_to_a_title(tmp_path):
    write(tmp_path, {"a.jpg": jpeg(0)})
    (tmp_path / "t.csv").write_text("image,title,caption\na.jpg,IMG_0,a dog")
    convert_csv(tmp_path / "t.csv", tmp_path / "out")
    (shard,) = open_source("s", ShardsConfig(shards=str(tmp_path / "out"))).storages
    assert shard.read(0)[1]["txt"] == b"a dog"


def test_a_single_image_or_caption_is_not_taken_for_several(tmp_path):
    encoder = PixelEncoder(20)
    path = write(tmp_path, {"a.jpg": jpeg(0)}) / "a.jpg"
    for single in (path, str(path), Image.open(path), np.zeros((8, 8, 3), np.uint8)):
        with pytest.raises(DataError, match="images: expected a list, got a single"):
            encoder.images(single)
    with pytest.raises(DataError, match="images: the list is empty"):
        encoder.images([])
    assert torch.equal(encoder.images(path for _ in range(2)), encoder.images([path, path]))
    pixels = np.asarray(Image.open(path))
    assert torch.equal(encoder.images([torch.from_numpy(pixels.copy())]), encoder.images([pixels]))
    assert torch.equal(encoder.images(np.array([str(path)] * 2)), encoder.images([path, path]))  # a column of names
    with pytest.raises(DataError, match="captions: expected a list, got a single str"):
        encode_texts("a dog", None, None, 1)  # type: ignore[arg-type]


def test_training_on_a_folder_of_splits_is_reported(tmp_path, caplog):
    write(tmp_path / "set", {f"{split}/a/{i}.jpg": jpeg(i) for split in ("train", "test") for i in range(2)})
    source = open_source("mine", FolderConfig(folder=str(tmp_path / "set")))
    assert sum(map(len, source.storages)) == 4 and "uses the images of all splits (test, train)" in caplog.text


def test_a_column_of_splits_is_reported(tmp_path, caplog):
    rows = [{"image": jpeg(i), "caption": "a dog", "split": split} for i, split in enumerate(("train", "train", "val"))]
    table = write(tmp_path, {f"{i}.jpg": row["image"] for i, row in enumerate(rows)}) / "mine.csv"
    table.write_text("image,caption,split\n" + "".join(f"{i}.jpg,a dog,{row['split']}\n" for i, row in enumerate(rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "hf")
    for places in ((str(table),), (str(tmp_path / "mine.parquet"),), (str(tmp_path / "hf"),)):
        caplog.clear()
        assert open_source("mine", source_config(places)).samples == 3
        assert caplog.text.count("uses the rows of all splits. The column 'split' contains train, val") == 1
    table.write_text("image,caption,split\n0.jpg,a dog,train\n1.jpg,a dog,\n")
    caplog.clear()
    assert open_source("mine", source_config((str(table),))).samples == 2 and not caplog.text


@pytest.mark.parametrize("cell", ['["a dog", "a cat"]', "['a dog', 'a cat']"])
def test_a_list_of_captions_in_a_cell_is_several_captions(cell):
    assert TableRow({"caption": cell}, "mine.csv, row 1").texts("{caption}") == ["a dog", "a cat"]
    with pytest.raises(
        DataError,
        match=r"row 1: \{caption\} contains a list of captions without commas between them, got .* Write the list in JSON",
    ):
        TableRow({"caption": cell.replace(",", "")}, "mine.csv, row 1").texts("{caption}")


def test_a_missing_device_is_not_a_damaged_checkpoint():
    with pytest.raises(ConfigError, match=r"device=cuda: torch finds no GPU\. Use device=cpu or auto"):
        load_encoder("pixels:8", device="cuda")
    assert load_encoder("pixels:8", device="auto").device.type == "cpu"


def test_what_is_ignored_or_joined_is_reported(tmp_path, caplog):
    write(
        tmp_path / "five", {"1.jpg": jpeg(1), "1.txt": b"a dog\na brown dog\n", "2.jpg": jpeg(2), "2.txt": b"a cat\n"}
    )
    assert convert_folder(tmp_path / "five", tmp_path / "out").train == 2
    assert (
        "1.jpg: the caption file has several lines. They are read as one caption" in caplog.text
        and "2.jpg" not in caplog.text
    )
    write(tmp_path / "out", {"x.tar.gz": b""})
    open_source("mine", ShardsConfig(shards=str(tmp_path / "out")))
    assert "1 compressed file(s) are ignored, such as x.tar.gz" in caplog.text
    write(tmp_path / "set", {f"{i}.jpg": jpeg(i) for i in range(4)})
    (tmp_path / "set/t.csv").write_text("image,label,split\n0.jpg,a,train\n1.jpg,b,train\n2.jpg,a,test\n3.jpg,c,test")
    columns = {"file": "t.csv", "images": ["{image}"], "label": "{label}", "split": "split"}
    place = str(tmp_path / "set")
    open_labelled(KnnTaskConfig.model_validate({"train": place, "test": place, "layout": "table", "columns": columns}))
    assert "1 class(es) have test images but no training images, such as 'c'" in caplog.text


def test_classes_of_folders_are_called_by_their_names(tmp_path):
    write(tmp_path / "train", {f"{name}/{i}.jpg": jpeg(i) for name in ("ant", "bee", "cat") for i in range(3)})
    write(tmp_path / "test", {f"{name}/{i}.jpg": jpeg(9 + i) for name in ("ant", "cat") for i in range(2)})
    nearest = KnnTaskConfig(train=str(tmp_path / "train"), test=str(tmp_path / "test"), k=(1,))
    result = Suite({"near": nearest}).run(PixelEncoder(8))["near"]
    # The test folder has no bees, so its second class is the third of the training folder.
    assert result.options["recall"].keys() == {"ant", "cat"}

    (tmp_path / "train/cat/2.jpg").unlink()
    shots = {"task": "probe", "root": str(tmp_path), "layout": "table", "fewshot_k": 3, "val_proportion": 0.0}
    rows = [
        f"{split}/{name}/{i}.jpg,{name},{split}"
        for split in ("train", "test")
        for name in ("ant", "cat")
        for i in range(2)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["image,label,split", *rows, "train/ant/2.jpg,ant,train"]))
    shots["columns"] = {"file": "t.csv", "images": ["{image}"], "label": "{label}", "split": "split"}
    with pytest.raises(DataError, match=r"fewshot_k=3: class cat has 2 training images"):
        Suite({"shots": ProbeTaskConfig.model_validate(shots)}).run(PixelEncoder(8))


def test_a_mistyped_root_is_answered_with_a_suggestion(tmp_path):
    write(tmp_path / "birds", {"a/1.jpg": jpeg(1)})
    with pytest.raises(DataError, match=r"brids: no such file or folder; did you mean 'birds'\?"):
        open_set(ZeroshotTaskConfig(root=str(tmp_path / "brids"), layout="folder"), "label")
