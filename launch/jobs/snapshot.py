"""Snapshot of the code in the run folder, so that editing the checkout does not affect queued jobs."""

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
    """A copy of sparo's packages. `commit` is None if they are not from a git checkout."""

    path: Path
    commit: str | None
    changed: bool


def take_snapshot(into: Path) -> Snapshot:
    """Copy the running code to `into/HASH`, once per content, with the checkout's commit and diff.

    Packages that add registry entries are copied with their entry points, so that a job finds the same plug-ins as this
    process.

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
        # Named by content, so that a hundred launches of one checkout share a copy.
        if not target.exists():
            # In a uniquely named folder, because two simultaneous launches would write to each other's.
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=into))
            try:
                _copy_code(temporary, sources, infos, root / "configs")
                temporary.chmod(into.stat().st_mode)  # mkdtemp's folder is only for its owner
                # Renamed when complete, because another launch may be looking for it now.
                temporary.rename(target)
            except OSError:
                if not target.exists():  # the other launch was first, and its copy is equal
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        if commit:
            (into / f"{target.name}.commit").write_text(commit + "\n", encoding="utf-8")
            (into / f"{target.name}.diff").write_bytes(diff)
    except OSError as error:
        raise ConfigError(
            f"{target}: the code cannot be copied to this folder ({error}). Free disk space, or set another folder with out=."
        ) from None
    return Snapshot(target.resolve(), commit, bool(diff))


def code_hash() -> str:
    """Return a hash of the content of the running code: sparo's packages and those of plug-ins."""
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
    """Return the top-level packages and modules of plug-ins' entries, found without importing them; broken ones are skipped."""
    module_paths: dict[str, Path] = {}
    entry_points = [entry for dist in plugins for entry in dist.entry_points if entry.group.startswith(GROUPS)]
    # Only from the names; values that are not `module:attribute` are reported when they are used.
    for name in sorted({entry.value.partition(":")[0].partition(".")[0].strip() for entry in entry_points}):
        # Find without importing, because a broken plug-in must not prevent other launches.
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
    """Return the commit that `root` is a checkout of, and the diff to it; None outside a checkout."""

    def ask(*words: str) -> bytes | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
        except OSError:
            return None
        return done.stdout if done.returncode == 0 else None

    top = ask("rev-parse", "--show-toplevel")
    # An environment may be inside another repository, whose commit does not describe this code.
    if top is None or Path(top.decode().strip()) != root.resolve():
        return None, b""
    commit = ask("rev-parse", "HEAD")
    return (commit.decode().strip() if commit else None), ask("diff", "HEAD") or b""
