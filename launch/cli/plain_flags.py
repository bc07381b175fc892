"""Help texts without a type next to flags, because flags take no value; typer prints `<bool>`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """Command whose help shows no type next to flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """Group of commands whose help shows no type next to flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def hide_types_of_flags(app: typer.Typer) -> None:
    """Use these classes for an app, its commands and its groups; a group with a class derived from `Group` keeps it."""
    app.info.cls = app.info.cls if isinstance(app.info.cls, type) else Group
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            hide_types_of_flags(group.typer_instance)
