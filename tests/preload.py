"""Imports everything that a command could import, in the process that tests fork from, so that hundreds of commands need not do it."""

import gc
import importlib
import pkgutil
from contextlib import suppress

import deepspeed  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import open_clip  # noqa: F401
import scipy.stats  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.utils.tensorboard

import tests.helpers.ranks  # noqa: F401

# Modules that compute during their import must not start threads, for which a forked child would wait forever. Each command sets its number of threads.
torch.set_num_threads(1)
for _name in ("sparo_train", "sparo_data", "evals", "object_centric", "launch"):
    for _module in pkgutil.walk_packages(importlib.import_module(_name).__path__, f"{_name}."):
        if not _module.name.endswith("__main__"):
            with suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(_module.name)
# Otherwise each garbage collection of a forked process would scan all of these objects and copy their pages, which takes half a second.
gc.collect()
gc.freeze()
