"""Layouts and conversions that lost captions, labels or splits, or took other data for the same."""

import csv
import io
import json
import shutil
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sparo_data.convert_rows import write_rows
from sparo_data.convert_source import convert_source
from sparo_data.convert_table import convert_csv
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.examples.samples import caption, list_captions
from sparo_train.data.rows.columns import encode_picture, row_members
from sparo_train.data.rows.packed import decode_picture
from sparo_train.data.rows.table import read_table
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.detect import source_block, source_config
from sparo_train.data.sources.fingerprint import fingerprint, refuse_changed
from sparo_train.data.video.episode import is_episode
from tests.helpers.formats import FORMATS
from tests.helpers.processes import sparo

MULTI_LINE = [
    "Hello, you\nA dog, a cat\nThe end",
    "A dog on grass, running\nA tree, tall\nA house, red\nA man, old\nA car, blue",
    "Photo: sunset, DSC_001.jpg\nTaken in Paris",
]


def image(i=0, mode="RGB"):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (12, 12, 3), dtype=np.uint8)).convert(mode).save(
        buffer, "PNG"
    )
    return buffer.getvalue()


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def opened(place, **keys):
    return open_source("a", source_config([str(place)], **keys))


def rows(source):
    return [storage.read(i)[1] for storage in source.storages for i in range(len(storage))]


def test_parquet_with_other_captions_of_equal_length_is_other_data(tmp_path):
    def written(shift):
        table = pa.table(
            {"image": [image(i) for i in range(12)], "caption": [f"cap {(i + shift) % 12:03d}" for i in range(12)]}
        )
        (tmp_path / str(shift)).mkdir()
        pq.write_table(table, tmp_path / f"{shift}/a.parquet", compression="none", write_statistics=False)
        return fingerprint([opened(tmp_path / str(shift))])

    first = written(0)
    with pytest.raises(DataError, match="the data changed since this checkpoint"):
        refuse_changed(first, written(1), "x")
    older = {"a": {key: value for key, value in first["a"].items() if key != "rows"}}
    refuse_changed(older, first, "x")  # a checkpoint of a version without this hash


def test_energon_folders_are_read_by_their_splits(tmp_path, caplog):
    for i in range(3):
        write_tar(tmp_path / f"{i}.tar", [(f"{i}.png", image(i)), (f"{i}.txt", b"a caption")])
    meta = tmp_path / ".nv-meta"
    meta.mkdir()
    (meta / ".info.yaml").write_text(json.dumps({"shard_counts": {f"{i}.tar": 1 for i in range(3)}}))
    (meta / "split.yaml").write_text(
        json.dumps({"split_parts": {"train": ["0.tar"], "val": ["1.tar", "2.tar"]}, "exclude": []})
    )
    assert source_block([str(tmp_path)]) == {"energon": str(tmp_path)}
    assert opened(tmp_path).samples == 1 and opened(tmp_path, split="val").samples == 2
    assert "field_map" not in caplog.text
    (meta / "dataset.yaml").write_text(json.dumps({"field_map": {"image": "png", "caption": "json[caption]"}}))
    assert opened(tmp_path).samples == 1 and "is not used, got caption: json[caption]" in caplog.text


def test_numbered_names_with_a_dot_are_not_a_video(tmp_path):
    fields = {f"{i:04d}.{kind}": b"x" for i in range(3) for kind in ("jpg", "txt")}
    assert not is_episode(fields) and is_episode({"000.jpg": b"", "001.jpg": b""})
    write_tar(
        tmp_path / "a.tar", [(f"IMG.{i:04d}.{k}", d) for i in range(4) for k, d in (("png", image(i)), ("txt", b"cap"))]
    )
    source = opened(tmp_path / "a.tar")
    with pytest.raises(BadSampleError, match="missing caption: dots in names"):
        caption(rows(source)[0], source.config)
    checked = sparo("data", "check", str(tmp_path / "a.tar"))
    assert checked.returncode == 1 and "dots in names" in checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "lines",
    [
        ["title\tfilepath", '"Big sale\t0.png', 'a 5" pipe\t1.png', "plain\t2.png"],
        ["title,filepath", '"Big sale,0.png', 'a 5" pipe,1.png', "plain,2.png"],
        ["image\tcaption", 'img0\t"Big', "img1\ta dog", 'img2\t5" pipe'],
    ],
)
def test_an_unbalanced_quotation_mark_is_refused(tmp_path, lines):
    table = tmp_path / "t.csv"
    table.write_text("\n".join(lines) + "\n")
    image_column = "filepath" if "filepath" in lines[0] else "image"
    with pytest.raises(DataError, match=r"a quotation mark joins several rows into one cell|more columns"):
        list(
            read_table(
                table, lambda names: [image_column, *(n for n in names if n != image_column)], (image_column,), None
            )
        )


def test_captions_of_several_lines_are_read(tmp_path):
    table = tmp_path / "t.csv"
    with table.open("w", newline="") as stream:
        csv.writer(stream).writerows([["image", "caption"], *(["0.png", text] for text in MULTI_LINE)])
    found = list(read_table(table, lambda names: list(names), ("image",), None))
    assert [cells for _, cells in found] == [["0.png", text] for text in MULTI_LINE]


def test_a_converted_table_keeps_lists_and_columns(tmp_path):
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "caption", "author"])
        for i in range(8):
            (tmp_path / f"{i}.png").write_bytes(image(i))
            writer.writerow([f"{i}.png", json.dumps([f"first {i}", f"second {i}"]), f"me {i}"])
    convert_csv(tmp_path / "t.csv", tmp_path / "out", test=3)
    train = rows(opened(tmp_path / "out/train"))
    facts = [json.loads(fields["json"]) for fields in train]
    assert all(f["author"].startswith("me") and len(f["captions"]) == 2 for f in facts)
    assert all(fields["txt"].decode() == f["captions"][0] for fields, f in zip(train, facts, strict=True))
    test = rows(opened(tmp_path / "out/retrieval/test"))
    assert all(len(fields["txt"].decode().splitlines()) == 2 and b"[" not in fields["txt"] for fields in test)


def test_conversions_keep_labels_and_all_captions(tmp_path):
    write_tar(
        tmp_path / "in/0.tar",
        [("0.png", image()), ("0.txt", b'["a 0", "b 0"]'), ("0.cls", b"7"), ("0.json", b'{"url": "u0"}')],
    )
    source = opened(tmp_path / "in")
    convert_source(source, tmp_path / "shards", 10, None, 0)
    (fields,) = rows(opened(tmp_path / "shards"))
    assert json.loads(fields["json"]) == {"captions": ["a 0", "b 0"], "label": 7, "url": "u0"}
    # A list of one is a list, too; other captions of a converted sample are in its .json; odd keys and halves of emoji are replaced.
    write_tar(tmp_path / "one/0.tar", [("caf\udce9.png", image()), ("caf\udce9.txt", b'["only"]')])
    one = opened(tmp_path / "one")
    convert_source(one, tmp_path / "one_shards", 10, None, 0)
    (fields,) = rows(opened(tmp_path / "one_shards"))
    assert json.loads(fields["json"]) == {"captions": ["only"]}
    for place, captions in ((tmp_path / "shards", ["a 0", "b 0"]), (tmp_path / "one", ["only"])):
        write_rows(opened(place), tmp_path / f"{place.name}_parquet", "parquet", 10)
        table = pq.read_table(tmp_path / f"{place.name}_parquet/00000.parquet")
        assert table["caption"].to_pylist() == [captions]
    write_tar(tmp_path / "none/0.tar", [("0.png", image()), ("1.png", image())])
    with pytest.raises(DataError, match=r"has no row .* skipped, by reason: 2 \(missing caption\)"):
        convert_source(opened(tmp_path / "none"), tmp_path / "none_shards", 10, None, 0)
    write_rows(source, tmp_path / "parquet", "parquet", 10)
    (row,) = pq.read_table(tmp_path / "parquet").to_pylist()
    assert row["caption"] == ["a 0", "b 0"] and json.loads(row["json"]) == {"label": 7, "url": "u0"}


def test_parquet_of_a_folder_with_captions_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.png").write_bytes(image())
    (tmp_path / "in/0.txt").write_text("a caption")
    found = sparo("data", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "parquet")
    assert found.returncode and "caption files in a folder, such as 0.txt, are not read" in " ".join(
        found.stderr.split()
    )


def test_bytes_in_lists_are_neither_captions_nor_facts(tmp_path):
    pq.write_table(pa.table({"image": [image()], "caption": [[b"cap"]], "n": [[1, 2]]}), tmp_path / "a.parquet")
    source = opened(tmp_path / "a.parquet")
    with pytest.raises(BadSampleError, match="missing caption"):
        list_captions(rows(source)[0], source.config)
    assert row_members(source.storages[0]._columns, {"image": image(), "caption": [b"x"]})["json"] == b"{}"


def test_pictures_of_every_mode_are_kept_or_refused():
    palette = Image.open(io.BytesIO(image())).convert("P")
    packed = np.array([12, 12, 1], "<u4").tobytes() + b"P" + palette.tobytes()
    with pytest.raises(BadSampleError, match="the picture needs a palette, which this format does not store"):
        decode_picture(packed)
    for mode in ("CMYK", "YCbCr", "F", "I", "LA", "RGBA", "1"):
        picture = Image.open(io.BytesIO(image())).convert(mode)
        assert Image.open(io.BytesIO(encode_picture(picture))).size == (12, 12)


def test_an_energon_index_of_a_part_of_a_shard_is_not_used(tmp_path):
    shard = write_tar(
        tmp_path / "a.tar", [(f"{i}.{k}", d) for i in range(30) for k, d in (("png", image(i)), ("txt", b"c"))]
    )
    whole = opened(shard)
    assert whole.samples == 30
    begins = np.array([0, 2048, 4096, 6144], "<u8")  # three samples of two members of at most 1 KiB
    (tmp_path / "a.tar.idx").write_bytes(begins.tobytes())
    for path in tmp_path.glob("*.idx.npy"):
        path.unlink()
    assert opened(shard).samples == 30


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (Image.new("L", (12, 12)), None),
        (Image.new("L", (12, 10)), "a mask whose size differs from its image"),
        (Image.new("RGB", (12, 12)), "bad mask"),
    ],
)
def test_masks_of_images_are_checked(tmp_path, mask, reason):
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    write_tar(tmp_path / "a.tar", [("0.png", image()), ("0.mask.png", buffer.getvalue())])
    checked = sparo("data", "check", str(tmp_path / "a.tar"))
    assert checked.returncode == (0 if reason is None else 1)
    assert reason is None or reason in checked.stdout + checked.stderr


@pytest.mark.parametrize(("kind", "name"), [("mds", "plain"), ("litdata", "tuple")])
def test_packed_files_with_other_captions_are_other_data(tmp_path, kind, name):
    folder = shutil.copytree(FORMATS / kind / name, tmp_path / kind)
    before = fingerprint([opened(folder)])
    assert before["a"]["rows"] and fingerprint([opened(folder)]) == before
    file = max(folder.glob("*.mds" if kind == "mds" else "*.bin"), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"caption", b"CAPTION"))
    with pytest.raises(DataError, match="the data changed since this checkpoint"):
        refuse_changed(before, fingerprint([opened(folder)]), "x")
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=file.name):
        fingerprint([opened(folder)])
