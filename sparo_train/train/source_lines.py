"""What a training reads, in words: a start is where somebody else's data is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..data.read.folder import left_out_text
from ..data.read.plan import reading
from ..data.read.sources import Source

_NAMED = 5


def source_lines(sources: Sequence[Source], samples: int) -> Iterator[str]:
    """A line per source: its share of all that is read, its size, how often each sample comes; and what is lost of it.

    Args:
        samples: how many the whole run reads.
    """
    # By the plan's own arithmetic: what is told is what will be read.
    read = reading([source.samples for source in sources], [source.config.weight for source in sources], samples)
    for source, (share, passes) in zip(sources, read, strict=True):
        yield f"data {source.name}: {share:.1%} of what is read; {source.samples:,} samples, {passes:.2f} passes"
        if left_out := getattr(source.storages[0], "left_out", {}):
            yield f"data {source.name}: left out, as no pictures that can be read: {left_out_text(left_out)}"
        broken = source.broken()
        for damage in broken[:_NAMED]:
            yield f"data {source.name}: {damage.url}: {damage.reason}, about {damage.lost_samples:,} samples lost"
        if len(broken) > _NAMED:
            yield f"data {source.name}: {len(broken) - _NAMED} more shards are not whole; `sparo data check` lists them"
