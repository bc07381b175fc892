"""`sparo export --layout onnx`: programs equal to the models for all readouts and batch sizes, and the tokenizer's file."""

import json
import logging
import sys

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from evals.encoders.clip_encoder import clip_encoder
from evals.encoders.dino_encoder import dino_encoder
from evals.encoders.loading import load_encoder
from evals.interop.exporting import TrainedWeights, export_weights
from evals.interop.tokenizer_file import tokenizer_json
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.registries import EXPORTS, READOUTS
from sparo_train.data.examples.image_text import ClipTokenizer
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig
from sparo_train.objectives.dino import DinoObjective
from sparo_train.objectives.dino_config import DinoObjectiveConfig

CAPTIONS = [
    "a red cube",
    "two small green spheres behind a yellow cone, and more words than the model can read",
    "x",
    "",
]
VISION = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
TEXT = {"width": 32, "layers": 2, "heads": 2, "context_length": 16}
SPARO = {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 16}
ORDINARY = ("token", "sparo", "flair")  # the other readouts run with -m slow


def clip(readout: dict, folder, vision=None, **more):
    loss = {"loss": {"kind": "sigmoid"}, "init_logit_bias": -10.0} if readout["kind"] == "flair" else {}
    model = {"embed_dim": 32, "vision": vision or VISION, "text": TEXT, "readout": readout, **more}
    if "init_logit_bias" in loss:
        model["init_logit_bias"] = loss.pop("init_logit_bias")
    torch.manual_seed(0)
    objective = ClipObjective(ClipObjectiveConfig.model_validate({"model": model, **loss})).eval()
    trained = TrainedWeights("tiny", objective.config, objective.state_dict(), 0, 8, 1e-3)
    return clip_encoder(objective), export_weights(trained, folder, None, "onnx")


def dino(model: dict, folder):
    size = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
    size = {"image_size": 32} if "timm_model_name" in model else size
    bands = model.get("bands", 3)
    colours = {
        "mean": [0.4] * bands,
        "std": [0.3] * bands,
        "crops": {"local_crops_number": 0, "jitter": [0, 0, 0, 0], "gray_prob": 0},
    }
    config = DinoObjectiveConfig.model_validate({"model": {**size, **model}, "head": {"out_dim": 16}, **colours})
    torch.manual_seed(0)
    objective = DinoObjective(config).eval()
    trained = TrainedWeights("tiny", objective.config, objective.state_dict(), 0, 8, 1e-3)
    return dino_encoder(objective), export_weights(trained, folder, None, "onnx")


def pixels(count: int, bands: int = 3) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, bands, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )


def check_images(own, exported, bands: int = 3) -> None:
    for count in (1, 3, 32):
        assert torch.allclose(exported.encode(pixels(count, bands)), own.encode(pixels(count, bands)), atol=1e-5)


def check_attention(own, exported) -> None:
    rows = [np.ascontiguousarray(one.permute(1, 2, 0)) for one in pixels(3)]
    slots, expected = exported.image_slots(rows), own.image_slots(rows)
    assert torch.allclose(slots.attention, expected.attention, atol=1e-5)
    assert torch.allclose(F.normalize(slots.values, dim=-1), F.normalize(expected.values, dim=-1), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [kind if kind in ORDINARY else pytest.param(kind, marks=pytest.mark.slow) for kind in READOUTS.names()]
)
def test_programs_of_clip_equal_the_model(kind, tmp_path):
    own, folder = clip({"sparo": SPARO, "map": {"kind": "map", "head_width": 16}}.get(kind, {"kind": kind}), tmp_path)
    exported = load_encoder(folder)
    check_images(own, exported)
    queries = own.queries(CAPTIONS) if kind == "flair" else own.text(CAPTIONS)
    for some in (CAPTIONS[:1], CAPTIONS[:3], CAPTIONS * 8):
        found, rows = exported.text(some), [CAPTIONS.index(one) for one in some]
        expected = F.normalize(queries, dim=-1) if kind == "flair" else queries
        assert torch.allclose(found, expected[rows], atol=1e-5)
    facts = json.loads((folder / "onnx.json").read_text())
    assert facts["logit_scale"] == pytest.approx(own.model.logit_scale.exp().item(), rel=1e-6)
    for part, precisions in facts["cosine_with_fp32"].items():
        assert precisions["fp16"] > 0.9999 and precisions["int8"] > 0.99, part  # with signed weights: 0.83 without VNNI
    if kind == "sparo":
        check_attention(own, exported)
        text, expected = exported.text_slots(CAPTIONS[:3]), own.text_slots(CAPTIONS[:3])
        assert torch.allclose(text.attention, expected.attention, atol=1e-5)
        halves = load_encoder(f"onnx:{folder}?precision=fp16")
        assert halves.weights != exported.weights and halves.encode(pixels(3)).shape == (3, 32)
    if kind == "flair":  # the third program scores images whose patches are pooled by texts
        import onnxruntime

        run = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("image", "text", "score")}
        patches = run["image"].run(["patches"], {"pixels": pixels(5).numpy()})[0]
        tokens = own.tokenizer.batch(CAPTIONS).numpy()
        texts = run["text"].run(["encoding"], {"tokens": tokens})[0]
        scores = run["score"].run(None, {"patches": patches, "texts": texts})[0]
        assert np.allclose(scores, own.conditioned(own.patches(pixels(5)).flatten(1), queries), atol=1e-5)


@pytest.mark.long
def test_weights_beyond_the_limit_of_one_file_are_stored_separately(tmp_path, monkeypatch):
    monkeypatch.setattr("evals.interop.onnx_export._LARGEST_FILE", 1000)
    own, folder = clip(SPARO, tmp_path)
    names = [f"{part}{precision}.onnx" for part in ("image", "text") for precision in ("", ".fp16", ".int8")]
    assert {path.name for path in folder.glob("*.onnx*")} == {*names, *(f"{name}.data" for name in names)}
    assert all((folder / name).stat().st_size < 400_000 for name in names)
    exported = load_encoder(folder)
    check_images(own, exported)
    check_attention(own, exported)
    for precision in ("fp16", "int8"):
        assert load_encoder(f"onnx:{folder}?precision={precision}").text(CAPTIONS).shape == (4, 32)
    # The weights are a part of the identity under which features are stored.
    data, before = folder / "image.onnx.data", exported.weights
    data.write_bytes(data.read_bytes()[:-4] + b"\0\0\0\1")
    assert load_encoder(folder).weights != before
    monkeypatch.undo()
    clip(SPARO, tmp_path)
    assert {path.name for path in folder.glob("*.onnx*")} == set(names)


@pytest.mark.slow
def test_programs_of_timm_towers_and_shared_queries_equal_the_model(tmp_path):
    vision = {"timm_model_name": "vit_tiny_patch16_224", "image_size": 32}
    own, folder = clip(SPARO, tmp_path / "timm", vision)
    check_images(own, load_encoder(folder))
    own, folder = clip(
        {**SPARO, "grp_size": 2, "share_kv": False, "weighting": "softmax"}, tmp_path / "grouped", quick_gelu=True
    )
    check_images(own, load_encoder(folder))
    check_attention(own, load_encoder(folder))


BACKBONES = {
    "sparo": {"readout": {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 16}, "registers": 2, "layer_scale": 1e-5},
    "dinov3": {"positions": "rope", "ffn_layer": "swiglu", "layer_scale": 1.0, "registers": 1, "bands": 5},
    "cls": {},
    "resnet": {"timm_model_name": "resnet18", "readout": {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 16, "replace_last_block": False}},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name in ("sparo", "dinov3") else pytest.param(name, marks=pytest.mark.slow) for name in BACKBONES]
)
def test_programs_of_dino_equal_the_model(name, tmp_path):
    own, folder = dino(BACKBONES[name], tmp_path)
    exported, bands = load_encoder(folder), BACKBONES[name].get("bands", 3)
    check_images(own, exported, bands)
    if "readout" in BACKBONES[name]:
        check_attention(own, exported)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8))
    if bands == 3:  # this also compares the preprocessing
        assert torch.allclose(exported.images([image]), own.images([image]), atol=1e-5)
    (sums,) = [line for line in (folder / "onnx.json").read_text().splitlines() if '"kind"' in line]
    assert '"dino"' in sums


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(24), ensure_ascii=False), encoding="utf-8")
    return tokenizers.Tokenizer.from_file(str(path))


@settings(max_examples=300, deadline=None)
@example("It's 3 o'clock;   a cat's café, naïve ÉTUDE — 日本語 😀 <end_of_text>")
@example("word " * 40)
@example("a dog’s toy, “a red sign”, ‘so’ said")
@example("ﬁne ﬂow, Ĳssel, salt &amp; pepper, 2 &lt; 3, &quot;no&quot;")
@given(
    st.text(
        st.characters(blacklist_categories=("Cs", "Cc", "Co", "Cn", "Mn", "Lm", "Sk"), max_codepoint=0x24F), max_size=60
    )
)
def test_the_tokenizer_file_gives_the_same_ids(tokenizer, text):
    ours = ClipTokenizer(24)
    import ftfy

    repaired = all(letter in text for letter in "’“") or "ﬁ" in text
    if repaired or ("&" not in text and ftfy.fix_text(text) == text):  # the file repairs some characters only
        assert tokenizer.encode(text).ids == ours(text)


def test_errors_name_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"has no onnx\.json\. Give a folder that"):
        load_encoder(f"onnx:{tmp_path}")
    with pytest.raises(ConfigError, match="precision must be one of fp32, fp16, int8, got int4"):
        load_encoder(f"onnx:{tmp_path}?precision=int4")
    (tmp_path / "onnx.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match=r"onnx\.json: format: .*, got 2\. Export the run again"):
        load_encoder(tmp_path)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"--layout onnx: needs the package onnxscript\. pip install"):
        clip({"kind": "token"}, tmp_path / "x")
    assert logging.getLogger("torch.onnx").level == logging.NOTSET and "onnx" in EXPORTS.names()
