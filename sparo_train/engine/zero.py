"""Parameters under DeepSpeed's ZeRO: ranges of elements in flat fp32 tensors, one per parameter group and rank.

Stages 1 and 2 divide a group's concatenated parameters evenly over the ranks and keep whole copies for computation.
Stage 3 divides every parameter evenly. Written for DeepSpeed 0.19. Its public functions cannot read a shard without a
gather or write one before the first step, so this module accesses its tensors directly.
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
from .shard_slices import refuse_differences, select_pieces


class FlatSlice(NamedTuple):
    """`length` elements of a parameter from `begin` on, at `offset` of its group's flat tensor."""

    flat: Tensor
    offset: int
    begin: int
    length: int

    def view(self, flat: Tensor) -> Tensor:
        """Return these elements of a flat tensor with the same layout, as a view."""
        return flat.detach().narrow(0, self.offset, self.length)


class Zero:
    """Tensors of an initialised DeepSpeed engine.

    Args:
        engine: result of `deepspeed.initialize`.
        stage: 1, 2 or 3.
        state_names: tensors that the optimizer keeps per parameter; `step` is a count, the others have the parameter's
            shape.
    """

    def __init__(self, engine: Any, stage: int, state_names: Sequence[str]):
        self.engine, self.optimizer, self.stage = engine, engine.optimizer, stage
        self.counts_steps = "step" in state_names
        self.moments = [name for name in state_names if name != "step"]

    @property
    def flats(self) -> Sequence[Tensor]:
        """Return this rank's fp32 master weights, by parameter group (stage 3: by sub-group)."""
        o = self.optimizer
        return o.fp32_partitioned_groups_flat if self.stage == 3 else o.single_partition_of_fp32_groups

    def flat_slice(self, p: nn.Parameter) -> FlatSlice | None:
        """Return the slice of a trained parameter on this rank; None if it has none."""
        o = self.optimizer
        if self.stage == 3:
            group, offset, each = o.grad_position[o.get_param_id(p)]
            begin = dist.get_rank(o.dp_process_group) * each
            # The last rank has padding, which belongs to no parameter.
            length = min(each, p.ds_numel - begin)  # type: ignore[attr-defined]
            return FlatSlice(self.flats[group], offset, begin, length) if length > 0 else None
        hp_mapping = getattr(p, "_hp_mapping", None)
        if hp_mapping is None:
            return None
        at, of = hp_mapping.hp_fragment_address, hp_mapping.lp_fragment_address
        return FlatSlice(self.flats[hp_mapping.param_group_index], at.start, of.start, at.numel)

    def frozen_shard(self, p: nn.Parameter) -> tuple[Tensor, int]:
        """Return this rank's elements of a parameter that is not trained, and the index of the first one."""
        if self.stage < 3:
            return p.detach().view(-1), 0
        shard: Tensor = p.ds_tensor  # type: ignore[attr-defined]
        begin = self.engine.global_rank * shard.numel()
        return shard.detach().view(-1)[: max(0, p.ds_numel - begin)], begin  # type: ignore[attr-defined]

    def entries(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's state of a flat tensor; empty before the first step."""
        return self.optimizer.optimizer.state.get(flat, {})

    def init_optimizer_state(self, step: float) -> None:
        """Create the optimizer's state as after `step` steps, on every rank alike."""
        for flat in self.flats:
            state = self.optimizer.optimizer.state[flat]
            for name in self.moments:
                state.setdefault(name, torch.zeros_like(flat, requires_grad=False))
            # Adam divides by a power of `step`, and zero would rescale the restored moments.
            if self.counts_steps:
                state["step"] = torch.full((), step, dtype=torch.float32, device=flat.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies for computation after master weights were written. All ranks call it together."""
        o = self.optimizer
        if self.stage < 3:
            o.update_lp_params()
            return
        # Slice them again from the masters, then pass them to the hooks that gather them.
        o._partition_all_parameters()
        for group in range(len(o.fp16_groups)):
            o._reassign_or_swap_out_partitioned_parameters(group)
        if len(o.persistent_parameters):
            o.persistent_parameters[0].all_gather(o.persistent_parameters)

    def persistent(self, p: nn.Parameter) -> bool:
        """Return whether every rank always has a whole parameter: in stage 3, small ones."""
        # Do not decide by the number of elements: a large one may still hold its value from before the step.
        return self.stage < 3 or bool(getattr(p, "ds_persist", False))

    def local_shard(self, p: nn.Parameter) -> tuple[Tensor, int]:
        """Return this rank's elements of a parameter, from the master weights if it is trained, and the index of the first one."""
        if not p.requires_grad:
            return self.frozen_shard(p)
        flat_slice = self.flat_slice(p)
        return (p.new_empty(0), 0) if flat_slice is None else (flat_slice.view(flat_slice.flat), flat_slice.begin)

    @torch.no_grad()
    def gather_parameter(self, p: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
        """Return the value of a parameter as a new tensor; all ranks call it together.

        DeepSpeed's GatheredParameters is not used, because in stage 3 it corrupts DeepSpeed's record of the module
        order.
        """
        if self.stage < 3 and not p.requires_grad:
            return p.detach().clone().view(shape)
        shard, begin = self.local_shard(p)
        full = torch.zeros(math.prod(shape), dtype=p.dtype, device=self.engine.device)
        # Without the padding of its neighbours.
        full[begin : begin + shard.numel()] = shard
        # Zeros elsewhere, so that the sum is a gather of shards of any length.
        dist.all_reduce(full)
        return full.view(shape)

    @torch.no_grad()
    def write(self, p: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to the same value on every rank: its master weights and, if it is whole here, its copy."""
        shard, begin = self.local_shard(p)
        shard.copy_(value.reshape(-1)[begin : begin + shard.numel()])
        # Stage 3 has released the whole parameter; `refresh` updates its copy later.
        if p.numel():
            p.copy_(value)

    def gradients(self, named: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """Return this rank's shards of the gradients, averaged over ranks, after the last backward and before the step."""
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
        """Return the pieces that this rank writes: ranges of master weights and moments, and its share of replicated tensors.

        Args:
            objective: holds the parameters.
            shapes: shapes of the objective's state before DeepSpeed changed it.
            share: this rank, of how many.
        """
        model: dict[str, Piece] = {}
        optimizer: dict[str, Piece] = {}
        everywhere = {name: b for name, b in objective.named_buffers() if name in shapes}
        trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        # Shared parameters are written under both names, so that the checkpoint is a complete state dict.
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
                        optimizer[f"{name}/{key}"] = Piece(
                            flat_slice.view(entries[key]), shapes[name], flat_slice.begin
                        )
        steps = [entries["step"] for entries in map(self.entries, self.flats) if "step" in entries]
        # One name per parameter, as in other engines, so that any engine can read this checkpoint.
        counts = {f"{name}/step": steps[0] for name in trained} if steps else {}
        return {
            "model": model | select_pieces(everywhere, *share),
            "optimizer": optimizer | select_pieces(counts, *share),
        }

    def load(self, objective: nn.Module, shapes: Mapping[str, tuple[int, ...]], source: CheckpointReader) -> None:
        """Load master weights and moments; call `refresh` afterwards. Raises `CheckpointError`."""
        trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        refuse_differences(source, "model", shapes)
        has_state = bool(source.names("optimizer"))
        counts = {float(source.read("optimizer", f"{n}/step")) for n in trained if has_state and self.counts_steps}
        if len(counts) > 1:
            raise CheckpointError(
                f"checkpoint: parameters have different step counts {sorted(counts)}, which DeepSpeed does not support. Use another engine."
            )
        # Create the state before reading moments into views of its tensors.
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
                    flat_slice.view(self.entries(flat_slice.flat)[key]).copy_(saved)

    def zero_gradients(self) -> None:
        """Clear gradients: stage 3 keeps the last gradient of a parameter that the next step does not reach."""
        if self.stage == 3:
            self.optimizer.grad_partitions_flat_buffer.zero_()
