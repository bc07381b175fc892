"""Attentive probes: a head learns attention over frozen tokens, which are computed once; unsuitable encoders are refused."""

import pytest
import timm
import torch

from evals.encoders.baselines import PixelEncoder
from evals.encoders.clip_encoder import ClipEncoder
from evals.encoders.dino_encoder import DinoEncoder
from evals.encoders.foreign import TimmVitEncoder
from evals.encoders.pixels import Pixels
from evals.feature_store.features import FeatureStore
from evals.suite.attentive_probe import AttentiveTaskConfig, build_head, run_attentive
from evals.suite.scoring import Scoring
from evals.suite.task import IncompatibleTaskError, check_compatible
from evals.tasks.attentive import AttentiveProbe, AttentiveTraining, score, train_attentive
from evals.tasks.probe import Labelled
from sparo_data.writer import write_wds_layout
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.registries import READOUTS
from sparo_train.core.world import World
from sparo_train.models.vit import Vit
from sparo_train.models.vit_config import VitConfig
from tests.helpers.samples import jpeg
from tests.parity.test_clip import READOUTS as BLOCKS
from tests.parity.test_clip import tiny

HEADS = {
    name: block
    for name, block in BLOCKS.items()
    if name not in ("sparo-weighted", "map-image", "attpool-slots", "flair")
}


def _config(block):
    return READOUTS.get(block["kind"]).model_validate(block)


def _hidden(n, seed):
    """A class token and twelve tokens of noise. The label is written into one of the twelve at a random position, with a mark."""
    g = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randn(n, 13, 24, generator=g) * 0.5, torch.randint(0, 4, (n,), generator=g)
    where = torch.randint(1, 13, (n,), generator=g)
    tokens[torch.arange(n), where] = torch.randn(n, 24, generator=g) * 0.1
    tokens[torch.arange(n), where, 0] += 4.0
    tokens[torch.arange(n), where, 1 + labels] += 1.5
    return Labelled(lambda rows: tokens[rows], labels)


def _accuracy(block, epochs=12, lr=3e-3):
    how = AttentiveTraining(lr, 1e-4, epochs, 50, 1.0, 0, torch.device("cpu"))
    probe = train_attentive(lambda: AttentiveProbe(*build_head(_config(block), 24, 1), 4), _hidden(601, 0), how)
    return score(probe, _hidden(400, 1), 4, how.device)


@pytest.mark.parametrize(("kind", "lr"), [("ep", 0.05), ("sparo", 3e-3), ("map", 3e-3)])
def test_a_head_that_attends_finds_the_token_that_matters(kind, lr):
    block = {"ep": BLOCKS["ep"], "sparo": BLOCKS["sparo"], "map": {"kind": "map", "head_width": 8}}[kind]
    result = _accuracy(block, lr=lr)
    assert result.value > 0.9 and result.n == 400 and result.chance == 0.25
    assert _accuracy(block, lr=lr).metrics == result.metrics  # the same seed gives the same probe
    assert _accuracy({"kind": "token"}, 3).value < 0.4  # the class token does not contain the label


@pytest.mark.parametrize("name", HEADS)
def test_every_read_out_is_a_head(name):
    result = _accuracy({**HEADS[name], **({"heads": 4} if name == "coca" else {})}, epochs=1)
    assert 0 <= result.value <= 1 and result.metrics.keys() == {"acc1", "mean_per_class_recall"}


def test_a_head_normalizes_slots_as_configured():
    block, tokens = {"kind": "sparo", "slots": 3, "slot_width": 4}, torch.randn(2, 5, 24)

    def made(**keys):
        torch.manual_seed(0)
        head, width = build_head(_config({**block, **keys}), 24, 1)
        found = head(tokens)
        assert found.shape == (2, width)
        return found

    plain, normal = made(), made(normalize=True)
    assert torch.allclose(normal, torch.nn.functional.normalize(plain.view(2, 3, 4), dim=-1).flatten(1) / 3**0.5)
    learned = made(normalize=True, weighting="softmax", representation="sqrtsem")
    assert learned.shape == (2, 12) and torch.allclose(learned.norm(dim=1), torch.ones(2), atol=1e-5)


def _timm():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, class_token=False, global_pool="avg")
    return TimmVitEncoder(model, model, Pixels(32, 32), ((0.5,) * 3, (0.5,) * 3), 32, "timm x", "timm:x", "average")


def test_tokens_of_every_vision_transformer_are_read_once_and_probed(tmp_path):
    for split, n in (("train", 24), ("test", 12)):
        rows = [(f"{i:03d}", {"jpg": jpeg(i % 12), "cls": str(i % 4).encode()}) for i in range(n)]
        write_wds_layout(tmp_path / "set", rows, classnames=list("abcd"), split=split)
    sets = {"train": str(tmp_path / "set/train/0.tar"), "test": str(tmp_path / "set/test/0.tar"), "workers": 0}
    dino = DinoEncoder(Vit(VitConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2)).eval())
    for encoder, shape in ((ClipEncoder(tiny("sparo")), (5, 32)), (dino, (17, 32)), (_timm(), (4, 192))):
        pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        assert encoder.tokens(pixels).shape == (2, *shape) and "tokens" in encoder.offers
        assert encoder.token_width == shape[1]
        for head, told in (
            ({"kind": "flair"}, "x.head.kind=flair: needs texts for pooling"),
            ({"kind": "coca", "heads": 7}, "x.head.*heads=7 does not divide"),
            (
                {"kind": "sparo", "slots": 2, "slot_width": 4, "representation": "sem"},
                r"x.head.weighting and head.representation apply to norm",
            ),
        ):
            with pytest.raises(IncompatibleTaskError, match=told):  # before anything is encoded
                check_compatible("x", AttentiveTaskConfig(head=head, **sets), encoder)
        task = AttentiveTaskConfig(head={"kind": "ep", "slots": 4, "slot_width": 4}, epochs=2, batch_size=8, **sets)
        scoring = Scoring("x", encoder, FeatureStore(tmp_path / "store"), Ranks(World(), "gloo", 0.0))
        result = run_attentive(scoring, task)
        assert result.n == 12 and result.options["head_parameters"] == 4 * shape[1] + 16 * shape[1]
        assert any("the probe was trained for" in note for note in result.remarks())
        calls = []
        encoder.tokens = lambda pixels, whole=encoder.tokens, calls=calls: calls.append(len(pixels)) or whole(pixels)
        again = run_attentive(scoring, task)
        assert calls == [1] and again.metrics == result.metrics  # one image of zeros, which determines the shape
    with pytest.raises(
        ConfigError, match=r"head.kind=token: needs a class token, which this encoder lacks. Use head.kind=gap"
    ):
        build_head(_config({"kind": "token"}), 192, 0, False)
    with pytest.raises(
        IncompatibleTaskError,
        match=r"x.head.kind=token: needs a class token, which this encoder lacks. Use head.kind=gap",
    ):
        check_compatible("x", AttentiveTaskConfig(head={"kind": "token"}, **sets), _timm())
    with pytest.raises(
        IncompatibleTaskError, match=r"the tokens of a vision transformer, but pixels:28 has none. Use probe or knn"
    ):
        check_compatible("x", AttentiveTaskConfig(train="a", test="b"), PixelEncoder(28))


def test_a_probe_without_finite_logits_has_no_score():
    how = AttentiveTraining(1e30, 0.0, 3, 50, 0.0, 0, torch.device("cpu"))
    data = _hidden(100, 0)
    probe = train_attentive(lambda: AttentiveProbe(*build_head(_config(BLOCKS["sparo"]), 24, 1), 4), data, how)
    with pytest.raises(DataError, match=r"some logits are not finite, because training diverged. Lower the task's lr"):
        score(probe, data, 4, how.device)
    with pytest.raises(DataError, match=r"needs at least two training images, got 1"):
        train_attentive(lambda: AttentiveProbe(*build_head(_config(BLOCKS["ep"]), 24, 1), 4), _hidden(1, 0), how)
    for block, said in (
        ({"kind": "map", "head_width": 7}, "head_width=7 does not divide"),
        ({"kind": "coca", "heads": 7}, "heads=7 does not divide"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_head(_config(block), 24, 1)
