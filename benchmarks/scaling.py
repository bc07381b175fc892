"""Memory and communication per rank for every engine, ViT-B/16 to ViT-g/14 on 1 to 1,024 GPUs, and the data plan of 1,024 ranks.

    python benchmarks/scaling.py [--quick] [--json FILE] [--markdown]

Nothing is timed and no rank is started. Parameters, and the activations that are stored for backward, are counted on the
real objective with fake tensors. What an engine stores and sends is computed by its entry in `sparo.engines`, as in
`--dry-run`. `plan` runs through an epoch of the data plan of 1,024 ranks; `loss` runs one rank's share of the ring loss.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import torch
from common import parser, peak_growth
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from sparo_train.core import registries as tables
from sparo_train.core.distributed import Ring, Shift
from sparo_train.data.read.plan import Plan
from sparo_train.engine.ddp import DdpEngineConfig
from sparo_train.engine.deepspeed import DeepSpeedEngineConfig
from sparo_train.engine.engine_kind import Sizes
from sparo_train.engine.fsdp2 import Fsdp2EngineConfig
from sparo_train.models.clip_config import ClipConfig
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig
from sparo_train.objectives.contrastive import SoftmaxLoss, contrastive

MODELS = ("ViT-B-16", "ViT-L-14", "ViT-H-14", "ViT-g-14")
RANKS = (1, 8, 64, 1024)
LOCAL_BATCH = 128
GB = 1e9


class Model(NamedTuple):
    """Parameters; bytes stored for backward per pair, without and with checkpointed blocks; width of an encoding."""

    name: str
    sizes: Sizes
    kept: float
    checkpointed: float
    width: int


def measured(name: str) -> Model:
    """Count a model with fake tensors, without allocating or computing anything."""
    readout = {"kind": "sparo", "slots": 128, "slot_width": 64, "head_width": 64}
    config = ClipConfig.model_validate({"backbone": name, "readout": readout})
    with FakeTensorMode():
        objective = ClipObjective(ClipObjectiveConfig(model=config))
        kept = _kept_per_pair(objective, config)
        objective.set_grad_checkpointing(True)
        checkpointed = _kept_per_pair(objective, config)
    return Model(name, Sizes.from_objective(objective), kept, checkpointed, config.width)


def _kept_per_pair(objective: ClipObjective, config: ClipConfig) -> float:
    """Return the bytes that one more pair adds to what autograd keeps between forward and backward, under bf16 autocast."""
    found = [_kept(objective, config, pairs) for pairs in (2, 6)]
    return (found[1] - found[0]) / 4


def _kept(objective: ClipObjective, config: ClipConfig, pairs: int) -> float:
    seen: dict[int, int] = {}
    alive = []  # or an address could come up twice

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    size = config.vision.image_size
    batch = {
        "image": torch.zeros(pairs, 3, size, size, dtype=torch.uint8),
        "text": torch.zeros(pairs, config.text.context_length, dtype=torch.long),
    }
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        out = objective.embed(batch)
    assert out[0].requires_grad
    return sum(seen.values())


ENGINES: dict[str, DdpEngineConfig | Fsdp2EngineConfig | DeepSpeedEngineConfig] = {
    "ddp": DdpEngineConfig(kind="ddp"),
    "fsdp2": Fsdp2EngineConfig(kind="fsdp2"),
    "fsdp2, reshard_after_forward: false": Fsdp2EngineConfig(kind="fsdp2", reshard_after_forward=False),
    "fsdp2, shard_size: 8": Fsdp2EngineConfig(kind="fsdp2", shard_size=8),
    "deepspeed, stage: 1": DeepSpeedEngineConfig(kind="deepspeed", stage=1),
    "deepspeed, stage: 2": DeepSpeedEngineConfig(kind="deepspeed", stage=2),
    "deepspeed, stage: 3": DeepSpeedEngineConfig(kind="deepspeed", stage=3),
}


def features(m: Model, n: int) -> dict[str, float]:
    """Return the bytes of features and their gradients that a rank holds, and sends per step, for a loss of LOCAL_BATCH pairs per rank."""
    own = LOCAL_BATCH * m.width * 4
    return {
        "gather, resident": 4 * n * own,
        "gather, sent": 2 * 2 * (n - 1) * own,
        "ring, resident": 8 * own,
        "ring, sent": 3 * (n - 1) * own,
    }


def plan(ranks: int, samples: int, shards: int, batch: int) -> dict[str, Any]:
    """Return how often each sample of an epoch of the real plan is read by `ranks` ranks, and how many samples each rank reads."""
    counts = np.full(shards, samples // shards)
    found = Plan([counts.tolist()], [1.0], seed=0, streams=ranks)
    read = np.zeros((shards, samples // shards), dtype=np.int32)
    per_rank = np.zeros(ranks, dtype=np.int64)
    for stream in range(ranks):  # one stream a rank
        per_rank[stream] = found.stream_length(stream)
        for position in range(found.stream_length(stream)):
            ref = found.sample_at(stream, position)
            read[ref.shard, ref.ordinal] += 1
    return {
        "ranks": ranks,
        "samples": samples,
        "read": [int(read.min()), int(read.max())],
        "per_rank": [int(per_rank.min()), int(per_rank.max())],
        "steps": samples // batch,
    }


class _OneOf(Ring):
    """Communication of rank 0 of many: what arrives has the shape of what is sent."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def shift(self, *tensors: Tensor) -> Shift:
        return Shift([], tuple(t.clone() for t in tensors), tensors)


def loss(ranks: int, local: int, width: int) -> dict[str, float]:
    """Run one rank's share of the real loss on `ranks` ranks; return the peak MiB above its features, and the MiB of gathered features."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor(20.0, requires_grad=True)

    def run(image: Tensor, text: Tensor, size: int) -> None:
        contrastive(image, text, scale, loss=SoftmaxLoss(exchange="ring"), ring=_OneOf(size)).total.backward()

    def draw(count: int) -> tuple[Tensor, Tensor]:
        image, text = torch.randn(2, count, width, generator=generator)
        return F.normalize(image, dim=1).requires_grad_(), F.normalize(text, dim=1).requires_grad_()

    run(*draw(8), 2)
    pair = draw(local)
    grown = peak_growth(lambda: run(*pair, ranks))
    return {
        "ranks": ranks,
        "global batch": ranks * local,
        "width": width,
        "ring MiB": grown / 2**20,
        "gathered MiB": 2 * ranks * local * width * 4 / 2**20,
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--markdown", action="store_true", help="the tables as docs/scaling.md has them")
    options = flags.parse_args()
    models = [measured(name) for name in (MODELS[:1] if options.quick else MODELS)]
    tables = [_model_table(models)]
    for m in models:
        tables.append(_engine_table(m))
    tables.append(_feature_table(models[0]))
    found = plan(1024, 131_072 if options.quick else 1_048_576, 1024, 1024 * 8)
    assert found["read"] == [1, 1], found
    assert found["per_rank"][1] - found["per_rank"][0] <= 1, found
    tiles = [loss(1024, LOCAL_BATCH, 512 if options.quick else d) for d in (4096, 8192)[: 1 if options.quick else 2]]
    for title, columns, rows in tables:
        _show(title, columns, rows, options.markdown)
    print(
        f"plan of {found['ranks']} ranks, {found['samples']:,} samples: each is read {found['read']} times (least, most); "
        f"a rank reads {found['per_rank']} (least, most)"
    )
    for t in tiles:
        print(
            f"loss on {t['ranks']} ranks, batch {t['global batch']:,}, width {t['width']}: peak {t['ring MiB']:.0f} MiB "
            f"above the rank's features; gathered features would be {t['gathered MiB']:,.0f} MiB"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"models": [m._asdict() for m in models], "plan": found, "loss": tiles}, indent=1)
        )


def _model_table(models: list[Model]) -> tuple[str, list[str], list[list[str]]]:
    columns = [
        "CLIP+SPARO",
        "parameters (M)",
        "largest unit (M)",
        "outside units (M)",
        "kept for backward (MB/pair)",
        "with grad_checkpointing (MB/pair)",
    ]
    rows = [
        [
            m.name,
            f"{m.sizes.parameters / 1e6:.0f}",
            f"{m.sizes.largest_unit / 1e6:.1f}",
            f"{m.sizes.outside / 1e6:.0f}",
            f"{m.kept / 1e6:.0f}",
            f"{m.checkpointed / 1e6:.0f}",
        ]
        for m in models
    ]
    return "models", columns, rows


def _engine_table(m: Model) -> tuple[str, list[str], list[list[str]]]:
    columns = ["engine", *(f"{n} GPU{'s' if n > 1 else ''}" for n in RANKS), "sent per step (64 GPUs)"]
    rows = []
    for name, config in ENGINES.items():
        found = [tables.ENGINES.get(config.kind).costs(config, m.sizes, n) for n in RANKS]
        cells = [f"{c.states / GB:.1f} + {c.gathered / GB:.1f}" for c in found]
        rows.append([name, *cells, f"{found[RANKS.index(64)].sent / GB:.1f}"])
    return f"{m.name}: GB per rank, states + gathered", columns, rows


def _feature_table(m: Model) -> tuple[str, list[str], list[list[str]]]:
    columns = [f"features, {LOCAL_BATCH} pairs a rank, width {m.width}", *(f"{n} GPUs" for n in RANKS[1:])]
    found = [features(m, n) for n in RANKS[1:]]
    return "loss: GB per rank", columns, [[key, *(f"{f[key] / GB:.3f}" for f in found)] for key in found[0]]


def _show(title: str, columns: list[str], rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        print(f"### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        print("\n".join(f"| {' | '.join(row)} |" for row in rows), end="\n\n")
        return
    table = Table(*columns, title=title, title_justify="left")
    for cells in rows:
        table.add_row(*cells)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
