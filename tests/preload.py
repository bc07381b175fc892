"""What the process that tests fork from has imported."""

import deepspeed  # noqa: F401
import open_clip  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.fsdp  # noqa: F401

import launch.cli.main  # noqa: F401
import tests.ranks  # noqa: F401
