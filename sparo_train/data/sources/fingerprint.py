"""The fingerprint of the data: everything that a position in them depends on, which a resumed run compares."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import DataError
from .base import Source


def fingerprint(sources: list[Source]) -> dict[str, Any]:
    """Return everything that a cursor depends on: per source its shard names and counts, hashes of sampled content, and readable totals.

    `seen` covers names, sizes, small members and a piece of large ones, but not locations or times; `rows`, some rows
    of other formats; `content`, everything, if every storage has a hash on record (`sparo data check --hash`).
    """
    out: dict[str, Any] = {}
    for source in sources:
        content_hashes = [s.content_hash() for s in source.storages]
        out[source.name] = {
            "shards": len(source.storages),
            "samples": source.samples,
            "weight": source.config.weight,
            # Names without their folder, because data may be moved between two starts.
            "sha256": _hash(f"{Path(s.url).name} {len(s)} {s.digest()}".rstrip() for s in source.storages),
        }
        if all(sampled_hashes := [s.sampled_hash() for s in source.storages]):
            out[source.name]["seen"] = _hash(sampled_hashes)
        if rows := [*filter(None, (s.row_sample() for s in source.storages))]:
            out[source.name]["rows"] = _hash(rows)
        if all(content_hashes):
            out[source.name]["content"] = _hash(map(str, content_hashes))
    return out


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def refuse_changed(old: Mapping[str, Any], new: Mapping[str, Any], where: str) -> None:
    """Raise `DataError` that lists the differences between two fingerprints."""
    changed = []
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            # Compare these hashes only if both have them: older checkpoints lack them, or data on a server.
            keys = dict.fromkeys([*before, *now])
            both = [k for k in keys if k not in ("seen", "content", "rows") or (k in before and k in now)]
            changed += [f"{key}.{k}: {before.get(k)} -> {now.get(k)}" for k in both if before.get(k) != now.get(k)]
        elif before != now:
            changed.append(f"{key}: {'absent' if before is None else before} -> {'absent' if now is None else now}")
    if changed:
        if len(changed) == 1 and changed[0].startswith("plan.whole_groups:"):
            value = str(old["plan"].get("whole_groups", False)).lower()
            raise DataError(
                f"{where}: was written with another order of samples. To continue the run, set data.whole_groups={value}."
            )
        raise DataError(
            f"{where}: the data changed since this checkpoint, so its position in the data is invalid:\n  " + "\n  ".join(changed)
            + "\n(Names, sizes and parts of the content were compared.) Restore the data, or start another run with another name=."
        )  # fmt: skip
