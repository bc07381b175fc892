"""How much of a data set may be broken before a run stops."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import DataError
from .sources import DamagedShard, DataConfig, Source

logger = logging.getLogger(__name__)

_MAX_LISTED = 10
_MAX_LOGGED = 100
_SHARDS = {"truncated tar", "unreadable tar"}  # judged before the first step, against the whole source
_REMEDY = "`sparo data check` lists them; repair or remove these shards, or raise data.max_bad_share."


def refuse_broken(sources: Sequence[Source], config: DataConfig) -> list[DamagedShard]:
    """The shards that are not whole. Raises `DataError` naming them where they lose more than `data.max_bad_share`."""
    damaged = [damage for source in sources for damage in source.broken()]
    lost = sum(damage.lost_samples for damage in damaged)
    total = lost + sum(source.samples for source in sources)
    # Judged only where there is enough to judge: of ten samples one broken is no share.
    if damaged and total >= config.max_bad_share_min_samples and lost > config.max_bad_share * total:
        worst = "\n  ".join(
            f"{d.url}: {d.reason}, about {d.lost_samples} lost"
            for d in sorted(damaged, key=lambda d: -d.lost_samples)[:_MAX_LISTED]
        )
        raise DataError(
            f"data: {len(damaged)} shard(s) are not whole, about {lost} of {total} samples are lost, "
            f"over data.max_bad_share={config.max_bad_share}:\n  {worst}\n{_REMEDY}"
        )
    return damaged


class BadSampleBudget:
    """Counts skipped samples by (shard, reason) and stops a run whose data is too broken.

    Args:
        max_share: largest tolerated share of skipped among tried samples.
        minimum: samples tried before the share is judged.
    """

    def __init__(self, max_share: float, minimum: int = 1000):
        self.max_share, self.minimum, self._num_logged = max_share, minimum, 0
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(
        self, skipped: Mapping[tuple[str, str], int], used: int, keys: Mapping[tuple[str, str], str] | None = None
    ) -> None:
        """Add a batch's skips; `used` is the number of good samples so far, `keys` has a sample of each. Raises `DataError` over the limit."""
        for (url, reason), key in (keys or {}).items():
            if (url, reason) not in self.counts and self._num_logged < _MAX_LOGGED:
                self._num_logged += 1
                more = "; further ones are in metrics.jsonl alone" if self._num_logged == _MAX_LOGGED else ""
                logger.warning(f"skipped a sample: {url}, {key}: {reason}{more}")
        counts = self.counts + Counter(skipped)
        # Broken shards were judged before the first step; counted twice they would end runs that go on.
        total = sum(n for (_, reason), n in counts.items() if reason not in _SHARDS)
        tried = used + total
        if tried >= self.minimum and total > self.max_share * tried:
            worst = "\n  ".join(f"{url}: {reason}, {n}" for (url, reason), n in counts.most_common(_MAX_LISTED))
            raise DataError(
                f"data: {total} of {tried} samples were unusable, more than data.max_bad_share={self.max_share}:\n"
                f"  {worst}\n{_REMEDY}"
            )
        self.counts = counts  # only now: a run that stops here saves itself without this batch

    def by_reason(self) -> dict[str, int]:
        """Counts by reason, for the metrics."""
        out: Counter[str] = Counter()
        for (_, reason), n in self.counts.items():
            out[reason] += n
        return dict(out)

    def by_shard(self) -> dict[str, dict[str, int]]:
        """Counts by shard and reason, the worst ten shards first."""
        out: dict[str, Counter[str]] = defaultdict(Counter)
        for (url, reason), n in self.counts.items():
            out[url][reason] += n
        worst = sorted(out.items(), key=lambda item: -item[1].total())[:_MAX_LISTED]
        return {url: dict(reasons) for url, reasons in worst}

    def state(self) -> list[list[Any]]:
        return [[url, reason, n] for (url, reason), n in self.counts.items()]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        self.counts = Counter({(url, reason): n for url, reason, n in state})
