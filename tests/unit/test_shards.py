"""Index and positional reading agree with tarfile for any tar, and notice damage."""

import io
import os
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparo_data.writer import write_shard
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.servers.remote import find_shards
from sparo_train.data.sources.base import open_source
from sparo_train.data.sources.fingerprint import fingerprint, refuse_changed
from sparo_train.data.sources.shard_index import load_index
from sparo_train.data.sources.shards import ShardReader, ShardsConfig
from sparo_train.data.sources.tar import scan, split_key, unpack, unpack_any
from tests.helpers.samples import sample

names = (
    st.text("abz019/_é-", min_size=1, max_size=140)
    .map(lambda s: s.strip("/").replace("//", "/") or "k")
    .filter(lambda s: not s.startswith("__") and "/__" not in s and not s.endswith("/"))
)
samples = st.lists(
    st.tuples(
        names,
        st.dictionaries(st.sampled_from(["jpg", "txt", "json", "mask.png"]), st.binary(max_size=1500), min_size=1),
    ),
    max_size=8,
    unique_by=lambda s: s[0],
)


def tar_bytes(items, form=tarfile.PAX_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for key, fields in items:
            for extension, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@given(samples, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
@settings(max_examples=60, deadline=None)
def test_every_sample_of_a_shard_is_indexed(items, form):
    data = tar_bytes(items, form)
    index = scan(io.BytesIO(data), len(data))
    assert index.intact
    read = [unpack(data[index.offsets[i] : index.offsets[i + 1]]) for i in range(len(index))]
    assert read == items


@given(samples.filter(lambda s: len(s) > 1), st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_a_truncated_tar_gives_its_complete_samples_and_a_warning(items, share):
    data = tar_bytes(items)
    whole = scan(io.BytesIO(data), len(data))
    cut = data[: max(512, int(whole.offsets[-1] * share))]
    index = scan(io.BytesIO(cut), len(cut))
    read = [unpack(cut[index.offsets[i] : index.offsets[i + 1]]) for i in range(len(index))]
    assert not index.intact
    # The last sample may lack members that were written after the cut; all earlier ones are complete.
    assert read[:-1] == items[: max(0, len(read) - 1)]


def test_webdatasets_rule_for_keys():
    assert split_key("a/b.c/000.mask.PNG") == ("a/b.c/000", "mask.png")
    assert split_key("README") is None and split_key(".hidden") is None and split_key("__meta__.json") is None


def test_webdataset_reads_what_we_write_and_we_read_it_the_same(tmp_path):
    import webdataset as wds

    write_shard(tmp_path / "x.tar", (sample(i) for i in range(5)))
    theirs = list(wds.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False))
    reader = ShardReader()
    for ordinal, row in enumerate(theirs):
        key, fields = reader.read(str(tmp_path / "x.tar"), ordinal)
        assert key == row["__key__"] and all(row[e] == fields[e] for e in fields)


def test_equal_samples_make_equal_bytes(tmp_path):
    for name in ("a.tar", "b.tar"):
        write_shard(tmp_path / name, (sample(i) for i in range(3)))
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_the_index_is_cached_until_its_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "x.tar"
    write_shard(path, (sample(i) for i in range(3)))
    assert len(load_index(str(path), write_index=True)) == 3
    assert (tmp_path / "x.tar.idx.npy").exists()
    write_shard(path, (sample(i) for i in range(5)))
    assert len(load_index(str(path))) == 5


def test_a_file_other_than_a_tar_is_refused_by_name(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(b"<html>not found</html>" * 100)
    index = load_index(str(path))
    assert len(index) == 0 and not index.intact
    with pytest.raises(DataError, match=r"without a complete sample; first: .*x\.tar"):
        open_source("a", ShardsConfig(shards=str(path)))


def test_an_index_older_than_its_shard_is_not_used(tmp_path):
    path = tmp_path / "x.tar"
    first = [(f"{i}", {"jpg": bytes(600), "txt": b"old"}) for i in range(4)]
    second = [(f"{i}", {"jpg": bytes(1500), "txt": b"new"}) for i in range(4)]
    write_shard(path, first)
    load_index(str(path), write_index=True)
    size = path.stat().st_size
    write_shard(path, second)
    assert path.stat().st_size == size  # tars are padded, so their size does not reveal it
    beside = tmp_path / "x.tar.idx.npy"
    os.utime(beside, (path.stat().st_mtime - 5,) * 2)
    assert ShardReader().read(str(path), 1) == ("1", second[1][1])
    os.utime(beside, (path.stat().st_mtime + 5,) * 2)  # as after a careless copy: the bytes reveal it
    with pytest.raises(BadSampleError, match="stale index"):
        ShardReader().read(str(path), 1)
    load_index(str(path), write_index=True)
    assert ShardReader().read(str(path), 1) == ("1", second[1][1])


def test_two_members_with_one_extension_are_named(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("a.jpg", "a.JPG", "a.txt"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    with pytest.raises(BadSampleError, match="two members of a sample have the same extension") as bad:
        ShardReader().read(str(tmp_path / "x.tar"), 0)
    assert bad.value.detail == "got 'a.JPG' again"


def test_a_damaged_header_is_a_bad_sample(shards):
    path = shards / "00000.tar"
    start = int(load_index(str(path), write_index=True).offsets[3])
    data = bytearray(path.read_bytes())
    data[start + 124 : start + 136] = b"garbage size"
    path.write_bytes(data)
    os.utime(f"{path}.idx.npy", (path.stat().st_mtime + 5,) * 2)
    reader = ShardReader()
    assert reader.read(str(path), 2)[0] == "000002"
    with pytest.raises(BadSampleError, match="damaged tar"):
        reader.read(str(path), 3)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "gs://bucket/{000..001}.tar",
            r"gs:// needs a package that is not installed. pip install -e '\.\[gcs\]' in sparo's checkout",
        ),
        ("s4://bucket/0.tar", "s4:// is not a protocol of fsspec; known: .*s3"),
        ("data/{000..001.tar", "an unmatched brace"),
        ((), "an empty list"),
    ],
)
def test_invalid_addresses_are_explained(pattern, message):
    with pytest.raises((ConfigError, DataError), match=message):
        find_shards(pattern, "data.sources.a.shards")


def test_a_shard_that_shrank_under_the_run_is_named(shards):
    reader = ShardReader()
    path = shards / "00000.tar"
    reader.index(str(path))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match="shorter than its index"):
        reader.read(str(path), 20)


def test_folders_globs_braces_and_urls_name_the_same_shards(shards):
    expected = [str(shards / f"{i:05d}.tar") for i in range(4)]
    for pattern in (str(shards), f"{shards}/*.tar", f"{shards}/{{00000..00003}}.tar", tuple(expected)):
        assert find_shards(pattern) == expected
    assert find_shards(f"file://{shards}/{{00000..00003}}.tar") == [f"file://{p}" for p in expected]


@pytest.mark.parametrize(
    ("names", "splits", "example"),
    [
        (("cc3m-train-0000", "cc3m-train-0001", "cc3m-validation-0000"), "train, validation", "cc3m-train-*.tar"),
        (("test_000", "train_000", "val_000"), "test, train, validation", "train_*.tar"),
        (("val000", "test000"), "test, validation", "test*.tar"),
    ],
)
def test_a_folder_with_shards_of_several_splits_is_refused(tmp_path, names, splits, example):
    for name in names:
        write_shard(tmp_path / f"{name}.tar", [sample(0)])
    with pytest.raises(ConfigError) as refused:
        open_source("mine", ShardsConfig(shards=str(tmp_path)))
    assert f"{tmp_path} contains the splits {splits}. Name the files of one" in str(refused.value)
    assert f"{tmp_path}/{example}, or the files of all splits, as in {tmp_path}/*.tar" in str(refused.value)
    for chosen, count in ((f"{tmp_path}/*.tar", len(names)), (str(tmp_path / f"{names[0]}.tar"), 1)):
        assert open_source("mine", ShardsConfig(shards=chosen)).samples == count


def test_folders_named_after_one_split_or_with_odd_names_are_read(tmp_path):
    for name in ("train-0", "train-1", "latest-2", "contest-3"):
        write_shard(tmp_path / f"{name}.tar", [sample(0)])
    assert open_source("mine", ShardsConfig(shards=str(tmp_path))).samples == 4


def test_shards_at_a_url_read_the_same(tmp_path):
    import fsspec

    write_shard(tmp_path / "x.tar", (sample(i) for i in range(4)))
    with fsspec.open("memory://bucket/x.tar", "wb") as stream:
        stream.write((tmp_path / "x.tar").read_bytes())
    reader = ShardReader()
    assert find_shards("memory://bucket/*.tar") == ["memory:///bucket/x.tar"]
    for i in range(4):
        assert reader.read("memory://bucket/x.tar", i) == reader.read(str(tmp_path / "x.tar"), i)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{root}/sharts", r"matches no shard; did you mean 'shards'\?"),
        ("{root}/shards/train", r"matches no shard; the \.tar files are one folder above, in `.*/shards`"),
        ("data/emoji/train", "matches no shard; `sparo data emoji` makes it"),
        ("{root}/none/{{0..3}}.tar", "is not a folder"),
        ("pipe:cat x.tar", "runs a shell command"),
    ],
)
def test_patterns_that_match_nothing_are_explained(shards, pattern, message):
    with pytest.raises(ConfigError, match=message):
        find_shards(pattern.format(root=shards.parent), "data.sources.a.shards")


def test_a_changed_data_set_is_refused_with_the_change(shards):
    config = ShardsConfig(shards=str(shards))
    before = fingerprint([open_source("a", config)])
    (shards / "00003.tar").unlink()
    after = fingerprint([open_source("a", config)])
    with pytest.raises(DataError, match=r"(?s)a\.shards: 4 -> 3.*a\.samples: 96 -> 72"):
        refuse_changed(before, after, "checkpoint")


def test_offsets_are_plain_integers(shards):
    assert load_index(str(shards / "00000.tar")).offsets.dtype == np.int64


@given(
    samples.filter(bool),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_plain_members_are_read_as_tarfile_reads_them(items, form, changes):
    """Also if the checksum of a changed header is still valid."""
    items = [(key, fields) for key, fields in items if form != tarfile.USTAR_FORMAT or len(key) < 60]
    data = bytearray(tar_bytes(items[:1], form))
    for at, value in changes:
        data[at % min(len(data), 512)] = value
    head = bytes(data[:512])
    data[148:156] = b"%06o\0 " % (sum(head[:148]) + sum(head[156:512]) + 256)
    for given_bytes in (bytes(data), bytes(data).rstrip(b"\0"), bytes(data)[:700]):
        found = []
        for read in (unpack, unpack_any):
            try:
                found.append(read(given_bytes))
            except ValueError:
                found.append(None)
        assert found[0] == found[1]
