"""`task: validation_loss`: a run's loss on held-out samples, during training and afterwards, by length of clips."""

import json

import numpy as np
import pytest
import torch

from evals.encoders.loading import load_encoder
from evals.report.paper_tables import describe_different_data
from evals.report.results_file import Record
from evals.suite.loss_task import LossTaskConfig
from evals.suite.suite import Suite
from evals.suite.task import IncompatibleTaskError, check_compatible, check_tasks_compatible
from launch.commands.train import train
from sparo_data.writer import write_shards
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.registries import METHODS
from sparo_train.core.rng import generator
from sparo_train.data.sources.base import open_source
from sparo_train.train.build import build_objective
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.helpers.runs import assert_bit_equal, run
from tests.resume.test_videos import video_recipe


def test_losses_are_measured_at_any_length_of_clips(tmp_path):
    tree, _ = video_recipe(tmp_path, "savi")  # flow and depth are predicted, and training draws crops and mirrors
    tasks = {
        name: {"task": "validation_loss", "shards": str(tmp_path / "v/clips/test"), **more}
        for name, more in (("held", {}), ("longer", {"frames": 5}), ("few", {"limit": 2}))
    }
    config = run({**tree, "steps": 4, "eval": {"tasks": tasks}})
    assert train(config).reason == "finished"
    lines = [json.loads(x) for x in (config.folder / "metrics.jsonl").read_text().splitlines() if '"eval"' in x]
    found = lines[-1]
    encoder = load_encoder(str(config.folder))
    results = Suite({n: LossTaskConfig(**t) for n, t in tasks.items()}).run(encoder)
    assert {n: r.metrics for n, r in results.items()} == {
        n: found[n] for n in tasks
    }  # the same afterwards as during training
    held = results["held"]
    assert (held.n, results["few"].n, held.headline) == (5, 2, "loss") and held.interval[
        0
    ] < held.value < held.interval[1]
    assert results["longer"].options["frames"] == 5 and held.options["frames"] == 3
    # Tasks after it score the same as before: no module stays in training mode, where dropout would act.
    assert not any(module.training for module in encoder.model.modules())
    # Computed by hand: the objective on each sample alone, without crops and mirrors.
    objective = encoder.trained.objective.eval()
    data = config.data.model_copy(update={"crop_scale": (1.0, 1.0), "hflip": 0.0})
    examples = METHODS.get("video_slots").examples(config.objective, data)
    source = open_source(
        "x", next(iter(config.data.sources.values())).model_copy(update={"shards": tasks["held"]["shards"]})
    )
    by_hand = []
    for number in range(5):
        example = examples.prepare(source.storages[0].read(number)[1], source, generator(0, "validation", number))
        with torch.no_grad():
            by_hand.append(float(objective(examples.stack([example]), Progress(3, 4, 0)).total))
    assert np.allclose(held.predictions["loss"], by_hand, rtol=1e-5)
    # Counts and draws of an evaluation's forward are not the run's: training continues as without an evaluation.
    between = run({**tree, "steps": 4, "name": "between", "eval": {"every_steps": 2, "tasks": tasks}})
    without = run({**tree, "steps": 4, "name": "without"})
    assert train(between).reason == train(without).reason == "finished"
    assert_bit_equal(between.folder, without.folder, 4)
    # Scores of clips of different lengths have no best one.
    records = [Record(n, "held", r, {}, "", tmp_path) for n, r in results.items() if n != "few"]
    assert "another loss, or other clips" in describe_different_data(records)


def test_samples_that_cannot_be_used_are_counted_and_bad_numbers_refused(tmp_path):
    tree, _ = video_recipe(tmp_path, "psb")
    config = run({**tree, "steps": 1, "optim": {"lr": 1e-4}})
    train(config)
    encoder = load_encoder(str(config.folder))
    source = open_source("x", next(iter(config.data.sources.values())))
    rows = [source.storages[0].read(i) for i in range(3)]
    rows[1] = ("torn", {k: v for k, v in rows[1][1].items() if ".png" not in k and not k.endswith("png")})
    write_shards(tmp_path / "mixed", iter(rows), 3)
    task = LossTaskConfig(shards=str(tmp_path / "mixed"))
    (result,) = Suite({"t": task}).run(encoder).values()
    assert result.n == 2 and result.counts == {"skipped": 1}
    assert any("1 of 3 samples could not be used" in said for said in result.remarks())
    assert not Suite({"t": task}).run(encoder, part=(1, 2)) and Suite({"t": task}).run(encoder, part=(0, 2))
    write_shards(tmp_path / "torn", iter([rows[1]]), 1)
    with pytest.raises(DataError, match=r"t: no sample of .*torn can be used: missing frames"):
        Suite({"t": LossTaskConfig(shards=str(tmp_path / "torn"))}).run(encoder)
    with pytest.raises(ConfigError, match=r"validation_loss\.shards: .*nowhere' matches no shard"):
        Suite({"t": LossTaskConfig(shards=str(tmp_path / "nowhere"))}).check()
    encoder.trained.objective.model.decoder.layers[0].weight.data.fill_(torch.nan)
    with pytest.raises(DataError, match=r"the loss of sample 00000000-.* is not finite"):
        Suite({"t": task}).run(encoder)


def test_losses_of_whole_batches_and_of_teachers_are_refused_before_the_first_step(shards, tmp_path):
    task = {"task": "validation_loss", "shards": str(shards)}
    for recipe in (tiny_recipe, dino_recipe):
        config = run(recipe(shards, tmp_path / "runs", eval={"tasks": {"held": task}}))
        with pytest.raises(
            IncompatibleTaskError,
            match=r"eval\.tasks\.held\.task=validation_loss: the loss of objective\.kind=.*Use another task",
        ):
            check_tasks_compatible(build_objective(config), config, config.eval.tasks)
    tree, _ = video_recipe(tmp_path, "psb")
    config = run({**tree, "eval": {"tasks": {"held": task}}})
    check_tasks_compatible(build_objective(config), config, config.eval.tasks)
    with pytest.raises(IncompatibleTaskError, match="has weights only"):  # as a separate job would load it
        check_tasks_compatible(build_objective(config), config, config.eval.tasks, exported=True)
    encoder = load_encoder("pixels:16")
    with pytest.raises(
        IncompatibleTaskError, match=r"needs the recipe of its training run, .* has weights only. Give a run folder"
    ):
        check_compatible("t", LossTaskConfig(shards="x"), encoder)
    stills = {**tree, "objective": {"kind": "slots", "model": tree["objective"]["model"]}}
    config = run({**stills, "name": "stills"})
    encoder.trained = type("T", (), {"objective": build_objective(config), "config": config})
    with pytest.raises(
        IncompatibleTaskError, match=r"t\.frames=6: applies to clips, which objective\.kind=slots does not have"
    ):
        check_compatible("t", LossTaskConfig(shards="x", frames=6), encoder)
