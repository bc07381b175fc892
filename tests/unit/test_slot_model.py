"""Slot models: paddings compared with flax's rule, decoders with their sums, the objective's losses and health checks, Tetrominoes."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.nn import functional as F

from object_centric.decoders.broadcast import Broadcast, BroadcastConfig, _Upsample, fourier_features
from object_centric.encoders.convnet import ConvNet, ConvNetConfig, ResNet34Config, grid, pad_same
from object_centric.encoders.frozen import FrozenConfig
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.objectives.collapse import SlotCollapseConfig, fixity
from object_centric.objectives.set_prediction import SetPredictionConfig
from object_centric.objectives.slot_autoencoder import (
    SlotAutoencoder,
    SlotAutoencoderConfig,
    SlotModel,
    SlotModelConfig,
)
from object_centric.objectives.slot_tower import SlotTower, SlotTowerConfig
from object_centric.tasks.mask_task import transform_mask
from object_centric.tasks.slot_encoder import slot_encoder
from sparo_data.synthetic.tetrominoes import SIDE, TetrominoesConfig, make_tetrominoes, orientations, render_image
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.rng import generator

SMALL = {
    "image_size": 16,
    "encoder": {"channels": (8, 8), "strides": (1, 2), "kernel": 5},
    "features": 12,
    "grouping": {"preset": "isa", "slots": 3, "width": 12, "mlp_width": 16},
    "decoder": {"kind": "mlp", "hidden": (16,)},
}


PADS = [
    (16, 5, 1, (2, 2)),
    (16, 5, 2, (1, 2)),
    (15, 5, 2, (2, 2)),
    (16, 3, 2, (0, 1)),
    (16, 7, 2, (2, 3)),
    (4, 1, 2, (0, 0)),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "pads"), PADS)
def test_padding_is_same_as_flax_has_it(size, kernel, stride, pads):
    x = torch.arange(float(size)).expand(1, 1, size, size)
    padded = pad_same(x, kernel, stride)
    assert padded.shape[-1] == size + sum(pads) and padded[0, 0, pads[0], pads[0]] == x[0, 0, 0, 0]
    assert F.conv2d(padded, torch.ones(1, 1, kernel, kernel), stride=stride).shape[-1] == -(-size // stride)


@pytest.mark.parametrize("kernel", [3, 4, 5])
def test_a_transposed_convolution_is_the_gradient_of_the_same_one(kernel):
    up = _Upsample(3, 2, kernel).double()
    small = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    large = torch.randn(1, 2, 12, 12, dtype=torch.float64, requires_grad=True)
    down = F.conv2d(pad_same(large, kernel, 2), up.weight, stride=2)
    assert up.bias is not None
    (expected,) = torch.autograd.grad((down * small).sum(), large)
    assert torch.allclose(up(small) - up.bias[:, None, None], expected)


def test_torchs_output_padding_shifts_the_filter_by_one_pixel():
    flax, idiom = _Upsample(3, 2, 5).double(), _Upsample(3, 2, 5, "torch").double()
    idiom.load_state_dict(flax.state_dict())
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    expected = F.conv_transpose2d(
        x, flax.weight, flax.bias, stride=2, padding=2, output_padding=1
    )  # as in PSB and OCLF
    assert torch.allclose(idiom(x), expected)
    assert torch.allclose(idiom(x)[..., :-1, :-1], flax(x)[..., 1:, 1:]) and not torch.allclose(idiom(x), flax(x))


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "mlp", "hidden": (8, 8)},
        {"kind": "cnn", "channels": 8, "num_upsample": 2, "convs": 1},
        {"kind": "cnn", "channels": 8, "num_upsample": 2, "convs": 0, "upsample_output": True},
    ],
)
def test_an_image_is_the_sum_over_its_slots(kind):
    config = BroadcastConfig(**kind)
    decoder = Broadcast(config, 6, 16)
    slots, places = torch.randn(2, 3, 6), torch.randn(2, 3, decoder.side**2, 2)
    whole = decoder(slots, places)
    assert (
        whole.image.shape == (2, 3, 16, 16)
        and whole.slot_images.shape == (2, 3, 3, 16, 16)
        and whole.masks.shape == (2, 3, 16, 16)
    )
    assert torch.allclose(whole.masks.sum(1), torch.ones(2, 16, 16), atol=1e-6)
    assert torch.allclose(whole.image, (whole.slot_images * whole.masks[:, :, None]).sum(1), atol=1e-6)
    order = torch.tensor([2, 0, 1])
    turned = decoder(slots[:, order], places[:, order])
    assert torch.allclose(turned.image, whole.image, atol=1e-5) and torch.allclose(
        turned.masks, whole.masks[:, order], atol=1e-6
    )
    same = grid(decoder.side)
    assert torch.equal(decoder(slots, same).image, decoder(slots, same.expand(2, 3, -1, -1)).image)


@pytest.mark.parametrize("size", [63, 64, 128])
def test_symmetric_padding_is_torchs_own_as_in_steve(size):
    config = ConvNetConfig(channels=[4, 6], strides=[2, 1], last_relu=False, padding="symmetric")
    module, images = config.build().double(), torch.randn(2, 3, size, size, dtype=torch.float64)
    first, second = module.layers
    x = F.relu(F.conv2d(images, first.weight, first.bias, 2, 2))
    x = F.conv2d(x, second.weight, second.bias, 1, 2)
    torch.testing.assert_close(module(images), x.permute(0, 2, 3, 1))
    assert x.shape[-1] == config.side(size)
    with pytest.raises(ValueError, match=r"requires an odd kernel, got kernel=4\. Use padding: same\."):
        ConvNetConfig(kernel=4, padding="symmetric")


def test_the_position_grid_is_row_major_from_edge_to_edge():
    places = grid(3)
    assert places[0].tolist() == [-1, -1] and places[1].tolist() == [-1, 0] and places[-1].tolist() == [1, 1]


@pytest.mark.parametrize("frame", [None, {"scales": False}, {"scales": True}])
def test_models_of_every_kind_learn(frame):
    torch.manual_seed(0)
    config = SlotAutoencoderConfig.model_validate({"model": {**SMALL, "frame": frame}})
    objective = SlotAutoencoder(config)
    batch = {
        "image": torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8),
        "noise": torch.randn(4, *config.model.noise),
    }
    optimizer = torch.optim.Adam(objective.parameters(), 3e-3)
    losses = []
    for step in range(40):
        found = objective(batch, Progress(step, 40, 0))
        optimizer.zero_grad()
        found.total.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in objective.parameters())
        optimizer.step()
        losses.append(float(found.total.detach()))
    assert losses[-1] < 0.9 * losses[0]
    summed = SlotAutoencoder(config.model_copy(update={"loss": "sum"}))
    summed.load_state_dict(objective.state_dict())
    mean, total = objective(batch, Progress(0, 1, 0)), summed(batch, Progress(0, 1, 0))
    assert float(total.total.detach()) == pytest.approx(float(mean.total.detach()) * 3 * 16 * 16, rel=1e-4)
    assert (
        set(mean.metrics) == {"mse", "slots_used", "mask_sharpness", "mask_fixity"}
        and not mean.metrics["mse"].requires_grad
    )


@pytest.mark.parametrize("frame", [None, {"scales": True}])
@pytest.mark.parametrize("decoder", [SMALL["decoder"], {"kind": "cnn", "channels": 4}])
def test_slot_models_run_in_fp64_and_agree_with_fp32(frame, decoder):
    torch.manual_seed(0)
    config = SlotModelConfig.model_validate({**SMALL, "frame": frame, "decoder": decoder})
    model, images, noise = SlotModel(config), torch.rand(2, 3, 16, 16), torch.randn(2, *config.noise)
    single = model(images, noise)
    double = model.double()(images.double(), noise.double())
    assert double.slots.dtype == torch.float64
    torch.testing.assert_close(double.slots.float(), single.slots, rtol=1e-3, atol=1e-4)


def test_positions_are_initialised_as_in_their_library():
    def position(scheme):
        torch.manual_seed(0)
        config = {"encoder": {"channels": [512], "strides": [1]}, "position_init": scheme}
        layer = SlotTower(SlotTowerConfig.model_validate(config)).position
        return layer.weight, layer.bias

    weight, bias = position("lecun")  # two signed coordinates: standard deviation sqrt(1 / 2)
    assert torch.equal(weight[:, :2], -weight[:, 2:]) and not bias.any()
    assert weight[:, :2].std().item() == pytest.approx(0.5**0.5, rel=0.06)
    weight, bias = position("glorot")
    assert weight.abs().max() <= (6 / (4 + 512)) ** 0.5 and not bias.any()
    assert position("torch")[1].any()


def test_sa_id_freezes_what_its_gradient_does_not_reach():
    config = SlotAutoencoderConfig.model_validate(
        {"model": {**SMALL, "grouping": {"preset": "sa_id", "slots": 3, "width": 12}}}
    )
    frozen = {name for name, p in SlotAutoencoder(config).named_parameters() if not p.requires_grad}
    assert {name.rpartition(".")[2] for name in frozen} == {"mu", "log_sigma"}


def test_an_encoding_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    objective = SlotAutoencoder(SlotAutoencoderConfig.model_validate({"model": {**SMALL, "frame": {}}, "signed": True}))
    encoder = slot_encoder(objective)
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(encoder.normalize(pixels), objective.pixels(pixels))
    slots, masks = encoder.encode(pixels), encoder.masks(pixels)
    assert slots.shape == (5, 36) and masks.shape == (5, 256) and set(masks.unique().tolist()) <= {0.0, 1.0, 2.0}
    assert torch.allclose(encoder.encode(pixels[3:4]), slots[3:4], atol=1e-5) and torch.equal(
        encoder.masks(pixels[3:4]), masks[3:4]
    )
    assert {"masks", "slots"} <= encoder.offers and encoder.width == 36
    shown = encoder.image_slots([p.permute(1, 2, 0).numpy() for p in pixels])
    assert shown.attention is not None
    assert shown.attention.shape == (5, 3, 256) and torch.allclose(shown.attention.sum(2), torch.ones(5, 3), atol=1e-5)


def test_collapses_are_reported_after_the_start():
    objective = SlotAutoencoder(SlotAutoencoderConfig())
    one, blurred, fine = ({"slots_used": u, "mask_sharpness": s} for u, s in ((1.0, 0.9), (5.0, 0.01), (3.0, 0.8)))
    assert objective.check_health(one) is None  # nothing has been learned yet
    objective._fraction_done = 0.5
    assert "one slot covers almost everything" in str(
        objective.check_health(one)
    ) and "all slots have equal masks" in str(objective.check_health(blurred))
    assert objective.check_health(fine) is None and objective.check_health({}) is None


BAD = {
    r"strides=\[1\]: needs one value per layer": {"encoder": {"channels": (8, 8), "strides": (1,)}},
    "cannot be halved that many times": {"decoder": {"kind": "cnn", "num_upsample": 5}},
    "grouping.heads=2": {"frame": {}, "grouping": {"preset": "isa", "heads": 2}},
    "grouping.renorm=entry": {"frame": {}, "grouping": {"preset": "isa", "renorm": "entry"}},
    "grouping.mlp_last=False": {"frame": {}, "grouping": {"preset": "isa", "mlp_last": False}},
    "target=features: encoder.kind=conv is trained": {"target": "features"},
    "decoder.kind=patch: learns its own positions": {
        "frame": {},
        "grouping": {"preset": "isa"},
        "decoder": {"kind": "patch"},
    },
    "did you mean 'resnet34'": {"encoder": {"kind": "resnet"}},
    "groups=32: does not divide root_width=16": {"encoder": {"kind": "resnet34", "root_width": 16}},
    "need mlp_width": {"frame": {}, "grouping": {"preset": "savi"}},
}


@pytest.mark.parametrize("told", BAD)
def test_parts_that_do_not_go_together_are_refused(told):
    with pytest.raises(ValueError, match=told):
        SlotModelConfig.model_validate({"image_size": 16, **BAD[told]})


def test_every_part_of_a_convnet_does_something():
    net = ConvNet(ConvNetConfig(channels=(4, 6), strides=(1, 2), kernel=3, last_relu=False))
    found = net(torch.randn(2, 3, 9, 9))
    assert found.shape == (2, 5, 5, 6) and (found < 0).any() and net.config.side(9) == 5
    assert SlotModel(SlotModelConfig.model_validate(SMALL))(
        torch.randn(1, 3, 16, 16), torch.randn(1, 3, 12)
    ).attention.shape == (1, 3, 8, 8)


def test_tetrominoes_have_four_cells_and_are_reproducible(tmp_path):
    assert len(orientations()) == 17 and all(cells.sum() == 4 for cells in orientations())
    for number in range(200):
        image, mask = render_image(generator(0, "t", number), left_half=number % 2 == 0)
        assert image.shape == (SIDE, SIDE, 3) and sorted(set(mask.flat)) == [0, 1, 2, 3]
        for piece in (1, 2, 3):
            there = mask == piece
            assert there.sum() == 100 and len(np.unique(image[there], axis=0)) == 1 and image[there].max() == 255
        assert not image[mask == 0].any() and (number % 2 or not mask[:, (SIDE + 1) // 2 :].any())
    for folder in ("a", "b"):
        make_tetrominoes(tmp_path / folder, TetrominoesConfig(train=9, test=3, seed=5))
    files = [sorted(p.relative_to(tmp_path / f) for p in (tmp_path / f).rglob("*.tar")) for f in ("a", "b")]
    assert files[0] == files[1] and len(files[0]) == 2
    assert all((tmp_path / "a" / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in files[0])
    with pytest.raises(DataError, match="contains a set with other options"):
        make_tetrominoes(tmp_path / "a", TetrominoesConfig(train=9, test=3, seed=6))


def test_masks_are_cropped_and_scaled_like_images():
    encoder = slot_encoder(SlotAutoencoder(SlotAutoencoderConfig.model_validate({"model": SMALL})))
    for height, width in ((33, 47), (60, 21), (16, 16), (40, 40)):
        mask = np.zeros((height, width), np.uint8)
        mask[height // 4 : height // 2 + 1, width // 3 : width // 2 + 3] = 200
        image = encoder.transform(Image.fromarray(np.repeat(mask[..., None], 3, axis=2)))
        seen = transform_mask(encoder, mask)
        assert seen.shape == (16, 16) and set(seen.flat) == {0, 200}
        middle = (image[..., 0] < 20) | (image[..., 0] > 180)  # edges are blended in the image, and nearest in the mask
        assert ((image[..., 0] > 100) == (seen == 200))[middle].mean() > 0.97


@pytest.mark.parametrize("wrong", [(8, 8, 9), (7, 7, 8)], ids=["width", "side"])
def test_encoders_that_return_other_shapes_than_they_declare_are_named(wrong):
    config = SlotAutoencoderConfig.model_validate({"model": SMALL})
    tower = SlotAutoencoder(config).model.tower
    del tower.encoder
    tower.encoder = lambda images: torch.zeros(len(images), *wrong)
    images, noise = torch.zeros(2, 3, 16, 16), torch.zeros(2, *config.model.noise)
    with pytest.raises(
        ConfigError, match=r"objective.model.encoder.kind=conv: expected features \(b, .*Correct the encoder"
    ):
        tower(images, noise)


def test_nan_tokens_are_refused_by_slots():
    torch.manual_seed(0)
    objective = SlotAutoencoder(SlotAutoencoderConfig.model_validate({"model": SMALL}))
    encoder = slot_encoder(objective)
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert encoder.masks(pixels).isfinite().all()
    with torch.no_grad():
        objective.model.decoder.layers[0].weight[0, 0] = torch.nan
    assert encoder.masks(pixels).isnan().all()  # the feature store refuses NaN


def test_an_mlp_that_is_a_multiple_of_the_slots_width_follows_it():
    assert SlotAttentionConfig(preset="oclf", width=128).mlp_width == 512
    assert SlotAttentionConfig(preset="oclf", width=128, mlp_width=7).mlp_width == 7


def vit_file(folder):
    """Write a small ViT as timm saves it."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    torch.save(model.state_dict(), folder / "vit.pth")
    return folder / "vit.pth"


def test_frozen_features_are_timms_and_are_not_trained(tmp_path):
    encoder = {"kind": "frozen", "checkpoint": f"timm:vit_tiny_patch16_224@{vit_file(tmp_path)}", "width": 192}
    model = {
        "image_size": 224,
        "encoder": encoder,
        "features": 16,
        "grouping": {"preset": "oclf", "slots": 3, "width": 16},
        "decoder": {"kind": "patch", "hidden": (32,)},
        "target": "features",
    }
    objective = SlotAutoencoder(SlotAutoencoderConfig.model_validate({"model": model}))
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=5).eval()
    vit.load_state_dict(torch.load(tmp_path / "vit.pth"))
    with torch.no_grad():
        expected = vit.forward_features((images / 255 - 0.5) / 0.5)[:, 1:]  # type: ignore[operator]
    objective.train()
    noise = torch.randn(2, *objective.config.model.noise)
    loss = objective({"image": images, "noise": noise}, Progress(0, 10, 0))
    found = objective.model(images / 255, noise)
    assert torch.allclose(found.target.flatten(2).transpose(1, 2), expected, atol=1e-5)
    assert loss.total.item() == pytest.approx((found.decoded.image - found.target).square().mean().item(), rel=1e-5)
    loss.total.backward()
    assert all((p.grad is None) == ("tower.encoder" in n) for n, p in objective.named_parameters())
    shown = slot_encoder(objective)
    assert "cache" not in shown.architecture and '"kind":"frozen"' in shown.architecture
    assert shown.masks(images).shape == (2, 224 * 224) and objective.model.decoder.pos_embed.shape == (196, 16)
    for change, told in (
        ({"width": 384}, "gives 196 tokens of width 192 at 224 pixels"),
        ({"patch": 8}, "mean 784 tokens of width 192"),
    ):
        wrong = SlotAutoencoderConfig.model_validate({"model": {**model, "encoder": {**encoder, **change}}})
        with pytest.raises(ConfigError, match=told):
            SlotAutoencoder(wrong)({"image": images, "noise": noise}, Progress(0, 10, 0))
    # For another size, positions are interpolated once; timm's own models of any size do it in every step.
    small = SlotAutoencoder(SlotAutoencoderConfig.model_validate({"model": {**model, "image_size": 128}}))
    dynamic = timm.create_model("vit_tiny_patch16_224", num_classes=5, dynamic_img_size=True).eval()
    dynamic.load_state_dict(torch.load(tmp_path / "vit.pth"))
    with torch.no_grad():
        expected = dynamic.forward_features((images[..., :128, :128] / 255 - 0.5) / 0.5)[:, 1:]  # type: ignore[operator]
    found = small.model(images[..., :128, :128] / 255, torch.randn(2, *small.config.model.noise))
    assert torch.allclose(found.target.flatten(2).transpose(1, 2), expected, atol=1e-5)
    assert not any(p.requires_grad for n, p in small.named_parameters() if "tower.encoder" in n)
    tower = {k: v for k, v in model.items() if k not in ("decoder", "target")}
    with pytest.raises(ValueError, match="Set signed: false"):
        SetPredictionConfig.model_validate({"model": tower})
    with pytest.raises(ConfigError, match="has no patch tokens"):
        FrozenConfig(checkpoint="pixels:32").build()


def test_cached_features_are_keyed_by_image_content(tmp_path, monkeypatch):
    config = FrozenConfig(
        checkpoint=f"timm:vit_tiny_patch16_224@{vit_file(tmp_path)}", width=192, cache=str(tmp_path / "f")
    )
    images = torch.randint(0, 256, (4, 3, 224, 224), dtype=torch.uint8) / 255
    plain = config.model_copy(update={"cache": None}).build()
    module, calls = config.build(), []
    whole = module._features
    monkeypatch.setattr(module, "_features", lambda x: calls.append(len(x)) or whole(x))
    first = module(images[:3])
    assert torch.equal(first, plain(images[:3])) and calls == [3]
    assert torch.equal(module(images[[2, 0]]), first[[2, 0]]) and calls == [3]  # no forward pass
    mixed = module(images[[1, 3]])  # one of them is new: both are computed, and the old one is unchanged
    assert (
        calls == [3, 2]
        and torch.equal(mixed[0], first[1])
        and torch.allclose(mixed[1], plain(images[3:])[0], atol=1e-5)
    )
    files = sorted((tmp_path / "f").rglob("*.npy"))
    assert len(files) == 4 and not list((tmp_path / "f").rglob("*.tmp"))
    files[0].write_bytes(files[0].read_bytes()[:500])  # truncated: computed again
    again = config.build()
    assert torch.allclose(again(images[:3]), first, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # another precision has other features
        rough = again(images[:3])
    assert not torch.equal(rough, first) and len(list((tmp_path / "f").iterdir())) == 2
    with torch.no_grad():
        again.model.norm.weight[0] = torch.nan  # type: ignore[union-attr, index]
    kept = len(list((tmp_path / "f").rglob("*.npy")))
    assert again(1 - images).isnan().any() and len(list((tmp_path / "f").rglob("*.npy"))) == kept
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"encoder\.cache: .*file.* cannot be created"):
        config.model_copy(update={"cache": str(tmp_path / "file")}).build()(images)


def test_the_resnet_is_the_papers():
    torch.manual_seed(0)
    net = ResNet34Config(root_width=32).build()
    x = torch.randn(2, 3, 33, 33)
    found = net(x)
    assert found.shape == (2, 5, 5, 256) and ResNet34Config(root_width=32).side(33) == 5
    assert sum(isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3) for m in net.modules()) == 33
    assert ResNet34Config().width == 512 and ResNet34Config().side(128) == 16
    root = net.norm(net.stem(pad_same(x, 3, 1)))
    assert (root < 0).any()  # no ReLU follows
    y = F.relu(root)  # the first block adds nothing yet, because its last norm is initialised with zero
    assert torch.allclose(net.blocks[0](root), y, atol=1e-6)
    model = SlotModelConfig.model_validate({"image_size": 32, "encoder": {"kind": "resnet34", "root_width": 32}})
    assert SlotModel(model)(torch.randn(1, 3, 32, 32), torch.randn(1, *model.noise)).attention.shape == (1, 7, 4, 4)


def test_masks_that_do_not_depend_on_the_image_are_reported():
    torch.manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    cells = torch.stack([(rows // 6 * 2 + columns // 4 + turn) % 5 for turn in range(6)])  # other slots, equal borders
    assert fixity(cells) == pytest.approx(1, abs=1e-5)
    assert abs(fixity(torch.randint(0, 4, (64, 12, 12)))) < 0.05
    moved = torch.stack(
        [((rows - a).abs() < 3) & ((columns - b).abs() < 3) for a, b in torch.randint(2, 10, (64, 2)).tolist()]
    )
    assert fixity(moved.long()) < 0.3
    assert fixity(cells[:1]) == 0 and fixity(torch.zeros(4, 3, 3)) == 0
    found = SlotCollapseConfig().check_health({"slots_used": 4.0, "mask_sharpness": 0.9, "mask_fixity": 0.93}, 0.5)
    assert found is not None and "masks hardly depend on the image (mask_fixity 0.93)" in found
    assert (
        SlotCollapseConfig().check_health({"slots_used": 4.0, "mask_sharpness": 0.9, "mask_fixity": 0.93}, 0.1) is None
    )


def test_a_vit_is_trained_with_the_slots():
    encoder = {
        "kind": "vit",
        "width": 16,
        "blocks": 1,
        "heads": 2,
        "patch": 4,
        "pretrain_grid_size": 3,
        "layer_scale": True,
    }
    objective = SlotAutoencoder(SlotAutoencoderConfig(model=SlotModelConfig(**{**SMALL, "encoder": encoder})))
    noise = torch.randn(2, *objective.config.model.noise)
    images = torch.randint(
        0, 256, (2, 3, 16, 16), dtype=torch.uint8
    )  # four patches per side, positions learned for three
    objective({"image": images, "noise": noise}, Progress(0, 10, 0)).total.backward()
    grown = {n: p.grad for n, p in objective.named_parameters() if "encoder.vit" in n}
    assert all(g is not None for g in grown.values()) and "model.tower.encoder.vit.pos_embed" in grown
    with pytest.raises(ValueError, match=r"encoder.patch=4: does not divide image_size=18"):
        SlotModelConfig(**{**SMALL, "encoder": encoder, "image_size": 18})
    with pytest.raises(ValueError, match="fourier_bands=8: applies to coordinates"):
        BroadcastConfig(kind="patch", fourier_bands=8)
    with pytest.raises(ValueError, match="upsample_output: applies to kind=cnn with num_upsample > 0 and convs=0"):
        BroadcastConfig(kind="cnn", upsample_output=True)
    with pytest.raises(ValueError, match="and normalizes them itself"):
        SlotAutoencoderConfig(signed=True, model=SlotModelConfig(**{**SMALL, "encoder": encoder}))


def test_fourier_features_are_sines_of_positions():
    places = torch.randn(5, 2, dtype=torch.float64)
    found = fourier_features(places, 3)
    assert (
        found.shape == (5, 14)
        and torch.equal(found[:, :2], places)
        and torch.equal(fourier_features(places, 0), places)
    )
    for octave in range(3):
        assert torch.allclose(found[:, 2 + 2 * octave : 4 + 2 * octave], (places * torch.pi * 2**octave).sin())
        assert torch.allclose(found[:, 8 + 2 * octave : 10 + 2 * octave], (places * torch.pi * 2**octave).cos())
    decoder = Broadcast(BroadcastConfig(kind="mlp", hidden=(8,), fourier_bands=2), 6, 4)
    assert decoder.position.weight.shape == (6, 10)
