"""Named random streams: every random number outside torch's own generator is a pure function of (seed, names)."""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """Return a numpy generator for the stream `names` under `seed`; equal arguments give equal numbers in any process."""
    # Always two words, so that the upper half of a long seed cannot be confused with a name.
    words = [seed & 0xFFFFFFFF, seed >> 32]
    for name in names:
        # A checksum instead of hash(), which Python salts in every process.
        words.append(zlib.crc32(name.encode()) if isinstance(name, str) else name)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def torch_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for torch, from the same family of streams."""
    return int(generator(seed, *names).integers(0, 2**63 - 1))
