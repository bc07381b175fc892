"""A whole DINO step: our ViT-S/16+SPARO against the plain DINO step written the official way, same machine, same crops.

    python benchmarks/dino_step.py [--quick] [--json FILE]

Theirs: timm's ViT-S/16 (12 blocks, drop path 0.1), the loss as a double loop over teacher and student crops, per-parameter
clipping and EMA loops, one backbone pass per resolution, head run once; attention as vision_transformer.py writes it (two
products around a softmax). The second row gives them torch's fused attention, the third SPARO too, as Appendix A writes
it in place of the last block; the fourth gives us plain DINO. bf16 on a GPU, fp32 on a CPU; our attention is fused.
"""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from common import interleave, parser, report, row, seconds, training_step
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.contracts import Progress
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.models.sparo import Sparo
from sparo_train.models.vit_config import DROP_RANGE
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import DinoObjectiveConfig

OUT, GLOBALS, LOCALS = 65536, 2, 8


def crops(batch: int) -> dict[str, Tensor]:
    shape = {"global_crops": (batch, GLOBALS, 3, 224, 224), "local_crops": (batch, LOCALS, 3, 96, 96)}
    return {key: torch.randint(0, 256, size, dtype=torch.uint8) for key, size in shape.items()}


def our_step(batch: int, sparo: bool, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    tree = {"kind": "dino", "model": {"arch": "vit_small", "readout": {"kind": "sparo" if sparo else "cls"}}}
    engine = LocalEngine(
        LocalEngineConfig(precision="bf16" if device == "cuda" else "fp32", attention="fused"),
        AdamWConfig(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.04, clip_grad_norm=3.0, clip_per="tensor"),
    )
    engine.prepare(DinoObjective(DinoObjectiveConfig.model_validate(tree)))
    blocks = 11 if sparo else 12
    data = {**crops(batch), "drop": torch.randint(0, DROP_RANGE, (batch, GLOBALS + LOCALS, 2 * blocks))}
    return training_step(engine, data, Progress(1000, 10000, 0, 100))


class Official(nn.Module):
    """Backbone and head of an official student or teacher."""

    def __init__(self, sparo: bool, fused: bool, drop_path: float):
        super().__init__()
        self.backbone = timm.create_model(
            "vit_small_patch16_224",
            num_classes=0,
            drop_path_rate=drop_path,
            dynamic_img_size=True,
            depth=11 if sparo else 12,
        )
        for block in self.backbone.blocks:
            block.attn.fused_attn = fused
        self.sparo = Sparo(384, 64, 64) if sparo else None
        width = 4096 if sparo else 384
        self.mlp = nn.Sequential(
            nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 256)
        )
        self.last_layer = nn.utils.weight_norm(nn.Linear(256, OUT, bias=False))
        self.last_layer.weight_g.data.fill_(1)
        self.last_layer.weight_g.requires_grad = False

    def forward(self, parts: list[Tensor]) -> Tensor:
        found = []
        for x in parts:
            tokens = self.backbone.forward_features(x)
            found.append(tokens[:, 0] if self.sparo is None else self.sparo.plain(tokens).flat())
        return self.last_layer(F.normalize(self.mlp(torch.cat(found)), dim=-1))


def their_step(batch: int, sparo: bool, fused: bool, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    student, teacher = Official(sparo, fused, 0.1).to(device), Official(sparo, fused, 0.0).to(device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    decayed = [p for n, p in student.named_parameters() if not (n.endswith(".bias") or p.ndim == 1) and p.requires_grad]
    rest = [p for n, p in student.named_parameters() if n.endswith(".bias") or p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.04
    )
    center = torch.zeros(1, OUT, device=device)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    views = [
        (x[:, i].float() / 255 - mean) / std for x in crops(batch).values() for i in range(x.shape[1])
    ]  # their loader normalises

    def loss_of(out: Tensor, targets: Tensor) -> Tensor:
        nonlocal center
        outputs = (out / 0.1).chunk(GLOBALS + LOCALS)
        queries = F.softmax((targets - center) / 0.04, dim=-1).detach().chunk(2)
        total, terms = torch.zeros((), device=device), 0
        for iq, q in enumerate(queries):
            for v in range(len(outputs)):
                if v != iq:
                    total = total + torch.sum(-q * F.log_softmax(outputs[v], dim=-1), dim=-1).mean()
                    terms += 1
        center = center * 0.9 + targets.float().mean(0, keepdim=True) * 0.1
        return total / terms

    def run() -> None:
        moved = [v.to(device) for v in views]
        large, small = torch.cat(moved[:GLOBALS]), torch.cat(moved[GLOBALS:])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            targets = teacher([large])
            loss = loss_of(student([large, small]), targets)
        optimizer.zero_grad()
        loss.backward()
        for p in student.parameters():
            if p.grad is not None:
                coefficient = 3.0 / (p.grad.norm(2) + 1e-6)
                if coefficient < 1:
                    p.grad.mul_(coefficient)
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.mul_(0.996).add_((1 - 0.996) * q.detach())
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def main() -> None:
    options = parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = 64 if device == "cuda" else 4
    cases = [("DINO+SPARO (ours) / DINO", True, False, False, 1.1)]
    if not options.quick:
        cases += [
            ("DINO+SPARO / DINO, fused attention", True, False, True, None),
            ("DINO+SPARO / DINO+SPARO, fused attention", True, True, True, None),
            ("DINO / DINO", False, False, False, None),
        ]
    rows = []
    for label, ours_sparo, theirs_sparo, fused, bar in cases:
        ours, theirs = our_step(batch, ours_sparo, device), their_step(batch, theirs_sparo, fused, device)
        pairs = interleave(
            lambda f=ours: batch / seconds(f), lambda f=theirs: batch / seconds(f), 2 if options.quick else 5
        )
        rows.append(row(f"{label}, batch {batch}", pairs, bar, "images/s", True))
        del ours, theirs
    report("DINO step, ViT-S/16, 2 x 224 + 8 x 96 px, 65,536 outputs", rows, options.json)


if __name__ == "__main__":
    main()
