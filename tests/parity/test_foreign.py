"""Encoders from models of other libraries give the outputs of those libraries."""

import io
import json

import numpy as np
import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from evals.encoders.encoder import TextEncoder
from evals.encoders.loading import load_encoder
from sparo_train.core.errors import CheckpointError, ConfigError
from tests.helpers.samples import jpeg


def images(n=3):
    return [Image.open(io.BytesIO(jpeg(i, (90 - 20 * i, 70)))).convert("RGB") for i in range(n)]


def encoded(encoder):
    pixels = [torch.from_numpy(np.array(encoder.transform(image))).permute(2, 0, 1) for image in images()]
    return encoder.encode(torch.stack(pixels))


def test_open_clip(tmp_path):
    import sparo_train.openclip  # noqa: F401  our small names

    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms("ViT-Tiny-16")
    model.eval()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    encoder = load_encoder(f"open_clip:ViT-Tiny-16@{tmp_path / 'w.pt'}")
    with torch.inference_mode():
        expected = model.encode_image(torch.stack([transform(image) for image in images()]), normalize=True)
        texts = model.encode_text(
            open_clip.get_tokenizer("ViT-Tiny-16")(["a cat", "a red cube on a ball"]), normalize=True
        )
    assert torch.allclose(encoded(encoder), expected, atol=1e-6) and encoder.width == expected.shape[1]
    assert isinstance(encoder, TextEncoder)
    assert torch.allclose(encoder.text(["a cat", "a red cube on a ball"]), texts, atol=1e-6)
    for name, kind, message in (
        (f"open_clip:ViT-Tiny-17@{tmp_path / 'w.pt'}", ConfigError, "did you mean 'ViT-Tiny-16'"),
        ("open_clip:ViT-B-32", ConfigError, "expected open_clip:NAME@FILE"),
        ("open_clip:ViT-B-32@nothing.pt", CheckpointError, "is neither a file nor a tag of ViT-B-32"),
        (f"open_clip:ViT-B-32@{tmp_path / 'w.pt'}", CheckpointError, "open_clip cannot load it"),
    ):
        with pytest.raises(kind, match=message):
            load_encoder(name)


def test_preprocessing_follows_the_config_next_to_a_file(tmp_path):
    import sparo_train.openclip  # noqa: F401  our small names

    torch.manual_seed(0)
    shown = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    beside = {f"image_{key}": value for key, value in shown.items()}
    model, _, transform = open_clip.create_model_and_transforms("ViT-Tiny-16", **beside)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {}, "preprocess_cfg": shown}))
    with torch.inference_mode():
        expected = model.eval().encode_image(torch.stack([transform(image) for image in images()]), normalize=True)
    assert torch.allclose(encoded(load_encoder(f"open_clip:ViT-Tiny-16@{tmp_path / 'w.pt'}")), expected, atol=1e-6)
    with pytest.raises(ConfigError, match="Write open_clip:ViT-B-32-quickgelu@openai"):
        load_encoder("open_clip:ViT-B-32@openai")
    with pytest.raises(
        ConfigError, match="--model ViT-B-32: applies to bare weight files only, and open_clip:ViT-Tiny-16@"
    ):
        load_encoder(f"open_clip:ViT-Tiny-16@{tmp_path / 'w.pt'}", "ViT-B-32")

    told = {"mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 1.0, "interpolation": "bilinear"}
    vit = timm.create_model("test_vit").eval()
    save_file(vit.state_dict(), tmp_path / "w.safetensors")
    plain = load_encoder(f"timm:test_vit@{tmp_path / 'w.safetensors'}")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_vit", "pretrained_cfg": told}))
    encoder = load_encoder(f"timm:test_vit@{tmp_path / 'w.safetensors'}")
    transform = timm.data.create_transform(
        **timm.data.resolve_data_config({}, {**vit.pretrained_cfg, **told}, vit), is_training=False
    )
    with torch.inference_mode():
        features = vit.forward_features(torch.stack([transform(image) for image in images()]))
        expected = vit.forward_head(features, pre_logits=True)
    assert torch.allclose(encoded(encoder), expected, atol=1e-5) and not torch.allclose(encoded(plain), expected)
    (tmp_path / "config.json").write_text('{"pretrained_cfg": 3}')
    with pytest.raises(CheckpointError, match="pretrained_cfg is not a mapping"):
        load_encoder(f"timm:test_vit@{tmp_path / 'w.safetensors'}")


def test_a_hugging_face_folder_with_missing_weights_is_refused(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    model = transformers.ViTForImageClassification(config).eval()  # this model has no pooler
    model.save_pretrained(tmp_path / "m")
    square = {"size": {"height": 32, "width": 32}, "do_center_crop": False, "resample": 2}
    transformers.CLIPImageProcessor(**square).save_pretrained(tmp_path / "m")
    encoder = load_encoder(f"hf:{tmp_path / 'm'}")
    pixels = torch.stack([torch.from_numpy(np.array(encoder.transform(i))).permute(2, 0, 1) for i in images()])
    with torch.inference_mode():
        expected = model.vit(pixel_values=encoder.normalize(pixels)).last_hidden_state[:, 0]
    assert torch.allclose(encoder.encode(pixels), expected, atol=1e-6)
    held = load_file(tmp_path / "m/model.safetensors")
    lost = next(name for name in held if name.endswith("query.weight"))
    save_file({n: t for n, t in held.items() if n != lost}, tmp_path / "m/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"its weights lack .*which would be initialized at random"):
        load_encoder(f"hf:{tmp_path / 'm'}")
    for odd in ({"do_rescale": False}, {"rescale_factor": 1 / 127.5}):
        transformers.CLIPImageProcessor(**square, **odd).save_pretrained(tmp_path / "m")
        save_file(held, tmp_path / "m/model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=f"{next(iter(odd))}="):
            load_encoder(f"hf:{tmp_path / 'm'}")


def test_timm(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_vit").eval()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    encoder = load_encoder(f"timm:test_vit@{tmp_path / 'w.safetensors'}")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.inference_mode():
        features = model.forward_features(torch.stack([transform(image) for image in images()]))
        expected = model.forward_head(features, pre_logits=True)
    assert torch.allclose(encoded(encoder), expected, atol=1e-5) and not isinstance(encoder, TextEncoder)
    torch.save({"x": torch.zeros(1)}, tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match="does not fit the model: missing"):
        load_encoder(f"timm:test_vit@{tmp_path / 'odd.pt'}")
    with pytest.raises(ConfigError, match=r"timm:tst_vit@x: did you mean"):
        load_encoder("timm:tst_vit@x")


def test_huggingface(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    model = transformers.CLIPVisionModel(config).eval()
    model.save_pretrained(tmp_path / "m")
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path / "m")
    encoder = load_encoder(f"hf:{tmp_path / 'm'}")
    pixels = torch.stack([torch.from_numpy(np.array(encoder.transform(image))).permute(2, 0, 1) for image in images()])
    with torch.inference_mode():
        expected = model(pixel_values=encoder.normalize(pixels)).pooler_output
        own = processor(images(), return_tensors="pt")["pixel_values"]
    assert torch.allclose(encoder.encode(pixels), expected, atol=1e-6) and encoder.width == 32
    assert torch.allclose(
        encoder.normalize(pixels), own, atol=2 / 255 / 0.26
    )  # two of 255 levels: their resizing may have another implementation
    for resample in (2, 3):  # ViT, DeiT, BEiT and SigLIP: the whole image to a square
        square = transformers.CLIPImageProcessor(
            size={"height": 32, "width": 32}, do_center_crop=False, resample=resample
        )
        square.save_pretrained(tmp_path / "m")
        encoder = load_encoder(f"hf:{tmp_path / 'm'}")
        pixels = torch.stack([torch.from_numpy(np.array(encoder.transform(i))).permute(2, 0, 1) for i in images()])
        own = square(images(), return_tensors="pt")["pixel_values"]
        assert torch.allclose(encoder.normalize(pixels), own, atol=2 / 255 / 0.26)
    transformers.CLIPImageProcessor(size={"height": 32, "width": 48}, do_center_crop=False).save_pretrained(
        tmp_path / "m"
    )
    with pytest.raises(ConfigError, match="does not support its image processor"):
        load_encoder(f"hf:{tmp_path / 'm'}")
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        load_encoder(f"hf:{tmp_path / 'none'}")


def test_the_text_towers_identity_does_not_depend_on_the_images():
    from tests.unit.test_features import clip

    one, two = clip(), clip()
    with torch.no_grad():
        next(two.model.visual.parameters()).add_(1)
    assert one.weights != two.weights and one.text_weights == two.text_weights
    with torch.no_grad():
        next(two.model.text.parameters()).add_(1)
    two = type(two)(two.model)
    assert one.text_weights != two.text_weights
    assert F.cosine_similarity(one.text(["a"]), one.text(["a"])).item() == pytest.approx(1, abs=1e-5)
