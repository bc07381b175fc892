"""Our task functions compared with those of clip-benchmark 1.6.2 on random features, exactly where the definitions agree."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from evals.tasks import pairs, probe, retrieval, zeroshot

CB = pytest.importorskip("clip_benchmark.metrics")
from clip_benchmark.metrics import (  # noqa: E402
    image_caption_selection,
    linear_probe,
    zeroshot_classification,
    zeroshot_retrieval,
)


class Features(nn.Module):
    """A "model" that returns images unchanged as features, and rows of a table for texts."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def encode_image(self, images):
        return images.flatten(1)

    def encode_text(self, tokens):
        return self.table[tokens]


class Numbers:
    """Return the rows of the table as tokens."""

    def __init__(self, texts):
        self.row = {text: i for i, text in enumerate(texts)}

    def __call__(self, texts):
        return torch.tensor([self.row[text] for text in texts])


class Named(list):
    classes: list


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(images, answers, classes=None, size=32, collate=None):
    rows = Named(zip(images.unflatten(1, (1, -1)), answers, strict=True))
    rows.classes = classes
    return DataLoader(rows, size, collate_fn=collate)


@pytest.mark.parametrize("classes", [4, 5, 23])
def test_zeroshot_classification(classes):
    names, templates = [f"thing {i}" for i in range(classes)], ["a {c}.", "the {c}.", "{c}!"]
    prompts = zeroshot.prompts(names, templates)
    table, images = random(len(prompts), 16, seed=1), random(300, 16, seed=2)
    labels = torch.randint(0, classes, (300,), generator=torch.Generator().manual_seed(3))
    theirs = zeroshot_classification.evaluate(
        Features(table), batches(images, labels, names), Numbers(prompts), names, templates, "cpu", amp=False
    )
    ours = zeroshot.score(images.split(50), zeroshot.classifier(table, classes), labels).metrics
    assert ours["acc1"] == theirs["acc1"]
    assert ours["mean_per_class_recall"] == pytest.approx(theirs["mean_per_class_recall"], abs=1e-15)
    assert ours.get("acc5", pytest.approx(float("nan"), nan_ok=True)) == pytest.approx(
        theirs["acc5"], nan_ok=True, abs=0
    )


def test_mean_average_precision_of_several_labels():
    names = [f"thing {i}" for i in range(7)]
    table, images = random(7, 16, seed=1), random(200, 16, seed=2)
    labels = (random(200, 7, seed=3) > 1).long()
    labels[:, 4] = 0  # a class without positives
    theirs = zeroshot_classification.evaluate(
        Features(table), batches(images, labels, names), Numbers(names), names, ["{c}"], "cpu", amp=False
    )
    ours = zeroshot.score_multilabel(images.split(64), zeroshot.classifier(table, 7), labels)
    assert ours.value == pytest.approx(theirs["mean_average_precision"], abs=1e-7)  # they sum in fp32
    assert ours.counts == {"classes_without_positive": 1}


def test_retrieval_with_any_number_of_captions():
    counts = [1 + i % 7 for i in range(60)]
    texts = [[f"{i} {j}" for j in range(n)] for i, n in enumerate(counts)]
    flat = [text for row in texts for text in row]
    images, table = random(60, 12, seed=4), random(len(flat), 12, seed=5)
    owner = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)])
    table = 0.3 * table + images[owner]
    loader = batches(images, texts, collate=lambda rows: (torch.stack([x for x, _ in rows]), [t for _, t in rows]))
    theirs = zeroshot_retrieval.evaluate(
        Features(table), loader, Numbers(flat), "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    ours = retrieval.score(images, table, owner).metrics
    for k in (1, 5, 10):
        assert ours[f"image_R@{k}"] == pytest.approx(theirs[f"image_retrieval_recall@{k}"], abs=1e-7)
        assert ours[f"text_R@{k}"] == pytest.approx(theirs[f"text_retrieval_recall@{k}"], abs=1e-7)
    found = (F.normalize(images, dim=1) @ F.normalize(table, dim=1).T).topk(5, dim=1).indices
    right = (owner[found] == torch.arange(60)[:, None]).sum(1).double()
    assert ours["text_precision@5"] == pytest.approx((right / 5).mean().item())
    assert ours["text_recall@5"] == pytest.approx((right / torch.tensor(counts)).mean().item())
    assert ours["text_precision@5"] < ours["text_R@5"]


def test_pairs_without_ties():
    images, table = random(90, 12, seed=6), random(180, 12, seed=7)
    texts = [[f"{i} true", f"{i} false"] for i in range(90)]
    loader = batches(
        images, texts, collate=lambda rows: (torch.stack([x for x, _ in rows]).unsqueeze(1), [t for _, t in rows])
    )
    theirs = image_caption_selection.evaluate(
        Features(table), loader, Numbers([text for row in texts for text in row]), "cpu", amp=False
    )
    ours = pairs.score(images, table[0::2], table[1::2], ["swap_obj"] * 90)
    assert ours.metrics["swap_obj"] == pytest.approx(theirs["text_acc"], abs=1e-7)


@pytest.fixture
def on_cpu(monkeypatch):
    """Replace `.cuda()`: clip-benchmark's probe asks for CUDA by name."""
    for kind in (torch.Tensor, nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self, *_: self)


def clouds(n, seed, classes=6, width=10):
    y = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(seed))
    return F.normalize(random(classes, width, seed=9)[y] + random(n, width, seed=seed), dim=1), y


def loader(x, y):
    return DataLoader(linear_probe.FeatureDataset(x, y), batch_size=64, shuffle=True)


def labelled(x, y):
    return probe.Labelled(lambda at: x[at], y)


def test_the_probe_trains_all_decays_as_clip_benchmark_trains_each(on_cpu, capsys):
    x, y = clouds(300, 1)
    decays = [0.0, 1e-6, 1e-2, 1.0]
    ours = probe.train_probes(labelled(x, y), 6, decays, probe.Training(epochs=3, seed=5))
    for i, decay in enumerate(decays):
        theirs = linear_probe.train(loader(x, y), 10, 6, decay, 0.1, 3, False, "cpu", 5).state_dict()
        torch.testing.assert_close(ours.weight[i], theirs["module.weight"], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(ours.bias[i], theirs["module.bias"], atol=2e-5, rtol=1e-5)


def test_the_search_ends_where_clip_benchmarks_ends(on_cpu, capsys):
    (x, y), (held, answers) = clouds(200, 2), clouds(150, 3)
    decays = np.logspace(-6, 2, num=97).tolist()
    arguments = (loader(x, y), loader(held, answers), 10, 6, 0.1, 2, False, "cpu", False, 0)
    peak = linear_probe.find_peak(decays, list(range(0, 97, 16)), *arguments)
    for span in (8, 4, 2, 1):
        peak = linear_probe.find_peak(decays, [max(peak - span, 0), peak, min(peak + span, 96)], *arguments)
    found, tried = probe.search(labelled(x, y), labelled(held, answers), 6, probe.Training(epochs=2))
    assert found == decays[peak] and len(tried) <= 15
    assert all(0 <= accuracy <= 1 for accuracy in tried.values())


def test_diverging_layers_are_never_picked():
    x, y = clouds(64, 4)
    broken = probe.Probes(torch.full((1, 6, 10), float("nan")), torch.zeros(1, 6))
    assert (probe.best_classes(broken, labelled(x, y), torch.device("cpu")) == -1).all()


def test_few_shots_are_k_of_each_class_and_too_few_are_named():
    from sparo_train.core.errors import DataError

    _, y = clouds(300, 5)
    picked = probe.draw_few_shots(y, 4, seed=0)
    assert torch.bincount(y[picked]).tolist() == [4] * 6 and len(set(picked.tolist())) == 24
    assert not torch.equal(picked, probe.draw_few_shots(y, 4, seed=1))
    with pytest.raises(DataError, match=r"fewshot_k=200: class 0 has \d+ training images"):
        probe.draw_few_shots(y, 200, seed=0)
