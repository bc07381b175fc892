"""Towers, parameter counts, exact cutting of captions, groups of weight decay, the loss."""

import open_clip
import pytest
import torch
from torch.nn import functional as F

from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError
from sparo_train.engine.optim import AdamWConfig, build_optimizer, learning_rate, set_rates
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig

TINY = {
    "vision": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 3, "head_width": 16},
    "text": {"context_length": 16, "width": 32, "heads": 2, "layers": 3},
    "embed_dim": 24,
}
READOUTS = {
    "token": {"kind": "token"},
    "gap": {"kind": "gap"},
    "sparo": {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8},
    "sparo-keep": {
        "kind": "sparo",
        "slots": 4,
        "slot_width": 8,
        "head_width": 8,
        "grp_size": 2,
        "share_kv": False,
        "replace_last_block": False,
    },
    "sparo-weighted": {
        "kind": "sparo",
        "slots": 4,
        "slot_width": 8,
        "head_width": 8,
        "share_queries": True,
        "weighting": "sqrtsoftmax",
        "representation": "sem",
    },
    "gap-patches": {"kind": "gap", "patches_only": True},
    "coca": {"kind": "coca", "queries": 3, "heads": 4, "text": True},
    "map": {"kind": "map", "head_width": 8, "text": True},
    "map-image": {"kind": "map", "head_width": 16, "attend_cls": False},
    "attpool": {"kind": "attpool", "slots": 4, "slot_width": 8},
    "attpool-slots": {
        "kind": "attpool",
        "slots": 4,
        "slot_width": 8,
        "cross_attention": "separate_head",
        "slot_layer_norm": True,
        "slot_projection": True,
        "replace_last_block": True,
    },
    "ep": {"kind": "ep", "slots": 4, "slot_width": 8},
    "slot_attention": {"kind": "slot_attention", "slots": 4, "slot_width": 8, "mlp_width": 16},
    "linear_bottleneck": {"kind": "linear_bottleneck", "bottleneck_dim": 6, "width": 20},
    "flair": {"kind": "flair", "heads": 4},
    "fdt": {"kind": "fdt", "codes": 40, "width": 12, "temperature": 0.3},
}


def tiny(readout: str, **changes) -> Clip:
    torch.manual_seed(0)
    return Clip(ClipConfig.model_validate({**TINY, "readout": READOUTS[readout], **changes})).eval()


def tokens(*lengths: int, width: int = 16) -> torch.Tensor:
    text = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in zip(text, lengths, strict=True):
        row[0], row[1:length] = 49406, torch.arange(300, 300 + length - 1)
        row[length] = 49407
    return text


@pytest.mark.parametrize(
    ("backbone", "readout", "count"),
    [
        ("ViT-B-32", {"kind": "sparo"}, 145_649_281),
        ("ViT-B-16", {"kind": "sparo"}, 143_992_705),
        ("ViT-B-32", {"kind": "sparo", "slots": 128}, 150_908_545),
        ("ViT-B-32", {"kind": "sparo", "slots": 128, "replace_last_block": False}, 161_148_801),
        ("ViT-B-32", {"kind": "token"}, 151_277_313),
        ("ViT-B-32", {"kind": "gap"}, 151_277_313),
        ("ViT-B-32", {"kind": "linear_bottleneck", "bottleneck_dim": 512, "width": 4096}, 155_479_809),
        ("ViT-B-32", {"kind": "fdt"}, 160_194_305),
        ("ViT-B-16", {"kind": "token"}, 149_620_737),
    ],
)
def test_parameter_counts_equal_the_references(backbone, readout, count):
    with torch.device("meta"):
        model = Clip(ClipConfig.model_validate({"backbone": backbone, "readout": readout}))
    assert sum(p.numel() for p in model.parameters()) == count


def test_plain_clip_equals_open_clips_own():
    reference = open_clip.model.CLIP(24, TINY["vision"], TINY["text"]).eval()
    model = tiny("token")
    state = {(n if n.startswith(("visual.", "logit")) else f"text.{n}"): t for n, t in reference.state_dict().items()}
    model.load_state_dict(state)
    image, text = torch.randn(2, 3, 32, 32), tokens(4, 9)
    torch.testing.assert_close(model.encode_image(image, True), reference.encode_image(image, True))
    torch.testing.assert_close(model.encode_text(text, True), reference.encode_text(text, True))


def test_gap_pools_all_tokens_before_ln_post():
    model = tiny("gap")
    image = torch.randn(2, 3, 32, 32)
    v = model.visual
    expected = v.ln_post(v.transformer(v._embeds(image)).mean(dim=1)) @ v.proj
    torch.testing.assert_close(model.encode_image(image), expected)


@pytest.mark.parametrize("readout", ["sparo", "sparo-keep"])
def test_sparo_encodings_have_slots_of_equal_norm(readout):
    model = tiny(readout)
    blocks = 3 if readout == "sparo-keep" else 2
    assert len(model.visual.transformer.resblocks) == len(model.text.transformer.resblocks) == blocks
    for features in (model.encode_image(torch.randn(2, 3, 32, 32)), model.encode_text(tokens(4, 9))):
        slots = features.view(2, 4, 8)
        torch.testing.assert_close(slots.norm(dim=-1), torch.full((2, 4), 0.5))


@pytest.mark.parametrize("readout", READOUTS)
def test_cutting_after_the_longest_caption_is_exact(readout):
    model, text = tiny(readout), tokens(4, 9)
    torch.testing.assert_close(model.encode_text(text[:, :10]), model.encode_text(text), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("readout", READOUTS)
def test_tokens_after_eos_have_no_effect(readout):
    model, text = tiny(readout), tokens(4, 9)
    other = text.clone()
    other[0, 6:] = 77
    torch.testing.assert_close(model.encode_text(text), model.encode_text(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("backbone", ["ViT-Tiny-8", "ViT-B-32"])
def test_decay_groups_are_the_references(readout, backbone):
    with torch.device("meta"):
        objective = ClipObjective(
            ClipObjectiveConfig.model_validate(
                {
                    "model": {"backbone": backbone, "readout": READOUTS[readout], "init_logit_bias": -10.0},
                    "loss": {"kind": "sigmoid"},
                }
            )
        )
    undecayed = set(objective.param_groups().no_decay)
    for name, p in objective.named_parameters():
        reference = p.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
        assert (name in undecayed) == reference, name


def test_open_clip4_policy_spares_position_embeddings():
    config = ClipObjectiveConfig(model=ClipConfig.model_validate({**TINY}), decay_policy="open_clip4")
    assert {"model.visual.positional_embedding", "model.text.positional_embedding"} <= set(
        ClipObjective(config).param_groups().no_decay
    )


def test_adamw_groups_hold_every_parameter_once():
    objective = ClipObjective(
        ClipObjectiveConfig(model=ClipConfig.model_validate({**TINY, "readout": READOUTS["sparo"]}))
    )
    optimizer = build_optimizer(AdamWConfig(weight_decay=0.5), objective)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.5]
    held = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in objective.parameters())


def test_loss_equals_open_clips_and_clamps_the_scale():
    torch.manual_seed(0)
    objective = ClipObjective(
        ClipObjectiveConfig(model=ClipConfig.model_validate({**TINY, "readout": READOUTS["sparo"]}))
    )
    batch = {"image": torch.randint(0, 255, (4, 3, 32, 32), dtype=torch.uint8), "text": tokens(3, 5, 7, 9)}
    embedded = objective.embed(batch)
    expected = open_clip.loss.ClipLoss()(embedded.image, embedded.text, objective.model.logit_scale.exp())
    loss = objective.loss(embedded, objective.loss_parameters(), Progress(0, 1, 0))
    torch.testing.assert_close(loss.total, expected)
    with torch.no_grad():
        objective.model.logit_scale.fill_(9.0)
    objective.after_step(Progress(0, 1, 0), torch.tensor(True))
    assert objective.model.logit_scale.exp().item() == pytest.approx(100)


def test_pixels_are_torchvisions_to_tensor_and_normalize():
    from torchvision.transforms import Compose, Normalize, ToTensor

    objective = ClipObjective(ClipObjectiveConfig(model=ClipConfig.model_validate(TINY)))
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    transform = Compose([ToTensor(), Normalize(objective.config.mean, objective.config.std)])
    assert torch.equal(objective.pixels(image[None])[0], transform(image.permute(1, 2, 0).numpy()))


def test_learning_rate_is_open_clips():
    from types import SimpleNamespace

    from open_clip_train.scheduler import cosine_lr

    config = AdamWConfig(lr=3e-4, warmup_steps=7)
    reference = cosine_lr(SimpleNamespace(param_groups=[{}]), 3e-4, 7, 50)
    for step in range(50):
        assert learning_rate(config, step, 50) == pytest.approx(reference(step), rel=1e-12)


def test_half_life_counts_from_the_start_or_after_warm_up():
    told = {"lr": 4e-4, "warmup_steps": 10, "schedule": "half_life", "half_life": 100}
    locatello, dinosaur = AdamWConfig(**told), AdamWConfig(**told, half_life_start="warmup")
    for step in (0, 4, 9, 10, 110, 1010):  # as in Locatello's TF code and OCLF's schedulers
        warm = min((step + 1) / 10, 1)
        assert learning_rate(locatello, step, 2000) == pytest.approx(4e-4 * warm * 0.5 ** (step / 100))
        assert learning_rate(dinosaur, step, 2000) == pytest.approx(4e-4 * warm * 0.5 ** (max(step - 10, 0) / 100))
    assert learning_rate(AdamWConfig(**told, min_lr=1e-4), 1010, 2000) == 1e-4
    assert learning_rate(locatello, 4, 2000, warmup=False) == pytest.approx(4e-4 * 0.5**0.04)


def test_rates_cool_down_at_the_end_or_from_the_start():
    wsd = AdamWConfig(lr=1e-3, schedule="wsd", warmup_steps=2, cooldown_steps=4, min_lr=1e-4)
    found = [learning_rate(wsd, step, 10) for step in range(10)]
    assert found == pytest.approx([5e-4, *[1e-3] * 6, 7.75e-4, 5.5e-4, 3.25e-4])
    alone = AdamWConfig(lr=1e-3, schedule="cooldown", min_lr=1e-4)
    # A branch of four steps from the constant part has the same rates.
    assert [learning_rate(alone, step, 4) for step in range(4)] == found[6:]
    root = AdamWConfig(lr=1.0, schedule="cooldown", cooldown_shape="sqrt")
    assert [learning_rate(root, step, 4) for step in range(4)] == pytest.approx([1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])
    for wrong in ({"schedule": "wsd"}, {"cooldown_steps": 3}, {"schedule": "cooldown", "warmup_steps": 5}):
        with pytest.raises(ValueError, match="schedule="):
            AdamWConfig(**wrong)


def test_unused_schedule_keys_are_reported():
    told = {"half_life": 9, "half_life_start": "warmup", "cooldown_shape": "sqrt", "min_lr": 1e-5, "clip_per": "tensor"}
    found = AdamWConfig(**told, schedule="constant", warmup_from_zero=True).unused_keys()
    last = ["warmup_from_zero", "clip_per"]
    assert [line.split("=")[0] for line in found] == [f"optim.{key}" for key in [*list(told)[:4], *last]]
    assert found[0] == "optim.half_life=9: is not read; it belongs to schedule=half_life"
    halved = AdamWConfig(schedule="half_life", half_life=9, half_life_start="warmup", min_lr=1e-5)
    assert halved.unused_keys() == [] == AdamWConfig(**halved.model_dump()).unused_keys()
    cooled = AdamWConfig(schedule="cooldown", cooldown_shape="sqrt", clip_per="tensor", clip_grad_norm=1.0)
    assert cooled.unused_keys() == [] == AdamWConfig().unused_keys()


def test_groups_have_separate_rates_and_decay():
    objective = ClipObjective(
        ClipObjectiveConfig(model=ClipConfig.model_validate({**TINY, "readout": READOUTS["sparo"]}))
    )
    groups = (
        {"match": ("model.visual.*.weight",), "lr_factor": 0.1, "decay_factor": 0.5},
        {"match": ("model.visual.*", "*logit_scale"), "lr_factor": 3.0, "schedule": "constant"},
    )
    config = AdamWConfig(lr=1e-3, weight_decay=0.2, warmup_steps=4, groups=groups)
    optimizer = build_optimizer(config, objective)
    set_rates(optimizer, config, Progress(0, 100, 0))
    at = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    named = {name: at[id(p)] for name, p in objective.named_parameters()}
    assert len(named) == len(at)
    assert named["model.visual.conv1.weight"] == pytest.approx((0.25e-4, 0.1))  # the first group whose pattern matches
    assert named["model.visual.class_embedding"] == pytest.approx((3e-3, 0.0))
    assert named["model.logit_scale"] == pytest.approx((3e-3, 0.0))
    unwarmed = config.model_copy(update={"groups": (config.groups[1].model_copy(update={"schedule": "unwarmed"}),)})
    optimizer = build_optimizer(unwarmed, objective)
    set_rates(optimizer, unwarmed, Progress(2, 100, 0))
    assert {g["lr"] for g in optimizer.param_groups} == {3e-3, 1e-3 * 3 / 4}
    assert named["model.text.token_embedding.weight"] == pytest.approx((2.5e-4, 0.2))
    with pytest.raises(ConfigError, match=r"optim.groups.0.match=model.vision.\*: matches no trained parameter"):
        build_optimizer(AdamWConfig(groups=({"match": ("model.vision.*",)},)), objective)


def test_freezing_the_image_tower_leaves_the_last_groups():
    model = tiny("sparo")
    model.visual.lock(unlocked_groups=99)
    assert all(p.requires_grad for p in model.visual.parameters())
    model.visual.lock(unlocked_groups=1)
    trainable = {n.split(".")[0] for n, p in model.visual.named_parameters() if p.requires_grad}
    assert trainable == {"ln_post", "sparo"}
    model.text.lock(unlocked_layers=0)
    assert not any(p.requires_grad for p in model.text.parameters())


def test_similarities_do_not_depend_on_the_rest_of_the_batch():
    model = tiny("sparo")
    images = torch.randn(3, 3, 32, 32)
    alone = torch.cat([model.encode_image(i[None]) for i in images])
    torch.testing.assert_close(F.normalize(alone, dim=-1), model.encode_image(images), rtol=1e-5, atol=1e-6)
