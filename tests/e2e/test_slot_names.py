"""Test `sparo slots name` and `search` on the command line."""

import json

from tests.helpers.processes import sparo
from tests.helpers.samples import jpeg


def test_names_are_written_and_names_of_the_user_stay(world):
    common = ("--data", "tasks.yaml", "--features", "store")
    (world / "words.txt").write_text("thing\na thing 1\n1\n2\nabsent\n\n")
    done = sparo("slots", "name", "runs/s0", "--task", "ret", "--vocabulary", "words.txt", "--min-images", "2", "--out", "named.json",
                 "--json", "named_facts.json", *common, cwd=world)  # fmt: skip
    assert done.returncode == 2 and "None of the 5 names" in done.stderr  # each of the 12 images has a different number
    done = sparo("slots", "name", "runs/s0", "--task", "zero", "--template", "a {c}", "--min-images", "2", "--out", "named.json",
                 "--json", "named_facts.json", *common, cwd=world)  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads((world / "named_facts.json").read_text())
    assert len(facts["slots"]) == 4 and 0 <= facts["auc"] <= 1 and "random" in done.stdout
    saved = json.loads((world / "named.json").read_text())
    assert saved["chosen"] == [0, 1, 2, 3] and set(saved["names"]) == {
        str(s["slot"]) for s in facts["slots"] if s["passing"]
    }
    saved["names"]["2"] = "mine"
    saved["chosen"] = [1, 2]
    (world / "named.json").write_text(json.dumps(saved))
    done = sparo(
        "slots", "name", "runs/s0", "--task", "zero", "--min-images", "2", "--out", "named.json", *common, cwd=world
    )
    assert done.returncode == 0, done.stderr
    again = json.loads((world / "named.json").read_text())
    assert again["names"]["2"] == "mine" and again["chosen"] == [1, 2]
    # A note of the user stays. A name that the command wrote earlier is removed if it does not pass any more.
    again["notes"] = {"2": "my own", "3": "Held-out AUC: old"}
    again["names"]["3"] = "old"
    (world / "named.json").write_text(json.dumps(again))
    words = ("--task", "zero", "--min-images", "2", "--replace", "--out", "named.json", *common)
    done = sparo("slots", "name", "runs/s0", *words, cwd=world)
    assert done.returncode == 0 and "names written or removed" in done.stdout, done.stderr
    renewed = json.loads((world / "named.json").read_text())
    assert (
        renewed["notes"]["2"] == "my own"
        and renewed["names"].get("3") != "old"
        and "old" not in renewed["notes"].get("3", "")
    )
    for words, problem in (
        (("--task", "zero", "--template", "none"), "must contain {c}"),
        (("--task", "zero", "--vocabulary", "no.txt"), "no.txt"),
        (("--task", "zero", "--units", "heads"), "--units heads"),
    ):
        done = sparo("slots", "name", "runs/s0", *words, "--out", "named2.json", *common, cwd=world)
        assert done.returncode == 2 and problem in done.stderr.replace("\n", " "), done.stderr


def test_search_by_image_and_by_text(world):
    common = ("--index", "ret", "--data", "tasks.yaml", "--features", "store")
    (world / "query.jpg").write_bytes(jpeg(3, (60, 40)))
    selection = {"sparo": "selection", "schema": 1, "checkpoint": "0" * 64, "count": 4, "chosen": [0]}
    (world / "another.json").write_text(json.dumps(selection))
    done = sparo("slots", "search", "runs/s0", "query.jpg", "--slots", "0,2", "--count", "4", "--out", "search", "--json", "search.json",
                 *common, cwd=world)  # fmt: skip
    assert done.returncode == 0, done.stderr
    matches = json.loads((world / "search.json").read_text())["matches"]
    score = [one["alike"] - 0.25 * max(one["rest"], 0) for one in matches]
    assert len(matches) == 4 and score == sorted(score, reverse=True)
    page = (world / "search/report.html").read_text()
    assert page.count("<figure>") == 5 and "<script" not in page
    done = sparo(
        "slots",
        "search",
        "runs/s0",
        "<b>a thing</b>",
        "--slots",
        "1",
        "--count",
        "2",
        "--out",
        "search",
        *common,
        cwd=world,
    )
    assert done.returncode == 0 and "other slots" not in done.stdout, done.stderr
    assert "<b>a thing" not in (world / "search/report.html").read_text()
    for words, problem in (
        (("no.jpg", "--slots", "1"), "no.jpg: file not found"),
        (("a", "--slots", "9"), "--slots 9: no such slot; runs/s0 has 4 slots"),
        (("query.jgp", "--slots", "1"), "query.jgp: file not found"),
        (("runs", "--slots", "1"), "runs: is a folder"),
        ((" ", "--slots", "1"), "QUERY: is empty"),
        (("a", "--slots", "1", "--different", "0.5"), "requires an image as the query"),
        (("query.jpg", "--slots", "1", "--different", "inf"), "--different: expected a finite number"),
        (("query.jpg", "--slots", "another.json"), "was made for another checkpoint"),
        (("words.txt", "--slots", "1"), "words.txt"),
    ):
        done = sparo("slots", "search", "runs/s0", *words, *common, cwd=world)
        assert done.returncode == 2 and problem in done.stderr.replace("\n", " "), (words, done.stderr)
