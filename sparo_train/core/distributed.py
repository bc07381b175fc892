"""The ranks of a process group: rank and world size, what all ranks agree on, exchange in a ring, and failures of single ranks."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from .config import differences
from .errors import ConfigError, LostRankError, SparoError, UnexpectedError
from .world import World, note_start, whole_number


class Shift:
    """Tensors on their way; `wait` returns those that arrive from the previous rank."""

    def __init__(self, work: list[Any], arriving: tuple[Tensor, ...], leaving: tuple[Tensor, ...]):
        self._work, self._arriving, self._leaving = work, arriving, leaving  # what leaves must live until it has left

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._work:
            work.wait()
        self._leaving = ()
        return self._arriving


class Ring:
    """A ring over a process group; of one rank where torch.distributed is not initialised.

    Args:
        group: the process group; None: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        single_process = not (dist.is_available() and dist.is_initialized())
        self.rank, self.size = (0, 1) if single_process else (dist.get_rank(group), dist.get_world_size(group))

    def shift(self, *tensors: Tensor) -> Shift:
        """Start sending to the next rank and receiving the same shapes from the previous one. All ranks call it alike."""
        if self.size == 1:
            return Shift([], tensors, ())
        to, source = ((self.rank + step) % self.size for step in (1, -1))
        # A view's strides would be sent as its neighbours' elements.
        leaving = tuple(t.contiguous() for t in tensors)
        arriving = tuple(torch.empty_like(t) for t in leaving)
        operations = []
        for out, into in zip(leaving, arriving, strict=True):
            operations.append(dist.P2POp(dist.isend, out, group=self.group, group_peer=to))
            operations.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=source))
        return Shift(dist.batch_isend_irecv(operations), arriving, leaving)

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, concatenated in the order of ranks; with gradient (the sum of what the ranks ask for)."""
        return tensor if self.size == 1 else _Gather.apply(tensor, self)  # type: ignore[return-value]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of the ranks' tensors, new; its gradient is the sum of the ranks' gradients."""
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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: Ring) -> Tensor:
        ctx.ring, ctx.length = ring, len(tensor)
        parts = [torch.empty_like(tensor) for _ in range(ring.size)]
        dist.all_gather(parts, tensor.contiguous(), group=ring.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Each rank asked for something of every rank's tensor: what they ask of this one is summed.
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.ring.group)
        return whole[ctx.ring.rank * ctx.length :][: ctx.length].clone(), None


T = TypeVar("T")
# For what rank 0 alone does (evaluating); gloo notices a rank that dies at once all the same.
_PATIENCE = timedelta(hours=24)


class Ranks:
    """What the ranks of a run say to each other.

    Args:
        world: from `find_world`.
        backend: of training's own collectives: gloo or nccl.
        timeout: seconds after which a rank that does not answer ends the run.
    """

    def __init__(self, world: World, backend: str, timeout: float):
        self.world, self.rank, self.size, self.timeout = world, world.rank, world.size, timeout
        if self.size > 1:
            _rendezvous_of_slurm()
            limit = timedelta(seconds=timeout)
            with self.error_context("joining the process group", only_collectives=True):
                note_start(world)
                self._join(backend, limit)
                # Gloo, whatever trains: a message must not wait for a GPU.
                self._control_group: Any = dist.new_group(backend="gloo", timeout=limit)
                self._long_group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
                self._saving_group: Any = dist.new_group(backend="gloo", timeout=limit)

    def _join(self, backend: str, limit: timedelta) -> None:
        """Join the process group, after all ranks have agreed in its store on which run this is."""
        store, *_ = next(iter(rendezvous("env://", self.rank, self.size, timeout=limit)))
        store.set_timeout(limit)
        own = _run_token()
        if self.rank == 0:
            store.set("sparo-run", own)
        other = store.get("sparo-run").decode()
        if other != own:
            raise ConfigError(
                f"MASTER_PORT: belongs to another run ({other}), got {os.environ['MASTER_PORT']} for {own}. "
                "Export another MASTER_PORT for each run."
            )
        dist.init_process_group(
            backend, store=PrefixStore("run", store), rank=self.rank, world_size=self.size, timeout=limit
        )

    def require_equal(self, facts: Mapping[str, Any], what: str) -> None:
        """Raise `ConfigError` on every rank unless all ranks have the same facts (plain values, by name)."""
        all_facts = self.gather(dict(facts))
        for rank, other in enumerate(all_facts):
            if changes := differences(all_facts[0], other):
                more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
                error = ConfigError(
                    f"rank {rank}: has another {what} than rank 0, got {'; '.join(changes[:4])}{more}. Start all ranks with the same command."
                )
                error.on_all_ranks, error.repeated = True, self.rank > 0
                raise error

    @contextmanager
    def error_context(self, what: str, only_collectives: bool = False) -> Iterator[None]:
        """Turn a failed collective into an error that names this rank and what it was doing.

        Args:
            only_collectives: nothing but collectives runs inside, so that whatever torch raises there is one of theirs.
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
        """For what fails on all ranks with the same error: they can act on it together, and rank 0 prints it."""
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
        # Every rank has to reach this exchange, failed or not: the others would wait forever.
        errors = [error for error in self.gather(failed) if error]
        if not errors:
            return result[0]
        error = failed or errors[0]
        error.on_all_ranks, error.repeated = True, failed is None
        raise error

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over ranks."""
        if self.size == 1:
            return list(values)
        with self.error_context("agreeing on how to go on", only_collectives=True):
            maxima = torch.tensor(values, dtype=torch.int64)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._control_group)
        return maxima.tolist()

    def gather(self, value: T, saving: bool = False) -> list[T]:
        """Everybody's value, by rank. `saving`: among the threads that write a checkpoint, in a group of their own."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with self.error_context("gathering", only_collectives=True):
            dist.all_gather_object(out, value, group=self._saving_group if saving else self._control_group)
        return out

    def rank0_broadcast(self, call: Callable[[], T]) -> T:
        """What `call` returns on rank 0; the others wait, and fail with it where it fails."""
        if self.size == 1:
            return call()
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = call()
            except SparoError as error:
                box[1] = error
            except Exception as error:  # or the others wait here until this process is gone, and nobody saves
                box[1] = UnexpectedError.of(error)
                box[1].__cause__ = error
        with self.error_context("waiting for rank 0", only_collectives=True):
            # In the patient group: what rank 0 does here may take hours.
            dist.broadcast_object_list(box, src=0, group=self._long_group)
        if box[1] is not None:
            box[1].on_all_ranks, box[1].repeated = True, self.rank > 0
            raise box[1]
        return box[0]

    def close(self) -> None:
        """Leave the process group; nothing that took part in it may be alive any more."""
        if self.size > 1 and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


def _run_token() -> str:
    """Return what tells two runs of one port apart: the step of SLURM that started the ranks, or torchrun's run id."""
    env = os.environ
    if "WORLD_SIZE" in env:
        return f"torchrun {env.get('TORCHELASTIC_RUN_ID', 'none')}"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "job {} step {} restart {}".format(*(env.get(name, "0") for name in names))


# gloo raises plain RuntimeErrors, which begin with the place in its source, and has one message without.
_GLOO = re.compile(r"\[[^\]]*/gloo/[^\]]*\]|Application timeout caused pair closure")


def _is_collective(error: BaseException) -> bool:
    """Whether this is a collective's own error: by type where there is one, never by a word that other errors use, too."""
    return isinstance(error, dist.DistError) or _GLOO.match(str(error)) is not None


def _rendezvous_of_slurm() -> None:
    """MASTER_ADDR and MASTER_PORT where srun started us without them: the step's first node, a port from the job's id."""
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1")
        try:
            if any(c in nodes for c in ",["):
                nodes = _scontrol("hostnames", nodes).split()[0]
            os.environ["MASTER_ADDR"] = _address(nodes)
        except (OSError, subprocess.CalledProcessError, IndexError):
            raise ConfigError(
                f"MASTER_ADDR: is not set, and scontrol cannot resolve the first of {nodes}. Export it."
            ) from None
    # Below the ports that the kernel hands out; steps of one allocation meet at ports of their own.
    job, step = (whole_number(os.environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    os.environ.setdefault("MASTER_PORT", str(20000 + (job + 367 * step) % 12000))
    _refuse_port()


def _refuse_port() -> None:
    """Raise `ConfigError` for a MASTER_PORT that is none."""
    port = whole_number(os.environ, "MASTER_PORT", 1)
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT: expected 1 to 65535, got {port}. Unset it, or start with torchrun or srun.")


def _address(node: str) -> str:
    """A node's name, or its address where only SLURM knows the name."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        addresses = [w for w in _scontrol("node", node, "-o").split() if w.startswith("NodeAddr=")]
        return addresses[0].partition("=")[2] if addresses else node
    return node


def _scontrol(*what: str) -> str:
    return subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, check=True).stdout
