"""SLATE: blocks and tokens compared with their formulas, generation with and without a cache, gradients of each loss; in training."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from evals.tasks.objects import reconstruction
from object_centric.decoders.autoregressive import AutoregressiveConfig, AutoregressiveDecoder
from object_centric.decoders.dvae import Dvae, DvaeConfig, gumbel_softmax, sample_gumbel
from object_centric.objectives.slate import Slate, SlateConfig, SlateModelConfig
from object_centric.objectives.slot_autoencoder import SlotModelConfig
from object_centric.scenes3d.rays import Rays
from object_centric.scenes3d.slot_mixer import SlotMixer, SlotMixerConfig
from sparo_train.core.contracts import Progress

SMALL = {
    "image_size": 16,
    "encoder": {"kind": "tokens", "width": 12},
    "features": 12,
    "grouping": {"preset": "slate", "slots": 3, "width": 8},
    "dvae": {"vocab": 20, "channels": 8, "tau_steps": 10},
    "decoder": {"width": 12, "blocks": 2, "heads": 2, "dropout": 0.0},
}


def slate(**changes):
    torch.manual_seed(0)
    return Slate(SlateConfig(model=SlateModelConfig(**{**SMALL, **changes})))


def batch(n=4):
    images = torch.randint(0, 256, (n, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return {"image": images, "noise": torch.randn(n, 3, 8, generator=torch.Generator().manual_seed(2))}


def attended(layer, x, onto, causal):
    """Compute heads of two channels: queries from x, keys and values from `onto`."""
    heads = []
    for head in range(layer.heads):
        q, k, v = (
            (o @ w.weight.T).chunk(layer.heads, -1)[head]
            for o, w in ((x, layer.to_q), (onto, layer.to_k), (onto, layer.to_v))
        )
        logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if causal:
            logits = logits + torch.full(logits.shape[1:], -math.inf).triu(1)
        heads.append(logits.softmax(-1) @ v)
    return torch.cat(heads, -1) @ layer.out.weight.T


@pytest.mark.parametrize("first_norm", ["stream", "branch"])
def test_blocks_are_their_formula_and_see_no_later_token(first_norm):
    torch.manual_seed(0)
    decoder = AutoregressiveDecoder(AutoregressiveConfig(**SMALL["decoder"], first_norm=first_norm)).double()
    with torch.no_grad():  # with norms that do nothing, their position would not matter
        for name, p in decoder.named_parameters():
            p.add_(0.3 * torch.randn_like(p)) if "norm" in name else None
    x, slots = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 3, 12, dtype=torch.float64)
    expected = x
    for number, block in enumerate(decoder.blocks):
        normed = block.norm_tokens(expected)
        stream = normed if number == 0 and first_norm == "stream" else expected
        expected = stream + attended(block.to_tokens, normed, normed, causal=True)
        expected = expected + attended(block.to_slots, block.norm_slots(expected), slots, causal=False)
        hidden = block.norm_mlp(expected) @ block.mlp[0].weight.T + block.mlp[0].bias
        expected = expected + hidden.relu() @ block.mlp[2].weight.T + block.mlp[2].bias
    found = decoder(x, slots)
    assert torch.allclose(found, decoder.norm(expected), atol=1e-12)
    later = x.clone()
    later[:, 3:] += torch.randn(2, 2, 12)
    assert torch.equal(decoder(later, slots)[:, :3], found[:, :3])
    assert not torch.allclose(decoder(later, slots)[:, 3:], found[:, 3:])
    past, steps = None, []
    for place in range(5):
        said, past = decoder.decode_next(x[:, place : place + 1], slots, past)
        steps.append(said)
    assert torch.allclose(torch.cat(steps, 1), found, atol=1e-12)


def test_cached_generation_equals_decoding_the_whole_prefix():
    model = slate().model.eval()
    slots = torch.randn(2, 3, 8)
    with torch.no_grad():
        tokens = torch.zeros(2, 0, dtype=torch.long)
        for _ in range(model.config.tokens):
            begun = torch.cat([model.bos.expand(2, 1, -1), model.embed(tokens)], 1)
            said = model.decoder(begun + model.pos_embed[: begun.shape[1]], model.project(slots))
            tokens = torch.cat([tokens, model.head(said[:, -1:]).argmax(-1)], 1)
        expected = model.dvae.decode_tokens(tokens.view(2, 4, 4))
        assert torch.allclose(model.generate(slots), expected, atol=1e-5)


def test_tokens_are_sampled_by_the_gumbel_softmax():
    torch.manual_seed(0)
    noise = sample_gumbel(torch.zeros(200_000, dtype=torch.float64))
    assert noise.mean() == pytest.approx(0.5772, abs=0.01) and noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
    logits = torch.tensor([0.2, 0.5, 0.3]).log().view(1, 3, 1, 1).expand(50_000, 3, 1, 1)
    hard = gumbel_softmax(logits, sample_gumbel(logits), 0.5, hard=True)[:, :, 0, 0]
    assert torch.allclose(hard.mean(0), torch.tensor([0.2, 0.5, 0.3]), atol=0.01)
    assert (hard.round() - hard).abs().max() < 1e-6 and torch.allclose(hard.sum(1), torch.ones(50_000))
    soft = gumbel_softmax(logits[:2000], sample_gumbel(logits[:2000]), 0.5, hard=False)
    assert torch.allclose(soft.sum(1), torch.ones(2000, 1, 1)) and 0.01 < soft.min(1).values.mean() < 0.2
    leaf = torch.zeros(1, 3, 1, 1, requires_grad=True)
    (
        gumbel_softmax(leaf.log_softmax(1), sample_gumbel(leaf), 1.0, hard=True)
        * torch.tensor([1.0, 2, 3]).view(1, 3, 1, 1)
    ).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().max() > 0


def test_a_dvae_without_norms_equals_steve():
    dvae = Dvae(DvaeConfig(vocab=20, channels=8, norm="none"))
    weights = dict(dvae.named_parameters())
    for name, value in weights.items():
        assert name.endswith(("conv.weight", "conv.bias")) or ".7." in name or ".11." in name
        value.data += 0.1 * torch.randn_like(value)
    x = images = torch.rand(2, 3, 16, 24)
    for layer in range(7):
        x = F.relu(
            F.conv2d(x, *(weights[f"encoder.{layer}.conv.{n}"] for n in ("weight", "bias")), 4 if layer == 0 else 1)
        )
    logits = F.conv2d(x, weights["encoder.7.weight"], weights["encoder.7.bias"]).log_softmax(1)
    torch.testing.assert_close(dvae.logits(images), logits)
    x = shares = logits.softmax(1)
    for layer in range(11):
        if layer in (5, 10):
            x = F.pixel_shuffle(x, 2)
            continue
        kernel = weights[f"decoder.{layer}.conv.weight"]
        x = F.relu(F.conv2d(x, kernel, weights[f"decoder.{layer}.conv.bias"], padding=kernel.shape[-1] // 2))
    expected = F.conv2d(x, weights["decoder.11.weight"], weights["decoder.11.bias"])
    torch.testing.assert_close(dvae.decode(shares), expected)


def test_a_dvae_has_a_token_per_four_pixels():
    dvae = Dvae(DvaeConfig(vocab=20, channels=8))
    logits = dvae.logits(torch.rand(2, 3, 16, 24))
    assert logits.shape == (2, 20, 4, 6) and torch.allclose(logits.exp().sum(1), torch.ones(2, 4, 6), atol=1e-5)
    assert dvae.decode_tokens(logits.argmax(1)).shape == (2, 3, 16, 24)
    size = sum(p.numel() for p in Dvae(DvaeConfig(vocab=1024)).parameters())
    # Counted by hand for 64 channels: convolutions without a bias and norms with two numbers per channel; the last two with a bias.
    norms, inner = 7 * 128, 48 * 64 + 6 * 64 * 64 + 64 * 1024 + 1024
    lifts = 2 * (9 * 64 * 64 + 128 + 2 * (64 * 64 + 128) + 64 * 256 + 512)
    assert size == norms + inner + (1024 * 64 + 128) + lifts + 64 * 3 + 3


def test_each_part_learns_from_its_own_loss():
    objective = slate()
    b = batch()
    torch.manual_seed(3)
    images = b["image"] / 255
    found = objective.model(images, b["noise"], 1.0)
    assert torch.equal(found.cross_entropy, found.cross_entropy.clamp(min=0)) and found.tokens.shape == (4, 16)
    named = dict(objective.model.named_parameters())
    said = torch.autograd.grad(found.cross_entropy.sum(), named.values(), allow_unused=True, retain_graph=True)
    missed = torch.autograd.grad((found.reconstruction - images).square().sum(), named.values(), allow_unused=True)
    for name, one, other in zip(named, said, missed, strict=True):
        assert (one is None) == name.startswith("dvae.") and (other is None) != (one is None), name
    torch.manual_seed(3)
    loss = objective(b, Progress(0, 10, 0))
    expected = found.cross_entropy.mean() + (found.reconstruction - images).square().flatten(1).sum(1).mean()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6) and loss.metrics["tau"] == 1
    assert objective(b, Progress(10, 20, 0)).metrics["tau"] == pytest.approx(0.1)


def test_features_of_the_image_may_be_grouped_in_place_of_tokens():
    conv = {"kind": "conv", "channels": (8, 8), "strides": (2, 1), "kernel": 3}
    objective = slate(encoder=conv, features=8, grouping={"preset": "steve", "slots": 3, "width": 8})
    loss = objective(batch(), Progress(0, 10, 0))
    loss.total.backward()
    assert all(p.grad is not None for p in objective.parameters())
    seen = objective.model.encode_slots(batch()["image"] / 255, batch()["noise"])
    assert seen.attention.shape == (4, 3, 8, 8)


@pytest.mark.parametrize("encoder", [{"kind": "tokens"}, {"kind": "conv", "channels": (8, 8), "strides": (2, 1)}])
def test_slate_computes_and_samples_in_fp64(encoder):
    grouping = {"preset": "steve", "slots": 3, "width": 8}
    changes = {} if encoder["kind"] == "tokens" else {"encoder": encoder, "features": 8, "grouping": grouping}
    model = slate(**changes).model.double()
    found = model(batch()["image"].double() / 255, batch()["noise"].double(), 1.0)
    assert found.reconstruction.dtype == found.cross_entropy.dtype == found.tower_output.slots.dtype == torch.float64
    assert model.generate(found.tower_output.slots).dtype == torch.float64


def test_rays_are_mixed_in_fp64():
    mixer = SlotMixer(SlotMixerConfig.model_validate({"preset": "osrt"}), 12).double()
    rays = Rays(torch.zeros(2, 5, 3).double(), F.normalize(torch.ones(2, 5, 3).double(), dim=-1))
    assert mixer(torch.randn(2, 4, 12).double(), rays).colours.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"image_size": 18}, "must be a multiple of 4, the side of a token"),
        ({"encoder": {"kind": "tokens", "width": 24}}, "both use the same token embeddings"),
        ({"decoder": {"width": 10, "heads": 4}}, "heads=4 does not divide width=10"),
        ({"dvae": {"tau_end": 2.0}}, "must not exceed tau_start"),
    ],
)
def test_incompatible_parts_are_refused(change, told):
    with pytest.raises(ValueError, match=told):
        SlateModelConfig(**{**SMALL, **change})


def test_tokens_are_refused_outside_slate():
    with pytest.raises(ValueError, match=r"encoder.kind=tokens: needs objective.kind=slate"):
        SlotModelConfig(image_size=16, encoder={"kind": "tokens", "width": 12})


def test_errors_are_means_of_images_not_of_all_pixels():
    images, drawn = torch.rand(6, 3, 4, 4), torch.rand(6, 3, 4, 4)
    drawn[0] = images[0]
    errors = torch.stack([F.mse_loss(a, b) for a, b in zip(images, drawn, strict=True)]).numpy()
    found = reconstruction.score(errors, 48, pixels=True)
    by_image = [min(100.0, 10 * math.log10(1 / max(e, 1e-10))) for e in errors.tolist()]
    assert found.value == pytest.approx(sum(by_image) / 6, rel=1e-6) and found.predictions["psnr"][0] == 100
    assert found.metrics["mse"] == pytest.approx(errors.mean()) and found.metrics["mse_sum"] == pytest.approx(
        48 * errors.mean()
    )
    assert found.interval[0] < found.value < found.interval[1]
    features = reconstruction.score(errors, 48, pixels=False)
    assert features.headline == "mse" and set(features.metrics) == {"mse"} and json.dumps(features.as_dict())
