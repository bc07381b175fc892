"""Check the documentation against the code: generated pages, the paper index, the page of errors, and names that must be documented."""

import ast
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from docs.generate import KeyPages, generated
from launch.cli.main import app
from launch.jobs.clusters import ClusterConfig
from launch.recipes import find_recipe
from sparo_train.core import errors, registries
from sparo_train.core.recipe.config_keys import list_keys
from sparo_train.core.registry import Registry
from sparo_train.train.run_config import RunConfig
from tests.docs.test_docs import DOCUMENTS, ROOT

PRODUCT = ("sparo", "sparo_train", "sparo_data", "evals", "object_centric", "launch")


def test_generated_pages_are_up_to_date():
    """Check that `python docs/generate.py` writes the committed pages."""
    for path, text in generated().items():
        assert (ROOT / "docs" / path).read_text(encoding="utf-8") == text, path


def commands_of(text):
    """Yield the lines of code blocks that begin with `sparo`."""
    for block in re.findall(r"```(?:bash|text)?\n(.*?)```", text, re.DOTALL):
        yield from (line for line in block.splitlines() if re.match(r"(torchrun .* )?sparo ", line))


def test_every_printed_command_exists_with_its_options():
    root = typer.main.get_command(app)
    for page in DOCUMENTS:
        for line in commands_of(page.read_text(encoding="utf-8")):
            for part in line.split(" && "):
                words = shlex.split(part)
                if words[0] == "sparo":
                    check_command(root, words[1:], f"{page.name}: {part}")


def check_command(command, words, where):
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands") and "score" in command.commands:
        command = command.commands["score"]
    assert not hasattr(command, "commands") or not words or words[0].startswith("-"), where
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    if " launch " in where:
        known |= {f"--{name.replace('_', '-')}" for name in ClusterConfig.model_fields}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, where
    if command.name == "train" and words and "RECIPE" not in words[0] and not words[0].startswith("runs/"):
        path = ROOT / words[0] if words[0].endswith(".yaml") else find_recipe(Path(words[0]))
        assert path.is_file(), where


def test_options_of_commands_are_described():
    def walk(command, name):
        for param in command.params:
            if param.param_type_name == "option" and not command.hidden:
                assert param.help, f"{name} {param.opts[0]}"
        for child, sub in getattr(command, "commands", {}).items():
            walk(sub, f"{name} {child}")

    walk(typer.main.get_command(app), "sparo")


def test_every_key_of_a_recipe_is_on_a_page():
    pages = "\n".join(KeyPages().pages().values())
    listed = set(re.findall(r"`([\w.\[\]<>*]+)`", pages))
    for key in list_keys(RunConfig):
        blocks = [".".join(key.dotted.split(".")[:n]) + ".*" for n in range(1, key.dotted.count(".") + 1)]
        assert key.dotted in listed or key.dotted.startswith("eval.job.tasks.") or listed & set(blocks), key.dotted


def test_registries_and_exit_codes_are_documented():
    extending = (ROOT / "docs/guides/extending.md").read_text(encoding="utf-8")
    groups = {value.group for value in vars(registries).values() if isinstance(value, Registry)}
    assert {group for group in groups if group not in extending} == set()
    codes = {
        error.exit_code
        for error in vars(errors).values()
        if inspect.isclass(error) and issubclass(error, errors.SparoError)
    }
    page = (ROOT / "docs/reference/exit_codes.md").read_text(encoding="utf-8")
    assert {code for code in codes if f"| {code} |" not in page} == set()


def test_the_page_of_errors_quotes_real_messages():
    texts = []
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(v.value if isinstance(v, ast.Constant) else "1" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    product = "\n".join(texts)
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 20 and [words for words in quoted if words not in product] == []


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mkdocs") is None, reason="needs the extra docs; .ci/run has it")
def test_the_site_builds(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    index = (tmp_path / "search/search_index.json").read_text(encoding="utf-8").lower()
    assert all(word in index for word in ("resume", "slots", "s3", "out of memory"))
