"""DINO with a timm backbone: the library's features, batch norm over ranks, starts, exports, and refusals."""

import io

import pytest
import timm
import torch
from PIL import Image
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from evals.encoders.loading import load_encoder
from evals.interop.backbone_exports import load_readout
from evals.interop.exporting import export_run
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.models.global_batch_norm import make_global
from sparo_train.models.timm_backbone import TimmBackbone, backbone_facts
from sparo_train.models.vit_config import VitConfig
from sparo_train.train.choices import with_choices
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import dino_recipe
from tests.helpers.samples import image_folder, jpeg

SPARO = {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8, "replace_last_block": False}
# A convnet with batch norm, one with batch norm and activation in one layer, one with layer norm, and a ViT.
NAMES = ("test_resnet", "test_efficientnet", "test_convnext", "test_vit")


def model(name, **readout):
    return {"timm_model_name": name, "image_size": 64, "readout": readout or {"kind": "cls"}}


def recipe(folder, name, *words, **readout):
    tree = dino_recipe(folder, folder, steps=2)
    tree["objective"]["model"] = model(name, **readout)
    tree["objective"]["crops"] = {"local_crops_number": 2, "local_size": 32}
    tree["data"]["sources"] = {"own": {"folder": str(image_folder(folder / "images"))}}
    return resolve(RunConfig, override(tree, ["optim.warmup_steps=0", "optim.lr=0.01", *words], RunConfig), "x")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that makes each run once."""
    made = {}

    def run(name, **readout):
        key = (name, str(readout))
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            train(recipe(folder, name, **readout))
            made[key] = folder / "dino"
        return made[key]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_encodings_are_those_of_timm(name):
    torch.manual_seed(0)
    net = TimmBackbone(VitConfig.model_validate(model(name))).eval()
    more = {"dynamic_img_size": True, "img_size": 64} if "vit" in name else {}
    theirs = timm.create_model(name, num_classes=0, **more).eval()
    theirs.load_state_dict({key.removeprefix("model."): value for key, value in net.state_dict().items()})
    for size in (64, 32):
        x = torch.randn(2, 3, size, size)
        torch.testing.assert_close(net(x), theirs(x))
    slots = TimmBackbone(VitConfig.model_validate(model(name, **SPARO))).eval()
    found = slots.slots(x, need_attention=True)
    tokens = slots.intermediate(x, 1)[0]
    assert found.values.shape == (2, 4, 8) and found.attention.shape == (2, 4, tokens.shape[1])
    facts = backbone_facts(name, 64)
    assert tokens.shape[2] == facts.width == slots.embed_dim and net(x).shape[1] == facts.pooled == net.config.out_width


def test_global_batch_norm_is_torchs_in_one_process():
    torch.manual_seed(0)
    for layer in (nn.BatchNorm2d(3), BatchNormAct2d(3)):
        theirs = nn.Sequential(layer)
        with torch.no_grad():
            layer.weight.uniform_(0.5, 2)
        ours = nn.Sequential(type(layer)(3))
        ours.load_state_dict(theirs.state_dict())
        make_global(ours)
        for _ in range(3):
            x = torch.randn(4, 3, 5, 6, requires_grad=True)
            y = x.detach().clone().requires_grad_(True)
            a, b = theirs(x), ours(y)
            torch.testing.assert_close(b, a)
            (a**2).sum().backward(), (b**2).sum().backward()
            torch.testing.assert_close(y.grad, x.grad)
            torch.testing.assert_close(ours[0].weight.grad, theirs[0].weight.grad)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    with pytest.raises(ValueError, match="BatchNorm3d: normalizes over the batch of one rank only"):
        make_global(nn.Sequential(nn.BatchNorm3d(2)))


def _norm_of_rank(ranks, x):
    layer = nn.Sequential(nn.BatchNorm2d(3))
    make_global(layer)
    y = layer(x[ranks.rank :: ranks.size])
    (y**3).sum().backward()
    gradient = layer[0].weight.grad
    torch.distributed.all_reduce(gradient)
    return y.detach(), gradient, layer[0].running_var.clone()


def test_two_ranks_normalize_like_one():
    x = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    whole = nn.BatchNorm2d(3)
    y = whole(x)
    (y**3).sum().backward()
    for rank, (own, gradient, variance) in enumerate(run_ranks(2, _norm_of_rank, x)):
        torch.testing.assert_close(own, y[rank::2].detach())
        torch.testing.assert_close(gradient, whole.weight.grad)
        torch.testing.assert_close(variance, whole.running_var)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "readout"),
    [("test_resnet", {}), ("test_vit", SPARO), ("test_convnext", {**SPARO, "attend_cls": False})],
    ids=["cls", "vit", "map"],
)
def test_exports_compute_what_the_run_computes(runs, name, readout):
    run = runs(name, **readout)
    encoder = load_encoder(run)
    images = [Image.open(io.BytesIO(jpeg(1))), Image.new("L", (90, 50))]
    x = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = encoder.encode(x)
    folder = export_run(run, None, "timm")
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        features = theirs.forward_features(encoder.normalize(x))
        found = load_readout(folder)(features).flat() if readout else theirs(encoder.normalize(x))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    program = torch.export.load(export_run(run, None, "torch")).module()
    found, patches, attention = program(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert patches.shape[1] == 4 if "vit" not in name else patches.shape[1] == 16
    assert attention.shape[1] == (4 if readout else 0)
    for layout in ("transformers", "dino"):
        with pytest.raises(ConfigError, match=f"--layout {layout}: .*Use --layout timm"):
            export_run(run, None, layout)
    described, stacked = encoder.describe(images), encoder.stack([encoder.transform(image) for image in images])
    torch.testing.assert_close(described.patches, encoder.tokens(stacked)[:, encoder.prefix_tokens :])
    torch.testing.assert_close(described.encoding, encoder.encode(stacked))
    assert (described.slots is None) == (not readout) and "blocks" not in encoder.offers


def test_a_run_resumes_bit_for_bit(runs, tmp_path):
    run = runs("test_resnet")
    whole = load_encoder(run).weights
    first = recipe(tmp_path, "test_resnet", "stop_after_steps=1")
    train(first)
    train(recipe(tmp_path, "test_resnet"))
    assert load_encoder(tmp_path / "dino").weights == whole


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])  # the ViT's positions belong to 160 pixels
def test_a_run_starts_from_timms_weights(tmp_path, name):
    torch.manual_seed(3)
    released = timm.create_model(name, num_classes=7)
    torch.save(released.state_dict(), tmp_path / "file.pth")
    pixels = [f"objective.{key}=[0.5, 0.5, 0.5]" for key in ("mean", "std")]
    still = ["optim.lr=1e-12", "optim.weight_decay=0", "optim.weight_decay_end=0", "objective.momentum_teacher=1.0"]
    readout = SPARO if name == "test_resnet" else {}  # with a norm of its input, which the file does not contain
    train(recipe(tmp_path, name, f"start_from=timm:{name}@{tmp_path / 'file.pth'}", *pixels, *still, **readout))
    started = load_encoder(tmp_path / "dino").model.model
    size = {"img_size": 64} if "vit" in name else {}
    file = {"file": str(tmp_path / "file.pth"), "num_classes": 7}
    expected = timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=file, **size)
    for key, value in expected.state_dict().items():
        if "running" not in key and "tracked" not in key:
            torch.testing.assert_close(started.state_dict()[key], value)


def test_a_file_under_timms_names_needs_no_prefix(tmp_path):
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "file.pth")
    train(recipe(tmp_path, "test_resnet", f"start_from={tmp_path / 'file.pth'}", "stop_after_steps=1"))
    assert "start_from" in (tmp_path / "dino/log.txt").read_text()


def test_own_images_takes_a_model_of_timm(tmp_path):
    images = image_folder(tmp_path / "images")
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "file.pth")
    tree = {"name": "own", "auto": "cpu", "objective": {"kind": "dino", "model": {"readout": {"kind": "sparo"}}},
            "data": {"sources": {"images": {"folder": str(images)}}}, "start_from": f"timm:test_resnet@{tmp_path / 'file.pth'}"}  # fmt: skip
    found = resolve(RunConfig, with_choices(tree)[0], "x").objective.model
    assert found.timm_model_name == "test_resnet" and not found.readout.replace_last_block and found.image_size >= 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.model.timm_model_name=test_resnat"], "timm_model_name=test_resnat: .*test_resnet"),
        (
            ["objective.model.timm_model_name=test_resnet.r160_in1k"],
            "r160_in1k names pretrained weights.*init=timm:test_resnet.r160",
        ),
        (["objective.crops.tile=20"], "crops.tile=20: is smaller than model.image_size=64"),
        (["objective.model.depth=3"], "depth=3: does not apply if timm_model_name is set"),
        (["objective.model.registers=2"], "registers=2: does not apply if timm_model_name is set"),
        (["objective.ibot={}"], "ibot: needs the patches of sparo's own ViT"),
        (["objective.model.readout={kind: sparo}"], "Set readout.replace_last_block=false"),
        (
            ["objective.crops.local_size=3", "objective.model.timm_model_name=test_vit"],
            "crops.local_size=3: .*does not take images of 3",
        ),
        (["micro_batch_size=2"], "micro_batch_size: objective.model.timm_model_name couples the samples"),
        (["engine.grad_checkpointing=true"], "would update the batch norms of test_resnet twice"),
    ],
)
def test_incompatible_options_are_refused_with_a_reason(tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, "test_resnet", *words)
