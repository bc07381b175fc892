"""Conversion of own folders and tables to shards and a test set, and messages about their problems."""

import csv
import json
import os
import shlex
from pathlib import Path

import pytest

from evals.sets.wds import WdsSet
from launch.recipes import find_recipe
from sparo_data.convert import convert_folder
from sparo_data.convert_table import convert_csv
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.data.sources.shards import ShardReader
from sparo_train.train.run_config import load_run
from tests.helpers.processes import sparo
from tests.helpers.samples import jpeg


def test_image_folders_and_tables_become_shards(tmp_path):
    source = tmp_path / "images"
    (source / "red_cube").mkdir(parents=True)
    (source / "red_cube" / "a.b.JPG").write_bytes(jpeg(0))
    (source / "x.png").write_bytes(jpeg(1))
    (source / "x.txt").write_text("its own words")
    assert convert_folder(source, tmp_path / "out").train == 2
    reader = ShardReader()
    path = str(tmp_path / "out/00000.tar")
    assert [reader.read(path, i)[1]["txt"] for i in range(2)] == [b"a photo of a red cube", b"its own words"]
    with pytest.raises(DataError, match=r"out: contains 1 shard\(s\) already"):
        convert_folder(source, tmp_path / "out")
    (source / "y.png").write_bytes(jpeg(2))
    with pytest.raises(DataError, match=r"y\.png: has no caption, because there is neither a class folder nor y\.txt"):
        convert_folder(source, tmp_path / "again")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no readable image in this folder"):
        convert_folder(tmp_path / "empty", tmp_path / "again")


def test_a_test_set_shares_no_image_with_training(tmp_path):
    """Copies of an image are all in one split, with all of their captions, one per line."""
    lines = [f"{i}.jpg,words {i}" for i in range(20)] + [f"{i}.jpg,others {i}" for i in range(20)] + ["twin.jpg,twin"]
    for i in range(20):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    (tmp_path / "twin.jpg").write_bytes(jpeg(3))
    (tmp_path / "t.csv").write_text("\n".join(["image,caption", *lines]))
    made = convert_csv(tmp_path / "t.csv", tmp_path / "out", test=8)
    test = list(WdsSet(tmp_path / "out/retrieval", "captions"))
    assert made[:3] == (made.train, 8, "retrieval") and len(test) == 8 and made.train + 8 + made.copies == 41
    reader, path = ShardReader(), str(tmp_path / "out/train/00000.tar")
    trained = [reader.read(path, i)[1] for i in range(made.train)]
    captions = {text for _, _, texts in test for text in texts}
    assert len(captions) + made.train == 41 and not captions & {fields["txt"].decode() for fields in trained}
    numbers = {text.split()[1] for text in captions if text != "twin"}
    assert ("twin" in captions) == ("3" in numbers) and {f"words {n}" for n in numbers} <= captions
    with pytest.raises(DataError, match=r"--test 11: got 20 different images, and at most half"):
        convert_csv(tmp_path / "t.csv", tmp_path / "more", test=11)
    assert not (tmp_path / "more").exists()


def test_commands_that_convert_prints_can_be_typed(tmp_path):
    """Output folders of any name; each data set has its own run."""
    (tmp_path / "in/c").mkdir(parents=True)
    for i in range(8):
        (tmp_path / "in/c" / f"{i}.jpg").write_bytes(jpeg(i))
    done = sparo("data", "convert", "in", "my data: #1", "--test", "4", cwd=tmp_path)
    check, train = (shlex.split(line) for line in done.stdout.splitlines())
    assert sparo(*check[1:], cwd=tmp_path).returncode == 0
    config = load_run(find_recipe(Path(train[2])), train[3:])
    assert config.name == "my_data_1" and config.data.sources["mine"].shards == "my data: #1/train"
    assert config.eval.tasks["zeroshot"].root == "my data: #1/zeroshot" and list(config.data.sources) == ["mine"]


def test_images_that_cannot_be_decoded_are_never_scored(tmp_path):
    """Invalid test images would end a training at its last step. Those of the training set are counted and skipped."""
    for i in range(10):
        (tmp_path / "in/c").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in/c" / f"{i}.jpg").write_bytes(jpeg(i) if i % 2 else jpeg(i)[:200] + bytes([i]))
    (tmp_path / "in/.cache").mkdir()
    (tmp_path / "in/.cache/x.jpg").write_bytes(jpeg(11))  # files of other programs in the folder are not a class
    made = convert_folder(tmp_path / "in", tmp_path / "out", test=2)
    assert (made.train, made.test, made.broken) == (8, 2, 5) and len(
        list(WdsSet(tmp_path / "out/zeroshot", "label"))
    ) == 2
    (tmp_path / "in/c/1.txt").write_text("  \n")
    with pytest.raises(DataError, match=r"1\.txt: is empty, so 1\.jpg has no caption"):
        convert_folder(tmp_path / "in", tmp_path / "again")


def test_folder_names_that_are_not_utf8_are_paths_but_not_captions(tmp_path):
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    (odd / "a.jpg").write_bytes(jpeg(1))
    with pytest.raises(DataError, match=r"caf\\xe9: the folder's name .* is not valid UTF-8"):
        convert_folder(tmp_path, tmp_path / "out")
    (odd / "a.txt").write_text("a cup")
    convert_folder(tmp_path, odd / "out")
    assert ShardReader().index(str(odd / "out/00000.tar")).offsets[0] == 0
    done = sparo("data", "check", str(odd / "out"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_printed_commands_for_unusual_folders_can_be_typed(tmp_path):
    lines = ["filepath,title", *(f"{i}.jpg,words {i}" for i in range(6))]
    for i in range(6):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    (tmp_path / "t.csv").write_text("\n".join(lines))
    for folder in ("2024", "set [1]", "s{1,2}"):
        done = sparo("data", "convert", "t.csv", folder, "--test", "2", cwd=tmp_path)
        check, train = done.stdout.splitlines()
        found = sparo(*shlex.split(check)[1:], cwd=tmp_path)
        assert found.returncode == 0 and "nothing broken" in found.stdout, found.stderr
        assert load_run(find_recipe(Path("own_pairs")), shlex.split(train)[3:]).name in ("2024", "set_1_", "s_1_2_")
    with pytest.raises(ConfigError, match=r"--template 'a photo': has no {c}"):
        convert_folder(tmp_path, tmp_path / "out", "a photo")


def test_class_folders_are_scored_by_their_classes(tmp_path):
    for i in range(12):
        (tmp_path / "in" / f"class_{i % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / f"class_{i % 2}" / f"{i}.jpg").write_bytes(jpeg(i))
    made = convert_folder(tmp_path / "in", tmp_path / "out", test=6)
    whole = WdsSet(tmp_path / "out/zeroshot", "label")
    assert made[:3] == (6, 6, "zeroshot") and len(whole) == 6
    assert (whole.templates(), set(whole.classnames())) == (["a photo of a {c}"], {"class 0", "class 1"})


@pytest.mark.parametrize("separator", ["\t", ",", ";"])
def test_tables_become_shards_whatever_separates_their_columns(tmp_path, separator):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    (tmp_path / "t.csv").write_text(f"title{separator}file\na red one{separator}a.jpg\n")
    assert convert_csv(tmp_path / "t.csv", tmp_path / "out", "file", "title").train == 1
    assert ShardReader().read(str(tmp_path / "out/00000.tar"), 0)[1]["txt"] == b"a red one"
    assert convert_csv(tmp_path / "t.csv", tmp_path / "given", "file", "title", separator).train == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"flie,title\n",
            "no column for the picture, got the columns flie, title. Rename the matching column to filepath, or specify it with --image-column",
        ),
        (b"filepath,title\nnone.jpg,words\n", r"t\.csv, line 2: no such image, got 'none\.jpg'"),
        (b"filepath,title\na.jpg\n", r"t\.csv, line 2: the caption is missing"),
        (b"filepath,title\n,words\n", r"t\.csv, line 2: the image is missing"),
        (b"filepath,title\na.jpg,   \n", r"t\.csv, line 2: the caption is missing"),
        (b"filepath,title\na.jpg,caf\xe9\n", r"t\.csv: not UTF-8 .*iconv"),
        (b'filepath,title\na.jpg,x\na.jpg,"open\nb.jpg,y\n', r"t\.csv, line 3: a quote is opened and never closed"),
        (
            b'filepath,title\na.jpg,"open\n' + b"b.jpg,y\n" * 20_000,
            r"t\.csv, line 2: .*quotation mark has no closing mark",
        ),
        (b'"filepath,title\na.jpg,x\n', "no column for the picture"),
        (b"filepath,title\na.jpg,nan\n", r"t\.csv, line 2: the caption is missing, got 'nan'"),
        (b'filepath,title\na.jpg,"[""nan"", """"]"\n', r"t\.csv, line 2: the list has no caption"),
        (b"", "is empty. Its first line must name the columns"),
        (b"filepath,title\n", "has no row with an image and its caption"),
        (
            b"filepath,title\na.jpg,a dog, with hat\n",
            r"t\.csv, line 2: has more columns than the header. Quote captions that contain ','",
        ),
        (
            b"filepath,title,title\na.jpg,one,two\n",
            "has 2 columns named 'title'. Keep this name for the column that --caption-column reads",
        ),
    ],
)
def test_errors_in_a_table_are_reported(tmp_path, content, message):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        convert_csv(tmp_path / "t.csv", tmp_path / "out", "filepath", "title")
    (tmp_path / "t.csv").write_bytes(
        b'filepath,title\na.jpg,"two\nlines"\na.jpg,the "other" one'
    )  # no newline at the end
    convert_csv(tmp_path / "t.csv", tmp_path / "fine", "filepath", "title")
    (tmp_path / "late.csv").write_bytes(b"filepath,title\n" + b"a.jpg,x\n" * 3 + b"none.jpg,y\n")
    with pytest.raises(DataError, match=r"late\.csv, line 5"):
        convert_csv(tmp_path / "late.csv", tmp_path / "late", per_shard=2)
    assert not list((tmp_path / "late").glob("*.tar"))  # the next attempt can start
    with pytest.raises(ConfigError, match="--separator: expected one character"):
        convert_csv(tmp_path / "t.csv", tmp_path / "late", separator="ab")
    read = [ShardReader().read(str(tmp_path / "fine/00000.tar"), n)[1]["txt"] for n in range(2)]
    assert read == [b"two\nlines", b'the "other" one']
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        convert_csv(tmp_path / "none.csv", tmp_path / "out", "filepath", "title")


def test_a_failed_part_removes_only_its_own_shards(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    (tmp_path / "t.csv").write_bytes(b"filepath,title\n" + b"a.jpg,x\n" * 6 + b"none.jpg,y\n")
    convert_csv(tmp_path / "t.csv", tmp_path / "out", per_shard=2, part=(0, 2))  # rows 0, 1, 4 and 5
    with pytest.raises(DataError, match=r"t\.csv, line 8"):
        convert_csv(tmp_path / "t.csv", tmp_path / "out", per_shard=2, part=(1, 2))  # rows 2, 3 and 6
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["00000.tar", "00002.tar"]


def test_a_test_set_that_cannot_be_written_leaves_no_training_set_alone(tmp_path, monkeypatch):
    for n in range(6):
        (tmp_path / f"{n}.jpg").write_bytes(jpeg(n))
    (tmp_path / "t.csv").write_bytes(b"filepath,title\n" + b"".join(b"%d.jpg,x\n" % n for n in range(6)))

    def full(*_arguments, **_options):
        raise DataError("no space left")

    with monkeypatch.context() as patch, pytest.raises(DataError, match="no space left"):
        patch.setattr("sparo_data.captioned_sets.write_wds_layout", full)
        convert_csv(tmp_path / "t.csv", tmp_path / "out", test=2)
    assert convert_csv(tmp_path / "t.csv", tmp_path / "out", test=2).test == 2  # the same command continues


def test_unusual_captions_of_a_table_are_kept(tmp_path):
    """A zero is no sign of UTF-16, half an emoji is replaced, and a caption may be long."""
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    long = ("word " * 40_000).strip()
    rows = [["file", "caption"], ["a.jpg", "a\0b"], ["a.jpg", '["a \\ud83d", "b"]'], ["a.jpg", long]]
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    convert_csv(tmp_path / "t.csv", tmp_path / "out")
    read = [ShardReader().read(str(tmp_path / "out/00000.tar"), n)[1] for n in range(3)]
    assert [fields["txt"].decode() for fields in read] == ["a\0b", "a \ufffd", long]
    # If one row has a list, `caption_key: json:captions` finds the captions of all.
    assert [json.loads(fields["json"])["captions"] for fields in read] == [["a\0b"], ["a \ufffd", "b"], [long]]
