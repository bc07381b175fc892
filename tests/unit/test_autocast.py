"""Functions with a backward of their own give the same gradients when backward is called inside an autocast block."""

import pytest
import torch
from torch.nn import functional as F

from object_centric.grouping.inverted_attention import Tokens, inverted_attention
from object_centric.scenes3d import radiance_field as field
from sparo_train.core.distributed import Ring
from sparo_train.core.registries import LOSSES
from sparo_train.models.sparo import Sparo
from sparo_train.objectives.contrastive import contrastive
from tests.unit.test_scene_drawing import decoder
from tests.unit.test_scene_drawing import given as made_rays


def heads(share_kv):
    module = Sparo(24, 8, 6, 6, share_kv=share_kv)
    tokens = torch.randn(3, 9, 24, requires_grad=True)
    return lambda: sum(t.float().square().sum() for t in module.attend(tokens, None)), [tokens]


def loss(kind):
    image, text = (F.normalize(torch.randn(12, 16), dim=-1).requires_grad_() for _ in range(2))
    scale = torch.tensor(10.0, requires_grad=True)
    return lambda: contrastive(image, text, scale, loss=LOSSES.get(kind)(exchange="ring"), ring=Ring()).total, [
        image,
        text,
    ]


def radiance_field():
    """The arguments of a NeRF's pass, as a decoder makes them."""
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


CASES = {
    "SPARO": lambda: heads(True),
    "separate values": lambda: heads(False),
    "softmax loss": lambda: loss("softmax"),
    "sigmoid loss": lambda: loss("sigmoid"),
    "parallel binder": binding,
    "radiance field": radiance_field,
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
