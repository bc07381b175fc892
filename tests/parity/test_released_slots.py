"""Released slot models: files with their authors' names and random weights, against what their code computes, written out."""

import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F

from evals.encoders.loading import load_encoder
from object_centric.released.mesh import on_signed_grid
from object_centric.released.reading import Tensors, Unsaid, as_timm_has_dinov2
from object_centric.released.spot import SpotFile
from sparo_train.core.errors import CheckpointError, ConfigError
from tests.conftest import sparo

SLOT, HIDDEN = 16, 24
MEAN, STD = (torch.tensor(v).double().view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def drawn(shapes, seed=0):
    """Random weights of fp32, held in fp64; norms near one, so that they are not noise alone."""
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
    """The encoder's model in fp64, where rounding hides nothing, and how slots and attention are asked of it."""
    model, noise = encoder.model.double(), encoder.noise.double()
    encoder.noise = noise

    def seen(pixels, signed=False):
        x = scaled(pixels, signed)
        return (model.see if hasattr(model, "see") else model)(x, noise.expand(len(x), -1, -1))

    return seen


def scaled(pixels, signed=False):
    x = pixels.double() / 255
    return x * 2 - 1 if signed else x


def said_of(encoder):
    """What was taken for granted, without the line that says how to say otherwise."""
    return encoder.assumed.partition(": does not say ")[2].partition(";")[0]


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


LEARNED = {"initializer.slots": (1, 5, SLOT)}
DRAWN = {"initializer.mean": (1, 1, SLOT), "initializer.log_std": (1, 1, SLOT)}
MLP = {
    **norm("processor.corrector.mlp.layers.0", SLOT),
    **linear("processor.corrector.mlp.layers.1", SLOT, 64),
    **linear("processor.corrector.mlp.layers.3", 64, SLOT),
}


@pytest.mark.parametrize(("video", "learned", "mlp"), [(False, False, True), (True, False, False), (True, True, True)])
def test_videosaur_and_slotcontrast(tmp_path, video, learned, mlp):
    vit = small_vit()
    w = drawn(
        {
            **norm("encoder.output_transform.layers.0", 32),
            **linear("encoder.output_transform.layers.1", 32, 64),
            **linear("encoder.output_transform.layers.3", 64, SLOT),
            **{f"processor.corrector.to_{x}.weight": (SLOT, SLOT) for x in "qkv"},
            **gate("processor.corrector.gru"),
            **norm("processor.corrector.norm_features", SLOT),
            **norm("processor.corrector.norm_slots", SLOT),
            **(LEARNED if learned else DRAWN),
            **(MLP if mlp else {}),
        }
    )
    w |= {f"encoder.backbone.model.{n}": v for n, v in vit.state_dict().items() if not n.startswith("norm.")}
    block = "processor.predictor.blocks.0"
    w |= drawn(
        {
            **linear(f"{block}.self_attn.qkv", SLOT, 3 * SLOT),
            **linear(f"{block}.self_attn.out_proj", SLOT, SLOT),
            **linear(f"{block}.linear1", SLOT, 40),
            **linear(f"{block}.linear2", 40, SLOT),
            **norm(f"{block}.norm1", SLOT),
            **norm(f"{block}.norm2", SLOT),
        }
        if video
        else {}
    )
    told = {"decoder.pos_emb": torch.zeros(1), **w}
    if video:
        told = {n.replace("encoder.", "encoder.module.", 1).replace("processor.", "processor.module.", 1): v for n, v in told.items()}  # fmt: skip
    torch.save({"state_dict": told, "epoch": 3, "pytorch-lightning_version": "2.0"}, tmp_path / "v.ckpt")
    encoder = load_encoder(f"videosaur:{tmp_path}/v.ckpt?slots=5&image_size=32&heads=2")
    assert "does not say iterations=3" in encoder.assumed and "slots" not in said_of(encoder)
    x = features(vit, images(), final_norm=False)  # vit_block12: in front of the last norm
    x = ln(w, "encoder.output_transform.layers.0", x)
    x = lin(w, "encoder.output_transform.layers.3", lin(w, "encoder.output_transform.layers.1", x).relu())
    c = "processor.corrector"
    slots = w["initializer.slots"] if learned else begun(encoder, w, "initializer.mean", "initializer.log_std")
    x = ln(w, f"{c}.norm_features", x)
    keys, values = lin(w, f"{c}.to_k", x), lin(w, f"{c}.to_v", x)

    def corrected(slots, rounds):
        for _ in range(rounds):
            slots = ln(w, f"{c}.norm_slots", slots)
            shares = (lin(w, f"{c}.to_q", slots) @ keys.transpose(1, 2) * SLOT**-0.5).softmax(1)
            weights = (shares + 1e-8) / (shares + 1e-8).sum(-1, keepdim=True)
            slots = gru(w, f"{c}.gru", weights @ values, slots)
            if mlp:
                hidden = lin(w, f"{c}.mlp.layers.1", ln(w, f"{c}.mlp.layers.0", slots)).relu()
                slots = slots + lin(w, f"{c}.mlp.layers.3", hidden)
        return slots, shares

    slots, shares = corrected(slots.expand(2, -1, -1), 3)
    wide = F.interpolate(shares.unflatten(-1, (4, 4)), (32, 32), mode="bilinear").argmax(1).flatten(1)
    assert (encoder.masks(images()) == wide).float().mean() > 0.99
    assert torch.allclose(encoder.encode(images()).double(), slots.flatten(1), atol=1e-2)
    if not video:
        found = doubled(encoder)(images())
        assert torch.allclose(found.slots, slots, atol=1e-9) and torch.allclose(
            found.attention.flatten(2), shares, atol=1e-9
        )
        return
    # The next frame, here the same picture: predicted by a block whose scores are multiplied by the root of a head's width.
    y = ln(w, f"{block}.norm1", slots)
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in lin(w, f"{block}.self_attn.qkv", y).chunk(3, -1))
    attended = ((q @ k.transpose(2, 3) * q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    y = slots + lin(w, f"{block}.self_attn.out_proj", attended)
    y = y + lin(w, f"{block}.linear2", lin(w, f"{block}.linear1", ln(w, f"{block}.norm2", y)).relu())
    second, later = corrected(y, 2)
    tower = encoder.model.double().tower
    with torch.no_grad():
        tokens = tower.tokens(images().double() / 255)[0]
        found = tower.grouped(
            tokens[:, None].expand(-1, 2, -1, -1), encoder.noise[None].expand(2, -1, -1).double(), None
        )
    assert torch.allclose(found.slots, torch.stack([slots, second], 1), atol=1e-9)
    assert torch.allclose(found.attention, torch.stack([shares, later], 1), atol=1e-9)


def slates_rounds(w, name, x, slots, rounds=3):
    """SLATE's slot attention, which SPOT took over; with one head."""
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


@pytest.mark.parametrize("kind", ["dino", "dinov2", "registers"])
def test_spot(tmp_path, kind):
    v2, size = kind != "dino", 24 if kind != "dino" else 32  # DINOv2's places are learned for four patches a side
    vit = small_vit(**({"init_values": 1e-5} if v2 else {}), **({"reg_tokens": 2} if kind == "registers" else {}))
    w = drawn(
        {
            **norm("slot_attn.layer_norm", 32),
            **linear("slot_attn.mlp.0", 32, 32),
            **linear("slot_attn.mlp.2", 32, 32),
            **({"slot_attn.slot_mu": (1, 1, SLOT), "slot_attn.slot_log_sigma": (1, 1, SLOT)} if v2 else {"slot_attn.slots_init.weight": (5, SLOT)}),
            **slates_names("slot_attn.slot_attention", 32),
        }
    )  # fmt: skip
    held = {f"encoder.{n}": t for n, t in vit.state_dict().items()}
    extra = {"dec.x": torch.zeros(1), "second_encoder.y": torch.zeros(1), "bos_tokens": torch.zeros(1)}
    if v2:
        extra["encoder.mask_token"] = torch.zeros(1, 32)
        held["encoder.pos_embed"] = torch.randn(1, 17, 32, dtype=torch.float32).double()
    if kind == "registers":
        held["encoder.register_tokens"] = held.pop("encoder.reg_token")
    torch.save({"model": {**w, **held, **extra}, "epoch": 1}, tmp_path / "s.pth")
    more = "slots=5&final_norm=true&" if v2 else ""
    encoder = load_encoder(f"spot:{tmp_path}/s.pth?{more}heads=2&image_size={size}")
    assert "slots" not in said_of(encoder)
    x = spots_features(vit, held, images(size=size), kind)
    x = ln(w, "slot_attn.layer_norm", x)
    x = lin(w, "slot_attn.mlp.2", lin(w, "slot_attn.mlp.0", x).relu())
    first = begun(encoder, w, "slot_attn.slot_mu", "slot_attn.slot_log_sigma") if v2 else w["slot_attn.slots_init.weight"][None]  # fmt: skip
    slots, _ = slates_rounds(w, "slot_attn.slot_attention", x, first.expand(2, -1, -1))
    # Places are interpolated in fp32 once, where the file is read.
    assert torch.allclose(doubled(encoder)(images(size=size)).slots, slots, atol=1e-5 if v2 else 1e-9)


def spots_features(vit, held, pixels, kind):
    """Patch tokens as DINO's and DINOv2's own code prepares them, here of three patches a side where four were learned."""
    patches = vit.patch_embed.proj((scaled(pixels) - MEAN) / STD).flatten(2).transpose(1, 2)
    table = held["encoder.pos_embed"]
    if kind != "dino":
        grid = table[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
        how = {"size": (3, 3), "antialias": True} if kind == "registers" else {"scale_factor": (3.1 / 4, 3.1 / 4)}
        grid = F.interpolate(grid, mode="bicubic", **how)
        table = torch.cat([table[:, :1], grid.flatten(2).transpose(1, 2)], 1)
    tokens = torch.cat([vit.cls_token.expand(len(patches), -1, -1), patches], 1) + table
    if kind == "registers":
        registers = held["encoder.register_tokens"].expand(len(patches), -1, -1)
        tokens = torch.cat([tokens[:, :1], registers, tokens[:, 1:]], 1)
    tokens = vit.blocks(tokens)
    return (vit.norm(tokens) if kind != "dino" else tokens)[:, 3 if kind == "registers" else 1 :]


def test_what_goes_by_other_numbers_is_told_as_it_came_out():
    unsaid = Unsaid("spot:f", "slots=5", {"slots": 5}, SpotFile(slots=5))
    unsaid.came_out("heads", 12)
    unsaid.came_out("slots", 7)  # that was asked for
    assert str(unsaid) == (
        "spot:f: does not say image_size=224, iterations=3, heads=12, final_norm=false; "
        "spot:f?slots=5&image_size=… says otherwise"
    )
    for name in ("image_size", "iterations", "heads", "final_norm"):
        unsaid.told(name, 1)
    assert str(unsaid) == ""


def test_places_that_fit_stay_as_they_are():
    t = Tensors({"e.pos_embed": torch.randn(1, 17, 8), "e.mask_token": torch.zeros(1)}, "f")
    before = t["e.pos_embed"]
    as_timm_has_dinov2(t, "e", 4)
    assert torch.equal(t["e.pos_embed"], before) and "e.mask_token" not in t


def group_norm_relu(w, name, x, stride=1):
    kernel = w[f"{name}.m.weight"]
    x = F.conv2d(x, kernel, stride=stride, padding=0 if stride > 1 else kernel.shape[-1] // 2)
    return F.group_norm(x, 1, w[f"{name}.weight"], w[f"{name}.bias"]).relu()


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


def slates_decoder(w, x, slots, heads=2):
    def attention(name, q, onto, causal):
        split = [lin(w, f"{name}.proj_{c}", o).unflatten(-1, (heads, -1)).transpose(1, 2) for c, o in (("q", q), ("k", onto), ("v", onto))]  # fmt: skip
        logits = split[0] @ split[1].transpose(-1, -2) * split[0].shape[-1] ** -0.5
        if causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return lin(w, f"{name}.proj_o", (logits.softmax(-1) @ split[2]).transpose(1, 2).flatten(2))

    for i in range(2):
        b = f"tf_dec.blocks.{i}"
        normed = ln(w, f"{b}.self_attn_layer_norm", x)
        x = (normed if i == 0 else x) + attention(f"{b}.self_attn", normed, normed, True)
        x = x + attention(f"{b}.encoder_decoder_attn", ln(w, f"{b}.encoder_decoder_attn_layer_norm", x), slots, False)
        x = x + lin(w, f"{b}.ffn.2", lin(w, f"{b}.ffn.0", ln(w, f"{b}.ffn_layer_norm", x)).relu())
    return ln(w, "tf_dec.layer_norm", x)


def test_slate_whole(tmp_path):
    w, file = slates_file()
    torch.save({"model": file, "epoch": 2, "best_val_loss": 1.0}, tmp_path / "checkpoint.pt.tar")
    encoder = load_encoder(f"slate:{tmp_path}/checkpoint.pt.tar?heads=2&slots=4")
    assert encoder.image_size == 16 and "iterations=3, slot_heads=1" in encoder.assumed
    pixels = images(size=16)
    x = scaled(pixels)
    for i in range(7):
        x = group_norm_relu(w, f"dvae.encoder.{i}", x, stride=4 if i == 0 else 1)
    logits = F.conv2d(x, w["dvae.encoder.7.weight"], w["dvae.encoder.7.bias"])
    tokens = logits.argmax(1).flatten(1) + 1  # behind the one that begins
    table, places = w["dictionary.dictionary.weight"], w["positional_encoder.pe"]
    embedded = table[tokens] + places[:, 1:]
    x = ln(w, "slot_attn.layer_norm", embedded)
    x = lin(w, "slot_attn.mlp.2", lin(w, "slot_attn.mlp.0", x).relu())
    first = begun(encoder, w, "slot_attn.slot_mu", "slot_attn.slot_log_sigma").expand(2, -1, -1)
    slots, shares = slates_rounds(w, "slot_attn.slot_attention", x, first)
    drawn_by = encoder.parts(pixels).drawn
    found = doubled(encoder)(pixels)
    assert torch.allclose(found.slots, slots, atol=1e-9)
    assert torch.allclose(found.attention.flatten(2), shares.transpose(1, 2), atol=1e-9)
    said = torch.zeros(2, 1, dtype=torch.long)  # the token that begins
    for _ in range(16):
        out = slates_decoder(w, table[said] + places[:, : said.shape[1]], lin(w, "slot_proj", slots))
        said = torch.cat([said, lin(w, "out", out)[:, -1:].argmax(-1) + 1], 1)
    x = F.one_hot(said[:, 1:] - 1, 12).transpose(1, 2).double().view(2, 12, 4, 4)
    for i in range(11):
        x = F.pixel_shuffle(x, 2) if i in (5, 10) else group_norm_relu(w, f"dvae.decoder.{i}", x)
    expected = F.conv2d(x, w["dvae.decoder.11.weight"], w["dvae.decoder.11.bias"])
    assert torch.allclose(drawn_by.double(), expected.clamp(0, 1), atol=1e-4)


def test_mesh_whole(tmp_path):
    side, ch, k = 8, 6, 3
    line = torch.linspace(0, 1, side, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
    grid = torch.cat([grid, 1 - grid], -1)[None]
    shapes = {}
    for number, layer in enumerate((0, 2, 4, 6)):
        shapes |= {f"encoder.{layer}.weight": (ch, 3 if number == 0 else ch, 5, 5), f"encoder.{layer}.bias": (ch,)}
        out, size = (4, 3) if layer == 6 else (ch, 5)
        shapes |= {f"decoder.{layer + 2}.weight": (SLOT if layer == 0 else ch, out, size, size), f"decoder.{layer + 2}.bias": (out,)}  # fmt: skip
    shapes |= {**linear("encoder.8.dense", 4, ch), **norm("encoder.10", ch), **linear("encoder.11", ch, ch), **linear("encoder.13", ch, 10)}  # fmt: skip
    shapes |= linear("decoder.1.dense", 4, SLOT)
    s = "slot_attention"
    shapes |= slates_names(s, 10)
    for name, wide in (("mlp_input_marginals", 10), ("mlp_slot_marginals", SLOT)):
        shapes |= {**linear(f"{s}.{name}.0", wide, HIDDEN), **linear(f"{s}.{name}.2", HIDDEN, 1, bias=False)}
    shapes |= {f"{s}.slots_mu": (1, 1, SLOT), f"{s}.slots_log_sigma": (1, 1, SLOT)}
    w = {f"net.{n}": v for n, v in drawn(shapes).items()}
    torch.save({"state_dict": {**w, "net.encoder.8.grid": grid, "net.decoder.1.grid": grid}}, tmp_path / "m.ckpt")
    w = {n.removeprefix("net."): v for n, v in w.items()}
    encoder = load_encoder(f"mesh:{tmp_path}/m.ckpt?slots={k}&entropy_steps=0&iterations=2")
    x = scaled(images(size=side), signed=True)
    for layer in (0, 2, 4, 6):
        x = F.conv2d(x, w[f"encoder.{layer}.weight"], w[f"encoder.{layer}.bias"], padding=2).relu()
    x = (x + lin(w, "encoder.8.dense", grid).permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
    x = lin(w, "encoder.13", lin(w, "encoder.11", F.layer_norm(x, (ch,), w["encoder.10.weight"], w["encoder.10.bias"])).relu())  # fmt: skip
    slots = begun(encoder, w, f"{s}.slots_mu", f"{s}.slots_log_sigma").expand(2, -1, -1)
    x = ln(w, f"{s}.norm_inputs", x)

    def marginal(name, of):
        return k * lin(w, f"{s}.{name}.2", lin(w, f"{s}.{name}.0", of).relu()).squeeze(2).softmax(1)

    a = marginal("mlp_input_marginals", x)
    for _ in range(2):
        normed = ln(w, f"{s}.norm_slots", slots)
        p = -torch.cdist(lin(w, f"{s}.project_k", x), lin(w, f"{s}.project_q", normed))
        b, v = marginal("mlp_slot_marginals", normed), torch.zeros(2, k, dtype=torch.float64)
        for _ in range(5):
            u = a.log() - (p + v[:, None]).logsumexp(2)
            v = b.log() - (p + u[:, :, None]).logsumexp(1)
        plan = (p + u[:, :, None] + v[:, None]).exp()
        slots = gru(w, f"{s}.gru", plan.transpose(1, 2) @ lin(w, f"{s}.project_v", x), slots)
        slots = slots + lin(w, f"{s}.mlp.2", lin(w, f"{s}.mlp.0", ln(w, f"{s}.norm_mlp", slots)).relu())
    y = slots.reshape(-1, SLOT, 1, 1).expand(-1, -1, side, side) + lin(w, "decoder.1.dense", grid).permute(0, 3, 1, 2)
    for layer in (2, 4, 6):
        y = F.conv_transpose2d(y, w[f"decoder.{layer}.weight"], w[f"decoder.{layer}.bias"], padding=2).relu()
    y = F.conv_transpose2d(y, w["decoder.8.weight"], w["decoder.8.bias"], padding=1).unflatten(0, (2, k))
    masks = y[:, :, 3:].softmax(1)
    parts = encoder.parts(images(size=side))
    assert torch.allclose(parts.drawn.double(), ((y[:, :, :3] * masks).sum(1) + 1) / 2, atol=1e-3)
    assert torch.allclose(parts.shares.double(), masks[:, :, 0], atol=1e-4)
    assert torch.allclose(encoder.encode(images(size=side)).double(), slots.flatten(1), atol=1e-4)
    learned = {**torch.load(tmp_path / "m.ckpt")["state_dict"], "net.slot_attention.lr": torch.tensor([2.0])}
    torch.save({"state_dict": learned}, tmp_path / "l.ckpt")
    rate = load_encoder(f"mesh:{tmp_path}/l.ckpt?slots=3").model.tower.grouping.rounds[0].transport.rate
    assert rate == 2 and load_encoder(f"mesh:{tmp_path}/l.ckpt?slots=3&entropy_steps=0").image_size == 8
    for query in ("entropy_rate=2", "entropy_rate=2&entropy_steps=0"):
        with pytest.raises(ConfigError, match="entropy_rate=2: means nothing for this file"):
            load_encoder(f"mesh:{tmp_path}/l.ckpt?slots=3&{query}")


def test_a_layer_of_four_coordinates_is_one_of_two():
    weight, bias, place = torch.randn(6, 4), torch.randn(6), torch.rand(9, 2)
    two = on_signed_grid(weight, bias)
    assert torch.allclose(
        F.linear(torch.cat([place, 1 - place], 1), weight, bias), F.linear(place * 2 - 1, *two), atol=1e-5
    )


@pytest.mark.parametrize("own", [False, True])
def test_vqvfm(tmp_path, own):
    vit = small_vit(init_values=1e-5, reg_tokens=2, no_embed_class=True, patch_size=7, img_size=28)
    w = drawn(
        {
            **norm("encode_project.0", 32),
            **linear("encode_project.1", 32, 64),
            **linear("encode_project.3", 64, SLOT),
            "initializ.mean": (1, 5 if own else 1, SLOT),
            "initializ.logstd": (1, 5 if own else 1, SLOT),
            **norm("aggregat.norm1q", SLOT),
            **norm("aggregat.norm1kv", SLOT),
            **norm("aggregat.norm2", SLOT),
            **{f"aggregat.proj_{x}.weight": (SLOT, SLOT) for x in "qkv"},
            **gate("aggregat.rnn"),
            **linear("aggregat.ffn.0", SLOT, HIDDEN),
            **linear("aggregat.ffn.3", HIDDEN, SLOT),  # dropout has a number, too
        }
    )
    w |= {f"encode_backbone.1.{n}": v for n, v in vit.state_dict().items()}
    torch.save({f"m.{n}": v for n, v in {**w, "decode.x": torch.zeros(1)}.items()}, tmp_path / "g.pth")
    encoder = load_encoder(f"vqvfm:{tmp_path}/g.pth?image_size=32&heads=2" + ("" if own else "&slots=6"))
    assert encoder.slots == (5 if own else 6) and "slots" not in said_of(encoder)
    if own:
        with pytest.raises(ConfigError, match=r"\?slots=6: the file says 5; leave it away"):
            load_encoder(f"vqvfm:{tmp_path}/g.pth?slots=6")
    pixels = images(size=32)
    x = F.interpolate((scaled(pixels) - MEAN) / STD, scale_factor=0.875, mode="bicubic")
    x = vit.forward_features(x)[:, 3:]
    x = lin(w, "encode_project.3", F.gelu(lin(w, "encode_project.1", ln(w, "encode_project.0", x))))
    slots = w["initializ.mean"] if own else begun(encoder, w, "initializ.mean", "initializ.logstd")
    slots, x = slots.expand(2, -1, -1), ln(w, "aggregat.norm1kv", x)
    for _ in range(3):
        q = lin(w, "aggregat.proj_q", ln(w, "aggregat.norm1q", slots))
        shares = (q * SLOT**-0.5 @ lin(w, "aggregat.proj_k", x).transpose(1, 2)).softmax(1)
        update = shares / (shares.sum(2, keepdim=True) + 1e-5) @ lin(w, "aggregat.proj_v", x)
        slots = gru(w, "aggregat.rnn", update, slots)
        slots = slots + lin(w, "aggregat.ffn.3", F.gelu(lin(w, "aggregat.ffn.0", ln(w, "aggregat.norm2", slots))))
    assert torch.allclose(doubled(encoder)(pixels).slots, slots, atol=1e-9)


def test_other_files_are_refused_by_name(tmp_path):
    _, file = slates_file()
    torch.save(file, tmp_path / "s.pt")
    torch.save({f"encoder.{n}": t for n, t in small_vit().state_dict().items()}, tmp_path / "v.pt")
    torch.save({**file, "stranger.weight": torch.zeros(1)}, tmp_path / "more.pt")
    torch.save({n: t for n, t in file.items() if n != "out.weight"}, tmp_path / "less.pt")
    for text, error, told in (
        (f"slate:{tmp_path}/more.pt?heads=2", CheckpointError, "nobody here knows: stranger.weight"),
        (f"slate:{tmp_path}/less.pt", CheckpointError, "has no 'out.weight'; is it of another model"),
        (f"spot:{tmp_path}/s.pt", CheckpointError, "has no 'encoder.patch_embed.proj.weight'"),
        (f"slate:{tmp_path}/none.pt", CheckpointError, "no such file"),
        (f"slate:{tmp_path}/s.pt?slot=3", ConfigError, "did you mean 'slots'"),
        (f"slate:{tmp_path}/s.pt?heads=5", (CheckpointError, ConfigError), "heads=5 does not divide width=16"),
        (f"slat:{tmp_path}/s.pt", ConfigError, "did you mean 'slate'"),
        (f"spot:{tmp_path}/v.pt?image_size=36", ConfigError, "image_size=36: patches are 8 pixels a side"),
    ):
        with pytest.raises(error, match=told):
            load_encoder(text)


def test_a_released_file_is_scored_and_drawn(tmp_path):
    _, file = slates_file()
    torch.save(file, tmp_path / "best_model.pt")
    done = sparo("data", "tetrominoes", "t", "--train", "8", "--test", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "m.yaml").write_text("tasks:\n  m: {task: masks, root: t/masks}\n  d: {task: reconstruction, root: t/masks}\n")  # fmt: skip
    name = "slate:best_model.pt?heads=2&slots=4"
    done = sparo("eval", name, "--data", "m.yaml", "--features", "none", cwd=tmp_path)
    assert done.returncode == 0 and "does not say iterations=3" in done.stdout + done.stderr and " dB" in done.stdout, done.stderr  # fmt: skip
    done = sparo("slots", "panels", name, "--image", "own.png", cwd=tmp_path)
    assert done.returncode == 2 and "own.png" in done.stderr and "does not say iterations=3" in done.stderr
