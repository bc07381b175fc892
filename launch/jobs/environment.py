"""The environment that jobs are submitted with: a job launched from inside another one must not inherit its allocation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# An outer job's resources (sbatch reads SLURM_MEM_PER_CPU and others as options), its step, and its ranks.
_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "PMI_", "PMIX_", "ROLE_")
_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
_DEVICES = {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
_KEPT = {"SLURM_CONF"}  # where SLURM's own commands find their cluster


def inherited(name: str, outer: Mapping[str, str]) -> bool:
    """Return whether a variable is an outer job's own, and no setting of the user."""
    if name in _KEPT:
        return False
    return name.startswith(_PREFIXES) or name in _NAMES or ("SLURM_JOB_ID" in outer and name in _DEVICES)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and unset those of an outer job, for what is submitted inside."""
    before = dict(os.environ)
    for name in before:
        if inherited(name, before):
            del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
