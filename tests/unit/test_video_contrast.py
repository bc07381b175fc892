"""SlotContrast's and VideoSAUR's losses compared with their definitions pair by pair; and separate squares of pooled windows."""

import pytest
import torch
from torch.nn import functional as F

from object_centric.grouping.pooled import PooledTransformer
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.tasks.video_encoder import VideoEncoder
from object_centric.video.contrast import (
    ContrastConfig,
    SimilarityConfig,
    patch_similarity,
    patch_similarity_loss,
    slot_contrast,
)
from object_centric.video.video_autoencoder import (
    SlotContrast,
    SlotContrastConfig,
    VideoAutoencoder,
    VideoAutoencoderConfig,
    VideoModelConfig,
)
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Progress
from sparo_train.core.errors import ConfigError

MODEL = {"image_size": 16, "encoder": {"channels": [8, 8], "strides": [2, 1], "kernel": 3}, "features": 16}
MODEL |= {
    "decoder": {"kind": "mlp", "hidden": [16]},
    "grouping": {"preset": "savi", "slots": 3, "width": 16, "slot_init": "learned"},
}


def by_hand(slots, temperature, own):
    b, times, k, _ = slots.shape
    total, count = 0.0, 0
    for t in range(1, times):
        for i in range(b):
            for n in range(k):
                others = [(j, m) for j in range(b) for m in range(k) if not own or j == i]
                logits = torch.stack(
                    [F.cosine_similarity(slots[i, t, n], slots[j, t - 1, m], dim=0) for j, m in others]
                )
                total = total - (logits / temperature).log_softmax(0)[others.index((i, n))]
                count += 1
    return total / count


@pytest.mark.parametrize("others", ["batch", "video"])
def test_slot_contrast_discriminates_slots_of_the_previous_frame(others):
    torch.manual_seed(0)
    slots = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    found = slot_contrast(slots, ContrastConfig(temperature=0.3, others=others))
    wanted = by_hand(slots, 0.3, others == "video")
    assert torch.allclose(found, wanted)
    ours, theirs = (torch.autograd.grad(loss, slots)[0] for loss in (found, wanted))
    assert torch.allclose(ours, theirs)
    still = slots.detach()[:, :1].expand(-1, 4, -1, -1)
    assert (
        slot_contrast(still, ContrastConfig(temperature=0.01)) < 1e-3
    )  # equal slots over time are told apart from others


def test_patches_are_similar_to_those_of_the_next_frame():
    torch.manual_seed(0)
    features = torch.randn(1, 3, 4, 6)
    features[0, 1] = features[0, 0].roll(1, 0)  # every patch moved by one
    features[0, 1, 2] = -features[0, 0].sum(0)
    c = SimilarityConfig(temperature=0.01)
    shares = patch_similarity(features, c)
    assert shares.shape == (1, 2, 4, 4) and shares[0, 0, 0, 1] > 0.99
    assert torch.allclose(shares.sum(-1), torch.ones(1, 2, 4), atol=1e-6)
    alone = patch_similarity(features[:, :2], SimilarityConfig(threshold=0.999))
    assert torch.allclose(
        alone[0, 0, 1], torch.full((4,), 0.25)
    )  # a zero vector gives no NaN, and is equally similar to all
    said = torch.randn(1, 3, 4, 4)
    wanted = F.cross_entropy(said[:, :2].flatten(0, 2), shares.flatten(0, 2))
    assert torch.allclose(patch_similarity_loss(said, features, c), wanted[None])


def test_objectives_count_what_they_add_and_micro_batches_nothing(tmp_path):
    torch.manual_seed(0)
    objective = SlotContrast(resolve(SlotContrastConfig, {"model": MODEL, "frames": {"count": 3}}, "here"))
    batch = {"video": torch.randint(0, 256, (4, 3, 3, 16, 16), dtype=torch.uint8), "noise": torch.randn(4, 3, 16)}
    loss = objective(batch, Progress(1, 4, 1))
    plain = VideoAutoencoder(resolve(VideoAutoencoderConfig, {"model": MODEL, "frames": {"count": 3}}, "here"))
    plain.load_state_dict(objective.state_dict())
    drawn = plain(batch, Progress(1, 4, 1))
    apart = slot_contrast(objective.embed(batch)[0], ContrastConfig())
    assert (
        torch.allclose(loss.total, drawn.total + 0.5 * apart)
        and loss.metrics["slots_used"] == drawn.metrics["slots_used"]
    )
    assert VideoEncoder(objective.model, False, 3).clips(batch["video"]).shape == (4, 3 * 256 + 3)
    for change, told in (
        ({"frames": {"count": 1}}, "slots are contrasted with those of the previous frame"),
        (
            {"model": {**MODEL, "target": "similarity"}},
            "target=similarity: needs a frozen encoder.* got encoder.kind=conv",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            resolve(SlotContrastConfig, {"model": MODEL, **change}, "here")


def test_squares_are_pooled_and_see_all_frames():
    torch.manual_seed(0)
    c = SlotAttentionConfig.model_validate(
        {"preset": "pooled", "slots": 4, "width": 8, "pooled": {"heads": 2, "blocks": 1}}
    )
    module, x = PooledTransformer(c, 6), torch.randn(2, 3, 16, 6)
    slots, own = module(x)
    assert slots.shape == (2, 3, 4, 8) and own.shape == (2, 3, 4, 16) and torch.equal(own.sum(2), torch.ones(2, 3, 16))
    assert own[0, 0, 1].view(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    later = x.clone()
    later[:, 2] += 1
    assert not torch.allclose(module(later).slots[:, 0], slots[:, 0])
    assert not torch.allclose(
        module(x[:, :1].expand(-1, 3, -1, -1)).slots[:, 0], module(x[:, :1].expand(-1, 3, -1, -1)).slots[:, 1]
    )
    for grouping, told in (
        ({"slots": 5}, "each slot pools one cell"),
        ({"slots": 9}, "8 x 8 features cannot be divided into 3 x 3 equal squares"),
        ({"slots": 4, "gru": "torch"}, "without slot attention or sampling"),
    ):
        with pytest.raises(ConfigError, match=told):
            resolve(VideoModelConfig, {**MODEL, "grouping": {"preset": "pooled", "width": 16, **grouping}}, "here")
