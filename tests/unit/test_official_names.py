"""Names of official repositories: every parameter of the shipped recipe has exactly one counterpart."""

import re

import pytest
import torch

from object_centric.released import official_names
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import load_run

# The recipe has inverted attention; this is OSRT's own slot attention.
SLOT_ATTENTION = ("objective.model.grouping.preset=sa", "objective.model.grouping.iterations=1")
# ISA's code has no layers between the encoder and slot attention; the recipe's header lists this under "Differs".
EXTRA = {"ISA": {"tower.norm", "tower.project.0", "tower.project.2"}}


def modules(recipe, *overrides):
    """Return modules, and parameters that are not a module's weight or bias, below `model.`."""
    with torch.device("meta"):
        names = build_objective(load_run(recipe, list(overrides))).model.state_dict()
    return {re.sub(r"\.(weight|bias)(_ih|_hh)?$", "", name) for name in names}


def pattern(name):
    """Return one of our names as a regular expression, and the modules that it means if there are several."""
    first, *others = name.split(" + ")
    names = [first, *(f"{first.rpartition('.')[0]}.{other}" for other in others)]
    return [re.sub(r"\\\{[^}]*\\\}", r"\\d+", re.escape(one)) for one in names]


@pytest.mark.parametrize(
    ("repository", "recipes", "overrides"),
    [
        ("SAVI", ["configs/video/savi_small.yaml", "configs/video/savi_large.yaml"], ()),
        ("ISA", ["configs/slots/isa_clevr.yaml", "configs/slots/isa_clevrtex.yaml"], ()),
        ("PSB", ["configs/video/psb_sbd.yaml"], ()),
        ("STEVE", ["configs/video/steve_movi.yaml"], ()),
        ("OSRT", ["configs/scenes3d/inv_osrt.yaml"], SLOT_ATTENTION),
    ],
)
def test_every_parameter_has_one_official_counterpart(repository, recipes, overrides):
    table = getattr(official_names, repository)
    ours = [p for name in table.values() for p in pattern(name)]
    used = set()
    for recipe in recipes:
        for name in modules(recipe, *overrides) - EXTRA.get(repository, set()):
            # `layers.8` is more specific than `layers.{2i}`.
            matches = sorted((p for p in ours if re.fullmatch(p, name)), key=lambda p: p.count("+"))
            assert matches, f"{recipe}: {name} has no official name"
            assert len(matches) == 1 or matches[0].count("+") < matches[1].count("+"), (name, matches)
            used.add(matches[0])
    assert set(ours) == used
