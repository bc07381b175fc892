"""Results, records and stored features that are incomplete, changed or of another kind are ignored or reported, and never used as a score."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.encoders.baselines import PixelEncoder
from evals.feature_store.feature_table import Part, open_part, part_bounds, part_path, write_part
from evals.feature_store.features import FeatureStore
from evals.report.results_file import append, read_records
from evals.sets.wds import WdsSet
from evals.tasks.result import Result
from sparo_data.writer import write_wds_layout
from sparo_train.core.disk import metrics
from sparo_train.core.errors import DataError, SparoError
from tests.helpers.logs import logged
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import jpeg
from tests.hostile.conftest import assert_ends


def result(value=1.0):
    return Result("t", 3, "acc1", {"acc1": value}, 0.5, data="d")


LINES = [
    "[]",
    "7",
    '"x"',
    "{",
    '{"schema": 9}',
    '{"schema": 1}',
    '{"schema": 1, "checkpoint": 3}',
    json.dumps(
        {
            "schema": 1,
            "checkpoint": "c",
            "name": "t",
            "facts": {},
            "predictions": "",
            "task": "t",
            "n": 1,
            "headline": "a",
            "chance": 0.0,
            "metrics": None,
        }
    ),
    json.dumps(
        {
            "schema": 1,
            "checkpoint": "c",
            "name": "t",
            "facts": {},
            "predictions": "",
            "task": "t",
            "n": 1,
            "headline": ["a"],
            "chance": 0.0,
            "metrics": {"a": 1.0},
        }
    ),
    json.dumps(
        {
            "schema": 1,
            "checkpoint": "c",
            "name": "t",
            "facts": {},
            "predictions": "",
            "task": "t",
            "n": 1,
            "headline": "b",
            "chance": 0.0,
            "metrics": {"a": 1.0},
        }
    ),
    "\x1b[31m",
    "[" * 2000,
    "",
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_an_invalid_line_of_results_is_skipped_or_named(line, tmp_path):
    append(tmp_path, "a", "t", result(), {})
    with (tmp_path / "results.jsonl").open("a") as stream:
        stream.write(line)  # incomplete: no end of line
    append(tmp_path, "b", "t", result(), {})
    shown = line.startswith('{"schema"')
    assert_ends(["eval", "table", str(tmp_path)], 2 if shown else 0, ["line 2 is not a result"] if shown else [])
    if not shown:
        assert [record.checkpoint for record in read_records([tmp_path])] == ["a", "b"]


@pytest.mark.long
@settings(max_examples=2000, deadline=2000)
@given(st.lists(st.one_of(st.text(max_size=60), st.sampled_from(LINES), st.binary(max_size=40)), max_size=5))
def test_random_files_give_records_or_readable_errors(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass") for line in lines)
    )
    metrics.read(path, "train")
    metrics.rewind(path, 3)
    try:
        read_records([path])
    except SparoError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("file", ["npy", "json", "facts.npz"])
def test_a_changed_byte_in_the_feature_store_gives_no_score(file, tmp_path):
    facts = [np.ones((4, 4), np.uint8) * i for i in range(3)]
    write_part(tmp_path, 0, Part(0, np.ones((3, 8), np.float32), ["a", "b", "c"], facts))
    span = part_bounds(3)[0]
    assert open_part(tmp_path, 0, span) is not None
    path = part_path(tmp_path, 0, file)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert open_part(tmp_path, 0, span) is None


RECORDS = {
    "jobs/submitted.jsonl": ['{"jobs": 3}', "[]", "no json"],
    "jobs/starts.jsonl": ['{"end": 0}', "[]"],
    "heartbeat.json": ["[]", '{"step": "x"}', "{"],
    "metrics.jsonl": ["[]", '{"kind": "train"}', '{"kind": "train", "step": 3}', "\x00"],
}


@pytest.mark.parametrize("file", RECORDS)
def test_invalid_records_give_no_traceback(file, home, tmp_path):
    (tmp_path / "run/jobs").mkdir(parents=True)
    cluster = {"kind": "local", "nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0}
    line = {
        "time": 1.0,
        "jobs": ["99999999"],
        "on": "local",
        "cluster": cluster,
        "command": [],
        "code": "x",
        "logs": "x",
    }
    for text in RECORDS[file]:
        (tmp_path / "run/jobs/submitted.jsonl").write_text(json.dumps(line) + "\n")
        with (tmp_path / "run" / file).open("a") as stream:
            stream.write(text + "\n")
        assert_ends(["launch", "status", "run"], 0, ["run"], cwd=tmp_path)
    (tmp_path / "run/jobs/submitted.jsonl").write_text("[]\n")
    assert_ends(["launch", "status", "run"], 2, ["no job was submitted there"], cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "abc"), ("WORLD_SIZE", "2.5"), ("SLURM_STEP_NUM_TASKS", "many"), ("RANK", "9")]
)
def test_an_invalid_environment_file_is_named(name, value, home, tmp_path):
    env = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    env = {name: value} if name.startswith("SLURM") else {**env, name: value}
    assert_ends(["train", str(home / "good.yaml"), f"out={tmp_path}"], 2, [f"{name}={value}"], **env)


def _encoded(ranks, place, root):
    """Return on each rank how many encodings a store that cannot be written gives, and its messages."""
    with logged() as said:
        found = FeatureStore(place).images(PixelEncoder(8), WdsSet(root, "label"), ranks=ranks)
    return float(found.in_memory().sum()), len(found), len(said)


def test_every_rank_scores_if_the_store_cannot_be_written(tmp_path):
    samples = [(f"{i:04d}", {"jpg": jpeg(i % 8), "cls": b"0"}) for i in range(300)]  # two parts, one for each rank
    write_wds_layout(tmp_path / "zero", samples, classnames=["a"], templates=["a {c}"])
    (tmp_path / "taken").write_text("a file where a folder should be")
    whole = FeatureStore().images(PixelEncoder(8), WdsSet(tmp_path / "zero", "label"))
    for found in run_ranks(2, _encoded, tmp_path / "taken/store", tmp_path / "zero"):
        assert found[:2] == (float(whole.in_memory().sum()), 300) and found[2] == 1
    with pytest.raises(DataError, match="could not be stored for the other processes"):
        FeatureStore(tmp_path / "taken/store").images(PixelEncoder(8), WdsSet(tmp_path / "zero", "label"), part=(0, 2))
