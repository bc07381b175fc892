"""Paths and URLs through fsspec, and the tars of a `shards` value: folders, globs, brace ranges and URLs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import fsspec
from fsspec.config import apply_config
from webdataset.shardlists import expand_urls

from ...core.errors import ConfigError, DataError, SparoError, did_you_mean

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PAUSES = (1.0, 4.0, 15.0)  # seconds between tries
_CONNECT, _SILENCE = 20.0, 30.0  # seconds for connecting, and between two packets of an answer
_WHOLE = 600.0  # seconds for one answer of a few megabytes, which a server that sends byte by byte never completes
# Splits in the names of files: cc3m-train-0000.tar, test-00000-of-00001.parquet, val_001.tar.
_SPLIT = re.compile(r"(?:^|[-_.])(train|training|test|validation|valid|val|dev)(?:[-_.]|(?=\d))")
_SPLIT_NAMES = {"training": "train", "valid": "validation", "val": "validation"}
# Names of parameters that give access to a file.
_SECRET = re.compile(
    r"x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|(?:access_)?token|api_?key|key|auth|password",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(\w+://)(?:[^/@\s'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?")
_NETRC = "Write `machine {host} login NAME password WORD` into ~/.netrc."
_CREDENTIALS = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.", "gs": "Set GOOGLE_APPLICATION_CREDENTIALS.",
    "az": "Set AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING.", "http": _NETRC, "https": _NETRC,
    "": "Write it into the configuration of fsspec (~/.config/fsspec/conf.json).",
}  # fmt: skip
_CREDENTIALS |= {
    alias: _CREDENTIALS[name] for alias, name in (("s3a", "s3"), ("gcs", "gs"), ("abfs", "az"), ("abfss", "az"))
}
_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure", "http": "http", "https": "http",
}  # fmt: skip


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path in it. Raises `DataError` if the protocol cannot be used."""
    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url, **_limits(protocol))
    except (ImportError, AttributeError) as error:  # fsspec lists classes that its own modules lack
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install -e '.[{extra}]' in sparo's checkout" if extra else str(error)
        raise DataError(f"{url}: {protocol}:// needs a package that is not installed. {remedy}") from None
    except (OSError, TypeError) as error:  # a protocol that needs a host or a file: `zip://`, `sftp://`
        raise DataError(f"{url}: cannot be opened ({error})") from None
    except ValueError:
        hint = did_you_mean(protocol, fsspec.available_protocols())
        raise DataError(f"{url}: {protocol}:// is not a protocol of fsspec; {hint}") from None


def _limits(protocol: str) -> dict[str, Any]:
    """Return time limits for a server: by default, aiohttp waits five minutes for a header and forever for a body.

    Those that the user's configuration of fsspec has are kept, because fsspec replaces whole dictionaries.
    """
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout  # from the extra `http`; the caller reports its absence

        timeout = ClientTimeout(total=_WHOLE, sock_connect=_CONNECT, sock_read=_SILENCE)
        # With ~/.netrc and the variables of proxies.
        return {"client_kwargs": {"timeout": timeout, "trust_env": True, **_configured(protocol, "client_kwargs")}}
    if protocol in ("s3", "s3a"):
        limits = {"connect_timeout": _CONNECT, "read_timeout": _SILENCE}
        return {"config_kwargs": {**limits, **_configured(protocol, "config_kwargs")}}
    return {}


def _configured(protocol: str, name: str) -> dict[str, Any]:
    """Return a dictionary of arguments from the user's configuration of fsspec, such as ~/.config/fsspec/conf.json."""
    return dict(apply_config(fsspec.get_filesystem_class(protocol), {}).get(name, {}))


def refuse_credentials(*values: object) -> None:
    """Raise `ValueError` for an address with a password or a signature, which run folders and logs would contain.

    Args:
        values: values of a recipe; addresses are strings, or in tuples.
    """
    texts = [text for value in values for text in (value if isinstance(value, tuple) else (value,))]
    for address in (part for text in texts if isinstance(text, str) for part in text.split("::") if "://" in part):
        try:
            parts = urlsplit(address)
            host = parts.hostname or ""
        except ValueError:  # brackets that are no IPv6 address, as in a glob
            continue
        is_web = parts.scheme in ("http", "https")
        if parts.password is not None or (is_web and parts.username is not None):
            what, remedy = "a password", _CREDENTIALS.get(parts.scheme, _CREDENTIALS[""]).format(host=host)
        elif any(_SECRET.fullmatch(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
            what, remedy = "a signature", _CREDENTIALS.get(parts.scheme, "") if not is_web else "Download the files."
        else:
            continue
        raise ValueError(
            f"the address of {parts.scheme}://{host} contains {what}, which would be stored in run folders and logs. Remove it. {remedy}"
        )


def without_credentials(text: str) -> str:
    """Return a text for messages in which addresses have no user, password and parameters."""
    return _ADDRESS.sub(r"\1\2", text)


def with_retries(url: str, work: Callable[[], T]) -> T:
    """Return `work()`, retried with growing pauses if `url` is on a server and the error may be temporary.

    Raises:
        DataError: all tries failed, or the error is permanent.
    """
    pauses = iter(_PAUSES if "://" in url else ())
    tries = 0
    while True:
        try:
            tries += 1
            return work()
        except SparoError:
            raise
        except Exception as error:  # protocols come from other libraries, with their own errors
            pause = None if _is_final(error) else next(pauses, None)
            if pause is None:
                counted = f" in {tries} tries" if tries > 1 else ""
                raise DataError(f"{url}: cannot be read{counted} ({_words(error)}). {_remedy(url, error)}") from None
        time.sleep(pause)


def get_file_size(url: str) -> int:
    """Return the size of a file in bytes. Raises `DataError`."""
    return file_info(url)["size"]


def file_info(url: str) -> dict[str, Any]:
    """Return what fsspec reports about a file, its size at least. Raises `DataError`."""
    filesystem, path = open_filesystem(url)
    info = with_retries(url, lambda: filesystem.info(path))
    if info["size"] is None:
        raise DataError(
            f"{url}: random access needs the size of this file, but the server does not report it. Copy the file to a disk."
        )
    return info


# What disks and servers report about the version of a file: fsspec keeps each protocol's own name.
_STAMPS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "updated")


def version_stamp(info: Mapping[str, Any]) -> str:
    """Return a text that differs for another version of a file; empty if the server reports neither a time nor an ETag."""
    return next((str(info[name]) for name in _STAMPS if info.get(name)), "")


def _is_final(error: Exception) -> bool:
    status = getattr(error, "status", None)  # aiohttp's
    if isinstance(status, int) and 400 <= status < 500:
        return status not in (408, 429)
    if "Credential" in type(error).__name__:  # of botocore, google-auth and others
        return True
    return isinstance(error, FileNotFoundError | PermissionError | ValueError | TypeError | NotImplementedError)


def _words(error: Exception) -> str:
    first = without_credentials((str(error).splitlines() or [""])[0])[:200]
    return first or type(error).__name__


def _remedy(url: str, error: Exception) -> str:
    if "://" not in url:
        return "Check the disk and the permissions, then run the same command again."
    if isinstance(error, ValueError | NotImplementedError):
        return "Shards are read by position, which needs a server with byte ranges; copy the shard to a disk or to another server."
    if "Credential" in type(error).__name__:
        return "Set the credentials of this storage in the environment, as in AWS_PROFILE or AWS_ACCESS_KEY_ID."
    return "Check the address, the server and the network, then run the same command again."


# Folders below data/ that a command fills by default. Recipes for published data use other folders, so that a hint
# never names a command that creates another data set.
_COMMANDS = {
    "emoji": "sparo data emoji",
    "scenes": "sparo data scenes",
    "fashion_mnist": "sparo data fashion-mnist",
    "tetrominoes": "sparo data tetrominoes",
    "clevr": "sparo data objects clevr",
    "clevr3": "sparo data objects clevr data/clevr3 --max-objects 3 --size 32 --antialias 2 --train 30000",
    "clevr3_64": "sparo data objects clevr data/clevr3_64 --max-objects 3 --size 64 --train 50000",
    "clevrtex": "sparo data objects clevrtex",
    "rooms": "sparo data objects rooms",
    "movi_small": "sparo data movi-like",
    **{f"movi_{kind}": f"sparo data movi-like --kind {kind}" for kind in "abcde"},
    "scenes3d_small": "sparo data scenes3d",
    **{f"scenes3d_{kind}": f"sparo data scenes3d --kind {kind}" for kind in ("simple", "nature_ego")},
    "mine": "sparo data convert photos.csv data/mine --test 200",
}


def remedy(place: str | Path) -> str:
    """Return `; COMMAND makes it` for a relative path data/NAME/… that a command fills, otherwise an empty string."""
    folder, *below = Path(place).parts or ("",)
    command = _COMMANDS.get(below[0]) if folder == "data" and below else None
    return f"; `{command}` makes it" if command else ""


_MAX_SHARDS = 1_000_000  # limit on shards of one pattern; LAION-5B has 230,000


def find_shards(pattern: str | tuple[str, ...], key: str = "shards", suffix: str = ".tar") -> list[str]:
    """Expand a folder, glob, brace range or URL, or a list of these, to a list of paths and URLs of files, sorted by folder.

    Args:
        pattern: the value.
        key: its dotted key, for errors.
        suffix: of the files that are used of a folder.

    Raises:
        ConfigError: a `pipe:` command, or a pattern without a match; names `key`.
    """
    shard_urls: list[str] = []
    for part in (pattern,) if isinstance(pattern, str) else pattern:
        try:
            refuse_credentials(part)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        # An existing folder is used literally, even with braces in its name.
        for url in [part] if "://" not in part and Path(part).exists() else expand_braces(part, key):
            shard_urls += _expand(url, key, suffix)
    if not shard_urls:
        raise ConfigError(f"{key}: an empty list. Name at least one folder, glob, brace range or URL.")
    return list(dict.fromkeys(shard_urls))


def refuse_several_splits(place: str | tuple[str, ...], urls: Sequence[str], key: str, suffix: str = ".tar") -> None:
    """Raise `ConfigError` if a folder's files are named like several splits: training on all of them would include test samples.

    Args:
        place: the value of `key`; only a folder is checked, because lists and globs are chosen by the user.
        urls: files of the folder.
        key: dotted key, for errors.
        suffix: of the files.
    """
    if not isinstance(place, str) or place.endswith(suffix) or any(c in place for c in "*?[{"):
        return
    first_by_split: dict[str, str] = {}
    for url in urls:
        name = url.rpartition("/")[2]
        if match := _SPLIT.search(name):
            first_by_split.setdefault(_SPLIT_NAMES.get(match[1], match[1]), name[: match.end()])
    if len(first_by_split) > 1:
        prefix = first_by_split.get("train", min(first_by_split.values()))
        raise ConfigError(
            f"{key}: {place} contains the splits {', '.join(sorted(first_by_split))}. Name the files of one split, as in "
            f"{place.rstrip('/')}/{prefix}*{suffix}, or the files of all splits, as in {place.rstrip('/')}/*{suffix}."
        )


def expand_braces(pattern: str, key: str) -> list[str]:
    """Expand brace ranges, and lists with `::`, without looking for files. Raises `ConfigError` that names `key`."""
    if pattern.startswith("pipe:"):
        raise ConfigError(
            f"{key}: {pattern!r} runs a shell command, whose output does not support random access. Use an fsspec URL (s3://, gs://, https://)."
        )
    if pattern.startswith("data:"):
        raise ConfigError(
            f"{key}: {pattern[:40]!r} is a data: URL, not a shard. Name a folder, a glob, a brace range or a URL."
        )
    if _count(pattern) > _MAX_SHARDS:
        raise ConfigError(f"{key}: {pattern!r} expands to more than {_MAX_SHARDS} shards. Is a brace range too long?")
    try:
        return expand_urls(pattern)
    except ValueError:  # braceexpand's
        raise ConfigError(f"{key}: {pattern!r} has an unmatched brace. Write a range as in {{00000..00331}}.") from None


def _count(pattern: str) -> int:
    """Return an upper bound on the number of names that a pattern's braces make, without making them."""
    total = 1
    for inner in re.findall(r"\{([^{}]*)\}", pattern):
        ends = re.fullmatch(r"(\d+)\.\.(\d+)(?:\.\.\d+)?", inner)
        # Counting longer numbers than these would take forever.
        if ends and max(map(len, ends.groups())) > 18:
            return _MAX_SHARDS + 1
        total *= abs(int(ends[2]) - int(ends[1])) + 1 if ends else 1 + inner.count(",")
    # fsspec chains addresses with `::`, each with its own braces.
    return total * (1 + pattern.count("::"))


def _expand(url: str, key: str, suffix: str) -> list[str]:
    filesystem, path = open_filesystem(url)
    protocol = url.split("://", 1)[0] + "://" if "://" in url else ""
    if protocol in ("http://", "https://") and path.endswith(suffix) and not any(c in path for c in "*?["):
        return [url]  # fsspec treats every error of a web server as a missing file; opening the file reveals the error
    hits = with_retries(url, lambda: _list(filesystem, path, suffix))
    if hits == [path]:
        return [url]
    if not hits:
        what = "shard" if suffix == ".tar" else f"{suffix} file"
        raise ConfigError(f"{key}: {url!r} matches no {what}; {_nearest_existing(url, suffix)}")
    return [protocol + str(hit).removeprefix(protocol) if protocol else _keep_relative(url, str(hit)) for hit in hits]


def _list(filesystem: Any, path: str, suffix: str) -> list[str]:
    """Return the files that a glob matches, or those of a folder, or the file itself; empty if there is none."""
    if any(c in path for c in "*?[") and not filesystem.exists(path):
        return sorted(filesystem.glob(path))
    if filesystem.isdir(path):
        # List instead of glob, because the folder's own name may contain glob characters.
        names = [str(hit) for hit in filesystem.ls(path, detail=False)]
        if packed := [
            name for name in names if name.endswith((f"{suffix}.gz", ".tgz") if suffix == ".tar" else f"{suffix}.gz")
        ]:
            logger.warning(
                f"{path}: {len(packed)} compressed file(s) are ignored, such as {Path(packed[0]).name}. To use them, unpack them with gunzip."
            )
        return sorted(name for name in names if name.endswith(suffix))
    return [path] if filesystem.exists(path) else []


def _keep_relative(url: str, hit: str) -> str:
    """Make fsspec's absolute paths relative again if the pattern is, so that a run folder can move with its data."""
    if Path(url).is_absolute():
        return hit
    try:
        return str(Path(hit).relative_to(Path.cwd()))
    except ValueError:
        return hit


def _nearest_existing(url: str, suffix: str) -> str:
    folder = Path(url).parent
    if below := sorted({str(file.parent) for file in Path(url).glob(f"*/*{suffix}")}):
        return f"its {'shards' if suffix == '.tar' else 'files'} are in {' and '.join(below[:4])}"
    if made := remedy(url):
        return made.removeprefix("; ")
    if Path(url).is_dir():
        advice = f"; `sparo data convert {url} OUT` writes shards of its images" if suffix == ".tar" else ""
        return f"the folder has no {suffix} files{advice}"
    if "://" in url or not folder.is_dir():
        return f"{folder} is not a folder" if "://" not in url else "check the address and your credentials"
    hint = did_you_mean(Path(url).name, [p.name for p in folder.iterdir() if p.is_dir() or p.suffix == suffix][:200])
    above = hint.startswith("known") and not Path(url).suffix and any(folder.glob(f"*{suffix}"))
    return f"the {suffix} files are one folder above, in `{folder}`" if above else hint
