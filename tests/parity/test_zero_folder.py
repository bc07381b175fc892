"""DeepSpeed's own folders: read as weights, refused if they are incomplete or contain code."""

import os
import shutil

import pytest
import torch

from evals.encoders.loading import load_encoder
from sparo_train.core.config import resolve
from sparo_train.core.errors import CheckpointError
from sparo_train.models.weight_files.zero_folder import read_zero_folder
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_recipe


def native(ranks, tree, folder):
    """Train one step with plain DeepSpeed, and save its checkpoint."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(ranks.rank))
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = build_objective(resolve(RunConfig, tree, "x")).model
    model.logit_scale.data = model.logit_scale.data.view(1)  # DeepSpeed 0.19 does not accept 0-d parameters
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "steps_per_print": None}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    size = model.config.vision.image_size
    image, text, scale = engine(torch.randn(2, 3, size, size), torch.tensor([[49406, 5, 49407], [49406, 7, 49407]]))
    engine.backward((image * text).sum() * scale.sum())
    engine.step()
    engine.save_checkpoint(str(folder), tag="global_step1")
    return {name: t.clone() for name, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    root = tmp_path_factory.mktemp("zero")
    tree = tiny_recipe(root / "shards", root)
    readout = {"kind": "sparo", "slots": 4, "slot_width": 8, "head_width": 8}
    tree["objective"] = {"kind": "clip", "model": {"backbone": "ViT-Tiny-16", "readout": readout}}
    return root / "ds", run_ranks(2, native, tree, root / "ds")[0]


def test_a_zero_folder_is_read_as_weights_and_encodes(zero):
    folder, expected = zero
    found = read_zero_folder(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert read_zero_folder(folder / "global_step1").keys() == expected.keys()
    encoder = load_encoder(folder)
    assert encoder.model.config.readout.kind == "sparo" and encoder.assumed
    assert torch.equal(encoder.model.state_dict()["visual.conv1.weight"], expected["visual.conv1.weight"])


def test_a_zero_folder_of_another_world_size_is_refused(zero, tmp_path):
    shutil.copytree(zero[0], tmp_path / "ds")
    lost = next((tmp_path / "ds").glob("*/zero_pp_rank_1*optim_states.pt"))
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"ds: not a whole DeepSpeed checkpoint \(Expected 2 of .* found 1 files"):
        read_zero_folder(tmp_path / "ds")
    with pytest.raises(CheckpointError, match="not a whole DeepSpeed checkpoint"):
        load_encoder(tmp_path / "ds")


def as_older_pythons_write(folder, kind, name):
    """Rewrite every rank's optimizer file, with the stage as Pythons before 3.11.4 pickle a member of an enum: getattr(kind, name)."""

    class Member:
        def __reduce__(self):
            return getattr, (kind, name)

    for path in folder.glob("*/*optim_states.pt"):
        found = torch.load(path, weights_only=False)
        assert int(found["optimizer_state_dict"]["zero_stage"]) == 2
        found["optimizer_state_dict"]["zero_stage"] = Member()
        torch.save(found, path)


def test_only_enums_of_older_pythons_are_read_by_getattr(zero, tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    shutil.copytree(zero[0], tmp_path / "good")
    as_older_pythons_write(tmp_path / "good", ZeroStageEnum, "gradients")
    found = read_zero_folder(tmp_path / "good")
    assert all(torch.equal(found[name], t) for name, t in zero[1].items())
    for number, (kind, name) in enumerate([(ZeroStageEnum, "__init__"), (LossScaler, "__init__"), (dict, "get")]):
        shutil.copytree(zero[0], tmp_path / f"bad{number}")
        as_older_pythons_write(tmp_path / f"bad{number}", kind, name)
        with pytest.raises(CheckpointError, match="could run code"):
            read_zero_folder(tmp_path / f"bad{number}")


def test_a_zero_folder_never_runs_code(zero, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    shutil.copytree(zero[0], tmp_path / "ds")
    victim = next((tmp_path / "ds").glob("*/zero_pp_rank_0*optim_states.pt"))
    torch.save({"optimizer_state_dict": Evil()}, victim)
    with pytest.raises(CheckpointError, match="could run code"):
        read_zero_folder(tmp_path / "ds")
    assert not (tmp_path / "ran").exists()
