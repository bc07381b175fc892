"""Batches: independent of the workers, resumable anywhere, with exact counts of skipped samples."""

import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.utils.data import Dataset

from sparo_data.bench import bench
from sparo_data.writer import write_shard, write_shards
from sparo_train.core.contracts import Cursor
from sparo_train.core.errors import BadSampleError, ConfigError, DataError, WorkerLostError
from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
from sparo_train.data.examples.samples import image_bytes
from sparo_train.data.read import workers
from sparo_train.data.read.bad_samples import BadSampleBudget
from sparo_train.data.read.loader import Pipeline, default_streams
from sparo_train.data.read.plan import repetition_warning
from sparo_train.data.read.workers import WorkerItems
from sparo_train.data.sources.base import DataConfig, open_source
from sparo_train.data.sources.shards import ShardsConfig
from sparo_train.train.fit import source_lines
from tests.helpers.ranks import free_port
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import jpeg, sample


def pairs(config):
    return ImageTextExamples(config, 32, 16, ClipTokenizer(16))


def pipeline(shards, rank=0, world_size=1, **changes):
    config = DataConfig(
        sources={"a": ShardsConfig(shards=str(shards))},
        **{"streams": 4, "shuffle_window": 16, "chunk": 4, "hflip": 0.5, **changes},
    )
    return Pipeline(config, 8, pairs(config), seed=3, rank=rank, world_size=world_size)


def take(deliveries, n):
    return [next(deliveries) for _ in range(n)]


def same(a, b):
    return all(torch.equal(a.batch[k], b.batch[k]) for k in ("image", "text")) and a.cursor == b.cursor


def test_worker_count_changes_nothing(shards):
    runs = [take(pipeline(shards, workers=w).start(), 15) for w in (0, 1, 2, 6)]  # the set has 4 streams
    assert all(all(same(parts[0], other) for other in parts[1:]) for parts in zip(*runs, strict=True))


def test_resuming_at_any_batch_continues_bit_equal(shards):
    straight = take(pipeline(shards, workers=1).start(), 15)
    for at in (1, 5, 12, 14):
        cursor = Cursor(tuple(json.loads(json.dumps(straight[at - 1].cursor.to_json()))))
        resumed = take(pipeline(shards, workers=2).start(cursor), 15 - at)
        assert all(same(a, b) for a, b in zip(straight[at:], resumed, strict=True))


def ranks(shards, world_size, cursor, n, **changes):
    """Return the global batches of `n` steps and the whole cursor after each, joined from all ranks."""
    runs = [
        take(pipeline(shards, r, world_size, trim_text=False, **changes).start(cursor), n) for r in range(world_size)
    ]
    return [
        ({k: torch.cat([d.batch[k] for d in step]) for k in ("image", "text")}, Cursor.join([d.cursor for d in step]))
        for step in zip(*runs, strict=True)
    ]


def equal_steps(a, b):
    return all(
        x[1] == y[1] and all(torch.equal(x[0][k], y[0][k]) for k in ("image", "text"))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("broken", [False, True])
def test_any_ranks_and_workers_read_the_same_global_batches(shards, tmp_path, broken):
    root = broken_shards(tmp_path / "bad") if broken else shards
    straight = ranks(root, 1, None, 14, workers=0)
    assert equal_steps(ranks(root, 2, None, 14, workers=1), straight)
    assert equal_steps(ranks(root, 4, None, 14, workers=0), straight)
    assert equal_steps(ranks(root, 8, None, 14, workers=0), straight)  # two ranks share each stream
    for before, after, at in ((2, 8, 5), (8, 1, 9), (1, 2, 12)):  # the world size changes at step `at`
        first = ranks(root, before, None, at, workers=0)
        assert equal_steps(first + ranks(root, after, first[-1][1], 14 - at, workers=0), straight)


def test_truncated_shards_are_reported_once(tmp_path):
    root = broken_shards(tmp_path / "bad")
    found = [next(pipeline(root, rank, 2, workers=0).start()).skipped for rank in range(2)]
    assert [sum(reason == "truncated tar" for _, reason in skipped) for skipped in found] == [1, 0]


def test_ranks_that_cannot_share_a_batch_are_refused(shards):
    with pytest.raises(ConfigError, match=r"batch_size=8: 3 ranks cannot share it evenly"):
        pipeline(shards, 0, 3)


@pytest.mark.parametrize(
    ("batch", "streams"), [(128, 16), (256, 32), (4096, 512), (32768, 512), (96, 16), (100, 4), (7, 1)]
)
def test_streams_grow_with_the_batch_and_divide_it(batch, streams):
    assert default_streams(batch) == streams and batch % streams == 0


def test_an_epoch_reads_every_sample_once(shards):
    texts = [
        tuple(row.tolist())
        for d in take(pipeline(shards, workers=1, trim_text=False).start(), 12)
        for row in d.batch["text"]
    ]
    assert len(set(texts)) == 96


@pytest.mark.long
def test_a_process_that_abandons_its_workers_still_ends(shards):
    code = (
        "from tests.unit.test_loader import pipeline\n"
        f"deliveries = pipeline({str(shards)!r}, workers=1).start()\n"
        "next(deliveries)\nimport builtins; builtins.kept = deliveries\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert done.returncode == 0


def test_text_is_cut_after_the_longest_caption(shards):
    short = next(pipeline(shards, workers=0).start()).batch["text"]
    full = next(pipeline(shards, workers=0, trim_text=False).start()).batch["text"]
    assert short.shape == (8, 8) and full.shape == (8, 16)
    assert torch.equal(short, full[:, :8]) and not full[:, 8:].any()


def broken_shards(root):
    def fields(i):
        good = sample(i)[1]
        return {
            5: {**good, "jpg": good["jpg"][:300]},
            6: {**good, "jpg": b"no image"},
            7: {"jpg": good["jpg"]},
            8: {**good, "txt": b"\xff\xfe broken"},
            9: {"txt": good["txt"]},
            10: {**good, "txt": b"  \n"},
        }.get(i, good)

    write_shard(root / "00000.tar", ((f"{i:06d}", fields(i)) for i in range(48)))
    write_shard(root / "00001.tar", (sample(i) for i in range(48, 96)))
    path = root / "00001.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return root


def test_bad_samples_are_skipped_and_counted_by_shard_and_reason(tmp_path):
    root = broken_shards(tmp_path / "bad")
    p = pipeline(root, workers=2)
    assert p.sources[0].samples < 90
    deliveries = take(p.start(), p.plan.epoch_size // 8)
    found = {}
    for d in deliveries:
        assert d.batch["image"].shape == (8, 3, 32, 32)
        for key, n in d.skipped.items():
            found[key] = found.get(key, 0) + n
    first, second = (str(root / f"0000{i}.tar") for i in range(2))
    lost = 48 - len(p.sources[0].storages[1])
    assert (
        found[second, "truncated tar"] == lost > 10
    )  # estimated from the whole shard in the same folder, and exact here
    assert {r for (u, r) in found if u == first} == {"bad image", "missing caption", "bad text", "missing image"}
    skipped = sum(found.values()) - lost
    start = [0, 1] * 4  # the first positions of the two rows of each stream
    assert sum(deliveries[-1].cursor.positions) - sum(start) == 2 * (8 * len(deliveries) + skipped)


def test_resume_after_bad_samples_is_exact(tmp_path):
    root = broken_shards(tmp_path / "bad")
    straight = take(pipeline(root, workers=1).start(), 12)
    resumed = take(pipeline(root, workers=1).start(straight[4].cursor), 7)
    assert all(same(a, b) for a, b in zip(straight[5:], resumed, strict=True))


def test_too_many_bad_samples_stop_the_run_and_name_the_shards():
    budget = BadSampleBudget(0.01)
    budget.add({("x.tar", "bad image"): 9}, 991)
    with pytest.raises(
        DataError, match=r"(?s)12 of 1012 .*max_bad_share=0\.01.*x\.tar: bad image, 9.*y\.tar: missing caption, 3"
    ):
        budget.add({("y.tar", "missing caption"): 3}, 1000)
    again = BadSampleBudget(0.01)
    again.load(json.loads(json.dumps(budget.state())))
    assert again.by_reason() == {"bad image": 9}  # the refused batch is not counted, because a resume reads it again
    again.add({("y.tar", "missing caption"): 3}, 2000)
    assert again.by_shard() == {"x.tar": {"bad image": 9}, "y.tar": {"missing caption": 3}}


def test_a_source_without_one_usable_sample_ends_with_an_error(tmp_path):
    write_shard(tmp_path / "0.tar", ((f"{i}", {"jpg": b"x", "txt": b"words"}) for i in range(16)))
    with pytest.raises(DataError, match=r"no usable sample: .*0\.tar \(bad image") as caught:
        next(pipeline(tmp_path / "0.tar", workers=1).start())
    assert (
        caught.tb is not None and not multiprocessing.active_children()
    )  # although the traceback refers to the loader


def test_shards_that_lose_too_much_stop_the_run_before_it_starts(tmp_path):
    root = broken_shards(tmp_path / "bad")
    (root / "00002.tar").write_bytes(b"<html>no such bucket</html>" * 100)
    p = pipeline(root, workers=0, max_bad_share_min_samples=100)
    with pytest.raises(
        DataError,
        match=r"(?s)2 incomplete shard\(s\) lose about \d+ of 144 .*00002\.tar: unreadable tar, about 48 lost",
    ):
        next(p.start())
    tolerant = pipeline(root, workers=0, max_bad_share_min_samples=100, max_bad_share=0.6)
    assert next(tolerant.start()).skipped[str(root / "00002.tar"), "unreadable tar"] == 48


def test_an_early_excess_is_judged_when_enough_was_tried():
    budget = BadSampleBudget(0.01, minimum=100)
    budget.add({("x.tar", "bad image"): 5}, 10)
    with pytest.raises(DataError, match="5 of 105 samples"):
        budget.add({}, 100)


def test_every_repetition_of_a_sample_has_its_own_augmentation(tmp_path):
    write_shard(tmp_path / "0.tar", (sample(i) for i in range(8)))
    config = DataConfig(
        sources={"a": ShardsConfig(shards=str(tmp_path), weight=2.0)}, workers=0, streams=1, crop_scale=(0.3, 1.0)
    )
    p = Pipeline(config, 16, pairs(config), seed=3)
    batch = next(p.start()).batch
    by_caption = {}
    for image, text in zip(batch["image"], batch["text"], strict=True):
        by_caption.setdefault(tuple(text.tolist()), []).append(image)
    assert len(by_caption) == 8
    assert not any(torch.equal(first, second) for first, second in by_caption.values())


def test_streams_must_divide_the_batch(shards):
    with pytest.raises(ConfigError, match=r"data\.streams=3 does not divide batch_size=8"):
        pipeline(shards, streams=3)


def test_several_sources_mix_by_weight(shards, tmp_path):
    write_shard(
        tmp_path / "b" / "0.tar",
        ((f"{i}", {"png": jpeg(i), "json": json.dumps({"say": "other"}).encode()}) for i in range(8)),
    )
    sources = {
        "a": ShardsConfig(shards=str(shards), weight=0.5),
        "b": ShardsConfig(shards=str(tmp_path / "b"), weight=3.0, caption_key="json:say"),
    }
    config = DataConfig(sources=sources, workers=0, streams=4)
    p = Pipeline(config, 8, pairs(config), 0)
    assert p.plan.epoch_size == 48 + 24
    other = torch.tensor(ClipTokenizer(16)("other"))
    rows = [row for d in take(p.start(), 9) for row in d.batch["text"]]
    assert sum(torch.equal(row[:3], other) for row in rows) == 24


def test_bench_reports_every_stage(shards):
    timing = bench(pipeline(shards, workers=1), 24)
    assert timing.samples == 24 and list(timing.seconds) == ["read", "decode", "augment", "tokenise"]
    assert abs(sum(timing.shares().values()) - 1) < 1e-9 and timing.pipeline_rate > 0 and timing.worker_rate > 0


class _Numbers(Dataset):
    def __getitem__(self, number):
        return number

    def __len__(self):
        return 40


def test_workers_of_an_evaluation_end_silently(capfd):
    for _ in range(5):
        found = list(WorkerItems(_Numbers(), 2, lambda rows: rows, [[i] for i in range(40)]))
        assert found == [[i] for i in range(40)]
    assert capfd.readouterr() == ("", "")


def test_a_start_reports_shares_and_losses_of_data(tmp_path):
    """Shares follow weights; for a truncated shard, the message has its name and the number of lost samples."""
    for name, count in (("a", 60), ("b", 20)):
        write_shards(tmp_path / name, (sample(i) for i in range(count)), 20)
    cut = tmp_path / "a/00001.tar"
    cut.write_bytes(cut.read_bytes()[:9000])
    configs = {"a": ShardsConfig(shards=str(tmp_path / "a")), "b": ShardsConfig(shards=str(tmp_path / "b"), weight=2.0)}
    sources = [open_source(name, config) for name, config in configs.items()]
    held = len(sources[0].storages[1])
    lines = list(source_lines(sources, 160))
    assert lines[0].startswith(f"data a: {(40 + held) / (80 + held):.1%} of the samples read; {40 + held} samples, ")
    assert lines[1] == f"data a: {cut}: truncated tar, about {20 - held} samples lost"
    alone = open_source(
        "a", ShardsConfig(shards=str(cut))
    )  # no complete shard shows how many samples there were: the estimate doubles what was read
    assert [damage.lost_samples for damage in alone.incomplete_storages()] == [held]
    assert repetition_warning([40 + held, 20, 9], [1, 2.0, 0], 60 + held) == ""
    assert f"the data has only {60 + held}." in repetition_warning([40 + held, 20, 9], [1, 2.0, 0], 61 + held)
    assert lines[2] == f"data b: {40 / (80 + held):.1%} of the samples read; 20 samples, {320 / (80 + held):.2f} passes"


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_no_folder_of_multiprocessing_is_left(size, shards, tmp_path):
    """In processes that import everything themselves, the folder is chosen once per process."""
    recipe, temporary = tmp_path / "r.yaml", Path(tempfile.mkdtemp(dir="/tmp"))
    engine = {"kind": "ddp"} if size > 1 else {"kind": "local"}
    recipe.write_text(yaml.safe_dump(tiny_recipe(shards, tmp_path / "runs", steps=3, engine=engine)))
    program = "import multiprocessing.util as u; g = u.get_temp_dir; u.get_temp_dir = lambda: print(g()) or g()"
    line = [sys.executable, "-c", f"{program}\nfrom launch.cli.main import main; main()", "train", str(recipe)]
    env = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    if size > 1:
        env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*line, "data.workers=2"],
            stdout=-1,
            stderr=-1,
            text=True,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else env,
        )
        for rank in range(size)
    ]
    for process in ranks:
        stdout, stderr = process.communicate(timeout=200)
        assert process.returncode == 0 and f"{temporary}/pymp-" in stdout, stderr[-2000:]
    assert not list(temporary.glob("pymp-*"))
    shutil.rmtree(temporary)


class _Stops(_Numbers):
    """A dataset whose worker suspends itself at sample 9, forever or for `resume` seconds."""

    def __init__(self, resume=None):
        self.resume = resume

    def __getitem__(self, number):
        if number == 9:
            if self.resume is not None:
                line = ["sh", "-c", f"sleep {self.resume}; kill -CONT {os.getpid()}"]
                subprocess.Popen(line)
            os.kill(os.getpid(), signal.SIGSTOP)
        return number


def test_a_worker_that_is_stopped_is_noticed(monkeypatch):
    monkeypatch.setattr(workers, "_LOOK", 0.2)
    seen = []
    with pytest.raises(WorkerLostError, match=r"process \d+\) is stopped \(SIGSTOP\) and has sent no sample for 2 s"):
        for item in WorkerItems(_Stops(), 1, lambda rows: rows, [[i] for i in range(40)]):
            seen.append(item)
    # The worker suspends itself at item 9, perhaps before its sending thread has sent item 8.
    assert seen in ([[i] for i in range(8)], [[i] for i in range(9)])
    # A worker that continues in time loses nothing.
    assert list(WorkerItems(_Stops(1), 1, lambda rows: rows, [[i] for i in range(20)])) == [[i] for i in range(20)]


def test_only_consecutive_checks_count(monkeypatch):
    states = iter("TTT" + "S" + "D" * 12 + "T" * 12)
    monkeypatch.setattr(workers, "read_process_state", lambda pid: next(states))
    parts, stuck = SimpleNamespace(_workers=[SimpleNamespace(pid=7)]), Counter()
    for _ in range(3 + 1 + 12 + 11):
        workers._refuse_stuck(parts, stuck)
    with pytest.raises(WorkerLostError, match="has sent no sample for 60 s"):
        workers._refuse_stuck(parts, stuck)


def test_a_folder_too_long_for_sockets_is_named(monkeypatch):
    monkeypatch.setattr("sparo_train.data.read.workers.get_temp_dir", lambda: "/tmp/" + "x" * 100)
    with pytest.raises(ConfigError, match=r"TMPDIR: is too long .*, got /tmp/xxx.*shorter path"):
        next(WorkerItems(_Numbers(), 1, lambda rows: rows, [[0]]))


def test_dots_in_names_are_reported_as_the_reason(tmp_path):
    with tarfile.open(tmp_path / "dots.tar", "w") as tar:
        for name, data in (("photo.v2.jpg", jpeg(0)), ("photo.v2.txt", b"a thing")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    source = open_source("a", ShardsConfig(shards=str(tmp_path / "dots.tar")))
    _, fields = source.storages[0].read(0)
    with pytest.raises(BadSampleError, match="missing caption: dots in names") as raised:
        pairs(DataConfig(sources={"a": ShardsConfig(shards=str(tmp_path / "dots.tar"))})).prepare(fields, source, None)
    assert "got the member 'v2.txt'" in raised.value.detail
    with pytest.raises(BadSampleError, match="missing image: dots in names"):
        image_bytes(fields, ["png", "jpg"])
    with pytest.raises(BadSampleError, match=r"missing image$"):  # names of an image's further members have a dot, too
        image_bytes({"mask.png": b"", "semantic.png": b"", "001.jpg": b""}, ["png", "jpg"])
