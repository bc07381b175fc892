"""Test `sparo slots edit`, and the same edits in the explorer."""

import pytest
import yaml
from PIL import Image

from sparo_data.synthetic.tetrominoes import TetrominoesConfig, make_tetrominoes
from tests.helpers.browser import Watched, chromium, explorer, until
from tests.helpers.processes import sparo
from tests.helpers.recipes import slots_recipe
from tests.helpers.samples import jpeg


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a slot model with positions and scales, one without, and two images."""
    root = tmp_path_factory.mktemp("edit")
    make_tetrominoes(root / "t", TetrominoesConfig(train=64, test=8))
    tasks = {"masks": {"task": "masks", "root": str(root / "t/masks")}}
    for name in ("framed", "plain"):
        tree = slots_recipe(root / "t/train", root / "runs", eval={"tasks": tasks}, steps=4, name=name)
        if name == "plain":
            model = tree["objective"]["model"]
            model["frame"] = None
            model["grouping"] = {"slots": 3, "width": 16, "mlp_width": 16}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        done = sparo("train", f"{name}.yaml", "eval.tasks.masks=null", cwd=root)
        assert done.returncode == 0, done.stderr
    (root / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    for name, seed in (("one.jpg", 1), ("two.jpg", 2)):
        (root / name).write_bytes(jpeg(seed))
    return root


@pytest.mark.long
def test_edits_from_the_command_line(folder):
    def edit(run, *words):
        return sparo("slots", "edit", f"runs/{run}", "one.jpg", "--tile", "32", *words, cwd=folder)

    for words, columns in (
        (("--slot", "1", "--move", "0.25,-0.1", "--scale", "1.5", "--out", "moved.png"), 6),
        (("--slot", "0", "--swap", "2", "--out", "swapped.png"), 6),
        (("--slot", "0", "--delete", "--out", "deleted.png"), 3),
    ):
        done = edit("framed", *words)
        assert done.returncode == 0 and words[-1] in done.stdout, done.stderr
        assert Image.open(folder / words[-1]).size == (columns * 36 + 4, 2 * 36 + 18)
    done = edit("plain", "--slot", "2", "--swap", "two.jpg:0", "--out", "other.png")
    assert done.returncode == 0, done.stderr
    words = ("masks:3", "--data", "tasks.yaml", "--slot", "2", "--swap", "masks:4:0", "--out", "task.png")
    done = sparo("slots", "edit", "runs/plain", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    done = sparo("slots", "edit", "runs/plain", "masks:99", *words[1:], cwd=folder)
    assert done.returncode == 2 and "masks:99: the task has 8 images" in done.stderr
    done = edit("framed", "--slot", "1", "--move=-0.25,0", "--out", "moved.gif")
    assert done.returncode == 0 and Image.open(folder / "moved.gif").n_frames > 10, done.stderr
    for run, words, problem in (
        ("plain", ("--slot", "0", "--move", "0.1,0"), "have no positions"),
        ("framed", ("--slot", "9", "--delete"), "got 9"),
        ("framed", ("--slot", "0", "--delete", "--out", "./one.jpg"), "expected a .png"),
        ("framed", ("--slot", "0"), "give only --delete, only --swap"),
        ("framed", ("--slot", "0", "--delete", "--swap", "1"), "give only --delete, only --swap"),
        ("framed", ("--slot", "0", "--move", "a,b"), "--move a,b: expected two numbers"),
        ("framed", ("--slot", "0", "--move", "1"), "--move 1: expected two numbers"),
        ("framed", ("--slot", "0", "--swap", "0"), "is the slot that is edited"),
        ("framed", ("--slot", "0", "--swap", "no.jpg:1"), "no.jpg"),
        ("framed", ("--slot", "0", "--swap", "two.jpg:8"), "--swap two.jpg:8"),
        ("framed", ("--slot", "0", "--delete", "--out", "x.jpg"), "expected a .png"),
    ):
        done = edit(run, *words)
        assert done.returncode == 2 and problem in done.stderr.replace("\n", " "), (words, done.stderr)
    before = (folder / "moved.png").read_bytes()
    done = sparo(
        "slots", "edit", "runs/framed", "moved.png", "--slot", "0", "--delete", "--out", "./moved.png", cwd=folder
    )
    assert done.returncode == 2 and "is a folder or the image itself" in done.stderr
    assert (folder / "moved.png").read_bytes() == before
    done = sparo(
        "slots", "edit", "runs/framed", "nothing:0", "--slot", "0", "--delete", "--data", "tasks.yaml", cwd=folder
    )
    assert done.returncode == 2 and done.stderr.startswith("error: nothing:0: is neither a file"), done.stderr


def test_edits_in_the_explorer(folder):
    with (
        chromium() as browser,
        explorer("runs/framed", "--data", "tasks.yaml", "--out", "s.json", cwd=folder) as address,
    ):
        watched = Watched(browser, address)
        page = watched.page
        assert page.locator("#edit").is_visible() and page.locator("#edited").is_hidden()
        until(page.locator("#large-title")).to_contain_text("Slot 0")
        sources = set()
        for field, value in (("edit-x", "0.3"), ("edit-scale", "2")):
            page.fill(f"#{field}", value)
            until(page.locator("#edited")).to_be_visible()
            page.wait_for_timeout(300)
            sources.add(page.get_attribute("#edited", "src"))
        page.check("#edit-delete")
        page.wait_for_timeout(300)
        sources.add(page.get_attribute("#edited", "src"))
        assert len(sources) == 3 and page.locator("#error").is_hidden()
        assert page.evaluate("document.getElementById('edited').naturalWidth") > 100
        page.locator("#slots [data-slot='2']").focus()
        assert page.locator("#edited").is_hidden() and page.input_value("#edit-x") == "0"
        watched.fine()
