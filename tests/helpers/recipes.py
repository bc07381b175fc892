"""Recipes that take seconds on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_recipe(shards: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe that takes a second: two-layer towers on 32-pixel images."""
    tree = {
        "name": "tiny",
        "out": str(out),
        "batch_size": 8,
        "steps": 12,
        "objective": {
            "kind": "clip",
            "model": {
                "vision": {
                    "image_size": 32,
                    "patch_size": 16,
                    "width": 32,
                    "layers": 2,
                    "head_width": 16,
                    "patch_dropout": 0.25,
                },
                "text": {"context_length": 16, "width": 32, "heads": 2, "layers": 2},
                "embed_dim": 16,
                "readout": {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8},
            },
        },
        "data": {
            "sources": {"a": {"shards": str(shards)}},
            "workers": 1,
            "streams": 4,
            "shuffle_window": 16,
            "chunk": 4,
            "hflip": 0.5,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "engine": {"device": "cpu", "precision": "fp32"},
        "checkpoint": {"every_steps": 3},
        # Counting the FLOPs would take a quarter of such a run.
        "log": {"every_steps": 1, "tensorboard": False, "flops": False},
    }
    return {**tree, **changes}


def dino_recipe(shards: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Return the same for DINO+SPARO: two blocks and the readout, on crops of 32 and 16 pixels, with drop path."""
    tree = tiny_recipe(shards, out, name="dino")
    tree["objective"] = {
        "kind": "dino",
        "model": {
            "image_size": 32,
            "patch_size": 8,
            "width": 32,
            "depth": 3,
            "heads": 2,
            "drop_path": 0.2,
            "readout": {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8},
        },
        "head": {"out_dim": 64, "hidden_dim": 32, "bottleneck_dim": 16},
        "crops": {"local_crops_number": 2, "local_size": 16},
        "warmup_teacher_temp": 0.02,
        "warmup_teacher_temp_epochs": 2,
    }
    tree["samples_per_epoch"] = 32
    del tree["data"]["hflip"]
    tree["optim"] = {
        "lr": 1e-3,
        "weight_decay": 0.04,
        "weight_decay_end": 0.4,
        "warmup_steps": 2,
        "warmup_from_zero": True,
        "clip_grad_norm": 0.3,
        "clip_per": "tensor",
    }
    return {**tree, **changes}


def slots_recipe(shards: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Return the same for a slot autoencoder with frames, on 16-pixel images."""
    tree = tiny_recipe(shards, out, name="slots")
    tree["objective"] = {
        "kind": "slots",
        "model": {
            "image_size": 16,
            "encoder": {"channels": [8, 8], "strides": [1, 2], "kernel": 3},
            "features": 16,
            "grouping": {"preset": "isa", "slots": 3, "width": 16, "slot_init": "learned", "mlp_width": 16},
            "frame": {"scales": True, "hidden": 16},
            "decoder": {"kind": "mlp", "hidden": [16, 16]},
        },
    }
    return {**tree, **changes}
