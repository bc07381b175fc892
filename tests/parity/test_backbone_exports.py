"""Exports of DINO runs for timm, transformers and torch, loaded by these libraries only."""

import io
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from evals.encoders.loading import load_encoder
from evals.interop.backbone_exports import load_readout
from evals.interop.exporting import export_run
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import dino_recipe
from tests.helpers.samples import image_folder, jpeg

DINOV2 = ("objective.model.layer_scale=0.5",)
REGISTERS = (*DINOV2, "objective.model.registers=3")
GATED = (*REGISTERS, "objective.model.ffn_layer=swiglu")
DINOV3 = (*REGISTERS, "objective.model.positions=rope", "objective.model.norm_eps=1e-5")
KINDS = {
    "dino": (),
    "dinov2": DINOV2,
    "registers": REGISTERS,
    "gated": GATED,
    "rope": DINOV3,
    "rope-gated": (*DINOV3, GATED[-1]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that makes a run of each kind once, with weights that differ from initial ones."""
    made = {}

    def run(kind, *words):
        if (kind, words) not in made:
            folder = tmp_path_factory.mktemp(kind)
            tree = dino_recipe(folder, folder, steps=2)
            tree["data"]["sources"] = {"own": {"folder": str(image_folder(folder / "images"))}}
            keys = [*KINDS[kind], "optim.warmup_steps=0", "optim.lr=0.05", *words]
            train(resolve(RunConfig, override(tree, keys, RunConfig), "x"))
            made[kind, words] = folder / "dino"
        return made[kind, words]

    return run


CLS = "objective.model.readout={kind: cls}"


def pixels(encoder, count=3):
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return x, encoder.normalize(x)


@pytest.mark.parametrize("kind", KINDS)
def test_timm_and_transformers_compute_the_same_features(runs, kind):
    run = runs(kind, CLS)
    encoder = load_encoder(run)
    x, normalised = pixels(encoder)
    expected = encoder.encode(x)
    model = timm.create_model(f"local-dir:{export_run(run, None, 'timm')}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.allclose(model.forward_features(normalised)[:, 0], expected, atol=1e-5)
        assert torch.allclose(model(normalised), expected, atol=1e-5)
    picture = Image.open(io.BytesIO(jpeg(3, (90, 70))))
    ready = encoder.normalize(encoder.stack([encoder.transform(picture)]))
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)(picture)
    assert (theirs - ready[0]).abs().max() < 0.05  # one or two of 256 levels, by rounding
    assert model.pretrained_cfg["mean"] == pytest.approx(tuple(encoder.mean.flatten().tolist()))
    transformers = pytest.importorskip("transformers")
    folder = export_run(run, None, "transformers")
    loaded, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"] and all("pooler" in name for name in info["missing_keys"])
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(normalised).last_hidden_state[:, 0], expected, atol=1e-5)
    with pytest.raises(
        CheckpointError, match=r"is in the layout of timm\. Write timm:vit_.*timm/model\.safetensors\."
    ) as refused:
        load_encoder(f"hf:{export_run(run, None, 'timm')}")
    for place in (f"hf:{folder}", str(refused.value).partition(" Write ")[2].rstrip(".")):
        again = load_encoder(place)  # evaluation can read both exports, too
        assert torch.allclose(again.encode(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["dino", "rope"])
@pytest.mark.parametrize(
    "words", [(), ("objective.model.readout.attend_cls=false", "objective.model.readout.normalize=true")]
)
def test_five_lines_add_the_readout(runs, kind, words):
    run = runs(kind, *words)
    encoder = load_encoder(run)
    x, normalised = pixels(encoder)
    folder = export_run(run, None, "timm")
    trunk, readout = timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), load_readout(folder)
    with torch.no_grad():
        slots = readout(trunk.forward_features(normalised), need_attention=True)
    assert torch.allclose(slots.values.flatten(1), encoder.encode(x), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("words", [(CLS,), ()], ids=["cls", "sparo"])
def test_a_torch_program_needs_nothing_else(runs, words, tmp_path):
    run = runs("dino", *words)
    encoder = load_encoder(run)
    path = export_run(run, tmp_path / "backbone.pt2", "torch")
    x, _ = pixels(encoder, 5)
    np.save(tmp_path / "x.npy", x.numpy())
    program = (
        "import sys, numpy as np, torch\n"
        f"m = torch.export.load({str(path)!r}).module()\n"
        f"out = m(torch.from_numpy(np.load({str(tmp_path / 'x.npy')!r})))\n"
        f"np.savez({str(tmp_path / 'out.npz')!r}, *[o.detach().numpy() for o in out])\n"
        "assert not any(name.split('.')[0] in ('sparo', 'sparo_train', 'timm') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    encoding, patches, attention = np.load(tmp_path / "out.npz").values()
    assert np.allclose(encoding, encoder.encode(x), atol=1e-5)
    assert np.allclose(patches, encoder.tokens(x)[:, 1:], atol=1e-5)
    assert attention.shape == ((5, 4, 17) if not words else (5, 0, 0))


def test_exports_map_deep_pixels_like_the_run_or_say_that_they_do_not(runs, tmp_path, caplog):
    run = runs("dino", CLS, "data.pixel_range=[0, 4000]")
    deep = np.linspace(0, 4000, 40 * 40).reshape(40, 40).astype(np.uint16)
    expected = load_encoder(run).images([deep, deep.T])
    for layout in ("dino", "onnx"):
        assert torch.allclose(load_encoder(export_run(run, None, layout)).images([deep, deep.T]), expected, atol=1e-5)
    assert "pixel_range" not in caplog.text
    card = (export_run(run, tmp_path / "timm", "timm") / "README.md").read_text()
    assert "the exported transform does not apply data.pixel_range=(0.0, 4000.0)" in caplog.text
    assert "mapped to 8 bits by data.pixel_range=(0.0, 4000.0)" in card and "load_readout" not in card


def test_cards_say_how_the_readout_is_loaded(runs):
    for layout in ("timm", "transformers"):
        card = (export_run(runs("dino"), None, layout) / "README.md").read_text()
        assert 'slots = load_readout("' in card


def test_an_export_with_a_readout_is_not_scored_without_it(runs):
    run = runs("dino")
    for layout, place in (("timm", "timm:vit_base_patch16_224@{}/model.safetensors"), ("transformers", "hf:{}")):
        with pytest.raises(
            CheckpointError, match=r"has a readout \(readout.safetensors\), which the library's model ignores"
        ):
            load_encoder(place.format(export_run(run, None, layout)))
    with pytest.raises(
        CheckpointError, match=r"backbone.pt2: is a torch.export program, .* load the program with torch"
    ):
        load_encoder(export_run(run, None, "torch"))
    with pytest.raises(CheckpointError, match=r"timm: has a readout"):
        load_encoder(export_run(run, None, "timm"))


def test_exports_that_a_library_cannot_represent_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"--layout timm: timm's .* epsilon 1e-06, got norm_eps=0\.001"):
        export_run(runs("dino", CLS, "objective.model.norm_eps=0.001"), tmp_path / "x", "timm")
    with pytest.raises(ConfigError, match=r"reads tokens from before the last norm.*Use --layout torch"):
        export_run(runs("dino", "objective.model.readout.norm_first=false"), tmp_path / "y", "timm")
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()
