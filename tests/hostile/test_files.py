"""Test checkpoints, data sets, results and records from others: invalid ones are named, the exit code is 2, and nothing is lost."""

import argparse
import io
import json
import os
import pickle
import shutil

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from tests.helpers.samples import eval_sets, jpeg
from tests.hostile.conftest import assert_ends


@pytest.fixture(scope="module")
def scored(home, tmp_path_factory):
    """Make a trained run, its export, and sets to score them on."""
    place = tmp_path_factory.mktemp("scored")
    assert_ends(["train", str(home / "good.yaml"), f"out={place}/runs"], 0, ["finished"])
    assert_ends(["export", str(place / "runs/tiny")], 0, [])
    (place / "tasks.yaml").write_text(yaml.safe_dump({"tasks": eval_sets(place / "sets")}))
    return place


class _Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/sparo-was-run",)


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


W = torch.zeros(3, 3)
FILES = {
    "nothing.pt": (b"", "nothing.pt"),
    "page.pt": (b"<!DOCTYPE html><html>404</html>", "is it a web page"),
    "pointer.pt": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git-lfs pointer"),
    "code.pt": (pickle.dumps(_Runs()), "code.pt"),
    "code2.pt": (saved({"state_dict": _Runs()}), "could run code"),
    "list.pt": (saved([1, 2]), "list.pt: contains no state dict"),
    "number.pt": (saved(7), "number.pt: contains no state dict"),
    "empty.pt": (saved({}), "empty.pt"),
    "numbered.pt": (saved({1: W, 2: W}), "numbered.pt"),
    "mixed.pt": (saved({"a": W, 3: W}), "mixed.pt"),
    "strings.pt": (saved({"state_dict": {"a": "b"}}), "strings.pt: contains no state dict"),
    "other.pt": (saved({"conv.weight": W}), "other.pt"),
    "teacher-list.pth": (saved({"teacher": [W], "student": {}}), "teacher-list.pth"),
    "teacher-empty.pth": (
        saved({"teacher": {}, "student": {}}),
        "state=teacher: the file has no state dict with this name",
    ),
    "teacher-odd.pth": (saved({"teacher": {"backbone.cls_token": W}}), "teacher-odd.pth"),
    "teacher-code.pth": (saved({"teacher": {}, "args": argparse.Namespace(a=_Runs())}), "could run code"),
    "teacher-number.pth": (saved({"teacher": {5: W, "cls_token": W}}), "teacher-number.pth"),
    "timm.pth": (saved({"cls_token": W, "head.weight": W, "head.bias": W}), "Write timm:NAME@"),
    "cut.safetensors": (b"\x10\0\0\0\0\0\0\0{", "cut.safetensors"),
    "huge.safetensors": (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "huge.safetensors"),
    "json.safetensors": (b'{"a": 1}', "json.safetensors"),
    "zip.pt": (b"PK\x03\x04" + bytes(100), "zip.pt"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_other_than_a_checkpoint_is_refused_without_running_code(name, scored, tmp_path):
    content, says = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert_ends(
        ["eval", name, "--data", str(scored / "tasks.yaml"), "--features", "none"], 2, [name, says], cwd=tmp_path
    )
    assert not os.path.exists("/tmp/sparo-was-run")  # noqa: PTH110


PLACES = {
    "nowhere": "nowhere: no such file or folder",
    "pixels:x": "expected pixels:SIZE",
    "pixels:0": "expected pixels:SIZE",
    "open_clip:ViT-B-32": "expected open_clip:NAME@FILE",
    "open_clip:ViT-Z-99@x.pt": "open_clip:ViT-Z-99",
    "open_clip:ViT-B-32@nowhere.pt": "neither a file nor a tag",
    "open_clip:ViT-B-32@numbers.pt": "numbers.pt",
    "timm:vit_elephant@x": "timm:vit_elephant",
    "timm:vit_tiny_patch16_224@nowhere.pt": "is not a file",
    "timm:vit_tiny_patch16_224@numbers.pt": "numbers.pt",
    "hf:empty": "hf:empty",
    "empty": "not a run folder",
    "odd-run": "odd-run",
    "odd-export": "odd-export",
    "list-export": "list-export",
    "no-steps": "no complete checkpoint yet",
    "meta-list": "meta-list/meta.json",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_path_without_a_checkpoint_is_refused_by_name(place, scored, tmp_path):
    (tmp_path / "numbers.pt").write_bytes(saved({1: W}))
    for folder, files in {
        "empty": {},
        "odd-run": {"config.yaml": "objective: 7\n"},
        "odd-export": {"open_clip_config.json": '{"model_cfg": 3}'},
        "list-export": {"open_clip_config.json": "[]"},
        "no-steps": {"config.yaml": (scored / "runs/tiny/config.yaml").read_text()},
        "meta-list": {"meta.json": "[]"},
    }.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    shutil.copytree(scored / "runs/tiny", tmp_path / "run")
    step = tmp_path / "run/checkpoints/step-00000003"
    shutil.copy(tmp_path / "meta-list/meta.json", step / "meta.json")
    asked = str(step) if place == "meta-list" else place
    says = "meta.json: not readable" if place == "meta-list" else PLACES[place]
    env = {"HF_HUB_OFFLINE": "1"}
    assert_ends(
        ["eval", asked, "--data", str(scored / "tasks.yaml"), "--features", "none"], 2, [says], cwd=tmp_path, **env
    )


def test_one_bad_checkpoint_of_several_costs_the_others_nothing(scored, tmp_path):
    (tmp_path / "bad.pt").write_bytes(b"x")
    run = str(scored / "runs/tiny")
    words = ["--data", str(scored / "tasks.yaml"), "--features", "none", "--json", "all.json", "--no-write-to-run"]
    done = assert_ends(["eval", run, "bad.pt", f"{run}/export", *words], 2, ["bad.pt"], cwd=tmp_path)
    assert "tiny" in done.stdout and "export" in done.stdout
    found = json.loads((tmp_path / "all.json").read_text())["results"]
    assert {name.partition("/")[0] for name in found} == {"tiny", "export"}


OPTIONS = {
    "--results in a file": (["--results", "taken"], "--results: taken is not writable"),
    "--json in a file": (["--json", "taken/x.json"], "--json taken/x.json"),
    "--json a folder": (["--json", "folder"], "is a folder. Name a file."),
    "--features a file": (["--features", "taken"], "--features: taken is not writable"),
    "--slots words": (["--slots", "all"], "--slots all"),
    "--slots below": (["--slots", "-1"], ""),
    "--slots above": (["--slots", "4"], "has 4 slots"),
    "--slots endless": (["--slots", "0-99999999999"], "--slots"),
    "--part words": (["--part", "half"], "--part"),
    "--part of none": (["--part", "3/2"], "--part"),
    "--precision": (["--precision", "int4"], "--precision int4"),
    "--storage": (["--storage", "int4"], "--storage int4"),
    "--tasks": (["--tasks", "juggling"], "--tasks juggling"),
    "--data nowhere": (["--data", "nowhere.yaml"], "nowhere.yaml: no such recipe"),
    "--data a list": (["--data", "list.yaml"], "list.yaml"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_invalid_paths_and_words_are_refused_before_anything_is_scored(name, scored, tmp_path):
    words, says = OPTIONS[name]
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "list.yaml").write_text("- a\n")
    data = [] if "--data" in words else ["--data", str(scored / "tasks.yaml")]
    assert_ends(["eval", str(scored / "runs/tiny"), *data, "--features", "none", *words], 2, [says], cwd=tmp_path)
    assert (tmp_path / "taken").read_text() == "mine"


SETS = {
    "no shards": ("test/nshards.txt", "0", "nshards.txt"),
    "shards below zero": ("test/nshards.txt", "-3", "nshards.txt"),
    "a word for a number": ("test/nshards.txt", "many", "must contain the number of shards"),
    "more shards than any": ("test/nshards.txt", "99999999999", "nshards.txt"),
    "a shard too many": ("test/nshards.txt", "2", "1.tar: missing"),
    "a blank class": ("classnames.txt", "red square\n\nplain\n", "has label 2, but there are 2 classes"),
    "a class too few": ("classnames.txt", "red square\nblue circle\n", "label 2"),
    "classes in Latin-1": ("classnames.txt", b"caf\xe9\na\nb\n", "classnames.txt: line 1 is not UTF-8"),
    "half a shard": ("test/0.tar", b"\0" * 700 + b"x" * 100, "0.tar"),
    "a shard that is none": ("test/0.tar", b"hello", "0.tar"),
}


@pytest.mark.parametrize("name", SETS)
def test_an_incomplete_set_is_refused_by_file(name, scored, tmp_path):
    file, content, says = SETS[name]
    shutil.copytree(scored / "sets/zero", tmp_path / "zero")
    path = tmp_path / "zero" / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "t.yaml").write_text(
        yaml.safe_dump({"tasks": {"zero": {"task": "zeroshot", "root": str(tmp_path / "zero")}}})
    )
    assert_ends(["eval", str(scored / "runs/tiny"), "--data", "t.yaml", "--features", "none"], 2, [says], cwd=tmp_path)


def class_folders(root, classes, suffix=".jpg"):
    for name in classes:
        for i in range(4):
            path = root / name / f"{i}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.open(io.BytesIO(jpeg(ord(name)))).save(path)


def test_labels_of_class_folders_follow_names_instead_of_positions(scored, tmp_path):
    class_folders(tmp_path / "train", ["a", "b", "c"], ".bmp")
    class_folders(tmp_path / "test", ["b", "c"], ".tif")
    class_folders(tmp_path / "strange", ["b", "z"])
    knn = {"task": "knn", "train": str(tmp_path / "train"), "test": str(tmp_path / "test"), "k": [1, 200]}
    tasks = {"same": knn, "strange": {**knn, "test": str(tmp_path / "strange")}, "far": {**knn, "k": [200]}}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    words = ["eval", "pixels:16", "--data", "t.yaml", "--features", "none", "--json", "r.json", "--tasks"]
    assert_ends([*words, "same"], 0, [], cwd=tmp_path)
    (found,) = json.loads((tmp_path / "r.json").read_text())["results"].values()
    assert max(found["metrics"].values()) == 1.0 and not any("200" in name for name in found["metrics"])
    assert_ends([*words, "strange"], 2, ["1 class(es) that `train` lacks, such as 'z'"], cwd=tmp_path)
    assert_ends([*words, "far"], 2, ["exceeds the 12 images"], cwd=tmp_path)


def test_splits_with_different_class_numbers_are_refused(scored, tmp_path):
    class_folders(tmp_path / "set/train", ["a", "b", "c"])
    class_folders(tmp_path / "set/test", ["b", "c"])
    tasks = {"probe": {"task": "probe", "layout": "folder"}, "zero": {"task": "zeroshot", "layout": "folder"}}
    tasks = {name: {**task, "root": str(tmp_path / "set"), "split": "test"} for name, task in tasks.items()}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    words = ["eval", str(scored / "runs/tiny"), "--data", "t.yaml", "--features", "none", "--tasks"]
    assert_ends([*words, "probe"], 2, ["train and test have different class folders"], cwd=tmp_path)
    (tmp_path / "set/classnames.txt").write_text("a\nb\nc\n")
    assert_ends([*words, "zero"], 2, ["has 2 class folders but 3 class names"], cwd=tmp_path)


def test_retrieval_at_k_above_the_number_of_images_is_refused(scored, tmp_path):
    task = {"task": "retrieval", "root": str(scored / "sets/ret"), "k": [50]}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({"tasks": {"ret": task}}))
    assert_ends(
        ["eval", str(scored / "runs/tiny"), "--data", "t.yaml", "--features", "none"],
        2,
        ["k=[50]", "12 images"],
        cwd=tmp_path,
    )


@pytest.mark.long
@settings(max_examples=2000, deadline=2000)
@given(st.one_of(st.text(max_size=80), st.text("[]{}&*!:,-?|>'\"%@` \n\tab1.", max_size=60)))
def test_random_text_gives_recipes_or_readable_errors(text):
    try:
        parse_yaml(text, "f.yaml")
    except ConfigError as error:
        assert str(error).startswith("f.yaml: ")
