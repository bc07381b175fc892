"""Stock open_clip loads our models, our exports and sparo-clip's files."""

import json
import subprocess
import sys

import open_clip
import pytest
import torch
from PIL import Image

import sparo_train.openclip as plugin
from sparo_train.core.errors import CheckpointError, ConfigError, SparoError
from sparo_train.core.registries import READOUTS as TABLE
from sparo_train.models.clip_config import OPENAI_MEAN, OPENAI_STD, ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.weight_files.description import infer_config, infer_readout
from sparo_train.models.weight_files.weights import load_into, read_weights, to_ours, to_sparo_clip

from .test_clip import READOUTS, TINY, tiny, tokens


@pytest.mark.parametrize("readout", READOUTS)
def test_an_exported_folder_loads_in_open_clip(readout, tmp_path):
    model = tiny(readout)
    folder = plugin.export(model.config, model.state_dict(), tmp_path / "out", OPENAI_MEAN, OPENAI_STD)
    loaded, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    loaded.eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    text = tokenizer(["a red cube", "two small green things"])
    assert text.shape == (2, 16)
    image = preprocess(Image.new("RGB", (50, 40), "red"))[None]
    assert image.shape == (1, 3, 32, 32)
    for normalize in (False, True):
        assert torch.equal(loaded.encode_text(text, normalize), model.encode_text(text, normalize))
        torch.testing.assert_close(loaded.encode_image(image, normalize), model.encode_image(image, normalize))


@pytest.mark.long
def test_plain_clip_exports_need_no_plug_in(tmp_path):
    model = tiny("token")
    folder = plugin.export(model.config, model.state_dict(), tmp_path / "out", OPENAI_MEAN, OPENAI_STD)
    code = f"import open_clip; m = open_clip.create_model('local-dir:{folder}'); print(type(m).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "CustomTextCLIP"


@pytest.mark.parametrize("name", ["sparo-ViT-Tiny-8", "gap-ViT-Tiny-8"])
def test_named_models_take_our_checkpoints_and_sparo_clips(name, tmp_path):
    torch.manual_seed(1)
    config = plugin.names()[name]
    model = Clip(config).eval()
    text = tokens(4, 9, width=32)
    torch.save({"epoch": 3, "name": "x", "state_dict": to_sparo_clip(model.state_dict())}, tmp_path / "sc.pt")
    torch.save({f"model.{n}": t for n, t in model.state_dict().items()}, tmp_path / "ours.pt")
    for file in ("sc.pt", "ours.pt"):
        loaded, _, _ = open_clip.create_model_and_transforms(name, pretrained=str(tmp_path / file))
        assert torch.equal(loaded.eval().encode_text(text), model.encode_text(text))
    assert open_clip.get_tokenizer(name)(["x"]).shape == (1, 32)


def test_sparo_clip_layout_has_the_references_names():
    model = tiny("sparo")
    state = to_sparo_clip(model.state_dict())
    assert all(n.startswith("module.") for n in state)
    names = {n.removeprefix("module.") for n in state}
    assert {
        "positional_embedding",
        "token_embedding.weight",
        "ln_final.weight",
        "logit_scale",
        "text_sparo.q_emb",
        "visual.sparo.v.weight",
    } <= names
    assert "transformer.resblocks.1.attn.in_proj_weight" in names
    assert state["module.text_sparo.v.bias"] is state["module.text_sparo.k.bias"]
    back = to_ours(state)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[n], t) for n, t in model.state_dict().items())


def test_vit_b_32_sparo_has_290_entries_as_released():
    with torch.device("meta"):
        model = Clip(ClipConfig.model_validate({"backbone": "ViT-B-32", "readout": {"kind": "sparo"}}))
    state = to_sparo_clip(model.state_dict())
    assert len(state) == 290
    assert sum(t.numel() for t in state.values()) == 150_900_353


def test_untied_values_survive_the_round_trip():
    model = tiny("sparo-keep")
    back = to_ours(to_sparo_clip(model.state_dict()))
    assert torch.equal(back["text.sparo.v.weight"], model.state_dict()["text.sparo.v.weight"])


@pytest.mark.parametrize("readout", sorted(set(READOUTS) - {"gap", "gap-patches"}))
def test_architecture_is_inferred_from_the_weights(readout):
    with torch.device("meta"):
        model = Clip(ClipConfig.model_validate({"backbone": "ViT-B-32", "readout": READOUTS[readout]}))
        again = Clip(infer_config(model.state_dict()))
    assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}


def test_options_of_a_readout_that_shapes_do_not_determine_are_reported():
    """A key that `infer` does not return gets its default, and a file that was trained with another value would score plausibly."""
    silent = []
    for kind in TABLE.names():
        row = TABLE.get(kind)
        # The text tower determines `text`; gap and cls have no weights.
        guessed = set(row.model_fields) - {"kind", "text"} - _inferred(kind)
        silent += [kind] if guessed and not row.inference_note and kind not in ("gap", "cls") else []
    assert silent == []


def _inferred(kind):
    with torch.device("meta"):
        model = Clip(ClipConfig.model_validate({"backbone": "ViT-B-32", "readout": {"kind": kind}}))
        return set(infer_readout(model.state_dict(), "visual.", 0) or {}) if kind != "cls" else set()


def test_the_number_of_heads_is_known_for_our_models_and_required_for_others():
    with torch.device("meta"):
        tiny = Clip(ClipConfig.model_validate({"backbone": "ViT-Tiny-16", "readout": READOUTS["sparo"]}))
        assert infer_config(tiny.state_dict()).vision.head_width == tiny.config.vision.head_width == 32
        assert infer_config(tiny.state_dict()).text.heads == tiny.config.text.heads == 4
        huge = Clip(plugin.find_config("ViT-H-14"))
        assert infer_config(huge.state_dict()).vision.head_width == 80  # no other published width has 80
        # A published width without a published depth does not determine the number of heads.
        odd = Clip(ClipConfig.model_validate({"vision": {"layers": 3, "head_width": 32}, "text": {"layers": 3}}))
    with pytest.raises(
        CheckpointError, match=r"number of heads is unknown, .* width 768 with 3 blocks .* width 512 with 3 blocks"
    ):
        infer_config(odd.state_dict())


def test_plain_open_clip_names_describe_our_models_too():
    assert plugin.find_config("ViT-B-32-quickgelu").quick_gelu and not plugin.find_config("ViT-B-32").quick_gelu
    assert plugin.find_config("sparo-ViT-B-16") == plugin.names()["sparo-ViT-B-16"].model_copy(
        update={"backbone": None, "embed_dim": 4096}
    )
    with pytest.raises(ConfigError, match="did you mean 'ViT-B-32'"):
        plugin.find_config("ViT-B-33")
    with pytest.raises(ConfigError, match=r"vision\.attentional_pool: unknown key"):
        plugin.find_config("coca_ViT-B-32")


def test_a_web_page_saved_as_weights_is_refused(tmp_path):
    (tmp_path / "x.pt").write_text("<html>404</html>")
    with pytest.raises(CheckpointError, match=r"x\.pt: not a"):
        read_weights(tmp_path / "x.pt")


def test_low_precision_creation_works_through_open_clip():
    model = open_clip.create_model("sparo-ViT-Tiny-8", precision="bf16").eval()
    out = model.encode_image(torch.zeros(1, 3, 64, 64, dtype=torch.bfloat16))
    assert out.norm().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.long
def test_runner_registers_before_the_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import open_clip, sys\nm, _, _ = open_clip.create_model_and_transforms('sparo-ViT-Tiny-8')\nprint(type(m.visual.sparo).__name__, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "sparo.openclip", "run", "--", str(program), "--flag"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("Sparo ['--flag']")


@pytest.mark.long
def test_changed_internals_of_open_clip_raise_an_error():
    code = (
        "import open_clip.model as m\n"
        "original = m.CustomTextCLIP.__init__\n"
        "def moved(self, embed_dim, vision_cfg, text_cfg, **k):\n"
        "    vision_cfg = {a: b for a, b in vision_cfg.items() if a != 'readout'}\n"
        "    original(self, embed_dim, vision_cfg, text_cfg, **k)\n"
        "m.CustomTextCLIP.__init__ = moved\n"
        "import sparo.openclip\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "whose internals changed" in done.stderr and "3.3.0" in done.stderr


@pytest.mark.long
def test_import_keeps_the_random_stream():
    code = "import torch; torch.manual_seed(5); import sparo_train.openclip; print(torch.rand(1).item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch.manual_seed(5)
    assert float(done.stdout) == torch.rand(1).item()


def test_unknown_tower_keys_are_refused():
    cfg = plugin.model_cfg(tiny("sparo").config)
    cfg.pop("custom_text")
    cfg["vision_cfg"]["timm_pool"] = "x"
    with pytest.raises(SparoError, match="timm_pool cannot be combined"):
        open_clip.model.CustomTextCLIP(**cfg)


def test_a_checkpoint_that_runs_code_is_refused(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    torch.save({"state_dict": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(CheckpointError, match=r"trap\.pt: holds objects that could run code"):
        read_weights(tmp_path / "trap.pt")


@pytest.mark.parametrize("name", ["broken.safetensors", "broken.pt", "list.pt"])
def test_damaged_weight_files_are_named(name, tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    for broken in ("broken.safetensors", "broken.pt"):
        (tmp_path / broken).write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_weights(tmp_path / name)


def test_weights_of_another_model_are_listed():
    state = tiny("sparo").state_dict()
    state.pop("logit_scale")
    state["extra"] = torch.zeros(1)
    state["visual.sparo.q_emb"] = torch.zeros(3)
    with pytest.raises(
        CheckpointError, match=r"missing logit_scale; unexpected extra; visual\.sparo\.q_emb: \(3,\) in the file"
    ):
        load_into(tiny("sparo"), state, "file")


def test_export_config_is_plain_json(tmp_path):
    model = tiny("sparo")
    folder = plugin.export(model.config, model.state_dict(), tmp_path, OPENAI_MEAN, OPENAI_STD)
    config = json.loads((folder / "open_clip_config.json").read_text())
    assert config["model_cfg"]["vision_cfg"]["readout"]["slots"] == 4
    assert config["preprocess_cfg"]["mean"] == list(OPENAI_MEAN)
    assert TINY["vision"]["layers"] == config["model_cfg"]["vision_cfg"]["layers"]
