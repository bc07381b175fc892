"""Tensors that are written in pieces can be read in any other pieces."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sparo_train.core.disk.pieces import Piece, assign_writers, write_pieces
from sparo_train.core.disk.pieces_reader import INDEX, PiecesReader, collect_extents, write_index
from sparo_train.core.errors import CheckpointError


def written(folder, cuts_by_name):
    """Write tensors, cut at the given elements (or rows), one file per number of pieces; return the paths."""
    files = {}
    for name, (tensor, cuts, by_rows) in cuts_by_name.items():
        row = max(1, tensor[0].numel()) if by_rows else 1
        ends = [*sorted(c * row for c in cuts), tensor.numel()]
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            data = tensor.flatten()[begin:end]
            whole = begin == 0 and end == tensor.numel()
            data = data.view(tensor.shape if whole else (-1, *tensor.shape[1:])) if by_rows or whole else data
            files.setdefault(number, {})[name] = Piece(data, tuple(tensor.shape), begin)
    paths = []
    for number, pieces in files.items():
        paths.append(folder / f"model-{number}.safetensors")
        write_pieces(paths[-1], pieces)
    write_index(
        folder / INDEX, {p.name: ("model", collect_extents(own)) for p, own in zip(paths, files.values(), strict=True)}
    )
    return paths


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pieces_can_be_read_from_any_others(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("pieces")
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    matrix = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    by_rows = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, rows if by_rows else matrix.numel()), max_size=4))
    scalar = torch.tensor(2.5, dtype=torch.float64)
    paths = written(folder, {"matrix": (matrix, cuts, by_rows), "scalar": (scalar, [], False)})
    reader = PiecesReader({"model": paths}, index=data.draw(st.sampled_from([None, folder / INDEX])))
    begin = data.draw(st.integers(0, matrix.numel()))
    end = data.draw(st.integers(begin, matrix.numel()))
    assert torch.equal(reader.read("model", "matrix", begin, end), matrix.flatten()[begin:end])
    assert all(torch.equal(t, {"matrix": matrix, "scalar": scalar}[n]) for n, t in reader.part("model").items())
    assert reader.shape("model", "matrix") == (rows, columns) and reader.read("model", "scalar").dtype == torch.float64


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
def test_every_tensor_has_one_writer_and_the_load_is_balanced(sizes, ranks):
    found = assign_writers(sizes, ranks)
    loads = [sum(s for s, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(ranks)]
    assert len(found) == len(sizes) and sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_missing_piece_is_named(tmp_path):
    tensor = torch.arange(12.0).view(4, 3)
    paths = written(tmp_path, {"w": (tensor, [1, 2], True)})
    with pytest.raises(
        CheckpointError, match=r"model 'w' is incomplete: its files have a gap after the first 3 of 12 elements"
    ):
        PiecesReader({"model": [paths[0], paths[2]]})
    with pytest.raises(CheckpointError, match="model has no tensor 'v'"):
        PiecesReader({"model": paths}).read("model", "v")
    paths[1].write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: not readable"):
        PiecesReader({"model": paths})


def test_with_an_index_only_the_files_with_the_wanted_elements_are_opened(tmp_path):
    tensor = torch.arange(12.0).view(4, 3)
    paths = written(tmp_path, {"w": (tensor, [1, 2], True), "b": (torch.ones(2), [], True)})
    for path in (paths[0], paths[2]):
        path.unlink()
    reader = PiecesReader({"model": paths}, index=tmp_path / INDEX)
    assert reader.names("model") == ["w", "b"] and reader.shape("model", "b") == (2,)
    assert torch.equal(reader.read("model", "w", 3, 6), tensor[1])
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: not readable"):
        reader.read("model", "w", 5, 7)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index, paths: index.write_bytes(b"torn"), ""),
        (lambda index, paths: index.unlink(), ""),
        (lambda index, paths: save_file({"x": torch.zeros(1)}, index), ""),
        (
            lambda index, paths: write_index(index, {paths[0].name: ("model", {"w": (0, 12, (4, 3))})}),
            "the files that the index lists for model differ",
        ),
    ],
)
def test_a_damaged_index_is_named(tmp_path, damage, message):
    paths = written(tmp_path, {"w": (torch.arange(12.0).view(4, 3), [1], True)})
    damage(tmp_path / INDEX, paths)
    with pytest.raises(CheckpointError, match=rf"index\.safetensors: not readable.*{message}"):
        PiecesReader({"model": paths}, index=tmp_path / INDEX)


def test_an_index_of_other_pieces_reads_nothing_wrong(tmp_path):
    paths = written(tmp_path, {"w": (torch.arange(12.0).view(4, 3), [1], True)})
    extents = {"w": (0, 6, (4, 3))}, {"w": (6, 6, (4, 3))}
    write_index(tmp_path / INDEX, {p.name: ("model", own) for p, own in zip(paths, extents, strict=True)})
    with pytest.raises(CheckpointError, match="should have 6 elements"):
        PiecesReader({"model": paths}, index=tmp_path / INDEX).part("model")


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8),
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_a_written_file_has_the_bytes_that_safetensors_writes(tmp_path_factory, what):
    folder = tmp_path_factory.mktemp("pieces")
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in what.items()}
    size, digest = write_pieces(folder / "ours", {name: Piece.unsharded(t) for name, t in tensors.items()})
    save_file(tensors, folder / "theirs")
    content = (folder / "ours").read_bytes()
    assert content == (folder / "theirs").read_bytes()
    assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("place", ["disk", "/dev/shm"])  # a tmpfs does not bypass the page cache
def test_a_file_of_many_chunks_is_whole_on_any_disk(tmp_path, place):
    data = {"x": torch.randn(5_000_001), "y": torch.arange(9)}
    path = (tmp_path if place == "disk" else Path(place)) / f"sparo-{os.getpid()}.safetensors"
    try:
        write_pieces(path, {name: Piece.unsharded(t) for name, t in data.items()})
        assert all(torch.equal(t, data[name]) for name, t in load_file(path).items())
    finally:
        path.unlink()
