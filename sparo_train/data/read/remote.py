"""Paths and URLs, through fsspec."""

from __future__ import annotations

from typing import Any

import fsspec

from ...core.errors import DataError, did_you_mean

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def filesystem_of(url: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it. Raises `DataError` where the protocol cannot be used."""
    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, AttributeError) as error:  # fsspec names some classes that its own modules lack
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install -e '.[{extra}]' in sparo's checkout" if extra else str(error)
        raise DataError(f"{url}: {protocol}:// needs a package that is not installed; {remedy}") from None
    except (OSError, TypeError) as error:  # a protocol that wants a host or a file: `zip://`, `sftp://`
        raise DataError(f"{url}: cannot be opened ({error})") from None
    except ValueError:
        hint = did_you_mean(protocol, fsspec.available_protocols())
        raise DataError(f"{url}: {protocol}:// is no protocol that fsspec knows; {hint}") from None
