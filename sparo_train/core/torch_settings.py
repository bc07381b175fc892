"""Settings of torch that a calling program may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .errors import ConfigError


@contextmanager
def standard_settings() -> Iterator[None]:
    """Keep settings of the calling program from changing a model: use fp32 as the default dtype, and enable gradients.

    Afterwards, the settings and the state of torch's random generator on the CPU are the caller's again.

    Raises:
        ConfigError: torch's default device is not the CPU.
    """
    if (device := torch.get_default_device().type) != "cpu":
        raise ConfigError(
            f"torch's default device: expected cpu, got {device}. Choose the device with engine.device in a recipe or "
            "with EvalOptions(device=…), instead of torch.set_default_device or `with torch.device`."
        )
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(dtype)
