"""Baseline of docs/results/videos.md: k-means on the colours of each clip's pixels, scored like the masks of a model.

python benchmarks/colour_clusters.py ROOT [--frames 6] [--clusters 5] [--every 2]
"""

from __future__ import annotations

import argparse

import common  # noqa: F401  so that packages stand before the files beside this one
import numpy as np
from scipy.cluster.vq import kmeans2

from evals.sets.view_set import ClipSet
from evals.tasks.objects.clip_segmentation import MaskedClip, score


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("root")
    flags.add_argument("--frames", type=int, default=6)
    flags.add_argument("--clusters", type=int, default=5)
    flags.add_argument("--every", type=int, default=2, help="score every so manieth episode")
    options = flags.parse_args()
    source, clips = ClipSet(options.root, options.frames), []
    for number in range(0, len(source), options.every):
        _, images, true = source.read(number)
        colours = np.stack([np.asarray(image) for image in images]).reshape(-1, 3) / 255
        _, found = kmeans2(colours, options.clusters, minit="++", rng=np.random.default_rng(number))
        clips.append(MaskedClip(true, found.reshape(true.shape), np.full(len(true), np.nan)))
    result = score(clips)
    for name, value in result.metrics.items():
        low, high = result.intervals[name]
        print(f"{name:<18} {100 * value:5.1f}  ({100 * low:.1f}–{100 * high:.1f})")
    print(f"n {result.n}")


if __name__ == "__main__":
    main()
