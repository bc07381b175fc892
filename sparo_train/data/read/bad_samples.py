"""Limits on the share of a data set that may be broken before a run stops."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import DataError
from ..sources.base import DamagedShard, DataConfig, Source

logger = logging.getLogger(__name__)

_MAX_LISTED = 10
_MAX_LOGGED = 100
_SHARDS = {"truncated tar", "unreadable tar"}  # judged before the first step, relative to the whole source
_REMEDY = "Repair or remove these files (`sparo data check` lists them), or raise data.max_bad_share."


def refuse_broken(sources: Sequence[Source], config: DataConfig) -> list[DamagedShard]:
    """Return the incomplete shards. Raises `DataError` naming them if they lose more than `data.max_bad_share`."""
    damaged = [damage for source in sources for damage in source.incomplete_storages()]
    lost = sum(damage.lost_samples for damage in damaged)
    total = lost + sum(source.samples for source in sources)
    # Only judge large sources: the share of one broken sample of ten says little.
    if damaged and total >= config.max_bad_share_min_samples and lost > config.max_bad_share * total:
        worst = "\n  ".join(
            f"{d.url}: {d.reason}, about {d.lost_samples} lost"
            for d in sorted(damaged, key=lambda d: -d.lost_samples)[:_MAX_LISTED]
        )
        raise DataError(
            f"data: {len(damaged)} incomplete shard(s) lose about {lost} of {total} samples, which is more than "
            f"data.max_bad_share={config.max_bad_share} allows:\n  {worst}\n{_REMEDY}"
        )
    return damaged


class BadSampleBudget:
    """Counter of skipped samples by (shard, reason), which stops a run if too much data is broken.

    Args:
        max_share: largest tolerated share of skipped samples among those tried.
        minimum: number of samples tried before the share is judged.
    """

    def __init__(self, max_share: float, minimum: int = 1000):
        self.max_share, self.minimum, self._num_logged = max_share, minimum, 0
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(
        self, skipped: Mapping[tuple[str, str], int], used: int, keys: Mapping[tuple[str, str], str] | None = None
    ) -> None:
        """Add the skipped samples of a batch; `used` counts good samples so far, `keys` has one example of each. Raises `DataError` over the limit."""
        for (url, reason), key in (keys or {}).items():
            if (url, reason) not in self.counts and self._num_logged < _MAX_LOGGED:
                self._num_logged += 1
                more = (
                    ". Further skipped samples are only counted, in metrics.jsonl"
                    if self._num_logged == _MAX_LOGGED
                    else ""
                )
                logger.warning(f"skipped a sample: {url}, key {key}: {reason}{more}")
        counts = self.counts + Counter(skipped)
        # Broken shards were judged before the first step; counting them twice would end resumed runs.
        total = sum(n for (_, reason), n in counts.items() if reason not in _SHARDS)
        tried = used + total
        if tried >= self.minimum and total > self.max_share * tried:
            worst = "\n  ".join(f"{url}: {reason}, {n}" for (url, reason), n in counts.most_common(_MAX_LISTED))
            raise DataError(
                f"data: {total} of {tried} samples were unusable, more than data.max_bad_share={self.max_share}:\n"
                f"  {worst}\n{_REMEDY}"
            )
        self.counts = counts  # last, because a run that stops here saves itself without this batch

    def by_reason(self) -> dict[str, int]:
        """Return counts by reason, for the metrics."""
        out: Counter[str] = Counter()
        for (_, reason), n in self.counts.items():
            out[reason] += n
        return dict(out)

    def by_shard(self) -> dict[str, dict[str, int]]:
        """Return counts by shard and reason, the worst ten shards first."""
        out: dict[str, Counter[str]] = defaultdict(Counter)
        for (url, reason), n in self.counts.items():
            out[url][reason] += n
        worst = sorted(out.items(), key=lambda item: -item[1].total())[:_MAX_LISTED]
        return {url: dict(reasons) for url, reasons in worst}

    def state(self) -> list[list[Any]]:
        return [[url, reason, n] for (url, reason), n in self.counts.items()]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        self.counts = Counter({(url, reason): n for url, reason, n in state})
