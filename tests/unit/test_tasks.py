"""Task functions compared with restatements."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch.nn import functional as F

from evals.tasks import pairs, retrieval, textonly, zeroshot
from evals.tasks.result import Result, wilson


def test_zeroshot_equals_open_clips_classifier_and_accuracy():
    import open_clip

    class Model(torch.nn.Module):
        def encode_text(self, text, normalize=False):
            features = table[text[:, 0]]
            return F.normalize(features, dim=-1) if normalize else features

    torch.manual_seed(0)
    table = torch.randn(14, 8)
    names, templates = [f"c{i}" for i in range(7)], ["a {c}", "the {c}"]
    ids = {p: i for i, p in enumerate(zeroshot.prompts(names, templates))}
    reference = open_clip.build_zero_shot_classifier(
        Model(),
        lambda texts: torch.tensor([[ids[t]] for t in texts]),
        names,
        [lambda c, t=t: t.replace("{c}", c) for t in templates],
        7,
        "cpu",
    )
    ours = zeroshot.classifier(table, 7)
    torch.testing.assert_close(ours.T, reference)
    image, labels = torch.randn(30, 8), torch.randint(0, 7, (30,))
    result = zeroshot.score(image.split(7), ours, labels)
    logits = F.normalize(image, dim=-1) @ reference
    assert result.metrics["acc1"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert result.metrics["acc5"] == pytest.approx(
        (logits.topk(5).indices == labels[:, None]).any(1).float().mean().item()
    )
    assert result.n == 30 and result.chance == 1 / 7


def test_retrieval_counts_hits_both_ways():
    torch.manual_seed(0)
    image, text = torch.randn(12, 6), torch.randn(20, 6)
    owner = torch.tensor([i % 11 for i in range(20)])  # image 11 has no text
    result = retrieval.score(image, text, owner)
    similarity = F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    for k in (1, 5, 10):
        hits = [any(owner[t] == i for t in similarity[i].topk(k).indices) for i in range(11)]
        assert result.metrics[f"text_R@{k}"] == pytest.approx(sum(hits) / 11)
        hits = [int(owner[t]) in similarity[:, t].topk(k).indices.tolist() for t in range(20)]
        assert result.metrics[f"image_R@{k}"] == pytest.approx(sum(hits) / 20)


def test_pairs_are_strict_and_averaged_both_ways():
    image = F.normalize(torch.tensor([[1.0, 0.0]] * 4), dim=-1)
    true = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    false = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    result = pairs.score(image, true, false, ["a", "a", "b", "a"])
    assert result.metrics == pytest.approx({"micro": 0.5, "macro": 1 / 3, "a": 2 / 3, "b": 0.0})
    assert result.counts == {"ties": 1} and result.headline == "macro"


def test_text_only_guessers_find_planted_shortcuts_and_nothing_else():
    corpus = ["a red cube", "a blue ball"] * 20
    longer = textonly.score(["a red cube"] * 40, ["a red cube and then some more"] * 40, corpus)
    assert longer.metrics["length"] == 1.0 and longer.value == 1.0
    odd = textonly.score(["a red cube"] * 40, ["red a cube"] * 40, corpus)
    assert odd.metrics["likelihood"] == 1.0
    words = ["red", "blue", "green", "gray"]
    even = [(f"a {a} cube", f"a {b} cube") for a in words for b in words if a != b] * 5
    fair = textonly.score(*map(list, zip(*even, strict=True)), corpus=[f"a {w} cube" for w in words])
    assert 0.4 < fair.value < 0.6


def test_wilson_equals_the_textbook_formula():
    low, high = wilson(0.5, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    for k, n in ((0, 7), (3, 7), (31_234, 50_000)):
        assert wilson(k / n, n) == pytest.approx(tuple(binomtest(k, n).proportion_ci(method="wilson")), abs=1e-8)
    assert wilson(0.0, 10)[0] == 0 and wilson(1.0, 10)[1] == pytest.approx(1) and wilson(0.3, 0) == (0.0, 1.0)
    assert Result("t", 100, "acc1", {"acc1": 0.5}, 0.1).as_dict()["interval"] == [low, high]


@given(st.integers(1, 500), st.floats(0, 1))
def test_an_interval_has_its_nominal_coverage(n, share):
    right = round(share * n) / n
    low, high = wilson(right, n)
    assert 0 <= low <= right <= high <= 1


def test_remarks_on_scores_are_reported():
    plain = Result("t", 20, "acc1", {"acc1": 0.5}, 0.1, {"acc1": (0.4, 0.6)})
    assert plain.remarks() == []
    odd = plain._replace(n=1, note="other files", counts={"scenes_beyond_rays": 1, "images_without_caption": 2})
    told = "\n".join(odd.remarks())
    assert all(word in told for word in ("other files", "2 image(s)", "1 of 1 scenes", "n is 1"))
    labels = torch.arange(4)
    one_of_each = zeroshot.result_from_ranking(
        labels.flip(0)[:, None].where(labels[:, None] > 1, labels[:, None]), labels, 4, "zeroshot"
    )
    (told,) = one_of_each.remarks()
    assert told.startswith("mean_per_class_recall: the interval has zero width") and one_of_each.value == 0.5
    twice = torch.arange(4).repeat(2)
    assert zeroshot.result_from_ranking(twice.sort()[0][:, None], twice, 4, "zeroshot").remarks() == []
    # With one answer, Wilson's interval is wide and needs no remark.
    assert plain._replace(n=1, intervals={}).remarks() == []
