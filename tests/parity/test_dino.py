"""DINO compared with a restatement of the official update, as a whole and part by part."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparo_train.core.contracts import Progress
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig, learning_rate, weight_decay
from sparo_train.models.dino_head import DinoHead, DinoHeadConfig
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import DROP_RANGE, VitConfig
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import DinoObjectiveConfig
from sparo_train.objectives.dino_loss import centered_targets, distillation
from tests.parity import official_dino as official

CLS, SPARO = {"kind": "cls"}, {"kind": "sparo", "slots": 6, "slot_width": 8, "head_width": 8}
OPTIM = AdamWConfig(
    lr=2e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.04,
    weight_decay_end=0.4,
    warmup_steps=2,
    warmup_from_zero=True,
    min_lr=1e-6,
    clip_grad_norm=0.05,
    clip_per="tensor",
)


def config(readout=CLS, **changes):
    tree = {
        "kind": "dino",
        "model": {
            "image_size": 32,
            "patch_size": 8,
            "width": 24,
            "depth": 3,
            "heads": 2,
            "drop_path": 0.2,
            "readout": readout,
        },
        "head": {"out_dim": 48, "hidden_dim": 32, "bottleneck_dim": 16},
        "crops": {"local_crops_number": 3, "local_size": 16},
        "warmup_teacher_temp": 0.02,
        "warmup_teacher_temp_epochs": 2,
        "momentum_teacher": 0.9,
        **changes,
    }
    return DinoObjectiveConfig.model_validate(tree)


def batch(number, size=4, paths=0, generator=None):
    g = generator or torch.Generator().manual_seed(number)
    found = {
        "global_crops": torch.randint(0, 256, (size, 2, 3, 32, 32), generator=g, dtype=torch.uint8),
        "local_crops": torch.randint(0, 256, (size, 3, 3, 16, 16), generator=g, dtype=torch.uint8),
    }
    if paths:
        found["drop"] = torch.randint(0, DROP_RANGE, (size, 5, paths), generator=g, dtype=torch.int32)
    return found


@pytest.mark.parametrize("readout", [CLS, SPARO], ids=["cls", "sparo"])
@pytest.mark.parametrize("norm_last_layer", [True, False])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_five_updates_equal_the_official_ones(readout, norm_last_layer):
    c = config(readout)
    c = c.model_copy(update={"head": c.head.model_copy(update={"norm_last_layer": norm_last_layer})})
    torch.manual_seed(0)
    objective = DinoObjective(c)
    total, per_epoch = 12, 2
    theirs = official.Dino(c, OPTIM, total, per_epoch)
    for net in ("student", "teacher"):
        getattr(theirs, net).load_state_dict(getattr(objective, net).state_dict())
    start = {n: t.clone() for n, t in objective.state_dict().items()}
    engine = LocalEngine(LocalEngineConfig(device="cpu", precision="fp32"), OPTIM)
    engine.prepare(objective)
    paths = 2 * c.model.blocks
    for iteration in range(5):
        data = batch(iteration, paths=paths)
        pixels = [objective.pixels(data[key]) for key in ("global_crops", "local_crops")]
        expected = theirs.step(iteration, *pixels, data["drop"])
        progress = Progress(iteration, total, 0, per_epoch)
        loss = engine.forward(data, progress, last=True)
        engine.backward(loss.total, last=True)
        assert engine.step(progress).applied
        assert loss.total.item() == pytest.approx(expected, abs=1e-5)
        assert torch.allclose(objective.center, theirs.center, atol=1e-5, rtol=0)
    for net in ("student", "teacher"):
        for name, value in getattr(theirs, net).state_dict().items():
            ours = objective.state_dict()[f"{net}.{name}"]
            assert torch.allclose(ours, value, atol=1e-5, rtol=0), (net, name, (ours - value).abs().max())
    moved = max(float((objective.state_dict()[n] - t).abs().max()) for n, t in start.items() if n.startswith("student"))
    assert moved > 1e-3


@pytest.mark.parametrize("total, per_epoch, warm", [(30, 3, 9), (1000, 100, 100), (7, 7, 0)])
def test_schedules_are_the_official_arrays(total, per_epoch, warm):
    epochs = total // per_epoch
    optim = OPTIM.model_copy(update={"warmup_steps": warm})
    lr = official.schedule(optim.lr, optim.min_lr, epochs, per_epoch, warm // per_epoch)
    wd = official.schedule(optim.weight_decay, optim.weight_decay_end, epochs, per_epoch)
    momentum = official.schedule(0.996, 1, epochs, per_epoch)
    objective = DinoObjective(config(momentum_teacher=0.996, warmup_teacher_temp_epochs=min(4, epochs)))
    temperatures = official.teacher_temperatures(0.02, 0.04, min(4, epochs), epochs)
    for step in range(total):
        progress = Progress(step, total, 0, per_epoch)
        assert learning_rate(optim, step, total) == pytest.approx(lr[step], rel=1e-12, abs=1e-18)
        assert weight_decay(optim, step, total) == pytest.approx(wd[step], rel=1e-12)
        assert objective.momentum(progress) == pytest.approx(momentum[step], rel=1e-12)
        assert objective.teacher_temp(progress) == pytest.approx(temperatures[step // per_epoch], rel=1e-12)
    assert total == 7 or (lr[warm] == lr[warm - 1] == optim.lr and lr[0] == 0)


@pytest.mark.parametrize("teachers", [2, 3])
def test_the_loss_equals_the_sum_over_pairs_and_so_does_its_gradient(teachers):
    torch.manual_seed(1)
    crops, rows, out = 5, 3, 11
    student = torch.randn(crops * rows, out, dtype=torch.float64, requires_grad=True)
    teacher, center = torch.randn(teachers * rows, out, dtype=torch.float64), torch.randn(1, out, dtype=torch.float64)
    found = distillation(student, centered_targets(teacher, center, 0.04), teachers, 0.1)
    targets = F.softmax((teacher - center) / 0.04, -1).chunk(teachers)
    outputs = [s.log_softmax(-1) for s in (student / 0.1).chunk(crops)]
    pairs = [-(q * outputs[v]).sum(-1).mean() for i, q in enumerate(targets) for v in range(crops) if v != i]
    plain = sum(pairs) / len(pairs)
    assert found.loss.item() == pytest.approx(plain.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(loss * 3, student, retain_graph=True)[0] for loss in (found.loss, plain))
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    entropy = -torch.cat(targets).mul(torch.cat(targets).log()).sum(-1).mean()
    assert found.entropy.item() == pytest.approx(entropy.item(), rel=1e-12)
    assert found.kl.item() == pytest.approx(plain.item() - entropy.item(), rel=1e-9)


def test_positions_for_96_pixel_crops_are_interpolated_as_officially():
    torch.manual_seed(0)
    theirs = official.Backbone(VitConfig(arch="vit_tiny", width=192, heads=3, depth=1))
    ours = Vit(theirs.config)
    ours.load_state_dict(theirs.state_dict())
    for side, grid in ((96, 6), (224, 14), (384, 24)):
        expected = theirs.official_positions(torch.zeros(1, grid * grid, 192), side, side)
        assert torch.equal(ours.positions(grid, grid), expected)


def test_parameter_names_and_counts_are_the_official_ones():
    with torch.device("meta"):
        backbone, head = Vit(VitConfig(arch="vit_small")), DinoHead(384, DinoHeadConfig())
        sparo = Vit(VitConfig.model_validate({"arch": "vit_small", "readout": {"kind": "sparo"}}))
    assert sum(p.numel() for p in backbone.parameters()) == 21_665_664
    assert sum(p.numel() for p in head.parameters()) == 22_352_128
    names = dict(backbone.named_parameters())
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.11.attn.qkv.bias", "norm.bias"} <= set(names)
    assert not any(name.startswith("head") for name in backbone.state_dict())
    assert list(head.state_dict()) == [
        *(f"mlp.{i}.{leaf}" for i in (0, 2, 4) for leaf in ("weight", "bias")),
        "last_layer.weight_g",
        "last_layer.weight_v",
    ]
    replaced = sum(p.numel() for n, p in names.items() if n.startswith("blocks.11."))
    assert replaced == 1_774_464 and len(sparo.blocks) == 11
    assert sum(p.numel() for p in sparo.sparo.parameters()) == 1_585_216
    assert sparo.config.out_width == 4096


def test_decayed_parameters_are_the_official_ones():
    objective = DinoObjective(config(SPARO))
    undecayed = set(objective.param_groups().no_decay)
    student = [n for n, _ in objective.student.named_parameters()]
    assert {n for n in student if f"student.{n}" not in undecayed} >= {
        "backbone.cls_token",
        "backbone.pos_embed",
        "backbone.patch_embed.proj.weight",
        "backbone.sparo.q_emb",
        "head.last_layer.weight_v",
    }
    assert all(f"student.{n}" in undecayed for n in student if "norm" in n or n.endswith("bias"))
    kept = DinoObjective(config(SPARO, decay_queries=False, clip_queries=False))
    assert (
        "student.backbone.sparo.q_emb" in kept.param_groups().no_decay
        and "student.backbone.sparo.q_emb" in kept.param_groups().unclipped
    )


def test_the_last_block_for_cls_alone_is_exact():
    torch.manual_seed(0)
    model = Vit(config().model).double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    drop = torch.randint(0, DROP_RANGE, (3, 6))
    encoding, _ = model.with_patches(x, drop)
    assert torch.allclose(model(x, drop), encoding, rtol=1e-12, atol=1e-13)


def test_every_option_of_sparo_changes_the_encoding():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    base = Vit(config(SPARO).model)
    for change in ({"norm_first": False}, {"attend_cls": False}, {"normalize": True}):
        other = Vit(config({**SPARO, **change}).model)
        other.load_state_dict(base.state_dict())
        assert not torch.allclose(other(x), base(x))
    flat = other(x).unflatten(1, (6, 8))
    assert torch.allclose(flat.norm(dim=-1), torch.full((2, 6), 6**-0.5), atol=1e-6)


def test_probe_features_and_attention_are_the_official_ones():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    plain = Vit(config().model)
    layers = plain.intermediate(x, 2)
    assert torch.equal(plain.probe_features(x, 2), torch.cat([t[:, 0] for t in layers], dim=-1))
    pooled = plain.probe_features(x, 1, avgpool=True)
    assert torch.equal(pooled, torch.cat([layers[-1][:, 0], layers[-1][:, 1:].mean(1)], dim=-1))
    assert torch.allclose(plain(x), layers[-1][:, 0], atol=1e-6)
    attention = plain.last_attention(x)
    assert attention.shape == (2, 2, 17, 17) and torch.allclose(attention.sum(-1), torch.ones(2, 2, 17), atol=1e-5)
    sparo = Vit(config(SPARO).model)
    found = sparo.probe_features(x, 4)
    assert found.shape == (2, 2 * 24 + 48) and torch.allclose(found[:, 48:], sparo(x), atol=1e-6)
    assert sparo.slots(x, need_attention=True).attention.shape == (2, 6, 17)
    small = Vit(VitConfig.model_validate({"arch": "vit_small", "readout": {"kind": "sparo"}}))
    assert small.probe_features(torch.zeros(1, 3, 224, 224)).shape == (1, 5248)


class Told(nn.Module):
    """Replaces a block, and records the scales of its branches."""

    def forward(self, x, scale, cls_only, rotary):
        self.scale = scale
        return x


def test_drop_path_drops_whole_samples_at_the_official_rates():
    model = Vit(config().model.model_copy(update={"drop_path": 0.5}))
    assert torch.allclose(Vit(model.config).drop_rates, torch.tensor([0, 0, 0.25, 0.25, 0.5, 0.5]))
    x = torch.randn(1, 3, 32, 32)
    kept, dropped = torch.full((1, 6), DROP_RANGE - 1), torch.zeros(1, 6)
    assert not torch.allclose(model(x, kept), model(x))  # kept branches are scaled up
    assert not torch.allclose(model(x, dropped), model(x, kept))
    numbers = torch.randint(0, DROP_RANGE, (4000, 6), generator=torch.Generator().manual_seed(0))
    model.blocks = nn.ModuleList(Told() for _ in range(3))
    model(torch.zeros(4000, 3, 8, 8), numbers)
    scales = torch.cat([block.scale for block in model.blocks], dim=1)
    assert torch.allclose((scales == 0).float().mean(0), model.drop_rates, atol=0.04)
    assert torch.allclose(scales.mean(0), torch.ones(6), atol=0.08)
