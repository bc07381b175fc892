"""Where DeepSpeed's ZeRO keeps a parameter: runs of elements in flat fp32 tensors, one per parameter group and rank.

Stages 1 and 2 cut a group's concatenation evenly over the ranks, beside whole copies to compute with; stage 3 cuts every
parameter evenly. Written against DeepSpeed 0.19; what its public functions cannot do locally (reading a piece without a
gather, writing one before the first step) is done on its own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.disk.pieces import CheckpointReader, Piece, Pieces
from ..core.errors import CheckpointError
from .shard_slices import pieces_of, refuse_differences


class FlatSlice(NamedTuple):
    """`length` elements from `begin` of a parameter, at `offset` of the flat tensor of its group."""

    flat: Tensor
    offset: int
    begin: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """These elements in a flat tensor of the same layout: a view."""
        return flat.detach().narrow(0, self.offset, self.length)


class Zero:
    """The tensors behind an initialised DeepSpeed engine.

    Args:
        engine: what `deepspeed.initialize` returned.
        stage: 1, 2 or 3.
        state_names: tensors that the optimizer keeps for a parameter; `step` counts, the others have its shape.
    """

    def __init__(self, engine: Any, stage: int, state_names: Sequence[str]):
        self.engine, self.optimizer, self.stage = engine, engine.optimizer, stage
        self.counts_steps = "step" in state_names
        self.moments = [name for name in state_names if name != "step"]

    @property
    def flats(self) -> Sequence[Tensor]:
        """This rank's fp32 master weights, by parameter group (stage 3: by sub-group)."""
        o = self.optimizer
        return o.fp32_partitioned_groups_flat if self.stage == 3 else o.single_partition_of_fp32_groups

    def flat_slice(self, p: nn.Parameter) -> FlatSlice | None:
        """Where this rank holds elements of a trained parameter; None where it holds none."""
        o = self.optimizer
        if self.stage == 3:
            group, offset, each = o.grad_position[o.get_param_id(p)]
            begin = dist.get_rank(o.dp_process_group) * each
            # The last rank is padded, and padding is no part of the parameter.
            length = min(each, p.ds_numel - begin)  # type: ignore[attr-defined]
            return FlatSlice(self.flats[group], offset, begin, length) if length > 0 else None
        hp_mapping = getattr(p, "_hp_mapping", None)
        if hp_mapping is None:
            return None
        at, of = hp_mapping.hp_fragment_address, hp_mapping.lp_fragment_address
        return FlatSlice(self.flats[hp_mapping.param_group_index], at.start, of.start, at.numel)

    def frozen_shard(self, p: nn.Parameter) -> tuple[Tensor, int]:
        """This rank's elements of a parameter that is not trained, and the first one's index."""
        if self.stage < 3:
            return p.detach().view(-1), 0
        shard: Tensor = p.ds_tensor  # type: ignore[attr-defined]
        begin = self.engine.global_rank * shard.numel()
        return shard.detach().view(-1)[: max(0, p.ds_numel - begin)], begin  # type: ignore[attr-defined]

    def entries(self, flat: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a flat tensor; empty before the first step."""
        return self.optimizer.optimizer.state.get(flat, {})

    def init_optimizer_state(self, step: float) -> None:
        """Make the optimizer's state exist, as after `step` steps, on every rank alike."""
        for flat in self.flats:
            state = self.optimizer.optimizer.state[flat]
            for name in self.moments:
                state.setdefault(name, torch.zeros_like(flat, requires_grad=False))
            # Adam divides by a power of it; a fresh zero would scale the restored moments anew.
            if self.counts_steps:
                state["step"] = torch.tensor(step, dtype=torch.float32, device=flat.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """After master weights were written: the copies to compute with. All ranks together."""
        o = self.optimizer
        if self.stage < 3:
            o.update_lp_params()
            return
        # Cut anew from the masters, then handed to the hooks that gather them.
        o._partition_all_parameters()
        for group in range(len(o.fp16_groups)):
            o._reassign_or_swap_out_partitioned_parameters(group)
        if len(o.persistent_parameters):
            o.persistent_parameters[0].all_gather(o.persistent_parameters)

    def persistent(self, p: nn.Parameter) -> bool:
        """Whether every rank has all of a parameter, always: in stage 3 the small ones."""
        # Not by its number of elements: a large one may still lie here as it was before the step.
        return self.stage < 3 or bool(getattr(p, "ds_persist", False))

    def local_shard(self, p: nn.Parameter) -> tuple[Tensor, int]:
        """This rank's elements of a parameter, from the master weights where it is trained, and the first one's index."""
        if not p.requires_grad:
            return self.frozen_shard(p)
        flat_slice = self.flat_slice(p)
        return (p.new_empty(0), 0) if flat_slice is None else (flat_slice.of(flat_slice.flat), flat_slice.begin)

    @torch.no_grad()
    def gathered(self, p: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
        """A parameter's value, a new tensor; all ranks together.

        Not by DeepSpeed's GatheredParameters, which in stage 3 leaves its record of the order of modules at odds with itself.
        """
        if self.stage < 3 and not p.requires_grad:
            return p.detach().clone().view(shape)
        shard, begin = self.local_shard(p)
        full = torch.zeros(math.prod(shape), dtype=p.dtype, device=self.engine.device)
        # Without its neighbours' padding.
        full[begin : begin + shard.numel()] = shard
        # Zeros elsewhere: the sum is a gather of pieces of any length.
        dist.all_reduce(full)
        return full.view(shape)

    @torch.no_grad()
    def write(self, p: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to the same value on every rank: master weights and, where it is whole here, the copy."""
        shard, begin = self.local_shard(p)
        shard.copy_(value.reshape(-1)[begin : begin + shard.numel()])
        # Stage 3 has released the whole parameter; its copy follows by refresh.
        if p.numel():
            p.copy_(value)

    def gradients(self, named: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """This rank's pieces of the gradients, averaged over ranks, after the last backward and before the step."""
        if self.stage == 3:
            from deepspeed.utils import safe_get_local_grad

            for name, p in named.items():
                if (flat_slice := self.flat_slice(p)) is not None:
                    yield name, safe_get_local_grad(p)[: flat_slice.length]
            return
        starts: dict[tuple[int, int], Tensor] = {}
        for group, tensors in self.optimizer.averaged_gradients.items():
            offset = 0
            for tensor in tensors or ():
                starts[group, offset] = tensor.reshape(-1)
                offset += tensor.numel()
        groups = {id(flat): number for number, flat in enumerate(self.flats)}
        for name, p in named.items():
            if (flat_slice := self.flat_slice(p)) is not None and (
                # Stages 1 and 2 keep averages in the order of the group, not by parameter.
                gradient := starts.get((groups[id(flat_slice.flat)], flat_slice.offset))
            ) is not None:
                yield name, gradient[: flat_slice.length]

    def pieces(self, objective: nn.Module, shapes: Mapping[str, tuple[int, ...]], share: tuple[int, int]) -> Pieces:
        """What this rank writes: runs of master weights and moments, and its share of what all ranks hold.

        Args:
            shapes: of the objective's state before DeepSpeed held it.  share: this rank, of how many.
        """
        model: dict[str, Piece] = {}
        optimizer: dict[str, Piece] = {}
        everywhere = {name: b for name, b in objective.named_buffers() if name in shapes}
        trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        # Also under a second name: what reads a checkpoint as a state dict finds every tensor of it.
        for name, p in objective.named_parameters(remove_duplicate=False):
            if self.stage < 3 and not p.requires_grad:
                everywhere[name] = p.detach().view(shapes[name])  # 0-d ones are vectors here
                continue
            data, begin = self.local_shard(p)
            if data.numel():
                model[name] = Piece(data, shapes[name], begin)
            if name in trained and (flat_slice := self.flat_slice(p)) is not None:
                entries = self.entries(flat_slice.flat)
                for key in self.moments:
                    if key in entries:
                        optimizer[f"{name}/{key}"] = Piece(flat_slice.of(entries[key]), shapes[name], flat_slice.begin)
        steps = [entries["step"] for entries in map(self.entries, self.flats) if "step" in entries]
        # Under one name per parameter, as other engines write them: any engine may read this checkpoint.
        counts = {f"{name}/step": steps[0] for name in trained} if steps else {}
        return {"model": model | pieces_of(everywhere, *share), "optimizer": optimizer | pieces_of(counts, *share)}

    def load(self, objective: nn.Module, shapes: Mapping[str, tuple[int, ...]], source: CheckpointReader) -> None:
        """Fill master weights and moments; the copies to compute with follow by `refresh`. Raises `CheckpointError`."""
        trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        refuse_differences(source, "model", shapes)
        has_state = bool(source.names("optimizer"))
        counts = {float(source.read("optimizer", f"{n}/step")) for n in trained if has_state and self.counts_steps}
        if len(counts) > 1:
            raise CheckpointError(
                f"checkpoint: parameters have different step counts {sorted(counts)}, which DeepSpeed does not support. Use another engine."
            )
        # Before moments are read: they are views of tensors that have to exist.
        self.init_optimizer_state(*counts or (0.0,))
        for name, t in [*objective.named_parameters(), *objective.named_buffers()]:
            if name not in shapes:  # a buffer that is not saved
                continue
            shard, begin = self.local_shard(t) if isinstance(t, nn.Parameter) else (t.detach().view(-1), 0)
            shard.copy_(source.read("model", name, begin, begin + shard.numel()))
            if has_state and name in trained and (flat_slice := self.flat_slice(trained[name])) is not None:
                for key in self.moments:
                    saved = source.read(
                        "optimizer", f"{name}/{key}", flat_slice.begin, flat_slice.begin + flat_slice.length
                    )
                    flat_slice.of(self.entries(flat_slice.flat)[key]).copy_(saved)

    def zero_gradients(self) -> None:
        """Stage 3 keeps the last step's gradient of a parameter that this step does not reach."""
        if self.stage == 3:
            self.optimizer.grad_partitions_flat_buffer.zero_()
