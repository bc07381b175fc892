"""`fit` inside a program: its threads, torch's settings, logging and its own evaluation."""

import json
import logging
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from evals.encoders.loading import load_encoder
from evals.suite.evaluate import evaluate
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.disk import metrics
from sparo_train.core.disk.checkpoint_store import CheckpointStore
from sparo_train.core.errors import CheckpointError, ConfigError, TrainingError
from sparo_train.models.clip_model import Clip
from sparo_train.train.fit import fit
from sparo_train.train.run_config import EvalConfig
from tests.helpers.processes import THREADS
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import assert_bit_equal, run
from tests.helpers.samples import sample
from tests.unit.test_knn import labelled


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    write_shards(folder := tmp_path_factory.mktemp("shards"), (sample(i) for i in range(96)), 24)
    return folder


@pytest.fixture(scope="module")
def plain(shards, tmp_path_factory):
    """A run in a program that changes nothing."""
    torch.set_num_threads(THREADS)  # as in a test, because another number gives other rounding errors
    config = run(tiny_recipe(shards, tmp_path_factory.mktemp("plain"), steps=4))
    fit(config)
    return config.folder


def recipe(shards, folder, **changes):
    return run(tiny_recipe(shards, folder, steps=4, **changes))


def test_settings_of_the_program_do_not_change_the_model(shards, tmp_path, plain):
    config = recipe(shards, tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        with torch.inference_mode():
            fit(config)
        assert torch.get_default_dtype() == torch.float64 and torch.equal(torch.rand(3), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bit_equal(config.folder, plain, 4)


def test_another_default_device_is_refused(shards, tmp_path, plain):
    config = recipe(shards, tmp_path)
    with torch.device("meta"), pytest.raises(ConfigError, match="default device: expected cpu, got meta"):
        fit(config)
    assert not config.folder.exists()
    with torch.device("meta"), pytest.raises(ConfigError, match="default device: expected cpu, got meta"):
        evaluate(plain, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_settings_of_the_program_do_not_change_encodings(plain, dtype):
    image = [Image.new("RGB", (32, 32), "red")]
    expected = load_encoder(plain).images(image)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.inference_mode():
            encoder = load_encoder(plain)
        assert torch.equal(encoder.images(image), expected) and not encoder.model.logit_scale.is_inference()
    finally:
        torch.set_default_dtype(torch.float32)


def test_probes_are_trained_where_gradients_are_disabled(shards, tmp_path, plain):
    place = labelled(tmp_path / "set", 24, 0)
    probe = {"task": "attentive_probe", "train": place, "test": place, "epochs": 1, "head": {"kind": "gap"}}
    tasks = resolve(EvalConfig, {"tasks": {"a": probe}}, "x").tasks
    expected = evaluate(load_encoder(plain), tasks)["a"].metrics
    with torch.inference_mode():
        assert evaluate(load_encoder(plain), tasks)["a"].metrics == expected


def test_a_thread_trains_like_the_main_thread(shards, tmp_path, plain):
    config = recipe(shards, tmp_path)
    thread = threading.Thread(target=fit, args=(config,))
    thread.start()
    thread.join()
    assert_bit_equal(config.folder, plain, 4)


def test_scores_of_numpy_and_torch_are_written(shards, tmp_path):
    config = recipe(shards, tmp_path, eval={"every_steps": 2})
    scores = {"mine": {"a": np.float32(1.5), "b": torch.tensor(2)}, "c": np.int64(3)}
    fit(config, lambda *_: lambda *_: scores)
    records = metrics.read(config.folder / "metrics.jsonl", "eval")
    assert [r["step"] for r in records] == [2, 4]
    assert records[0]["mine"] == {"a": 1.5, "b": 2} and records[0]["c"] == 3


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda: 1 / 0, "evaluate: step 2: ZeroDivisionError: division by zero; .*test_fit.py"),
        (lambda: 0.5, "evaluate: expected a dictionary of scores by task, got float"),
        (lambda: {"step": 99}, "evaluate: 'step' has another meaning in metrics.jsonl"),
    ],
)
def test_a_failed_evaluation_of_the_program_loses_no_step(shards, tmp_path, scores, message):
    config = recipe(shards, tmp_path, eval={"every_steps": 2}, checkpoint={"every_steps": 0})
    with pytest.raises(TrainingError, match=message):
        fit(config, lambda *_: lambda *_: scores())
    assert list(CheckpointStore(config.folder / "checkpoints").steps()) == [2]


def test_names_of_tasks_that_records_use_are_refused(shards, tmp_path):
    with pytest.raises(ConfigError, match=r"eval.tasks.*step: the name has another meaning in metrics.jsonl"):
        recipe(shards, tmp_path, eval={"tasks": {"step": {"task": "zeroshot", "root": "x"}}})


def test_resized_positions_leave_the_programs_logging_alone(shards, tmp_path, plain, caplog):
    logging.getLogger().handlers[:] = [h for h in logging.getLogger().handlers if h is not caplog.handler]
    before = list(logging.getLogger().handlers)
    logging.getLogger().handlers[:] = []
    try:
        model = load_encoder(plain).model
        assert isinstance(model, Clip)
        state = model.state_dict()
        positions = state["visual.positional_embedding"]
        state["visual.positional_embedding"] = torch.zeros(1 + 4 * (len(positions) - 1), positions.shape[1])
        resized = model.adapt_to_resolution(state)["visual.positional_embedding"]
        assert resized.shape == positions.shape and not logging.getLogger().handlers
    finally:
        logging.getLogger().handlers[:] = before


def test_a_file_of_a_run_folder_is_answered_with_the_folder(plain):
    with pytest.raises(
        CheckpointError, match=f"config.yaml: is not a file of weights. Name the folder of the run: {plain}"
    ):
        load_encoder(f"{plain}/config.yaml")


def test_records_begin_with_kind_and_step(plain):
    lines = (plain / "metrics.jsonl").read_text().splitlines()
    assert all(list(json.loads(line))[:2] == ["kind", "step"] for line in lines)
