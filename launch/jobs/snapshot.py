"""The code that a job runs: a copy in the run folder, so that editing the checkout changes nothing that is queued."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from sparo_train.core.errors import ConfigError
from sparo_train.core.registry import GROUPS, plugin_distributions

PACKAGES = ("sparo", "sparo_train", "sparo_data", "object_centric", "evals", "launch")
_IGNORE_PATTERNS = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


@dataclass(frozen=True)
class Snapshot:
    """A copy of sparo's packages. `commit` is None where they are not from a git checkout."""

    path: Path
    commit: str | None
    changed: bool


def take_snapshot(into: Path) -> Snapshot:
    """Copy the running code to `into/HASH`, once per content, with the checkout's commit and difference beside it.

    Packages that add rows to our tables come along with their entry points: a job finds what this process found.

    Raises:
        ConfigError: the folder cannot be written.
    """
    plugins = plugin_distributions()
    sources = _sources(plugins)
    infos = {f"{d.name.replace('-', '_')}-{d.version}.dist-info": d for d in plugins}
    root = sources["launch"].parent
    commit, diff = _git(root)
    target = into / _hash(sources, plugins)
    try:
        into.mkdir(parents=True, exist_ok=True)
        # By content: a hundred launches of one checkout share a copy.
        if not target.exists():
            # In a folder of its own name: two launches at one moment would write into each other's.
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=into))
            try:
                _copy_code(temporary, sources, infos, root / "configs")
                temporary.chmod(into.stat().st_mode)  # mkdtemp's is for its owner alone
                # Renamed when whole: another launch may be looking for it at this moment.
                temporary.rename(target)
            except OSError:
                if not target.exists():  # the other one was first, and its copy is the same
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        if commit:
            (into / f"{target.name}.commit").write_text(commit + "\n", encoding="utf-8")
            (into / f"{target.name}.diff").write_bytes(diff)
    except OSError as error:
        raise ConfigError(f"{target}: the code cannot be copied there ({error})") from None
    return Snapshot(target.resolve(), commit, bool(diff))


def code_hash() -> str:
    """Return the hash by content of the running code: sparo's packages and those of plug-ins."""
    plugins = plugin_distributions()
    return _hash(_sources(plugins), plugins)


def _sources(plugins: Sequence[Distribution]) -> dict[str, Path]:
    return {name: _package_folder(name) for name in PACKAGES} | _plugin_modules(plugins)


def _copy_code(into: Path, sources: dict[str, Path], infos: dict[str, Distribution], configs: Path) -> None:
    for name, source in sources.items():
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=_IGNORE_PATTERNS)
        else:
            shutil.copy2(source, into / source.name)
    for name, dist in infos.items():
        (into / name).mkdir()
        for part in ("METADATA", "entry_points.txt"):
            (into / name / part).write_text(dist.read_text(part) or "", encoding="utf-8")
    if configs.is_dir():
        shutil.copytree(configs, into / "configs", ignore=_IGNORE_PATTERNS)


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _plugin_modules(plugins: Sequence[Distribution]) -> dict[str, Path]:
    """The top-level packages and modules behind the rows of plug-ins, found without importing them; broken ones are left out."""
    module_paths: dict[str, Path] = {}
    entry_points = [entry for dist in plugins for entry in dist.entry_points if entry.group.startswith(GROUPS)]
    # Of the words alone: what is no `module:attribute` is told to who names it.
    for name in sorted({entry.value.partition(":")[0].partition(".")[0].strip() for entry in entry_points}):
        # Found, not imported: a broken plug-in must not keep others from launching.
        spec = importlib.util.find_spec(name) if name.isidentifier() and name not in PACKAGES else None
        if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
            path = Path(spec.origin)
            module_paths[name] = path.parent if path.name == "__init__.py" else path
        elif spec is not None and spec.submodule_search_locations:  # a package without __init__.py
            module_paths[name] = Path(next(iter(spec.submodule_search_locations)))
    return module_paths


def _hash(sources: dict[str, Path], plugins: Sequence[Distribution]) -> str:
    total = hashlib.sha256("\0".join(plugin.read_text("entry_points.txt") or "" for plugin in plugins).encode())
    for name, source in sources.items():
        files = source.rglob("*") if source.is_dir() else [source]
        for path in sorted(p for p in files if p.is_file() and "__pycache__" not in p.parts):
            total.update(f"{name}/{path.relative_to(source)}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:12]


def _git(root: Path) -> tuple[str | None, bytes]:
    """The commit that `root` is a checkout of, and what differs from it; None outside of one."""

    def ask(*words: str) -> bytes | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
        except OSError:
            return None
        return done.stdout if done.returncode == 0 else None

    top = ask("rev-parse", "--show-toplevel")
    # An environment may lie inside of somebody else's repository, whose commit says nothing of this code.
    if top is None or Path(top.decode().strip()) != root:
        return None, b""
    commit = ask("rev-parse", "HEAD")
    return (commit.decode().strip() if commit else None), ask("diff", "HEAD") or b""
