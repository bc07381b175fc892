"""What the process that tests fork from has imported: all that a command could import, which would be paid for in each of hundreds."""

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

# What computes while it is imported must not start threads: a forked child would wait for those for ever. Each sets its own number.
torch.set_num_threads(1)
for _name in ("sparo_train", "sparo_data", "evals", "object_centric", "launch"):
    for _module in pkgutil.walk_packages(importlib.import_module(_name).__path__, f"{_name}."):
        if not _module.name.endswith("__main__"):
            with suppress(ImportError):  # of an extra that is not here
                importlib.import_module(_module.name)
# Every collection of a forked process would look through all of it, and copy its pages: half a second each time.
gc.collect()
gc.freeze()
