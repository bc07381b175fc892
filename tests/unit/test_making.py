"""Emoji, Fashion-MNIST, converters, and `sparo data check`, on small files written here."""

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from evals.sets.base import lines
from evals.sets.wds import WdsSet
from launch.cli.main import app
from launch.cli.process import call
from launch.views.progress import check_lines
from launch.views.terminal import Terminal
from sparo_data import emoji as emoji_module
from sparo_data.check import check
from sparo_data.emoji import (
    Emoji,
    attribute_pairs,
    install,
    is_held_out,
    rasterise,
    read_drawings,
    read_emoji,
    sibling_pairs,
)
from sparo_data.emoji_sets import make_emoji
from sparo_data.fashion_mnist import FASHION, make_fashion_mnist
from sparo_data.writer import write_shard, write_wds_layout
from sparo_train.core.errors import DataError
from sparo_train.data.sources.shards import ShardReader, ShardsConfig, open_shards
from tests.helpers.processes import sparo
from tests.helpers.samples import sample

BODY = '<circle cx="16" cy="16" r="14" fill="{}"/>'


@pytest.fixture
def modules(tmp_path):
    """Write a node_modules folder with two vendors, in the packages' own layout."""
    root = tmp_path / "node_modules"
    texts = [
        {"label": f"{color} heart", "hexcode": f"1F5{i:02d}", "tags": [color, "love"], "group": 8, "subgroup": 1}
        for i, color in enumerate(["red", "blue", "green", "purple", "orange", "brown"])
    ]
    hand = {"label": "waving hand", "hexcode": "1F44B", "tags": ["hello"], "group": 1, "subgroup": 2}
    hand["skins"] = [
        {"label": f"waving hand: {t} skin tone", "hexcode": f"1F44B-{i}"} for i, t in enumerate(["light", "dark"])
    ]
    texts += [
        hand,
        {"label": "flag: X", "hexcode": "F", "group": 9, "subgroup": 3},
        {"label": "regional indicator A", "hexcode": "R"},
    ]
    texts += [{"label": f"thing {i}", "hexcode": f"AA{i}", "tags": [], "group": 3, "subgroup": 5} for i in range(40)]
    (root / "emojibase-data/en/shortcodes").mkdir(parents=True)
    (root / "emojibase-data/en/data.json").write_text(json.dumps(texts))
    (root / "emojibase-data/en/shortcodes/emojibase.json").write_text(
        json.dumps({"1F500": "heart", "1F44B": ["wave", "hand"]})
    )
    for vendor in emoji_module.VENDORS:
        folder = root / "@iconify-json" / vendor
        folder.mkdir(parents=True)
        icons = {
            "red-heart": {"body": BODY.format("red")},
            "waving-hand-dark-skin-tone": {"body": BODY.format("brown"), "width": 20},
        }
        icons |= {f"thing-{i}": {"body": BODY.format("#0a0")} for i in range(40)}
        icons |= {
            "odd-slug": {"body": BODY.format("blue")},
            "wave": {"body": BODY.format("gold")},
            "unknown": {"body": ""},
        }
        (folder / "icons.json").write_text(json.dumps({"icons": icons, "width": 32, "height": 32}))
        if vendor == "noto":
            (folder / "chars.json").write_text(json.dumps({"1f501": "odd-slug"}))
    return root


def test_drawings_are_matched_by_label_code_point_and_short_code(modules):
    emoji = read_emoji(modules)
    assert not any(e.label.startswith(("flag", "regional")) for e in emoji)
    noto = {d.emoji.label for d in read_drawings(modules, "noto", emoji)}
    assert {"red heart", "waving hand: dark skin tone", "blue heart", "waving hand"} <= noto
    assert "blue heart" not in {d.emoji.label for d in read_drawings(modules, "fxemoji", emoji)}


def test_rasterising_fits_a_white_square(modules):
    drawing = next(
        d for d in read_drawings(modules, "noto", read_emoji(modules)) if d.emoji.label == "waving hand: dark skin tone"
    )
    pixels = np.asarray(rasterise(drawing.svg, 32))
    assert pixels.shape == (32, 32, 3) and (pixels[0, 0] == 255).all() and pixels[16, 16].tolist() == [165, 42, 42]


def test_splits_do_not_leak(modules, tmp_path):
    counts = make_emoji(tmp_path / "out", modules, size=16, processes=1)
    reader = ShardReader()
    path = str(tmp_path / "out" / "train" / "00000.tar")
    train = [json.loads(reader.read(path, i)[1]["json"]) for i in range(len(reader.index(path)))]
    assert len(train) == counts["train"] and "twemoji" not in {t["vendor"] for t in train}
    held = [e.label for e in read_emoji(modules) if is_held_out(e)]
    assert held and not set(held) & {t["label"] for t in train}
    vendor, new = (WdsSet(tmp_path / "out" / name, "label") for name in ("zeroshot_vendor", "zeroshot_concepts"))
    assert not set(lines(vendor.root / "classnames.txt")) & set(lines(new.root / "classnames.txt"))
    assert set(lines(new.root / "classnames.txt")) <= set(held)
    for source in (vendor, new):
        names = lines(source.root / "classnames.txt")
        assert {label for _, _, label in source} == set(range(len(names)))
    assert all(captions for _, _, captions in WdsSet(tmp_path / "out" / "retrieval", "captions"))
    rows = [pair for _, _, (pair,) in WdsSet(tmp_path / "out" / "pairs", "pairs")]
    assert all(r.caption != r.negative_caption for r in rows)
    again = make_emoji(tmp_path / "again", modules, size=16, processes=1)
    assert (
        again == counts
        and (tmp_path / "again/train/00000.tar").read_bytes() == (tmp_path / "out/train/00000.tar").read_bytes()
    )


def test_pairs_use_every_label_as_often_true_as_false():
    words = [
        "red heart",
        "blue heart",
        "green heart",
        "man: light skin tone",
        "man: dark skin tone",
        "cat",
        "dog",
        "cow",
    ]
    emoji = [Emoji(str(i), w, emoji_module.normalize(w), (), 1) for i, w in enumerate(words)]
    for make in (sibling_pairs, attribute_pairs):
        found = list(make(emoji, np.random.default_rng(0)))
        assert sorted(e.label for e, _ in found) == sorted(f for _, f in found)
    changed = {(e.label, f) for e, f in attribute_pairs(emoji, np.random.default_rng(0))}
    assert all(len(set(a.split()) ^ set(b.split())) == 2 for a, b in changed) and len(changed) == 5


def test_npm_missing_or_failing_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm is not installed. Install Node\.js"):
        install(tmp_path / "first")
    fake = tmp_path / "npm"
    fake.write_text("#!/bin/sh\necho 'no such registry' >&2\nexit 7\n")
    fake.chmod(0o755)
    with pytest.raises(DataError, match="npm failed with code 7: no such registry"):
        install(tmp_path / "modules")


def idx(array):
    return gzip.compress(
        b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


def write_idx_files(folder):
    """Write Fashion-MNIST's four files with noise: 20 training and 10 test images."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for name, n in (("train", 20), ("t10k", 10)):
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(idx(rng.integers(0, 255, (n, 28, 28), dtype=np.uint8)))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(idx((np.arange(n) % 10).astype(np.uint8)))


def test_fashion_mnist_becomes_captioned_shards(tmp_path):
    write_idx_files(tmp_path)
    assert make_fashion_mnist(tmp_path / "out", tmp_path) == {"train": 20, "zeroshot": 10}
    _, fields = ShardReader().read(str(tmp_path / "out/train/00000.tar"), 3)
    assert fields["txt"] == b"a dress" and fields["cls"] == b"3"
    test = WdsSet(tmp_path / "out" / "zeroshot", "label")
    assert tuple(test.classnames()) == FASHION and len(list(test)) == 10
    with pytest.raises(
        DataError,
        match=r"train-images-idx3-ubyte\.gz: no such file. On Debian, run apt-get install dataset-fashion-mnist",
    ):
        make_fashion_mnist(tmp_path / "none", tmp_path / "nothing")
    names = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
    for name, change in zip(
        names,
        (lambda d: d[:-9], lambda d: b"no gzip", lambda d: gzip.compress(b"\0\0\x08\x01" + b"\0\0\0\x0aM" * 9)),
        strict=True,
    ):
        held = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(change(held))
        with pytest.raises(DataError, match=r"Fetch (it|them) again"):
            make_fashion_mnist(tmp_path / "none", tmp_path)
        (tmp_path / name).write_bytes(held)
    assert not (tmp_path / "none").exists()


def test_an_evaluation_set_is_complete_or_absent(tmp_path, monkeypatch):
    def interrupted(self, *_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", interrupted)
        write_wds_layout(tmp_path, [sample(0)], classnames=["x"], templates=["{c}"])
    with pytest.raises(DataError, match=r"nshards\.txt: missing"):
        WdsSet(tmp_path, "label")
    write_wds_layout(tmp_path, [sample(0)], classnames=["x"], templates=["{c}"])
    whole = WdsSet(tmp_path, "label")
    assert (whole.classnames(), whole.templates(), len(whole)) == (["x"], ["{c}"], 1)


def test_a_key_with_a_dot_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"key 'a\.b' is empty or contains a dot"):
        write_shard(tmp_path / "x.tar", [("a.b", {"txt": b"x"})])
    assert list(tmp_path.iterdir()) == []


def test_a_shard_without_a_sample_is_broken(tmp_path):
    write_shard(tmp_path / "empty.tar", [])
    done = sparo("data", "check", str(tmp_path / "empty.tar"))
    assert done.returncode == 1 and "no sample" in done.stdout
    for words in (("objects", "rooms", str(tmp_path / "r")), ("movi-like", str(tmp_path / "m"), "--kind", "d")):
        done = sparo("data", *words, "--max-objects", "3")
        assert (
            done.returncode == 2
            and "--max-objects 3: cannot be set for kind" in done.stderr
            and not list(tmp_path.glob("[rm]"))
        )


@pytest.mark.parametrize(
    ("verb", "name", "told"),
    [
        (
            "movi-like",
            "movi",
            ["--kind", "a", "--size", "32", "--max-objects", "3", "--size-scale", "2", "--antialias", "2"],
        ),
        ("scenes3d", "scenes3d", ["--kind", "simple", "--size", "32", "--antialias", "2"]),
    ],
)
def test_moving_sets_without_a_kind_are_those_of_the_small_recipes(tmp_path, monkeypatch, verb, name, told):
    monkeypatch.chdir(tmp_path)
    few = ["--train", "2", "--test", "1", "--frames", "2", "--processes", "1"]
    for words in ([], ["told", *told]):
        assert call(app, ["data", verb, *words, *few]) == (0, None)
    made, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / place).glob("*.tar")}
        for place in (f"data/{name}_small/train", "told/train")
    )
    assert made and made == expected


def test_images_without_captions_are_checked(tmp_path):
    pictures = [(key, {"jpg": fields["jpg"]}) for key, fields in map(sample, range(3))]
    write_shard(tmp_path / "a.tar", pictures)
    done = sparo("data", "check", "a.tar", cwd=tmp_path)
    assert done.returncode == 1 and "--caption-key ''" in done.stdout, done.stdout
    done = sparo("data", "check", "a.tar", "--caption-key", "", cwd=tmp_path)
    assert done.returncode == 0 and "nothing broken" in done.stdout and "captions: none were read" in done.stdout, (
        done.stdout
    )
    listed = [(key, {**fields, "json": b'{"objects": []}'}) for key, fields in pictures]  # for set prediction
    write_shard(tmp_path / "c.tar", listed)
    assert sparo("data", "check", "c.tar", cwd=tmp_path).returncode == 0
    (tmp_path / "b.tar").write_bytes(b"no tar")
    done = sparo("data", "index", "b.tar", cwd=tmp_path)
    assert done.returncode == 2 and "data.sources" not in done.stderr and "b.tar" in done.stderr, done.stderr


def test_check_counts_duplicates_and_damage(tmp_path):
    good = [sample(i) for i in range(8)]
    write_shard(tmp_path / "a.tar", good)
    write_shard(
        tmp_path / "b.tar",
        [good[0], ("new", good[1][1]), ("bad", {"jpg": b"x", "txt": b"words"}), ("no", {"txt": b"x"})],
    )
    cut = tmp_path / "c.tar"
    write_shard(cut, [sample(i) for i in range(20, 24)])
    cut.write_bytes(cut.read_bytes()[:9000])
    (tmp_path / "d.tar").write_bytes(b"<html>" * 500)
    a, b, c, d = (str(tmp_path / f"{n}.tar") for n in "abcd")
    report = check(open_shards([a, b, c, d], False), ShardsConfig(shards="x"), processes=1)
    assert f"e.g. {a}:000000 = {b}:000000" in "\n".join(check_lines(report))
    assert report.reasons() == {"bad image": 1, "missing image": 1, "truncated tar": 1, "unreadable tar": 1}
    assert report.keys.examples == [[(a, "000000"), (b, "000000")]]
    assert sorted(report.images.examples) == [[(a, "000000"), (b, "000000")], [(a, "000001"), (b, "new")]]
    assert report.keys.copies == 1 and report.images.copies == 2 and report.captions.copies >= 2
    assert report.shards[1].bad == [("bad", "bad image"), ("no", "missing image")]


def test_a_key_that_is_not_utf8_is_checked_and_printed(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo("caf\udce9.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    report = check(open_shards([str(tmp_path / "x.tar")], False), ShardsConfig(shards="x"), processes=1)
    assert report.shards[0].bad == [("caf\udce9", "missing image")]
    printed = Terminal()
    with printed.capture() as got:
        printed.print("\n".join(check_lines(report)), soft_wrap=True)
    assert "caf\\xe9" in got.get()
