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
from .spans import pieces_of, refuse_differences

ENTRIES = ("exp_avg", "exp_avg_sq")


class Spot(NamedTuple):
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
    """

    def __init__(self, engine: Any, stage: int):
        self.engine, self.optimizer, self.stage = engine, engine.optimizer, stage

    @property
    def flats(self) -> Sequence[Tensor]:
        """This rank's fp32 master weights, by parameter group (stage 3: by sub-group)."""
        o = self.optimizer
        return o.fp32_partitioned_groups_flat if self.stage == 3 else o.single_partition_of_fp32_groups

    def spot(self, p: nn.Parameter) -> Spot | None:
        """Where this rank holds elements of a trained parameter; None where it holds none."""
        o = self.optimizer
        if self.stage == 3:
            group, offset, each = o.grad_position[o.get_param_id(p)]
            begin = dist.get_rank(o.dp_process_group) * each
            # The last rank is padded, and padding is no part of the parameter.
            length = min(each, p.ds_numel - begin)  # type: ignore[attr-defined]
            return Spot(self.flats[group], offset, begin, length) if length > 0 else None
        held = getattr(p, "_hp_mapping", None)
        if held is None:
            return None
        at, of = held.hp_fragment_address, held.lp_fragment_address
        return Spot(self.flats[held.param_group_index], at.start, of.start, at.numel)

    def frozen(self, p: nn.Parameter) -> tuple[Tensor, int]:
        """This rank's elements of a parameter that is not trained, and the first one's index."""
        if self.stage < 3:
            return p.detach().view(-1), 0
        held: Tensor = p.ds_tensor  # type: ignore[attr-defined]
        begin = self.engine.global_rank * held.numel()
        return held.detach().view(-1)[: max(0, p.ds_numel - begin)], begin  # type: ignore[attr-defined]

    def entries(self, flat: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a flat tensor; empty before the first step."""
        return self.optimizer.optimizer.state.get(flat, {})

    def start_entries(self, step: float) -> None:
        """Make the optimizer's state exist, as after `step` steps, on every rank alike."""
        for flat in self.flats:
            state = self.optimizer.optimizer.state[flat]
            for name in ENTRIES:
                state.setdefault(name, torch.zeros_like(flat, requires_grad=False))
            # Adam divides by a power of it; a fresh zero would scale the restored moments anew.
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

    def held(self, p: nn.Parameter) -> tuple[Tensor, int]:
        """This rank's elements of a parameter, from the master weights where it is trained, and the first one's index."""
        if not p.requires_grad:
            return self.frozen(p)
        spot = self.spot(p)
        return (p.new_empty(0), 0) if spot is None else (spot.of(spot.flat), spot.begin)

    @torch.no_grad()
    def gathered(self, p: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
        """A parameter's value, a new tensor; all ranks together.

        Not by DeepSpeed's GatheredParameters, which in stage 3 leaves its record of the order of modules at odds with itself.
        """
        if self.stage < 3 and not p.requires_grad:
            return p.detach().clone().view(shape)
        held, begin = self.held(p)
        found = torch.zeros(math.prod(shape), dtype=p.dtype, device=self.engine.device)
        # Without its neighbours' padding.
        found[begin : begin + held.numel()] = held
        # Zeros elsewhere: the sum is a gather of pieces of any length.
        dist.all_reduce(found)
        return found.view(shape)

    @torch.no_grad()
    def write(self, p: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to the same value on every rank: master weights and, where it is whole here, the copy."""
        held, begin = self.held(p)
        held.copy_(value.reshape(-1)[begin : begin + held.numel()])
        # Stage 3 has released the whole parameter; its copy follows by refresh.
        if p.numel():
            p.copy_(value)

    def gradients(self, named: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """This rank's pieces of the gradients, averaged over ranks, after the last backward and before the step."""
        if self.stage == 3:
            from deepspeed.utils import safe_get_local_grad

            for name, p in named.items():
                if (spot := self.spot(p)) is not None:
                    yield name, safe_get_local_grad(p)[: spot.length]
            return
        starts: dict[tuple[int, int], Tensor] = {}
        for group, tensors in self.optimizer.averaged_gradients.items():
            offset = 0
            for tensor in tensors or ():
                starts[group, offset] = tensor.reshape(-1)
                offset += tensor.numel()
        groups = {id(flat): number for number, flat in enumerate(self.flats)}
        for name, p in named.items():
            if (spot := self.spot(p)) is not None and (
                # Stages 1 and 2 keep averages in the order of the group, not by parameter.
                found := starts.get((groups[id(spot.flat)], spot.offset))
            ) is not None:
                yield name, found[: spot.length]

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
            data, begin = self.held(p)
            if data.numel():
                model[name] = Piece(data, shapes[name], begin)
            if name in trained and (spot := self.spot(p)) is not None:
                entries = self.entries(spot.flat)
                for key in ENTRIES:
                    if key in entries:
                        optimizer[f"{name}/{key}"] = Piece(spot.of(entries[key]), shapes[name], spot.begin)
        steps = [entries["step"] for entries in map(self.entries, self.flats) if "step" in entries]
        # Under one name per parameter, as other engines write them: any engine may read this checkpoint.
        counts = {f"{name}/step": steps[0] for name in trained} if steps else {}
        return {"model": model | pieces_of(everywhere, *share), "optimizer": optimizer | pieces_of(counts, *share)}

    def load(self, objective: nn.Module, shapes: Mapping[str, tuple[int, ...]], source: CheckpointReader) -> None:
        """Fill master weights and moments; the copies to compute with follow by `refresh`. Raises `CheckpointError`."""
        trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        refuse_differences(source, "model", shapes)
        counts = {float(source.read("optimizer", f"{n}/step")) for n in trained if source.names("optimizer")}
        if len(counts) > 1:
            raise CheckpointError(
                f"checkpoint: parameters took {sorted(counts)} steps, and DeepSpeed counts them together; use another engine"
            )
        # Before moments are read: they are views of tensors that have to exist.
        self.start_entries(*counts or (0.0,))
        for name, t in [*objective.named_parameters(), *objective.named_buffers()]:
            if name not in shapes:  # a buffer that is not saved
                continue
            held, begin = self.held(t) if isinstance(t, nn.Parameter) else (t.detach().view(-1), 0)
            held.copy_(source.read("model", name, begin, begin + held.numel()))
            if counts and name in trained and (spot := self.spot(trained[name])) is not None:
                for key in ENTRIES:
                    saved = source.read("optimizer", f"{name}/{key}", spot.begin, spot.begin + spot.length)
                    spot.of(self.entries(spot.flat)[key]).copy_(saved)

    def forget_gradients(self) -> None:
        """Stage 3 keeps the last step's gradient of a parameter that this step does not reach."""
        if self.stage == 3:
            self.optimizer.grad_partitions_flat_buffer.zero_()
