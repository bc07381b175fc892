"""Ranks of a process group: rank and world size, agreement, exchange in a ring, and failures of single ranks."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from .config import differences
from .errors import ConfigError, LostRankError, SparoError, UnexpectedError
from .first_order import first_order
from .rendezvous import connect_store, find_rendezvous
from .world import World, note_start


class Shift:
    """Tensors in transit; `wait` returns those from the previous rank."""

    def __init__(self, work: list[Any], arriving: tuple[Tensor, ...], leaving: tuple[Tensor, ...]):
        self._work, self._arriving, self._leaving = (
            work,
            arriving,
            leaving,
        )  # tensors being sent must stay alive until they are sent

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._work:
            work.wait()
        self._leaving = ()
        return self._arriving


class Ring:
    """Ring over a process group; a ring of one rank if torch.distributed is not initialised.

    Args:
        group: the process group; None: the default group.
        dtype: dtype in which `gather` sends tensors; None: their own. Gradients are always summed in the tensors' dtype.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None):
        self.group, self.dtype = group, dtype
        single_process = not (dist.is_available() and dist.is_initialized())
        self.rank, self.size = (0, 1) if single_process else (dist.get_rank(group), dist.get_world_size(group))

    def shift(self, *tensors: Tensor) -> Shift:
        """Start sending to the next rank and receiving the same shapes from the previous one. All ranks must call it alike."""
        if self.size == 1:
            return Shift([], tensors, ())
        to, source = ((self.rank + step) % self.size for step in (1, -1))
        # Sending a view would send its neighbours' elements.
        leaving = tuple(t.contiguous() for t in tensors)
        arriving = tuple(torch.empty_like(t) for t in leaving)
        operations = []
        for out, into in zip(leaving, arriving, strict=True):
            operations.append(dist.P2POp(dist.isend, out, group=self.group, group_peer=to))
            operations.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=source))
        return Shift(dist.batch_isend_irecv(operations), arriving, leaving)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, concatenated in rank order; the gradient is the sum of all ranks' gradients."""
        return tensor if self.size == 1 else _Gather.apply(tensor, self)  # type: ignore[return-value]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors as a new tensor; its gradient is the sum of the ranks' gradients."""
    return _Sum.apply(tensor)  # pyright: ignore[reportReturnType]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        if Ring().size > 1:
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return sum_over_ranks(gradients[0])


# torch 2.14 renamed both, and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        sent = tensor.to(ring.dtype or tensor.dtype).contiguous()
        out = sent.new_empty(ring.size * len(sent), *sent.shape[1:])
        _all_gather(out, sent, group=ring.group)
        return out.to(tensor.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank has a gradient for every rank's tensor; each receives only the sum for its own.
        whole = gradients[0].contiguous()
        out = whole.new_empty(len(whole) // ctx.ring.size, *whole.shape[1:])
        _reduce_scatter(out, whole, group=ctx.ring.group)
        return out, None


def gather_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks, which must hold the same number of them, and the number of this rank's first row. Gradients flow back."""
    ring = Ring()
    if ring.size == 1:
        return tensor, 0
    return _Gather.apply(tensor, ring), ring.rank * len(tensor)  # pyright: ignore[reportReturnType]


T = TypeVar("T")
# Timeout for work that rank 0 does alone, such as evaluation. Gloo still notices at once if a rank dies.
_PATIENCE = timedelta(hours=24)


class Ranks:
    """Communication between the ranks of a run.

    Args:
        world: from `find_world`.
        backend: of training's own collectives: gloo or nccl.
        timeout: seconds after which a rank that does not answer ends the run.
        join_timeout: seconds to wait for ranks that have not started; None: as `timeout`.
    """

    def __init__(self, world: World, backend: str, timeout: float, join_timeout: float | None = None):
        self.world, self.rank, self.size, self.timeout = world, world.rank, world.size, timeout
        if self.size > 1:
            find_rendezvous()
            limit = timedelta(seconds=timeout)
            with self.error_context("joining the process group", only_collectives=True):
                note_start(world)
                store = connect_store(world, join_timeout or timeout)
                store.set_timeout(limit)
                dist.init_process_group(
                    backend, store=PrefixStore("run", store), rank=self.rank, world_size=self.size, timeout=limit
                )
                # Gloo, whatever the training uses: a message must not wait for a GPU.
                self._control_group: Any = dist.new_group(backend="gloo", timeout=limit)
                self._long_group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
                self._saving_group: Any = dist.new_group(backend="gloo", timeout=limit)

    def require_equal(
        self, facts: Mapping[str, Any], what: str, remedy: str = "Start all ranks with the same command."
    ) -> None:
        """Raise `ConfigError` on every rank unless all ranks have the same values (plain, by name)."""
        if self._all_equal(dict(facts)):
            return
        all_facts = self.gather(dict(facts))
        for rank, other in enumerate(all_facts):
            if changes := differences(all_facts[0], other):
                more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
                error = ConfigError(
                    f"rank {rank}: differs from rank 0 in its {what}, got {'; '.join(changes[:4])}{more}. {remedy}"
                )
                error.on_all_ranks, error.repeated = True, self.rank > 0
                raise error

    def _all_equal(self, facts: dict[str, Any]) -> bool:
        """Return whether the facts have the same hash on all ranks; much smaller than the facts of 1,024 ranks."""
        text = json.dumps(facts, sort_keys=True, default=repr).encode()
        words = np.frombuffer(hashlib.sha256(text).digest(), np.int32).tolist()
        maxima = self.all_reduce_max([*words, *(-word for word in words)])
        return maxima == [*words, *(-word for word in words)]

    @contextmanager
    def error_context(self, what: str, only_collectives: bool = False) -> Iterator[None]:
        """Turn a failed collective into an error that names this rank and its activity.

        Args:
            only_collectives: the context contains only collectives, so every error of torch inside comes from one.
        """
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if self.size == 1 or not (only_collectives or _is_collective(error)):
                raise
            raise LostRankError(
                f"rank {self.rank} of {self.size}: {what} failed, because another rank died or did not respond within "
                f"{self.timeout:g} s (engine.timeout). Run the same command again to resume from the last checkpoint. "
                f"({str(error).splitlines()[0][:200]})"
            ) from error

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Mark an error as raised on all ranks alike: they can handle it together, and rank 0 prints it."""
        try:
            yield
        except LostRankError:
            raise
        except SparoError as error:
            error.on_all_ranks, error.repeated = True, self.rank > 0
            raise

    def call_on_all(self, call: Callable[[], T]) -> T:
        """Return this rank's result of `call`. If it fails on one rank, all ranks raise that rank's error."""
        failed: SparoError | None = None
        result: list[T] = []
        try:
            result.append(call())
        except LostRankError:
            raise
        except SparoError as error:
            failed = error
        # Every rank must reach this exchange, even after a failure, or the others would wait forever.
        errors = self.gather(failed)
        first = next((rank for rank, error in enumerate(errors) if error), None)
        if first is None:
            return result[0]
        error = failed or errors[first]
        assert error is not None
        error.on_all_ranks, error.repeated = True, self.rank != first
        raise error

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over ranks."""
        return self.start_all_reduce_max(values)()

    def start_all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start `all_reduce_max`; returns a function that waits for the result. All ranks must call it at the same point."""
        if self.size == 1:
            return lambda: list(values)
        maxima = torch.tensor(values, dtype=torch.int64)
        with self.error_context("agreeing on how to continue", only_collectives=True):
            work = dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._control_group, async_op=True)

        def result() -> list[int]:
            with self.error_context("agreeing on how to continue", only_collectives=True):
                work.wait()
            return maxima.tolist()

        return result

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, in rank order; each rank passes equally many."""
        own = torch.tensor(numbers, dtype=torch.float64)
        out = own.new_empty(self.size * len(own))
        with self.error_context("gathering", only_collectives=True):
            _all_gather(out, own, group=self._control_group)
        return out.view(self.size, -1).tolist()

    def gather(self, value: T, saving: bool = False) -> list[T]:
        """Return the values of all ranks, in rank order. `saving` uses the group of the threads that write a checkpoint."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with self.error_context("gathering", only_collectives=True):
            dist.all_gather_object(out, value, group=self._saving_group if saving else self._control_group)
        return out

    def gather_on_rank0(self, value: T, saving: bool = False) -> list[T] | None:
        """Return the values of all ranks on rank 0, None on the others. `saving` as for `gather`."""
        if self.size == 1:
            return [value]
        out: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.error_context("gathering", only_collectives=True):
            dist.gather_object(value, out, dst=0, group=self._saving_group if saving else self._control_group)
        return out

    def broadcast(self, value: T, saving: bool = False) -> T:
        """Return rank 0's value; those of other ranks are ignored. `saving` as for `gather`."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        with self.error_context("waiting for rank 0", only_collectives=True):
            dist.broadcast_object_list(box, src=0, group=self._saving_group if saving else self._control_group)
        return box[0]

    def rank0_broadcast(self, call: Callable[[], T]) -> T:
        """Return the result of `call` on rank 0; the other ranks wait for it, and fail if it fails."""
        if self.size == 1:
            return call()
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = call()
            except SparoError as error:
                box[1] = error
            except (
                Exception
            ) as error:  # otherwise the others would wait here until this process has ended, and no rank would save
                box[1] = UnexpectedError.from_error(error)
                box[1].__cause__ = error
        with self.error_context("waiting for rank 0", only_collectives=True):
            # In the group with the long timeout, because rank 0 may need hours.
            dist.broadcast_object_list(box, src=0, group=self._long_group)
        if box[1] is not None:
            box[1].on_all_ranks, box[1].repeated = True, self.rank > 0
            raise box[1]
        return box[0]

    def close(self) -> None:
        """Leave the process group; none of its users may be alive any more."""
        if self.size > 1 and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


# Gloo raises plain RuntimeErrors, which begin with a location in its source; one message has none.
_GLOO = re.compile(r"\[[^\]]*/gloo/[^\]]*\]|Application timeout caused pair closure")


def _is_collective(error: BaseException) -> bool:
    """Return whether an error comes from a collective, by its type if possible, never by words that other errors use, too."""
    return isinstance(error, dist.DistError) or _GLOO.match(str(error)) is not None
