"""Models of other libraries: pooling as documented there, unchanged between calls, complete; CoCa's texts; BatchNorm; and what may follow a model."""

import copy
import json

import open_clip
import pytest
import timm
import torch
from PIL import Image

from evals.encoders.encoder import Encoder
from evals.encoders.foreign import BackboneEncoder, from_timm
from evals.encoders.hf_pooling import refuse_unsteady
from evals.encoders.loading import load_encoder
from evals.suite.eval_options import EvalOptions
from evals.suite.evaluate import result_facts
from sparo_train.core import ema
from sparo_train.core.config import resolve
from sparo_train.core.ema import update_ema
from sparo_train.core.errors import CheckpointError, SparoError
from sparo_train.engine.local import LocalEngine, LocalEngineConfig
from sparo_train.engine.optim import AdamWConfig
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.objectives.token_cache_builder import tower_facts
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import tiny_recipe

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
MAPS = {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]}
KINDS = {
    "ViT": (SIZES, "pooler"),
    "ViTMAE": (SIZES, "class token"),
    "ViTMSN": (SIZES, "class token"),
    "IJepa": (SIZES, "mean of patches"),
    "Data2VecVision": (SIZES, "mean of patches"),
    "Segformer": (MAPS, "mean of the map"),
}


def saved(folder, kind, sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 56, "width": 56}).save_pretrained(folder)
    return model


def images(n=2):
    return torch.randint(0, 256, (n, 3, 56, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", KINDS)
def test_hf_models_are_pooled_as_documented_and_encode_twice_alike(kind, tmp_path):
    sizes, pooling = KINDS[kind]
    model = saved(tmp_path / "m", kind, sizes)
    encoder = load_encoder(f"hf:{tmp_path / 'm'}")
    found = encoder.encode(images())
    assert encoder.pooling == pooling and found.dim() == 2 and torch.equal(found, encoder.encode(images()))
    assert f"pooling={pooling}" in encoder.architecture
    assert result_facts(encoder, EvalOptions(), 0.0)["checkpoint"]["pooling"] == pooling
    x = encoder.normalize(images())
    with torch.no_grad():
        if kind == "ViTMAE":  # a plain ViT with these weights sees all patches
            plain = transformers.ViTModel(transformers.ViTConfig(**SIZES), add_pooling_layer=False).eval()
            lacking, _ = plain.load_state_dict(model.state_dict(), strict=False)
            assert not lacking
            expected = plain(x).last_hidden_state[:, 0]
        else:
            out = model(pixel_values=x)
            expected = {
                "pooler": lambda: out.pooler_output,
                "class token": lambda: out.last_hidden_state[:, 0],
                "mean of patches": lambda: out.last_hidden_state[:, 1 if kind == "Data2VecVision" else 0 :].mean(1),
                "mean of the map": lambda: out.last_hidden_state.mean((2, 3)),
            }[pooling]()
    torch.testing.assert_close(found.clone(), expected, rtol=0, atol=1e-6)


REFUSED = {
    "SamVision": (
        {**SIZES, "mlp_dim": 64, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1]},
        "does not know how to pool|does not encode",
    ),
    "VideoMAE": ({**SIZES, "num_frames": 2}, "image of 56 pixels cannot be encoded"),
    "Siglip2Vision": (
        {k: v for k, v in SIZES.items() if k != "image_size"} | {"num_patches": 16},
        "can only score models whose single input is the pixels of one image",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_hf_models_that_cannot_encode_images_are_refused_with_the_reason(kind, tmp_path):
    sizes, message = REFUSED[kind]
    if not hasattr(transformers, f"{kind}Model"):
        pytest.skip(f"this transformers has no {kind}Model")
    saved(tmp_path / "m", kind, sizes)
    with pytest.raises(SparoError, match=message):
        load_encoder(f"hf:{tmp_path / 'm'}")


def test_stored_features_belong_to_the_pooling(tmp_path):
    saved(tmp_path / "m", "ViT", SIZES)
    one, other = (load_encoder(f"hf:{tmp_path / 'm'}") for _ in range(2))
    other.pooling = "class token"
    assert one.weights == other.weights and one.architecture != other.architecture


COCA = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "attentional_pool": True, "attn_pooler_heads": 2,
        "output_tokens": True,
    },
    "text_cfg": {
        "context_length": 12, "vocab_size": 49408, "layers": 1, "heads": 2, "width": 16, "embed_cls": True, "output_tokens": True,
    },
    "multimodal_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1, "attn_pooler_heads": 2},
    "custom_text": True,
}  # fmt: skip


def test_cocas_texts_are_not_cut_before_their_class_token(tmp_path):
    (tmp_path / "coca-tiny.json").write_text(json.dumps(COCA))
    open_clip.add_model_config(tmp_path)
    torch.manual_seed(0)
    model = open_clip.create_model("coca-tiny").eval()
    torch.nn.init.normal_(model.text_decoder.text_projection)  # open_clip does not initialise it
    torch.save(model.state_dict(), tmp_path / "coca.pt")
    encoder = load_encoder(f"open_clip:coca-tiny@{tmp_path / 'coca.pt'}")
    captions = ["a cat", "two small red squares beside a very large blue circle"]
    with torch.no_grad():
        theirs = model.encode_text(open_clip.get_tokenizer("coca-tiny")(captions), normalize=True)
    torch.testing.assert_close(encoder.text(captions).clone(), theirs, rtol=0, atol=1e-6)
    assert encoder.images([Image.new("RGB", (40, 40))]).shape == (1, 16)


HYBRID = {
    "timm_model_name": "vit_small_resnet26d_224",
    "image_size": 64,
    "timm_model_kwargs": {"embed_dim": 32, "depth": 2, "num_heads": 2},
}


def test_a_trained_tower_with_batch_norm_is_refused_and_a_frozen_one_stays_as_it_is(shards, tmp_path):
    with pytest.raises(ValueError, match=r"normalizes over the batch \(patch_embed\.backbone.*Set freeze: blocks"):
        ClipConfig.model_validate({"vision": HYBRID})
    tree = tiny_recipe(shards, tmp_path)
    tree["objective"]["model"]["vision"] = {**HYBRID, "freeze": "blocks"}
    tree["objective"]["model"]["readout"] = {"kind": "gap"}
    objective = build_objective(resolve(RunConfig, tree, "x"))
    LocalEngine(LocalEngineConfig(device="cpu", precision="fp32"), AdamWConfig()).prepare(objective)
    trunk = objective.model.visual.trunk
    assert not trunk.training  # from the first step on, also without an earlier evaluation
    before = {n: b.clone() for n, b in trunk.named_buffers()}
    objective.model.encode_image(torch.randn(2, 3, 64, 64))
    assert all(torch.equal(b, before[n]) for n, b in trunk.named_buffers())


@pytest.mark.parametrize("known", [True, False], ids=["host", "device"])
def test_averages_and_cached_tokens_follow_buffers(known, monkeypatch):
    monkeypatch.setattr(ema, "_host_can_read", lambda applied: known or applied is None)
    model = Clip(ClipConfig.model_validate({"vision": {**HYBRID, "freeze": "blocks"}, "readout": {"kind": "gap"}}))
    average, still = copy.deepcopy(model), copy.deepcopy(model)
    facts = tower_facts(model.visual, {}, "fp32")["weights"]
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.mul_(3)
    update_ema(average, model, 0.5)
    update_ema(still, model, 0.5, torch.tensor(False))
    buffers, untouched = dict(average.named_buffers()), dict(still.named_buffers())
    names = [name for name, _ in model.named_buffers() if name.endswith("running_var")]
    assert names and all(torch.equal(buffers[name], dict(model.named_buffers())[name]) for name in names)
    assert not any(torch.equal(untouched[name], buffers[name]) for name in names)
    update_ema(still, model, 0.5, torch.tensor(True))
    assert all(torch.equal(dict(still.named_buffers())[name], buffers[name]) for name in names)
    assert tower_facts(model.visual, {}, "fp32")["weights"] != facts


class Odd(Encoder):
    """An encoder of 4 x 4 pixels that returns given outputs."""

    architecture = "odd"

    def __init__(self, gives):
        super().__init__(torch.nn.Linear(1, 1), (0.0,) * 3, (1.0,) * 3, "odd")
        self.image_size, self._gives = 4, gives

    def encode(self, pixels):
        return self._gives(pixels)


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda x: torch.rand(1, 5), "two encodings of one image differ"),
        (lambda x: torch.zeros(1, 5, 2), r"does not give one vector per image, got shape \(1, 5, 2\)"),
        (lambda x: torch.full((1, 5), float("nan")), "is not finite"),
        (lambda x: x @ x.missing, r"a test image cannot be encoded \(AttributeError"),
    ],
)
def test_an_encoder_that_does_not_give_one_steady_vector_is_refused(gives, message):
    with pytest.raises(CheckpointError, match=f"odd: .*{message}"):
        refuse_unsteady(Odd(gives))


def test_every_library_model_is_tried_twice_when_it_is_loaded(monkeypatch, tmp_path):
    def drop(self, pixels):
        return torch.rand(len(pixels), 3)

    weights = tmp_path / "resnet.pt"
    torch.save(timm.create_model("test_resnet", num_classes=0).state_dict(), weights)
    assert from_timm(f"test_resnet@{weights}").pooling == "avg"
    monkeypatch.setattr(BackboneEncoder, "encode", drop)
    with pytest.raises(CheckpointError, match="two encodings of one image differ"):
        from_timm(f"test_resnet@{weights}")
