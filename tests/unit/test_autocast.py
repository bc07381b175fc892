"""Autograd functions with a hand-written backward: inside autocast, compiled, and differentiated twice."""

import pytest
import torch
from torch.nn import functional as F

from object_centric.grouping.inverted_attention import Tokens, inverted_attention
from object_centric.grouping.transport import minimize_entropy, sinkhorn
from object_centric.scenes3d import radiance_field as field
from sparo_train.core.distributed import Ring, sum_over_ranks
from sparo_train.core.registries import LOSSES
from sparo_train.models.sparo import Sparo
from sparo_train.objectives.contrastive import contrastive
from sparo_train.objectives.dino_loss import centered_targets, distillation, masked_distillation
from tests.unit.test_scene_drawing import decoder
from tests.unit.test_scene_drawing import given as made_rays


def heads(share_kv):
    module = Sparo(24, 8, 6, 6, share_kv=share_kv)
    tokens = torch.randn(3, 9, 24, requires_grad=True)
    return lambda: sum(t.float().square().sum() for t in module.attend(tokens, None)), [tokens]


def loss(kind):
    image, text = (F.normalize(torch.randn(12, 16), dim=-1).requires_grad_() for _ in range(2))
    scale, ring_loss, ring = torch.tensor(10.0, requires_grad=True), LOSSES.get(kind)(exchange="ring"), Ring()
    return lambda: contrastive(image, text, scale, loss=ring_loss, ring=ring).total, [image, text]


def radiance_field():
    """Return arguments of a NeRF's forward, as a decoder makes them."""
    given = []
    with pytest.MonkeyPatch.context() as patch:
        field_at = field.evaluate_field
        patch.setattr(field, "evaluate_field", lambda *arguments: (given.append(arguments), field_at(*arguments))[1])
        module, (slots, rays) = decoder("nerf"), made_rays()
        module(slots, rays)
    tables, layers, cut = given[0]
    leaves = [t.detach().clone().requires_grad_() for t in (*tables, *layers)]
    count = len(tables)

    def call():
        result = field_at(type(tables)(*leaves[:count]), type(layers)(*leaves[count:]), cut)
        return sum(t.float().square().sum() for t in result)

    return call, leaves


def binding():
    x, queries = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 4))
    offset = torch.randn(2, 3, 4, requires_grad=True)
    return (
        lambda: (
            inverted_attention(queries, offset, Tokens.with_statistics(x, 1e-5), None, "earlier")
            .weighted_sum.float()
            .square()
            .sum()
        ),
        [
            x,
            queries,
            offset,
        ],
    )


def self_distillation():
    student, teacher, center = torch.randn(12, 8, requires_grad=True), torch.randn(6, 8), torch.zeros(1, 8)
    return lambda: distillation(student, centered_targets(teacher, center, 0.04), 2, 0.1).loss, [student]


def masked_patches():
    student, teacher, center = torch.randn(7, 8, requires_grad=True), torch.randn(7, 8), torch.zeros(1, 8)
    targets, weights = centered_targets(teacher, center, 0.04), torch.rand(7)
    return lambda: masked_distillation(student, targets, weights, 0.1), [student]


def sum_of_ranks():
    x = torch.randn(3, 8, requires_grad=True)
    return lambda: sum_over_ranks(x).float().square().sum(), [x]


def transport(rounds):
    cost = torch.rand(2, 4, 6, requires_grad=True)
    log_a, log_b = torch.full((2, 6), 4 / 6).log().requires_grad_(), torch.zeros(2, 4)

    def call():
        lowered, v = minimize_entropy(cost, log_a, log_b, 3, rounds, 0.1)
        plan, last = sinkhorn(lowered, log_a, log_b, 3, v)
        return plan.square().sum() + last.square().sum()

    return call, [cost, log_a]


CASES = {
    "SPARO": lambda: heads(True),
    "separate values": lambda: heads(False),
    "softmax loss": lambda: loss("softmax"),
    "sigmoid loss": lambda: loss("sigmoid"),
    "parallel binder": binding,
    "radiance field": radiance_field,
    "DINO": self_distillation,
    "iBOT": masked_patches,
    "sum over ranks": sum_of_ranks,
    "transport": lambda: transport(0),
    "transport of low entropy": lambda: transport(2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "autocast"])
def test_gradients_do_not_depend_on_where_backward_is_called(name, low):
    torch.manual_seed(0)
    call, inputs = CASES[name]()
    for x in inputs:
        x.grad = None

    def gradients(inside):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            value = call()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return torch.autograd.grad(value, inputs, allow_unused=True)

    for outside, inside in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_graph_is_whole_and_has_the_same_gradients(name):
    torch.manual_seed(0)
    call, inputs = CASES[name]()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for eager, traced in zip(
        *(torch.autograd.grad(f(), inputs, allow_unused=True) for f in (call, compiled)), strict=True
    ):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_computed_or_refused(name):
    torch.manual_seed(0)
    call, inputs = CASES[name]()
    if name in ("SPARO", "separate values", "sum over ranks"):
        first = torch.autograd.grad(call(), inputs, create_graph=True)
        assert all(g.requires_grad for g in first)
        return
    # Another path to the inputs, which alone would give a wrong second derivative without an error.
    value = call() + sum(x.pow(3).sum() for x in inputs)
    with pytest.raises(NotImplementedError, match="expected first derivatives only, got create_graph=True"):
        torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
