"""Test files that users keep when the disk is full: one line, exit code 2, and no partial file."""

import errno
import resource
from contextlib import contextmanager

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from evals.report.plots import save_figure
from launch.cli.main import app
from launch.cli.process import call
from launch.commands.train import train
from object_centric.pictures.panels import save_animation, save_sheet
from sparo_train.core.config import resolve
from sparo_train.core.files import whole_file, write_whole
from sparo_train.train.run_config import RunConfig
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.helpers.samples import eval_sets

NOISE = torch.randint(0, 256, (300, 300, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()


@contextmanager
def full(size=20_000):
    """Let no file exceed `size` bytes. Writers get errno 27 (EFBIG) instead of 28 for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _torch_stream(path):
    with whole_file(path) as temporary, temporary.open("wb") as stream:
        torch.save({"a": torch.zeros(30_000)}, stream)


def _safetensors(path):
    with whole_file(path) as temporary:
        save_file({"a": torch.zeros(30_000)}, temporary)


def _figure(path):
    figure, axis = plt.subplots()
    axis.imshow(NOISE)
    save_figure(figure, path, 130)


WRITERS = {
    "a.pt": _torch_stream,
    "a.safetensors": _safetensors,
    "a.json": lambda path: write_whole(path, "x" * 30_000),
    "a.png": lambda path: save_sheet(Image.fromarray(NOISE), path),
    "b.png": _figure,
    "b.pdf": _figure,
    "a.webp": lambda path: save_animation([Image.fromarray(NOISE)] * 3, path, lossless=True),
    "a.gif": lambda path: save_animation([Image.fromarray(NOISE)] * 3, path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_complete_or_unchanged(name, tmp_path):
    path = tmp_path / name
    for before in (None, b"what was there"):
        if before is not None:
            path.write_bytes(before)
        with full(), pytest.raises(OSError) as raised:
            WRITERS[name](path)
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == ([] if before is None else [(name, before)])
    WRITERS[name](path)
    assert path.stat().st_size > 20_000 and [p.name for p in tmp_path.iterdir()] == [name]


def test_other_errors_are_not_converted(tmp_path):
    for error in (ValueError("no"), FileNotFoundError(2, "No such file", "elsewhere")):
        with pytest.raises(type(error)) as raised, whole_file(tmp_path / "x") as temporary:
            temporary.write_text("half")
            raise error
        assert raised.value is error and not list(tmp_path.iterdir())


def test_every_command_that_writes_ends_with_one_line(shards, tmp_path, capsys):
    tree = tiny_recipe(shards, tmp_path, steps=3, eval={"tasks": eval_sets(tmp_path / "sets")})
    train(resolve(RunConfig, tree, "x"))
    train(resolve(RunConfig, dino_recipe(shards, tmp_path, steps=3), "x"))
    run, out = str(tmp_path / "tiny"), tmp_path / "out"
    for words in (
        ["export", run, "--out", str(out / "folder")],
        ["export", run, "--layout", "sparo-clip", "--out", str(out / "one.pt")],
        ["export", str(tmp_path / "dino"), "--out", str(out / "dino.pth")],
        ["slots", "show", run, "--task", "ret", "--out", str(out / "page")],
    ):
        with full():
            code, _ = call(app, words)
        said = " ".join(capsys.readouterr().err.split())
        assert code == 2 and "File too large" in said and "Traceback" not in said and str(out) in said, (words, said)
        assert "Free space or give another place" in said
        assert not [p for p in out.rglob("*") if p.is_file()], words
