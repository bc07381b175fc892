"""Edits of slots: a move shifts the slot's drawing by whole pixels, a scale enlarges it, and deleting or swapping changes nothing else."""

import numpy as np
import pytest
import torch
from PIL import Image

from object_centric.objectives.slate import Slate, SlateConfig
from object_centric.objectives.slot_autoencoder import SlotAutoencoder, SlotAutoencoderConfig
from object_centric.pictures.edits import edit_pictures
from object_centric.tasks.slot_editing import SlotEdit, apply_edit, check_edit, draw_state, editable, slot_state
from object_centric.tasks.slot_encoder import slate_encoder, slot_encoder
from sparo_train.core.errors import ConfigError

SIDE = 16
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def model(frame=None, target="pixels", slots=3):
    torch.manual_seed(0)
    config = {
        "model": {
            "image_size": SIDE, "encoder": {"channels": [8, 8], "strides": [1, 1]}, "features": 16, "target": target, "frame": frame,
            "grouping": {"slots": slots, "width": 16, "mlp_width": 16, **({"preset": "isa"} if frame else {})},
            "decoder": {"kind": "mlp", "hidden": [16, 16]},
        },
    }  # fmt: skip
    return slot_encoder(SlotAutoencoder(SlotAutoencoderConfig.model_validate(config)).eval())


def slot_images(encoder, state):
    with torch.inference_mode():
        frames = None if state.positions is None else (state.positions[None], state.scales[None])
        return encoder.model.decode(state.slots[None], frames).slot_images[0]


@pytest.mark.parametrize("scales", [False, True])
def test_a_move_shifts_what_a_slot_draws(scales):
    encoder = model({"scales": scales})
    state = slot_state(encoder, IMAGE)
    moved = apply_edit(state, SlotEdit(1, (3 / SIDE, -2 / SIDE)), SIDE)
    before, after = slot_images(encoder, state), slot_images(encoder, moved)
    torch.testing.assert_close(after[1, :, : SIDE - 2, 3:], before[1, :, 2:, : SIDE - 3], atol=1e-5, rtol=1e-5)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    half = apply_edit(state, SlotEdit(1, (3 / SIDE, -2 / SIDE)), SIDE, 0.5)
    torch.testing.assert_close(half.positions, (state.positions + moved.positions) / 2)
    assert torch.equal(apply_edit(state, SlotEdit(1, (0.5, 0.5)), SIDE, 0.0).positions, state.positions)


def test_a_scale_enlarges_around_the_slots_position():
    encoder = model({"scales": True})
    state = slot_state(encoder, IMAGE)
    centred = state._replace(positions=torch.zeros_like(state.positions))
    larger = apply_edit(centred, SlotEdit(0, scale=2.0), SIDE)
    assert torch.equal(larger.scales[0], 2 * state.scales[0]) and torch.equal(larger.scales[1:], state.scales[1:])
    # With half of the coordinates, pixels at -1 and 1 become those at -0.5 and 0.5.
    nearer = centred._replace(scales=state.scales * torch.tensor([[2.0], [1.0], [1.0]]))
    torch.testing.assert_close(slot_images(encoder, larger), slot_images(encoder, nearer))


def test_deleting_and_swapping():
    for encoder in (model(), model({"scales": False})):
        state = slot_state(encoder, IMAGE)
        drawing = draw_state(encoder, state)
        torch.testing.assert_close(
            drawing.image, encoder.decompose(encoder.stack([encoder.transform(IMAGE)])).reconstruction[0].clamp(0, 1)
        )
        without = apply_edit(state, SlotEdit(1, delete=True), SIDE)
        assert torch.equal(without.slots, state.slots[[0, 2]]) and draw_state(encoder, without).shares.shape[0] == 2
        other = torch.randn(16)
        replaced = apply_edit(state, SlotEdit(2, replacement=other), SIDE)
        assert torch.equal(replaced.slots[2], other) and torch.equal(replaced.slots[:2], state.slots[:2])
    exchanged = apply_edit(state, SlotEdit(0, exchange=2), SIDE)
    assert torch.equal(exchanged.positions, state.positions[[2, 1, 0]]) and torch.equal(exchanged.slots, state.slots)


def test_pictures_have_steps_and_an_animation():
    encoder = model({"scales": True})
    gradual = edit_pictures(encoder, IMAGE, SlotEdit(1, (0.25, 0.0), 1.5), tile=32, num_frames=5)
    assert gradual.sheet.size == (6 * 36 + 4, 2 * 36 + 18) and len(gradual.frames) == 10
    assert gradual.frames[0].tobytes() == gradual.frames[-1].tobytes() != gradual.frames[4].tobytes()
    deleted = edit_pictures(encoder, IMAGE, SlotEdit(0, delete=True), tile=32, num_frames=4)
    assert deleted.sheet.size == (3 * 36 + 4, 2 * 36 + 18)


def test_slate_draws_without_a_slot():
    torch.manual_seed(0)
    config = {
        "model": {
            "image_size": SIDE, "features": 16, "grouping": {"slots": 3, "width": 16, "mlp_width": 16},
            "encoder": {"kind": "tokens", "width": 16}, "dvae": {"vocab": 8, "channels": 8}, "decoder": {"width": 16, "heads": 2, "blocks": 1},
        },
    }  # fmt: skip
    encoder = slate_encoder(Slate(SlateConfig.model_validate(config)).eval())
    state = slot_state(encoder, IMAGE)
    assert draw_state(encoder, apply_edit(state, SlotEdit(1, delete=True), SIDE)).image.shape == (3, SIDE, SIDE)
    assert edit_pictures(encoder, IMAGE, SlotEdit(1, delete=True), tile=32).sheet.size == (3 * 36 + 4, 36 + 18)
    with pytest.raises(ConfigError, match="have no positions"):
        check_edit(encoder, SlotEdit(1, (0.1, 0.0)))


@pytest.mark.parametrize(
    ("frame", "edit", "problem"),
    [
        (None, SlotEdit(0, (0.1, 0.0)), "have no positions"),
        (None, SlotEdit(0, exchange=1), "have no positions"),
        ({"scales": False}, SlotEdit(0, scale=2.0), "no scales"),
        ({"scales": True}, SlotEdit(3, delete=True), "has 3 slots, numbered from 0, got 3"),
        ({"scales": True}, SlotEdit(0, exchange=7), "got 7"),
        ({"scales": True}, SlotEdit(0, scale=-1.0), "expected a move"),
        ({"scales": True}, SlotEdit(0, (float("nan"), 0.0)), "expected a move"),
        ({"scales": True}, SlotEdit(0, (1e30, 0.0)), "expected a move"),
    ],
)
def test_edits_that_a_model_cannot_do(frame, edit, problem):
    with pytest.raises(ConfigError, match=problem):
        check_edit(model(frame), edit)
    with pytest.raises(ConfigError, match="has only one slot"):
        check_edit(model(slots=1), SlotEdit(0, delete=True))
    with pytest.raises(ConfigError, match="is not an image model that decodes slots"):
        editable(object.__new__(type("Other", (), {"label": "x"})))
