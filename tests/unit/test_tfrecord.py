"""TFRecords without TensorFlow, compared with files of another library and protobuf's own serialisation."""

import gzip
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tfrecord.writer import TFRecordWriter

from sparo_train.core.errors import DataError
from sparo_train.data.decode.tfrecord import parse_example, records


def tfrecords(path, examples, pack=lambda data: data):
    """Write records with another library, with protobuf's own serialisation."""
    writer = TFRecordWriter(str(path))
    for one in examples:
        writer.write(one)
    writer.close()
    path.write_bytes(pack(path.read_bytes()))
    return path


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=4),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9)
        | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9)
        | st.lists(st.binary(max_size=4), min_size=1, max_size=9),
        max_size=3,
    )
)
def test_an_example_is_what_protobuf_wrote(tree):
    kinds = {int: "int", float: "float", bytes: "byte"}
    data = TFRecordWriter.serialize_tf_example({k: (v, kinds[type(v[0])]) for k, v in tree.items()})
    found = parse_example(data, "here")
    assert found.keys() == tree.keys()
    for name, value in tree.items():
        mine = found[name]
        if isinstance(value[0], bytes):
            mine = [bytes([b]) for b in mine] if isinstance(mine, np.ndarray) else mine
            assert mine == value
        else:
            assert np.array_equal(np.asarray(mine), np.array(value, mine.dtype))  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_read(data):
    try:
        assert isinstance(parse_example(data, "here"), dict)
    except DataError as error:
        assert "here: is not a tf.train.Example" in str(error)


PACKED = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "two": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
}


@pytest.mark.parametrize("pack", PACKED)
def test_a_truncated_or_damaged_file_is_reported_with_the_position(tmp_path, pack):
    examples = [{"x": ([float(i)] * 40, "float")} for i in range(5)]
    path = tfrecords(tmp_path / "a.tfrecord", examples, PACKED[pack])
    whole = path.read_bytes()
    assert [parse_example(r, "")["x"][0] for r in records(path)] == [0, 1, 2, 3, 4]  # type: ignore[index]
    # Between two records, a truncated plain file looks complete.
    whole_ones = range(0, len(whole), len(whole) // 5) if pack == "plain" else ()
    for cut in set(range(1, len(whole) - 1, 7)).difference(whole_ones):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.tfrecord.*(is truncated|neither a TFRecord)"):
            for _ in records(path):
                pass
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        try:
            assert len(list(records(path))) <= 5  # the time and name in a header may be anything
        except DataError as error:
            assert "a.tfrecord" in str(error)
