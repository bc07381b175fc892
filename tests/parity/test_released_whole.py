"""Released models that draw randomly, SLATE's and MESH's files, compared as a whole with their authors' code."""

import math

import pytest
import torch
from torch.nn import functional as F

from evals.encoders.loading import load_encoder
from object_centric.released.mesh import on_signed_grid
from sparo_train.core.errors import ConfigError
from tests.parity.released import (
    HIDDEN,
    SLOT,
    begun,
    doubled,
    drawn,
    gru,
    images,
    lin,
    linear,
    ln,
    norm,
    scaled,
    slates_file,
    slates_names,
    slates_rounds,
)


def group_norm_relu(w, name, x, stride=1):
    kernel = w[f"{name}.m.weight"]
    x = F.conv2d(x, kernel, stride=stride, padding=0 if stride > 1 else kernel.shape[-1] // 2)
    return F.group_norm(x, 1, w[f"{name}.weight"], w[f"{name}.bias"]).relu()


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
    tokens = logits.argmax(1).flatten(1) + 1  # after the BOS token
    table, places = w["dictionary.dictionary.weight"], w["positional_encoder.pe"]
    embedded = table[tokens] + places[:, 1:]
    x = ln(w, "slot_attn.layer_norm", embedded)
    x = lin(w, "slot_attn.mlp.2", lin(w, "slot_attn.mlp.0", x).relu())
    first = begun(encoder, w, "slot_attn.slot_mu", "slot_attn.slot_log_sigma").expand(2, -1, -1)
    slots, shares = slates_rounds(w, "slot_attn.slot_attention", x, first)
    drawn_by = encoder.decompose(pixels).reconstruction
    found = doubled(encoder)(pixels)
    assert torch.allclose(found.slots, slots, atol=1e-9)
    assert torch.allclose(found.attention.flatten(2), shares.transpose(1, 2), atol=1e-9)
    said = torch.zeros(2, 1, dtype=torch.long)  # the BOS token
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
    parts = encoder.decompose(images(size=side))
    assert torch.allclose(parts.reconstruction.double(), ((y[:, :, :3] * masks).sum(1) + 1) / 2, atol=1e-3)
    assert torch.allclose(parts.soft_masks.double(), masks[:, :, 0], atol=1e-4)
    assert torch.allclose(encoder.encode(images(size=side)).double(), slots.flatten(1), atol=1e-4)
    learned = {**torch.load(tmp_path / "m.ckpt")["state_dict"], "net.slot_attention.lr": torch.tensor([2.0])}
    torch.save({"state_dict": learned}, tmp_path / "l.ckpt")
    rate = load_encoder(f"mesh:{tmp_path}/l.ckpt?slots=3").model.tower.grouping.rounds[0].transport.rate
    assert rate == 2 and load_encoder(f"mesh:{tmp_path}/l.ckpt?slots=3&entropy_steps=0").image_size == 8
    for query in ("entropy_rate=2", "entropy_rate=2&entropy_steps=0"):
        with pytest.raises(ConfigError, match="entropy_rate=2: has no effect for this file"):
            load_encoder(f"mesh:{tmp_path}/l.ckpt?slots=3&{query}")


def test_a_layer_of_four_coordinates_is_one_of_two():
    weight, bias, place = torch.randn(6, 4), torch.randn(6), torch.rand(9, 2)
    two = on_signed_grid(weight, bias)
    assert torch.allclose(
        F.linear(torch.cat([place, 1 - place], 1), weight, bias), F.linear(place * 2 - 1, *two), atol=1e-5
    )
