"""Readouts on cached tokens of frozen towers: the same numbers as without the cache, reused by every run, exact after a resume and on ranks."""

import shutil

import numpy as np
import pytest
import torch

from launch.commands.train import train
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import CheckpointError, ConfigError, DataError
from sparo_train.core.recipe.layers import override
from sparo_train.core.world import World
from sparo_train.data.decode.decoding import decode_pixels
from sparo_train.data.examples.image_transforms import eval_pixels
from sparo_train.data.read.plan import SampleRef
from sparo_train.data.read.token_cache import TokenCache, compute_digest
from sparo_train.train.build import build_engine, build_objective, build_pipeline, build_ranks
from sparo_train.train.run_config import RunConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.helpers.samples import sample
from tests.parity.test_accumulate import DDP, FSDP2, ZERO_3


def _tree(shards, folder, **changes):
    tree = tiny_recipe(shards, folder, steps=4, **changes)
    model = tree["objective"]["model"]
    model["vision"] |= {"freeze": "blocks", "patch_dropout": 0.0}
    model["text"]["freeze"] = "blocks"
    tree["objective"]["cache"] = str(folder / "tokens")
    tree["data"] |= {"crop_scale": [1.0, 1.0], "hflip": 0.0}
    return tree


def _run(tree, *words):
    return resolve(RunConfig, override(tree, list(words), RunConfig), "x")


def _model(folder, step=4):
    return store.read_part(folder / f"checkpoints/step-{step:08d}", "model")


def _same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("readout", ["sparo", "token", "gap"])
@pytest.mark.parametrize(("dtype", "close"), [("fp32", 1e-6), ("fp16", 2e-3)])
def test_cached_tokens_give_the_encodings_of_images_and_captions(shards, tmp_path, readout, dtype, close):
    sizes = {} if readout != "sparo" else {"slots": 4, "slot_width": 8, "head_width": 8}
    tree = _tree(shards, tmp_path)
    tree["objective"] |= {"cache": {"folder": str(tmp_path / "tokens"), "dtype": dtype}}
    tree["objective"]["model"]["readout"] = {"kind": readout, **sizes}
    config = _run(tree)
    objective, pipeline, ranks = (
        build_objective(config),
        build_pipeline(config),
        build_ranks(config.engine, config.world_size, World()),
    )
    pipeline.examples.ready(
        objective, pipeline.sources, build_engine(config.engine, config.optim, ranks).device_context, ranks
    )
    batch = next(pipeline.start()).batch
    assert set(batch) == {"image_tokens", "text", "text_tokens"}
    assert batch["image_tokens"].dtype == getattr(torch, {"fp32": "float32", "fp16": "float16"}[dtype])
    # without the cache: the images of that batch, decoded and encoded
    plain = _run({**tree, "objective": {**tree["objective"], "cache": None}})
    pixels = {}
    for storage in pipeline.sources[0].storages:
        for number in range(len(storage)):
            fields = storage.read(number)[1]
            pixels[compute_digest(fields["jpg"])] = eval_pixels(decode_pixels(fields["jpg"]), 32).transpose(2, 0, 1)
    kept, found = pipeline.examples.token_caches["image"], {}
    for digest, image in pixels.items():
        found[kept.read(digest).tobytes()] = torch.from_numpy(image.copy())
    images = torch.stack([found[row.numpy().tobytes()] for row in batch["image_tokens"]])
    whole = build_objective(plain)
    with torch.no_grad():
        ours = objective.embed(batch)
        theirs = whole.embed({"image": images, "text": batch["text"]})
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=close)


@pytest.mark.long
def test_a_run_on_cached_tokens_resumes_bit_identical(shards, tmp_path, capsys):
    tree = _tree(shards, tmp_path)
    train(_run(tree, "name=whole"))
    assert "computing image tokens" in capsys.readouterr().err
    train(_run(tree, "name=broken", "stop_after_steps=2"))
    assert "computing" not in capsys.readouterr().err  # the same seed, so the same random towers
    shutil.rmtree(tmp_path / "tokens")
    train(_run(tree, "name=broken"))
    assert "computing text tokens" in capsys.readouterr().err
    whole, broken = _model(tmp_path / "whole"), _model(tmp_path / "broken")
    assert _same(whole, broken)
    first = build_objective(_run(tree)).state_dict()
    blocks = [name for name in first if "resblocks" in name]
    assert blocks and all(torch.equal(first[name], whole[name]) for name in blocks)
    moved = [name for name in first if ".sparo." in name and not torch.equal(first[name], whole[name])]
    assert len(moved) > 4
    train(_run(tree, "name=several", "+data.sources.a.captions={txt: 1.0}", "steps=1", "optim.warmup_steps=0"))
    said = capsys.readouterr().err
    assert "computing text tokens" in said and "image tokens" not in said  # tokens of images do not depend on captions
    # a branch with the optimizer's moments starts from the towers of the checkpoint
    words = ["optim.schedule=cooldown", "optim.warmup_steps=0", "steps=2", "seed=1"]
    train(_run(tree, "name=branch", *words, f"start_from={{checkpoint: {tmp_path}/whole, optimizer: true}}"))
    assert "computing" not in capsys.readouterr().err
    assert all(torch.equal(whole[name], _model(tmp_path / "branch", 2)[name]) for name in blocks)


def test_a_frozen_dino_image_tower_with_a_trained_text_tower(shards, tmp_path, capsys):
    dino = dino_recipe(shards, tmp_path, steps=1)
    dino["optim"]["warmup_steps"] = 0
    train(_run(dino, "name=dino"))
    tree = _tree(shards, tmp_path)
    sizes = _run(dino).objective.model
    tree["objective"]["model"]["vision"] = {
        "timm_model_name": "vit_small_patch16_224",
        "image_size": 32,
        "timm_model_kwargs": {
            "patch_size": sizes.patch_size,
            "embed_dim": sizes.width,
            "depth": sizes.depth,
            "num_heads": sizes.heads,
        },
        "init_from": str(tmp_path / "dino"),
        "freeze": "blocks",
    }
    tree["objective"]["model"]["text"]["freeze"] = False
    keep = "objective.model.readout.replace_last_block=false"
    with pytest.raises(
        CheckpointError, match=r"another normalization of pixels.*Set objective.mean=\[0.485, 0.456, 0.406\]"
    ):
        train(_run(tree))
    tree["objective"] |= {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    with pytest.raises(CheckpointError, match=r"has no trunk.blocks.2.norm1.weight"):  # SPARO replaced it in that run
        train(_run(tree, keep))
    train(_run(tree))
    trained = _model(tmp_path / "tiny")
    backbone = {n.removeprefix("teacher.backbone."): t for n, t in _model(tmp_path / "dino", 1).items()}
    trunk = {
        n.removeprefix("model.visual.trunk."): t
        for n, t in trained.items()
        if n.startswith("model.visual.trunk.blocks")
    }
    assert trunk and all(torch.equal(t, backbone[n]) for n, t in trunk.items())
    begin = build_objective(_run(tree)).state_dict()
    name = "model.text.transformer.resblocks.0.ln_1.weight"
    assert not torch.equal(begin[name], trained[name])


def _on_ranks(ranks, config):
    train(config, ranks)


@pytest.mark.parametrize(("engine", "close"), [(DDP, 1e-5), (FSDP2, 1e-3), (ZERO_3, 1e-5)])
def test_ranks_share_the_work_and_end_as_one_process(shards, tmp_path, engine, close):
    tree = _tree(shards, tmp_path)
    tree["data"]["workers"] = 0
    train(_run(tree, "name=one"))
    parts = {path.name: path.read_bytes() for path in (tmp_path / "tokens").rglob("*.safetensors")}
    shutil.rmtree(tmp_path / "tokens")
    run_ranks(2, _on_ranks, _run({**tree, "name": "two", "engine": engine}))
    assert parts == {path.name: path.read_bytes() for path in (tmp_path / "tokens").rglob("*.safetensors")}
    assert len(parts) > 2
    one, two = _model(tmp_path / "one"), _model(tmp_path / "two")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=close, msg=name)


def test_a_picture_that_cannot_be_read_is_skipped_and_counted(tmp_path, capsys):
    rows = [sample(i) for i in range(48)]
    rows[7] = (rows[7][0], {**rows[7][1], "jpg": b"no picture"})
    rows[9] = (rows[9][0], {**rows[9][1], "txt": b" "})
    write_shards(tmp_path / "shards", iter(rows), 24)
    tree = _tree(tmp_path / "shards", tmp_path)
    tree["data"] |= {"max_bad_share": 0.5}
    tree["steps"] = 12
    train(_run(tree))
    said = " ".join(capsys.readouterr().err.split())
    assert "image tokens for 48 samples (about" in said
    assert "2 (bad image), 2 (missing caption)" in said  # as without the cache
    with pytest.raises(ConfigError, match=r"Set objective.cache=null"):  # as `sparo data bench` would read it
        build_pipeline(_run(tree)).example(SampleRef(0, 0, 0, 0))


def test_damage_is_named_and_truncated_tokens_are_computed_again(tmp_path):
    kept = TokenCache(tmp_path, {"weights": "x"}, "fp16")
    entries = [np.full((n, 3), n, np.float32) for n in (2, 1, 4)]
    kept.write("a", [compute_digest(bytes([n])) for n in range(3)], entries)
    kept.write("b", [compute_digest(b"other")], [np.ones((1, 3), np.float32)])
    kept.write("empty", [], [])
    kept.open(["a", "empty", "b"])
    assert len(kept) == 4 and [len(kept.read(compute_digest(bytes([n])))) for n in range(3)] == [2, 1, 4]
    assert kept.read(compute_digest(b"none")) is None
    path = kept.folder / "a.safetensors"
    content = bytearray(path.read_bytes())
    at = content.index(np.float16(4).tobytes() * 3)
    path.write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    again = TokenCache(tmp_path, {"weights": "x"}, "fp16")
    again.open(["a", "b"])
    with pytest.raises(DataError, match=r"a.safetensors: is damaged. Remove it"):
        for n in range(3):
            again.read(compute_digest(bytes([n])))
    assert kept.has("a")
    path.write_bytes(content[:at])  # truncated while it is read: an error instead of a bus error
    with pytest.raises(DataError, match=r"a.safetensors: is damaged"):
        again.read(compute_digest(bytes([2])))
    path.unlink()
    with pytest.raises(DataError, match=r"a.safetensors: cannot be read"):
        again.read(compute_digest(bytes([2])))
    assert np.array_equal(again.read(compute_digest(b"other")), np.ones((1, 3)))
    tables = bytearray(content)
    tables[content.index(np.array([0, 2, 3, 7]).tobytes()) + 8] = 1  # in the array `starts`
    for damaged in (bytes(content).replace(b'"F16"', b'"I16"'), bytes(tables), bytes(content[:-1])):
        path.write_bytes(damaged)
        assert not kept.has("a")
        with pytest.raises(DataError, match=r"a.safetensors: is damaged"):
            TokenCache(tmp_path, {"weights": "x"}, "fp16").open(["a"])
    assert not kept.has("a") and not kept.has("never") and kept.has("b")
    assert TokenCache(tmp_path, {"weights": "y"}, "fp16").folder != kept.folder
    with pytest.raises(DataError, match=r"set objective.cache.dtype=fp32"):
        kept.write("large", [compute_digest(b"")], [np.full((1, 3), 1e6, np.float32)])
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"objective.cache: .*cannot be written"):
        TokenCache(tmp_path / "file", {}, "fp16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.model.vision.freeze=false", "objective.model.text.freeze=0"], "needs a tower with frozen blocks"),
        (["objective.cache={folder: ''}"], "objective.cache"),
        (["data.hflip=0.5"], r"data.hflip=0.5: must be 0.0 with objective.cache"),
        (["data.crop_scale=[0.9, 1.0]"], "data.crop_scale="),
        (["objective.model.vision.patch_dropout=0.5"], "patch_dropout=0.5"),
    ],
)
def test_recipes_whose_tokens_cannot_be_cached_are_refused(shards, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        _run(_tree(shards, tmp_path), *words)
