"""Released files: tensors that are renamed one by one, so that none is forgotten, and options after `?` for facts that the file does not contain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn

from sparo_train.core.config import Frozen, resolve
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.models.weight_files.state_dicts import extract_state, read_raw
from sparo_train.models.weight_files.weights import load_into

Options = TypeVar("Options", bound=Frozen)


class UnspecifiedOptions:
    """Options that a file may leave open: those of its kind, those given by the user, and those that the file determines."""

    def __init__(self, label: str, query: str, user_options: Mapping[str, Any], resolved_options: Frozen):
        self.label, self.query, self.user_options, self.unspecified = (
            label,
            query,
            dict(user_options),
            resolved_options.model_dump(exclude=set(user_options)),
        )

    def set_from_file(self, name: str, value: object) -> None:
        """Set an option that the file determines. Raises `ConfigError` if the user gave another value."""
        # A wrong option would be ignored without the user's knowledge.
        if name in self.user_options and self.user_options[name] != value:
            raise ConfigError(
                f"{self.label}?{name}={self.user_options[name]}: contradicts the file, which has {name}={value}. Remove "
                "the option."
            )
        self.unspecified.pop(name, None)

    def set_inferred(self, name: str, value: object) -> None:
        """Set an option that follows from others if the user did not give it."""
        if name in self.unspecified:
            self.unspecified[name] = value

    def refuse(self, *names: str) -> None:
        """Raise `ConfigError` for given options that have no effect for this file."""
        for name in names:
            if name in self.user_options:
                raise ConfigError(
                    f"{self.label}?{name}={self.user_options[name]}: has no effect for this file. Remove it."
                )
            self.unspecified.pop(name, None)

    def __str__(self) -> str:
        if not self.unspecified:
            return ""
        values = {
            name: str(value).lower() if isinstance(value, bool) else value for name, value in self.unspecified.items()
        }
        assumed = ", ".join(f"{name}={value}" for name, value in values.items())
        # As the user would type it again: with the given options, and the first that is missing.
        example = f"{self.label}?{self.query}{'&' if self.query else ''}{next(iter(values))}=…"
        return f"{self.label}: does not contain {assumed}, so these values are assumed; {example} changes them"


def open_weight_file(scheme: str, text: str, options: type[Options]) -> tuple[Tensors, Options, UnspecifiedOptions]:
    """Return the tensors of `FILE?key=value&…`, the options, and the assumptions made.

    Raises:
        ConfigError: this kind of file does not have an option.
        CheckpointError: the file cannot be read, or contains no tensors.
    """
    file, _, query = text.partition("?")
    label = f"{scheme}:{file}"
    user_options = {key: parse_yaml(value, f"{label}?{key}") for key, value in parse_qsl(query, keep_blank_values=True)}
    state = user_options.pop("state", None)
    resolved_options = resolve(options, user_options, f"{label}?{query}")
    weights = extract_state(read_raw(Path(file)), file, None if state is None else str(state))
    return (
        Tensors(weights, label),
        resolved_options,
        UnspecifiedOptions(label, query, user_options, resolved_options),
    )


class Tensors:
    """Tensors by their names in the file; each is taken under a new name."""

    def __init__(self, tensors: Mapping[str, Tensor], label: str):
        self.tensors, self.label = dict(tensors), label
        self.ours: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.label}: has no {name!r}, got {self._describe_some()}. Check whether the file belongs to another model."
            )
        return self.tensors[name]

    def take(self, theirs: str, ours: str) -> None:
        """Take all tensors of `theirs`, a module or a tensor, as `ours`."""
        names = [n for n in self.tensors if n == theirs or n.startswith(f"{theirs}.")]
        if not names:
            self[theirs]  # raises that it is missing
        for name in names:
            self.ours[ours + name.removeprefix(theirs)] = self.tensors.pop(name)

    def give(self, ours: str, value: Tensor, *theirs: str) -> None:
        """Add a tensor that was computed from the file's."""
        self.ours[ours] = value
        self.drop(*theirs)

    def drop(self, *prefixes: str) -> None:
        """Drop tensors that the model here does not have."""
        self.tensors = {
            n: t for n, t in self.tensors.items() if not any(n == p or n.startswith(f"{p}.") for p in prefixes)
        }

    def count(self, prefix: str) -> int:
        """Count modules `prefix.0`, `prefix.1` and so on."""
        # Count what exists instead of using the largest number, because sequences contain layers without weights.
        numbers = {n.removeprefix(f"{prefix}.").partition(".")[0] for n in self.tensors if n.startswith(f"{prefix}.")}
        return sum(number.isdigit() for number in numbers)

    def into(self, model: nn.Module) -> None:
        """Load them. Raises `CheckpointError` if some are left over, missing, or have other shapes."""
        if self.tensors:
            raise CheckpointError(f"{self.label}: has unknown tensors: {self._describe_some()}")
        load_into(model, self.ours, self.label)

    def square(self, tokens: int, what: str) -> int:
        """Return the side of a square of tokens. Raises `CheckpointError`."""
        side = math.isqrt(tokens)
        if side * side != tokens:
            raise CheckpointError(f"{self.label}: {what} has {tokens} positions, which is not a square number")
        return side

    def _describe_some(self) -> str:
        names = sorted(self.tensors)
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def grouping(t: Tensors, theirs: str, names: Mapping[str, str]) -> None:
    """Take a published slot attention, given the names of its modules and ours."""
    for name, ours in names.items():
        t.take(f"{theirs}.{name}", f"grouping.{ours}")


def read_slot_init(
    t: Tensors, unspecified: UnspecifiedOptions, mean: str, deviation: str, learned: str
) -> dict[str, Any]:
    """Take initial slots, shared or per slot, and set `slot_init`, and `slots` if the file determines their number."""
    if learned in t:
        value = t[learned].reshape(-1, t[learned].shape[-1])
        if t[learned].ndim > 1 and len(value) != t[learned].shape[-2]:
            raise CheckpointError(f"{t.label}: {learned} has a shape that this reader does not support")
        unspecified.set_from_file("slots", len(value))
        t.give("grouping.initial_slots", value.clone(), learned)
        return {"slot_init": "learned", "slots": len(value)}
    # A mean per slot is another initialization, and would be mistaken for a shared one.
    if t[mean].numel() > t[mean].shape[-1]:
        raise CheckpointError(f"{t.label}: {mean} has a shape that this reader does not support")
    for name, ours in ((mean, "mu"), (deviation, "log_sigma")):
        t.give(f"grouping.{ours}", t[name].reshape(-1).clone(), name)
    return {"slot_init": "gaussian"}


def vit(t: Tensors, prefix: str, heads: int | None, final_norm: bool, shrink: float = 1.0) -> dict[str, Any]:
    """Take timm's, DINO's or DINOv2's ViT below `prefix` as `encoder.vit`, and return the recipe block that builds it."""
    # Registers, masks and heads differ between releases, so they are optional.
    for name in ("mask_token", "norm" if not final_norm else "\0", "head"):
        t.drop(f"{prefix}.{name}")
    registers = t[f"{prefix}.reg_token"].shape[1] if f"{prefix}.reg_token" in t else 0
    width, _, patch, _ = t[f"{prefix}.patch_embed.proj.weight"].shape
    places = t[f"{prefix}.pos_embed"].shape[1]
    # A table without the class token's position has a square number of rows.
    without_cls = math.isqrt(places) ** 2 == places
    block = {
        "kind": "vit",
        "width": width,
        "blocks": t.count(f"{prefix}.blocks"),
        "heads": heads or max(width // 64, 1),
        "hidden": t[f"{prefix}.blocks.0.mlp.fc1.weight"].shape[0],
        "patch": patch,
        "pretrain_grid_size": t.square(places if without_cls else places - 1, "pos_embed"),
        "registers": registers,
        "class_pos_embed": not without_cls,
        "layer_scale": f"{prefix}.blocks.0.ls1.gamma" in t,
        "final_norm": final_norm,
        "input_scale": shrink,
    }
    t.take(prefix, "encoder.vit")
    return block


def convert_dinov2_to_timm(t: Tensors, prefix: str, side: int) -> None:
    """Convert DINOv2's own names and positions below `prefix` to timm's, for `side` patches per side.

    Without registers, its code interpolates positions by a factor with an offset of a tenth of a patch; with registers,
    antialiased, and timm's model adds the class token's position to the token.
    """
    pos_embed = t[f"{prefix}.pos_embed"]
    native = t.square(pos_embed.shape[1] - 1, f"{prefix}.pos_embed")
    registers = f"{prefix}.register_tokens" in t
    if native != side:
        grid = pos_embed[:, 1:].unflatten(1, (native, native)).permute(0, 3, 1, 2)
        if registers:
            interpolated = nn.functional.interpolate(grid, size=(side, side), mode="bicubic", antialias=True)
        else:
            factor = (side + 0.1) / native  # its workaround for a rounding error
            interpolated = nn.functional.interpolate(grid, scale_factor=(factor, factor), mode="bicubic")
        pos_embed = torch.cat([pos_embed[:, :1], interpolated.flatten(2).transpose(1, 2)], dim=1)
    if registers:
        t.tensors[f"{prefix}.cls_token"] = t[f"{prefix}.cls_token"] + pos_embed[:, :1]
        t.tensors[f"{prefix}.reg_token"] = t.tensors.pop(f"{prefix}.register_tokens")
        pos_embed = pos_embed[:, 1:]
    t.tensors[f"{prefix}.pos_embed"] = pos_embed
    t.drop(f"{prefix}.mask_token")
