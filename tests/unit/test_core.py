"""Checkpoint store, metrics log, run folder, signals."""

import errno
import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.commands.train import train
from sparo_train.core.config import Frozen, resolve, resumable_field
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.disk import metrics, pieces
from sparo_train.core.disk.pieces import Piece
from sparo_train.core.disk.rundir import RunDir, RunLease
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import CheckpointError, ConfigError, SupersededError, TrainingError
from sparo_train.core.rng import generator, torch_seed
from sparo_train.core.world import StopFlag, World
from sparo_train.train.checkpointing import Saver
from sparo_train.train.run_config import RunConfig
from tests.helpers.logs import logged
from tests.helpers.processes import CONTEXT
from tests.helpers.recipes import dino_recipe, slots_recipe, tiny_recipe

STATE = {
    "model": {"w": torch.arange(6.0).view(2, 3), "scale": torch.tensor(2.5)},
    "random": {"cpu": torch.zeros(5, dtype=torch.uint8)},
}


class Log(Frozen):
    every_steps: int = 5


class Local(Frozen):
    kind: Literal["local"] = resumable_field("local", "its kind")
    precision: str = "fp32"


class Ddp(Frozen):
    kind: Literal["ddp"] = resumable_field("ddp", "its kind")
    precision: str = "fp32"
    bucket_mb: int = resumable_field(25, "MB")
    param_dtype: str | None = resumable_field("bf16", "cast", with_kind=True)


class Recipe(Frozen):
    lr: int = 1
    world_size: int | None = resumable_field(None, "ranks")
    log: Log = resumable_field(Log(), "said")
    engine: Local | Ddp = Local()


def save(keeper, step, state, meta):
    """Save as one rank."""
    return Saver(keeper, Ranks(World(), "gloo", 0.0), background=False).save(
        step, {part: {n: Piece.unsharded(t) for n, t in tensors.items()} for part, tensors in state.items()}, meta
    ) or keeper.folder(step)


def test_a_checkpoint_reads_back_bit_equal(tmp_path):
    path = save(store.CheckpointStore(tmp_path), 7, STATE, {"samples": 56})
    assert store.read_meta(path)["samples"] == 56 and store.read_meta(path)["step"] == 7
    assert all(torch.equal(store.read_part(path, "model")[n], t) for n, t in STATE["model"].items())


def test_old_checkpoints_go_except_every_nth(tmp_path):
    keeper = store.CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        save(keeper, step, STATE, {})
    assert list(keeper.steps()) == [4, 8, 9, 10]


def test_a_smaller_number_of_checkpoints_frees_space_before_the_next_is_written(tmp_path, monkeypatch):
    keeper = store.CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        save(keeper, step, STATE, {})
    kept = []
    keeper = store.CheckpointStore(tmp_path, keep_last=1)
    monkeypatch.setattr(
        "sparo_train.core.disk.pieces.write_pieces", lambda *_: (kept.extend(keeper.steps()), (0, ""))[1]
    )
    keeper.write(4, {"model": {}})
    assert kept == [3]


def test_unfinished_and_foreign_folders_are_not_checkpoints(tmp_path):
    keeper = store.CheckpointStore(tmp_path)
    save(keeper, 3, STATE, {})
    (tmp_path / ".tmp-step-00000009").mkdir()
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-final").mkdir()
    assert keeper.latest() == tmp_path / "step-00000003"
    save(keeper, 4, STATE, {})
    assert not (tmp_path / ".tmp-step-00000009").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_leaves_the_previous_checkpoint(tmp_path, monkeypatch, code):
    keeper = store.CheckpointStore(tmp_path)
    before = save(keeper, 3, STATE, {})

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pieces, "write_pieces", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000004: could not be written .*step-00000003 is intact"):
        save(keeper, 4, STATE, {})
    assert keeper.latest() == before and torch.equal(store.read_part(before, "model")["w"], STATE["model"]["w"])
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    keeper = store.CheckpointStore(tmp_path)
    save(keeper, 3, STATE, {"samples": 1})
    assert store.read_meta(save(keeper, 3, STATE, {"samples": 2}))["samples"] == 2


def sign(path, change):
    """Change a meta.json, with a valid checksum."""
    meta = json.loads((path / "meta.json").read_text())
    meta.pop("checksum")
    change(meta)
    (path / "meta.json").write_text(json.dumps({**meta, "checksum": store._checksum(meta)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "model.safetensors").unlink(), r"model\.safetensors: missing"),
        (lambda p: (p / "model.safetensors").write_bytes(b"x"), r"model\.safetensors: expected \d+ bytes, got 1"),
        (lambda p: (p / "meta.json").write_text("{"), r"meta\.json: not readable"),
        (lambda p: (p / "meta.json").write_text('{"format": 99}'), "format: this version reads 2 and 3, got 99"),
        (lambda p: sign(p, lambda meta: meta.pop("files")), "files is missing or has the wrong type, got NoneType"),
        (lambda p: sign(p, lambda meta: meta.update(files=[])), "files is missing or has the wrong type, got list"),
        (
            lambda p: sign(p, lambda meta: meta.update(files={"../x": {}})),
            "invalid entry for '../x' in `files`",
        ),
    ],
)
def test_damage_is_named_with_the_remedy(tmp_path, damage, message):
    path = save(store.CheckpointStore(tmp_path), 1, STATE, {})
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        store.read_part(path, "model")


def test_a_flipped_bit_is_noticed(tmp_path):
    path = save(store.CheckpointStore(tmp_path), 1, STATE, {})
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="damaged"):
        store.read_part(path, "model")
    with pytest.raises(CheckpointError, match="has no part 'ema'"):
        store.read_part(path, "ema")


def test_metrics_are_rewound_and_torn_lines_dropped(tmp_path):
    log = metrics.MetricsLog(tmp_path, tensorboard=False)
    for step in range(1, 6):
        log.write("train", step, {"loss": float("nan") if step == 2 else 1.0 / step})
    log.write("eval", 4, {"zero": {"acc1": 0.5}})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "st')
    metrics.MetricsLog(tmp_path, after_step=3, tensorboard=False).close()
    records = metrics.read(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3] and records[1]["loss"] == "nan"
    assert metrics.read(tmp_path / "metrics.jsonl", "eval") == []


def test_tensorboard_gets_nested_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = metrics.MetricsLog(tmp_path)
    log.write("eval", 4, {"zero": {"acc1": 0.5}, "note": "x"})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("eval/zero/acc1")] == [(4, 0.5)]


class _Recorded:
    """A stand-in for wandb: records values by step."""

    def __init__(self):
        self.logged = []

    def log(self, what, step):
        self.logged.append((step, what))

    def finish(self):
        pass


@pytest.mark.parametrize("method", ["clip", "dino", "slots"])
def test_first_images_and_scores_are_logged_to_tensorboard_and_wandb(tmp_path, shards, monkeypatch, method):
    """Eight images of the first batch with captions, and each evaluation as a table; a resumed run does not log the images again."""
    recorded = _Recorded()
    fake = SimpleNamespace(
        init=lambda **_: recorded,
        Image=lambda pixels, caption: (pixels.shape, str(pixels.dtype), caption),
        Table=lambda columns, data: (columns, data),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    make = {"clip": tiny_recipe, "dino": dino_recipe, "slots": slots_recipe}[method]
    tree = make(shards, tmp_path, log={"every_steps": 2, "wandb": "project"})
    train(resolve(RunConfig, {**tree, "stop_after_steps": 2}, "x"))
    train(resolve(RunConfig, {**tree, "stop_after_steps": 4}, "x"))
    images = [(step, what["samples"]) for step, what in recorded.logged if "samples" in what]
    assert len(images) == 1 and images[0][0] == 0 and len(images[0][1]) == 8
    size, kind, caption = images[0][1][0]
    assert size[2] == 3 and kind == "uint8" and bool(caption) == (method == "clip") and "[" not in caption
    events = EventAccumulator(str(next((tmp_path / tree["name"]).glob("tensorboard"))), size_guidance={"images": 0})
    events.Reload()
    assert "samples/0" in events.Tags()["images"]


def test_scores_are_a_table_in_tensorboard_and_wandb(tmp_path, monkeypatch):
    recorded = _Recorded()
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **_: recorded, Table=lambda columns, data: (columns, data))
    )
    with logged() as said:
        log = metrics.MetricsLog(tmp_path, wandb="project")
        log.write("eval", 6, {"near|far": {"acc1": 0.5}})
        log.samples(lambda: [][1])  # errors here do not end a run
        log.write("train", 7, {"loss": 1.0})
        log.close()
    assert len(said) == 1 and "log.samples: the first batch could not be shown (IndexError" in said[0]
    assert (7, {"train/loss": 1.0}) in recorded.logged and (
        6,
        {"eval/scores": (["task", "metric", "score"], [["near|far", "acc1", 0.5]])},
    ) in recorded.logged
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    text = events.Tensors("eval/scores/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| near\\|far | acc1 | 0.5000 |" in text
    assert [record["step"] for record in metrics.read(tmp_path / "metrics.jsonl")] == [6, 7]


def test_logging_to_wandb_without_wandb_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.wandb: wandb is not installed. Run pip install -e '\.\[wandb\]'"):
        metrics.MetricsLog(tmp_path, wandb="project", tensorboard=False)


def _open(path, queue):
    try:
        RunDir(path).open_for_training(Recipe())
        queue.put("opened")
    except TrainingError as error:
        queue.put("refused" if "another process is training in this folder" in str(error) else str(error))


def in_another_process(path):
    queue = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=_open, args=(path, queue))
    process.start()
    process.join()
    return queue.get()


def test_a_run_folder_refuses_another_recipe_and_a_second_process(tmp_path):
    first = RunDir(tmp_path / "run")
    first.open_for_training(Recipe())
    assert in_another_process(tmp_path / "run") == "refused"
    worker = CONTEXT.get_context("fork").Process(
        target=time.sleep, args=(60,)
    )  # like a loader worker, it inherits open files
    worker.start()
    first.close()
    assert in_another_process(tmp_path / "run") == "opened"
    worker.kill()
    second = RunDir(tmp_path / "run")
    second.open_for_training(Recipe(lr=7))  # the earlier start ended before training, so nothing is lost
    second.close()
    second.open_for_training(Recipe())
    second.close()
    (tmp_path / "run/metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ConfigError, match="lr: 1 -> 2"):
        second.open_for_training(Recipe(lr=2))
    second.close()
    third = RunDir(tmp_path / "run")
    third.open_for_training(Recipe(log=Log(every_steps=9), world_size=4, engine=Ddp()))
    third.write_heartbeat(step=3)
    third.close()
    beat = json.loads((tmp_path / "run" / "heartbeat.json").read_text())
    assert beat["step"] == 3 and beat["pid"] == os.getpid()
    assert "torch" in json.loads((tmp_path / "run" / "environment.json").read_text())["packages"]


def _hold(path, ready, go_on, queue):
    os.environ.update(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="0")
    rundir = RunDir(path)
    rundir.open_for_training(Recipe())
    log = metrics.MetricsLog(path, tensorboard=False, guard=rundir.lease.check)
    checkpoints = store.CheckpointStore(path / "checkpoints", guard=rundir.lease.check, writer="old-")
    log.write("train", 1, {"loss": 1.0})
    files = checkpoints.write(1, {"model": {}})
    ready.set()
    go_on.wait()
    told = []
    for write in (
        lambda: log.write("train", 2, {"loss": 0.5}),
        lambda: rundir.write_heartbeat(step=2),
        lambda: checkpoints.write(2, {"model": {}}),
        lambda: checkpoints.complete(1, *files, {}),
    ):
        try:
            write()
        except SupersededError as error:
            told.append(str(error))
    queue.put(told)


def test_processes_of_a_lost_start_write_nothing(tmp_path, monkeypatch):
    ready, go_on, queue = CONTEXT.Event(), CONTEXT.Event(), CONTEXT.SimpleQueue()
    lost = CONTEXT.Process(target=_hold, args=(tmp_path, ready, go_on, queue))
    lost.start()
    ready.wait()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(TrainingError, match="another process is training"):
        RunDir(tmp_path).open_for_training(Recipe(), 0.1)  # a new job may wait for the lease
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    successor = RunDir(tmp_path)
    successor.open_for_training(Recipe(), 0.1)  # a restarted job of the same id does not wait
    before = (tmp_path / "metrics.jsonl").read_text()
    go_on.set()
    told = queue.get()
    lost.join()
    assert len(told) == 4 and all(
        "was taken over by a process that started later (job 7, restart 1" in text for text in told
    )
    assert (tmp_path / "metrics.jsonl").read_text() == before and not list(tmp_path.glob("checkpoints/step-*"))
    successor.write_heartbeat(step=1)
    (tmp_path / "owner.json").unlink()
    with pytest.raises(SupersededError, match="does not exist any more"):
        successor.write_heartbeat(step=2)


def test_a_failing_file_server_is_retried_and_then_named(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("sparo_train.core.disk.rundir.time.sleep", waits.append)
    (tmp_path / "owner.json").write_text("{")
    with pytest.raises(TrainingError, match=r"owner\.json: cannot be read"):
        RunLease(tmp_path, "x").check()
    assert len(waits) == 9


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGINT"])
def test_signals_set_the_flag_and_old_handlers_return(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with StopFlag() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == name
        if name == "SIGINT":
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
                signal.sigtimedwait([], 0.1)
    assert signal.getsignal(number) is before


def test_sigusr1_requests_a_checkpoint_and_stops_nothing():
    before = signal.getsignal(signal.SIGUSR1)
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.received, stop.number(), stop.take_save(), stop.take_save()) == (None, 0, True, False)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_random_streams_are_named_and_reproducible():
    a, b, c = (generator(0, "x", 1), generator(0, "x", 1), generator(0, "x", 2))
    draws = [g.integers(0, 2**60) for g in (a, b, c)]
    assert draws[0] == draws[1] != draws[2]
    assert torch_seed(0, "init") != torch_seed(1, "init") and 0 <= torch_seed(2**40, "init") < 2**63
