"""Encoders of posed views compared with their published sizes and formulas."""

import torch
from torch.nn import functional as F

from object_centric.scenes3d.view_encoder import ViewEncoderConfig


def test_osrts_and_srts_encoders_have_their_parameters():
    """OSRT's encoder has 34.3 million parameters, 57.9 million with slot attention (counted without allocating them)."""
    with torch.device("meta"):
        osrt_, srt = (sum(p.numel() for p in ViewEncoderConfig(preset=n).build().parameters()) for n in ("osrt", "srt"))
    convs = 183 * 96 * 9 + 96 * 192 * 9 + 192 * 192 * 9 + 192 * 384 * 9 + 384 * 384 * 9 + 384 * 768 * 9
    block = 768 * 768 * 4 + 768 + 2 * 768 * 1536 + 1536 + 768 + 4 * 768
    assert osrt_ == convs + 768 * 768 + 768 + 5 * block
    convs += 768 * 768 * 9 + 768 * 1536 * 9 + 1536 * 768 + 768
    assert srt == convs + 10 * block + 768 * (16 * 16 + 2)


def srt_encoder(w, posed, octaves, start, heads):
    """Compute stelzner/srt's encoder from its formulas, one view and one head at a time."""
    tokens = []
    for number, (image, origin, ray) in enumerate(zip(*posed[0].split(3, 1), strict=True)):
        told = [image]
        for plane, first in ((origin, start), (ray, 0)):
            angles = torch.pi * torch.stack([plane[d] * 2.0 ** (first + o) for d in range(3) for o in range(octaves)])
            told += [angles.sin(), angles.cos()]
        x = F.conv2d(torch.cat(told)[None], w["stem.weight"], padding=1).relu()
        for at in sorted(int(k.split(".")[1]) for k in w if k.startswith("blocks.")):
            x = F.conv2d(
                x,
                w[f"blocks.{at}.weight"],
                stride=2 if w[f"blocks.{at}.weight"].shape[0] > x.shape[1] else 1,
                padding=1,
            ).relu()
        x = torch.einsum("oc,chw->hwo", w["project.weight"], x[0]) + w["project.bias"]
        x = x + w["cells"][: x.shape[0], : x.shape[1]] + w["views"][min(number, 1)]
        tokens.append(x.flatten(0, 1))
    x = torch.cat(tokens)
    for i in range(sum(k.endswith("to_q.weight") for k in w)):
        b = {k.removeprefix(f"transformer.{i}."): v for k, v in w.items() if k.startswith(f"transformer.{i}.")}
        y = F.layer_norm(x, x.shape[-1:], b["norm_attention.weight"], b["norm_attention.bias"])
        q, k, v = ((y @ b[f"to_{n}.weight"].T).chunk(heads, -1) for n in "qkv")
        taken = [torch.softmax(q_ @ k_.T / q_.shape[-1] ** 0.5, -1) @ v_ for q_, k_, v_ in zip(q, k, v, strict=True)]
        x = x + torch.cat(taken, -1) @ b["out.weight"].T + b["out.bias"]
        y = F.layer_norm(x, x.shape[-1:], b["norm_mlp.weight"], b["norm_mlp.bias"])
        x = x + F.gelu(y @ b["mlp.0.weight"].T + b["mlp.0.bias"]) @ b["mlp.2.weight"].T + b["mlp.2.bias"]
    return x


def test_the_encoder_of_srt_equals_its_formula():
    torch.manual_seed(0)
    small = {"channels": 4, "width": 24, "fourier_bands": 3, "pos_embed_size": 3, "num_downsample": 3}
    config = ViewEncoderConfig.model_validate(
        {"preset": "srt", **small, "transformer": {"blocks": 2, "heads": 3, "mlp_width": 30}}
    )
    module = config.build().double()
    for parameter in module.parameters():  # norms and biases that change the result
        parameter.data += 0.1 * torch.randn_like(parameter)
    posed = torch.rand(1, 3, 9, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        found, expected = module(posed), srt_encoder(module.state_dict(), posed, 3, -5, 3)
        assert torch.allclose(found[0], expected, atol=1e-9)
        # It matters which view is the first one; the order of the others does not.
        others = module(posed[:, [0, 2, 1]])[0].unflatten(0, (3, -1))[[0, 2, 1]].flatten(0, 1)
        assert torch.allclose(others, found[0], atol=1e-9)
        assert not torch.allclose(
            module(posed[:, [1, 0, 2]])[0].unflatten(0, (3, -1))[[1, 0, 2]].flatten(0, 1), found[0], atol=1e-3
        )
    assert "views" in module.adamw_only_parameters


def test_records_of_osrts_sizes_by_their_former_name_are_osrts():
    old = ViewEncoderConfig(preset="osrt").model_dump(mode="json")
    del old["pos_embed_size"]
    former = {**old, "preset": "srt", "transformer": {**old["transformer"], "preset": "srt"}}
    assert ViewEncoderConfig.model_validate(former) == ViewEncoderConfig(preset="osrt")
    # A typed value is respected, even if it equals the preset's own value.
    typed = ViewEncoderConfig.model_validate({"preset": "srt", "layers": "plain", "transformer": {"preset": "srt"}})
    assert typed == ViewEncoderConfig(preset="srt") and typed.pos_embed_size == 16
