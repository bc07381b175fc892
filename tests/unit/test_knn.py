"""k-NN and the linear probe compared with restatements of the official ones, in blocks of any size and on any number of ranks."""

import io
import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

from evals.encoders.dino_encoder import DinoEncoder
from evals.feature_store.features import FeatureStore
from evals.sets.open_set import open_labelled
from evals.sets.wds import open_images
from evals.slots.eval_inputs import material
from evals.slots.page_arrays import make_arrays
from evals.slots.units import make_units
from evals.suite.labelled_tasks import KnnTaskConfig, run_knn
from evals.suite.linear_probe import LinearTaskConfig, run_linear
from evals.suite.scoring import Scoring
from evals.tasks import knn, linear
from evals.tasks.result import Result
from sparo_data.writer import write_shards
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.world import World
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import jpeg

ALONE = Ranks(World(), "gloo", 0.0)


def official_knn(train, train_labels, test, test_labels, k, temperature, classes):
    """Compute the vote of eval_knn.py for all test items at once."""
    train, test = F.normalize(train, dim=1), F.normalize(test, dim=1)
    similarity, row = (test @ train.T).topk(k, largest=True, sorted=True)
    one_hot = torch.zeros(len(test) * k, classes).scatter_(1, train_labels[row].view(-1, 1), 1)
    weights = similarity.div(temperature).exp()
    votes = (one_hot.view(len(test), k, classes) * weights.view(len(test), k, 1)).sum(1)
    correct = votes.sort(1, True).indices.eq(test_labels.view(-1, 1))
    top5 = correct[:, : min(5, k, classes)].sum().item()
    return correct[:, :1].sum().item() / len(test), top5 / len(test)


def clouds(n, m, classes, seed=0, dim=16):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=g)
    labels = [torch.randint(0, classes, (count,), generator=g) for count in (n, m)]
    return *(centres[y] + 1.5 * torch.randn(len(y), dim, generator=g) for y in labels), *labels


def test_the_vote_equals_the_official_one_for_any_number_of_tests_and_classes():
    for n, m, classes in ((900, 300, 7), (400, 3, 12), (250, 41, 3)):
        train, test, train_labels, test_labels = clouds(n, m, classes)
        found = knn.find_nearest(test, train, 200, block=(64, 100))
        result = knn.score(found, train_labels, test_labels, classes, (10, 20, 100, 200), 0.07, 20)
        for k in (10, 20, 100, 200):
            top1, top5 = official_knn(train, train_labels, test, test_labels, k, 0.07, classes)
            assert result.metrics[f"acc1_k{k}"] == pytest.approx(top1, abs=1e-12)
            if classes > 5:
                assert result.metrics[f"acc5_k{k}"] == pytest.approx(top5, abs=1e-12)
        assert result.n == m and result.headline == "acc1_k20" and result.chance == 1 / classes


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 25),
    st.integers(1, 4),
)
def test_blocks_and_parts_of_the_bank_change_nothing_even_with_ties(seed, n, m, k, block, parts):
    rng = np.random.default_rng(seed)
    axes = np.concatenate([np.eye(3), -np.eye(3)]).astype(np.float32)  # similarities are -1, 0 or 1, and mostly tied
    bank, queries = (torch.from_numpy(axes[rng.integers(6, size=count)]) for count in (n, m))
    similarity = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    whole = similarity.sort(dim=1, descending=True, stable=True)
    ends = [n * i // parts for i in range(parts + 1)]
    found = [knn.find_nearest(queries, bank[a:b], k, a, (3, block)) for a, b in itertools.pairwise(ends)]
    merged = knn.merge(found, k)
    assert torch.equal(merged.row, whole.indices[:, :k])
    assert torch.equal(merged.similarity, whole.values[:, :k])


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 3000),
    k=st.integers(1, 12),
    values=st.sampled_from([2, 40, 10**6]),
    transposed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_long_rows_searched_in_groups_give_what_a_full_sort_gives(seed, n, k, values, transposed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, values, (5, n), generator=generator).float()
    found = knn.select_best(table.T.contiguous().T if transposed else table, k, 100)
    expected = table.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.similarity, expected.values[:, :k])
    assert torch.equal(found.row, expected.indices[:, :k] + 100)


@pytest.mark.parametrize("temperature", [0.012, 0.01, 1e-3, 1e-30])
def test_votes_with_a_small_temperature_are_not_infinite(temperature):
    train, test, train_labels, _ = clouds(300, 40, 4)
    found = knn.find_nearest(test, train, 20)
    best = knn.predictions(found, train_labels, 4, 20, temperature)[:, 0]
    votes = ((found.similarity - found.similarity[:, :1]).double() / temperature).exp()
    expected = torch.zeros(40, 4, dtype=torch.float64).scatter_add_(1, train_labels[found.row], votes).argmax(1)
    assert torch.equal(best, expected)


def test_half_precision_banks_are_scored_in_fp32():
    train, test, _, _ = clouds(300, 20, 4)
    half = knn.find_nearest(test, train.half(), 5)
    assert half.similarity.dtype == torch.float32
    assert torch.allclose(half.similarity, knn.find_nearest(test, train.half().float(), 5).similarity)


def labelled(root, n, seed, classes=3):
    """Write images whose colour is the class, in one shard of labelled samples."""
    rng, samples = np.random.default_rng(seed), []
    for i in range(n):
        label = int(rng.integers(classes))
        samples.append((f"{i:05d}", {"jpg": jpeg(label + 7 * int(rng.integers(2))), "cls": str(label).encode()}))
    write_shards(root, samples, 16)
    return str(root)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    return {"train": labelled(root / "train", 43, 0), "test": labelled(root / "test", 17, 1)}


def encoder():
    torch.manual_seed(0)
    tree = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 3, "heads": 2}
    return DinoEncoder(
        Vit(VitConfig.model_validate({**tree, "readout": {"kind": "sparo", "slots": 3, "slot_width": 4}}))
    )


def knn_on(ranks, sets):
    return run_knn(scoring(encoder(), ranks), KnnTaskConfig(task="knn", k=(3, 20), workers=0, **sets))


def linear_on(ranks, sets, augment):
    task = LinearTaskConfig(
        task="linear", epochs=3, batch_size=14, classes=3, lr=1.0, augment=augment, workers=0, resize=16, **sets
    )
    return run_linear(scoring(encoder(), ranks), task)


def scoring(encoder, ranks=ALONE, store=None):
    return Scoring("task", encoder, FeatureStore(store), ranks)


@pytest.mark.long
def test_ranks_score_as_one_and_see_every_image_once(sets, tmp_path):
    """43 training images in batches of 14: the last one has fewer images than there are ranks. The same for a test set of two images."""
    for n, places in ((17, sets), (2, {**sets, "test": labelled(tmp_path / "two", 2, 5)})):
        for task, arguments in ((knn_on, ()), (linear_on, (True,)), (linear_on, (False,))):
            alone = task(ALONE, places, *arguments)
            assert alone.n == n
            for result in run_ranks(3, task, places, *arguments):
                assert result.metrics == pytest.approx(alone.metrics, abs=1e-12), task


def test_sets_of_a_layout_have_the_scores_of_their_shards(sets, tmp_path):
    """Any entry of `sparo.layouts` works: here clip-benchmark's, with one folder and with two."""
    root = tmp_path / "set"
    for split, place in sets.items():
        shutil.copytree(place, root / split)
        tars = sorted((root / split).glob("*.tar"))
        for number, tar in enumerate(tars):
            tar.rename(root / split / f"{number}.tar")
        (root / split / "nshards.txt").write_text(str(len(tars)))
    places = {"train": str(root), "test": str(root), "layout": "wds"}
    assert knn_on(ALONE, places).metrics == knn_on(ALONE, sets).metrics
    with pytest.raises(ConfigError, match=r"layout=sugar_crepe: has pairs, but task knn needs label"):
        knn_on(ALONE, {**places, "layout": "sugar_crepe"})
    with pytest.raises(ValidationError, match=r"did you mean|wds"):
        knn_on(ALONE, {**places, "layout": "wsd"})
    for split, names in (("train", "ab"), ("test", "ac")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.jpg").write_bytes(jpeg(0))
    folders = {split: str(tmp_path / split) for split in sets}
    with pytest.raises(DataError, match=r"test: .*train have different classes"):
        knn_on(ALONE, {**folders, "layout": "folder"})


def test_the_probe_is_trained_as_officially(sets):
    """Train three epochs of SGD with momentum on the features of the last four blocks, and compare with a plain loop."""
    e, task = (
        encoder(),
        LinearTaskConfig(task="linear", epochs=3, batch_size=10, lr=1.0, augment=False, workers=0, **sets),
    )
    ours = run_linear(scoring(e), task)
    from sparo_train.core.rng import generator, torch_seed

    data = {}
    for key, place in sets.items():
        rows = list(open_images(place, "label", key))
        pixels = e.stack([e.transform(image) for _, image, _ in rows])
        data[key] = e.probe(pixels, 4), torch.tensor([label for _, _, label in rows])
    features, labels = data["train"]
    assert features.shape == (43, 2 * 16 + 12)
    weight = torch.empty(3, 44).normal_(0.0, 0.01, generator=torch.Generator().manual_seed(torch_seed(0, "probe")))
    layer = nn.Linear(44, 3)
    layer.load_state_dict({"weight": weight, "bias": torch.zeros(3)})
    momentum = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    right = []
    for epoch in range(3):
        rate = 1.0 * 10 / 256 * 0.5 * (1 + np.cos(np.pi * epoch / 3))
        for batch in torch.from_numpy(generator(0, "probe", epoch).permutation(43)).split(10):
            layer.zero_grad()
            F.cross_entropy(layer(features[batch]), labels[batch]).backward()
            with torch.no_grad():
                for name, p in layer.named_parameters():
                    momentum[name] = 0.9 * momentum[name] + p.grad
                    p -= rate * momentum[name]
        x, y = data["test"]
        right.append(int((layer(x).argmax(1) == y).sum()))
    hits = layer(x).argmax(1) == y
    recall = torch.stack([hits[y == c].double().mean() for c in y.unique()]).mean().item()
    assert ours.metrics == pytest.approx(
        {"acc1": right[-1] / 17, "acc1_best": max(right) / 17, "mean_per_class_recall": recall}
    )
    assert ours.headline == "acc1"


def test_best_and_last_epoch_are_both_reported():
    labels = torch.tensor([0] * 6 + [1] * 4)
    spread = torch.nn.functional.pad
    right = [spread(torch.tensor(rows), (0, 5)) for rows in ([[3, 2], [5, 4]], [[5, 3], [5, 4]], [[6, 0], [6, 4]])]
    last = torch.tensor([True] * 6 + [False] * 4)
    result = linear.result(right, last, labels, 7)
    assert (result.predictions["right"] == last.numpy()).all()
    assert result.metrics == {
        "acc1": 0.6,
        "acc1_best": 0.8,
        "acc5": 1.0,
        "acc5_best": 0.9,
        "mean_per_class_recall": 0.5,
    }
    assert "the largest class has 60.0 % of the images, which is the acc1 of always naming it" in result.remarks()[0]


def test_a_diverged_probe_gives_no_score():
    def batches(_epoch):
        yield torch.full((4, 3), 1e38), torch.tensor([0, 1, 0, 1]), 4

    with pytest.raises(ConfigError, match=r"lr: .* not finite after epoch \d of 9, got a rate of 1e\+30"):
        linear.train_probe(batches, 3, 2, 9, 1e30, 0, torch.device("cpu"), lambda epoch, layer: None)


def bitmap(seed):
    """Return an image of 8 x 8 pixels that has equally many bytes for every seed."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(buffer, format="BMP")
    return buffer.getvalue()


def test_test_images_in_the_training_set_are_reported(sets, tmp_path):
    def remarks(**places):
        return " ".join(run_knn(scoring(encoder()), KnnTaskConfig(task="knn", k=(1,), workers=0, **places)).remarks())

    same = "the image itself did not vote"
    assert same in remarks(train=sets["train"], test=sets["train"])
    assert same not in remarks(**sets)
    # Other images with the same names and sizes have the same identity.
    for name in ("one", "two"):
        rows = [(str(i), {"png": bitmap(i + 9 * (name == "two")), "cls": b"0"}) for i in range(4)]
        write_shards(tmp_path / name, rows, 16)
    assert same not in remarks(train=str(tmp_path / "one"), test=str(tmp_path / "two"))
    (tmp_path / "link").symlink_to(sets["train"])
    assert same in remarks(train=sets["train"], test=str(tmp_path / "link"))
    # Some training images in other files: three of the seven test images.
    overlap = [(str(i), {"jpg": jpeg(colour), "cls": b"0"}) for i, colour in enumerate([0, 1, 2, 200, 201, 202, 203])]
    write_shards(tmp_path / "overlap", overlap, 16)
    assert "3 of 7 images have the same encoding as a training image" in remarks(
        **{**sets, "test": str(tmp_path / "overlap")}
    )


def test_a_class_that_only_training_has_is_named(sets, tmp_path):
    train = labelled(tmp_path / "more", 20, 3, classes=6)
    with pytest.raises(DataError, match="Set the task's key `classes`"):
        linear_on(ALONE, {**sets, "train": train}, True)


def test_encodings_that_are_not_finite_are_refused(sets):
    e = encoder()
    with torch.no_grad():
        next(e.model.parameters()).fill_(float("nan"))
    with pytest.raises(DataError, match="not finite"):
        run_knn(scoring(e), KnnTaskConfig(task="knn", workers=0, **sets))


@pytest.mark.parametrize(
    ("n", "classes", "largest", "shown"),
    [(20, 3, 10, "50.0 %"), (20, 2, 14, "70.0 %"), (20, 2, 11, ""), (1000, 1000, 1, ""), (50, 100, 1, "")],
)
def test_the_majority_baseline_is_shown_where_it_is_above_chance(n, classes, largest, shown):
    found = Result("knn", n, "acc1", {"acc1": 0.5}, 1 / classes, counts={"largest_class": largest}).remarks()
    assert len(found) == bool(shown) and all(f"{shown} of the images" in remark for remark in found)


def test_files_skipped_in_training_mark_a_score_too():
    options = {"left_out": {".heic": 2}, "left_out_of_training": {".mov": 1, ".heic": 3}}
    odd = Result("knn", 20, "acc1", {"acc1": 0.5}, 0.5, options=options)
    assert odd.odd() == odd.remarks()[0] and "2 file(s) skipped, not" in odd.odd()
    assert "4 file(s) skipped in training, not readable as images: 1 .mov, 3 .heic" in odd.odd()


def test_images_of_a_group_do_not_vote_and_classes_may_be_balanced():
    torch.manual_seed(0)
    bank, labels = torch.randn(60, 8), torch.arange(60) % 3
    labels[:40] = 0
    groups = torch.arange(60) // 5
    for block in ((7, 11), (64, 64)):
        found = knn.find_nearest(bank, bank, 9, block=block, groups=(groups, groups))
        similarity = F.normalize(bank, dim=-1) @ F.normalize(bank, dim=-1).T
        similarity[groups[:, None] == groups] = -torch.inf
        expected = similarity.sort(dim=1, descending=True, stable=True)
        assert torch.equal(found.row, expected.indices[:, :9])
    found = knn.find_nearest(bank, bank, 9, groups=(torch.arange(60), torch.arange(60)))
    votes = torch.zeros(60, 3)
    for query in range(60):
        for similarity, row in zip(found.similarity[query], found.row[query], strict=True):
            label = int(labels[row])
            votes[query, label] += float((similarity / 0.07).exp()) / int((labels == label).sum())
    result = knn.score(found, labels, labels, 3, (9,), 0.07, 9, balanced=True)
    assert (result.predictions["predicted_k9"][:, 0] == votes.argmax(1).numpy()).all()
    plain = knn.score(found, labels, labels, 3, (9,), 0.07, 9)
    assert (plain.predictions["predicted_k9"] != result.predictions["predicted_k9"]).any()


def test_a_table_with_names_of_classes_and_patients(tmp_path):
    lines = ["file,diagnosis,patient"]
    for i in range(12):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i // 2))  # two equal images of each patient
        lines.append(f"{i}.jpg,{('healthy', 'tumour')[i // 2 % 2]},p{i // 2}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    columns = {"file": "labels.csv", "images": ["{file}"], "label": "{diagnosis}"}
    keys = {"task": "knn", "layout": "table", "train": str(tmp_path), "test": str(tmp_path), "k": (1,), "workers": 0}
    alone = run_knn(scoring(encoder()), KnnTaskConfig.model_validate({**keys, "columns": columns}))
    assert alone.metrics["acc1_k1"] == 1 and "the image itself did not vote" in " ".join(alone.remarks())
    grouped = run_knn(
        scoring(encoder()), KnnTaskConfig.model_validate({**keys, "columns": {**columns, "group": "patient"}})
    )
    assert grouped.metrics["acc1_k1"] < 1 and "images of its group" in " ".join(grouped.remarks())
    for more in ({}, {"group": "patient"}):  # slots are selected by the votes that evaluation counts
        task = KnnTaskConfig.model_validate({**keys, "k": (3,), "balanced": True, "columns": {**columns, **more}})
        probe = material("knn", task, make_units(encoder()), FeatureStore())
        right = run_knn(scoring(encoder()), task).predictions["right"]
        assert (probe.curve(range(3))[:, -1].numpy() == right).all()
        page = make_arrays("knn", task, make_units(encoder()), FeatureStore())
        assert {"groups", "bank_groups"} <= page.arrays.keys() and page.facts["balanced"] and page.facts["k"] == 3
    one = "\n".join(["file,diagnosis,patient", *(f"{i}.jpg,{'ab'[i % 2]},p" for i in range(6))])
    (tmp_path / "one.csv").write_text(one)
    alone = KnnTaskConfig.model_validate({**keys, "columns": {**columns, "file": "one.csv", "group": "patient"}})
    with pytest.raises(DataError, match=r"6 of 6 images have no neighbour, because all 6 images .* the same group"):
        run_knn(scoring(encoder()), alone)
    # Some patients as a test set: no patient is in both splits, and every image is in one.
    parts = open_labelled(
        KnnTaskConfig.model_validate({**keys, "columns": {**columns, "group": "patient", "test_share": 0.4}})
    )
    train, test = (set(part.groups) for part in parts)
    assert train and test and not train & test and sum(map(len, parts)) == 12
    with pytest.raises(DataError, match=r"shares 6 group\(s\) of images with train, such as 'p0'"):
        linear_keys = {name: value for name, value in keys.items() if name != "k"} | {"task": "linear"}
        open_labelled(LinearTaskConfig.model_validate({**linear_keys, "columns": {**columns, "group": "patient"}}))
    for wrong, says in (
        ({"label": "diagnosis"}, "columns.label: expected a text with the name of a column in braces, got 'diagnosis'"),
        (
            {"group": "{patient}"},
            "columns.group: expected the name of a column without braces, got '{patient}'. Write patient",
        ),
        ({"captions": ["caption"]}, "For the column `caption`, write {caption}"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            KnnTaskConfig.model_validate({**keys, "columns": {**columns, **wrong}})
    limited = KnnTaskConfig.model_validate({**keys, "limit": 6, "columns": {**columns, "group": "patient"}})
    assert open_labelled(limited)[0].groups == [f"p{i}" for i in range(6)]  # a limit keeps groups
    with pytest.raises(DataError, match=r"column 'patient' has no row with 'train', got p0, p1"):
        open_labelled(KnnTaskConfig.model_validate({**keys, "columns": {**columns, "split": "patient"}}))
    (tmp_path / "labels.csv").write_text("file;diagnosis\n0.jpg;a\n1.jpg;b")  # the format of spreadsheets
    assert len(open_labelled(KnnTaskConfig.model_validate({**keys, "columns": columns}))[0]) == 2
    (tmp_path / "labels.csv").write_text("file,diagnosis\n0.jpg,\n1.jpg,a")
    with pytest.raises(DataError, match=r"labels\.csv: row 1: has no class"):
        run_knn(scoring(encoder()), KnnTaskConfig.model_validate({**keys, "columns": columns}))
