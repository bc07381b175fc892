"""The fast SPARO equals Appendix A, in values and gradients, in every configuration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sparo_train.models.readout import Slots, normalize_slots
from sparo_train.models.sparo import Sparo


def _module(dim=24, slots=8, width=6, head=5, grp=1, share=True, seed=0):
    torch.manual_seed(seed)
    module = Sparo(dim, slots, width, head, grp, share).double()
    for p in module.parameters():  # biases too, because they contribute to the result
        torch.nn.init.normal_(p)
    return module


def _gradients(module, function, tokens, keep):
    tokens = tokens.clone().requires_grad_()
    module.zero_grad()
    weight = torch.linspace(-1, 1, module.slots * module.width, dtype=tokens.dtype)
    (function(tokens, keep).flat() * weight).sum().backward()
    return [tokens.grad, *(p.grad for p in module.parameters())]


@given(
    grp=st.sampled_from([1, 2, 4, 8]),
    share=st.booleans(),
    masked=st.booleans(),
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_fast_form_equals_appendix_a(grp, share, masked, batch, length, seed):
    module = _module(grp=grp, share=share, seed=seed)
    tokens = torch.randn(batch, length, 24, dtype=torch.float64)
    keep = torch.arange(length)[None] <= torch.randint(0, length, (batch, 1)) if masked else None
    fast, plain = module(tokens, keep, need_attention=True), module.plain(tokens, keep)
    torch.testing.assert_close(fast.values, plain.values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fast.attention, plain.attention, rtol=1e-12, atol=1e-13)
    for name, a, b in zip(
        ["tokens", *(n for n, _ in module.named_parameters())],
        _gradients(module, lambda x, k: module(x, k), tokens, keep),
        _gradients(module, module.plain, tokens, keep),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("also_values", [True, False])
def test_gradients_flow_through_attention_maps(also_values):
    module, tokens = _module(), torch.randn(2, 6, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 8, 6, dtype=torch.float64)

    def loss(slots):
        return (slots.attention * weight).sum() + also_values * slots.values.square().sum()

    fast = torch.autograd.grad(loss(module(tokens, need_attention=True)), [tokens, module.q_emb, module.k.weight])
    plain = torch.autograd.grad(loss(module.plain(tokens)), [tokens, module.q_emb, module.k.weight])
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("share", [True, False])
def test_second_derivatives_are_those_of_appendix_a(share):
    module, tokens = _module(dim=4, head=5, grp=2, share=share), torch.randn(2, 3, 4, dtype=torch.float64)
    keep = torch.tensor([[True, True, False], [True, True, True]])

    def hessian_product(form):
        x = tokens.clone().requires_grad_()
        slots = form(x)
        # The cube is another path from the tokens, so that a pruned readout would not raise an error.
        loss = slots.values.square().sum() + slots.attention.square().sum() + x.pow(3).sum()
        wanted = [x, module.q_emb, module.k.weight]
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    fast, plain = (
        hessian_product(lambda x: module(x, keep, need_attention=True)),
        hessian_product(lambda x: module.plain(x, keep)),
    )
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_attention_alone_has_gradients_if_tokens_are_narrower_than_heads():
    module, tokens = _module(dim=4, head=5), torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    fast, plain = (
        torch.autograd.grad(slots.attention.square().sum(), tokens)[0]
        for slots in (module(tokens, need_attention=True), module.plain(tokens))
    )
    torch.testing.assert_close(fast, plain)


def test_equation_one_term_by_term():
    """Compute y_l = W K_l H^T softmax(H K_l^T q_l / sqrt(D)) slot by slot, with Appendix A's biases."""
    module = _module(slots=3)
    h = torch.randn(7, 24, dtype=torch.float64)
    for slot in range(3):
        rows = slice(slot * 5, slot * 5 + 5)
        keys = h @ module.k.weight[rows].T + module.k.bias[rows]
        attention = torch.softmax(keys @ module.q_emb[0, slot, 0, 0] / 5**0.5, dim=0)
        expected = module.proj.weight @ (keys.T @ attention) + module.proj.bias
        torch.testing.assert_close(module(h[None]).values[0, slot], expected)


def test_masked_positions_have_no_effect():
    module = _module()
    tokens = torch.randn(2, 6, 24, dtype=torch.float64)
    keep = torch.arange(6)[None] <= torch.tensor([[2], [5]])
    before = module(tokens, keep, need_attention=True)
    tokens[0, 3:] = 1e3
    after = module(tokens, keep)
    assert torch.equal(before.values, after.values)
    assert before.attention is not None and (before.attention[0, :, 3:] == 0).all()


def test_initialisation_follows_the_reference():
    torch.manual_seed(0)
    module = Sparo(768, 64, 64)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        "q_emb": (1, 64, 1, 1, 64),
        "k.weight": (4096, 768),
        "k.bias": (4096,),
        "proj.weight": (64, 64),
        "proj.bias": (64,),
    }
    assert 0.97 < module.q_emb.std() < 1.03
    bound = (6 / (768 + 4096)) ** 0.5
    assert 0.99 * bound < module.k.weight.abs().max() <= bound
    assert not module.k.bias.any() and not module.proj.bias.any()
    assert 0.11 < module.proj.weight.abs().max() <= 64**-0.5


def test_half_precision_matches_fp32_and_normalises_in_fp32():
    torch.manual_seed(0)
    module, tokens = Sparo(64, 16, 8, 8), torch.randn(4, 20, 64)
    exact = normalize_slots(module(tokens)).values
    with torch.autocast("cpu", torch.bfloat16):
        low = normalize_slots(module(tokens))
    assert low.values.dtype == torch.float32
    torch.testing.assert_close(low.values.norm(dim=-1), torch.full((4, 16), 0.25), rtol=1e-6, atol=0)
    assert F.cosine_similarity(exact, low.values, dim=-1).min() > 0.99
    whole = Sparo(64, 16, 8, 8).bfloat16()
    assert whole(tokens.bfloat16()).values.dtype == torch.bfloat16


def test_cosine_of_encodings_is_the_mean_of_slot_cosines():
    a, b = (normalize_slots(Slots(torch.randn(3, 8, 5, dtype=torch.float64))) for _ in range(2))
    whole = F.cosine_similarity(a.flat(), b.flat())
    torch.testing.assert_close(whole, F.cosine_similarity(a.values, b.values, dim=-1).mean(dim=1))


def test_compiles_without_graph_breaks():
    module = Sparo(16, 4, 4, 4)
    tokens = torch.randn(2, 5, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens).values, module(tokens).values)


def test_bad_groups_are_refused():
    with pytest.raises(ValueError, match="grp_size=3 does not divide slots=8"):
        Sparo(16, 8, 4, 4, grp_size=3)
