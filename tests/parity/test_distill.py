"""Distillation from a frozen teacher: compared with a restatement, on ranks and engines, with and without cached tokens."""

import copy
import math

import numpy as np
import pytest
import timm
import torch
from torch.nn import functional as F

from evals.encoders.loading import load_encoder
from evals.encoders.teacher import CheckpointTeacher, CheckpointTeacherConfig
from evals.interop.exporting import export_run
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import CheckpointError, ConfigError, DataError
from sparo_train.core.recipe.layers import override
from sparo_train.data.examples.image_transforms import eval_pixels
from sparo_train.objectives.distill import BOX_UNIT, DistillObjective, sample_at
from sparo_train.objectives.distill_config import DistillObjectiveConfig
from sparo_train.objectives.distill_examples import DistillExamples
from sparo_train.train.build import build_objective, build_pipeline
from sparo_train.train.dry_run import dry_run
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import dino_recipe
from tests.helpers.runs import assert_bit_equal, losses_of
from tests.helpers.teachers import write_teacher
from tests.parity.test_accumulate import FSDP2, ZERO_2, ZERO_3, engine_block, model_after, trained

CLS, SPARO = {"kind": "cls"}, {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8}


@pytest.fixture
def teacher(tmp_path):
    write_teacher(tmp_path / "teacher.pth")
    return tmp_path / "teacher.pth"


def recipe(shards, tmp_path, teacher, *words):
    tree = dino_recipe(shards, tmp_path)
    model = {k: v for k, v in tree["objective"]["model"].items() if k not in ("image_size", "patch_size")}
    tree["objective"] = {
        "kind": "distill",
        "teacher": {"checkpoint": str(teacher)},
        "model": {**model, "image_size": 24, "patch_size": 8},
    }
    tree["data"]["decode"] = "exact"
    return resolve(RunConfig, override(tree, ["name=distilled", *words], RunConfig), "x")


# ---- the equations ----


class Restated:
    """Compute the loss for one token and one channel at a time."""

    def __init__(self, objective):
        self.student = copy.deepcopy(objective.student)
        self.config, self.pixels = objective.config, lambda x: (x.double() / 255 - objective.mean) / objective.std
        self.history = {"class": [], "patch": []}  # mean and mean square per channel of every step

    def standardised(self, kind, token):
        means = [sum(step[i] for step in self.history[kind]) / len(self.history[kind]) for i in (0, 1)]
        return (token - means[0]) / (means[1] - means[0] ** 2).sqrt()

    @staticmethod
    def bilinear(tokens, x, y):
        """Return the tokens (G * G, D) at positions in 0..1; outside of the outermost centres, the nearest ones."""
        grid = math.isqrt(len(tokens))
        column, row = (min(max(v * grid - 0.5, 0), grid - 1) for v in (x, y))
        left, top = min(int(column), grid - 2), min(int(row), grid - 2)
        shares = {
            (top + i, left + j): abs(1 - i - (row - top)) * abs(1 - j - (column - left)) for i in (0, 1) for j in (0, 1)
        }
        return sum(share * tokens[r * grid + c] for (r, c), share in shares.items())

    def loss(self, batch):
        c, vit = self.config, self.student.backbone
        tokens, total = batch["tokens"], torch.zeros((), dtype=torch.float64)
        targets = {"class": list(tokens[:, 0]), "patch": []}
        for b in range(len(tokens)):
            x = vit.embed(self.pixels(batch["image"][b])[None])
            for block in vit.blocks:
                x = x + block.attn(block.norm1(x))
                x = x + block.mlp(block.norm2(x))
            encoding = vit.norm(x)[:, 0] if vit.read_by is None else vit.sparo.plain(vit.norm(x)).flat()
            patches, side = self.student.patch_head(vit.norm(x)[0, 1:]), 3
            left, top, width, height = (batch["box"][b] / BOX_UNIT).tolist()
            places = [
                (left + (p % side + 0.5) / side * width, top + (p // side + 0.5) / side * height)
                for p in range(side**2)
            ]
            wanted = [self.bilinear(tokens[b, 1:], *place) for place in places]
            targets["patch"] += wanted
            if not self.history["class"]:
                continue
            error = self.student.class_head(encoding)[0] - self.standardised("class", tokens[b, 0])
            total = total + c.class_weight * error.square().mean() / len(tokens)
            for p in range(side**2):
                error = patches[p] - self.standardised("patch", wanted[p])
                total = total + c.patch_weight * error.square().mean() / len(tokens) / side**2
        for kind, rows in ((kind, torch.stack(rows)) for kind, rows in targets.items()):
            self.history[kind].append((rows.mean(0), rows.square().mean(0)))
        return total


def batch_of(number, size=4):
    rng = torch.Generator().manual_seed(number)
    rows = torch.randint(0, BOX_UNIT // 2, (size, 2), generator=rng)
    width, height = torch.randint(BOX_UNIT // 4, BOX_UNIT // 2, (2, size), generator=rng)
    flipped = torch.arange(size) % 2 == 1
    box = torch.stack([rows[:, 0] + width * flipped, rows[:, 1], torch.where(flipped, -width, width), height], 1)
    tokens = 2 + 3 * torch.randn(size, 17, 384, dtype=torch.float64, generator=rng)
    return {
        "image": torch.randint(0, 256, (size, 3, 24, 24), dtype=torch.uint8, generator=rng), "box": box.int(), "tokens": tokens,
    }  # fmt: skip


def made(teacher, readout, **keys):
    torch.manual_seed(0)
    model = {"image_size": 24, "patch_size": 8, "width": 24, "depth": 3, "heads": 2, "drop_path": 0, "readout": readout}
    tree = {"model": model, "teacher": str(teacher), "cache": "unused", **keys}
    return DistillObjective(DistillObjectiveConfig.model_validate(tree)).double()


@pytest.mark.parametrize("readout", [CLS, SPARO], ids=["cls", "sparo"])
def test_five_updates_equal_the_equations(teacher, readout):
    objective = made(teacher, readout, class_weight=0.5, patch_weight=2.0)
    theirs = Restated(objective)
    optimizers = [torch.optim.SGD(net.student.parameters(), lr=0.05) for net in (objective, theirs)]
    for step in range(5):
        batch, progress = batch_of(step), Progress(step, 12, 0)
        losses = [objective(batch, progress).total, theirs.loss(batch)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-9)
        assert (losses[0].item() == 0) == (step == 0)  # there are no statistics before the first step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        objective.after_step(progress, torch.tensor(True))
    for name, value in theirs.student.state_dict().items():
        assert torch.allclose(objective.student.state_dict()[name], value, atol=1e-9, rtol=0), name


def test_a_skipped_step_leaves_the_statistics(teacher):
    objective = made(teacher, CLS)
    objective(batch_of(0), Progress(0, 12, 0))
    objective.after_step(Progress(0, 12, 0), torch.tensor(True))
    before = {name: value.clone() for name, value in objective.named_buffers()}
    broken = batch_of(1)
    broken["tokens"] = broken["tokens"] * float("inf")
    objective(broken, Progress(1, 12, 0))
    objective.after_step(Progress(1, 12, 0), torch.tensor(False))
    assert all(torch.equal(value, before[name]) for name, value in objective.named_buffers())


def test_the_whole_view_has_the_teachers_own_patches():
    tokens = torch.randn(2, 16, 5)
    whole = torch.tensor([[0, 0, BOX_UNIT, BOX_UNIT], [BOX_UNIT, 0, -BOX_UNIT, BOX_UNIT]], dtype=torch.int32)
    found = sample_at(tokens, whole, 4)
    assert torch.allclose(found[0], tokens[0], atol=1e-5)
    assert torch.allclose(found[1], tokens[1].unflatten(0, (4, 4)).flip(1).flatten(0, 1), atol=1e-5)


def test_the_box_is_where_the_crop_was_taken(teacher):
    """A brightness ramp identifies positions of pixels: the student's pixels are those of the recorded box."""
    config = DistillObjectiveConfig.model_validate(
        {"teacher": str(teacher), "model": {"image_size": 24, "patch_size": 8, "readout": CLS}}
    )
    across, down = np.meshgrid(np.linspace(0, 255, 200), np.linspace(0, 255, 120))
    picture = np.stack([across, down, across], -1).round().astype(np.uint8)
    examples, rng = DistillExamples(config, None), np.random.default_rng(0)  # pyright: ignore[reportArgumentType]
    view = torch.from_numpy(eval_pixels(picture, 32)).permute(2, 0, 1)[None].float()
    flips = set()
    for _ in range(20):
        pixels, box = examples._crop(picture, rng)
        wanted = sample_at(view.flatten(2).mT, torch.from_numpy(box)[None], 24)[0].T.unflatten(1, (24, 24))
        assert (torch.from_numpy(pixels).permute(2, 0, 1) - wanted).abs().max() < 9  # grey levels per pixel of the view
        flips.add(bool(box[2] < 0))
    assert flips == {True, False}


# ---- ranks, engines, caches ----


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "engine"),
    [
        (2, 3, engine_block("ddp")),
        (2, 6, FSDP2),
        (2, 6, ZERO_2),
        (2, 6, ZERO_3),
    ],
    ids=["ddp", "fsdp2", "zero 2", "zero 3"],
)
def test_ranks_end_as_one_process_and_bit_equal_after_a_restart(
    shards, tmp_path, teacher, world_size, micro_batch_size, engine
):
    tree = recipe(shards, tmp_path, teacher, "batch_size=12", "data.workers=0", "data.streams=12").model_dump(
        mode="json"
    )
    (norms,) = run_ranks(1, trained, tree, engine_block("local"), 12, tmp_path / "alone")
    for found in run_ranks(world_size, trained, tree, engine, micro_batch_size, tmp_path / "straight"):
        for ours, theirs in zip(found, norms, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    run_ranks(world_size, trained, tree, engine, micro_batch_size, tmp_path / "again", {3: engine})
    straight, again, alone = (model_after(tmp_path / name) for name in ("straight", "again", "alone"))
    assert {"class_moments.mean", "student.patch_head.weight"} <= straight.keys()
    assert not any("teacher" in name for name in straight)
    for name, value in straight.items():
        assert torch.equal(value, again[name]), name
        assert torch.allclose(value, alone[name], rtol=1e-4, atol=2e-5), name


@pytest.mark.long
def test_cached_tokens_are_those_of_the_teacher_and_resume_bit_identically(shards, tmp_path, teacher, capsys):
    whole = recipe(shards, tmp_path, teacher, "name=whole")
    train(whole)
    cache = f"objective.cache={{folder: {tmp_path}/tokens, dtype: fp32}}"
    cached = recipe(shards, tmp_path, teacher, "name=cached", cache)
    train(cached)
    assert losses_of(cached.folder)[0] == 0 and losses_of(cached.folder)[-1] > 0.1
    assert losses_of(cached.folder) == pytest.approx(losses_of(whole.folder), rel=1e-4, abs=1e-6)
    assert capsys.readouterr().err.count("computing image tokens for 96 samples") == 1
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*.safetensors")}
    train(recipe(shards, tmp_path, teacher, "name=stopped", cache, "stop_after_steps=5"))
    train(recipe(shards, tmp_path, teacher, "name=stopped", cache))
    assert_bit_equal(cached.folder, tmp_path / "stopped", 12)
    assert parts == {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*.safetensors")}
    # Another teacher, or another size of its view, has other tokens.
    write_teacher(tmp_path / "other.pth", depth=1)
    for number, words in enumerate(
        (f"objective.teacher.checkpoint={tmp_path}/other.pth", "objective.teacher.image_size=40")
    ):
        train(recipe(shards, tmp_path, teacher, f"name=other{number}", cache, words, "steps=1", "optim.warmup_steps=0"))
    assert len(list((tmp_path / "tokens/teacher").iterdir())) == 3


def test_a_student_is_scored_exported_and_continued(shards, tmp_path, teacher):
    config = recipe(shards, tmp_path, teacher, "name=first", "objective.model.readout={kind: cls}")
    train(config)
    teacher.rename(tmp_path / "elsewhere.pth")  # the student can be used without the teacher
    encoder = load_encoder(str(config.folder))
    weights = store.read_part(config.folder / "checkpoints/step-00000012", "model")
    assert torch.equal(encoder.model.state_dict()["cls_token"], weights["student.backbone.cls_token"])
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    folder = export_run(config.folder, None, "timm")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.allclose(model.forward_features(encoder.normalize(pixels))[:, 0], encoder.encode(pixels), atol=1e-5)
    (tmp_path / "elsewhere.pth").rename(teacher)
    still = ("steps=1", "optim.lr=1e-12", "optim.warmup_steps=0", "optim.min_lr=0")
    for method in ("distill", "dino"):
        tree = recipe(
            shards,
            tmp_path,
            teacher,
            f"name={method}",
            "objective.model.readout={kind: cls}",
            *still,
            f"start_from={config.folder}",
        )
        words = tree.model_dump(mode="json")
        if method == "dino":
            words["objective"] = {
                "kind": "dino",
                "model": words["objective"]["model"],
                "head": {"out_dim": 16},
                "crops": {"local_size": 8},
            }
        train(resolve(RunConfig, words, "x"))
        found = store.read_part(tmp_path / method / "checkpoints/step-00000001", "model")
        for name, value in weights.items():
            if name.startswith("student.backbone."):
                assert torch.allclose(found[name], value, atol=1e-6), (method, name)


def test_teachers_without_patches_and_models_of_timm(shards, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=0)
    torch.save(model.state_dict(), tmp_path / "resnet18.pth")
    place = f"timm:resnet18@{tmp_path}/resnet18.pth"
    # The positions of a convnet's last feature map are its patches.
    sized = {"teacher": {"checkpoint": place, "image_size": 64}}
    found = DistillObjectiveConfig.model_validate(sized).teacher.build()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    black = (torch.zeros(1, 3, 64, 64) - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    features = model.eval().forward_features(black).flatten(2).mT
    assert torch.allclose(found, torch.cat([features.mean(1, keepdim=True), features], 1), atol=1e-4)
    train(recipe(shards, tmp_path, place, "objective.teacher.image_size=64", "steps=3", "optim.warmup_steps=1"))
    with pytest.raises(
        ConfigError, match=r"objective\.patch_weight=1\.0: .*pixels:28 has no patches\. Set objective\.patch_weight=0"
    ):
        build_objective(recipe(shards, tmp_path, "pixels:28"))
    only = ("objective.patch_weight=0", "name=pixels", "steps=3", "optim.warmup_steps=1")
    train(recipe(shards, tmp_path, "pixels:28", *only))
    # The opposite: a convnet learns the patches of a ViT.
    write_teacher(tmp_path / "vit.pth")
    convnet = (
        "objective.model={timm_model_name: resnet18, image_size: 64}",
        "name=convnet",
        "steps=3",
        "optim.warmup_steps=1",
    )
    train(recipe(shards, tmp_path, tmp_path / "vit.pth", *convnet))
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=1)
    torch.save(vit.state_dict(), tmp_path / "timm.pth")
    sized = ("objective.teacher.image_size=32", "name=sized", "steps=2", "optim.warmup_steps=1")
    with pytest.raises(CheckpointError, match=r"depth|blocks"):  # the file has one of twelve blocks
        train(recipe(shards, tmp_path, f"timm:vit_tiny_patch16_224@{tmp_path}/timm.pth", *sized))


def test_a_teacher_may_be_moved_but_not_replaced_and_must_see_its_whole_view(shards, tmp_path, teacher):
    stop = ("name=moved", f"objective.cache={tmp_path}/tokens")
    train(recipe(shards, tmp_path, teacher, *stop, "stop_after_steps=3"))
    moved = teacher.rename(tmp_path / "moved.pth")
    train(recipe(shards, tmp_path, moved, *stop, "stop_after_steps=6"))
    write_teacher(moved, mlp_ratio=2.0)
    with pytest.raises(DataError, match=r"plan\.teacher: \w+ -> \w+"):
        train(recipe(shards, tmp_path, moved, *stop))
    with pytest.raises(
        ConfigError, match=r"image_size=36: is not a multiple of the patch size .* would ignore the last pixels"
    ):
        build_objective(recipe(shards, tmp_path, moved, "objective.teacher.image_size=36"))
    with pytest.raises(ConfigError, match=r"image_size=4: .* does not accept images of this size"):
        build_objective(recipe(shards, tmp_path, moved, "objective.teacher.image_size=4"))


def test_a_folder_of_transformers_teaches_patches(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    config = transformers.Dinov2WithRegistersConfig(**sizes, num_register_tokens=4)
    model = transformers.Dinov2WithRegistersModel(config).eval()
    model.save_pretrained(tmp_path / "hf")
    processor = transformers.BitImageProcessor(
        crop_size={"height": 32, "width": 32}, size={"shortest_edge": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor.save_pretrained(tmp_path / "hf")
    teacher = DistillObjectiveConfig.model_validate({"teacher": f"hf:{tmp_path}/hf"}).teacher.build()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        tokens = model(pixel_values=pixels / 127.5 - 1).last_hidden_state
    assert torch.allclose(teacher(pixels), torch.cat([tokens[:, :1], tokens[:, 5:]], 1), atol=1e-5)
    assert teacher.facts.grid == 4 and copy.deepcopy(teacher) is teacher


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("objective.teacher=nowhere.pth",), r"objective\.teacher\.checkpoint=nowhere\.pth: no such file.*Download it"),
        (("objective.class_weight=0", "objective.patch_weight=0"), r"class_weight and patch_weight are 0"),
        (("data.hflip=0.5",), r"data\.hflip: applies to image-text pairs only, .* use objective\.crops"),
        (("objective.model={timm_model_name: resnet18, image_size: 32}", "micro_batch_size=4"), r"micro_batch_size: cannot be used with resnet18, whose"),
    ],
    ids=["teacher", "weights", "pairs", "batch norm"],
)  # fmt: skip
def test_mistakes_are_named(shards, tmp_path, teacher, words, message):
    with pytest.raises(ConfigError, match=message):
        build_objective(recipe(shards, tmp_path, teacher, *words))


def test_commands_without_a_run_ask_to_remove_the_cache(shards, tmp_path, teacher):
    config = recipe(shards, tmp_path, teacher, f"objective.cache={tmp_path}/tokens")
    with pytest.raises(ConfigError, match=r"For this command, set objective\.cache=null"):
        next(build_pipeline(config).start(None))
    assert dry_run(config).steps == 12


def test_a_teacher_that_draws_weights_does_not_change_the_student(shards, tmp_path, teacher, monkeypatch):
    weights = build_objective(recipe(shards, tmp_path, teacher)).student.state_dict()
    build = CheckpointTeacherConfig.build
    monkeypatch.setattr(CheckpointTeacherConfig, "build", lambda config: (torch.rand(7), build(config))[1])
    found = build_objective(recipe(shards, tmp_path, teacher)).student.state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize("words", [(), ("objective.cache={folder: tokens}",)], ids=["in every step", "cached"])
def test_a_teacher_without_a_class_token_is_named(shards, tmp_path, teacher, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    config, call = recipe(shards, tmp_path, teacher, *words), CheckpointTeacher.__call__
    kept = config.objective.teacher.build()
    assert kept.facts == config.objective.teacher.facts()
    monkeypatch.setattr(CheckpointTeacher, "__call__", lambda self, pixels: call(self, pixels)[:, 1:])
    with pytest.raises(ConfigError, match=r"must return tokens \(b, .*the class token first"):
        train(config)


def test_features_of_the_teacher_are_those_of_its_encoder(teacher):
    config = DistillObjectiveConfig.model_validate({"teacher": {"checkpoint": str(teacher), "image_size": 48}})
    pixels = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    encoder = load_encoder(str(teacher))
    found, facts = config.teacher.build()(pixels), config.teacher.facts()
    tokens = encoder.tokens(pixels)  # the class token, four registers, patches
    assert torch.allclose(found, torch.cat([tokens[:, :1], tokens[:, 5:]], 1), atol=1e-6) and not found.is_inference()
    assert (facts.grid, facts.width, facts.image_size) == (6, 384, 48) and facts.memory > 384 * 384 * 4
    head = torch.nn.Linear(384, 384)
    F.mse_loss(head(found), found).backward()  # backward would fail with tensors of inference mode
    assert head.weight.grad is not None
