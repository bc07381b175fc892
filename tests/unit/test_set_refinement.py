"""iDSPN: its written gradient compared with autograd, its descent, equal elements, and a training."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from object_centric.grouping.set_refinement import SetEncoder, SetRefinement
from object_centric.grouping.slot_config import SlotAttentionConfig
from object_centric.objectives.slot_tower import SlotTower, SlotTowerConfig

SMALL = {"preset": "idspn", "slots": 3, "width": 4, "idspn": {"hidden": 8, "latent": 6, "lr": 0.5}}


@given(b=st.integers(1, 3), k=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_the_gradient_of_the_energy_is_autograds(b, k, seed):
    torch.manual_seed(seed)
    encoder = SetEncoder(4, 7, 5, k).double()
    elements = torch.randn(b, k, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(b, 5, dtype=torch.float64)
    energy = (encoder(elements) - target).square().sum() / 2
    (expected,) = torch.autograd.grad(energy, elements)
    torch.testing.assert_close(encoder.energy_gradient(elements, target), expected)


def test_the_encoder_ignores_the_order_of_elements():
    torch.manual_seed(0)
    encoder, elements = SetEncoder(4, 7, 5, 3), torch.randn(2, 3, 4)
    torch.testing.assert_close(encoder(elements), encoder(elements[:, [2, 0, 1]]))


def test_descent_lowers_the_energy_and_trains_every_parameter():
    torch.manual_seed(0)
    config = SlotAttentionConfig.model_validate(SMALL)
    module, features = SetRefinement(config, 5), torch.randn(2, 9, 5)
    out = module(features)
    assert out.slots.shape == (2, 3, 4) and out.attention.shape == (2, 3, 9)
    target = module.image(module.norm_input(features)).mean(1)
    start = module.initial_slots.expand(2, -1, -1)
    before, after = ((module.encoder(x) - target).square().sum(1) for x in (start, out.slots))
    assert (after < before / 2).all()
    out.slots.square().sum().backward()
    # The bias after the last layer of the set encoder shifts values, so it has a gradient only through the target.
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


def test_equal_elements_are_separated_by_sorting():
    """Two equal initial slots reach two different values, which attention without noise cannot do."""
    torch.manual_seed(1)
    config = SlotAttentionConfig.model_validate({**SMALL, "slots": 2})
    module = SetRefinement(config, 5)
    with torch.no_grad():
        module.initial_slots.copy_(module.initial_slots[:1].expand(2, -1))
        module.encoder.rank_weight[1] *= -1  # ranks have different weights, as after training
    slots = module(torch.randn(1, 9, 5)).slots[0]
    assert (slots[0] - slots[1]).norm() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_runs_in_other_dtypes_and_without_a_graph(dtype):
    module = SetRefinement(SlotAttentionConfig.model_validate(SMALL), 5).to(dtype)
    features = torch.randn(2, 9, 5, dtype=dtype)
    with torch.inference_mode():
        assert module(features).slots.isfinite().all()
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda x: module.image(module.norm_input(x)).mean(1), features.requires_grad_())


def test_idspn_is_accepted_for_images_only():
    sizes = {"image_size": 16, "encoder": {"kind": "conv", "channels": [4], "strides": [2]}, "features": 5}
    tower = SlotTower(SlotTowerConfig.model_validate({**sizes, "grouping": SMALL}))
    out = tower(torch.rand(2, 3, 16, 16), torch.randn(2, *tower.config.noise))
    assert out.slots.shape == (2, 3, 4)
    for wrong in ({"mlp_width": 8}, {"gru": "torch"}):
        with pytest.raises(ValidationError, match="idspn: its slots have no attention and no update"):
            SlotAttentionConfig.model_validate({**SMALL, **wrong})
    with pytest.raises(ValidationError, match=r"grouping\.preset=idspn: supports neither videos nor reference frames"):
        SlotTowerConfig.model_validate({**sizes, "grouping": SMALL, "frame": {}})
