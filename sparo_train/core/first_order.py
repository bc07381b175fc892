"""Hand-written gradients that have no second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse create_graph=True in the `backward` of an autograd function.

    Tensors that a forward saved without a graph are constants to a second differentiation, which would omit their
    share silently. `torch.autograd.function.once_differentiable` does not notice this if the outer gradient is a
    constant, as that of a loss is.

    Raises:
        NotImplementedError: the gradient is to be differentiated again.
    """
    name = backward.__qualname__.split(".")[0].lstrip("_")

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        # The compiler traces backward with gradients enabled.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{name}: expected first derivatives only, got create_graph=True. Its gradient is hand-written and cannot be differentiated again."
            )
        return backward(ctx, *gradients)

    return checked
