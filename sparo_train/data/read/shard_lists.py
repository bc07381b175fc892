"""Which tars a `shards` value means: folders, globs, brace ranges and fsspec URLs."""

from __future__ import annotations

import re
from pathlib import Path

from webdataset.shardlists import expand_urls

from ...core.errors import ConfigError, did_you_mean
from .data_commands import remedy
from .remote import filesystem_of

_MAX_SHARDS = 1_000_000  # shards of one pattern; LAION-5B has 230,000


def find_shards(pattern: str | tuple[str, ...], key: str = "shards") -> list[str]:
    """Expand a `shards` value to a sorted list of paths and URLs.

    Raises:
        ConfigError: a `pipe:` command, or a pattern that matches nothing; `key` is named.
    """
    shard_urls: list[str] = []
    for part in (pattern,) if isinstance(pattern, str) else pattern:
        if part.startswith("pipe:"):
            raise ConfigError(
                f"{key}: {part!r} runs a shell command and cannot be read by position; use an fsspec URL (s3://, gs://, https://)"
            )
        if part.startswith("data:"):
            raise ConfigError(
                f"{key}: {part[:40]!r} is a document, not a shard. Name a folder, a glob, a brace range or a URL."
            )
        if _count(part) > _MAX_SHARDS:
            raise ConfigError(f"{key}: {part!r} means over {_MAX_SHARDS} shards; is a brace range too long?")
        try:
            # A folder that is there is meant itself, whatever braces its name has.
            urls = [part] if "://" not in part and Path(part).exists() else expand_urls(part)
        except ValueError:  # braceexpand's
            raise ConfigError(f"{key}: {part!r} has a brace without its partner; write {{00000..00331}}") from None
        for url in urls:
            shard_urls += _expand(url, key)
    if not shard_urls:
        raise ConfigError(f"{key}: an empty list; name at least one folder, glob, brace range or URL")
    return list(dict.fromkeys(shard_urls))


def _count(pattern: str) -> int:
    """At most how many names a pattern's braces make, without making them."""
    total = 1
    for inner in re.findall(r"\{([^{}]*)\}", pattern):
        ends = re.fullmatch(r"(\d+)\.\.(\d+)(?:\.\.\d+)?", inner)
        # Longer numbers than fit into one would take for ever to be counted.
        if ends and max(map(len, ends.groups())) > 18:
            return _MAX_SHARDS + 1
        total *= abs(int(ends[2]) - int(ends[1])) + 1 if ends else 1 + inner.count(",")
    # fsspec chains several addresses with `::`, each with braces of its own.
    return total * (1 + pattern.count("::"))


def _expand(url: str, key: str) -> list[str]:
    filesystem, path = filesystem_of(url)
    protocol = url.split("://", 1)[0] + "://" if "://" in url else ""
    if protocol in ("http://", "https://") and path.endswith(".tar") and not any(c in path for c in "*?["):
        return [
            url
        ]  # fsspec takes a web server's every error for a file that is not there; opening it says which it is
    if any(c in path for c in "*?[") and not filesystem.exists(path):
        hits = sorted(filesystem.glob(path))
    elif filesystem.isdir(path):
        # Listed, not globbed: the folder's own name may hold what patterns are made of.
        hits = sorted(hit for hit in filesystem.ls(path, detail=False) if str(hit).endswith(".tar"))
    elif filesystem.exists(path):
        return [url]
    else:
        hits = []
    if not hits:
        raise ConfigError(f"{key}: {url!r} matches no shard; {_nearest(url)}")
    return [protocol + str(hit) if protocol else _keep_relative(url, str(hit)) for hit in hits]


def _keep_relative(url: str, hit: str) -> str:
    """fsspec answers with absolute paths; keep relative ones relative, so that a run folder can move with its data."""
    if Path(url).is_absolute():
        return hit
    try:
        return str(Path(hit).relative_to(Path.cwd()))
    except ValueError:
        return hit


def _nearest(url: str) -> str:
    folder = Path(url).parent
    if below := sorted({str(tar.parent) for tar in Path(url).glob("*/*.tar")}):
        return f"its shards are in {' and '.join(below[:4])}"
    if made := remedy(url):
        return made.removeprefix("; ")
    if Path(url).is_dir():
        return f"the folder has no .tar files; `sparo data convert {url} OUT` writes shards of its images"
    if "://" in url or not folder.is_dir():
        return f"{folder} is no folder" if "://" not in url else "check the address and your credentials"
    return did_you_mean(Path(url).name, [p.name for p in folder.iterdir() if p.is_dir() or p.suffix == ".tar"][:200])
