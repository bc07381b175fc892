"""One rank of many, in one process: torch's `fake` process group, and counts of the collectives that the rank starts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparo_train.core.distributed import Ranks
from sparo_train.core.world import World

T = TypeVar("T")


def all_reduce_bucket(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket of DDP's gradients. DDP's own hook needs a result, which works of the fake group do not have."""
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class SingleRank(Ranks):
    """Rank 0 of `world_size`. The other ranks do not exist and agree with everything."""

    def __init__(self, world_size: int):
        self.world, self.rank, self.size, self.timeout = World(0, world_size, 0), 0, world_size, 600.0

    def gather(self, value: T, saving: bool = False) -> list[T]:
        return [value] * self.size

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def rank0_broadcast(self, call: Callable[[], T]) -> T:
        return call()


class CountCollectives(TorchDispatchMode):
    """Counts collectives inside the context.

    Attributes:
        number: calls by the operator's name.
        bytes: bytes of the tensors that each operator writes (its first argument).
    """

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname
            self.number[name] += 1
            tensors = [leaf for leaf in pytree.tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))
