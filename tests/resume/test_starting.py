"""How a run starts: from another run's weights, with its moments and position in the data, or a tower from elsewhere; and which parameters stay frozen."""

import shlex
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from evals.interop.initial_weights import load_initial_weights
from evals.interop.tower_names import refuse_unlike, tower_weights
from launch.commands.train import train
from sparo_train import openclip
from sparo_train.core.config import resolve
from sparo_train.core.disk import checkpoint_store as store
from sparo_train.core.errors import CheckpointError, ConfigError
from sparo_train.core.recipe.layers import override
from sparo_train.engine.optim import AdamWConfig, build_optimizer
from sparo_train.models.clip_config import OPENAI_MEAN, OPENAI_STD, ClipConfig, TextConfig
from sparo_train.models.clip_model import Clip
from sparo_train.objectives.clip import ClipObjective
from sparo_train.objectives.clip_config import ClipObjectiveConfig
from sparo_train.train.build import build_objective
from sparo_train.train.run_config import RunConfig
from tests.helpers.logs import logged
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import dino_recipe, tiny_recipe
from tests.parity.test_accumulate import DDP, FSDP2, ZERO_2, ZERO_3, model_after, trained, two_tree


def _run(tree, *words):
    return resolve(RunConfig, override(tree, list(words), RunConfig), "x")


def _model(folder, step):
    return store.read_part(folder / f"checkpoints/step-{step:08d}", "model")


@pytest.mark.long
def test_a_cooldown_branch_equals_the_run_with_cooldown(shards, tmp_path):
    # The warm-up of an average belongs to the first steps, which a branch has passed.
    tree = override(tiny_recipe(shards, tmp_path), ["objective.ema={decay: 0.99}"], RunConfig)
    train(_run(tree, "name=wsd", "optim.schedule=wsd", "optim.cooldown_steps=4"))
    train(_run(tree, "name=steady", "optim.schedule=constant", "steps=8"))
    words = ["optim.schedule=cooldown", "optim.warmup_steps=0", "steps=4"]
    branch = ["name=branch", *words, f"start_from={{checkpoint: {tmp_path}/steady, optimizer: true}}"]
    train(_run(tree, *branch, "stop_after_steps=2"))
    train(_run(tree, *branch))
    for part in ("model", "optimizer"):
        long = store.read_part(tmp_path / "wsd/checkpoints/step-00000012", part)
        short = store.read_part(tmp_path / "branch/checkpoints/step-00000004", part)
        assert long.keys() == short.keys() and all(torch.equal(t, short[n]) for n, t in long.items()), part
    cursors = [
        store.read_meta(tmp_path / f"{n}/checkpoints/step-{s:08d}")["cursor"] for n, s in (("wsd", 12), ("branch", 4))
    ]
    assert cursors[0] == cursors[1]
    # Moments of another optimizer, an average that was added or removed, frozen parts: the error names the key, and the run's name stays unused.
    from_steady = f"start_from={{checkpoint: {tmp_path}/steady, optimizer: true}}"
    for change in ("optim.kind=muon", "objective.ema=null", "freeze=[model.visual.*]"):
        with pytest.raises(CheckpointError, match=r"start_from.checkpoint=\S+steady: .*start_from.optimizer=false"):
            train(_run(tree, "name=other", *words, change, from_steady))
    # Differences that no shape reveals are also checked if only weights are loaded.
    for change, told in (
        ("objective.mean=[0.5, 0.5, 0.5]", "was trained with another normalization of pixels"),
        ("objective.model.quick_gelu=true", "OpenAI's approximation of GELU"),
        (f"objective.model.vision.init_from={tmp_path}/steady", "would be overwritten by start_from.optimizer"),
    ):
        with pytest.raises(CheckpointError, match=told):
            train(_run(tree, "name=unmade", *words, change, from_steady))
    with pytest.raises(CheckpointError, match="optimizer=true loads a run as a whole"):
        train(_run(tree, "name=unmade", *words, from_steady[:-1] + ", allow_unused: ['x*']}"))
    part = f"{tmp_path}/steady/checkpoints/step-00000008/model.safetensors"
    with pytest.raises(CheckpointError, match=r"is one file of a checkpoint. Give its folder, .*step-00000008"):
        train(_run(tree, "name=unmade", f"start_from={part}"))
    assert not (tmp_path / "unmade").exists()
    train(_run(tree, "name=other", *words, "steps=1", from_steady))
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        train(_run(tree, "name=nowhere", *words, f"start_from={{checkpoint: {shards}, optimizer: true}}"))


@pytest.mark.parametrize(("vision", "text"), [("true", "blocks"), ("blocks", "true"), ("true", "false")])
def test_a_module_shared_by_towers_is_frozen_with_either(shards, tmp_path, vision, text):
    tree = tiny_recipe(shards, tmp_path)
    words = [
        "objective.model.readout={kind: fdt, codes: 8, width: 8}",
        f"objective.model.vision.freeze={vision}",
        f"objective.model.text.freeze={text}",
    ]
    frozen = build_objective(_run(tree, *words))
    shared = [p for n, p in frozen.named_parameters(remove_duplicate=False) if n.endswith("space_dict")]
    assert len(shared) == 2 and not any(p.requires_grad for p in shared)
    by_name = build_objective(_run(tree, words[0], "freeze=[model.text.*space_dict]"))
    assert not any(p.requires_grad for n, p in by_name.named_parameters() if n.endswith("space_dict"))


def test_a_run_starts_from_weights_and_resumes_without_them(shards, tmp_path, capsys):
    tree = tiny_recipe(shards, tmp_path, steps=3)
    train(_run(tree, "name=first", "objective.model.readout={kind: token}"))
    first = _model(tmp_path / "first", 3)
    shutil.copytree(tmp_path / "first", tmp_path / "gone")
    keep = "objective.model.readout.replace_last_block=false"
    with pytest.raises(
        CheckpointError,
        match=r"has no model.visual.sparo.*allow_missing.*has model.text.text_projection, model.visual.proj.*allow_unused",
    ):
        train(_run(tree, "name=second", keep, f"start_from={tmp_path}/gone"))
    assert not (tmp_path / "second/config.yaml").exists()
    start = f"start_from={{checkpoint: {tmp_path}/gone, allow_missing: [model.*.sparo.*], allow_unused: [model.visual.proj, '*.text_projection']}}"
    # Parts that would stay random are reported: a new part that is frozen, nothing loaded, a typing error.
    nothing = "start_from={checkpoint: pixels:32, allow_missing: ['*'], allow_unused: ['*']}"
    typing = start.replace("model.*.sparo.*", "'model.*.sparo.*', model.typo.*")
    for words, told in (
        (
            [start, "objective.model.vision.freeze=true"],
            r"has no model.visual.sparo.*which is frozen here and would keep its random",
        ),
        (
            [nothing, "objective.mean=[0, 0, 0]", "objective.std=[1, 1, 1]"],
            "has no tensor of the run, so everything would start at random",
        ),
        ([typing], r"start_from.allow_missing: model.typo.\* matches no tensor of the run"),
    ):
        with pytest.raises(CheckpointError, match=told):
            train(_run(tree, "name=second", keep, *words))
    with pytest.raises(ConfigError, match="matches no trained parameter"):
        train(_run(tree, "name=idle", "optim.groups=[{match: [nothing.*], lr_factor: 2}]"))
    assert not (tmp_path / "idle").exists()
    slow = ["optim.lr=1e-30", "optim.weight_decay=0", "name=second", keep]
    train(_run(tree, *slow, start, "stop_after_steps=1"))
    second = _model(tmp_path / "second", 1)
    shared = [name for name in second if name in first]
    assert len(shared) > 40 and all(torch.allclose(first[n], second[n], rtol=0, atol=1e-20) for n in shared)
    assert "start_from: " in capsys.readouterr().err
    assert "start_from: " in (tmp_path / "second/log.txt").read_text()
    shutil.rmtree(tmp_path / "gone")  # a run that has a checkpoint does not look for it
    train(_run(tree, *slow, start))
    other = ["objective.model.readout={kind: token}", "objective.model.text.heads=4", f"start_from={tmp_path}/first"]
    with pytest.raises(CheckpointError, match="has 2 attention heads, but the model of the run has 4"):
        train(_run(tree, "name=heads", *other))
    # larger images: positions are interpolated; a DINO backbone initialises both networks
    large = [*slow[:2], "name=large", "objective.model.readout={kind: token}", "objective.model.vision.image_size=64"]
    train(_run(tree, *large, f"start_from={tmp_path}/first", "steps=1", "optim.warmup_steps=0"))
    assert _model(tmp_path / "large", 1)["model.visual.positional_embedding"].shape == (17, 32)
    dino = dino_recipe(shards, tmp_path, steps=1)
    dino["optim"]["warmup_steps"] = 0
    train(_run(dino, "name=backbone"))
    frozen = _run(dino, "name=from_backbone", f"start_from={tmp_path}/backbone", "freeze=[student.backbone.*]")
    train(frozen)
    held = [_model(tmp_path / name, 1) for name in ("backbone", "from_backbone")]
    names = [name for name in held[0] if name.startswith("student.backbone.")]
    assert names and all(torch.equal(held[0][n], held[1][n]) for n in names)


def _small(**changes):
    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 3, "head_width": 16}
    text = {"context_length": 16, "width": 32, "heads": 2, "layers": 3}
    tree = {"vision": vision, "text": text, "embed_dim": 24, "readout": {"kind": "token"}}
    return Clip(ClipConfig.model_validate({**tree, **changes})).eval()


def test_towers_of_other_libraries_give_their_own_encodings(tmp_path, shards):
    """Weights of CLIP from timm and transformers in our towers compute the same function."""
    torch.manual_seed(0)
    image = torch.randn(2, 3, 32, 32)
    name = "vit_base_patch16_clip_224"
    theirs = timm.create_model(
        name, img_size=32, embed_dim=32, depth=3, num_heads=2, num_classes=0, global_pool="token"
    )
    ours = _small()
    found = tower_weights(theirs.state_dict(), "visual", "x")
    missing = ours.visual.load_state_dict(found, strict=False)
    assert missing.missing_keys == ["proj"] and not missing.unexpected_keys
    ours.visual.proj = None
    torch.testing.assert_close(ours.visual(image), theirs.eval()(image))
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_act": "gelu",
    }
    text = {**sizes, "max_position_embeddings": 16, "vocab_size": 49408, "eos_token_id": 49407, "bos_token_id": 49406}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    hf = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).eval()
    ours = _small()
    for part, tower in (("visual", ours.visual), ("text", ours.text)):
        tower.load_state_dict(tower_weights(hf.state_dict(), part, "x"))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    tokens[:, :4] = torch.tensor([49406, 320, 1125, 49407])
    for mine, other in (
        (ours.visual(image), hf.visual_projection(hf.vision_model(image).pooler_output)),
        (ours.text(tokens), hf.text_projection(hf.text_model(tokens).pooler_output)),
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="patch embedding has a bias, or there is no norm before the blocks"):
        tower_weights(timm.create_model("vit_tiny_patch16_224").state_dict(), "visual", "x")
    with pytest.raises(CheckpointError, match="x: has no text tower of a CLIP"):
        tower_weights(theirs.state_dict(), "text", "x")


def test_a_transformers_clip_is_what_a_run_begins_with(tmp_path):
    """A folder of transformers, named as a user types it: either tower with its projection, or both with the temperature."""
    folder = tmp_path / "hf"
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {"max_position_embeddings": 16, "vocab_size": 49408, "eos_token_id": 49407, "bos_token_id": 49406}
    config = CLIPConfig(
        text_config={**sizes, **text, "hidden_act": "gelu"},
        vision_config={**sizes, "image_size": 32, "patch_size": 16, "hidden_act": "gelu"},
        projection_dim=24,
        logit_scale_init_value=3.25,
    )
    hf = CLIPModel(config).eval()
    hf.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    tree = tiny_recipe(tmp_path / "shards", tmp_path)
    tree["objective"] = {"model": _small().config.model_dump(mode="json", exclude_defaults=True)}

    def begun(*words):
        config = _run(tree, *words)
        objective = build_objective(config)
        with logged() as said:
            load_initial_weights(config.objective, config.start_from, objective)
        return objective.model.eval(), " ".join(said)

    image, tokens = torch.randn(2, 3, 32, 32), torch.zeros(2, 16, dtype=torch.int64)
    tokens[:, :4] = torch.tensor([49406, 320, 1125, 49407])
    wanted = (
        hf.visual_projection(hf.vision_model(image).pooler_output),
        hf.text_projection(hf.text_model(tokens).pooler_output),
    )
    inits = [f"objective.model.{part}.init_from=hf:{folder}" for part in ("vision", "text")]
    for words in (inits, [f"start_from=hf:{folder}"]):
        ours, said = begun(*words)
        for mine, theirs in zip((ours.visual(image), ours.text(tokens)), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert "newly initialized" not in said
    assert ours.logit_scale.item() == 3.25
    wider = ["objective.model.embed_dim=20", inits[0]]
    assert "newly initialized: proj" in begun(*wider)[1]
    with pytest.raises(
        CheckpointError,
        match=r"has no tensors that match proj of the new run, and `freeze` would leave the new run's unmatched tensors",
    ):
        begun(*wider, "objective.model.vision.freeze=true")
    assert "newly initialized" not in begun(inits[0], "objective.model.vision.freeze=true")[1]
    # A folder without a text tower is still an image tower.
    hf.vision_model.save_pretrained(tmp_path / "seen")
    shutil.copy(folder / "preprocessor_config.json", tmp_path / "seen")
    assert "newly initialized: proj" in begun(f"objective.model.vision.init_from=hf:{tmp_path}/seen")[1]
    with pytest.raises(CheckpointError, match="has no text tower of a CLIP"):
        begun(f"objective.model.text.init_from=hf:{tmp_path}/seen")


def test_a_tower_from_elsewhere_is_locked_while_the_other_learns(tmp_path, shards, capsys):
    """LiT: the image tower of a file is frozen; `init_from` fits a readout that replaces the last block."""
    donor = _small()
    donor.visual.positional_embedding.data.normal_()
    save_file(donor.state_dict(), tmp_path / "donor.safetensors")
    tree = tiny_recipe(shards, tmp_path, steps=3)
    tree["objective"]["model"]["vision"] |= {
        "layers": 3,
        "init_from": str(tmp_path / "donor.safetensors"),
        "freeze": "blocks",
    }
    tree["objective"]["model"]["text"]["layers"] = 3
    with pytest.raises(CheckpointError, match=r"number of heads is unknown, .* width 32"):
        train(_run(tree, "name=unknown"))
    (tmp_path / "donor").mkdir()
    openclip.export(donor.config, donor.state_dict(), tmp_path / "donor", (0.5,) * 3, (0.5,) * 3)
    init = f"objective.model.vision.init_from={tmp_path}/donor"
    with pytest.raises(CheckpointError, match=r"Set objective.mean=\[0.5, 0.5, 0.5\] and objective.std="):
        train(_run(tree, "name=colours", init))
    openclip.export(donor.config, donor.state_dict(), tmp_path / "donor", OPENAI_MEAN, OPENAI_STD)
    train(_run(tree, "name=lit", init))
    said = " ".join(capsys.readouterr().err.split())
    for change, why in (
        (
            "objective.model.quick_gelu=true",
            "trained without OpenAI's approximation of GELU. Set objective.model.quick_gelu=false",
        ),
        ("objective.model.vision.head_width=8", "has 2 attention heads, but the model of the run has 4"),
    ):
        with pytest.raises(CheckpointError, match=why):
            train(_run(tree, "name=unlike", init, change))
        with pytest.raises(CheckpointError, match=why):
            train(
                _run(
                    tree, "name=unlike", change, "objective.model.vision.init_from=null", f"start_from={tmp_path}/donor"
                )
            )
    lost = {**donor.state_dict(), "visual.ln_post.weight": torch.full((32,), torch.nan)}
    openclip.export(donor.config, lost, tmp_path / "lost", OPENAI_MEAN, OPENAI_STD)
    with pytest.raises(CheckpointError, match=r"ln_post.weight: has values that are not finite"):
        train(_run(tree, "name=unlike", f"objective.model.vision.init_from={tmp_path}/lost"))
    assert "newly initialized: sparo.q_emb" in said and "not used: proj, transformer.resblocks.2.ln_1.weight" in said
    after, before = _model(tmp_path / "lit", 3), donor.state_dict()
    blocks = [n for n in before if n.startswith("visual.") and f"model.{n}" in after and "ln_post" not in n]
    assert len(blocks) > 20 and all(torch.equal(after[f"model.{n}"], before[n]) for n in blocks)
    moments = store.read_part(tmp_path / "lit/checkpoints/step-00000003", "optimizer")
    trained_names = {name.rpartition("/")[0] for name in moments}
    assert {n for n in trained_names if n.startswith("model.visual.")} == {
        f"model.visual.{n}" for n in ("ln_post.weight", "ln_post.bias", "sparo.q_emb", "sparo.k.weight", "sparo.k.bias", "sparo.proj.weight", "sparo.proj.bias")
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"freeze: model\.vision\.\* matches no parameter"):
        build_objective(_run(tree, "freeze=[model.vision.*]"))
    with pytest.raises(ConfigError, match="freeze=3: exceeds the 2 blocks of the tower"):
        _run(tree, "objective.model.vision.freeze=3")


@pytest.mark.long
def test_frozen_parts_stay_on_every_engine(shards, tmp_path):
    tree = override(
        two_tree(shards, tmp_path),
        ["objective.model.vision.freeze=blocks", "freeze=[model.text.token_embedding.weight]"],
    )
    run_ranks(1, trained, tree, {"kind": "local", "device": "cpu", "precision": "fp32"}, 12, tmp_path / "alone")
    alone, begun = model_after(tmp_path / "alone"), build_objective(resolve(RunConfig, tree, "x")).state_dict()
    frozen = [
        n for n in begun if n.startswith(("model.visual.transformer", "model.visual.conv1", "model.text.token_emb"))
    ]
    assert len(frozen) > 10 and not torch.equal(
        alone["model.visual.sparo.k.weight"], begun["model.visual.sparo.k.weight"]
    )
    for number, engine in enumerate((DDP, FSDP2, ZERO_2, ZERO_3)):
        run_ranks(2, trained, tree, engine, 3, tmp_path / str(number))
        found = model_after(tmp_path / str(number))
        held = store.read_part(store.CheckpointStore(tmp_path / str(number)).latest(), "optimizer")
        assert held and not {name.rpartition("/")[0] for name in held} & set(frozen), engine
        assert all(torch.equal(found[n], begun[n]) for n in frozen), engine
        for name, value in alone.items():
            assert torch.allclose(value, found[name], rtol=1e-4, atol=2e-5), (engine, name)


def test_settings_that_train_nothing_are_refused():
    config = ClipObjectiveConfig(model=_small(readout={"kind": "sparo", "slots": 4}).config)
    shadowed = ({"match": ("model.visual.*",), "lr_factor": 0.1}, {"match": ("*visual.sparo.*",), "lr_factor": 5.0})
    with pytest.raises(
        ConfigError,
        match=r"optim.groups.1.match=\['\*visual.sparo.\*'\]: all matching parameters already belong",
    ):
        build_optimizer(AdamWConfig(groups=shadowed), ClipObjective(config))
    build_optimizer(AdamWConfig(groups=shadowed[::-1]), ClipObjective(config))
    still = ClipObjective(config)
    still.model.visual.requires_grad_(False)
    still.model.text.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"only model.logit_scale would be trained. Freeze less"):
        build_optimizer(AdamWConfig(), still)
    with pytest.raises(ValueError, match=r"optim.min_lr=0.01: must not be above optim.lr=0.001"):
        AdamWConfig(lr=1e-3, min_lr=1e-2)
    with pytest.raises(ValueError, match=r"true, false, blocks, or a number of blocks") as told:
        TextConfig.model_validate({"freeze": "block"})
    assert told.value.error_count() == 1


def test_rates_fall_from_layer_to_layer():
    config = ClipObjectiveConfig(model=_small(readout={"kind": "sparo", "slots": 4}).config)
    objective = ClipObjective(config)
    optimizer = build_optimizer(
        AdamWConfig(lr=1.0, layer_decay=0.5, groups=({"match": ("*q_emb",), "lr_factor": 4.0},)), objective
    )
    names = {id(p): n for n, p in objective.named_parameters()}
    rates = {names[id(p)]: group["lr_factor"] for group in optimizer.param_groups for p in group["params"]}
    expected = {
        "model.visual.conv1.weight": 0.5**3,
        "model.visual.transformer.resblocks.0.mlp.c_fc.weight": 0.5**2,
        "model.visual.transformer.resblocks.1.ln_1.bias": 0.5,
        "model.visual.ln_post.weight": 1.0,
        "model.visual.sparo.k.weight": 1.0,
        "model.visual.sparo.q_emb": 4.0,
        "model.text.token_embedding.weight": 0.5**3,
        "model.logit_scale": 1.0,
    }
    assert {name: rates[name] for name in expected} == expected and len(rates) == len(names)


def test_a_finished_run_names_the_options_to_continue_training(shards, tmp_path):
    tree = tiny_recipe(shards, tmp_path)
    train(_run(tree, "name=short"))
    with pytest.raises(ConfigError, match="contains a run of another recipe") as refused:
        train(_run(tree, "name=short", "steps=15"))
    advice = str(refused.value).rpartition("additional steps: ")[2].partition(". ")[0]
    words = [word.replace("NEW", "longer").replace("steps=N", "steps=3") for word in shlex.split(advice)]
    assert words[0] == "name=longer" and "steps=3" in words
    train(_run(tree, *words))
    before, after = (
        store.read_meta(tmp_path / f"{name}/checkpoints/step-{step:08d}")
        for name, step in (("short", 12), ("longer", 3))
    )
    assert after["samples"] == 24 and before["cursor"] != after["cursor"]
    with pytest.raises(ConfigError, match=r"steps: 12 -> 8\n.*Give a shorter run another name="):
        train(_run(tree, "name=short", "steps=8"))
    # A run whose newest checkpoint is incomplete serves with an older one, and a message reports this.
    (tmp_path / "short/checkpoints/step-00000013").mkdir()
    for number, start in enumerate(
        (str(tmp_path / "short"), {"checkpoint": str(tmp_path / "short"), "optimizer": True})
    ):
        config = _run({**tree, "start_from": start}, f"name=doubt{number}", "steps=3", "optim.warmup_steps=0")
        train(config)
        log = (config.folder / "log.txt").read_text()
        assert "start_from: " in log and "step-00000013: is incomplete; step-00000012 is read instead" in log
    # With another learning rate as well, it is an ordinary other run, and the message does not mention this.
    with pytest.raises(ConfigError, match="Use another name="):
        train(_run(tree, "name=short", "steps=15", "optim.lr=5"))


def test_weights_of_another_activation_are_refused():
    plain, relu = torch.nn.Sequential(torch.nn.GELU()), torch.nn.Sequential(torch.nn.ReLU())
    refuse_unlike("x", plain, plain)
    refuse_unlike("x", relu, relu)
    for other, name in ((relu, "relu"), (torch.nn.GELU("tanh"), "gelu_tanh")):
        with pytest.raises(
            CheckpointError, match=rf"x: was trained with the activation {name}, which the model of the run does not"
        ):
            refuse_unlike("x", other, plain)
