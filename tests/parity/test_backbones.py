"""Backbones of DINOv2, DINOv3, timm, transformers and CLIP, read from files in their formats, compared with their own features."""

import json
import math
from functools import partial

import open_clip
import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from evals.encoders.loading import load_encoder
from sparo_train.core.errors import CheckpointError
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from sparo_train.models.weight_files.backbone_description import describe_backbone
from sparo_train.models.weight_files.vit_names import infer_vit, official_vit_names

WIDTH, DEPTH, HEADS, PATCH, SIDE = 64, 2, 4, 14, 42


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomized(model):
    """Set every parameter to values other than zero and one, so that a lost parameter changes the features."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() < 2 else 0.1) + (1 if p.dim() == 1 else 0))
    return model.eval()


def ours(state, heads=HEADS, **keys):
    weights = official_vit_names(state)
    weights.pop("mask_token", None)
    model = Vit(VitConfig.model_validate({**infer_vit(weights, "file", heads), **keys})).eval()
    model.load_state_dict(weights)
    return model


def timm_vit(**keys):
    sizes = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    return randomized(VisionTransformer(num_classes=0, global_pool="", dynamic_img_size=True, **sizes, **keys))


def same(theirs, mine, sizes=(SIDE,), atol=1e-5):
    for size in sizes:
        x = torch.randn(2, 3, size, size)
        with torch.no_grad():
            expected, (cls, patches) = theirs(x), mine.with_patches(x)
            assert torch.allclose(mine(x), expected[:, 0], atol=atol)
        assert torch.allclose(cls, expected[:, 0], atol=atol)
        assert torch.allclose(patches, expected[:, mine.prefix :], atol=atol)


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_dinov2_is_read_with_timm_names_and_official_names(registers, gated):
    swiglu = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU, "mlp_ratio": 5.25}
    model = timm_vit(init_values=1e-5, reg_tokens=registers, no_embed_class=registers > 0, **(swiglu if gated else {}))
    mine = ours(model.state_dict())
    same(model.forward_features, mine)
    assert mine.config.registers == registers and mine.config.ffn_layer == ("swiglu" if gated else "mlp")
    own = {name: value.clone() for name, value in mine.state_dict().items()}
    own["mask_token"] = torch.randn(1, WIDTH)
    if registers:  # the official files have a position for the class token
        own["pos_embed"][:, :1] = torch.randn(1, 1, WIDTH)
        own["cls_token"] -= own["pos_embed"][:, :1]
    chunked = {f"backbone.{n.replace('blocks.1.', 'blocks.0.1.')}": t for n, t in own.items()}
    for state in (own, chunked):
        same(model.forward_features, ours(state))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_dinov3_rotates_as_timms_model_does_at_every_size(gated, bias):
    swiglu = {"swiglu_mlp": True, "mlp_ratio": 4, "swiglu_align_to": 8} if gated else {}
    model = randomized(
        Eva(
            img_size=48, patch_size=16, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, qkv_bias=bias, init_values=1e-5,
            rope_type="dinov3", rope_temperature=100, rope_rotate_half=True, use_rot_pos_emb=True, use_abs_pos_emb=False,
            num_reg_tokens=4, use_fc_norm=False, dynamic_img_size=True, num_classes=0, global_pool="token",
            norm_layer=partial(torch.nn.LayerNorm, eps=1e-5), **swiglu,
        )
    )  # fmt: skip
    mine = ours(model.state_dict())
    assert mine.config.positions == "rope" and mine.config.norm_eps == 1e-5 and mine.config.registers == 4
    same(model.forward_features, mine, sizes=(48, 80))
    # The official files have other names, a mask in which the bias of keys is NaN, and a table of periods.
    own = {n.replace("register_tokens", "storage_tokens"): t.clone() for n, t in mine.state_dict().items()}
    for name in [n for n in own if n.endswith("qkv.bias")]:
        own[name][WIDTH : 2 * WIDTH] = math.nan
        own[f"{name}_mask"] = torch.ones(3 * WIDTH)
    for name in [n for n in own if "w12" in n]:
        own[name.replace("w12", "w1")], own[name.replace("w12", "w2")] = own.pop(name).chunk(2)
    own |= {"rope_embed.periods": torch.ones(4), "mask_token": torch.zeros(1, WIDTH)}
    same(model.forward_features, ours(own), sizes=(48,))


def test_keys_have_no_bias_under_a_rotation():
    keys = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "positions": "rope"}
    model = Vit(VitConfig.model_validate(keys))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    for block in model.blocks:
        assert not block.attn.qkv.bias.grad[32:64].any() and block.attn.qkv.bias.grad[:32].any()


@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "ViT"])
@pytest.mark.parametrize("gated", [False, True])
def test_folders_of_transformers(tmp_path, kind, gated):
    transformers = pytest.importorskip("transformers")
    if gated and kind == "ViT":
        pytest.skip("has no gated MLP")
    keys = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "image_size": 48,
        "patch_size": 16,
    }
    keys |= {"DINOv3ViT": {"num_register_tokens": 4, "use_gated_mlp": gated, "intermediate_size": 128,
                            "hidden_act": "silu" if gated else "gelu"},
             "ViT": {"intermediate_size": 4 * WIDTH}}.get(kind, {"use_swiglu_ffn": gated})  # fmt: skip
    model = randomized(getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**keys)))
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    for state in (model.state_dict(), load_file(tmp_path / "model.safetensors")):
        same(lambda x: model(x).last_hidden_state, ours(state), sizes=(48,))


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-32-quickgelu"])
def test_image_towers_of_clip(name):
    cfg = open_clip.get_model_config(name)
    cfg["vision_cfg"] |= {"width": WIDTH, "layers": DEPTH, "head_width": WIDTH // HEADS, "image_size": 64}
    cfg["text_cfg"] |= {"width": 32, "layers": 1, "heads": 2}
    model = open_clip.CustomTextCLIP(**cfg)
    randomized(model.visual)
    mine = ours(model.state_dict(), quick_gelu=name.endswith("quickgelu"))
    assert mine.config.pre_norm
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        tokens = model.visual.ln_post(model.visual.transformer(model.visual._embeds(x)))
        assert torch.allclose(mine(x), tokens[:, 0], atol=1e-5)


def test_a_dinov2_file_is_an_encoder(tmp_path):
    model = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=0, img_size=56, depth=2)
    weights = official_vit_names(model.state_dict())
    save_file({**weights, "mask_token": torch.zeros(1, 384)}, tmp_path / "dinov2_vits14_reg4_pretrain.safetensors")
    encoder = load_encoder(tmp_path / "dinov2_vits14_reg4_pretrain.safetensors")
    assert "ViT 384x2 with patches of 14 and 6 heads, registers 4" in encoder.assumed
    x = torch.randint(0, 256, (2, 3, 56, 56), dtype=torch.uint8)
    expected = model.eval().forward_features(encoder.normalize(x))
    assert torch.allclose(encoder.encode(x), expected[:, 0], atol=1e-5)
    assert encoder.tokens(x).shape == (2, 5 + 16, 384) and encoder.prefix_tokens == 5


def test_files_without_a_backbone_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"file: has no ViT with a class token \('patch_embed"):
        infer_vit({"cls_token": torch.zeros(1, 1, 8)}, "file")
    weights = official_vit_names(timm_vit().state_dict())
    with pytest.raises(CheckpointError, match="shapes do not show the number of heads, got width 64 with 2 blocks"):
        infer_vit({**weights}, "file")
    (tmp_path / "config.json").write_text(json.dumps({}))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("eva02_tiny_patch14_224", "a gated MLP without LayerScale"),
        ("vit_small_patch16_rope_224", "rotary positions"),
        ("vit_small_patch16_rope_mixed_224", "rotary positions"),
    ],
)
def test_vits_with_other_rotary_positions_are_not_read_as_the_built_in_one(tmp_path, name, kind):
    model = timm.create_model(name, num_classes=0)
    path = tmp_path / "x.pth"
    torch.save(model.state_dict(), path)
    with pytest.raises(CheckpointError, match=rf"{kind}.*timm:NAME@FILE"):
        describe_backbone(str(path))
    with pytest.raises(CheckpointError, match="timm:NAME@"):
        load_encoder(path)
    # With a name, the model of timm itself is used.
    assert describe_backbone(f"timm:{name}@{path}").config.timm_model_name == name


def test_half_precision_folders_of_transformers_run_in_fp32(tmp_path):
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    model = transformers.Dinov2Model(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    processor = {
        "image_processor_type": "BitImageProcessor", "do_resize": True, "size": {"shortest_edge": 28}, "resample": 3,
        "do_center_crop": True, "crop_size": {"height": 28, "width": 28}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    encoder = load_encoder(f"hf:{tmp_path}")
    assert {p.dtype for p in encoder.model.parameters()} == {torch.float32}
    pixels = torch.rand(2, 3, 28, 28)
    with torch.no_grad():
        assert torch.equal(encoder.model(pixels)[0], model.float().eval()(pixels)[0])


def test_a_vit_of_timm_that_averages_patches_needs_its_name(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="avg").eval()
    randomized(model)
    path = tmp_path / "x.pt"
    torch.save(model.state_dict(), path)
    with pytest.raises(CheckpointError, match=r"averages its patch tokens .*timm:NAME@"):
        load_encoder(path)
    encoder = load_encoder(f"timm:vit_tiny_patch16_224@{path}")
    pixels = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(encoder.model(pixels), model(pixels)) and encoder.pooling == "avg"
