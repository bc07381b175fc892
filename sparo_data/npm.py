"""Packages from the npm registry, fetched once into a folder."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from sparo_train.core.errors import DataError


def install_packages(folder: Path, packages: Mapping[str, str], where: str) -> Path:
    """Fetch npm packages, name to version, into `folder`; return its node_modules. Nothing is fetched twice.

    Raises:
        DataError: npm is missing or fails; the message begins with `where` and repeats the end of npm's output.
    """
    modules = folder / "node_modules"
    # Check the files, because npm would contact its registry, and the network may be absent the second time.
    if all((modules / name / "package.json").is_file() for name in packages):
        return modules
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{name}@{version}" for name, version in packages.items()]
    options = ["--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "--prefix", str(folder)]
    try:
        process = subprocess.run(
            ["npm", "install", *options, *names], capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{where}: npm took more than ten minutes. Check the connection and run it again.") from None
    except FileNotFoundError:
        raise DataError(f"{where}: npm is not installed. Install Node.js (Debian: apt-get install npm).") from None
    if process.returncode:
        raise DataError(f"{where}: npm failed with code {process.returncode}: {process.stderr.strip()[-500:]}")
    return modules
