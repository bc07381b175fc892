"""Fixtures for hostile and damaged input, and what a command must end with."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from sparo_data.writer import write_shards
from tests.helpers.processes import start_sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.hostile)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with valid shards and a valid recipe. Tests do not change it."""
    place = tmp_path_factory.mktemp("hostile")
    write_shards(place / "shards", (sample(i) for i in range(48)), 24)
    (place / "good.yaml").write_text(yaml.safe_dump(tiny_recipe(place / "shards", place / "runs", steps=3)))
    return place


def assert_ends(
    arguments: Sequence[str], code: int, says: Sequence[str], cwd: Path | None = None, seconds: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    """Assert that `sparo ARGUMENTS` ends with `code` within `seconds`, and that stderr contains `says`, but no traceback and no control character."""
    process = start_sparo(*arguments, cwd=cwd, **env)
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"no end after {seconds} s: {process.stderr_now()[-2000:]}") from None
    done = subprocess.CompletedProcess(arguments, process.returncode or 0, stdout, stderr)
    words = " ".join((done.stderr + done.stdout).split())
    assert done.returncode == code, f"code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in words, done.stderr[-3000:]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\x9b]", done.stderr + done.stdout), repr(done.stderr[-800:])
    for word in says:
        assert word in words, f"{word!r} is not in: {words[-1500:]}"
    return done
