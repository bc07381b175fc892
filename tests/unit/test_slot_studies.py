"""Slots after training: shares of scores, selections, masks and what slots are like, each against its plain form."""

import json
from typing import Any, cast

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from evals.encoders.encoder import TwoTowerEncoder
from evals.encoders.heads import SomeHeads, heads_of
from evals.encoders.masked import masked
from evals.encoders.own import ClipEncoder
from evals.encoders.pixels import Pixels
from evals.encoders.selection import Selection, of_numbers, read_selection, selected, write_selection
from evals.sets.base import Pair
from evals.slots import choosing
from evals.slots.margins import Margins, class_curves, class_margins, each_unit, interval, pair_margins
from evals.slots.masks import Factors, MaskTraining, factors, loss, mask_of, train_mask
from evals.slots.material import Pairs, groups_of, halves
from evals.slots.quality import effective_number, monosemanticity, redundancy, sharpness, similarity
from evals.slots.study import gain
from evals.slots.units import units_of
from evals.store.feature_table import Features
from evals.tasks import pairs, zeroshot
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip

U, V, C, N = 6, 3, 5, 70
SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 8, "layers": 3}


def clip(readout):
    torch.manual_seed(1)
    text = {"context_length": 16, "width": 32, "heads": 4, "layers": 2}
    config = {"backbone": "ViT-Tiny-16", "readout": readout, "embed_dim": 24, "vision": SMALL, "text": text}
    return ClipEncoder(Clip(ClipConfig.model_validate(config)), label="a model")


def whole_numbers(seed):
    """Images (N, U, V), class vectors (C, U, V) and labels whose scores have ties, and no rounding."""
    drawn = torch.Generator().manual_seed(seed)
    image, weights = (torch.randint(-2, 3, (n, U, V), generator=drawn).float() for n in (N, C))
    return image, weights, torch.randint(0, C, (N,), generator=drawn)


def by_mask(image, weights, labels, units):
    """The plain form: everything but these units at zero."""
    mask = torch.zeros(U)
    mask[list(units)] = 1
    logits = (image * mask[:, None]).flatten(1) @ weights.flatten(1).T
    return zeroshot.ranked(logits, 1)[:, 0] == labels


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_tells_what_a_masked_pass_per_slot_tells(seed):
    image, weights, labels = whole_numbers(seed)
    found = each_unit(image.split(40), weights, labels)
    for unit in range(U):
        assert torch.equal(found.alone[:, unit], by_mask(image, weights, labels, [unit]))
        assert torch.equal(found.without[:, unit], by_mask(image, weights, labels, set(range(U)) - {unit}))
    assert torch.equal(found.whole, by_mask(image, weights, labels, range(U)))
    orders = [choosing.random_order(U, s) for s in range(3)]
    for order, curve in zip(orders, class_curves(image.split(33), weights, labels, orders), strict=True):
        for k in range(U):
            assert torch.equal(curve[:, k], by_mask(image, weights, labels, order[: k + 1]))


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_margins_decide_as_logits_do(seed):
    image, weights, labels = whole_numbers(seed)
    margins = class_margins(image.split(40), weights, labels, [""] * N)
    for order in (list(range(U)), choosing.random_order(U, seed)):
        curve = choosing.curve(margins, order)
        for k in range(U):
            assert torch.equal(curve[:, k], by_mask(image, weights, labels, order[: k + 1]))
    few = class_margins(image.split(40), weights, labels, [""] * N, keep=2)
    assert bool((few.right(few.values.sum(1)) >= margins.right(margins.values.sum(1))).all())


def test_pairs_are_scored_as_the_task_scores_them():
    image, true, false = (F.normalize(torch.randn(N, U * V), dim=-1) for _ in range(3))
    false[:5] = true[:5]  # ties lose
    kinds = ["swap" if i % 3 else "add" for i in range(N)]
    shaped = [t.unflatten(1, (U, V)) for t in (image, true, false)]
    for average in ("macro", "micro"):
        margins = pair_margins(*shaped, kinds, [""] * N, average)
        right = margins.right(margins.values.sum(1))
        whole = pairs.score(image, true, false, kinds, average)
        assert torch.equal(right, torch.from_numpy(whole.predictions["right"]))
        assert float(margins.accuracy(right)) == pytest.approx(whole.metrics[average], abs=1e-12)
        assert interval(right, margins.kinds) == pytest.approx(whole.intervals[average], abs=0.02)


def plain_greedy(margins, forward):
    chosen, left = [], list(range(margins.units))

    def score(units):
        right = (margins.values[:, units].sum(1) + margins.fixed > 0).all(1)
        kinds = margins.kinds.unique().tolist()
        return round(sum(float(right[margins.kinds == k].double().mean()) for k in kinds) / len(kinds), 10)

    while left:
        if forward:
            best = max(left, key=lambda u: (score([*chosen, u]), -u))
            chosen.append(best)
        else:
            best = max(left, key=lambda u: (score([x for x in left if x != u]), u))
            chosen.insert(0, best)
        left.remove(best)
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_greedy_orders_are_those_of_trying_everything(seed):
    torch.manual_seed(seed)
    no = torch.zeros(N, 2, dtype=torch.bool)
    margins = Margins(torch.randn(N, U, 2) + 0.3, torch.randn(N, 2) * 0.1, no, torch.randint(0, 3, (N,)), [""] * N)
    assert choosing.forward(margins) == plain_greedy(margins, True)
    assert choosing.backward(margins) == plain_greedy(margins, False)


def test_set_cover_takes_what_answers_what_is_left_and_begins_again():
    answers = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    values = (2 * answers - 1).float()[..., None]
    no = torch.zeros(6, 1)
    margins = Margins(values, no, no > 0, torch.zeros(6, dtype=torch.int64), [""] * 6)
    # 0 and 1 answer three each, 0 first; then 1 and 2 add one each; 2 is left over with nothing new once all are answered.
    assert choosing.cover(margins) == [0, 1, 2, 3]
    assert choosing.top(margins) == [0, 1, 2, 3] and choosing.bottom(margins) == [3, 2, 1, 0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_every_method_orders_every_unit_once(seed):
    torch.manual_seed(seed)
    units, wrong = 1 + seed % 7, 1 + seed % 3
    values = torch.randint(-2, 3, (20, units, wrong)).float()
    tie = torch.rand(20, wrong) < 0.5
    margins = Margins(values, torch.zeros(20, wrong), tie, torch.randint(0, 2, (20,)), [""] * 20)
    for method in choosing.METHODS.values():
        assert sorted(method(margins)) == list(range(units))


def test_the_factored_loss_is_the_papers():
    torch.manual_seed(0)
    image, true, false = (
        F.normalize(torch.randn(N, U * V, dtype=torch.float64), dim=-1).unflatten(1, (U, V)) for _ in range(3)
    )
    kinds = torch.zeros(N, dtype=torch.int64)
    for per, size in (("unit", U), ("number", U * V)):
        for clamp in ("max", "min"):
            theta = (0.05 * torch.randn(size, dtype=torch.float64)).requires_grad_()
            alpha = torch.tensor(4.7, dtype=torch.float64, requires_grad=True)
            f = factors(image, true, false, kinds, per)
            ours = loss(f.d, f.q, theta, alpha, clamp)
            ours.backward()
            grads, theta.grad, alpha.grad = (theta.grad, alpha.grad), None, None
            scale = torch.maximum(torch.tensor(100.0), alpha.exp()) if clamp == "max" else torch.minimum(torch.tensor(100.0), alpha.exp())  # fmt: skip
            m = torch.sigmoid(scale / 4 * theta).repeat_interleave(U * V // size)
            y = image.flatten(1) * m
            logits = scale * torch.stack([F.cosine_similarity(y, t.flatten(1)) for t in (true, false)], dim=1)
            F.cross_entropy(logits, kinds).backward()
            assert torch.allclose(ours.detach(), F.cross_entropy(logits, kinds).detach(), atol=1e-12)
            assert torch.allclose(grads[0], theta.grad, atol=1e-10) and torch.allclose(grads[1], alpha.grad, atol=1e-12)


def test_a_mask_learns_which_slots_to_trust_and_the_same_seed_gives_the_same():
    torch.manual_seed(0)
    d = 0.02 * torch.randn(400, U)
    d[:, :2] += 0.03
    known = Factors(d, torch.full((400, U), 1 / U), torch.randint(0, 2, (400,)))
    found = train_mask(known, MaskTraining(epochs=15))
    again = train_mask(known, MaskTraining(epochs=15))
    assert torch.equal(found.mask, again.mask) and found.curve == again.curve and len(found.losses) == 15
    assert found.losses[-1] < found.losses[0] and max(found.curve) == found.curve[found.epoch] > found.curve[0] + 0.02
    assert found.mask[:2].min() > 0.9 > 0.6 > found.mask[2:].max()
    assert torch.equal(mask_of(torch.zeros(3), torch.tensor(0.0), "max"), torch.full((3,), 0.5))


def test_similarity_redundancy_and_effective_number():
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    turned = x @ torch.linalg.qr(torch.randn(4, 4)).Q
    same = similarity(torch.stack([x, turned], dim=1))
    assert torch.allclose(same, torch.ones(2, 2, dtype=torch.float64), atol=1e-6)
    assert redundancy(same) == pytest.approx(1) and effective_number(same) == pytest.approx(1, abs=1e-4)
    other = similarity(torch.randn(4000, 8, 4))
    assert redundancy(other) < 0.01 and effective_number(other) > 7.9
    few = torch.randn(6, 3, 10)  # fewer images than numbers goes another way
    a = (few - few.mean(0)).double()
    plain = [[float((a[:, i].T @ a[:, j]).square().sum()) for j in range(3)] for i in range(3)]
    table = torch.tensor(plain, dtype=torch.float64)
    root = table.diagonal().sqrt()
    assert torch.allclose(similarity(few), table / root[:, None] / root)


def test_monosemanticity_is_the_mean_over_pairs_of_images():
    torch.manual_seed(0)
    activations, embeddings = torch.randn(30, 4), torch.randn(30, 7)
    a = (activations - activations.min(0).values) / (activations.max(0).values - activations.min(0).values)
    cosine = F.normalize(embeddings, dim=1) @ F.normalize(embeddings, dim=1).T
    for k, found in enumerate(monosemanticity(activations, embeddings)):
        weight = (a[:, k, None] * a[None, :, k]).fill_diagonal_(0)
        assert float(found) == pytest.approx(float((weight * cosine).sum() / weight.sum()), abs=1e-5)
    one = torch.zeros(30, 1)
    one[:10] = 1
    embeddings[:10] = embeddings[0]
    assert float(monosemanticity(one, embeddings)) == pytest.approx(1)


def test_sharpness_is_one_for_a_point_and_zero_for_an_even_look():
    point, even = torch.eye(8)[:1], torch.full((1, 8), 1 / 8)
    found = sharpness(torch.stack([point, even], dim=1))
    assert torch.allclose(found, torch.tensor([[1.0, 0.0]]), atol=1e-6)
    half = torch.tensor([[[0.25] * 4 + [0.0] * 4]])
    assert torch.allclose(sharpness(half, torch.arange(8)[None] < 4), torch.zeros(1, 1), atol=1e-6)


class StockClip(TwoTowerEncoder):
    """open_clip's own model, as it comes."""

    def __init__(self):
        torch.manual_seed(0)
        vision = open_clip.CLIPVisionCfg(layers=4, width=64, head_width=16, image_size=32, patch_size=8)
        text = open_clip.CLIPTextCfg(context_length=16, vocab_size=49408, width=32, heads=2, layers=1)
        super().__init__(open_clip.CustomTextCLIP(24, vision, text), (0.5,) * 3, (0.5,) * 3, "stock")
        self.image_size, self.transform = 32, Pixels(32, 32)

    @property
    def architecture(self):
        return "stock"


@pytest.mark.parametrize("make", [StockClip, lambda: clip({"kind": "token"})])
def test_heads_add_up_to_the_encoding(make):
    encoder = make()
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    heads = heads_of(encoder, 2)
    units = units_of(encoder, "heads", layers=2)
    shares = heads.encode(pixels)
    assert units.number == 8 and shares.shape == (5, 9 * 24)
    whole = F.normalize(shares.unflatten(1, (9, 24)).sum(1), dim=-1)
    assert torch.allclose(whole, encoder.encode(pixels), atol=2e-6)
    assert torch.allclose(units.images(shares).sum(1), encoder.encode(pixels), atol=2e-6)
    every = SomeHeads(heads, list(range(8)))
    assert torch.allclose(F.normalize(every.encode(pixels), dim=-1), encoder.encode(pixels), atol=2e-6)
    # A head of the last block that writes nothing leaves the encoding as choosing all others does, up to the block's MLP.
    chosen = selected(
        encoder, Selection(checkpoint=encoder.weights, units="heads", count=8, head_layers=2, chosen=(1, 3))
    )
    shares = shares.unflatten(1, (9, 24))
    assert torch.allclose(chosen.encode(pixels), shares[:, 1] + shares[:, 3] + shares[:, 8], atol=1e-6)


def test_heads_are_refused_where_there_are_none():
    for readout in ({"kind": "gap"}, {"kind": "sparo", "slots": 4, "slot_width": 6}):
        with pytest.raises(ConfigError, match="no CLIP whose ViT is pooled by its class token"):
            heads_of(clip(readout), 2)
    with pytest.raises(ConfigError, match="--head-layers 9: a model has 3 blocks"):
        heads_of(clip({"kind": "token"}), 9)
    with pytest.raises(ConfigError, match="has no slots"):
        units_of(clip({"kind": "token"}))
    with pytest.raises(ConfigError, match="--parts 7: encodings of a model have 24 numbers"):
        units_of(clip({"kind": "token"}), "parts", 7)


@pytest.fixture(scope="module")
def sparo():
    return clip({"kind": "sparo", "slots": 4, "slot_width": 6})


def test_a_selection_is_kept_whole_and_chooses_what_it_says(sparo, tmp_path):
    given = of_numbers(sparo, (2, 0)).model_copy(
        update={"names": {2: "red <b>"}, "notes": {0: "é"}, "scores": (0.1,) * 4}
    )
    write_selection(tmp_path / "s.json", given)
    assert read_selection(tmp_path / "s.json") == given
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    mask = torch.tensor([1.0, 0, 1, 0])
    assert torch.equal(selected(sparo, given).encode(pixels), masked(sparo, mask).encode(pixels))
    real = given.model_copy(update={"mask": (0.5, 0.25, 0.0, 1.0)})
    soft = masked(sparo, torch.tensor(real.mask))
    assert torch.equal(selected(sparo, real).encode(pixels), soft.encode(pixels))


BAD = {
    "another checkpoint": ({"checkpoint": "0" * 64}, "was made for another checkpoint"),
    "out of range": ({"chosen": [4]}, "chosen: 4 is no unit; there are 4"),
    "negative": ({"chosen": [-1]}, "chosen: -1 is no unit"),
    "none": ({"chosen": []}, "chosen"),
    "twice": ({"chosen": [1, 1]}, "names a unit twice"),
    "count": ({"count": 5, "chosen": [4]}, "has 5 slots"),
    "mask of another length": ({"mask": [0.5] * 5}, "a mask of 5 numbers"),
    "mask not finite": ({"mask": [0.5, 0.5, 0.5, float("nan")]}, "mask"),
    "order": ({"order": [1, 2]}, "order: has 2 of 4"),
    "names": ({"names": {"9": "x"}}, "names: 9 is no unit"),
    "names of no number": ({"names": {"x": "x"}}, "names"),
    "unknown key": ({"slots": [1]}, "slots"),
    "another schema": ({"schema": 2}, "schema"),
    "of heads": ({"units": "heads"}, "no CLIP whose ViT is pooled"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_selection_is_refused_by_name(name, sparo, tmp_path):
    changes, message = BAD[name]
    good = json.loads(of_numbers(sparo, (0, 1)).model_dump_json(by_alias=True))
    path = tmp_path / "s.json"
    path.write_text(json.dumps({**good, **changes}))
    with pytest.raises(ConfigError, match=message):
        selected(sparo, read_selection(path), f"--slots {path}")


JSON = st.recursive(
    st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80) | JSON.map(lambda found: json.dumps(found).encode()))
def test_whatever_else_a_file_holds_is_no_selection(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"any\.json"):
        read_selection(path)


def test_a_gain_is_paired():
    first = torch.tensor([1, 1, 1, 0] * 50, dtype=torch.bool)
    second = torch.tensor([1, 1, 0, 0] * 50, dtype=torch.bool)
    kinds = torch.arange(200) % 2
    found = gain(first, second, kinds)
    assert found.value == pytest.approx(0.25) and 0.17 < found.low < 0.25 < found.high < 0.33
    assert gain(first, first, kinds) == (0, 0, 0)


def test_what_belongs_together_is_on_one_side():
    found = [Pair("x", caption, "not it") for caption in ("a", "a", "b", "c", "c", "d", "e", "f")]
    owner = torch.tensor(
        [0, 1, 1, 2, 3, 4, 5, 6]
    )  # images 0 and 1 share a caption, 1 has another one, too; 2 and 3 are of one thing
    features = Features([np.zeros((7, 2), np.float32)], list("0123456"), [[]] * 7)
    nothing = torch.zeros(8, 2)
    units = cast(Any, None)
    pairs = Pairs(units, features, nothing, nothing, owner, found, "macro", "")
    groups = groups_of(pairs)
    assert groups == ["a", "a", "a", "c", "c", "d", "e", "f"]
    for seed in range(20):
        half = halves("x", pairs, seed).tolist()
        assert half[0] == half[1] == half[2] and half[3] == half[4] and 0 < sum(half) < 8
    one = Pairs(units, features, nothing, nothing, owner[:3], found[:3], "macro", "")
    with pytest.raises(DataError, match=r"1 image\(s\) that differ cannot be halved"):
        halves("x", one, 0)
