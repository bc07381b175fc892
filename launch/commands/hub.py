"""`sparo export --hub`: upload an export, its card and its checksums as one commit to the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

from evals.interop.export_files import SUMS, card_path, listed_files
from sparo_train.core.errors import ConfigError, SparoError

_REMEDY = "Log in with `hf auth login`, or set HF_TOKEN to a token with write access"


def upload(export: Path, repo: str, private: bool) -> str:
    """Commit the files of `export_run`, creating the repository if necessary. Return the address.

    Args:
        export: the folder or file.
        repo: OWNER/NAME.
        private: create a private repository.

    Raises:
        ConfigError: not the name of a repository.
        SparoError: the hub refused it, or could not be reached.
    """
    owner, slash, name = repo.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise ConfigError(f"--hub {repo}: expected OWNER/NAME, as in your-name/{export.parent.name}.")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))  # the library itself reads it once, on import
    files = _contents(export, repo)
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
        api.create_commit(repo, operations, commit_message=f"Upload {export.name} with sparo")
    except Exception as error:  # errors of the library, of its HTTP client, or of the system, with their own messages
        first = (str(error).splitlines() or [""])[0][:300]
        remedy = _REMEDY if hasattr(error, "response") else "Check the connection and HF_ENDPOINT"
        raise SparoError(
            f"--hub {repo}: {type(error).__name__}: {first}. {remedy}. The export is in {export}."
        ) from error
    return str(made)


def _contents(export: Path, repo: str) -> dict[str, Path | bytes]:
    """Return the files to upload and their targets; the card loads the model from its future address."""
    if export.is_dir():
        card = card_path(export).read_text(encoding="utf-8")
        # Only files in the checksums, because a run's folder may contain others.
        files: dict[str, Path | bytes] = {name: export / name for name in sorted([*listed_files(export), SUMS])}
        return {**files, "README.md": card.replace(f"local-dir:{export.as_posix()}", f"hf-hub:{repo}").encode()}
    card = card_path(export).read_text(encoding="utf-8").replace(export.as_posix(), export.name)
    sums = export.with_name(f"{export.name}.sha256")
    return {export.name: export, sums.name: sums, "README.md": card.encode()}
