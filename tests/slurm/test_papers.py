"""`sparo papers ITEM --run --cluster SLURM` on a real SLURM: submits the runs, waits for them, and reports them when it is repeated."""

import pytest
import yaml

from launch.jobs.cluster_files import load_cluster
from launch.jobs.launching import LaunchOptions
from launch.papers import run as running
from launch.papers.index import PaperItem
from launch.papers.sweep_record import read_record
from tests.slurm.conftest import ALONE

pytestmark = pytest.mark.slurm


def test_an_item_is_submitted_once_and_finished_by_the_same_command(lab, monkeypatch, capsys):
    monkeypatch.chdir(lab.root)
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, lab.cluster.env[name])
    sweep = {
        "recipe": "recipe.yaml",
        "overrides": [ALONE],
        "figure": {"kind": "bars", "score": "ret/image_R@1"},
        "runs": {"a": {"x": "one"}, "b": {"x": "one", "overrides": ["optim.lr=5e-4"]}},
    }
    path = lab.root / "item.yaml"
    path.write_text(yaml.safe_dump(sweep))
    monkeypatch.setattr(running, "recipe", lambda _: path)
    item = PaperItem(name="Table 9", about="a", small="item", paper="P")
    options = LaunchOptions("lab", load_cluster("lab"))
    folders = [lab.root / f"item-{row}-seed0" for row in ("a", "b")]

    def command():
        verdicts = running.run_item(item, True, 1, options)
        assert verdicts == [], "no claim belongs to this sweep"
        return capsys.readouterr().out

    assert "shows that all runs have finished, repeat the" in command()
    jobs = [status["job"] for status in lab.status(*folders)]
    assert "repeat the `sparo papers` command" in command(), "jobs in the queue are not submitted again"
    assert [status["job"] for status in lab.status(*folders)] == jobs
    for folder in folders:
        lab.end(folder)
    report = command()
    assert "P, Table 9" in report and "scores of 2 runs" in report
    found = read_record(lab.root / "item/record.json")
    assert {row.name: [run.steps for run in row.runs] for row in found.rows} == {"a": [40], "b": [40]}
    assert (lab.root / "item/figure.png").stat().st_size > 1000
    assert [status["job"] for status in lab.status(*folders)] == jobs, "finished runs are not submitted again"
