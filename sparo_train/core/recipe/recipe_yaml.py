"""YAML for recipes: the safe loader with YAML 1.2 numbers, no ambiguous syntax, and size limits."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from ..errors import ConfigError

_MAX_CHARACTERS = 1 << 20
_MAX_NODES = (
    100_000  # values, with each alias counted where it is used: nine lines of nine aliases each give 3e8 values
)


class _Loader(yaml.SafeLoader):
    """Loader with corrections: PyYAML reads `5e-4` as a string, `24:00:00` as 86400, and keeps the last of two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_nodes: dict[tuple[str, Any], yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                # Check the written keys, because PyYAML silently keeps the last of two.
                first = first_nodes.setdefault((key.tag, key.value), key)
                if first is not key:
                    raise yaml.constructor.ConstructorError(
                        f"key {key.value!r} is given here",
                        first.start_mark,
                        "and again here. Keep one.",
                        key.start_mark,
                    )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: resolvers
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    # dates stay strings, and so do times such as `24:00:00`
    if (resolvers := [(tag, form) for tag, form in forms if tag.rpartition(":")[2] in ("null", "bool", "merge")])
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?(?:0|[1-9][\d_]*)|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)  # fmt: skip


def parse_yaml(text: str, origin: str) -> Any:
    """Parse one YAML document.

    Raises:
        ConfigError: names `origin` and the line: invalid YAML, a duplicate key, a cycle, a tag that builds objects, a
            value that does not match its tag, or more characters or nodes than a recipe can have.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"{origin}: has {len(text)} characters, more than {_MAX_CHARACTERS}. Is it a recipe?")
    loader = None
    try:
        loader = _Loader(text)  # pyright: ignore[reportArgumentType]
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_nodes(node, {}, ()) > _MAX_NODES:
            raise ConfigError(
                f"{origin}: its aliases (*name) expand to more than {_MAX_NODES} values. Write the values out."
            )
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply for a recipe") from None
    except _CircleError as error:
        raise ConfigError(
            f"{origin}: line {error}: this value refers to itself through an alias (*name). Write the value out."
        ) from None
    except (
        ValueError,
        TypeError,
        OverflowError,
        AttributeError,
        KeyError,
    ) as error:  # from SafeLoader, for a tag that does not fit
        raise ConfigError(f"{origin}: a value is not valid for its YAML tag or notation ({error})") from None
    finally:
        if loader is not None:
            loader.dispose()


class _CircleError(Exception):
    """Raised for a node that contains itself; the message is its line."""


def _count_nodes(node: yaml.Node, counts: dict[int, int], above: tuple[int, ...]) -> int:
    """Count the values below a node, with each alias counted where it is used."""
    if id(node) in above:
        raise _CircleError(node.start_mark.line + 1)
    if id(node) not in counts:
        here = (*above, id(node))
        below = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        inner = 0 if isinstance(node, yaml.ScalarNode) else sum(_count_nodes(part, counts, here) for part in below)
        counts[id(node)] = 1 + inner
    return counts[id(node)]
