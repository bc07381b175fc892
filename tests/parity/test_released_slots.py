"""Released slot models: files with their authors' names and random weights, compared with a written-out version of their code."""

import pytest
import torch
from torch.nn import functional as F

from evals.encoders.loading import load_encoder
from object_centric.released.spot import SpotFile
from object_centric.released.weight_reader import Tensors, UnspecifiedOptions, convert_dinov2_to_timm, read_slot_init
from sparo_train.core.errors import CheckpointError, ConfigError
from tests.helpers.processes import sparo
from tests.parity.released import (
    HIDDEN,
    MEAN,
    SLOT,
    STD,
    begun,
    doubled,
    drawn,
    features,
    gate,
    gru,
    images,
    lin,
    linear,
    ln,
    norm,
    said_of,
    scaled,
    slates_file,
    slates_names,
    slates_rounds,
    small_vit,
)

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
    assert "does not contain iterations=3" in encoder.assumed and "slots" not in said_of(encoder)
    x = features(vit, images(), final_norm=False)  # vit_block12: before the last norm
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
    # The next frame is the same image here. A block predicts it, whose scores are multiplied by the square root of a head's width.
    y = ln(w, f"{block}.norm1", slots)
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in lin(w, f"{block}.self_attn.qkv", y).chunk(3, -1))
    attended = ((q @ k.transpose(2, 3) * q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    y = slots + lin(w, f"{block}.self_attn.out_proj", attended)
    y = y + lin(w, f"{block}.linear2", lin(w, f"{block}.linear1", ln(w, f"{block}.norm2", y)).relu())
    second, later = corrected(y, 2)
    tower = encoder.model.double().tower
    with torch.no_grad():
        tokens = tower.tokens(images().double() / 255)[0]
        found = tower.group_tokens(
            tokens[:, None].expand(-1, 2, -1, -1), encoder.noise[None].expand(2, -1, -1).double(), None
        )
    assert torch.allclose(found.slots, torch.stack([slots, second], 1), atol=1e-9)
    assert torch.allclose(found.attention, torch.stack([shares, later], 1), atol=1e-9)


@pytest.mark.parametrize("kind", ["dino", "dinov2", "registers"])
def test_spot(tmp_path, kind):
    v2, size = kind != "dino", 24 if kind != "dino" else 32  # DINOv2's positions are learned for four patches per side
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
    # Positions are interpolated once in fp32, when the file is read.
    assert torch.allclose(doubled(encoder)(images(size=size)).slots, slots, atol=1e-5 if v2 else 1e-9)


def spots_features(vit, held, pixels, kind):
    """Patch tokens as the code of DINO and DINOv2 prepares them, here with three patches per side instead of the learned four."""
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


def test_derived_options_are_reported_with_their_values():
    unsaid = UnspecifiedOptions("spot:f", "slots=5", {"slots": 5}, SpotFile(slots=5))
    unsaid.set_inferred("heads", 12)
    unsaid.set_inferred("slots", 7)  # an explicit value
    assert str(unsaid) == (
        "spot:f: does not contain image_size=224, iterations=3, heads=12, final_norm=false, so these values are assumed; "
        "spot:f?slots=5&image_size=… changes them"
    )
    for name in ("image_size", "iterations", "heads", "final_norm"):
        unsaid.set_from_file(name, 1)
    assert str(unsaid) == ""


def test_matching_position_embeddings_are_unchanged():
    t = Tensors({"e.pos_embed": torch.randn(1, 17, 8), "e.mask_token": torch.zeros(1)}, "f")
    before = t["e.pos_embed"]
    convert_dinov2_to_timm(t, "e", 4)
    assert torch.equal(t["e.pos_embed"], before) and "e.mask_token" not in t


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
            **linear("aggregat.ffn.3", HIDDEN, SLOT),  # dropout has an index in the names, too
        }
    )
    w |= {f"encode_backbone.1.{n}": v for n, v in vit.state_dict().items()}
    torch.save({f"m.{n}": v for n, v in {**w, "decode.x": torch.zeros(1)}.items()}, tmp_path / "g.pth")
    encoder = load_encoder(f"vqvfm:{tmp_path}/g.pth?image_size=32&heads=2" + ("" if own else "&slots=6"))
    assert encoder.slots == (5 if own else 6) and "slots" not in said_of(encoder)
    if own:
        with pytest.raises(ConfigError, match=r"\?slots=6: contradicts the file, which has slots=5. Remove the option"):
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
    torch.save({n: t.to(torch.int8) for n, t in file.items()}, tmp_path / "rounded.pt")
    for text, error, told in (
        (f"slate:{tmp_path}/more.pt?heads=2", CheckpointError, "has unknown tensors: stranger.weight"),
        (f"slate:{tmp_path}/less.pt", CheckpointError, "has no 'out.weight', got"),
        (f"slate:{tmp_path}/rounded.pt?heads=2", CheckpointError, "torch.int8 in the file, torch.float32 in the model"),
        (f"spot:{tmp_path}/s.pt", CheckpointError, "has no 'encoder.patch_embed.proj.weight'"),
        (f"slate:{tmp_path}/none.pt", CheckpointError, "no such file"),
        (f"slate:{tmp_path}/s.pt?slot=3", ConfigError, "did you mean 'slots'"),
        (f"slate:{tmp_path}/s.pt?heads=5", (CheckpointError, ConfigError), "heads=5 does not divide width=16"),
        (f"slat:{tmp_path}/s.pt", ConfigError, "did you mean 'slate'"),
        (f"spot:{tmp_path}/v.pt?image_size=36", ConfigError, "image_size=36: must be a multiple of the patch size 8"),
    ):
        with pytest.raises(error, match=told):
            load_encoder(text)


def test_initial_slots_of_an_unknown_shape_are_refused():
    unspecified = UnspecifiedOptions("x", "", {}, SpotFile())
    with pytest.raises(CheckpointError, match="slots has a shape that this reader does not support"):
        read_slot_init(Tensors({"slots": torch.zeros(2, 5, 8)}, "x"), unspecified, "mean", "std", "slots")


def test_a_released_file_is_scored_and_visualized(tmp_path):
    _, file = slates_file()
    torch.save(file, tmp_path / "best_model.pt")
    done = sparo("data", "tetrominoes", "t", "--train", "8", "--test", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "m.yaml").write_text("tasks:\n  m: {task: masks, root: t/masks}\n  d: {task: reconstruction, root: t/masks}\n")  # fmt: skip
    name = "slate:best_model.pt?heads=2&slots=4"
    done = sparo("eval", name, "--data", "m.yaml", "--features", "none", cwd=tmp_path)
    assert done.returncode == 0 and "does not contain iterations=3" in done.stdout + done.stderr and " dB" in done.stdout, done.stderr  # fmt: skip
    done = sparo("slots", "panels", name, "--image", "own.png", cwd=tmp_path)
    assert done.returncode == 2 and "own.png" in done.stderr and "does not contain iterations=3" in done.stderr
