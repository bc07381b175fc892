"""Weights whose shapes fit but whose model computes something else: masks, epsilons, rotary bases, nested averages, preprocessing."""

import contextlib
import io
import json

import numpy as np
import open_clip
import pytest
import timm
import torch
from open_clip.transformer import TextTransformer
from PIL import Image
from torch import nn

from evals.encoders.foreign import from_open_clip
from evals.interop.initial_weights import timm_file
from evals.interop.tower_names import refuse_unlike, tower_weights
from sparo_train.core.errors import BadSampleError, CheckpointError
from sparo_train.data.decode.decoding import refuse_unclear_rotation
from sparo_train.data.video.episode import Episode
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.vit_config import VitConfig
from sparo_train.models.weight_files.backbone_description import describe_backbone
from sparo_train.models.weight_files.state_dicts import extract_state
from sparo_train.models.weight_files.vit_fit import fit_vit, hidden_keys
from sparo_train.models.weight_files.vit_names import official_vit_names

TEXT = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1, "output_dim": 16}
SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 0}
"""Arguments of a small ViT of timm."""


def state(value):
    return {"weight": torch.full((2,), float(value))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_causal_mask": True}, "attends to all tokens"),
        ({"embed_cls": True}, "reads a class token"),
        ({"pool_type": "last"}, r"pools tokens in another way \(last\)"),
    ],
)
def test_a_text_tower_that_reads_in_another_way_is_refused(options, message):
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    own = Clip(ClipConfig(text=text, embed_dim=16, readout={"kind": "token"})).text
    refuse_unlike("file", TextTransformer(**TEXT), own)
    with pytest.raises(CheckpointError, match=f"file: its text tower {message}, but the run's text tower"):
        refuse_unlike("file", TextTransformer(**TEXT, **options), own)
    refuse_unlike("file", TextTransformer(**TEXT, **options), nn.Identity())  # a run without texts


def test_layer_norms_with_another_epsilon_are_refused_unless_both_are_small():
    def norm(epsilon):
        return nn.Sequential(nn.LayerNorm(4, eps=epsilon))

    refuse_unlike("file", norm(1e-12), norm(1e-6))
    with pytest.raises(CheckpointError, match=r"a layer-norm epsilon of 0\.001, but the model of the run uses another"):
        refuse_unlike("file", norm(1e-3), norm(1e-5))


def test_rotary_bases_and_epsilons_that_weights_do_not_show_are_compared():
    arch = "vit_small_patch16_dinov3"
    model = timm.create_model(arch, embed_dim=64, depth=2, num_heads=4, num_classes=0, rope_temperature=20.0)
    assert hidden_keys(model) == {"norm_eps": 1e-5, "rope_base": 20.0}
    keys = {"width": 64, "depth": 2, "heads": 4, "registers": 4, "layer_scale": 1e-5, "positions": "rope"}
    keys |= {"patch_size": 16, "image_size": 64, "readout": {"kind": "cls"}, "norm_eps": 1e-5}
    with pytest.raises(CheckpointError, match=r"Set objective\.model\.rope_base=20\.0\.$"):
        fit_vit(model.state_dict(), VitConfig(**keys), hidden_keys(model))
    fit_vit(model.state_dict(), VitConfig(**keys, rope_base=20.0), hidden_keys(model))
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, rope_theta=30.0, layer_norm_eps=1e-12
    )
    assert hidden_keys(transformers.DINOv3ViTModel(config)) == {"norm_eps": 1e-6, "rope_base": 30.0}
    # Between two runs, too: only then are both configs known as a whole.
    with pytest.raises(CheckpointError, match=r"Set objective\.model\.norm_eps=0\.0001\.$"):
        fit_vit(model.state_dict(), VitConfig(**keys), VitConfig(**{**keys, "norm_eps": 1e-4}))


def test_the_config_beside_a_timm_file_describes_its_model(tmp_path):
    name, pixels = "vit_base_patch16_224", {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.1]}
    torch.save(timm.create_model(name, **SIZES).state_dict(), tmp_path / "w.pth")
    content = {"architecture": name, "model_args": SIZES, "pretrained_cfg": pixels}
    (tmp_path / "config.json").write_text(json.dumps(content))
    place = f"timm:{name}@{tmp_path}/w.pth"
    described = describe_backbone(place)
    assert (described.config.width, described.config.depth, described.config.heads) == (64, 2, 4)
    assert described.config.patch_size == 8 and described.mean == (0.5, 0.4, 0.3) == tuple(timm_file(place)[1].mean)
    (tmp_path / "config.json").unlink()
    assert timm_file(place)[1].mean == (0.5, 0.5, 0.5)  # of the name
    assert describe_backbone(place, heads=4).config.width == 64  # sizes of the file, not of the name


def test_an_average_one_level_deeper_counts_as_another_model():
    content = {"state_dict": state(1), "ema": {"module": state(2), "decay": 0.9}}
    with pytest.raises(CheckpointError, match="expected one model, got 2: state_dict, ema"):
        extract_state(content, "file")
    assert extract_state(content, "file", "ema")["weight"][0] == 2
    assert extract_state({"state_dict": state(1), "ema": {"module": state(1)}}, "file")["weight"][0] == 1
    assert extract_state({"model": {"state_dict": state(3)}, "ema": {}}, "file")["weight"][0] == 3
    for content in (
        {"model": {"state_dict": state(3)}, "ema": {"state_dict": state(4)}},
        {"model": {"model": state(3), "ema": {"module": state(4)}}},
    ):
        with pytest.raises(CheckpointError, match="expected one model, got 2"):
            extract_state(content, "file")


def test_models_without_the_tokens_of_a_vit_are_refused_by_name():
    distilled = official_vit_names(timm.create_model("deit_tiny_distilled_patch16_224").state_dict())
    with pytest.raises(CheckpointError, match="a distillation token, as in DeiT"):
        fit_vit(distilled, VitConfig(width=192, heads=3, image_size=64, readout={"kind": "cls"}))
    siglip = {"embeddings.patch_embedding.weight": torch.zeros(4, 3, 2, 2)}
    siglip |= {"encoder.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}
    with pytest.raises(CheckpointError, match="no class token, as in SigLIP"):
        tower_weights(siglip, "visual", "file")


def test_files_and_images_are_encoded_as_in_evaluation_and_by_the_library(tmp_path):
    model, _, _ = open_clip.create_model_and_transforms("ViT-S-32-alt", precision="fp32")
    torch.save(model.state_dict(), tmp_path / "w.pt")
    settings = {"preprocess_cfg": {"resize_mode": "longest", "fill_color": 255}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(settings))
    encoder = from_open_clip(f"ViT-S-32-alt@{tmp_path}/w.pt")
    deep = np.linspace(0, 65535, 40 * 30).reshape(40, 30).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    padded = encoder.preprocess([tmp_path / "deep.png"])[0]
    assert (padded[:, :20] == 255).all()  # bars in the colour that the file names
    clipped = np.asarray(encoder.transform(Image.open(tmp_path / "deep.png")))
    assert np.array_equal(padded, clipped) and np.array_equal(
        padded, encoder.preprocess([Image.open(tmp_path / "deep.png")])[0]
    )


@pytest.mark.parametrize(
    ("size", "orientation", "unclear"), [((8, 8), 6, True), ((8, 6), 3, True), ((8, 6), 6, False), ((8, 8), 1, False)]
)
def test_a_mask_of_an_image_rotated_by_exif_has_to_show_its_orientation(size, orientation, unclear):
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.new("RGB", size).save(stream, "JPEG", exif=exif)
    mask = io.BytesIO()
    Image.new("L", size).save(mask, "PNG")
    episode = Episode({"000.jpg": stream.getvalue(), "000.mask.png": mask.getvalue()}, ("jpg",))
    with pytest.raises(BadSampleError, match="EXIF rotates the image") if unclear else contextlib.nullcontext():
        refuse_unclear_rotation(stream.getvalue())
    with pytest.raises(BadSampleError, match="EXIF rotates the image") if unclear else contextlib.nullcontext():
        episode.labels(0)  # frames of videos and views
