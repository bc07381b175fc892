"""Test our checkpoints in other programs and formats, our results in other tables, and tasks that run as separate jobs."""

import csv
import json
import time

import pytest
import yaml

from tests.helpers.processes import sparo

PLUGIN = "import sys, sparo_train.openclip as plugin; plugin.main(sys.argv[1:])"
SUGAR_CREPE = """
import json, sys
import open_clip, torch
from PIL import Image

name, weights, root, out = sys.argv[1:]
model, _, transform = open_clip.create_model_and_transforms(name, pretrained=weights)
tokenizer = open_clip.get_tokenizer(name)
model.eval()
found = {}
for split in ("add_obj", "add_att", "replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att"):
    right = rows = 0
    for item in json.load(open(f"{root}/{split}.json")).values():
        image = transform(Image.open(f"{root}/val2017/{item['filename']}")).unsqueeze(0)
        with torch.no_grad():
            y = model.encode_image(image, normalize=True)
            p, n = (model.encode_text(tokenizer(item[key]), normalize=True) for key in ("caption", "negative_caption"))
        right += float((y @ p.T).item() > (y @ n.T).item())
        rows += 1
    found[split] = right / rows
json.dump(found, open(out, "w"))
"""


def test_clip_benchmark_builds_tables_from_our_results(scored):
    pytest.importorskip("clip_benchmark")
    root, _ = scored
    done = sparo("eval", "export", "results", "--out", "cb", cwd=root)
    written = list((root / "cb").glob("*.json"))
    assert done.returncode == 0 and written and f"{len(written)} file(s) to cb" in done.stdout
    from clip_benchmark.cli import main_build

    class Options:
        files = [str(path) for path in sorted((root / "cb").glob("*.json"))]  # noqa: RUF012
        output = str(root / "cb.csv")

    main_build(Options)
    rows = list(csv.DictReader((root / "cb.csv").open()))
    assert {row["task"] for row in rows} >= {"zeroshot_classification", "zeroshot_retrieval", "linear_probe"}
    found = next(r for r in rows if r["task"] == "zeroshot_classification" and r["pretrained"] == "runs/s0")
    lines = [json.loads(line) for line in (root / "results/results.jsonl").read_text().splitlines()]
    zero = next(line for line in lines if line["checkpoint"] == "runs/s0" and line["name"] == "zero")
    assert float(found["acc1"]) == pytest.approx(zero["metrics"]["acc1"])


def test_other_programs_give_our_scores_for_our_exports(scored):
    """Run clip_benchmark's own command on a wds set, and a usual SugarCrepe script, through the plug-in runner."""
    pytest.importorskip("clip_benchmark")
    root, _ = scored
    assert sparo("export", "runs/s0", "--out", "exported", cwd=root).returncode == 0
    (root / "stock.py").write_text(SUGAR_CREPE)
    model = f"local-dir:{root / 'exported'}"
    runner = ("run", "--")
    done = sparo(*runner, "stock.py", model, "", "data/sugar_crepe", "stock.json", cwd=root, program=PLUGIN)
    assert done.returncode == 0, done.stderr
    stock = json.loads((root / "stock.json").read_text())
    done = sparo(
        "eval", "exported", "--tasks", "sugar_crepe,zero,ret", "--data", "tasks.yaml", "--results", "ours", cwd=root
    )
    assert done.returncode == 0, done.stderr
    ours = {line["name"]: line for line in map(json.loads, (root / "ours/results.jsonl").read_text().splitlines())}
    assert {split: ours["sugar_crepe"]["metrics"][split] for split in stock} == stock
    for task, folder, kind in (("zero", "zero", "zeroshot_classification"), ("ret", "ret", "zeroshot_retrieval")):
        if task == "ret":
            (root / "small/ret/dataset_type.txt").write_text("retrieval")
        done = sparo(
            *runner, "clip_benchmark.cli", "eval", "--model", model, "--pretrained", "", "--dataset", f"wds/{folder}",
            "--dataset_root", str(root / "small" / folder), "--task", kind, "--num_workers", "0", "--no_amp",
            "--recall_k", "1", "5", "10", "--output", f"{task}.json",
            cwd=root, program=PLUGIN,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        theirs = json.loads((root / f"{task}.json").read_text())["metrics"]
        names = {"image_retrieval_recall@": "image_R@", "text_retrieval_recall@": "text_R@"}
        for name, value in theirs.items():
            for their, our in names.items():
                name = name.replace(their, our)
            if value == value:
                assert ours[task]["metrics"][name] == pytest.approx(value, abs=1e-7), name


def test_a_run_its_export_and_its_sparo_clip_file_share_features(scored):
    root, _ = scored
    assert sparo("export", "runs/s0", "--out", "forms/folder", cwd=root).returncode == 0
    assert sparo("export", "runs/s0", "--layout", "sparo-clip", "--out", "forms/s0.pt", cwd=root).returncode == 0
    places = ("runs/s0", "forms/folder", "forms/s0.pt")
    done = sparo("eval", *places, "--data", "tasks.yaml", "--tasks", "zero", "--features", "forms/store",
                 "--no-write-to-run", "--json", "forms.json", cwd=root)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list((root / "forms/store/images").iterdir())) == 1
    assert len(list((root / "forms/store/texts").iterdir())) == 1
    found = json.loads((root / "forms.json").read_text())["results"].values()
    assert len(found) == 3 and len({json.dumps(result["metrics"]) for result in found}) == 1


@pytest.mark.long
def test_long_tasks_are_scored_by_a_job_of_their_own(world, tmp_path):
    """`eval.job`: a separate job scores the weights of an evaluated step during training, with the same results as afterwards."""
    tree = yaml.safe_load((world / "recipe.yaml").read_text())
    tasks = {name: tree["eval"]["tasks"][name] for name in ("zero", "ret")}
    tree |= {"name": "side", "out": str(tmp_path / "runs")}
    tree["eval"] = {"tasks": {"pairs": tree["eval"]["tasks"]["pairs"]}, "job": {"cluster": "local", "tasks": tasks}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    done = sparo("train", str(tmp_path / "recipe.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "submitted the evaluation (eval.job) to local" in done.stderr
    path = tmp_path / "runs/side/evals/side-00000012/results.json"
    for _ in range(600):
        if path.exists():
            break
        time.sleep(0.2)
    aside = json.loads(path.read_text())["results"]
    done = sparo(
        "eval",
        "runs/side",
        "--data",
        f"{world}/tasks.yaml",
        "--tasks",
        "zero,ret",
        "--json",
        "after.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    after = json.loads((tmp_path / "after.json").read_text())["results"]
    assert {n.rpartition("/")[2]: r["metrics"] for n, r in aside.items()} == {
        n.rpartition("/")[2]: pytest.approx(r["metrics"]) for n, r in after.items()
    }
