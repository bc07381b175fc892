"""`sparo export --layout transformers` of CLIP: transformers' model, tokenizer and preprocessing give our encodings."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, CLIPModel, CLIPProcessor

from evals.encoders.clip_encoder import clip_encoder
from evals.interop.exporting import TrainedWeights, export_weights
from sparo_train.core.errors import ConfigError
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig

CAPTIONS = ["a red cube", "It's a green sphere behind a cone, with more words than it can read", "x", "wow!! a cube!"]


def objective(**model):
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16, **model.pop("vision", {})}
    text = {"width": 48, "layers": 2, "heads": 2, "context_length": 16}
    torch.manual_seed(0)
    return ClipObjective(
        ClipObjectiveConfig.model_validate({"model": {"embed_dim": 24, "vision": vision, "text": text, **model}})
    ).eval()


def export(of: ClipObjective, folder):
    return export_weights(TrainedWeights("tiny", of.config, of.state_dict(), 0, 8, 1e-3), folder, None, "transformers")


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_clip_model_gives_the_same_encodings(tmp_path, quick_gelu):
    own = objective(quick_gelu=quick_gelu, vision={"mlp_ratio": 3.0})
    folder = export(own, tmp_path)
    model, loaded = CLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert isinstance(AutoModel.from_pretrained(folder), CLIPModel)
    processor = CLIPProcessor.from_pretrained(folder, backend="pil")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    images = [Image.fromarray(one) for one in pixels]
    inputs = processor(text=CAPTIONS, images=images, return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad():
        out = model.eval()(**inputs)
    encoder = clip_encoder(own)
    assert torch.allclose(out.image_embeds, encoder.images(images), atol=1e-5)
    assert torch.allclose(out.text_embeds, encoder.text(CAPTIONS), atol=1e-5)
    scale = own.model.logit_scale.exp().item()
    assert torch.allclose(out.logits_per_image, scale * encoder.images(images) @ encoder.text(CAPTIONS).T, atol=1e-4)


def test_models_that_transformers_does_not_have_are_refused(tmp_path):
    slots = {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 16}
    for readout in (slots, {"kind": "linear_bottleneck"}):
        with pytest.raises(
            ConfigError, match=rf"CLIPModel has no readout {readout['kind']}\. Use --layout open_clip or onnx"
        ):
            export(objective(readout=readout), tmp_path / "a")
    timm = {"timm_model_name": "vit_tiny_patch16_224", "image_size": 32}
    tower = {key: timm.get(key) for key in timm}
    config = ClipObjectiveConfig.model_validate({"model": {"embed_dim": 24, "vision": tower}})
    with pytest.raises(ConfigError, match="the image tower is a timm model"):
        export_weights(TrainedWeights("tiny", config, {}, 0, 8, 1e-3), tmp_path / "b", None, "transformers")
    assert not list(tmp_path.rglob("*.safetensors"))
