"""Slots of videos: the parallel binder compared with its released form, streams, SAVi's corrector, and reading clips.

    python benchmarks/video.py [--quick] [--psb] [--json FILE] [--device cpu] [--rounds 5]

The binder is causal and has three blocks, D 192, 11 slots and 64 x 64 tokens per frame; forward and backward of the encoder
alone, one video. The released form is the computation of NVlabs/PSB with the same weights: keys and values of all tokens,
logits of all times with all times, masked before and after the softmax. Slots of both forms agree to 1e-5, which is checked.
Memory is the peak above the start. A stream is compared with computing the slots of the last six frames again, in the released
form and in ours. `PSB against SAVi` has SAVi's corrector and predictor of the same width, with as many iterations per frame.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from common import interleave, parser, peak_growth, report, row, seconds
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from evals.tasks.objects.slot_probe import ProbedClip, assign_slots, score
from object_centric.encoders.transformer import TransformerConfig
from object_centric.grouping.binder_stream import BinderStream
from object_centric.grouping.parallel_binder import BinderBlock, ParallelBinder
from object_centric.grouping.slot_attention import SlotAttention
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.video.video_tower import RecurrentSlots
from sparo_data.episodes import episode_fields
from sparo_data.synthetic.video_scenes import episode
from sparo_train.core.rng import generator
from sparo_train.data.video.episode import Episode, FramesConfig

D, K, N = 192, 11, 64 * 64


def binder(device: str) -> ParallelBinder:
    torch.manual_seed(0)
    given = {"preset": "psb", "slots": K, "width": D, "iterations": 3}
    return ParallelBinder(SlotAttentionConfig.model_validate(given), D).to(device)


def released(module: ParallelBinder, tokens: Tensor) -> Tensor:
    """Run the released computation with the weights of our module."""
    b, times = tokens.shape[:2]
    slots = module.norm(module.init_slots(None, b))[:, None].expand(-1, times, -1, -1)
    apart = torch.arange(times, device=tokens.device)
    later = (apart[None] - apart[:, None]) > 0
    for block in module.blocks:
        assert isinstance(block, BinderBlock)
        bias = block.biases(apart[None] - apart[:, None])
        normed = block.norm_input(tokens)
        q, k, v = block.to_q(block.norm_slots(slots)), block.to_k(normed), block.to_v(normed)
        logits = torch.einsum("btkd,bsnd->btksn", q * D**-0.5, k).flatten(3).flatten(1, 2)  # (b, T K, T N)
        logits = logits + bias[0].repeat_interleave(K, 0).repeat_interleave(tokens.shape[2], 1)
        hidden = later.repeat_interleave(K, 0).repeat_interleave(tokens.shape[2], 1)
        shares = F.softmax(logits.masked_fill(hidden, -math.inf).unflatten(1, (times, K)), dim=2).flatten(1, 2)
        shares = shares.masked_fill(hidden, 0.0)
        weights = shares / (shares.sum(-1, keepdim=True) + block.config.renorm_eps)
        slots = slots + block.out(weights @ v.flatten(1, 2)).unflatten(1, (times, K))
        among = bias[block.config.heads :].masked_fill(later, -math.inf)
        slots = slots + block.across_time(block.norm_time(slots).transpose(1, 2), among).transpose(1, 2)
        slots = block.mix_slots(slots)
    return slots


def step(call: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[], float]:
    """Return a function that measures the seconds of forward and backward."""

    def run() -> float:
        return seconds(lambda: (call(tokens).square().mean().backward(), synchronised(tokens)))

    return run


def synchronised(tokens: Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize()


def peak(name: str, times: int, device: str) -> Callable[[], float]:
    """Return a function that measures the peak growth of memory in forward and backward, in MB; runs in a new process."""

    def run() -> float:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(grown, name, times, device).result()

    return run


def grown(name: str, times: int, device: str) -> float:
    module, tokens = binder(device), torch.randn(1, times, N, D, device=device, requires_grad=True)
    small = torch.randn(1, 1, N, D, device=device, requires_grad=True)

    def step(x: Tensor) -> None:
        (module(x).slots if name == "ours" else released(module, x)).square().mean().backward()

    step(small)  # what libraries hold for themselves, for a frame
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(tokens)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    return peak_growth(lambda: step(tokens)) / 1e6


def savi(device: str) -> RecurrentSlots:
    torch.manual_seed(0)
    given = {"preset": "savi", "slots": K, "width": D, "iterations": 3, "slot_init": "learned", "mlp_width": 4 * D}
    return RecurrentSlots(SlotAttentionConfig.model_validate(given), TransformerConfig(mlp_width=4 * D), D).to(device)


def corrector(kv: str, device: str) -> Callable[[], float]:
    """Return a function that measures the seconds of forward and backward of SAVi's corrector (K 11, D 128) over six frames of 64 x 64 tokens."""
    torch.manual_seed(0)
    given = {"preset": "savi", "slots": K, "width": 128, "slot_init": "learned", "kv": kv}
    module = SlotAttention(SlotAttentionConfig.model_validate(given), 32).to(device)
    tokens = torch.randn(6, N, 32, device=device, requires_grad=True)
    return step(lambda x: module(x).slots, tokens)


def stream(device: str, count: int, anew: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two functions that measure the seconds per new frame of `count` videos after six frames: with a stream, and the last six frames again."""
    module = binder(device).requires_grad_(False)
    tokens = torch.randn(count, 12, N, D, device=device)
    going = BinderStream(module, 6)
    for t in range(6):
        going.push(tokens[:, t])

    def ours() -> float:
        return seconds(lambda: ([going.push(tokens[:, t]) for t in range(6, 12)], synchronised(tokens))) / 6

    def again(window: Tensor) -> Tensor:
        return module(window).slots if anew == "ours" else released(module, window)

    def theirs() -> float:
        return seconds(lambda: ([again(tokens[:, t - 5 : t + 1]) for t in range(6, 12)], synchronised(tokens))) / 6

    return ours, theirs


def clips() -> tuple[Callable[[], float], Callable[[], float]]:
    """Return clips of six frames per second, from episodes of 24 frames of 128 pixels: decoding only their frames, and all frames."""
    samples = [episode_fields(episode("a", 0, "train", i, 24, 128)) for i in range(4)]
    frames, rng = FramesConfig(), generator(0, "bench")

    def ours() -> float:
        def run() -> None:
            for fields in samples:
                found = Episode(fields)
                np.stack([found.image(t) for t in frames.window(len(found), rng)])

        return len(samples) / seconds(run)

    def theirs() -> float:
        def run() -> None:
            for fields in samples:
                found = Episode(fields)
                whole = np.stack([found.image(t) for t in range(len(found))])
                whole[frames.window(len(found), rng)]

        return len(samples) / seconds(run)

    return ours, theirs


def probed_clips(count: int, slots: int, objects: int, width: int = 192) -> list[ProbedClip]:
    """Return clips of six frames whose slots encode an object's position and velocity linearly, in a random order."""
    rng = np.random.default_rng(0)
    says, made = rng.normal(size=(6, width)), []
    for _ in range(count):
        facts, table = rng.normal(size=(6, objects, 6)), 0.05 * rng.normal(size=(6, slots, width))
        table[:, rng.permutation(slots)[:objects]] += facts @ says
        made.append(ProbedClip(table, facts[..., :3], {"velocity": facts[..., 3:]}, {}))
    return made


def assignments() -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two functions that measure the seconds to assign 4 objects to 7 slots in 100 clips: like the probe, and by trying 840 orders, as in the paper."""
    clips, weights = probed_clips(100, 7, 4), np.random.default_rng(1).normal(size=(193, 3))
    orders = np.array(list(itertools.permutations(range(7), 4)))

    def theirs() -> list[np.ndarray]:
        found = []
        for clip in clips:
            said = clip.slots @ weights[:-1] + weights[-1]
            found.append(orders[((said[:, orders] - clip.position[:, None]) ** 2).sum((0, 2, 3)).argmin()])
        return found

    assert all(map(np.array_equal, assign_slots(clips, weights)[0], theirs()))
    return (lambda: seconds(lambda: assign_slots(clips, weights))), (lambda: seconds(theirs))


def flops(call: Callable[[Tensor], Tensor], tokens: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        call(tokens).square().mean().backward()
    return counter.get_total_flops() / 1e9


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--psb", action="store_true", help="only PSB against its released form and SAVi")
    options = flags.parse_args()
    # Of the processes that measure memory: blocks go back when they are freed, or fragments would be measured with what was held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    rounds, device = 1 if options.quick else options.rounds, options.device
    module, recurrent = binder(device), savi(device)
    rows = []
    for times, bar in ((6, 3.0),) if options.quick else ((6, 3.0), (12, 2.0)):
        tokens = torch.randn(1, times, N, D, device=device, requires_grad=True)
        with torch.no_grad():
            assert torch.allclose(
                module(tokens).slots, released(module, tokens), atol=1e-4 if device == "cuda" else 1e-5
            )
        ours: Any = lambda x: module(x).slots  # noqa: E731
        theirs: Any = lambda x: released(module, x)  # noqa: E731
        rows.append(
            row(
                f"PSB against released, T {times}",
                interleave(step(ours, tokens), step(theirs, tokens), rounds),
                bar,
                "s",
                False,
            )
        )
        memory = interleave(peak("ours", times, device), peak("theirs", times, device), min(rounds, 3))
        rows.append(row(f"its peak memory, T {times}", memory, 5.0, "MB", False))
    # What the paper compares: on a GPU, where all times at once are an advantage.
    for times in (6,) if options.quick or device == "cpu" else (6, 12, 24, 48):
        tokens = torch.randn(1, times, N, D, device=device, requires_grad=True)
        pair = (lambda x: module(x).slots), (lambda x: recurrent(x).slots)
        counted = [flops(call, tokens) for call in pair]
        bar = 1.6 if times == 24 else None
        name = f"PSB ({counted[0]:.1f} GFLOP) against SAVi ({counted[1]:.1f}), T {times}"
        rows.append(row(name, interleave(step(pair[0], tokens), step(pair[1], tokens), rounds), bar, "s", False))
    if options.psb:
        report("PSB", rows, options.json)
        return
    for count, anew in ((1, "released"), (1, "ours"), (4, "ours")):
        bar = 3.0 if anew == "released" else None
        name = f"a stream's new frame against six anew ({anew}, {count} at a time)"
        rows.append(row(name, interleave(*stream(device, count, anew), rounds), bar, "s", False))
    folded = interleave(corrector("folded", device), corrector("plain", device), rounds)
    rows.append(row("SAVi's corrector folded against plain", folded, 1.4, "s", False))
    rows.append(row("clips of 6 against all 24 frames decoded", interleave(*clips(), rounds), 1.5, "clips/s", True))
    every = probed_clips(500, 11, 6)
    whole = seconds(lambda: score(every[::2], every[1::2]))
    name = f"assignments of 4 objects against all orders (a probe of 500 clips, 6 frames, 11 slots: {whole:.1f} s)"
    rows.append(row(name, interleave(*assignments(), rounds), None, "s", False))
    report("slots of videos", rows, options.json)


if __name__ == "__main__":
    main()
