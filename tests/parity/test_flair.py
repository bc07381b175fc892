"""FLAIR's pooling and loss compared with torch's attention and the written-out formula; scored by encodings, and as texts that pool images."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evals.encoders.loading import load_encoder
from evals.suite.task import IncompatibleTaskError
from evals.tasks import retrieval
from launch.commands.train import train
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import ConfigError
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.vit_config import VitConfig
from sparo_train.objectives import text_conditioned as conditioned
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_recipe
from tests.helpers.runs import losses
from tests.helpers.samples import eval_sets
from tests.parity.test_accumulate import DDP, FSDP2, ZERO_3
from tests.parity.test_clip import tiny, tokens


def _tree(shards, folder, **changes):
    tree = tiny_recipe(shards, folder, **changes)
    tree["objective"]["model"] |= {"readout": {"kind": "flair", "heads": 4}, "init_logit_bias": -4.0}
    tree["objective"]["loss"] = {"kind": "sigmoid"}
    tree["objective"]["model"]["vision"]["patch_dropout"] = 0.0
    return tree


def test_a_text_pools_as_torchs_attention_with_a_zero_key():
    model = tiny("flair")
    pool = model.visual.flair
    for p in pool.parameters():
        nn.init.normal_(p, std=0.3)
    image, texts = torch.randn(3, 3, 32, 32), model.encode_text(tokens(4, 9), True)
    unit, patches = model.encode_local(image)
    torch.testing.assert_close(unit, model.encode_image(image, True))
    assert patches.shape == (3, 4, 24)
    theirs = []
    for text in texts:  # one text at a time, as the query for all images
        q = pool.ln_q(text).expand(3, 1, -1)
        theirs.append(pool.attn(q, pool.ln_k(patches), pool.ln_v(patches), need_weights=False)[0][:, 0])
    torch.testing.assert_close(pool.conditioned(patches, texts), torch.stack(theirs, 1))


def test_the_loss_is_the_formula_and_tiles_change_nothing(shards, tmp_path, monkeypatch):
    objective = build_objective(resolve(RunConfig, _tree(shards, tmp_path), "x")).double()
    batch = {"image": torch.randint(0, 255, (3, 3, 32, 32), dtype=torch.uint8), "text": tokens(3, 5, 7)}
    objective.pixels = lambda image: image.double().div(255).sub(objective.mean).div(objective.std)
    image, query, local = objective.embed(batch)
    text = F.normalize(query, dim=-1)
    # The official model queries with texts before normalization, and takes the mean of its two losses.
    assert (query.norm(dim=-1) - 1).abs().min() > 0.01
    found = objective(batch, Progress(0, 1, 0))
    scale, bias = objective.model.logit_scale.exp(), objective.model.logit_bias
    seen = F.normalize(objective.model.visual.flair.conditioned(local, query), dim=-1)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            sign = 1 if i == j else -1
            total -= F.logsigmoid(sign * (scale * image[i] @ text[j] + bias)) / 3
            total -= F.logsigmoid(sign * (scale * seen[i, j] @ text[j] + bias)) / 3
    torch.testing.assert_close(found.total, total / 2, rtol=1e-6, atol=1e-6)
    assert 0 < found.metrics["conditioned_loss"].item() < 2 * found.total.item()
    found.total.backward()
    whole = {n: p.grad.clone() for n, p in objective.named_parameters()}
    assert all(g.abs().sum() > 0 for n, g in whole.items() if "flair" in n and "ln_k.bias" not in n)
    monkeypatch.setattr(conditioned, "_TILE_ELEMENTS", 1)
    objective.zero_grad()
    objective(batch, Progress(0, 1, 0)).total.backward()
    for name, p in objective.named_parameters():
        torch.testing.assert_close(p.grad, whole[name], msg=name)


def _on_ranks(ranks, config):
    train(config, ranks)


@pytest.mark.long
@pytest.mark.parametrize(  # gradients to 1e-9: test_readout_engines.py
    ("engine", "dtype"), [(DDP, "fp32"), (FSDP2, "fp32"), (ZERO_3, "fp32"), (DDP, "bf16")]
)
def test_ranks_and_micro_batches_end_as_one_process(shards, tmp_path, engine, dtype):
    tree = _tree(shards, tmp_path, steps=3)
    tree["objective"]["loss"]["exchange_dtype"] = dtype
    tree["data"]["workers"] = 0
    train(resolve(RunConfig, {**tree, "name": "one"}, "x"))
    two = {**tree, "name": "two", "engine": engine, "micro_batch_size": 2}
    run_ranks(2, _on_ranks, resolve(RunConfig, two, "x"))
    if dtype == "bf16":
        # Encodings that differ in their last digit may be rounded to different bf16 numbers.
        assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
        loss = {**tree["objective"]["loss"], "exchange_dtype": "fp32"}
        train(resolve(RunConfig, {**tree, "name": "exact", "objective": {**tree["objective"], "loss": loss}}, "x"))
        assert losses(tmp_path / "exact") != losses(tmp_path / "one")
        return
    one, other = (store.read_part(tmp_path / f"{n}/checkpoints/step-00000003", "model") for n in ("one", "two"))
    for name, value in one.items():
        if (
            "in_proj_bias" not in name
        ):  # the gradient of a key's bias is rounding only, which AdamW turns into a whole step
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-4, msg=name)


def test_a_run_is_scored_both_ways(shards, tmp_path):
    task = {**eval_sets(tmp_path / "sets")["ret"], "k": [1, 2], "workers": 0}
    tree = _tree(shards, tmp_path, steps=2, optim={"lr": 1e-3})
    tree["eval"] = {"tasks": {"seen": {**task, "task": "conditioned_retrieval"}, "plain": task}}
    train(resolve(RunConfig, tree, "x"))
    scores = json.loads((tmp_path / "tiny/evals/step-00000002.json").read_text())["results"]
    assert scores["seen"]["counts"] == scores["plain"]["counts"]
    assert scores["seen"]["metrics"].keys() == scores["plain"]["metrics"].keys()
    encoder = load_encoder(tmp_path / "tiny")
    image, captions = torch.randint(0, 255, (3, 3, 32, 32), dtype=torch.uint8), ["a cat", "two dogs"]
    patches, queries = encoder.patches(image), encoder.queries(captions)
    torch.testing.assert_close(F.normalize(queries, dim=-1).clone(), encoder.text(captions).clone())
    by_hand = encoder.model.visual.flair.conditioned(patches.clone(), queries.clone())
    expected = torch.einsum("btd,td->bt", F.normalize(by_hand, dim=-1), encoder.text(captions).clone())
    torch.testing.assert_close(encoder.conditioned(patches.flatten(1), queries).clone(), expected.detach())
    other = tiny_recipe(shards, tmp_path, name="sparo")
    other["eval"] = tree["eval"]
    with pytest.raises(IncompatibleTaskError, match=r"needs patches that texts pool.*Use retrieval"):
        train(resolve(RunConfig, other, "x"))


def test_a_similarity_table_gives_the_scores_of_its_encodings():
    g = torch.Generator().manual_seed(0)
    image, text = torch.randn(30, 8, generator=g), torch.randn(70, 8, generator=g)
    owner = torch.randint(0, 30, (70,), generator=g)
    unit = F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    one, other = retrieval.score(image, text, owner), retrieval.score_table(unit, owner)
    assert one.metrics == other.metrics and one.intervals == other.intervals and one.counts == other.counts


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda tree: resolve(
                RunConfig, {**tree, "objective": {**tree["objective"], "loss": {"kind": "softmax"}}}, "x"
            ),
            "sigmoid",
        ),
        (lambda tree: resolve(VitConfig, {"readout": {"kind": "flair"}}, "x"), "needs texts, which DINO"),
        (
            lambda tree: Clip(ClipConfig.model_validate({"embed_dim": 20, "readout": {"kind": "flair"}})),
            "heads=8 does not divide embed_dim=20",
        ),
    ],
)
def test_invalid_options_of_flair_are_refused(shards, tmp_path, call, message):
    tree = _tree(shards, tmp_path)
    tree["objective"]["model"].pop("init_logit_bias") if message == "sigmoid" else None
    with pytest.raises(ConfigError, match=message):
        call(tree)
