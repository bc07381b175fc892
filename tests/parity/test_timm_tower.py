"""timm's vision transformers as CLIP's image tower: timm's tokens, our readouts, and export to and import from open_clip."""

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn

import sparo_train.openclip
from evals.encoders.loading import load_encoder
from evals.interop.initial_weights import load_initial_weights
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.clip_towers import layer_index
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.logs import logged
from tests.helpers.recipes import tiny_recipe

SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2}
SPARO = {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8, "replace_last_block": False}


def _config(name, size, readout, **vision):
    text = {"context_length": 16, "width": 32, "heads": 2, "layers": 2}
    vision = {"timm_model_name": name, "image_size": size, "timm_model_kwargs": SMALL, **vision}
    return ClipConfig.model_validate({"vision": vision, "text": text, "embed_dim": 24, "readout": readout})


@pytest.mark.parametrize(
    ("name", "size", "prefix"),
    [
        ("vit_small_patch16_224", 32, 1),
        ("vit_small_patch14_reg4_dinov2", 28, 5),
        ("vit_small_patch16_dinov3", 32, 5),
        ("vit_base_patch16_siglip_224", 32, 0),
        ("eva02_tiny_patch14_224", 28, 1),
        ("vit_base_patch16_clip_224", 32, 1),
    ],
)
def test_tokens_are_timms_own(name, size, prefix):
    torch.manual_seed(0)
    image = torch.randn(2, 3, size, size)
    model = Clip(_config(name, size, SPARO)).eval()
    tower, config = model.visual, model.config
    assert tower.prefix == prefix and config.vision.tokens == tower.tokens(image).shape[1] == prefix + 4
    assert (config.vision.width, config.vision.layers, config.vision.head_width) == (32, 3, 16)
    torch.testing.assert_close(tower.tokens(image), tower.trunk.forward_features(image))
    torch.testing.assert_close(tower(None, hidden=tower.hidden(image)), tower(image))
    seen = tower.slots(image, need_attention=True)
    assert seen.values.shape == (2, 4, 8) and seen.attention.shape == (2, 4, prefix + 4)
    without = Clip(_config(name, size, {**SPARO, "attend_cls": False})).eval().visual
    assert without.slots(image, need_attention=True).attention.shape == (2, 4, 4)
    replaced = Clip(_config(name, size, {**SPARO, "replace_last_block": True})).visual
    assert len(replaced.resblocks) == 2
    checkpointed = Clip(config).train()
    checkpointed.load_state_dict(model.state_dict())
    checkpointed.set_grad_checkpointing(True)
    for net in (model.train(), checkpointed):
        net.encode_image(image, True).square()[:, :5].sum().backward()
    for one, other in zip(model.visual.parameters(), checkpointed.visual.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_the_class_token_and_the_mean_are_read_as_timm_pools():
    torch.manual_seed(0)
    image = torch.randn(2, 3, 32, 32)
    for readout, pool in (("token", "token"), ("gap", "avg")):
        tower = Clip(_config("vit_small_patch16_224", 32, {"kind": readout})).eval().visual
        theirs = timm.create_model("vit_small_patch16_224", img_size=32, num_classes=0, global_pool=pool, **SMALL)
        if pool == "token":
            theirs.load_state_dict(tower.trunk.state_dict())
            expected = theirs.eval()(image)
        else:  # our mean includes the class token, as in the paper's code, and the norm follows
            expected = tower.trunk.norm(tower.hidden(image).mean(1))
        torch.testing.assert_close(tower(image), expected @ tower.proj)


def test_layer_ids_cover_embeddings_blocks_and_head():
    tower = Clip(_config("vit_small_patch14_reg4_dinov2", 28, SPARO, freeze="blocks")).visual
    layers = {name: layer_index(name, 3) for name, _ in tower.named_parameters()}
    assert {layers[f"trunk.{n}"] for n in ("cls_token", "pos_embed", "reg_token", "patch_embed.proj.weight")} == {0}
    assert layers["trunk.blocks.2.ls1.gamma"] == 3 and layers["trunk.norm.weight"] == 4
    trained = {name for name, p in tower.named_parameters() if p.requires_grad}
    assert trained == {name for name, layer in layers.items() if layer == 4} and "trunk.norm.bias" in trained


@pytest.mark.parametrize("readout", [{"kind": "token"}, SPARO])
def test_a_run_is_scored_exported_and_loaded_by_open_clip(shards, tmp_path, readout):
    tree = tiny_recipe(shards, tmp_path, steps=2)
    tree["optim"]["warmup_steps"] = 0
    model = tree["objective"]["model"]
    model["vision"] = {"timm_model_name": "vit_small_patch14_reg4_dinov2", "image_size": 28, "timm_model_kwargs": SMALL}
    model["readout"] = readout
    train(resolve(RunConfig, tree, "x"))
    encoder = load_encoder(tmp_path / "tiny")
    image = torch.randint(0, 255, (2, 3, 28, 28), dtype=torch.uint8)
    folder = sparo_train.openclip.export(
        encoder.model.config, encoder.model.state_dict(), tmp_path / "out", (0.5,) * 3, (0.5,) * 3
    )
    theirs, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    pixels = encoder.normalize(image)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval().encode_image(pixels, normalize=True), encoder.encode(image).clone())
    again = load_encoder(folder)
    assert again.model.config.vision == encoder.model.config.vision and again.prefix_tokens == 5
    assert encoder.tokens(image).shape == (2, 9, 32)


def test_frozen_blocks_drop_no_paths_while_they_train():
    for freeze in ("blocks", False):
        config = _config(
            "vit_small_patch16_224", 32, SPARO, freeze=freeze, timm_model_kwargs={**SMALL, "drop_path_rate": 0.9}
        )
        tower, image = Clip(config).train().visual, torch.randn(8, 3, 32, 32)
        assert torch.equal(tower.hidden(image), tower.hidden(image)) == bool(freeze)
        assert tower.sparo.training


def test_it_starts_from_a_timm_file_with_interpolated_positions(shards, tmp_path):
    torch.manual_seed(0)
    name = "vit_tiny_patch16_224"
    donor = timm.create_model(name, num_classes=10)
    save_file(donor.state_dict(), tmp_path / "donor.safetensors")
    tree = tiny_recipe(shards, tmp_path)
    model = tree["objective"]["model"]
    model["vision"] = {
        "timm_model_name": name,
        "image_size": 64,
        "init_from": f"timm:{name}@{tmp_path}/donor.safetensors",
    }
    tree["objective"] |= {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    model["readout"] = {**SPARO, "head_width": 8}
    config = resolve(RunConfig, tree, "x")
    objective = build_objective(config)
    with logged() as said:
        load_initial_weights(config.objective, config.start_from, objective)
    same = timm.create_model(name, num_classes=0, img_size=64)
    same.load_state_dict(checkpoint_filter_fn(donor.state_dict(), same), strict=False)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(objective.model.visual.tokens(image), same.eval().forward_features(image))
    assert "newly initialized: sparo." in said[0]
    larger = override(tree, ["objective.model.vision.image_size=96", f"start_from={tmp_path}/small"], RunConfig)
    train(resolve(RunConfig, {**tree, "name": "small", "steps": 1, "optim": {}}, "x"))
    train(resolve(RunConfig, {**larger, "name": "large", "steps": 1, "optim": {"lr": 1e-30}}, "x"))
    shapes = [load_encoder(tmp_path / name).model.visual.trunk.pos_embed.shape[1] for name in ("small", "large")]
    assert shapes == [17, 37]  # positions are interpolated in this layout, too
    # a file whose model has other sizes than its name implies: the recipe's kwargs give them
    narrow = timm.create_model(name, img_size=64, num_classes=3, **SMALL)
    save_file(narrow.state_dict(), tmp_path / "narrow.safetensors")
    vision = {"init_from": f"timm:{name}@{tmp_path}/narrow.safetensors", "timm_model_kwargs": SMALL}
    small = {**tree, "objective": {**tree["objective"], "model": {**model, "vision": {**model["vision"], **vision}}}}
    objective = build_objective(config := resolve(RunConfig, small, "x"))
    load_initial_weights(config.objective, config.start_from, objective)
    assert torch.equal(objective.model.visual.trunk.blocks[2].mlp.fc1.weight, narrow.blocks[2].mlp.fc1.weight)
    plain = override(
        tree, ["objective.model.vision={image_size: 64, width: 192, layers: 12, head_width: 64}"], RunConfig
    )
    plain["objective"]["model"]["vision"] = {
        "image_size": 64, "width": 192, "layers": 12, "head_width": 64, "init_from": model["vision"]["init_from"],
    }  # fmt: skip
    config = resolve(RunConfig, plain, "x")
    with pytest.raises(CheckpointError, match=r"Load the file with vision.timm_model_name"):
        load_initial_weights(config.objective, config.start_from, build_objective(config))


@pytest.mark.parametrize(
    ("vision", "readout", "message"),
    [
        (
            {"timm_model_name": "vit_smal_patch16_224"},
            SPARO,
            "timm_model_name=vit_smal_patch16_224: .*vit_small_patch16_224",
        ),
        (
            {"timm_model_name": "resnet18"},
            SPARO,
            "resnet18: timm cannot build it|a readout cannot use this model",
        ),
        (
            {"timm_model_name": "vit_small_patch16_224", "width": 100},
            SPARO,
            "width=100: timm's vit_small_patch16_224 has 384",
        ),
        (
            {"timm_model_name": "vit_small_patch16_224", "patch_dropout": 0.5},
            SPARO,
            "patch_dropout=0.5: is not supported by timm's towers",
        ),
        (
            {"timm_model_name": "vit_small_patch16_224", "timm_model_kwargs": {"num_classes": 3}},
            SPARO,
            "num_classes is reserved",
        ),
        (
            {"timm_model_name": "vit_small_patch16_224", "timm_model_kwargs": {"wings": 2}},
            SPARO,
            "timm cannot build it",
        ),
        (
            {"timm_model_name": "vit_medium_patch16_reg4_gap_256"},
            {"kind": "token"},
            "needs a class token, which timm's",
        ),
        ({"timm_model_name": "vit_base_patch16_xp_224"}, SPARO, "a readout cannot use this model"),
        ({"timm_model_name": "vit_relpos_small_patch16_224"}, SPARO, "a readout cannot use this model"),
        ({"timm_model_name": "xcit_nano_12_p8_224"}, SPARO, "a readout cannot use this model"),
        (
            {"timm_model_name": "vit_small_patch16_224", "timm_model_kwargs": {"depth": 0}},
            SPARO,
            "a readout cannot use this model",
        ),
        (
            {"timm_model_name": "vit_small_patch16_224", "timm_model_kwargs": {"patch_size": [8, 8]}},
            SPARO,
            "must be numbers, strings or booleans",
        ),
        ({"timm_model_name": "cait_xxs24_224"}, SPARO, "a readout cannot use this model"),
        ({"timm_model_name": "x"}, SPARO, "known: .* and [0-9]+ more"),
        ({"timm_model_kwargs": {"depth": 2}}, SPARO, "timm_model_kwargs: needs timm_model_name"),
        ({"timm_model_name": "vit_base_patch16_siglip_224"}, {"kind": "token"}, "needs a class token, which timm's"),
        ({"timm_model_name": "vit_base_patch16_siglip_224"}, {"kind": "linear_bottleneck"}, "needs a class token"),
    ],
)
def test_conflicting_keys_are_refused_by_name(vision, readout, message):
    with pytest.raises(ConfigError, match=message):
        resolve(ClipConfig, {"vision": vision, "readout": readout}, "x")


def test_a_timm_name_replaces_the_sizes_of_the_backbone():
    config = resolve(
        ClipConfig, {"backbone": "ViT-S-16", "vision": {"timm_model_name": "vit_base_patch14_dinov2"}}, "x"
    )
    assert (config.vision.width, config.vision.patch_size, config.vision.image_size, config.text.width) == (
        768,
        14,
        518,
        384,
    )
    assert resolve(ClipConfig, config.model_dump(), "x") == config
