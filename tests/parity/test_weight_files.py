"""Weight files as other programs save them: prefixes of wrappers, several models, TorchScript archives, sparo-clip's names, DINOv2's names."""

import argparse
import json
import zipfile

import numpy as np
import open_clip
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import sparo_train.openclip as plugin
from evals.encoders.foreign import timm_state
from evals.encoders.loading import load_encoder
from object_centric.released.slate_file import SlateFile
from object_centric.released.weight_reader import open_weight_file
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.weight_files.state_dicts import extract_state, read_raw, strip_wrapper_prefixes
from sparo_train.models.weight_files.weights import read_weights

WRAPPERS = [
    "module.",
    "_orig_mod.",
    "model.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
]
TINY = {"backbone": "ViT-Tiny-8"}


def tiny(**changes):
    torch.manual_seed(0)
    return Clip(ClipConfig.model_validate({**TINY, **changes})).eval()


def images(size=64):
    return torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def saved(path, content):
    torch.save(content, path)
    return path


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WRAPPERS), max_size=4), st.sampled_from(["", "visual.conv1.", "blocks.0."]))
def test_wrappers_are_stripped_in_any_order_and_number(prefixes, inner):
    name = f"{inner}weight"
    assert strip_wrapper_prefixes("".join(prefixes) + name) == name
    # Inside a name, `module` and `model` may belong to the model itself.
    assert strip_wrapper_prefixes("encoder.backbone.model.weight") == "encoder.backbone.model.weight"
    assert strip_wrapper_prefixes("visual._checkpoint_wrapped_module.conv1._orig_mod.weight") == "visual.conv1.weight"


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "model._orig_mod.", "module.model.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_every_reader_takes_prefixed_names(prefix, key, tmp_path):
    def put(state, name):
        state = {prefix + n: t for n, t in state.items()}
        return saved(tmp_path / name, state if key is None else {key: state, "epoch": 3, "best": np.float64(0.3)})

    clip = tiny()
    file = put(clip.state_dict(), "clip.pt")
    assert read_weights(file).keys() == clip.state_dict().keys()
    ours = load_encoder(file).encode(images())
    assert torch.allclose(load_encoder(f"open_clip:ViT-Tiny-8@{file}").encode(images()), ours, atol=1e-6)
    vit = timm.create_model("test_vit", num_classes=0).state_dict()
    assert timm_state(str(put(vit, "timm.pth")), "x").keys() == vit.keys()
    tensors, _, _ = open_weight_file("slate", str(put({"dvae.weight": torch.ones(1)}, "slate.pt")), SlateFile)
    assert "dvae.weight" in tensors


def test_two_names_that_become_one_are_refused(tmp_path):
    file = saved(tmp_path / "x.pt", {"module.logit_scale": torch.ones(1), "logit_scale": torch.zeros(1)})
    with pytest.raises(
        CheckpointError, match=r"x\.pt: two tensors have the same name .* got module\.logit_scale and logit_scale"
    ):
        read_weights(file)


def test_a_file_with_two_models_asks_which(tmp_path):
    weights, average = tiny().state_dict(), {n: t + 1 for n, t in tiny().state_dict().items()}
    file = saved(tmp_path / "ema.pt", {"state_dict": weights, "state_dict_ema": average})
    with pytest.raises(
        CheckpointError, match=r"expected one model, got 2: state_dict, state_dict_ema\. Append \?state=NAME"
    ):
        load_encoder(file)
    chosen = load_encoder(f"{file}?state=state_dict_ema")
    assert torch.equal(chosen.model.logit_scale, average["logit_scale"]) and chosen.label.endswith(
        "?state=state_dict_ema"
    )
    assert torch.equal(load_encoder(f"{file}?state=state_dict").model.logit_scale, weights["logit_scale"])
    vit = timm.create_model("test_vit", num_classes=0).state_dict()
    other = saved(tmp_path / "timm.pth", {"state_dict": vit, "state_dict_ema": {n: t + 1 for n, t in vit.items()}})
    with pytest.raises(CheckpointError, match="expected one model, got 2"):
        load_encoder(f"timm:test_vit@{other}")
    assert torch.equal(load_encoder(f"timm:test_vit@{other}?state=state_dict").model.norm.weight, vit["norm.weight"])
    stock = open_clip.create_model("ViT-Tiny-8", force_custom_text=True).state_dict()
    third = saved(tmp_path / "stock.pt", {"state_dict": stock, "state_dict_ema": {n: t + 1 for n, t in stock.items()}})
    with pytest.raises(CheckpointError, match="expected one model, got 2"):
        load_encoder(f"open_clip:ViT-Tiny-8@{third}")
    for key, more in (("state_dict", 0), ("state_dict_ema", 1)):
        found = load_encoder(f"open_clip:ViT-Tiny-8@{third}?state={key}")
        assert torch.equal(found.model.logit_scale, stock["logit_scale"] + more) and found.label.endswith(key)
    with pytest.raises(CheckpointError, match="state=none: "):
        load_encoder(f"open_clip:ViT-Tiny-8@{third}?state=none")
    same = saved(tmp_path / "same.pt", {"state_dict": weights, "model": dict(weights)})
    assert torch.equal(read_weights(same)["logit_scale"], weights["logit_scale"])


def test_numbers_of_numpy_and_namespaces_are_plain_data_and_arrays_are_not(tmp_path):
    told = {"a": np.float64(0.5), "b": np.float32(0.25), "c": np.int64(7), "d": np.bool_(True)}
    file = saved(tmp_path / "x.pt", {"w": torch.ones(1), "args": argparse.Namespace(lr=np.float64(1e-3)), **told})
    raw = read_raw(file)
    assert {key: raw[key] for key in told} == {"a": 0.5, "b": 0.25, "c": 7, "d": True} and raw["args"].lr == 1e-3
    assert not any(isinstance(raw[key], np.generic) for key in told)
    with pytest.raises(CheckpointError, match="could run code"):
        read_raw(saved(tmp_path / "array.pt", {"x": np.arange(3)}))


class Holder(torch.nn.Module):
    """Write a CLIP under OpenAI's flat names, with the three sizes that its archives contain."""

    def __init__(self, model):
        super().__init__()
        for name in ("visual", "transformer", "token_embedding", "ln_final"):
            setattr(self, name, getattr(model, name))
        for name in ("positional_embedding", "text_projection", "logit_scale"):
            setattr(self, name, getattr(model, name))
        for name, value in (("input_resolution", 224), ("context_length", 77), ("vocab_size", 49408)):
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x):
        return x + self.logit_scale


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    torch.manual_seed(0)
    model = open_clip.create_model("ViT-S-32", force_quick_gelu=True).eval()
    path = tmp_path_factory.mktemp("openai") / "ViT-S-32.pt"
    with torch.no_grad():
        torch.jit.trace(Holder(model), torch.zeros(1), check_trace=False).save(str(path))
    return path, model


def test_torchscript_archives_are_read_without_running_them(archive, monkeypatch):
    path, model = archive
    expected = torch.jit.load(str(path), map_location="cpu").state_dict()
    monkeypatch.setattr(torch.jit, "load", None)
    found = read_raw(path)
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )
    encoder = load_encoder(path)
    assert "QuickGELU" in encoder.assumed
    x = images(224)
    with torch.no_grad():
        theirs = model.encode_image(encoder.normalize(x), normalize=True)
    torch.testing.assert_close(encoder.encode(x).clone(), theirs, rtol=0, atol=1e-6)


def test_openais_weights_are_not_scored_with_the_other_gelu(archive, tmp_path):
    path, _ = archive
    with pytest.raises(ConfigError, match=r"--model ViT-S-32: .* which uses QuickGELU.* Remove --model"):
        load_encoder(path, "ViT-S-32")
    with pytest.raises(ConfigError, match="OpenAI's approximation of GELU"):
        load_encoder(f"open_clip:ViT-S-32@{path}")
    again = saved(tmp_path / "saved.pt", read_raw(path))  # by the command that torch's error message names
    assert "QuickGELU" in load_encoder(again).assumed


def damaged(path, to, name, change):
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for item in old.namelist():
            data = old.read(item)
            if item.endswith(name):
                data = change(data)
            if data is not None:
                new.writestr(item, data)
    return to


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("/data/0", lambda data: data[:-8], "outside its storage"),
        ("/data/0", lambda data: None, "There is no item named"),
        ("/data.pkl", lambda data: b"cposix\nsystem\n(S'true'\ntR.", "posix.system"),
        ("/data.pkl", lambda data: b"\x80\x02}.", "has no attribute 'attributes'"),
        ("/byteorder", lambda data: b"big", "big-endian"),
    ],
)
def test_archives_that_hold_more_or_less_are_refused_with_the_command(archive, tmp_path, name, change, message):
    with pytest.raises(CheckpointError, match=rf"(?s)TorchScript archive.*{message}.*torch\.jit\.load.*OUT\.pt"):
        read_raw(damaged(archive[0], tmp_path / "x.pt", name, change))


def sparo_clip_names(state):
    """Write our LinearBotneck or FDT weights under the names of the sparo-clip repository."""
    theirs = {
        "visual.linear_bottleneck.bottleproj.": "vision_bottleproj.",
        "text.linear_bottleneck.bottleproj.": "text_bottleproj.",
        "visual.linear_bottleneck.proj": "visual.proj",
        "text.linear_bottleneck.proj": "text_projection",
        "visual.fdt.space_dict": "space_dict",
        "visual.fdt.q_map.": "img_query_model.q_map.",
        "text.fdt.q_map.": "txt_query_model.q_map.",
        "text.": "",
    }
    out = {}
    for name, value in state.items():
        if name != "text.fdt.space_dict":
            ours = next((ours for ours in theirs if name.startswith(ours)), "")
            out[f"module.{theirs.get(ours, '')}{name.removeprefix(ours)}"] = value
    return out


@pytest.mark.parametrize("readout", [{"kind": "linear_bottleneck", "bottleneck_dim": 16}, {"kind": "fdt", "codes": 32}])
def test_sparo_clips_other_readouts_load(readout, tmp_path):
    model = tiny(readout=readout)
    file = saved(tmp_path / "epoch_1.pt", {"epoch": 1, "state_dict": sparo_clip_names(model.state_dict())})
    encoder = load_encoder(file)
    assert encoder.model.config.readout.kind == readout["kind"]
    with torch.no_grad():
        expected = model.encode_image(encoder.normalize(images()), True)
    torch.testing.assert_close(encoder.encode(images()).clone(), expected, rtol=0, atol=1e-6)
    captions = ["a red circle", "two blue squares"]
    with torch.no_grad():
        texts = model.encode_text(encoder.tokenizer.batch(captions), True)
    torch.testing.assert_close(encoder.text(captions).clone(), texts, rtol=0, atol=1e-6)
    both = {"space_dict": torch.ones(2, 2), "vision_bottleproj.weight": torch.ones(2, 2)}
    with pytest.raises(CheckpointError, match=r"has a codebook .space_dict. and a bottleneck"):
        read_weights(saved(tmp_path / "both.pt", both))


def test_heads_of_an_unusual_width_must_be_specified(tmp_path):
    file = tmp_path / "odd.safetensors"
    for layers in (3, 2):  # 3: with one more block it would be ViT-Tiny, but a class token does not replace a block
        sizes = {"vision": {"head_width": 64, "layers": layers}, "text": {"heads": 2, "layers": layers}}
        model = tiny(**sizes, readout={"kind": "token"}) if layers == 3 else tiny(**sizes)
        save_file(model.state_dict(), file)
        with pytest.raises(
            CheckpointError,
            match=rf"number of heads is unknown, .*width 128 with {layers} blocks.*--model FILE\.json",
        ):
            load_encoder(file)
    cfg = plugin.model_cfg(model.config)
    (tmp_path / "model.json").write_text(json.dumps({"model_cfg": cfg}))
    encoder = load_encoder(file, str(tmp_path / "model.json"))
    with torch.no_grad():
        expected = model.encode_image(encoder.normalize(images()), True)
    torch.testing.assert_close(encoder.encode(images()).clone(), expected, rtol=0, atol=1e-6)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json: is not an open_clip config"):
        load_encoder(file, str(tmp_path / "other.json"))


def test_a_head_width_per_tower_is_inferred_from_shapes(tmp_path):
    readout = {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 16, "text_head_width": 8}
    model = tiny(readout=readout)
    assert [part.sparo.head_width for part in (model.visual, model.text)] == [16, 8]
    file = tmp_path / "towers.safetensors"
    save_file(model.state_dict(), file)
    for name in (None, "ViT-Tiny-8"):  # towers by name, the readout by its shapes
        encoder = load_encoder(file, name)
        assert (encoder.model.config.readout.head_width, encoder.model.config.readout.text_head_width) == (16, 8)
        with torch.no_grad():
            texts = model.encode_text(encoder.tokenizer.batch(["a cat"]), True)
        torch.testing.assert_close(encoder.text(["a cat"]).clone(), texts, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="both towers need the same head width, got 16 and 8"):
        tiny(readout={**readout, "share_queries": True})


@pytest.mark.parametrize(("name", "registers"), [("vit_small_patch14_dinov2", 0), ("vit_small_patch14_reg4_dinov2", 4)])
def test_dinov2s_own_names_are_read_as_timm_reads_them(name, registers, tmp_path):
    sizes = {"num_classes": 0, "depth": 2, "img_size": 56, "embed_dim": 48, "num_heads": 3}
    model = timm.create_model(name, **sizes).eval()
    official = {n: torch.randn_like(t) for n, t in model.state_dict().items()}
    if registers:
        official["register_tokens"] = official.pop("reg_token")
        official["pos_embed"] = torch.randn(1, 17, 48)  # the class token has a position here
    official["mask_token"] = torch.zeros(1, 48)
    from timm.models.vision_transformer import checkpoint_filter_fn

    expected = checkpoint_filter_fn(dict(official), model)
    teacher = {**{f"backbone.{n}": t for n, t in official.items()}, "dino_head.mlp.0.weight": torch.zeros(1)}
    for content in (official, {"teacher": teacher}):
        found = timm_state(str(saved(tmp_path / "x.pth", content)), "x")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], t) for n, t in expected.items())
        # The class token and its position are separate parameters in our model.
        own = load_encoder(saved(tmp_path / "plain.pth", content), "vit_tiny").model
        assert torch.equal(own.cls_token + own.pos_embed[:, :1], official["cls_token"] + official["pos_embed"][:, :1])
        assert own.config.registers == registers and own.config.layer_scale


def test_a_state_dict_may_be_nested_three_levels_deep(tmp_path):
    state = {"w": torch.ones(1)}
    assert extract_state({"model": {"state_dict": state}}, "x").keys() == {"w"}
    for odd in (
        {},
        {"state_dict": {}},
        {"state_dict": {"a": "b"}},
        [1],
        {"epoch": 3},
        {"model": {"model": {"model": {"model": state}}}},
    ):
        with pytest.raises(CheckpointError, match="x: contains no state dict of tensors"):
            extract_state(odd, "x")
