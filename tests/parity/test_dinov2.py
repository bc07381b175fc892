"""DINOv2's and DINOv3's terms compared with a restatement, alone and together, on one and two ranks."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from launch.commands.train import train
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError
from sparo_train.data.examples.masking import Masking, rectangles
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import CollapseConfig
from sparo_train.objectives.dino_health import collapse_message, prototypes_used, rankme, spread
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import dino_recipe
from tests.helpers.runs import assert_bit_equal, run
from tests.parity.test_dino import CLS, SPARO, batch, config

GRID, MOST = 4, 8  # 32 pixels in patches of 8; half of 16 patches
IBOT = {"ibot": {"mask_ratio": [0.1, 0.5]}}
TERMS = [
    {"centering": "sinkhorn_knopp"},
    {"koleo": 0.1},
    IBOT,
    {"ibot": {"separate_head": True, "weight": 0.5}},
    {"gram": {"crop_size": 48, "update_steps": 2, "max_updates": 1}},
    {**IBOT, "koleo": 0.1, "centering": "sinkhorn_knopp", "gram": {"first_step": 1, "update_steps": 1, "weight": 0.5}},
]
_ids = ["sinkhorn", "koleo", "ibot", "ibot-head", "gram", "all"]


def made(readout, terms):
    torch.manual_seed(0)
    objective = DinoObjective(config(readout, **terms)).double()
    with torch.no_grad():  # with a mask token of zeros, its position would not matter
        for net in (objective.student, objective.teacher):
            if hasattr(net.backbone, "mask_token"):
                net.backbone.mask_token.copy_(torch.linspace(-1, 1, 24))
    return objective


def data(number, size=4, masked=True, plain=0):
    found = batch(number, size)
    if plain:
        generator = torch.Generator().manual_seed(number)
        found["plain_crops"] = torch.randint(0, 256, (size, 2, 3, plain, plain), dtype=torch.uint8, generator=generator)
    if masked:
        rng = np.random.default_rng(number)
        masking = Masking(GRID, (0.1, 0.5), MOST)
        found["masked"] = torch.from_numpy(np.stack([masking.draw(rng) for _ in range(size)]))
    return found


def data_for(terms, number):
    side = terms["gram"].get("crop_size", 32) if "gram" in terms else 0
    return data(number, masked="ibot" in terms, plain=side)


class Dinov2:
    """Teacher, student and centres: the equations for one image and one patch at a time."""

    def __init__(self, objective):
        self.config = objective.config
        self.student, self.teacher = copy.deepcopy(objective.student), copy.deepcopy(objective.teacher)
        self.earlier = copy.deepcopy(objective.teacher)
        self.centers = {False: torch.zeros(48, dtype=torch.float64), True: torch.zeros(48, dtype=torch.float64)}
        self.pixels = objective.pixels

    def tokens(self, net, image, hidden=()):
        """Return the encoding of one image by one network, and its patches after the last norm."""
        vit = net.backbone
        x = vit.patch_embed.proj(image[None]).flatten(2).transpose(1, 2)
        rows = [vit.mask_token[0] if i in hidden else x[0, i] for i in range(x.shape[1])]
        x = torch.cat([vit.cls_token, torch.stack(rows)[None]], dim=1)
        x = x + vit.positions(image.shape[-2] // 8, image.shape[-1] // 8)
        for block in vit.blocks:
            x = x + block.attn(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        encoding = vit.norm(x)[:, 0] if vit.read_by is None else vit.sparo.plain(vit.norm(x)).flat()
        return encoding[0], vit.norm(x)[0, 1:]

    def targets(self, logits, temperature, patch):
        if self.config.centering == "mean":
            return [((row - self.centers[patch]) / temperature).softmax(-1).detach() for row in logits]
        q = torch.stack([(row / temperature).exp() for row in logits]).detach().T
        q /= q.sum()
        prototypes, samples = q.shape
        for _ in range(3):
            q /= q.sum(dim=1, keepdim=True)
            q /= prototypes
            q /= q.sum(dim=0, keepdim=True)
            q /= samples
        return list((q * samples).T)

    def gram(self, ours, plain, size):
        """Compute the Gram loss for one pair of patches at a time."""
        terms = []
        for v in range(2):
            for b in range(size):
                with torch.no_grad():
                    theirs = self.tokens(self.earlier, plain[b, v])[1]
                side = math.isqrt(len(theirs))
                if side != GRID:
                    grid = theirs.T.reshape(1, -1, side, side)
                    theirs = F.interpolate(grid, (GRID, GRID), mode="bicubic").flatten(2)[0].T
                for p in range(GRID**2):
                    for q in range(GRID**2):
                        pair = [F.cosine_similarity(x[p], x[q], dim=0) for x in (ours[b, v][1], theirs)]
                        terms.append((pair[0] - pair[1]) ** 2)
        return torch.stack(terms).mean()

    def loss(self, batch, epoch, step):
        c, temperature = self.config, 0.02 + 0.02 * min(epoch, 1)
        images = [self.pixels(batch["global_crops"]).double(), self.pixels(batch["local_crops"]).double()]
        size = len(images[0])
        hidden = {(b, v): [] for b in range(size) for v in range(2)}
        for b, row in enumerate(batch.get("masked", torch.zeros(size, 0))):
            for place in row.tolist():
                if place < 2 * GRID**2:
                    hidden[b, int(place) // GRID**2].append(int(place) % GRID**2)
        theirs = {(b, v): self.tokens(self.teacher, images[0][b, v]) for v in range(2) for b in range(size)}
        ours = {(b, v): self.tokens(self.student, images[0][b, v], hidden[b, v]) for v in range(2) for b in range(size)}
        small = [self.tokens(self.student, images[1][b, v])[0] for v in range(3) for b in range(size)]
        student = [
            self.student.head(e[None])[0] for e in [*(ours[b, v][0] for v in range(2) for b in range(size)), *small]
        ]
        teacher = [self.teacher.head(theirs[b, v][0][None])[0] for v in range(2) for b in range(size)]
        targets = self.targets(teacher, temperature, False)
        terms = [
            -(targets[t * size + b] * F.log_softmax(student[v * size + b] / 0.1, -1)).sum()
            for t in range(2) for v in range(5) for b in range(size) if v != t
        ]  # fmt: skip
        total = sum(terms) / len(terms)
        if c.ibot is not None:
            heads = [net.patch_head or net.head for net in (self.student, self.teacher)]
            places = [(b, v, p) for b in range(size) for v in range(2) for p in hidden[b, v]]
            patches = [heads[1](theirs[b, v][1][p][None])[0] for b, v, p in places]
            wanted = self.targets(patches, temperature, True)
            for (b, v, p), target in zip(places, wanted, strict=True):
                logits = heads[0](ours[b, v][1][p][None])[0]
                term = -(target * F.log_softmax(logits / 0.1, -1)).sum()
                total = total + c.ibot.weight * term / len(hidden[b, v]) / (2 * size)
            self.patches = torch.stack(patches).detach().mean(0)
        for v in range(2) if c.koleo else ():
            x = torch.stack([F.normalize(ours[b, v][0], dim=-1) for b in range(size)])
            for b in range(size):
                nearest = max(
                    (o for o in range(size) if o != b), key=lambda o, b=b, x=x: float(x[b].detach() @ x[o].detach())
                )
                distance = F.pairwise_distance(x[b][None], x[nearest][None], eps=1e-8)[0]
                total = total - c.koleo * (distance + 1e-8).log() / size
        if c.gram and step >= c.gram.first_step:
            total = total + c.gram.weight * self.gram(ours, self.pixels(batch["plain_crops"]).double(), size)
        self.rows = torch.stack(teacher).detach().mean(0)
        return total

    @torch.no_grad()
    def follow(self, momentum, step):
        for q, k in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            k.mul_(momentum).add_((1 - momentum) * q)
        if self.config.centering == "mean":
            self.centers[False] = 0.9 * self.centers[False] + 0.1 * self.rows
            if self.config.ibot is not None:
                self.centers[True] = 0.9 * self.centers[True] + 0.1 * self.patches
        # Steps after which the two settings above copy the teacher.
        copies = {0: [1], 1: [0, 1, 2, 3, 4]}
        if self.config.gram and step in copies[self.config.gram.first_step]:
            self.earlier = copy.deepcopy(self.teacher)


@pytest.mark.parametrize("readout", [CLS, SPARO], ids=["cls", "sparo"])
@pytest.mark.parametrize("terms", TERMS, ids=_ids)
def test_five_updates_equal_the_equations(readout, terms):
    objective = made(readout, terms)
    theirs = Dinov2(objective)
    optimizers = [
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
        for net in (objective.student, theirs.student)
    ]
    for step in range(5):
        progress, found = Progress(step, 12, 0, 2), data_for(terms, step)
        losses = [objective(found, progress).total, theirs.loss(found, progress.epoch, step)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-9)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        objective.after_step(progress, torch.tensor(True))
        theirs.follow(objective.momentum(progress), step)
    if objective.earlier is not None:
        for name, value in theirs.earlier.backbone.state_dict().items():
            assert torch.allclose(objective.earlier.state_dict()[name], value, atol=1e-5, rtol=0), name
    for net in ("student", "teacher"):
        for name, value in getattr(theirs, net).state_dict().items():
            assert torch.allclose(getattr(objective, net).state_dict()[name], value, atol=1e-5, rtol=0), (net, name)
    if objective.config.centering == "mean":
        assert torch.allclose(objective.center[0], theirs.centers[False], atol=1e-9)


def test_padding_rows_change_nothing(monkeypatch):
    """On a GPU, every image has the largest number of masked patches, so that shapes do not depend on the values."""
    losses = []
    for pad in (False, True):
        if pad:
            for module in ("sparo_train.models.dino_head", "sparo_train.objectives.dino"):
                monkeypatch.setattr(f"{module}.masked_rows", _padded_rows)
        objective, optimizer_loss = made(CLS, IBOT), []
        for step in range(3):
            loss = objective(data(step), Progress(step, 12, 0, 2)).total
            loss.backward()
            objective.after_step(Progress(step, 12, 0, 2), torch.tensor(True))
            optimizer_loss.append(loss.item())
        losses.append((optimizer_loss, objective.student.backbone.mask_token.grad, objective.patch_center))
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-12)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(losses[0][1:], losses[1][1:], strict=True))


def _padded_rows(masked, patches):
    return torch.arange(len(masked))[:, None].expand_as(masked).flatten(), masked.flatten().long()


def _gradients(ranks, terms):
    objective = made(SPARO, terms)
    rows = slice(ranks.rank * 4 // ranks.size, (ranks.rank + 1) * 4 // ranks.size)
    found = {key: value[rows] for key, value in data_for(terms, 3).items()}
    loss = objective(found, Progress(1, 10, 0))
    loss.total.backward()
    objective.after_step(Progress(1, 10, 0), torch.tensor(True))
    gradients = {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}
    return loss.total.item(), gradients, {n: b for n, b in objective.named_buffers() if "center" in n}


@pytest.mark.parametrize("terms", TERMS, ids=_ids)
def test_two_ranks_compute_what_one_does(terms):
    ((loss, gradients, centers),) = run_ranks(1, _gradients, terms)
    both = run_ranks(2, _gradients, terms)
    assert sum(rank[0] for rank in both) / 2 == pytest.approx(loss, abs=1e-9)
    for name, value in gradients.items():
        assert torch.allclose((both[0][1][name] + both[1][1][name]) / 2, value, atol=1e-9), name
    for name, value in centers.items():
        if not name.startswith("_"):
            assert torch.allclose(both[0][2][name], value, atol=1e-9), name


@settings(max_examples=60, deadline=None)
@given(grid=st.integers(2, 20), low=st.floats(0, 0.6), span=st.floats(0, 0.4), seed=st.integers(0, 1 << 20))
def test_masks_have_the_requested_number_of_patches_in_one_crop(grid, low, span, seed):
    ratio, patches = (low, low + span), grid * grid
    masking = Masking(grid, ratio, max(1, round(ratio[1] * patches)))
    rng = np.random.default_rng(seed)
    places = masking.draw(rng)
    kept = places[places < 2 * patches]
    assert (
        len(places) == masking.most and len(set(kept.tolist())) == len(kept) and len({p // patches for p in kept}) == 1
    )
    assert max(1, math.floor(low * patches)) <= len(kept) <= masking.most
    count = int(rng.integers(0, patches + 1))
    assert rectangles(grid, count, rng).sum() == count


def test_a_run_resumes_bit_identically(shards, tmp_path):
    gram = {"first_step": 1, "update_steps": 2, "crop_size": 64}
    terms = {"ibot": {}, "koleo": 0.1, "centering": "sinkhorn_knopp", "gram": gram}
    tree = dino_recipe(shards, tmp_path / "straight", steps=6)
    tree["objective"] |= terms
    train(straight := run(tree))
    stopped = dino_recipe(shards, tmp_path / "stopped", steps=6)
    stopped["objective"] |= terms
    train(run({**stopped, "stop_after_steps": 3}))
    train(run(stopped))

    assert_bit_equal(straight.folder, tmp_path / "stopped/dino", 6)
    with pytest.raises(ConfigError, match=r"objective\.koleo couples the samples of a batch"):
        run({**stopped, "micro_batch_size": 2})


def test_kinds_of_collapse_are_distinguished():
    torch.manual_seed(0)
    limits, healthy = CollapseConfig(), torch.randn(64, 32)
    assert rankme(healthy) > 20 and 0.9 < spread(healthy) < 1.1
    # All encodings have one direction: RankMe is one, and directions do not differ.
    line = torch.rand(64, 1) @ torch.randn(1, 32)
    assert rankme(line) == pytest.approx(1, abs=0.01) and spread(line) == pytest.approx(0, abs=1e-3)
    singular = torch.linalg.svdvals(healthy)
    shares = singular / singular.sum() + 1e-7
    assert rankme(healthy).item() == pytest.approx(math.exp(-(shares * shares.log()).sum()), rel=1e-4)
    assert rankme(healthy.repeat(1, 8)).item() == pytest.approx(rankme(healthy).item(), rel=1e-3)
    used = torch.eye(8)[torch.arange(64) % 4]
    assert prototypes_used(used) == pytest.approx(4, rel=1e-5)
    facts = {"teacher_entropy": 2.0, "teacher_kl": 0.5, "rankme": 10.0, "done": 0.5}
    cases = {"teacher_entropy": (0.0, math.log(1024)), "teacher_kl": (0.0,), "rankme": (1.0,)}
    assert collapse_message(limits, 1024, facts) is None
    for name, values in cases.items():
        for value in values:
            assert "collapses" in (collapse_message(limits, 1024, {**facts, name: value}) or ""), (name, value)
    assert collapse_message(limits, 1024, {**facts, "rankme": 1.0, "done": 0.01}) is None  # a new network
