"""Elements of a tensor on this rank: all of an ordinary tensor, some rows of a DTensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..core.disk.pieces import CheckpointReader, Piece, assign_writers
from ..core.errors import CheckpointError


class Span(NamedTuple):
    """This rank's part of a tensor (`local`, a view), its first element in row-major order (`begin`), and which of equal copies it is."""

    local: Tensor
    begin: int = 0
    copy: int = 0
    copies: int = 1

    @staticmethod
    def from_tensor(tensor: Tensor) -> Span:
        """Return the span of an ordinary tensor, or of a DTensor sharded by rows over the last mesh dimension and replicated over the first."""
        if not isinstance(tensor, DTensor):
            return Span(tensor.detach())
        # `fully_shard` only produces rows over the last dimension here.
        assert tensor.placements[-1] == Shard(0), tensor.placements
        mesh = tensor.device_mesh
        index, parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        rows_each = -(-tensor.shape[0] // parts)  # as in torch.chunk
        begin = min(tensor.shape[0], index * rows_each) * math.prod(tensor.shape[1:])
        copies = (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim > 1 else (0, 1)
        return Span(tensor.to_local().detach(), begin, *copies)


def select_pieces(tensors: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Piece]:
    """Return the pieces that this rank writes: its own rows, and its share of tensors that several ranks hold."""
    spans = {name: Span.from_tensor(tensor) for name, tensor in tensors.items()}
    plain = [name for name in tensors if not isinstance(tensors[name], DTensor)]
    # Distribute replicated tensors by size, so that no rank has a much longer file to write.
    mine = dict(
        zip(plain, (owner == rank for owner in assign_writers([tensors[n].nbytes for n in plain], size)), strict=True)
    )
    pieces = {}
    for number, (name, span) in enumerate(spans.items()):
        if mine.get(name, number % span.copies == span.copy) and (span.local.numel() or name in mine):
            pieces[name] = Piece(span.local, tuple(tensors[name].shape), span.begin)
    return pieces


def load_tensors(source: CheckpointReader, part: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill these tensors from a part of a checkpoint, each rank its own elements.

    Raises:
        CheckpointError: names or shapes differ.
    """
    # Check before writing: a model that is half filled from another model's checkpoint would train.
    refuse_differences(source, part, {name: tuple(t.shape) for name, t in tensors.items()})
    for name, tensor in tensors.items():
        local, begin, *_ = Span.from_tensor(tensor)
        local.copy_(source.read(part, name, begin, begin + local.numel()).view(local.shape))


def refuse_differences(source: CheckpointReader, part: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if a part of a checkpoint does not contain exactly these tensors."""
    saved = set(source.names(part))
    missing, unexpected = sorted(shapes.keys() - saved), sorted(saved - shapes.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"checkpoint: the names in part {part} of the checkpoint do not match those of this run, missing "
            f"{missing[:5]}, unexpected {unexpected[:5]}. The checkpoint belongs to another model."
        )
    for name, shape in shapes.items():
        if source.shape(part, name) != shape:
            raise CheckpointError(
                f"checkpoint: {part} {name!r} has shape {source.shape(part, name)}, the model has {shape}"
            )
