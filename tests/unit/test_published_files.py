"""Published files that are damaged, or that would end the process: refused by name before memory or C code is involved."""

import gzip
import io
import pickle
import tarfile

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from pycocotools import mask as coder

from sparo_data.official.folders import _outline
from sparo_data.official.published import PublishedConfig, PublishedScene, decode_array, to_label_map, write_published
from sparo_data.writer import encode_image
from sparo_train.core.errors import DataError
from tests.unit.test_published_sets import read

RNG = np.random.default_rng(0)


@settings(max_examples=100, deadline=None)
@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=st.integers(0, 1)))
def test_run_lengths_of_pycocotools_are_read(mask):
    packed = coder.encode(np.asfortranarray(mask))
    found = _outline(coder, {"size": packed["size"], "counts": packed["counts"].decode()}, mask.shape)
    assert np.array_equal(found, mask)


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_missing_arrays_and_wrong_lengths_are_reported(tmp_path):
    video, masks = saved(np.zeros((2, 4, 4, 3), np.uint8)), saved(np.zeros((2, 4, 4), np.uint8))
    pair = [("{}/0.video.npy", video), ("{}/0.segmentations.npy", masks)]
    path = tmp_path / "v.tar"
    tar_of(path, [(name.format(place), data) for place in ("train", "val") for name, data in pair])
    assert [s.key for s in read(path, "npy")] == ["train_0_000", "train_0_001", "val_0_000", "val_0_001"]
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        huge, {"descr": "|u1", "fortran_order": False, "shape": (1_000_000, 1000, 1000, 3)}
    )
    for members, told in (
        (
            [("0.video.npy", video), ("1.video.npy", video), ("0.segmentations.npy", masks)],
            "has segmentations but no video",
        ),
        ([("0.video.npy", video), ("0.video.npy.gz", gzip.compress(video))], "the tar contains this array twice"),
        ([("0.video.npy", huge.getvalue())], "integers that takes at most 4 GB"),
        ([("0.video.npy", video[:-5])], "Fetch the file again"),
        ([("0.video.npy.gz", gzip.compress(video + b"0" * 99))], "bytes, got"),
        ([("0.video.npy", b"PK" + video)], "is not an array of numbers"),
        ([("0.video.npy", saved(np.zeros((2, 4, 4, 3))))], "expected an array of integers"),
        ([("0.video.npy", saved(np.zeros((0, 4, 4, 3), np.uint8)))], "Fetch the file again"),
    ):
        tar_of(path, members)
        with pytest.raises(DataError, match=told):
            read(path, "npy")


def test_sets_are_not_overwritten_nor_written_with_masks_of_other_sizes(tmp_path):
    image, config = np.zeros((4, 4, 3), np.uint8), PublishedConfig(source="lmdb")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/converted.json").write_text('{"mine": 1}')
    with pytest.raises(DataError, match=r"converted\.json: was not written by"):
        write_published(tmp_path / "own", [PublishedScene("a", image, None, {})], config)
    assert (tmp_path / "own/converted.json").read_text() == '{"mine": 1}'
    with pytest.raises(DataError, match=r"a: masks have the shape \(3, 4\)"):
        write_published(tmp_path / "odd", [PublishedScene("a", image, image[:3, :, 0], {})], config)
    assert not (tmp_path / "odd").exists()


def test_colour_masks_are_numbered_for_still_images_only():
    red = np.zeros((2, 2, 3), np.uint8)
    red[0, 0] = (255, 0, 0)
    assert to_label_map(red, "a").tolist() == [[1, 0], [0, 0]]
    with pytest.raises(DataError, match="a: the masks are stored as colours"):
        to_label_map(red, "a", of_several=True)


def test_only_images_are_read_and_no_program_is_started():
    for data in (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"GIF89a",
        b"",
        encode_image(np.zeros((4, 4, 3), np.uint8))[:40],
    ):
        with pytest.raises(DataError, match="here: is not a readable picture"):
            decode_array(data, "here")


class Bomb:
    def __reduce__(self):
        return print, ("run",)


def test_lmdb_files_are_unpickled_as_arrays_only(tmp_path, capsys):
    label = RNG.integers(0, 4, (8, 8)).astype(np.uint8)
    image = RNG.integers(0, 256, (8, 8, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(label).save(buffer, "WEBP", lossless=True)
    samples = {b"000000": {"image": encode_image(image), "segment": np.frombuffer(buffer.getvalue(), np.uint8)},
               b"000001": {"image": encode_image(image), "segment": encode_image(label)}}  # fmt: skip
    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for key, one in samples.items():
            txn.put(key, pickle.dumps(one))
        txn.put(b"__keys__", pickle.dumps(list(samples)))
    for found in read(tmp_path / "a.lmdb", "lmdb"):
        assert np.array_equal(found.image, image) and np.array_equal(found.label, label)
    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, map_size=1 << 24) as env, env.begin(write=True) as txn:
        txn.put(b"000001", pickle.dumps({"image": Bomb()}))
    with pytest.raises(DataError, match=r"imports (builtins|__builtin__)\.print"):
        read(tmp_path / "a.lmdb", "lmdb")
    assert "run" not in capsys.readouterr().out
    # numpy's constructors accept addresses: an array of objects made from bytes would read any address of the file's choice
    evil = b"\x80\x04cnumpy\nndarray\n(K\x01\x85cnumpy\ndtype\n\x8c\x01O\x85RC\x08AAAAAA\x00\x00tR."
    for data in (evil, pickle.dumps({"image": np.array([object])}), pickle.dumps({"image": np.zeros(1, "f8,O")})):
        with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, map_size=1 << 24) as env, env.begin(write=True) as txn:
            txn.put(b"000001", data)
        with pytest.raises(DataError, match=r"a\.lmdb: 000001: "):
            read(tmp_path / "a.lmdb", "lmdb")
    with lmdb.open(str(tmp_path / "c.lmdb"), subdir=False, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for key in (b"a\0A", b"a\0B"):
            txn.put(key, pickle.dumps({"image": encode_image(RNG.integers(0, 256, (64, 64, 3)).astype(np.uint8))}))
        txn.put(b"__keys__", pickle.dumps([b"a\0A", b"a\0B"]))
    assert [found.key for found in read(tmp_path / "c.lmdb", "lmdb")] == ["a_A", "a_B"]
    whole = (tmp_path / "c.lmdb").read_bytes()
    for share in (0.9, 0.5):  # an incomplete download, whose missing pages would end the process
        (tmp_path / "c.lmdb").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(DataError, match=r"expected .* bytes, got"):
            read(tmp_path / "c.lmdb", "lmdb")
    (tmp_path / "b.lmdb").write_bytes(b"x" * 9999)
    with pytest.raises(DataError, match="is not an LMDB file"):
        read(tmp_path / "b.lmdb", "lmdb")
