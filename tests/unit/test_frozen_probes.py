"""Probes on a table of labels: several labels, few shots, regression and segmentation, compared with scikit-learn and restatements."""

import csv
import json
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import Ridge
from sklearn.metrics import average_precision_score, jaccard_score
from sklearn.model_selection import GroupKFold
from torch import nn
from torch.nn import functional as F

from evals.encoders.dino_encoder import DinoEncoder
from evals.encoders.pixels import FlooredPixels, Pixels, SquarePixels
from evals.sets.pictures import label_image
from evals.suite.suite import Suite
from evals.tasks import linear_segmentation, probe, regression
from evals.tasks.linear_segmentation import PatchFeatures, SegmentationTraining
from evals.tasks.result import sum_groups
from evals.tasks.zeroshot import average_precisions, multilabel_result
from sparo_data.synthetic.tissue import TissueConfig, render_tile, tissue_set
from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.registries import TASKS
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig

CPU = torch.device("cpu")
READOUT = {"kind": "sparo", "slots": 3, "slot_width": 4, "head_width": 4}


def encoder(**readout):
    torch.manual_seed(0)
    tree = {
        "image_size": 32,
        "patch_size": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "readout": readout or {"kind": "cls"},
    }
    return DinoEncoder(Vit(VitConfig.model_validate(tree)))


@pytest.fixture(scope="module")
def tissue(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tissue")
    counts = tissue_set(folder, TissueConfig(patients=10, tiles=12, size=32))
    assert counts == {"train": 96, "test": 24}
    return folder


def task(kind, folder, split="split", **keys):
    columns = {"file": "tissue.csv", "split": split, "group": "patient"} | keys.pop("columns", {})
    places = {"root": str(folder)} if kind == "probe" else {"train": str(folder), "test": str(folder)}
    return resolve(
        TASKS.get(kind).config, {"task": kind, "layout": "table", "columns": columns, **places, **keys}, "test"
    )


def run(kind, folder, model=None, **keys):
    return Suite({"t": task(kind, folder, **keys)}).run(model or encoder())["t"]


def test_several_labels_are_trained_like_binary_cross_entropies():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 6, generator=g), torch.randint(0, 2, (40, 3), generator=g)
    how = probe.Training(epochs=4, seed=3, batch_size=8)
    ours = probe.train_probes(probe.Labelled(lambda at: x[at], y), 3, [0.01, 1.0], how)
    for number, decay in enumerate((0.01, 1.0)):
        torch.manual_seed(3)
        layer = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * 5)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
        for _ in range(4):
            for rows, labels in loader:
                loss = F.binary_cross_entropy_with_logits(layer(rows), labels.float(), reduction="sum") / len(rows)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        torch.testing.assert_close(ours.weight[number], layer.weight.detach(), atol=1e-5, rtol=1e-4)
    scores = torch.randn(40, 3, generator=g)
    expected = [average_precision_score(y[:, c], scores[:, c]) for c in range(3)]
    np.testing.assert_allclose(average_precisions(scores, y), expected, atol=1e-9)


def test_few_shots_are_the_mean_over_separate_draws(tissue):
    keys = {"columns": {"label": "{tissue}"}, "val_proportion": 0, "fewshot_k": 2}
    singles = [run("probe", tissue, seed=seed, **keys).value for seed in (4, 5, 6)]
    together = run("probe", tissue, seed=4, repeats=3, **keys)
    assert together.value == pytest.approx(np.mean(singles)) and together.options["repeats"] == 3
    low, high = together.interval
    assert low < together.value < high
    with pytest.raises(ConfigError, match="repeats=3: applies to few-shot probes only"):
        run("probe", tissue, columns={"label": "{tissue}"}, repeats=3)
    with pytest.raises(ConfigError, match="fewshot_k: needs one label per image"):
        run("probe", tissue, columns={"labels": "{findings}"}, fewshot_k=2)


def test_findings_and_classes_of_a_table_are_probed(tissue):
    findings = run("probe", tissue, columns={"labels": "{findings}"})
    assert findings.headline == "mean_average_precision" and findings.n == 24
    assert findings.predictions["scores"].shape == (24, 3)
    classes = run("probe", tissue, columns={"label": "{tissue}"}, epochs=1)
    assert set(classes.options["recall"]) <= {"fat", "gland", "lymphocytes", "stroma", "tumour"}
    assert any("trained for 2 steps only" in remark for remark in classes.remarks())
    # The weight decay is selected on other patients than those of the training part.
    with pytest.raises(ConfigError, match="splits 8 groups into a training and a validation part"):
        run("probe", tissue, columns={"label": "{tissue}"}, val_proportion=0.01)


def test_a_regression_is_ridge_with_the_best_strength(tissue):
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(60, 5)), rng.normal(size=(40, 5))
    weights = rng.normal(size=5)
    targets, truth = (x @ weights + 7 + 0.5 * rng.normal(size=len(x)) for x in (train, test))
    found = regression.score(train, targets, test, truth)
    center, scale = train.mean(0), train.std(0)
    model = Ridge(found.options["alpha"]).fit((train - center) / scale, targets)
    np.testing.assert_allclose(found.predictions["predicted"], model.predict((test - center) / scale), rtol=1e-6)
    assert found.metrics["r2"] == pytest.approx(
        1 - ((found.predictions["predicted"] - truth) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()
    )
    low, high = found.interval
    assert low < found.value < high < 1
    nuclei = run("regression", tissue, columns={"target": "{nuclei}"}, headline="mae")
    assert nuclei.options["selected_by"] == "folds of groups" and nuclei.headline == "mae"
    with pytest.raises(DataError, match="at least two different numbers"):
        regression.score(train, np.ones(60), test, truth)
    with pytest.raises(ConfigError, match="Set layout=table"):
        run("regression", tissue, layout=None)


def grid_features(masks, classes):
    """Features that contain the class of each patch of 4 x 4 pixels."""
    patches = torch.from_numpy(masks[:, ::4, ::4].astype(np.int64)).flatten(1)
    return PatchFeatures(lambda at: F.one_hot(patches[at], classes).float(), masks)


def test_segmentation_recovers_classes_of_patches_and_counts_like_scikit_learn():
    blocks = np.random.default_rng(2).integers(0, 3, (30, 4, 4), dtype=np.uint8)
    masks = blocks.repeat(4, axis=1).repeat(4, axis=2)
    how = SegmentationTraining(0.3, 30, 8, 0, CPU)
    data = grid_features(masks, 3)
    found = linear_segmentation.score(data, data, 3, 255, how)
    assert (
        found.metrics["pixel_accuracy"] > 0.8 and found.metrics["miou"] > 0.6
    )  # borders are blurred by bilinear interpolation
    # From one value per image, a linear layer finds the class of all pixels.
    even = np.broadcast_to(blocks[:, :1, :1], (30, 16, 16)).copy()
    assert linear_segmentation.score(grid_features(even, 3), grid_features(even, 3), 3, 255, how).value == 1
    true, predicted = blocks[:20], np.roll(blocks[:20], 1, axis=2)
    tables = np.stack([linear_segmentation.class_counts(a, b, 4, 2) for a, b in zip(true, predicted, strict=True)])
    there = true != 2
    expected = jaccard_score(true[there], predicted[there], average=None, labels=[0, 1, 2])
    assert linear_segmentation.mean_iou("linear_segmentation", tables).value == pytest.approx(expected.mean())
    # A class that is ignored is not predicted, so it is none of the mean's.
    short = SegmentationTraining(1e-6, 1, 8, 0, CPU)
    ignoring = linear_segmentation.score(data, data, 3, 0, short)
    assert ignoring.options["iou"].keys() <= {1, 2}
    with pytest.raises(DataError, match="every pixel is 252"):
        linear_segmentation.score(grid_features(np.full_like(masks, 252), 256), data, 3, 252, how)


@pytest.mark.parametrize("readout", [{}, READOUT])
def test_masks_of_a_table_are_segmented_from_patches_and_attention(tissue, readout):
    model = encoder(**readout)
    found = run("linear_segmentation", tissue, model, columns={"mask": "{mask}"}, epochs=8)
    assert found.n == 24 and set(found.options["iou"]) == {0, 1, 2} and found.value > found.chance - 0.05
    if readout:
        attention = run(
            "linear_segmentation", tissue, model, columns={"mask": "{mask}"}, features="attention", epochs=2
        )
        assert attention.options["features"] == "attention" and 0 < attention.value < 1
    else:
        with pytest.raises(ConfigError, match=r"features=attention.*has no slots"):
            run("linear_segmentation", tissue, model, columns={"mask": "{mask}"}, features="attention")


@pytest.mark.parametrize(
    "transform", [Pixels(16, 20), Pixels(16, 16, True), FlooredPixels(16, 19), SquarePixels(16, 16)]
)
def test_masks_show_the_same_part_as_the_image(transform):
    yy, xx = np.mgrid[:60, :90]
    mask = ((yy // 15) * 6 + xx // 15).astype(np.uint8)
    image = Image.fromarray(np.stack([mask * 10] * 3, axis=-1))
    pixels, labels = transform(image), transform.labels(Image.fromarray(mask))
    assert labels.shape == (16, 16) and labels.dtype == np.uint8
    inside = np.abs(pixels[..., 0].astype(int) - 10 * labels.astype(int)) < 4
    assert inside.mean() > 0.5  # borders between labels are blurred in the image
    assert np.abs(pixels[..., 0].astype(int) - 10 * labels.astype(int)).mean() < 12


@pytest.mark.hostile
def test_tables_that_would_give_wrong_scores_are_refused(tissue, tmp_path):
    rows = list(csv.DictReader((tissue / "tissue.csv").open()))

    def folder(name, **changes):
        place = tmp_path / name
        shutil.copytree(tissue, place)
        with (place / "tissue.csv").open("w", newline="") as stream:
            table = csv.DictWriter(stream, rows[0])
            table.writeheader()
            table.writerows([{**row, **(changes if number == 7 else {})} for number, row in enumerate(rows)])
        return place

    Image.new("RGB", (32, 32)).save(tissue / "masks/colour.png")
    Image.new("L", (31, 32)).save(tissue / "masks/narrow.png")
    (tissue / "masks/text.png").write_text("no image")
    for name, mask, message in (
        ("colour", "masks/colour.png", "must have one number per pixel, got 3 channels"),
        ("narrow", "masks/narrow.png", "has 31 x 32 pixels, but its image .* has 32 x 32"),
        ("text", "masks/text.png", "is not a PNG file"),
        ("outside", "../../etc/passwd", "is not the name of a mask"),
        ("missing", "masks/none.png", "none.png"),
    ):
        with pytest.raises(DataError, match=message):
            run("linear_segmentation", folder(name, mask=mask), columns={"mask": "{mask}"})
    for name, value in (("word", "many"), ("empty", ""), ("nan", "nan"), ("inf", "1e999")):
        with pytest.raises(DataError, match=r"tissue.csv: row 8: \{nuclei\} must be a finite number"):
            run("regression", folder(name, nuclei=value), columns={"target": "{nuclei}"})
    # A patient in both splits would be recognised instead of the tissue.
    leaking = folder("leak", split="test")
    for kind, columns in (
        ("probe", {"label": "{tissue}"}),
        ("regression", {"target": "{nuclei}"}),
        ("linear", {"label": "{tissue}"}),
    ):
        with pytest.raises(DataError, match=r"group.s. of images with train, such as 'p000'"):
            run(kind, leaking, columns=columns)
    for key in ("target", "mask"):
        kind = {"target": "regression", "mask": "linear_segmentation"}[key]
        with pytest.raises(ConfigError, match=rf"columns.{key}: (is )?missing"):
            run(kind, tissue)


@pytest.mark.long
def test_tissue_tiles_are_reproducible_and_match_their_masks(tmp_path):
    config = TissueConfig(seed=3, patients=5, tiles=4)
    tiles = [render_tile(config, number) for number in range(20)]
    again = render_tile(config, 11)
    assert np.array_equal(again.image, tiles[11].image) and again.findings == tiles[11].findings
    for tile in tiles:
        assert set(np.unique(tile.mask)) <= {0, 1, 2}
        dark = tile.image.astype(float).mean(-1)
        if (tile.mask == 1).sum() > 20 and (tile.mask == 0).sum() > 20:
            assert dark[tile.mask == 1].mean() < dark[tile.mask == 0].mean()
    tissue_set(tmp_path / "a", config)
    tissue_set(tmp_path / "b", config, processes=2)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 42 and all(
        (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files
    )
    with pytest.raises(DataError, match="contains a set with other options"):
        tissue_set(tmp_path / "a", TissueConfig(seed=4, patients=5, tiles=4))


def test_chance_counts_the_classes_that_occur(tissue, tmp_path):
    rows = list(csv.DictReader((tissue / "tissue.csv").open()))
    folder = tmp_path / "numbers"
    shutil.copytree(tissue, folder)
    names = sorted({row["tissue"] for row in rows})
    with (folder / "tissue.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, rows[0])
        table.writeheader()
        table.writerows([{**row, "tissue": str(10 * names.index(row["tissue"]) + 7)} for row in rows])
    for kind in ("knn", "probe", "linear", "attentive_probe"):
        keys = {"head": {"kind": "gap"}} if kind == "attentive_probe" else {}
        found = run(
            kind, folder, columns={"label": "{tissue}"}, **({"epochs": 1} if kind != "knn" else {"k": (5,)}), **keys
        )
        assert found.chance == 1 / len(names), kind


def test_intervals_resample_groups(tissue):
    found = run("knn", tissue, columns={"label": "{tissue}"}, k=(5,))
    assert found.counts["groups"] == 2 and "resamples the 2 groups" in " ".join(found.remarks())
    linear = run("linear", tissue, columns={"label": "{tissue}"}, epochs=1)
    assert linear.counts["groups"] == 2 and len(linear.predictions["right"]) == linear.n == 24
    assert linear.predictions["right"].mean() == pytest.approx(linear.value)
    # With two patients, each resample has one of them twice, or both.
    right = found.predictions["right"].reshape(2, 12).mean(1)
    assert found.interval == pytest.approx((right.min(), right.max()))
    values = np.arange(12.0).reshape(6, 2)
    np.testing.assert_array_equal(
        sum_groups(values, list("abaabb")), [values[[0, 2, 3]].sum(0), values[[1, 4, 5]].sum(0)]
    )
    np.testing.assert_array_equal(sum_groups(values, None), values)
    scores, labels = torch.rand(8, 3), torch.tensor([[1, 0, 0], [0, 1, 0]] * 4)
    only = multilabel_result(scores, labels, "probe", only_present=True)
    assert only.value == pytest.approx(average_precisions(scores, labels)[:2].mean().item())
    assert "1 class(es) have no positive" in " ".join(only.remarks())


def table_of(folder, tissue, change, name="tissue.csv"):
    """Copy the set, with the rows and columns that `change` returns."""
    rows = [change(number, row) for number, row in enumerate(csv.DictReader((tissue / "tissue.csv").open()))]
    shutil.copytree(tissue, folder)
    if name.endswith(".json"):
        (folder / name).write_text(json.dumps(rows))
        return folder
    with (folder / name).open("w", newline="") as stream:
        table = csv.DictWriter(stream, rows[0])
        table.writeheader()
        table.writerows(rows)
    return folder


@pytest.mark.hostile
def test_unusual_cells_of_tables_are_read_correctly(tissue, tmp_path):
    plain = run("knn", tissue, columns={"label": "{tissue}"}, k=(5,))

    def spaces(number, row):
        space = " " * (number % 2)
        return {
            **row,
            "tissue": row["tissue"] + space,
            "split": space + row["split"],
            "patient": row["patient"] + space,
        }

    spaced = run("knn", table_of(tmp_path / "spaces", tissue, spaces), columns={"label": "{tissue}"}, k=(5,))
    assert spaced.value == plain.value and spaced.n == 24 and spaced.chance == plain.chance
    assert spaced.counts["groups"] == 2
    # Codes of a terminology instead of class numbers, and a column with a dot in its name.
    names = sorted({row["tissue"] for row in csv.DictReader((tissue / "tissue.csv").open())})
    codes = table_of(
        tmp_path / "codes", tissue,
        lambda _, row: {**row, "dx.code": str(73_211_009 + 7_000 * names.index(row["tissue"])), "patient.id": row["patient"]},
    )  # fmt: skip
    for kind in ("knn", "probe", "linear"):
        found = run(
            kind,
            codes,
            columns={"label": "{dx.code}", "group": "patient.id"},
            **({} if kind == "knn" else {"epochs": 1}),
        )
        assert found.chance == pytest.approx(1 / len(names)) and found.predictions.get("label", np.zeros(1)).max() < 5
    assert run("knn", codes, columns={"label": "{dx.code}", "group": "patient.id"}, k=(5,)).value == plain.value
    listed = table_of(
        tmp_path / "lists",
        tissue,
        lambda _, row: {**row, "findings": row["findings"].split(";") if row["findings"] else []},
        "tissue.json",
    )
    columns = {"labels": "{findings}", "file": "tissue.json"}
    expected = run("probe", tissue, columns={"labels": "{findings}"}, epochs=2)
    assert run("probe", listed, columns=columns, epochs=2).value == expected.value


@pytest.mark.hostile
def test_splits_and_findings_that_do_not_exist_are_named(tissue, tmp_path):
    cases = table_of(
        tmp_path / "case", tissue, lambda n, row: {**row, "split": row["split"].title() if n % 7 == 0 else row["split"]}
    )
    with pytest.raises(DataError, match=r"column 'split' spells one split in two ways, got 'Train' and 'train'"):
        run("knn", cases, columns={"label": "{tissue}"})
    share = {"label": "{tissue}", "split": None, "test_share": 0.2}
    for words in ({"val_split": "nonsense"}, {"split": "val"}):
        config = task("probe", tissue, columns=share)
        with pytest.raises(ConfigError, match=r"columns.test_share: creates only the splits `train` and `test`"):
            Suite({"t": config.model_copy(update=words)}).run(encoder())
    none = table_of(tmp_path / "none", tissue, lambda _, row: {**row, "findings": ""})
    with pytest.raises(DataError, match=r"in \{findings\}, no row has the name of a class"):
        run("probe", none, columns={"labels": "{findings}"})
    test_only = table_of(
        tmp_path / "test_only", tissue, lambda _, row: {**row, "findings": "" if row["split"] == "test" else "x"}
    )
    with pytest.raises(DataError, match=r"no image of split test belongs to any class, so mean average precision"):
        run("probe", test_only, columns={"labels": "{findings}"})
    one = table_of(
        tmp_path / "one", tissue, lambda n, row: {**row, "patient": row["patient"] if row["split"] == "test" else "p"}
    )
    with pytest.raises(ConfigError, match=r"splits 1 groups .* Set val_proportion=0, and choose weight_decay"):
        run("probe", one, columns={"label": "{tissue}"}, val_proportion=0.5)


def test_the_ridge_is_chosen_by_squared_error_over_patients():
    # A value per patient instead of per image: within a fold of one patient, every R2 is the same.
    rng = np.random.default_rng(0)
    patients = np.arange(5).repeat(20)
    ages = np.array([30.0, 45, 52, 61, 78])[patients]
    features = rng.normal(size=(100, 50)) + rng.normal(size=(5, 50))[patients]
    found = regression.score(features, ages, features, ages, [f"p{i}" for i in patients])
    scaled = (features - features.mean(0)) / features.std(0)
    folds = list(GroupKFold(5).split(scaled, groups=patients))

    def error(alpha):
        fits = [Ridge(alpha).fit(scaled[train], ages[train]) for train, _ in folds]
        return np.mean(
            [np.mean((fit.predict(scaled[test]) - ages[test]) ** 2) for fit, (_, test) in zip(fits, folds, strict=True)]
        )

    assert found.options["alpha"] == min(regression.ALPHAS, key=error)
    lonely = regression.score(features, ages, features, ages, None, [f"p{i}" for i in patients])
    assert lonely.intervals["r2"][0] > -100  # resamples of a single patient have no R2


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_masks_of_any_depth_have_their_numbers(bits):
    numbers = np.arange(16, dtype=np.uint16).reshape(4, 4) % (2 ** min(bits, 4))
    bytes_per_row = max(1, 4 * bits // 8)
    rows = []
    for row in numbers.tolist():
        whole = sum(value << (bits * (3 - place)) for place, value in enumerate(row))
        whole <<= 8 * bytes_per_row - 4 * bits  # one bit per pixel: a row fills half of a byte
        rows.append(b"\0" + whole.to_bytes(bytes_per_row, "big"))

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", 4, 4, bits, 0, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"".join(rows)))
        + chunk(b"IEND", b"")
    )
    assert np.array_equal(label_image(png, "x"), numbers)


@pytest.mark.hostile
def test_masks_of_other_tools_are_read_or_refused_with_a_remedy(tissue, tmp_path):
    places = {
        "binary": lambda m: (m > 0).astype(np.uint8) * 255,
        "wide": lambda m: np.where(m == 2, 65_535, m.astype(np.uint16)),
        "blank": lambda m: m * 0 + 255,
    }
    for name, change in places.items():
        shutil.copytree(tissue, tmp_path / name)
        for path in (tmp_path / name / "masks").glob("p*/*.png"):
            Image.fromarray(change(np.asarray(Image.open(path)))).save(path)
    columns = {"mask": "{mask}"}
    with pytest.raises(
        DataError, match=r"need at least two classes.*If the ignored value is a class, set ignore: null"
    ):
        run("linear_segmentation", tmp_path / "binary", columns=columns)
    found = run("linear_segmentation", tmp_path / "binary", columns=columns, ignore=None, epochs=2)
    assert set(found.options["iou"]) == {0, 255}
    found = run("linear_segmentation", tmp_path / "wide", columns=columns, ignore=65_535, epochs=2)
    assert set(found.options["iou"]) == {0, 1}
    with pytest.raises(DataError, match=r"class numbers must be below 1000, got 65535"):
        run("linear_segmentation", tmp_path / "wide", columns=columns)
    with pytest.raises(DataError, match="every pixel is 255, which is ignored"):
        run("linear_segmentation", tmp_path / "blank", columns=columns)
    with pytest.raises(DataError, match="test: every pixel is 255"):
        some, none = grid_features(np.zeros((2, 4, 4), np.uint8), 2), grid_features(np.full((2, 4, 4), 1, np.uint8), 2)
        blank = none._replace(masks=np.full((2, 4, 4), 255, np.uint8))
        linear_segmentation.score(some, blank, 2, 255, SegmentationTraining(0.1, 1, 2, 0, CPU))
    jpeg = tissue / "masks/mask.jpg"
    Image.new("L", (32, 32)).save(jpeg)
    with pytest.raises(DataError, match=r"is not a PNG file\. Save it as PNG"):
        label_image(jpeg.read_bytes(), "x")
