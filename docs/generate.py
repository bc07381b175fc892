"""Write the generated pages of the documentation: command line, recipe keys, Python API, paper index, colours.

    python docs/generate.py

A test fails if a page is out of date.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

import sparo
from launch.commands.key_tables import TABLES, own_keys
from launch.jobs.clusters import ClusterConfig
from launch.jobs.sbatch_options import option_table
from launch.papers.index import Claim, Paper, read_index
from launch.papers.listing import RECORDS
from launch.papers.sweep_record import read_record
from launch.papers.verdict import control_text, decide, test_text
from launch.views.html import STYLE_FILES
from sparo_train.core.recipe.config_keys import Key, default_text, type_text
from sparo_train.core.registries import (
    ENGINES,
    LOSSES,
    METHODS,
    OPTIMIZERS,
    READOUTS,
    SLOT_ENCODERS,
    SOURCES,
    TASKS,
    TEACHERS,
)
from sparo_train.core.registry import Registry
from sparo_train.train.run_config import RunConfig

DOCS = Path(__file__).parent
_KEYS_INDEX = """# Recipe keys

A recipe is a YAML file. `extends: FILE` inherits another recipe; the file's own keys are merged into it. `null` removes
an entry of `data.sources` or `eval.tasks`. Overrides on the command line:

| override | effect |
|---|---|
| `optim.lr=1e-3` | sets a key to a YAML value |
| `data.sources='{mine: {shards: data/mine}}'` | replaces a whole mapping |
| `+data.sources.mine.shards=data/mine` | adds an entry to those of the recipe |
| `eval.tasks.vendor=null` | removes an entry |

`sparo config KEY` prints the description of a key with an example. `sparo train RECIPE --print` prints the resolved
recipe with the origin of each value. Keys marked "required" have no default.

The keys of methods, readouts, optimizers, engines, sources and tasks depend on `kind` (of tasks: `task`):

| block | values of `kind` or `task` |
|---|---|
{index}

Files in `configs/clusters/` have [their own keys](clusters.md).

## Keys of every recipe

{table}
"""
# file, title, registries
_PAGES: tuple[tuple[str, str, tuple[Registry, ...]], ...] = (
    ("readouts", "Readouts", (READOUTS,)),
    ("training", "Losses, optimizers, engines, sources", (LOSSES, OPTIMIZERS, ENGINES, SOURCES)),
    ("slot_encoders", "Image encoders of slot models", (SLOT_ENCODERS,)),
    ("teachers", "Teachers of distillation", (TEACHERS,)),
    ("tasks", "Evaluation tasks", (TASKS,)),
)
_HEADINGS = {registry: (heading, place) for registry, heading, place in TABLES}


class KeyPages:
    """Pages of recipe keys. A key that several entries inherit from one class is listed once, and named afterwards."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, type], str] = {}  # key and declaring class -> anchor of its table

    def pages(self) -> dict[str, str]:
        pages = {"index": self._index()}
        for name in METHODS.builtin:
            body = self._entry(METHODS, name, f"{name}.md", 2)
            pages[name] = f"# Method `{name}`\n\nKeys of `objective` for `objective.kind: {name}`.\n\n{body}"
        for file, title, registries in _PAGES:
            parts = [f"# {title}"]
            for registry in registries:
                heading, place = _HEADINGS[registry]
                if len(registries) > 1:
                    parts.append(f"## {heading}")
                parts.append(f"The block `{place}`. Its key `{_kind(registry)}` names an entry of `{registry.group}`.")
                for name in registry.builtin:
                    level = 3 if len(registries) > 1 else 2
                    parts += [f"{'#' * level} `{name}`", self._entry(registry, name, f"{file}.md", level + 1)]
            pages[file] = "\n\n".join(parts) + "\n"
        pages["clusters"] = (
            "# Keys of clusters\n\nKeys of a file in `configs/clusters/` ([guide](../../guides/clusters.md)). Every key is "
            f"also an option of `sparo launch`: `nodes: 2` is `--nodes 2`.\n\n{_table(list(own_keys(ClusterConfig)))}\n"
        )
        return {f"reference/keys/{name}.md": text for name, text in pages.items()}

    def _index(self) -> str:
        files = {registry: file for file, _, registries in _PAGES for registry in registries}
        rows = []
        for registry, _, place in TABLES:
            names = [
                f"[`{name}`]({name}.md)" if registry is METHODS else f"[`{name}`]({files[registry]}.md#{name})"
                for name in registry.builtin
            ]
            rows.append(f"| `{place}` | {', '.join(names)} |")
        return _KEYS_INDEX.replace("{index}", "\n".join(rows)).replace("{table}", _table(list(own_keys(RunConfig))))

    def _entry(self, registry: Registry, name: str, page: str, level: int) -> str:
        """Return summary, table of the keys that no earlier entry has, and the names of the others."""
        row = registry.get(name)
        model: type[BaseModel] = row if isinstance(row, type) else row.config
        place = _HEADINGS[registry][1]
        keys = [key for key in own_keys(model, f"{place}.") if key.dotted != f"{place}.{_kind(registry)}"]
        new, shared = [], {}
        for key in keys:
            identity = key.dotted, _declaring_class(key)
            if identity in self._first:
                shared.setdefault(self._first[identity], []).append(key.dotted)
            else:
                self._first[identity] = page if registry is METHODS else f"{page}#{name}"
                new.append(key)
        parts = [" ".join((model.__doc__ or "").strip().partition("\n\n")[0].split())]
        parts += [_table(new)] if new else []
        for anchor, names in shared.items():
            label = anchor.partition("#")[2] or anchor.removesuffix(".md")
            link = f"[`{label}`]({anchor.removeprefix(page) if anchor.startswith(f'{page}#') else anchor})"
            parts.append(f"Keys that are described under {link}: {', '.join(f'`{n}`' for n in _blocks(names, keys))}.")
        parts += [_nested(key, chosen) for key in new if (chosen := _registry_of(key)) is not None]
        parts += [] if keys else ["It has no keys."]
        return "\n\n".join(filter(None, parts))


def _registry_of(key: Key) -> Registry | None:
    """Return the registry whose entries a key chooses from, such as the readout of a probe; None for any other key."""
    text = type_text(key.field.annotation, key.field.metadata)
    kinds = text.partition("kind: ")[2].split(" | ") if text.startswith("block; kind:") else []
    return next((registry for registry in _HEADINGS if kinds and kinds == list(registry.builtin)), None)


def _nested(key: Key, registry: Registry) -> str:
    """Name the page with the keys of a block that a registry's entries share."""
    file = next(file for file, _, registries in _PAGES if registry in registries)
    heading = _HEADINGS[registry][0]
    heading = f"{heading[0].lower()}{heading[1:]}"
    return f"`{key.dotted}.*`: the keys of the chosen entry, as on the page of [{heading}]({file}.md)."


def _blocks(names: Sequence[str], keys: Sequence[Key]) -> list[str]:
    """Replace names by `block.*` where all keys of a block are among them."""
    every, rest, blocks = [key.dotted for key in keys], dict.fromkeys(names), []
    for block in sorted({name.rpartition(".")[0] for name in names}, key=lambda block: (block.count("."), block)):
        below = [name for name in every if name.startswith(f"{block}.")]
        if block.count(".") > 0 and below and all(name in rest for name in below):
            blocks.append(f"{block}.*")
            for name in [*below, block]:
                rest.pop(name, None)
    return [*rest, *blocks]


def _declaring_class(key: Key) -> type:
    return next(cls for cls in key.owner.__mro__ if key.name in inspect.get_annotations(cls))


def _kind(registry: Registry) -> str:
    return "task" if registry is TASKS else "kind"


def _table(keys: Sequence[Key]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = default_text(key)
        cells = (
            f"`{key.dotted}`",
            type_text(key.field.annotation, key.field.metadata),
            f"`{default}`" if default not in ("", "required") else default,
            key.field.description or "",
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def command_line() -> str:
    """Return the reference of all commands, which typer writes."""
    words = [sys.executable, "-m", "typer", "launch.cli.main", "utils", "docs", "--name", "sparo"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, cwd=DOCS.parent).stdout
    text = text.replace("# `sparo`", "# Command line", 1)
    # The same two lines for every command, and types that the description states.
    text = re.sub(r"^\* `--help`: Show this message and exit\.\n", "", text, flags=re.MULTILINE)
    text = text.replace("**Options**:\n\n\n", "")
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def python_api() -> str:
    """Return the page of all public names, whose docstrings mkdocstrings renders."""
    parts = [(DOCS / "reference/python_api.head.md").read_text(encoding="utf-8").rstrip()]
    for name in sparo.__all__:
        if name == "__version__":
            continue
        module, _, attribute = sparo._SOURCES[name].partition(":")
        parts.append(f"## `{name}`\n\n::: {module}.{attribute}")
    return "\n\n".join(parts) + "\n"


def papers() -> str:
    """Return the paper index: for every table and figure, commands, recipes, the paper's numbers and ours; and the claims."""
    index = read_index()
    parts = [index.head.strip(), *(part for paper in index.papers for part in _paper(paper)), index.claims_head.strip()]
    return "\n\n".join([*parts, *(part for claim in index.claims for part in _claim(claim))]) + "\n"


def _paper(paper: Paper) -> Iterator[str]:
    yield f"## {paper.title}"
    yield paper.citation
    for item in paper.items:
        yield f"### {item.name}: {item.about}"
        if item.no_command:
            yield f"Nothing to run: {item.no_command}."
        if item.text:
            yield item.text.strip()
        for size, cost, commands in (
            ("The paper's size", item.cost, item.commands),
            ("Smaller", item.small_cost, item.small_commands),
        ):
            if commands:
                yield f"{size}{f' ({cost})' if cost else ''}:"
                yield "\n".join(["```text", *commands, "```"])
        if item.rows:
            head = ["row", "recipe", *(item.columns or ["paper"]), "ours"]
            lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
            for row in item.rows:
                values = [str(value) for value in row.get("paper", [""] * (len(head) - 3))]
                recipe = f"`{row['recipe']}`" if "recipe" in row else row.get("no_recipe", "")
                lines.append(f"| {' | '.join([row['name'], recipe, *values, row.get('ours', 'not run')])} |")
            yield "\n".join(lines)
    if paper.defaults:
        yield f"### Defaults from {paper.short}"
        lines = ["| key | default | sentence of the paper |", "|---|---|---|"]
        lines += [f"| `{d['key']}` | `{d['value']}` | {d['source']} |" for d in paper.defaults]
        yield "\n".join(lines)


def _claim(claim: Claim) -> Iterator[str]:
    """Yield a claim with its tests, and with the verdict if its runs have a record."""
    path = DOCS / RECORDS / f"{claim.sweep}.json"
    verdict = decide(claim, read_record(path)) if path.exists() else None
    outcome = "not run" if verdict is None else f"{verdict.outcome}{f': {verdict.reason}' if verdict.reason else ''}"
    yield f"### Claim {claim.number}: {claim.claim}"
    yield f"Verdict: **{outcome}**. Sweep `{claim.sweep}`, {claim.seeds} seeds; from {', '.join(claim.items)}. {_sentence(claim.why)}"
    if verdict is not None:
        yield "\n".join(f"- {finding.text}" for finding in verdict.findings)
    else:
        yield "\n".join(f"- {test_text(test)}" for test in claim.tests)
    if claim.no_control:
        yield f"Control: none. {_sentence(claim.no_control)}"
    else:
        yield "Control: " + "; ".join(f"{control_text(control)}" for control in claim.controls) + "."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def sbatch_options() -> str:
    """Return the table of sbatch's options."""
    head = (
        "# Options of sbatch\n\nHow `sparo launch` takes each option of sbatch. You can also type the first column, short or "
        "long: options with an equivalent are translated, and the others are refused with the entry of the second column.\n\n"
        "| wanted | how |\n|---|---|\n"
    )
    code = {
        name: f"`{how}`" if how.startswith("--") and "," not in how and " with" not in how else how
        for name, how in option_table().items()
    }
    return head + "".join(f"| `{name}` | {how} |\n" for name, how in code.items())


def generated() -> dict[str, str]:
    """Return the text of every generated page by its path in docs/."""
    return {
        "reference/cli.md": command_line(),
        "reference/python_api.md": python_api(),
        "papers.md": papers(),
        "reference/sbatch_options.md": sbatch_options(),
        "stylesheets/tokens.css": STYLE_FILES[0].read_text(encoding="utf-8"),
        **KeyPages().pages(),
    }


def main() -> None:
    for path, text in generated().items():
        target = DOCS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
