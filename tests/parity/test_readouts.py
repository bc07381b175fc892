"""The readouts that SPARO is compared with: each equals its published form, and the rows of the paper's Table 6 have its parameter counts."""

import math

import open_clip
import pytest
import timm
import torch
from entmax import sparsemax as published_sparsemax
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from sparo_train.models.readout import Slots, normalize_slots
from sparo_train.models.readouts.attpool import AttPool
from sparo_train.models.readouts.coca import CocaPool
from sparo_train.models.readouts.efficient_probing import EfficientPool
from sparo_train.models.readouts.fdt import Fdt, sparsemax
from sparo_train.models.readouts.siglip_map import MapHead

from .test_clip import READOUTS, tiny, tokens

# cross-attention, slot-wise LayerNorm, slot-wise projection: millions of parameters as printed in the paper
TABLE_6 = [
    ("multi_head", False, False, 440.1),
    ("multi_head", False, True, 305.9),
    ("multi_head", True, False, 440.1),
    ("multi_head", True, True, 305.9),
    ("separate_head", False, False, 305.9),
    ("separate_head", False, True, 171.7),
    ("separate_head", True, False, 305.9),
    ("separate_head", True, True, 171.7),
]


@pytest.mark.parametrize(("cross_attention", "norm", "projection", "millions"), TABLE_6)
def test_table_6_has_the_papers_numbers_of_parameters(cross_attention, norm, projection, millions):
    row = {
        "kind": "attpool",
        "slots": 128,
        "cross_attention": cross_attention,
        "slot_layer_norm": norm,
        "slot_projection": projection,
    }
    with torch.device("meta"):
        model = Clip(ClipConfig.model_validate({"backbone": "ViT-B-32", "readout": row}))
        short = Clip(
            ClipConfig.model_validate({"backbone": "ViT-B-32", "readout": {**row, "replace_last_block": True}})
        )
    count, less = (sum(p.numel() for p in m.parameters()) for m in (model, short))
    assert round(count / 1e6, 1) == millions or abs(count / 1e6 - millions) < 0.06
    assert count - less == 7_087_872 + 3_152_384  # a block of width 768 and one of width 512
    assert model.config.readout.normalize is (norm and projection)


def _masked(length: int, batch: int) -> torch.Tensor:
    return torch.arange(length)[None] <= torch.randint(0, length, (batch, 1))


@given(
    mixed=st.booleans(), slot_norm=st.booleans(), slot_proj=st.booleans(), masked=st.booleans(),
    batch=st.integers(1, 3), length=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_pooling_first_equals_projecting_every_token(mixed, slot_norm, slot_proj, masked, batch, length, seed):
    torch.manual_seed(seed)
    x, keep = torch.randn(batch, length, 24, dtype=torch.float64), _masked(length, batch) if masked else None
    for module in (AttPool(24, 4, 6, mixed, slot_norm, slot_proj), EfficientPool(24, 4, 6)):
        for p in module.double().parameters():
            torch.nn.init.normal_(p)
        fast, plain = module(x, keep, need_attention=True), module.plain(x, keep)
        torch.testing.assert_close(fast.values, plain.values, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(fast.attention.double(), plain.attention, rtol=1e-6, atol=1e-7)


def test_multi_head_without_slots_is_torchs_attention_without_a_projection_of_queries():
    torch.manual_seed(0)
    module, x, keep = AttPool(24, 4, 6, True, False, False), torch.randn(2, 7, 24), _masked(7, 2)
    attention = torch.nn.MultiheadAttention(24, 4, batch_first=True)
    state = {
        "in_proj_weight": torch.cat([torch.eye(24), module.k.weight, module.v.weight]),
        "in_proj_bias": torch.cat([torch.zeros(24), module.k.bias, module.v.bias]),
        "out_proj.weight": module.out_proj.weight,
        "out_proj.bias": module.out_proj.bias,
    }
    attention.load_state_dict(state)
    query = module.q_emb.reshape(1, 1, 24).expand(2, -1, -1)
    read, _ = attention(query, x, x, key_padding_mask=~keep)
    torch.testing.assert_close(module(x, keep).flat(), module.proj(module.norm(read))[:, 0])


def test_coca_is_open_clips_image_tower():
    torch.manual_seed(0)
    reference = open_clip.transformer.VisionTransformer(
        32, 16, 32, 3, 2, 4.0, attentional_pool=True, attn_pooler_queries=5, attn_pooler_heads=4, output_dim=24
    ).eval()  # fmt: skip
    model = tiny("coca")
    ours = CocaPool(32, 24, 5, 4)
    state, own = reference.state_dict(), ("attn_pool.", "ln_post.", "proj")
    ours.load_state_dict({n: t for n, t in state.items() if n.startswith(own)})
    tower = model.visual
    tower.load_state_dict({n: t for n, t in state.items() if not n.startswith(own)}, strict=False)
    tower.coca, image = ours, torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(tower(image), reference(image))


def test_map_is_timms_siglip_pooling():
    torch.manual_seed(0)
    siglip = timm.create_model(
        "vit_base_patch16_siglip_224", img_size=32, embed_dim=32, depth=1, num_heads=4, num_classes=0
    ).eval()
    head, image = MapHead(32, 4, 4.0), torch.randn(2, 3, 32, 32)
    head.attn_pool.load_state_dict(siglip.attn_pool.state_dict())
    x = siglip.forward_features(image)
    found = head(x, need_attention=True)
    torch.testing.assert_close(found.flat(), siglip(image))
    pool = head.attn_pool
    query, both = torch.cat([pool.q.weight, pool.kv.weight]), torch.cat([pool.q.bias, pool.kv.bias])
    _, maps = F.multi_head_attention_forward(  # torch's function also returns the attention
        pool.latent.expand(1, 2, 32), x.transpose(0, 1), x.transpose(0, 1), 32, 4, query, both, None, None, False, 0.0,
        pool.proj.weight, pool.proj.bias,
    )  # fmt: skip
    torch.testing.assert_close(found.attention, maps)


@given(st.integers(1, 40), st.floats(0.01, 30), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_sparsemax_and_its_gradient_are_entmaxs(width, scale, seed):
    torch.manual_seed(seed)
    a = (torch.randn(3, width, dtype=torch.float64) * scale).requires_grad_()
    b, weight = a.detach().clone().requires_grad_(), torch.randn(3, width, dtype=torch.float64)
    ours, theirs = sparsemax(a), published_sparsemax(b, dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_fdt_is_the_repositorys_formula():
    torch.manual_seed(0)
    module, x, keep = Fdt(24, 40, 12, 0.3), torch.randn(2, 7, 24), _masked(7, 2)
    keep[0], keep[1, 4:] = True, False
    scores = torch.stack([(module.q_map(x)[:, n] @ module.space_dict.T) / math.sqrt(12) for n in range(7)])
    scores = torch.cat(
        [scores * keep.T[..., None], torch.zeros(1, 2, 40)]
    )  # texts of 77 tokens in the repository end with zeros
    weights = published_sparsemax(scores.max(dim=0).values / 0.3, dim=-1)
    torch.testing.assert_close(module(x, keep).flat(), weights @ module.space_dict)
    assert 1 < int((weights[0] > 0).sum()) < 40  # several codes, but not all


def test_towers_share_the_configured_parameters():
    for readout, name in (("fdt", "space_dict"), ("sparo-weighted", "q_emb")):
        model = tiny(readout)
        kind = READOUTS[readout]["kind"]
        pair = [getattr(getattr(tower, kind), name) for tower in (model.visual, model.text)]
        assert pair[0] is pair[1]
        assert sum(p is pair[0] for p in model.parameters()) == 1
        model(torch.randn(2, 3, 32, 32), tokens(4, 9))[0].sum().backward()
        assert pair[0].grad is not None


def _published(values: torch.Tensor, weighting: str, representation: str) -> torch.Tensor:
    """Compute the rule of the paper's repository."""
    slots = values.shape[1]
    logits, rest = (values[..., :1], values[..., 1:]) if weighting.endswith("softmax") else (None, values)
    body = rest.exp().sqrt() if representation == "sqrtsem" else rest
    weights = {
        "const": lambda: torch.full_like(rest[..., :1], 1 / slots).sqrt(),
        "norm": lambda: body.norm(dim=-1, keepdim=True) / body.flatten(1).norm(dim=-1)[:, None, None],
        "softmax": lambda: F.normalize(F.softmax(logits, dim=1), dim=1),
        "sqrtsoftmax": lambda: F.softmax(logits, dim=1).sqrt(),
    }[weighting]()
    soft = rest.softmax(-1)
    shown = {"cont": rest / rest.norm(dim=-1, keepdim=True), "sem": soft / soft.norm(dim=-1, keepdim=True)}
    return weights * shown.get(representation, soft.sqrt())


@pytest.mark.parametrize("weighting", ["const", "norm", "softmax", "sqrtsoftmax"])
@pytest.mark.parametrize("representation", ["cont", "sem", "sqrtsem"])
def test_slot_weightings_are_the_repositorys(weighting, representation):
    key = {"kind": "sparo", "slots": 4, "slot_width": 8, "weighting": weighting, "representation": representation}
    if (weighting, representation) == ("norm", "sem"):
        with pytest.raises(ValueError, match="representation=sem does not support weighting=norm"):
            ClipConfig.model_validate({"readout": key})
        return
    torch.manual_seed(0)
    values = 3 * torch.randn(5, 4, 9 if weighting.endswith("softmax") else 8, dtype=torch.float64)
    found = normalize_slots(Slots(values), weighting, representation).values
    torch.testing.assert_close(found, _published(values, weighting, representation))
    torch.testing.assert_close(found.flatten(1).norm(dim=-1), torch.ones(5, dtype=torch.float64))
    far = normalize_slots(Slots(values.float() * 300), weighting, representation).values
    assert far.isfinite().all()
    with pytest.raises(ValueError, match="apply to normalized slots only"):
        ClipConfig.model_validate({"readout": {**key, "weighting": "softmax", "normalize": False}})
