"""Tensors written in pieces are read back in any others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparo_train.core.disk.pieces import Piece, PiecesReader, owners, write_pieces
from sparo_train.core.errors import CheckpointError


def written(folder, cuts_by_name):
    """Tensors cut at the given elements (or rows), one file per piece number; returns the paths."""
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
    return paths


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pieces_give_any_run(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("pieces")
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    matrix = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    by_rows = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, rows if by_rows else matrix.numel()), max_size=4))
    scalar = torch.tensor(2.5, dtype=torch.float64)
    paths = written(folder, {"matrix": (matrix, cuts, by_rows), "scalar": (scalar, [], False)})
    reader = PiecesReader({"model": paths})
    begin = data.draw(st.integers(0, matrix.numel()))
    end = data.draw(st.integers(begin, matrix.numel()))
    assert torch.equal(reader.read("model", "matrix", begin, end), matrix.flatten()[begin:end])
    assert all(torch.equal(t, {"matrix": matrix, "scalar": scalar}[n]) for n, t in reader.part("model").items())
    assert reader.shape("model", "matrix") == (rows, columns) and reader.read("model", "scalar").dtype == torch.float64


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
def test_every_tensor_has_one_owner_and_the_load_is_fair(sizes, ranks):
    found = owners(sizes, ranks)
    loads = [sum(s for s, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(ranks)]
    assert len(found) == len(sizes) and sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_piece_that_is_not_there_is_named(tmp_path):
    tensor = torch.arange(12.0).view(4, 3)
    paths = written(tmp_path, {"w": (tensor, [1, 2], True)})
    with pytest.raises(CheckpointError, match=r"model 'w' is not whole \(its files hold 3 of 12 elements in order\)"):
        PiecesReader({"model": [paths[0], paths[2]]})
    with pytest.raises(CheckpointError, match="model holds no 'v'"):
        PiecesReader({"model": paths}).read("model", "v")
    paths[1].write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: not readable"):
        PiecesReader({"model": paths})
