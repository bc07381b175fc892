"""Units that can be chosen, and the file of a selection: heads of ordinary models, selection.json and damaged versions of it."""

import json

import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from evals.encoders.encoder import TwoTowerEncoder
from evals.encoders.heads import SelectedHeads, make_heads
from evals.encoders.pixels import Pixels
from evals.encoders.selection import MaskedEncoder, Selection, keep_units, read_selection, select_slots, write_selection
from evals.slots.units import make_units
from sparo_train.core.errors import ConfigError
from tests.unit.test_slot_studies import clip


class StockClip(TwoTowerEncoder):
    """Return open_clip's own model, unchanged."""

    def __init__(self):
        torch.manual_seed(0)
        vision = open_clip.CLIPVisionCfg(layers=4, width=64, head_width=16, image_size=32, patch_size=8)
        text = open_clip.CLIPTextCfg(context_length=16, vocab_size=49408, width=32, heads=2, layers=1)
        super().__init__(open_clip.CustomTextCLIP(24, vision, text), (0.5,) * 3, (0.5,) * 3, "stock")
        self.image_size, self.transform = 32, Pixels(32, 32)

    @property
    def architecture(self):
        return "stock"


@pytest.mark.parametrize("make", [StockClip, lambda: clip({"kind": "token"})])
def test_heads_add_up_to_the_encoding(make):
    encoder = make()
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    heads = make_heads(encoder, 2)
    units = make_units(encoder, "heads", layers=2)
    shares = heads.encode(pixels)
    assert units.number == 8 and shares.shape == (5, 9 * 24)
    whole = F.normalize(shares.unflatten(1, (9, 24)).sum(1), dim=-1)
    assert torch.allclose(whole, encoder.encode(pixels), atol=2e-6)
    assert torch.allclose(units.images(shares).sum(1), encoder.encode(pixels), atol=2e-6)
    every = SelectedHeads(heads, list(range(8)))
    assert torch.allclose(F.normalize(every.encode(pixels), dim=-1), encoder.encode(pixels), atol=2e-6)
    # If a head of the last block writes nothing, the encoding equals the choice of all other heads, up to the block's MLP.
    chosen = keep_units(
        encoder, Selection(checkpoint=encoder.weights, units="heads", count=8, head_layers=2, chosen=(1, 3))
    )
    shares = shares.unflatten(1, (9, 24))
    assert torch.allclose(chosen.encode(pixels), shares[:, 1] + shares[:, 3] + shares[:, 8], atol=1e-6)


def test_heads_are_refused_where_there_are_none():
    for readout in ({"kind": "gap"}, {"kind": "sparo", "slots": 4, "slot_width": 6}):
        with pytest.raises(
            ConfigError, match=r"is not supported. Use a CLIP whose image tower is open_clip's ordinary ViT"
        ):
            make_heads(clip(readout), 2)
    with pytest.raises(ConfigError, match=r"--head-layers 9: .* has only 3 blocks"):
        make_heads(clip({"kind": "token"}), 9)
    with pytest.raises(ConfigError, match="has no slots"):
        make_units(clip({"kind": "token"}))
    with pytest.raises(
        ConfigError, match="--parts 7: must be at least 2 and a divisor of 24, the width of an encoding of a model"
    ):
        make_units(clip({"kind": "token"}), "parts", 7)


@pytest.fixture(scope="module")
def sparo():
    return clip({"kind": "sparo", "slots": 4, "slot_width": 6})


def test_a_selection_file_round_trips(sparo, tmp_path):
    given = select_slots(sparo, (2, 0)).model_copy(
        update={"names": {2: "red <b>"}, "notes": {0: "é"}, "scores": (0.1,) * 4}
    )
    write_selection(tmp_path / "s.json", given)
    assert read_selection(tmp_path / "s.json") == given
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    mask = torch.tensor([1.0, 0, 1, 0])
    assert torch.equal(keep_units(sparo, given).encode(pixels), MaskedEncoder(sparo, mask).encode(pixels))
    real = given.model_copy(update={"mask": (0.5, 0.25, 0.0, 1.0)})
    soft = MaskedEncoder(sparo, torch.tensor(real.mask))
    assert torch.equal(keep_units(sparo, real).encode(pixels), soft.encode(pixels))


BAD = {
    "another checkpoint": ({"checkpoint": "0" * 64}, "was made for another checkpoint"),
    "out of range": ({"chosen": [4]}, "chosen: 4 is not a unit; units are numbered from 0 to 3"),
    "negative": ({"chosen": [-1]}, "chosen: -1 is not a unit"),
    "none": ({"chosen": []}, "chosen"),
    "twice": ({"chosen": [1, 1]}, "names a unit twice"),
    "count": ({"count": 5, "chosen": [4]}, "has 5 slots"),
    "mask of another length": ({"mask": [0.5] * 5}, "expected a mask of 4 or 24 values, got 5"),
    "mask not finite": ({"mask": [0.5, 0.5, 0.5, float("nan")]}, "mask"),
    "order": ({"order": [1, 2]}, "order: must list all 4 units, got 2"),
    "names": ({"names": {"9": "x"}}, "names: 9 is not a unit"),
    "names of no number": ({"names": {"x": "x"}}, "names"),
    "unknown key": ({"slots": [1]}, "slots"),
    "another schema": ({"schema": 2}, "schema"),
    "of heads": ({"units": "heads"}, "is not supported. Use a CLIP whose image tower is open_clip's ordinary ViT"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_selection_is_refused_by_name(name, sparo, tmp_path):
    changes, message = BAD[name]
    good = json.loads(select_slots(sparo, (0, 1)).model_dump_json(by_alias=True))
    path = tmp_path / "s.json"
    path.write_text(json.dumps({**good, **changes}))
    with pytest.raises(ConfigError, match=message):
        keep_units(sparo, read_selection(path), f"--slots {path}")


JSON = st.recursive(
    st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80) | JSON.map(lambda found: json.dumps(found).encode()))
def test_files_other_than_a_selection_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"any\.json"):
        read_selection(path)
