"""Official DINO checkpoints are read, ours are written for the official loader, and files that run code are refused."""

import argparse
from functools import partial

import pytest
import torch
import yaml
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from evals.encoders.loading import load_encoder
from launch.commands.train import train
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from tests.helpers.processes import sparo
from tests.helpers.recipes import dino_recipe
from tests.helpers.runs import run
from tests.parity import official_dino as official

TINY = {"image_size": 32, "patch_size": 8, "width": 192, "depth": 2, "heads": 3}


def vit(**changes):
    torch.manual_seed(0)
    return Vit(VitConfig.model_validate({**TINY, **changes}))


def official_file(path, backbone, **extra):
    """Write it as main_dino.py does."""
    head = official.Head(backbone.config.out_width, 32, 16, 8, True)
    state = {
        **{f"backbone.{n}": t for n, t in backbone.state_dict().items()},
        **{f"head.{n}": t for n, t in head.state_dict().items()},
    }
    content = {
        "student": {f"module.{n}": t + 1 for n, t in state.items()},
        "teacher": state,
        "optimizer": torch.optim.AdamW(backbone.parameters()).state_dict(),
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_tiny", patch_size=8, lr=0.0005, local_crops_scale=(0.05, 0.4)),
        "dino_loss": {"center": torch.zeros(1, 32)},
        **extra,
    }
    torch.save(content, path)
    return path


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_an_official_file_with_its_namespace_gives_the_teacher(tmp_path):
    backbone = vit()
    path = official_file(tmp_path / "checkpoint.pth", backbone)
    with pytest.raises(Exception, match="Namespace"):
        torch.load(path)
    encoder = load_encoder(path, "vit_tiny")
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.allclose(encoder.encode(x), backbone(encoder.normalize(x)), atol=1e-6)
    student = load_encoder(f"{path}?state=student", "vit_tiny")
    assert torch.equal(student.model.norm.weight, encoder.model.norm.weight + 1)
    with pytest.raises(
        CheckpointError,
        match=r"state=techer: the file has no state dict with this name\. The file holds: student, teacher",
    ):
        load_encoder(f"{path}?state=techer", "vit_tiny")
    assert "ViT 192x2 with patches of 8 and 3 heads" in encoder.assumed


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_only_the_namespace_class_is_accepted(tmp_path):
    path = official_file(tmp_path / "checkpoint.pth", vit(), model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="could run code"):
        load_encoder(path)
    path = official_file(tmp_path / "nested.pth", vit(), args=argparse.Namespace(model=nn.Linear(1, 1)))
    with pytest.raises(CheckpointError, match="could run code"):
        load_encoder(path)


@pytest.mark.parametrize("readout", [{"kind": "cls"}, {"kind": "sparo", "slots": 3, "slot_width": 5, "head_width": 7}])
def test_a_backbone_alone_loads_by_path(tmp_path, readout):
    backbone = vit(readout=readout, depth=3)
    torch.save(backbone.state_dict(), tmp_path / "dino_vit.pth")
    with pytest.raises(CheckpointError, match=r"number of heads, got width 192 with \d blocks\. Name the model"):
        load_encoder(tmp_path / "dino_vit.pth")
    encoder = load_encoder(tmp_path / "dino_vit.pth", "vit_tiny")
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(encoder.encode(x), backbone(encoder.normalize(x)))
    if readout["kind"] == "sparo":
        assert "SPARO" in encoder.assumed and encoder.width == 15
    wrapped = {f"_orig_mod.module.backbone._fsdp_wrapped_module.{n}": t for n, t in backbone.state_dict().items()}
    torch.save({"model": wrapped}, tmp_path / "wrapped.pth")
    assert torch.equal(load_encoder(tmp_path / "wrapped.pth", "vit_tiny").encode(x), encoder.encode(x))


def test_options_that_shapes_do_not_determine_are_required(tmp_path):
    odd = vit(width=48, heads=4)
    torch.save(odd.state_dict(), tmp_path / "odd.pth")
    with pytest.raises(CheckpointError, match="number of heads, got width 48"):
        load_encoder(tmp_path / "odd.pth")
    with pytest.raises(ConfigError, match="vit_small"):
        load_encoder(tmp_path / "odd.pth", "vit_smal")
    state = vit().state_dict()
    del state["norm.weight"]
    torch.save(state, tmp_path / "less.pth")
    with pytest.raises(CheckpointError, match=r"missing norm\.weight"):
        load_encoder(tmp_path / "less.pth", "vit_tiny")


def test_an_export_loads_in_the_official_code_and_here_with_equal_scores(shards, tmp_path):
    tree = dino_recipe(shards, tmp_path / "runs", steps=3)
    tree["objective"]["model"]["readout"] = {"kind": "cls"}
    config = run(tree)
    train(config)
    done = sparo("export", str(config.folder))
    assert done.returncode == 0, done.stderr
    path = config.folder / "export/dino.pth"
    state = torch.load(path, map_location="cpu")["teacher"]  # the official loader, with today's defaults
    state = {n.replace("module.", "").replace("backbone.", ""): t for n, t in state.items()}
    norm = partial(nn.LayerNorm, eps=1e-6)
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=0, norm_layer=norm
    )
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and all(name.startswith(("mlp", "last_layer", "head")) for name in unexpected)
    ours, theirs = load_encoder(config.folder), load_encoder(path)
    assert (ours.weights, ours.architecture) == (theirs.weights, theirs.architecture)  # they share stored features
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(ours.encode(x), theirs.encode(x)) and theirs.assumed == ""
    assert torch.allclose(ours.encode(x), model.eval()(ours.normalize(x)), atol=1e-5)
    assert "dino" in sparo("export", str(config.folder), "--layout", "open_clip").stderr


def test_eval_scores_runs_exports_official_files_and_pixels(shards, tmp_path):
    from tests.unit.test_knn import labelled

    sets = {"train": labelled(tmp_path / "train", 40, 0), "test": labelled(tmp_path / "test", 12, 1)}
    tasks = {
        "knn": {"task": "knn", "k": [5, 20], **sets},
        "linear": {"task": "linear", "epochs": 2, "batch_size": 16, **sets},
    }
    config = run(dino_recipe(shards, tmp_path / "runs", steps=3, eval={"tasks": tasks}))
    train(config)
    assert sparo("export", str(config.folder)).returncode == 0
    torch.save(vit(depth=12).state_dict(), tmp_path / "vit.pth")
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    names = [str(config.folder), str(config.folder / "export/dino.pth"), str(tmp_path / "vit.pth")]
    done = sparo("eval", *names, "--data", str(tmp_path / "tasks.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "knn" in line or "linear" in line]
    assert rows and "dino.pth" in done.stdout and "vit.pth" in done.stdout
    done = sparo("eval", "pixels:16", "--data", str(tmp_path / "tasks.yaml"), "--tasks", "knn", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = sparo("eval", "pixels:16", "--data", str(tmp_path / "tasks.yaml"), "--tasks", "linear", cwd=tmp_path)
    assert done.returncode == 2 and "DINO backbone" in done.stderr
