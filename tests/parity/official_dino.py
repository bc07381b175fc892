"""DINO's update as the official code and the paper describe it, written with plain loops: the reference for the DINO tests.

Backbone: timm's own ViT forward with the official interpolation of positions. Everything else is spelled out per crop,
per pair and per parameter.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import DROP_RANGE


def schedule(base, final, epochs, per_epoch, warmup_epochs=0, start=0.0):
    """Return one value per iteration as an array."""
    warm = np.linspace(start, base, warmup_epochs * per_epoch) if warmup_epochs else np.array([])
    left = np.arange(epochs * per_epoch - warmup_epochs * per_epoch)
    cosine = final + 0.5 * (base - final) * (1 + np.cos(np.pi * left / len(left)))
    return np.concatenate([warm, cosine])


def teacher_temperatures(warm, final, warm_epochs, epochs):
    """Return one value per epoch."""
    return np.concatenate([np.linspace(warm, final, warm_epochs), np.ones(epochs - warm_epochs) * final])


class Head(nn.Module):
    def __init__(self, in_dim, out_dim, hidden, bottleneck, norm_last_layer):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.last_layer = nn.utils.weight_norm(nn.Linear(bottleneck, out_dim, bias=False))
        self.last_layer.weight_g.data.fill_(1)
        if norm_last_layer:
            self.last_layer.weight_g.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class Backbone(Vit):
    """The same parameters in timm's blocks, applied one after another to all tokens, with drop path by floor(keep + u) / keep. / keep."""

    def plain(self, x, drop=None):
        pixels, (_, _, height, width) = x, x.shape
        x = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.official_positions(x, height, width)
        rates = torch.linspace(0, self.config.drop_path, len(self.blocks))
        for number, block in enumerate(self.blocks):
            for branch, run in enumerate((lambda t, b=block: b.attn(b.norm1(t)), lambda t, b=block: b.mlp(b.norm2(t)))):
                out = run(x)
                if drop is not None:
                    keep = 1 - rates[number]
                    out = out.div(keep) * torch.floor(keep + drop[:, 2 * number + branch] / DROP_RANGE)[:, None, None]
                x = x + out
        x = self.norm(x)
        return x[:, 0] if self.read_by is None else self.sparo.plain(x).flat()

    def official_positions(self, x, height, width):
        count, of = x.shape[1], self.pos_embed.shape[1] - 1
        if count == of and height == width:
            return self.pos_embed
        dim, patch = x.shape[-1], self.patch
        h0, w0 = height // patch + 0.1, width // patch + 0.1
        side = int(math.sqrt(of))
        grid = F.interpolate(
            self.pos_embed[:, 1:].reshape(1, side, side, dim).permute(0, 3, 1, 2),
            scale_factor=(h0 / math.sqrt(of), w0 / math.sqrt(of)),
            mode="bicubic",
        )
        assert int(h0) == grid.shape[-2] and int(w0) == grid.shape[-1]
        return torch.cat((self.pos_embed[:, :1], grid.permute(0, 2, 3, 1).view(1, -1, dim)), dim=1)


class Net(nn.Module):
    def __init__(self, config, head):
        super().__init__()
        self.backbone = Backbone(config)
        self.head = Head(config.out_width, head.out_dim, head.hidden_dim, head.bottleneck_dim, head.norm_last_layer)

    def forward(self, crops, drops):
        return self.head(torch.cat([self.backbone.plain(x, d) for x, d in zip(crops, drops, strict=True)]))


class Dino:
    """Student, teacher, centre and optimizer of an official run."""

    def __init__(self, config, optim, total, per_epoch):
        self.config, self.per_epoch = config, per_epoch
        self.student, self.teacher = Net(config.model, config.head), Net(config.model, config.head)
        self.teacher.requires_grad_(False)
        self.center = torch.zeros(1, config.head.out_dim)
        decayed = [p for n, p in self.named() if not (n.endswith(".bias") or p.ndim == 1)]
        plain = [p for n, p in self.named() if n.endswith(".bias") or p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}], betas=optim.betas, eps=optim.eps
        )
        epochs = total // per_epoch
        warm = optim.warmup_steps // per_epoch
        self.lr = schedule(optim.lr, optim.min_lr, epochs, per_epoch, warm)
        self.wd = schedule(optim.weight_decay, optim.weight_decay_end, epochs, per_epoch)
        self.momentum = schedule(config.momentum_teacher, 1, epochs, per_epoch)
        self.temperature = teacher_temperatures(
            config.warmup_teacher_temp, config.teacher_temp, config.warmup_teacher_temp_epochs, epochs
        )
        self.clip = optim.clip_grad_norm

    def named(self):
        return [(n, p) for n, p in self.student.named_parameters() if p.requires_grad]

    def loss(self, student, teacher, epoch, crops):
        c = self.config
        targets = F.softmax((teacher - self.center) / self.temperature[epoch], dim=-1).detach().chunk(2)
        outputs = (student / c.student_temp).chunk(crops)
        total, terms = 0, 0
        for iq, q in enumerate(targets):
            for v in range(len(outputs)):
                if v == iq:
                    continue
                total = total + torch.sum(-q * F.log_softmax(outputs[v], dim=-1), dim=-1).mean()
                terms += 1
        center = torch.sum(teacher, dim=0, keepdim=True) / len(teacher)
        self.center = self.center * c.center_momentum + center * (1 - c.center_momentum)
        return total / terms

    def step(self, iteration, large, small, drop):
        """Update with crops (B, 2, 3, S, S) and (B, n, 3, s, s), normalised; return the loss."""
        epoch = iteration // self.per_epoch
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self.lr[iteration]
            if number == 0:
                group["weight_decay"] = self.wd[iteration]
        views = [[x[:, i] for i in range(x.shape[1])] for x in (large, small)]
        drops = (
            None
            if drop is None
            else [torch.cat([drop[:, i] for i in part]) for part in (range(2), range(2, drop.shape[1]))]
        )
        crops = [torch.cat(part) for part in views]
        teacher = self.teacher(crops[:1], [None])
        student = self.student(crops, drops or [None, None])
        loss = self.loss(student, teacher, epoch, len(views[0]) + len(views[1]))
        self.optimizer.zero_grad()
        loss.backward()
        for _, p in self.named():
            if p.grad is not None and self.clip:
                coefficient = self.clip / (p.grad.norm(2) + 1e-6)
                if coefficient < 1:
                    p.grad.mul_(coefficient)
        if epoch < self.config.freeze_last_layer:
            for n, p in self.named():
                if "last_layer" in n:
                    p.grad = None
        self.optimizer.step()
        with torch.no_grad():
            m = self.momentum[iteration]
            for q, k in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                k.mul_(m).add_((1 - m) * q.detach())
        return loss.item()
