"""How a DINO run starts: backbones of other programs, another image size, and trainings of the official code."""

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers.patch_embed import resample_patch_embed

from evals.interop.exporting import export_run
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from sparo_train.models.weight_files.backbone_description import describe_backbone
from sparo_train.models.weight_files.state_dicts import read_raw
from sparo_train.models.weight_files.vit_names import find_published_heads, official_vit_names
from sparo_train.train.run_config import RunConfig
from tests.helpers.logs import logged
from tests.helpers.recipes import dino_recipe

CLS = "objective.model.readout={kind: cls}"
STILL = ("steps=1", "optim.lr=1e-12", "optim.warmup_steps=0", "optim.min_lr=0", "objective.momentum_teacher=1")


@pytest.fixture
def recipe(shards, tmp_path):
    def run(*words):
        return resolve(RunConfig, override(dino_recipe(shards, tmp_path), [*STILL, *words], RunConfig), "x")

    return run


def backbone(path, **changes):
    torch.manual_seed(1)
    config = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, **changes}
    model = Vit(VitConfig.model_validate(config))
    torch.save(model.state_dict(), path)
    return model.state_dict()


def taken(out, step=1):
    """Return the teacher's backbone after a step that changes nothing."""
    weights = store.read_part(out / f"checkpoints/step-{step:08d}", "model")
    own = "teacher.backbone."
    return {name.removeprefix(own): t for name, t in weights.items() if name.startswith(own)}


# No published model has three blocks of width 32, so a file does not determine the number of heads. Tests use a width of 192.
WIDE = ("objective.model.width=192", "objective.model.heads=3")
wide = {"width": 192, "heads": 3}


def test_a_backbone_starts_student_and_teacher_at_default_settings(recipe, tmp_path):
    weights = backbone(tmp_path / "dino_deitsmall.pth", **wide)
    out = tmp_path / "dino"
    with logged() as messages:
        train(recipe(CLS, *WIDE, f"start_from={tmp_path}/dino_deitsmall.pth"))
    found = taken(out)
    assert found.keys() == weights.keys()
    assert all(torch.allclose(found[name], t, atol=1e-6) for name, t in weights.items())
    assert any("start_from: loaded" in text and "so newly initialized" in text for text in messages)


def test_a_readout_takes_the_last_blocks_place(recipe, tmp_path):
    weights = backbone(tmp_path / "dino.pth", **wide)
    with logged() as messages:
        train(recipe(*WIDE, f"start_from={tmp_path}/dino.pth"))
    found = taken(tmp_path / "dino")
    shared = [name for name in found if not name.startswith("sparo.")]
    assert all(torch.allclose(found[name], weights[name], atol=1e-6) for name in shared)
    assert not any(name.startswith("blocks.2.") for name in found)
    assert any("blocks.2 and later blocks of the checkpoint are not used" in text for text in messages)


def test_another_size_patch_and_number_of_registers(recipe, tmp_path):
    weights = backbone(tmp_path / "b.pth", **wide, image_size=48, patch_size=12)
    with logged() as messages:
        train(recipe(CLS, *WIDE, f"start_from={tmp_path}/b.pth"))
    found = taken(tmp_path / "dino")
    expected = resample_patch_embed(weights["patch_embed.proj.weight"], [8, 8])
    assert torch.allclose(found["patch_embed.proj.weight"], expected, atol=1e-6)
    assert any("resized patch embedding from 12 to 8 pixels" in text for text in messages)
    # Positions at another size are those that the backbone computes for an image of that size.
    weights = backbone(tmp_path / "large.pth", **wide, image_size=64)
    train(recipe(CLS, *WIDE, "name=resized", f"start_from={tmp_path}/large.pth"))
    model = Vit(VitConfig.model_validate({"image_size": 64, "patch_size": 8, "depth": 3, **wide}))
    model.load_state_dict(weights)
    assert torch.allclose(taken(tmp_path / "resized")["pos_embed"], model.positions(4, 4), atol=1e-6)
    backbone(tmp_path / "reg.pth", **wide, registers=4, layer_scale=1e-5)
    with pytest.raises(
        CheckpointError,
        match=r"contains a different model than objective\.model describes\. Set objective\.model\.registers=4 objective\.model\.layer_scale=1.0e-05",
    ):
        train(recipe(CLS, *WIDE, "name=reg", f"start_from={tmp_path}/reg.pth"))
    keys = ("objective.model.registers=4", "objective.model.layer_scale=1.0e-05")
    train(recipe(CLS, *WIDE, *keys, "name=reg", f"start_from={tmp_path}/reg.pth"))
    with pytest.raises(
        CheckpointError, match=r"Set objective\.model\.heads=3"
    ):  # 64 channels per head, as in published models
        train(recipe(CLS, *WIDE, *keys, "objective.model.heads=4", "name=h", f"start_from={tmp_path}/reg.pth"))
    with pytest.raises(CheckpointError, match=r"Set objective\.model\.depth=3"):
        train(recipe(CLS, *WIDE, "objective.model.depth=2", "name=d", f"start_from={tmp_path}/large.pth"))


def test_backbones_of_timm_transformers_and_clip(recipe, tmp_path):
    keys = ("objective.model.image_size=28", "objective.model.patch_size=14", "objective.crops.local_size=14")
    sizes = {"img_size": 28, "depth": 3, "embed_dim": 192, "num_heads": 3, "num_classes": 0}
    model = timm.create_model("vit_small_patch14_reg4_dinov2", **sizes)
    torch.save(model.state_dict(), tmp_path / "timm.pth")
    dinov2 = ("objective.model.registers=4", "objective.model.layer_scale=1e-5")
    train(recipe(CLS, *WIDE, *keys, *dinov2, f"start_from={tmp_path}/timm.pth"))
    expected, found = official_vit_names(model.state_dict()), taken(tmp_path / "dino")
    assert all(torch.allclose(found[name], t, atol=1e-6) for name, t in expected.items())

    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=192, num_hidden_layers=3, num_attention_heads=3, image_size=28, patch_size=14
    )
    dinov2_model = transformers.Dinov2Model(config)
    dinov2_model.save_pretrained(tmp_path / "dinov2")
    dinov2_model.save_pretrained(tmp_path / "in_parts", max_shard_size="1MB")
    assert (tmp_path / "in_parts/model.safetensors.index.json").is_file()
    assert describe_backbone(f"hf:{tmp_path}/in_parts") == describe_backbone(f"hf:{tmp_path}/dinov2") is not None
    processor = transformers.BitImageProcessor(
        crop_size={"height": 28, "width": 28}, size={"shortest_edge": 32},
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    processor.save_pretrained(tmp_path / "dinov2")
    train(recipe(CLS, *WIDE, *keys, dinov2[1], "name=hf", f"start_from=hf:{tmp_path}/dinov2"))
    with pytest.raises(CheckpointError, match=r"is a model folder of Hugging Face transformers\. Write hf:"):
        train(recipe(CLS, *WIDE, *keys, dinov2[1], "name=plain", f"start_from={tmp_path}/dinov2"))

    cfg = open_clip.get_model_config("ViT-B-32")
    cfg["vision_cfg"] |= {"width": 192, "layers": 3, "head_width": 64, "image_size": 64}
    cfg["text_cfg"] |= {"width": 64, "layers": 1, "heads": 1}
    clip = open_clip.CustomTextCLIP(**cfg)
    named = official_vit_names(clip.state_dict())
    torch.save(named, tmp_path / "clip.pth")
    pixels = ("objective.model.pre_norm=true", "objective.model.norm_eps=1e-5")
    train(recipe(CLS, *WIDE, *pixels, "name=clip", f"start_from={tmp_path}/clip.pth"))


@pytest.mark.parametrize("name", ["renamed.pth", "renamed.bin", "renamed.safetensors"])
def test_the_format_of_a_weight_file_does_not_depend_on_its_name(tmp_path, name):
    weights = {"a": torch.arange(3.0)}
    for save in (torch.save, save_file):
        save(weights, tmp_path / name)
        assert torch.equal(read_raw(tmp_path / name)["a"], weights["a"])
    (tmp_path / name).write_bytes(b"\xff" * 7 + b"\0{" + b"x" * 20)  # a header longer than the file
    with pytest.raises(CheckpointError, match=f"{name}: not a"):
        read_raw(tmp_path / name)


def test_a_training_continues_with_head_and_centre(recipe, tmp_path):
    train(recipe("steps=3", "name=first", "optim.lr=1e-3", "objective.momentum_teacher=0.9"))
    exported = export_run(tmp_path / "first", None, "dino")
    train(recipe("name=second", f"start_from={exported}", "objective.center_momentum=1"))
    first = store.read_part(tmp_path / "first/checkpoints/step-00000003", "model")
    second = store.read_part(tmp_path / "second/checkpoints/step-00000001", "model")
    assert first.keys() == second.keys()
    assert all(torch.allclose(t, second[name], atol=1e-6) for name, t in first.items())
    with pytest.raises(
        CheckpointError, match=r"student\.head\.last_layer\.weight_v is \(64, 16\), but the run's is \(32, 16\)"
    ):
        train(recipe("name=third", f"start_from={exported}", "objective.head.out_dim=32"))
    train(recipe("name=third", f"start_from={exported}?state=teacher", "objective.head.out_dim=32"))


def test_another_resolution_of_a_run(recipe, tmp_path):
    train(recipe("name=low"))
    train(recipe("name=high", "objective.model.image_size=64", f"start_from={tmp_path}/low"))
    assert taken(tmp_path / "high")["pos_embed"].shape == (1, 65, 32)


def test_gram_anchoring_begins_with_the_initial_weights(recipe, tmp_path):
    train(recipe("name=low", "objective.gram={first_step: 1}", "steps=2"))
    high = ("objective.model.image_size=64", f"start_from={tmp_path}/low", "objective.gram={crop_size: 96}")
    train(recipe("name=high", *high))
    weights = store.read_part(tmp_path / "high/checkpoints/step-00000001", "model")
    for name, value in taken(tmp_path / "high").items():
        assert torch.allclose(weights[f"earlier.{name}"], value, atol=1e-6), name
    assert weights["earlier.pos_embed"].shape == (1, 65, 32)
    with pytest.raises(
        ConfigError,
        match=r"objective\.gram\.first_step=0: this loss uses a copy of the teacher, and at step 0 that copy would have random weights",
    ):
        recipe("name=random", "objective.gram={}")
    with pytest.raises(ConfigError, match=r"objective\.gram\.first_step=7: the run has only 1 steps"):
        train(recipe("name=late", "objective.gram={first_step: 7}"))
    with pytest.raises(ConfigError, match=r"gram\.crop_size=20: must be a multiple of model\.patch_size=8"):
        recipe("name=odd", "objective.gram={first_step: 1, crop_size: 20}")


@pytest.mark.parametrize(
    "keys",
    [
        ("objective.model.layer_scale=0.1", "objective.model.registers=2"),  # sizes like those of published models
        ("objective.model.ffn_layer=swiglu",),
        ("objective.model.positions=rope",),
    ],
    ids=["layer scale", "gated", "rope"],
)
def test_a_run_continues_from_its_own_kind(recipe, tmp_path, keys):
    wide = ("objective.model.width=384", "objective.model.heads=4", *keys)
    train(recipe("name=one", *wide))
    train(recipe("name=two", *wide, f"start_from={tmp_path}/one"))
    one, two = (taken(tmp_path / name) for name in ("one", "two"))
    assert all(torch.allclose(t, two[name], atol=1e-6) for name, t in one.items())


def test_heads_are_not_guessed_where_published_models_differ(tmp_path):
    names = {"cls_token": torch.zeros(1, 1, 1280), "pos_embed": torch.zeros(1, 5, 1280)}
    blocks = {f"blocks.{i}.norm1.weight": torch.zeros(1) for i in range(32)}
    assert find_published_heads({**names, **blocks}) is None  # 16 heads in MAE and timm, 20 in DINOv3
    assert find_published_heads({"cls_token": names["cls_token"], **blocks}) == 20
    clip = {"cls_token": torch.zeros(1, 1, 1664), "norm_pre.weight": torch.zeros(1), "pos_embed": torch.zeros(1)}
    assert find_published_heads(clip) is None
