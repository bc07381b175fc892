"""A whole DINO step: ViT-S/16+SPARO compared with a plain DINO step in the form of the official code, on the same crops.

    python benchmarks/dino_step.py [--quick] [--json FILE]

The official form has timm's ViT-S/16 (12 blocks, drop path 0.1), the loss as a double loop over teacher and student crops,
loops over parameters for clipping and the teacher, one pass of the backbone per resolution, one pass of the head, and
attention as in vision_transformer.py (two products around a softmax). In the second row, it uses torch's fused attention;
in the third, also SPARO as in Appendix A, in place of the last block. The fourth row has plain DINO on our side. The
fifth adds the losses of DINOv2 to both sides: iBOT with half of the global crops masked, and KoLeo. The last row is the
share of a step that the statistics of a log step take (feature_std, rankme, prototypes_used). bf16 on a GPU, fp32 on a
CPU; our attention is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import timm
import torch
from common import interleave, parser, report, row, seconds, training_step
from torch import Tensor, nn
from torch.nn import functional as F

from sparo_train.core.contracts import Progress
from sparo_train.data.examples.masking import Masking
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.models.sparo import Sparo
from sparo_train.models.vit_config import DROP_RANGE
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import DinoObjectiveConfig

OUT, GLOBALS, LOCALS, GRID = 65536, 2, 8, 14


def crops(batch: int) -> dict[str, Tensor]:
    shape = {"global_crops": (batch, GLOBALS, 3, 224, 224), "local_crops": (batch, LOCALS, 3, 96, 96)}
    return {key: torch.randint(0, 256, size, dtype=torch.uint8) for key, size in shape.items()}


def our_step(batch: int, sparo: bool, device: str, dinov2: bool = False) -> tuple[Callable[[], None], DinoObjective]:
    torch.manual_seed(0)
    tree = {"kind": "dino", "model": {"arch": "vit_small", "readout": {"kind": "sparo" if sparo else "cls"}}}
    tree |= {"ibot": {}, "koleo": 0.1} if dinov2 else {}
    engine = LocalEngine(
        LocalEngineConfig(precision="bf16" if device == "cuda" else "fp32", attention="fused"),
        AdamWConfig(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.04, clip_grad_norm=3.0, clip_per="tensor"),
    )
    config = DinoObjectiveConfig.model_validate(tree)
    objective = DinoObjective(config)
    engine.prepare(objective)
    blocks = 11 if sparo else 12
    data = {**crops(batch), "drop": torch.randint(0, DROP_RANGE, (batch, GLOBALS + LOCALS, 2 * blocks))}
    if config.ibot is not None:
        masking, rng = Masking(GRID, config.ibot.mask_ratio, config.most_masked), np.random.default_rng(0)
        data["masked"] = torch.from_numpy(np.stack([masking.draw(rng) for _ in range(batch)]))
    return training_step(engine, data, Progress(1000, 10000, 0, 100)), objective


class Official(nn.Module):
    """Backbone and head of an official student or teacher."""

    def __init__(self, sparo: bool, fused: bool, drop_path: float):
        super().__init__()
        self.backbone: Any = timm.create_model(
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
        self.last_layer: Any = nn.utils.weight_norm(nn.Linear(256, OUT, bias=False))
        self.last_layer.weight_g.data.fill_(1)
        self.last_layer.weight_g.requires_grad = False
        self.mask_token = nn.Parameter(torch.zeros(1, 384))

    def head(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))

    def forward(self, parts: list[Tensor], masks: Tensor | None = None, masked: Tensor | None = None) -> list[Tensor]:
        """Return logits of all crops, encodings of the global ones, and logits of masked patches if there are any."""
        found, patches = [], []
        for number, x in enumerate(parts):
            if number == 0 and masked is not None:
                v = self.backbone
                tokens = v.patch_embed(x).flatten(1, 2)
                if masks is not None:
                    tokens = torch.where(masks[..., None], self.mask_token.to(tokens.dtype), tokens)
                tokens = v.norm(v.blocks(v._pos_embed(tokens.unflatten(1, (GRID, GRID)))))
                patches = [self.head(tokens[:, 1:][masked])]
            else:
                tokens = self.backbone.forward_features(x)
            found.append(tokens[:, 0] if self.sparo is None else self.sparo.plain(tokens).flat())
        return [self.head(torch.cat(found)), found[0], *patches]


def their_step(batch: int, sparo: bool, fused: bool, device: str, dinov2: bool = False) -> Callable[[], None]:
    torch.manual_seed(0)
    student, teacher = Official(sparo, fused, 0.1).to(device), Official(sparo, fused, 0.0).to(device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    decayed = [p for n, p in student.named_parameters() if not (n.endswith(".bias") or p.ndim == 1) and p.requires_grad]
    rest = [p for n, p in student.named_parameters() if n.endswith(".bias") or p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.04
    )
    center, patch_center = (torch.zeros(1, OUT, device=device) for _ in range(2))
    masks = None
    if dinov2:  # each global crop with probability one half, 10 to 50 % of its patches
        ratios = torch.where(torch.arange(2 * batch) % 2 == 0, torch.empty(2 * batch).uniform_(0.1, 0.5), 0)
        masks = (torch.rand(2 * batch, GRID**2).argsort(1).argsort(1) < (ratios * GRID**2)[:, None]).to(device)
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

    def ibot(out: Tensor, targets: Tensor) -> Tensor:
        nonlocal patch_center
        assert masks is not None
        queries = F.softmax((targets - patch_center) / 0.04, dim=-1).detach()
        loss = torch.sum(queries * F.log_softmax(out / 0.1, dim=-1), dim=-1)
        weight = (1 / masks.sum(-1).clamp(min=1.0)).unsqueeze(-1).expand_as(masks)[masks]
        patch_center = patch_center * 0.9 + targets.float().mean(0, keepdim=True) * 0.1
        return -(loss * weight).sum() / len(masks)

    def koleo(x: Tensor) -> Tensor:
        x = F.normalize(x.float(), dim=-1)
        dots = x @ x.T
        dots.view(-1)[:: len(x) + 1].fill_(-1)
        return -torch.log(F.pairwise_distance(x, x[dots.max(1).indices], 2, 1e-8) + 1e-8).mean()

    def run() -> None:
        moved = [v.to(device) for v in views]
        large, small = torch.cat(moved[:GLOBALS]), torch.cat(moved[GLOBALS:])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            targets = teacher([large], None, masks)
            outputs = student([large, small], masks, masks)
            loss = loss_of(outputs[0], targets[0])
            if dinov2:
                loss = loss + ibot(outputs[2], targets[2]) + 0.1 * sum(koleo(x) for x in outputs[1].chunk(2))
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
    cases: list[tuple[str, bool, bool, bool, bool, float | None]] = [
        ("DINO+SPARO (ours) / DINO", True, False, False, False, 1.1)
    ]
    if not options.quick:
        cases += [
            ("DINO+SPARO / DINO, fused attention", True, False, True, False, None),
            ("DINO+SPARO / DINO+SPARO, fused attention", True, True, True, False, None),
            ("DINO / DINO", False, False, False, False, 1.15),
            ("DINO+iBOT+KoLeo / the same, fused attention", False, False, True, True, 1.1),
        ]
    rows, shares = [], []
    for label, ours_sparo, theirs_sparo, fused, dinov2, bar in cases:
        ours, objective = our_step(batch, ours_sparo, device, dinov2)
        theirs = their_step(batch, theirs_sparo, fused, device, dinov2)
        pairs = interleave(
            lambda f=ours: batch / seconds(f), lambda f=theirs: batch / seconds(f), 2 if options.quick else 5
        )
        rows.append(row(f"{label}, batch {batch}", pairs, bar, "images/s", True))
        if label == "DINO+SPARO (ours) / DINO":

            def statistics(o: DinoObjective = objective) -> list[float]:
                return [float(value) for value in o.log_metrics().values()]

            measured = [(100 * seconds(statistics), seconds(ours)) for _ in range(3)]
            name = f"statistics of a log step, per cent of a DINO+SPARO step, batch {batch}"
            shares.append(row(name, measured, None, "s", True))
        del ours, theirs, objective
    report("DINO step, ViT-S/16, 2 x 224 + 8 x 96 px, 65,536 outputs", [*rows, *shares], options.json)


if __name__ == "__main__":
    main()
