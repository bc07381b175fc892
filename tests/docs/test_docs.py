"""Run every command of the documentation, resolve every recipe, and check every link."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from evals.suite.evaluate import tasks_for
from launch.jobs.sweep import expand
from launch.recipes import recipe
from object_centric.encoders.frozen import FrozenConfig
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.data.servers.remote import remedy
from sparo_train.models.weight_files.vit_names import official_vit_names
from sparo_train.train.dry_run import dry_run
from sparo_train.train.run_config import load_run
from tests.helpers.forking import install
from tests.helpers.processes import THREADS, start_sparo
from tests.helpers.samples import image_folder
from tests.helpers.teachers import write_teacher
from tests.unit.test_making import modules, write_idx_files  # noqa: F401  modules: the fixture with a small node_modules

ROOT = Path(__file__).resolve().parents[2]
# The reference pages that docs/generate.py writes contain no commands to run.
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "keys" not in path.parts and path.name != "cli.md"),
]
RECIPES = sorted(
    p
    for p in (ROOT / "configs").rglob("*.yaml")
    if p.parent.name not in ("clusters", "sweeps", "tasks") and not p.name.startswith("_")
)
SWEEPS = sorted((ROOT / "configs/sweeps").glob("*.yaml"))

# fp32: without bf16 instructions, a CPU takes several times as long in bf16.
SHORT = ["steps=2", "optim.warmup_steps=1", "data.workers=0", "log.tensorboard=false", "engine.precision=fp32"]
# Commands that other tests or .ci/run execute: .ci/run installs and tests exactly like this, tests/e2e runs the demo.
ELSEWHERE = [
    r"^python3 -m venv \.venv",
    r"^pip install -e \. && sparo demo$",
    r"^pip install -e '\.\[(test|movi|docs)\]'( && pytest)?$",
    r"^pre-commit install$",
    r"^mkdocs serve$",
    r"^ruff check .* && pytest$",
    r"^sparo demo --quick$",
    r"^sparo slots name ",  # needs captions that share words; tests/e2e/test_slot_names.py
    r"^sparo slots explore \S+ --static ",  # needs npm's real packages; tests/e2e/test_static_page.py
    r"^pytest -m stress",
    r"^apt-get install .* slurmctld",
    r"^eval .*tests/slurm/cluster.py start",
    r"^sparo launch (?!.*--cluster local)",  # tests/slurm/test_docs.py
]
SLOW = [r"^python benchmarks/"]


def blocks(language: str) -> list[str]:
    found = []
    for path in DOCUMENTS:
        for block in re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            found += [block] if language == "python" else [line for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys(found))


# Replace what needs a GPU or a second machine by two processes of this machine.
HERE = {
    "engine.device=cuda": "engine.device=cpu",
    "--nproc-per-node 8": "--nproc-per-node 1",
    "--nnodes 2": "--nnodes 1",
    "--images 40": "--images 9",
    "tetrominoes_tsa.yaml --seeds 3": "tetrominoes_tsa.yaml --seeds 2",
    "MASTER:29500": "localhost:0",
    "configs/sweeps/sparo_table6_small.yaml --seeds 3": "two_rows.yaml",
    "configs/sweeps/sparo_table6_small.yaml": "two_rows.yaml",
}
TWO_ROWS = """
recipe: configs/clip/scenes_tiny.yaml
overrides: [eval.every_steps=0, "eval.tasks={zeroshot: {task: zeroshot, root: data/scenes/zeroshot}}"]
runs:
  clip: {overrides: ["objective.model.readout={kind: token}"]}
  ep: {overrides: ["objective.model.readout={kind: ep, slots: 8, slot_width: 8}"]}
"""


def shortened(command: str) -> str:
    """Return the same command at a size for tests: two training steps, a few scenes."""
    parts = []
    for there, here in HERE.items():
        command = command.replace(there, here)
    for part in command.split(" && "):
        if re.match(r"sparo train|sparo launch train|torchrun .* train", part) and not re.search(
            "--dry-run|--print", part
        ):
            part = re.sub(r" epochs=\S+", "", part) + " " + " ".join(SHORT)
        if part.startswith("sparo launch train"):  # it runs in the background
            part += " && sleep 1 && while sparo launch status | grep -Eq 'PENDING|RUNNING'; do sleep 1; done; sparo launch status"
        if part == "sparo data fashion-mnist":
            part += " --raw fashion"
        if part.startswith("sparo data tetrominoes"):
            part += " --train 140 --test 8"
        if part.startswith("sparo data movi-like"):
            part = re.sub(r" --train \d+", "", part) + " --train 36 --test 6 --frames 8"
        if part.startswith("sparo data scenes3d"):
            part = re.sub(r" --(train|test|frames|antialias) \d+", "", part) + " --train 36 --test 4 --frames 4"
        if part.startswith("sparo data objects"):
            part = re.sub(r" --train \d+", "", part) + " --train 140 --test 8"
        if part == "sparo data tissue":
            part += " --patients 5 --tiles 20 --size 32"
        if part == "sparo data scene-questions":
            part += " --questions 120"
        if part == "sparo data scenes":
            part += " --train 140 --test 40"
        if part.startswith("sparo slots explore"):  # wait until it prints its address, then press Ctrl-C
            part = (
                f"set -m; {part} --port 0 > at & until grep -q ^http at; do sleep 0.2; jobs %1 | grep -q Running; done; "
                "kill -INT %1; wait %1"
            )
        if part.startswith("sparo data bench"):
            part += " --samples 16"
        parts.append(part)
    return " && ".join(parts)


def write_photos(folder: Path) -> None:
    """Write photos.csv and its images (noise, one caption each), and the same data as photos.parquet."""
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir()
    lines = ["image,caption"]
    for i in range(420):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"photos/{i}.png")
        lines.append(f'photos/{i}.png,"picture {i}, of noise"')
    (folder / "photos.csv").write_text("\n".join(lines))
    rows = [{"image": (folder / f"photos/{i}.png").read_bytes(), "text": f"picture {i}"} for i in range(420)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "photos.parquet")


def write_slides(folder: Path) -> None:
    """Write slides/ (images of several kinds and labels.csv), scenes/ (images of four bands), small DINOv2 backbones, and the page's probe.yaml."""
    slides, lines = folder / "slides", ["image,diagnosis,patient"]
    (slides / "a").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(40):
        side, suffix = int(rng.integers(60, 120)), ("tif", "png", "jpg")[(i - 1) % 3]
        pixels = np.kron(rng.integers(0, 255, (4, 4, 3)), np.ones((side // 4, side // 4, 1))).astype(np.uint8)
        Image.fromarray(pixels).save(slides / f"a/{i:04d}.{suffix}")
        lines.append(f"a/{i:04d}.{suffix},{('healthy', 'tumour')[i % 2]},p{i // 4}")
    (slides / "labels.csv").write_text("\n".join(lines))
    for size, letter, depth in (("small", "s", 2), ("base", "b", 1)):
        model = timm.create_model(f"vit_{size}_patch14_reg4_dinov2", num_classes=0, img_size=56, depth=depth)
        torch.save(official_vit_names(model.state_dict()), folder / f"dinov2_vit{letter}14_reg4_pretrain.pth")
    (folder / "scenes").mkdir()
    for i in range(24):
        levels = rng.integers(0, 3000, (48, 48, 4)).astype(np.uint16)
        tifffile.imwrite(
            folder / f"scenes/{i}.tif", levels, planarconfig="contig", photometric="minisblack", extrasamples=[0] * 3
        )
    page = (ROOT / "docs/guides/dino_own_images.md").read_text(encoding="utf-8")
    (folder / "probe.yaml").write_text(re.search(r"```yaml\n(tasks:.*?)```", page, re.DOTALL)[1])


@pytest.fixture
def sandbox(tmp_path, modules, monkeypatch):  # noqa: F811
    """Make a folder like a checkout, a `sparo` on PATH that is forked instead of started, and an npm that delivers small packages."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "npm").write_text(
        f'#!/bin/sh\nwhile [ "$1" != --prefix ]; do shift; done\nmkdir -p "$2" && cp -r {modules} "$2/"\n'
    )
    # Fork `python -u -m launch.cli …`, too, which torchrun starts.
    (tools / "python-forked").write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "-u -m launch.cli" ] && shift 3 && exec sparo "$@"\n'
    )
    run = f'PYTHON_EXEC={tools}/python-forked exec {sys.executable} -m torch.distributed.run "$@"'
    (tools / "torchrun").write_text(f"#!/bin/sh\n{run}\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    for package in modules.glob("@iconify-json/*"):
        (package / "package.json").write_text("{}")
    (modules / "emojibase-data/package.json").write_text("{}")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", str(THREADS))
    folder = tmp_path / "checkout"
    folder.mkdir()
    write_idx_files(folder / "fashion")
    write_photos(folder)
    write_slides(folder)
    (folder / "two_rows.yaml").write_text(TWO_ROWS)
    for name in ("configs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    server = install(tools / "sparo")
    yield folder
    server.kill()


@pytest.mark.long
@pytest.mark.timeout(2400)  # about a hundred commands, one after another
def test_every_printed_command_runs(sandbox):
    commands = [c for c in blocks("bash") if not any(re.match(p, c) for p in ELSEWHERE + SLOW)]
    assert len(commands) > 8
    # There are few fake images. An epoch may have fewer images than a batch, but the streams of the recipe need 16.
    for command in commands:
        done = subprocess.run(
            ["bash", "-ec", shortened(command)], cwd=sandbox, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (sandbox / "runs/emoji_small/export/open_clip_config.json").exists()
    first, *others = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", first], cwd=sandbox, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for block in others:
        process = start_sparo(cwd=sandbox, program=block)
        _, stderr = process.communicate(120)
        assert process.returncode == 0, stderr


def test_ci_runs_the_commands_that_this_file_omits():
    ci = (ROOT / ".ci/run").read_text()
    assert "pip install -q --disable-pip-version-check -e '.[test]'" in ci and "\npytest" in ci
    for check in ("ruff check .", "ruff format --check .", "lint-imports", "pyright"):
        assert check in ci


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in blocks("bash") if any(re.match(p, c) for p in SLOW)])
def test_benchmark_commands_run(command, tmp_path):
    if "loader.py" in command:
        pytest.skip("needs open_clip's own environment: python benchmarks/loader.py --setup")
    if "jobs.py" in command:
        pytest.skip("needs the cluster of tests/slurm/cluster.py")
    quick = command if "--quick" in command else f"{command} --quick"
    done = subprocess.run(
        ["bash", "-ec", f"{quick} --json {tmp_path}/r.json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.json").exists()


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_recipes_resolve_and_their_headers_are_complete(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "data/images")  # own_images derives its sizes from images
    config = load_run(path)
    if path.parent.name in ("slots", "video") and config.objective.model.encoder.kind == "frozen":
        weights = config.objective.model.encoder.checkpoint.partition("@")[2]
        with pytest.raises(CheckpointError, match=re.escape(weights)):
            dry_run(config)  # a missing download is named in the error
        small = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", num_classes=0)
        save_file(small.state_dict(), "tiny.safetensors")
        encoder = {"kind": "frozen", "checkpoint": "timm:vit_tiny_patch16_224@tiny.safetensors", "width": 192}
        model = config.objective.model.model_copy(update={"encoder": FrozenConfig(**encoder)})
        config = config.model_copy(update={"objective": config.objective.model_copy(update={"model": model})})
    if config.objective.kind == "distill":
        with pytest.raises(ConfigError, match=re.escape(config.objective.teacher.checkpoint)):
            dry_run(config)
        write_teacher(tmp_path / config.objective.teacher.checkpoint)
    dry = dry_run(config)
    assert (
        sum(dry.parameters.values()) > (1e5 if path.parent.name in ("slots", "video", "scenes3d") else 1e6)
        and dry.steps
    )
    text = path.read_text()
    for word in ("# Command:", "# Hardware:", "# Expected:", "# Source:", path.relative_to(ROOT).as_posix()):
        assert word in text, word
    if said := re.search(r"with ([\d.]+) M parameters", text):
        assert float(said[1]) == pytest.approx(sum(dry.parameters.values()) / 1e6, abs=0.06)


def test_published_recipes_have_the_values_of_their_papers():
    """Check keys that an inherited block or a default once changed silently, and values that only the paper's text decides."""
    said = {
        "slots/isa_tetrominoes": ("optim.warmup_steps=10000", "frame.scales=False"),
        "slots/isa_clevr": ("decoder.weight_init=lecun",),
        "slots/sa_me_set_prediction": ("epochs=100.0",),
        "slots/inv_clevr": ("objective.loss=sum",),
        "video/inv_savi": ("objective.frames.starts=tiles", "objective.frames.stride=(1, 1)"),
        "video/videosaur_movi_c": ("optim.half_life=97500", "objective.frames.starts=tiles"),
        "video/slotcontrast_movi_c": (
            "frames.count=4",
            "grouping.slots=11",
            "grouping.width=128",
            "first_iterations=3",
            "decoder.kind=patch",
        ),
        "video/psb_sbd": (
            "encoder.last_relu=False",
            "decoder.upsample_output=True",
            "decoder.num_upsample=4",
            "objective.frames.starts=tiles",
        ),
        "video/psb_ar": ("encoder.last_relu=False",),
        "video/steve_movi": (
            "predictor.dropout=0.0",
            "decoder.dropout=0.1",
            "encoder.padding=symmetric",
            "dvae.norm=none",
            "objective.frames.starts=tiles",
        ),
        "video/steve_tiny": ("encoder.padding=symmetric", "dvae.norm=none"),
        "scenes3d/savi_3d": ("grouping.iterations=3",),
        "scenes3d/uorf_like": ("decoder.static=True", "decoder.background=False"),
        "scenes3d/inv_osrt": ("decoder.activation=leaky_relu", "decoder.bounded=True"),
        "scenes3d/inv_osrt_clevr3d": ("views.targets=all", "views.rays=2731"),
    }
    for name, words in said.items():
        run = load_run(ROOT / "configs" / f"{name}.yaml")
        for word in words:
            key, _, value = word.partition("=")
            places = (run, run.objective, run.objective.model)
            found = next(place for place in places if key.split(".")[0] in type(place).model_fields)
            for part in key.split("."):
                found = getattr(found, part)
            assert str(found) == value, (name, word)


def test_slate_projection_has_the_learning_rate_of_the_encoder():
    groups = load_run(ROOT / "configs/slots/inv_transformer_decoder.yaml").optim.groups
    assert not any(fnmatch.fnmatch("model.project.weight", pattern) for group in groups for pattern in group.match)


def places_of(tree):
    """Return every path that a resolved recipe reads: of its sources and its evaluation tasks."""
    blocks = [*tree["data"]["sources"].values(), *tree["eval"]["tasks"].values()]
    return [b[k] for b in blocks for k in ("shards", "folder", "root", "train", "test") if isinstance(b.get(k), str)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_hint_names_the_command_that_makes_the_data_of_a_recipe(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "data/images")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    hints = {hint for place in places_of(load_run(path).model_dump(mode="json")) if (hint := remedy(place))}
    for hint in hints:
        command = re.escape(hint.split("`")[1])
        assert any(re.search(rf"{command}(?= |$)", line) for line in lines), (path.stem, hint)


@pytest.mark.parametrize(
    "place", ["/mnt/data/emoji/train", "s3://b/data/clevr/train", "/home/me/data/mine/train", "data", ""]
)
def test_a_path_that_no_command_writes_has_no_hint(place):
    assert remedy(place) == ""


def test_no_two_commands_of_recipes_write_the_same_folder():
    filled = {}
    for path in RECIPES:
        for line in path.read_text(encoding="utf-8").splitlines():
            for command in re.findall(r"sparo data [a-z0-9-]+ [^&(`]*", line) if line.startswith("#") else []:
                if folder := re.search(r" (data/\S+)", command):
                    filled.setdefault(folder[1], set()).add(" ".join(command.split()))
    assert {folder: commands for folder, commands in filled.items() if len(commands) > 1} == {}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_every_sweep_names_existing_recipes(path):
    name, runs = expand(path, [], 3)
    assert name == path.stem and len(runs) >= 6 and {run.seed for run in runs} == {0, 1, 2}
    kept = ("objective", "optim", "data")
    assert len({run.model_dump_json(include=set(kept)) for run in runs}) == len(runs) // 3, "two rows of one training"
    assert len({run.name for run in runs}) == len(runs) and all(run.name.startswith(f"{name}-") for run in runs)
    with pytest.raises(
        ConfigError,
        match=rf"is a sweep of {len(runs) // 3} runs. Train them with `sparo launch train .* --cluster local`",
    ):
        load_run(path)


@pytest.mark.parametrize(
    ("name", "steps", "batch", "decay", "warmup"),
    [
        ("cc3m", 21838, 4096, 0.5, 3600),
        ("cc12m", 61219, 4096, 0.5, 3600),
        ("cc15m", 78280, 4096, 0.5, 3600),
        ("laion400m", 312214, 32768, 0.2, 2000),
    ],
)
def test_the_papers_recipes_follow_table_c3(name, steps, batch, decay, warmup, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for method, kind in (("clip", "token"), ("gap", "gap"), ("sparo", "sparo")):
        config = load_run(recipe(f"clip/{name}_{method}.yaml"))
        assert config.objective.model.readout.kind == kind
        assert (config.batch_size, config.optim.weight_decay, config.optim.warmup_steps) == (batch, decay, warmup)
        assert config.optim.lr == 5e-4 and config.engine.precision == "bf16"
        assert dry_run(config).steps == steps
    slots = config.objective.model.readout.slots
    assert slots == (128 if name == "laion400m" else 64)


def test_dino_recipes_have_the_official_defaults(tmp_path, monkeypatch):
    """Compare with the values of main_dino.py, which the documentation and recipe headers quote. An official epoch has 2,502 steps of 512 images."""
    monkeypatch.chdir(tmp_path)
    plain, sparo, boost = (load_run(recipe(f"dino/imagenet_vits16{name}.yaml")) for name in ("", "_sparo", "_boost"))
    assert dry_run(plain).steps == 250_200 and dry_run(boost).steps == 375_300
    assert plain.steps_per_epoch(1_281_167) == 2502 and plain.optim.warmup_steps == 10 * 2502
    assert boost.optim.lr == 2e-3 and boost.optim.warmup_steps == 10 * boost.steps_per_epoch(0)
    o = plain.optim
    assert (o.lr, o.min_lr, o.weight_decay, o.weight_decay_end, o.clip_grad_norm) == (1e-3, 1e-6, 0.04, 0.4, 3.0)
    c = plain.objective
    assert (c.head.out_dim, c.momentum_teacher, c.teacher_temp, c.model.drop_path) == (65536, 0.996, 0.04, 0.1)
    assert (c.crops.local_crops_number, c.crops.local_size, c.crops.global_crops_scale) == (8, 96, (0.4, 1.0))
    assert sparo.objective.model.readout.slots == sparo.objective.model.readout.slot_width == 64
    assert sparo.objective.model_copy(update={"model": c.model}) == c and sparo.optim == o
    assert boost.objective.warmup_teacher_temp_epochs == 30 and not boost.objective.head.norm_last_layer
    tasks = tasks_for("", ROOT / "configs/tasks/imagenet.yaml")
    assert tasks["knn"].k == (10, 20, 100, 200) and tasks["linear"].epochs == 100


def test_links_and_pictures_exist():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_python_files_that_pages_name_exist():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    endings = tracked.split()
    theirs = {"mine.py", "main_dino.py", "eval_knn.py"}  # the user's own files, and those of DINO
    for page in DOCUMENTS:
        names = set(re.findall(r"(?<![\w/.*-])((?:\w+/)*\w+\.py)\b", page.read_text(encoding="utf-8")))
        missing = {name for name in names - theirs if not any(f"/{path}".endswith(f"/{name}") for path in endings)}
        assert not missing, (page.name, missing)


def test_files_stay_small():
    for package in ("sparo_train", "evals", "launch", "object_centric", "sparo_data", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 350, path


def test_recipes_are_found_from_anywhere():
    assert recipe("clip/scenes_tiny.yaml").is_file()
    with pytest.raises(ConfigError, match="not in this installation"):
        recipe("clip/none.yaml")
    assert shutil.which("git") is None or (ROOT / "LICENSE").read_text().strip().startswith("Apache License")
