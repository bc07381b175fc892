"""Helpers for tests of released slot models: layers by name, as their authors' code computes them."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F

SLOT, HIDDEN = 16, 24
MEAN, STD = (torch.tensor(v).double().view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def drawn(shapes, seed=0):
    """Return random weights of fp32 precision in fp64, with norm weights near one, so that outputs are not only noise."""
    g = torch.Generator().manual_seed(seed)
    return {
        n: (torch.randn(s, generator=g) * 0.2 + (1.0 if "norm" in n and n.endswith("weight") else 0.0)).double()
        for n, s in shapes.items()
    }


def linear(name, wide, out, bias=True):
    return {f"{name}.weight": (out, wide), **({f"{name}.bias": (out,)} if bias else {})}


def norm(name, wide):
    return {f"{name}.weight": (wide,), f"{name}.bias": (wide,)}


def gate(name, wide=SLOT):
    weights = {f"{name}.weight_{x}": (3 * wide, wide) for x in ("ih", "hh")}
    return weights | {f"{name}.bias_{x}": (3 * wide,) for x in ("ih", "hh")}


def ln(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def lin(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def gru(w, name, x, h):
    return torch._VF.gru_cell(x.flatten(0, 1), h.flatten(0, 1), *(w[f"{name}.{k}"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))).view(h.shape)  # type: ignore[attr-defined]  # fmt: skip


def doubled(encoder):
    """The encoder's model in fp64, where rounding hides nothing, and functions that return its slots and attention."""
    model, noise = encoder.model.double(), encoder.noise.double()
    encoder.noise = noise

    def seen(pixels, signed=False):
        x = scaled(pixels, signed)
        return (model.encode_slots if hasattr(model, "encode_slots") else model)(x, noise.expand(len(x), -1, -1))

    return seen


def scaled(pixels, signed=False):
    x = pixels.double() / 255
    return x * 2 - 1 if signed else x


def said_of(encoder):
    """Return the assumption in a message, without the advice on how to change it."""
    return encoder.assumed.partition(": does not contain ")[2].partition(";")[0]


def images(n=2, size=32):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(9))


def small_vit(**changes):
    torch.manual_seed(3)
    told = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0, **changes}
    vit = VisionTransformer(**told, global_pool="").eval()
    for p in vit.parameters():
        nn.init.normal_(p, std=0.2)
    return vit.double()


def features(vit, x, final_norm):
    tokens = vit._pos_embed(vit.patch_embed((scaled(x) - MEAN) / STD))
    tokens = vit.blocks(tokens)
    return (vit.norm(tokens) if final_norm else tokens)[:, vit.num_prefix_tokens :]


def begun(encoder, w, mean, deviation):
    return w[mean].reshape(-1) + w[deviation].reshape(-1).exp() * encoder.noise[None, :, :SLOT].double()


def slates_rounds(w, name, x, slots, rounds=3):
    """Apply SLATE's slot attention with one head, which SPOT uses, too."""
    x = ln(w, f"{name}.norm_inputs", x)
    k, v = lin(w, f"{name}.project_k", x) * SLOT**-0.5, lin(w, f"{name}.project_v", x)
    shares = x
    for _ in range(rounds):
        shares = (k @ lin(w, f"{name}.project_q", ln(w, f"{name}.norm_slots", slots)).transpose(1, 2)).softmax(-1)
        weights = (shares + 1e-8) / (shares + 1e-8).sum(1, keepdim=True)
        slots = gru(w, f"{name}.gru", weights.transpose(1, 2) @ v, slots)
        slots = slots + lin(w, f"{name}.mlp.2", lin(w, f"{name}.mlp.0", ln(w, f"{name}.norm_mlp", slots)).relu())
    return slots, shares


def slates_names(name, wide):
    return {
        **norm(f"{name}.norm_inputs", wide),
        **norm(f"{name}.norm_slots", SLOT),
        **norm(f"{name}.norm_mlp", SLOT),
        **{f"{name}.project_{x}.weight": (SLOT, SLOT if x == "q" else wide) for x in "qkv"},
        **gate(f"{name}.gru"),
        **linear(f"{name}.mlp.0", SLOT, HIDDEN),
        **linear(f"{name}.mlp.2", HIDDEN, SLOT),
    }


def block(name, wide, out, kernel):
    return {f"{name}.m.weight": (out, wide, kernel, kernel), f"{name}.weight": (out,), f"{name}.bias": (out,)}


def slates_file():
    vocab, wide, ch, blocks = 12, 16, 8, 2
    shapes = {}
    for i in range(7):
        kernel = 4 if i == 0 else 1
        shapes |= block(f"dvae.encoder.{i}", 3 if i == 0 else ch, ch, kernel)
    shapes |= {"dvae.encoder.7.weight": (vocab, ch, 1, 1), "dvae.encoder.7.bias": (vocab,)}
    for i in (0, 1, 2, 3, 4, 6, 7, 8, 9):
        kernel, out = 3 if i in (1, 6) else 1, 4 * ch if i in (4, 9) else ch
        shapes |= block(f"dvae.decoder.{i}", vocab if i == 0 else ch, out, kernel)
    shapes |= {"dvae.decoder.11.weight": (3, ch, 1, 1), "dvae.decoder.11.bias": (3,)}
    shapes |= {"positional_encoder.pe": (1, 17, wide), "dictionary.dictionary.weight": (vocab + 1, wide)}
    shapes |= {**norm("slot_attn.layer_norm", wide), **linear("slot_attn.mlp.0", wide, wide), **linear("slot_attn.mlp.2", wide, wide)}  # fmt: skip
    shapes |= {"slot_attn.slot_mu": (1, 1, SLOT), "slot_attn.slot_log_sigma": (1, 1, SLOT)}
    shapes |= slates_names("slot_attn.slot_attention", wide)
    shapes |= {**linear("slot_proj", SLOT, wide, bias=False), **linear("out", wide, vocab, bias=False), **norm("tf_dec.layer_norm", wide)}  # fmt: skip
    for i in range(blocks):
        b = f"tf_dec.blocks.{i}"
        for name in ("self_attn_layer_norm", "encoder_decoder_attn_layer_norm", "ffn_layer_norm"):
            shapes |= norm(f"{b}.{name}", wide)
        for name in ("self_attn", "encoder_decoder_attn"):
            for x in "qkvo":
                shapes |= linear(f"{b}.{name}.proj_{x}", wide, wide, bias=False)
        shapes |= {**linear(f"{b}.ffn.0", wide, 4 * wide), **linear(f"{b}.ffn.2", 4 * wide, wide)}
    w = drawn(shapes)
    masks = {f"tf_dec.blocks.{i}.self_attn_mask": torch.ones(16, 16, dtype=torch.bool).triu(1) for i in range(blocks)}
    return w, {**w, **masks}
