"""Encoders are recognised by the weights that they have now, and selections by those of which they are a part."""

import json

import pytest
import torch

from evals.encoders.loading import load_encoder
from evals.encoders.selection import MaskedEncoder
from evals.feature_store.features import FeatureStore
from evals.interop.exporting import export_run
from evals.slots.eval_inputs import Pairs, question_images
from evals.slots.naming import contain_names
from evals.suite.eval_options import EvalOptions
from evals.suite.evaluate import only_slots
from launch.commands.train import train
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out, folders = tmp_path_factory.mktemp("identity"), []
    shards = out / "shards"
    write_shards(shards, (sample(i) for i in range(32)), 16)
    for seed in (0, 1):
        tree = tiny_recipe(shards, out, steps=4, name=f"run{seed}", seed=seed, eval={})
        tree["objective"]["model"]["readout"] = {"kind": "sparo", "slots": 4, "head_width": 8, "slot_width": 8}
        config = resolve(RunConfig, tree, "x")
        train(config)
        folders.append(config.folder)
    return folders


def test_changed_weights_are_encoded_again(runs, tmp_path):
    encoder, other = (load_encoder(run) for run in runs)
    store, captions = FeatureStore(tmp_path), ["a red cube", "a blue ball"]
    before, identity = store.texts(encoder, captions), encoder.weights
    assert encoder.weights == identity
    encoder.model.load_state_dict(other.model.state_dict())
    assert encoder.weights == other.weights != identity and encoder.text_weights == other.text_weights
    assert torch.equal(store.texts(encoder, captions), other.text(captions)) and not torch.equal(
        before, other.text(captions)
    )


def test_slots_in_python_are_checked(runs, tmp_path):
    encoder = load_encoder(runs[0])
    for wrong, message in (([-1], "-1"), ([1.0], "1.0"), ([4], "4"), ([], "")):
        with pytest.raises(ConfigError, match=f"^slots {message}: .* has 4 slots, numbered from 0"):
            MaskedEncoder.keep_slots(encoder, wrong)
        with pytest.raises(ConfigError, match=f"--slots {message}: .* has 4 slots, numbered from 0"):
            only_slots(encoder, wrong)
    with pytest.raises(ConfigError, match=r"--slots 0,3: no such file|0,3: .*not"):
        only_slots(encoder, "0,3")
    masked = MaskedEncoder.keep_slots(encoder, [0, 1])
    masked.precision = "bf16"
    assert encoder.precision == "bf16"
    encoder.precision = "bfloat16"
    with pytest.raises(ConfigError, match="precision: expected one of fp32, tf32, bf16, fp16, got bfloat16"):
        encoder.text(["a red cube"])


def test_results_record_the_selected_units(runs, tmp_path):
    assert EvalOptions(slots=(0, 2)).selection_facts() == {"units": "slots", "chosen": [0, 2]}
    encoder = load_encoder(runs[0])
    content = {"schema": 1, "sparo": "selection", "checkpoint": encoder.weights, "count": 4, "chosen": [3, 1]}
    (tmp_path / "sel.json").write_text(json.dumps(content))
    options = EvalOptions(slots=str(tmp_path / "sel.json"))
    assert options.selection_facts()["chosen"] == [3, 1]
    kept = only_slots(encoder, str(tmp_path / "sel.json"))
    pixels = torch.zeros(1, 3, encoder.image_size, encoder.image_size, dtype=torch.uint8)
    parts = kept.encode(pixels).unflatten(1, (4, -1)).abs().sum(2)[0]
    assert (parts > 0).tolist() == [False, True, False, True]
    # The same selection fits the export of these weights.
    onnx = load_encoder(export_run(runs[0], None, "onnx"))
    assert onnx.exported_from == encoder.weights and torch.allclose(
        only_slots(onnx, str(tmp_path / "sel.json")).encode(pixels), kept.encode(pixels), atol=1e-5
    )


def test_open_clip_refuses_a_name_that_the_file_contradicts(runs):
    folder = export_run(runs[0], None, "open_clip")
    with pytest.raises(
        (ConfigError, CheckpointError), match=r"has .*but the open_clip_config\.json next to the weights says"
    ):
        load_encoder(f"open_clip:ViT-B-32@{folder / 'open_clip_model.safetensors'}")


def test_copies_of_an_image_are_one_image_of_the_questions(runs):
    class Rows:
        keys = ["a", "b", "c"]  # noqa: RUF012
        first_copies = [0, 1, 0]  # noqa: RUF012

    material = Pairs(None, Rows(), None, None, torch.tensor([0, 1, 2, 2]), [], "micro", "")  # type: ignore[arg-type]
    assert question_images(material) == [("a",), ("b",), ("a",), ("a",)]
    assert contain_names([["a dog", "a cat"]], ["cat"]).tolist() == [[True]]
