"""Shards and samples with invalid headers, members that are not content, and captions and images that take forever or start programs."""

import bz2
import gzip
import io
import lzma
import os
import struct
import tarfile
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import SimpleTokenizer

from sparo_data.check import check_storage
from sparo_data.writer import write_shard, write_shards
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.examples.image_text import ClipTokenizer
from sparo_train.data.examples.samples import MAX_WORD_CHARS, decode_image
from sparo_train.data.sources.shard_index import load_index
from sparo_train.data.sources.shards import ShardsConfig, open_shards
from sparo_train.data.sources.tar import scan, unpack
from tests.helpers.samples import jpeg, sample
from tests.hostile.conftest import assert_ends


def member(name, content=b"", kind=tarfile.REGTYPE, form=tarfile.USTAR_FORMAT, **facts):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    for key, value in facts.items():
        setattr(info, key, value)
    return info.tobuf(form, "utf-8", "surrogateescape") + content + bytes(-len(content) % 512)


def with_size(header, field):
    """Return a tar header with this text as its size, and a valid checksum."""
    block = bytearray(header[:512])
    block[124:136] = field.ljust(12, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def good(i):
    key, fields = sample(i)
    return b"".join(member(f"{key}.{extension}", content) for extension, content in fields.items())


END = bytes(1024)
WHOLE = SimpleTokenizer()
PAX = member("x", b"11 path=a.b\n", tarfile.XHDTYPE)
TARS = {
    "a size of -1": with_size(member("a.jpg"), b"-1"),
    "an octal size below zero": with_size(member("a.jpg"), b"-0000000777"),
    "a size in base 256 below zero": with_size(member("a.jpg"), b"\xff" * 12),
    "a size of exabytes": with_size(member("a.jpg"), b"\x80" + struct.pack(">11s", b"\x01" * 11)[:11]),
    "a size that is no number": with_size(member("a.jpg"), b"elephant"),
    "a size beyond the file": with_size(member("a.jpg"), b"77777777777"),
    "a pax record of length 0": member("x", b"0 path=a\n", tarfile.XHDTYPE) + member("a.jpg"),
    "a pax record without a blank": member("x", b"11path=a.b\n", tarfile.XHDTYPE) + member("a.jpg"),
    "a pax record below zero": member("x", b"-5 path=a\n", tarfile.XHDTYPE) + member("a.jpg"),
    "a pax size below zero": member("x", b"12 size=-99\n", tarfile.XHDTYPE) + member("a.jpg"),
    "a pax size of inf": member("x", b"12 size=inf\n", tarfile.XHDTYPE) + member("a.jpg"),
    "a pax header of a gigabyte": with_size(member("x", b"", tarfile.XHDTYPE), b"10000000000") + member("a.jpg"),
    "a long name below zero": with_size(member("x", b"", tarfile.GNUTYPE_LONGNAME), b"-512"),
    "a long name of megabytes": member("x", b"a" * (2 << 20), tarfile.GNUTYPE_LONGNAME) + member("a.jpg"),
    "5,000 pax headers in a row": PAX * 5000 + member("a.jpg"),
    "a sparse member": member("a.jpg", b"", tarfile.GNUTYPE_SPARSE),
    "random bytes": np.random.default_rng(0).bytes(40_000),
    "text": b"<html>" * 1000,
    "one byte": b"x",
    "nothing": b"",
}


@pytest.mark.parametrize("name", TARS)
@pytest.mark.parametrize("among", [False, True], ids=["alone", "behind good samples"])
def test_a_tar_with_invalid_offsets_ends_and_is_counted(name, among, tmp_path):
    data = (good(1) + good(2) if among else b"") + TARS[name] + END
    begin = time.monotonic()
    index = scan(io.BytesIO(data), len(data))
    assert time.monotonic() - begin < 5
    read = [unpack_or_reason(data[index.offsets[i] : index.offsets[i + 1]]) for i in range(len(index))]
    known = [dict(sample(i)[1]) for i in (1, 2)] if among else []
    assert read[: len(known) - 1] == known[: len(read)][: len(known) - 1]  # the last one may be incomplete
    (tmp_path / "bad.tar").write_bytes(data)
    whole = index.intact and all(isinstance(found, dict) and {"jpg", "txt"} <= found.keys() for found in read)
    report = check_storage(
        open_shards([str(tmp_path / "bad.tar")], False)[0], ShardsConfig(shards=str(tmp_path / "bad.tar"))
    )
    assert (whole and len(read) > 0) == (not report.bad and report.damage is None)
    if name == "a size of -1":
        assert_ends(["data", "check", "bad.tar"], 1, ["bad.tar"], cwd=tmp_path)


def unpack_or_reason(data):
    try:
        return unpack(data)[1]
    except (ValueError, BadSampleError) as error:
        return str(error)


@pytest.mark.long
@settings(max_examples=2000, deadline=2000)
@given(st.data())
def test_no_bytes_make_the_tar_reader_hang_or_raise(data):
    """Valid archives with replaced, missing and repeated bytes, and arbitrary bytes."""
    whole = bytearray(good(3) + member("é" * 120 + ".jpg", b"1", form=tarfile.PAX_FORMAT) + good(4) + END)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, min(len(whole), 6000) - 1))
        piece = data.draw(st.binary(max_size=24))
        whole[at : at + len(piece)] = piece
    cut = data.draw(st.integers(0, len(whole)))
    tar = bytes(whole[:cut]) if data.draw(st.booleans()) else bytes(whole)
    index = scan(io.BytesIO(tar), len(tar))
    assert list(index.offsets) == sorted(set(index.offsets)) and (not len(index) or index.offsets[-1] <= len(tar))
    for i in range(len(index)):
        unpack_or_reason(tar[index.offsets[i] : index.offsets[i + 1]])


MEMBERS = {
    "a hard link for an image": member("000007.jpg", b"", tarfile.LNKTYPE, linkname="000001.jpg"),
    "a soft link for an image": member("000007.jpg", b"", tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a link behind a long name": member("000007.jpg", b"", tarfile.LNKTYPE, tarfile.PAX_FORMAT, linkname="x" * 200),
    "a device for an image": member("000007.jpg", b"", tarfile.CHRTYPE),
    "two images of a name": member("000007.jpg", jpeg(1)) + member("000007.jpg", jpeg(2)) + member("000007.txt", b"x"),
    "an image that is none": member("000007.jpg", b"no image") + member("000007.txt", b"x"),
    "an EPS for an image": member("000007.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    + member("000007.txt", b"x"),
    "half an image": member("000007.jpg", jpeg(1)[:300]) + member("000007.txt", b"x"),
    "no caption": member("000007.jpg", jpeg(1)),
    "an empty caption": member("000007.jpg", jpeg(1)) + member("000007.txt", b"  \n"),
    "a caption in Latin-1": member("000007.jpg", jpeg(1)) + member("000007.txt", b"caf\xe9"),
    "a word of 10,000 letters": member("000007.jpg", jpeg(1)) + member("000007.txt", b"a" * 10_000),
    "a caption of a megabyte": member("000007.jpg", jpeg(1)) + member("000007.txt", b"a " * 500_000),
    "markup for a key": member("[/red].jpg", b"x") + member("[/red].txt", b"x"),
    "an escape for a key": member("\x1b[31mx.jpg", b"x") + member("\x1b[31mx.txt", b"x"),
    "no UTF-8 for a key": member("caf\udce9.jpg", b"x") + member("caf\udce9.txt", b"x"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_one_bad_sample_ends_no_training_and_is_counted_with_its_key(name, home, tmp_path):
    folder = tmp_path / "shards"
    write_shards(folder, (sample(i) for i in range(20)), 10)
    (folder / "00002.tar").write_bytes(good(50) + MEMBERS[name] + good(51) + END)
    order = ["train", str(home / "good.yaml"), f"out={tmp_path}/runs", f"data.sources.a.shards={folder}", "steps=6"]
    assert_ends([*order, "data.max_bad_share=0.2"], 0, ["finished at step 6"])
    log = (tmp_path / "runs/tiny/log.txt").read_text()
    if "skipped a sample" not in log:
        assert name.startswith(
            ("a hard link", "a soft link", "a link", "a device")
        )  # without content, the sample does not exist
    counted = "skipped a sample" in log
    report = check_storage(open_shards([str(folder / "00002.tar")], False)[0], ShardsConfig(shards=str(folder)))
    assert len(report.bad) == counted and all(reason in log for _, reason in report.bad)
    if name == "an escape for a key":
        assert_ends(["data", "check", str(folder)], 1, ["bad image"])


INDEXES = {
    "0-d": np.array(3),
    "2-d": np.zeros((3, 3), np.int64),
    "of floats": np.zeros(20),
    "of words": np.array(["a"] * 20),
    "empty": np.zeros(0, np.int64),
    "beyond the shard": np.array([-2, 0, 1, 0, 0, 0, 0, 0, 1 << 60]),
    "backwards": np.array([-2, 0, 1, 0, 0, 0, 0, 4096, 0]),
}


@pytest.mark.parametrize("name", [*INDEXES, "huge", "a pickle", "text"])
def test_an_invalid_index_is_rebuilt(name, shards):
    shard = shards / "00000.tar"
    good_one = load_index(str(shard))
    beside = shards / "00000.tar.idx.npy"
    if name in INDEXES:
        table = INDEXES[name]
        if table.dtype == np.int64 and len(table.shape) and len(table) > 7:
            table = table.copy()
            table[1] = shard.stat().st_size
        np.save(beside, table)
    elif name == "a pickle":
        np.save(beside, np.array([{}], dtype=object), allow_pickle=True)
    elif name == "huge":
        beside.write_bytes(
            b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999,), }".ljust(128)
            + b"\n"
        )
    else:
        beside.write_text("offsets")
    again = load_index(str(shard))
    assert np.array_equal(again.offsets, good_one.offsets) and again.digest == good_one.digest


def test_a_pipe_for_a_shard_is_refused_and_not_waited_for(home, tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    order = ["train", str(home / "good.yaml"), f"out={tmp_path}/runs", f"data.sources.a.shards={tmp_path}/x.tar"]
    assert_ends(order, 2, ["x.tar: is not a regular file"], seconds=30)
    os.mkfifo(tmp_path / "x.jpg")
    with pytest.raises(DataError, match="is not a regular file"):
        load_index(str(tmp_path / "x.tar"))


def test_an_index_that_cannot_be_written_is_an_error(shards, tmp_path):
    for shard in shards.glob("*.tar"):
        (shards / f"{shard.name}.idx.npy").mkdir()  # a folder, which no file can replace by renaming
    assert_ends(["data", "index", str(shards)], 2, ["00000.tar.idx.npy: cannot be written"])


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_ids_are_those_of_the_whole_encoding(caption):
    whole = WHOLE.encode(caption) if max(map(len, caption.split()), default=0) <= MAX_WORD_CHARS else None
    if whole is not None:
        assert ClipTokenizer(77)(caption)[1:-1] == whole[:75]


def test_a_long_word_is_truncated_cheaply():
    tokens = ClipTokenizer(16)
    begin = time.monotonic()
    assert tokens("a red cat " * 10 + "x" * 50_000) == tokens("a red cat " * 10)
    assert time.monotonic() - begin < 2
    with pytest.raises(BadSampleError, match=f"a word with more than {MAX_WORD_CHARS} characters"):
        tokens("x" * 50_000)
    with pytest.raises(DataError, match="Shorten it"):
        tokens.batch(["fine", "x" * 50_000])


def test_no_image_starts_a_program(monkeypatch):
    monkeypatch.setattr("subprocess.check_call", lambda *a, **k: pytest.fail("a program was started"))
    with pytest.raises(BadSampleError, match="bad image"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n")
    assert torch.get_num_threads()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_tar_is_named_with_the_tool_that_unpacks_it(pack, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shard(tmp_path / "a.tar", (sample(i) for i in range(3)))
    (tmp_path / "b.tar").write_bytes(pack((tmp_path / "a.tar").read_bytes()))
    for _ in range(2):  # the second time with a stored index
        with pytest.raises(
            DataError, match=r"b\.tar: is compressed with (gzip|bzip2|xz), .*(gunzip|bunzip2|unxz) < FILE"
        ):
            load_index(str(tmp_path / "b.tar"))
    assert_ends(["data", "check", str(tmp_path / "b.tar")], 2, ["is compressed"])
