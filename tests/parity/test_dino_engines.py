"""DINO on several ranks, in micro-batches and with every engine: gradients, centre and teacher equal those of one process."""

import pytest
import torch

from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.train.build import build_engine, build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import dino_recipe
from tests.parity.test_accumulate import (
    DDP,
    FSDP2,
    ZERO_2,
    ZERO_3,
    all_gradients,
    assert_close,
    engine_block,
    model_after,
    skips,
    trained,
)

# The losses of DINOv2 and DINOv3; the earlier teacher is copied within the run.
TERMS = [
    "objective.ibot={}",
    "objective.koleo=0.1",
    "objective.gram={first_step: 1, update_steps: 2, crop_size: 48}",
]


def tree_of(shards, tmp_path, *changes):
    tree = dino_recipe(shards, tmp_path, batch_size=12)
    tree["data"] = {**tree["data"], "workers": 0, "streams": 12}
    return override(tree, list(changes))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("bn", [False, True], ids=["", "bn"])
def test_gradients_are_those_of_one_process_with_the_whole_batch(shards, tmp_path, kind, bn):
    """In fp64, with drop path and augmentation, which are drawn per sample. Batch norm does not allow micro-batches."""
    tree = tree_of(shards, tmp_path, f"objective.head.use_bn={str(bn).lower()}")
    ((whole,),) = run_ranks(1, all_gradients, tree, engine_block("local"), [12])
    assert "student.head.last_layer.weight_v" in whole and not any(name.startswith("teacher") for name in whole)
    for world_size in (2, 3):
        sizes = [12 // world_size // parts for parts in ((1,) if bn else (1, 2))]
        for by_rank in run_ranks(world_size, all_gradients, tree, engine_block(kind), sizes):
            for got in by_rank:
                assert_close(got, whole, 1e-9 if bn else 1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "engine", "changes"),
    [
        (2, 3, DDP, []),
        (2, 6, FSDP2, TERMS),
        (3, 2, {**FSDP2, "reshard_after_forward": False}, []),
        (2, 6, ZERO_2, ["objective.freeze_last_layer=0", *TERMS]),
        (2, 6, {**ZERO_3, "persistence_threshold": 500}, ["objective.freeze_last_layer=0", *TERMS]),
    ],
)
def test_ranks_end_as_one_process_and_bit_equal_after_a_restart(
    shards, tmp_path, world_size, micro_batch_size, engine, changes
):
    tree = tree_of(shards, tmp_path, *changes)
    (norms,) = run_ranks(1, trained, tree, engine_block("local"), 12, tmp_path / "alone")
    for found in run_ranks(world_size, trained, tree, engine, micro_batch_size, tmp_path / "straight"):
        for ours, theirs in zip(found, norms, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
    run_ranks(world_size, trained, tree, engine, micro_batch_size, tmp_path / "again", {3: engine})
    straight, again, alone = (model_after(tmp_path / name) for name in ("straight", "again", "alone"))
    assert {"center", "teacher.backbone.pos_embed", "student.backbone.sparo.q_emb"} <= straight.keys()
    assert float(straight["center"].norm()) > 0
    assert not changes or "earlier.blocks.0.attn.qkv.weight" in straight
    for name, value in straight.items():
        assert torch.equal(value, again[name]), name
        assert torch.allclose(value, alone[name], rtol=1e-4, atol=2e-5), name


def test_a_skipped_step_leaves_teacher_and_centre(shards, tmp_path):
    for applied, same in run_ranks(2, skips, tree_of(shards, tmp_path), FSDP2):
        assert applied == [True, False, True] and same == [True, False]


@pytest.mark.parametrize(("engine", "message"), [(ZERO_2, "objective.freeze_last_layer=0")])
def test_what_deepspeed_cannot_do_is_refused(shards, tmp_path, engine, message):
    for said in run_ranks(2, _refusal, tree_of(shards, tmp_path), engine):
        assert message in said


def _refusal(ranks, tree, engine):
    config = resolve(RunConfig, {**tree, "engine": engine}, "x")
    try:
        build_engine(config.engine, config.optim, ranks).prepare(build_objective(config))
    except ConfigError as error:
        return str(error)
    return "taken"
