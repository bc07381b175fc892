import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.views.sizes import resolved_lines
from sparo_train.core.config import differences, dump, resolve
from sparo_train.core.errors import ConfigError
from sparo_train.core.recipe.layers import load_recipe, merge, origins, override
from sparo_train.core.recipe.recipe_yaml import parse_yaml
from sparo_train.train.build import build_pipeline
from sparo_train.train.dry_run import dry_run
from sparo_train.train.run_config import RunConfig, load_run
from tests.helpers.recipes import dino_recipe, tiny_recipe


@pytest.fixture
def tree(tmp_path):
    return tiny_recipe(tmp_path / "shards", tmp_path / "runs")


def test_extends_merges_parents_first_and_the_command_line_last(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: 2}\nb: 1\n")
    (tmp_path / "sub" / "child.yaml").write_text("extends: ../base.yaml\na: {y: 3}\n")
    tree = override(load_recipe(tmp_path / "sub" / "child.yaml"), ["a.x=5e-4", "c.d=[1, two]"])
    assert tree == {"a": {"x": 5e-4, "y": 3}, "b": 1, "c": {"d": [1, "two"]}}


def test_one_way_to_give_the_length_replaces_the_others(tree):
    assert (tree["steps"], tree.get("epochs")) == (12, None)
    for word in ("epochs=3", "samples=4_800", "steps=5"):
        key, _, value = word.partition("=")
        config = resolve(RunConfig, override(tree, [word], RunConfig), "recipe.yaml")
        lengths = {name: getattr(config, name) for name in RunConfig.alternatives}
        assert lengths == {**dict.fromkeys(lengths), key: int(value)}
    # Two lengths on one command line contradict each other, and removing one leaves none.
    for words in (["steps=5", "epochs=3"], ["steps=null"]):
        with pytest.raises(ConfigError, match="exactly one of steps, epochs, samples"):
            resolve(RunConfig, override(tree, words, RunConfig), "recipe.yaml")


def test_a_typed_name_takes_precedence_over_values_of_the_recipe(shards, tmp_path):
    def model(tree, *words):
        return resolve(RunConfig, override(tree, words, RunConfig), "x").objective.model

    dino = dino_recipe(
        shards, tmp_path
    )  # width 32, depth 3, heads 2, and readout, image_size and patch_size, which stay
    found = model(dino, "objective.model.arch=vit_tiny")
    assert (found.width, found.depth, found.heads, found.image_size) == (192, 12, 3, 32)
    assert found.readout == model(dino).readout
    for words in (
        ["arch=vit_tiny", "depth=5"],
        ["depth=5", "arch=vit_tiny"],
    ):  # a key on the same command line takes precedence
        found = model(dino, *(f"objective.model.{word}" for word in words))
        assert (found.width, found.depth, found.heads) == (192, 5, 3)
    clip = tiny_recipe(shards, tmp_path)
    found = model(clip, "objective.model.backbone=ViT-S-16")
    assert (found.vision.width, found.vision.layers, found.text.width, found.text.heads) == (384, 12, 384, 6)
    assert (found.vision.image_size, found.text.context_length) == (32, model(clip).text.context_length)
    # In files, keys take precedence, as before.
    named = merge(clip, {"objective": {"model": {"backbone": "ViT-S-16"}}})
    assert model(named).vision.width == model(clip).vision.width


def test_a_new_kind_replaces_the_block_and_an_empty_mapping_clears_it():
    assert merge({"r": {"kind": "sparo", "slots": 4}}, {"r": {"kind": "gap"}}) == {"r": {"kind": "gap"}}
    assert merge({"r": {"kind": "sparo", "slots": 4}}, {"r": {"kind": "sparo"}}) == {"r": {"kind": "sparo", "slots": 4}}
    assert merge({"t": {"a": 1}}, {"t": {}}) == {"t": {}}


def test_circles_and_missing_parents_are_named(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="is circular"):
        load_recipe(tmp_path / "a.yaml")
    (tmp_path / "d.yaml").write_text("extends:\n")
    with pytest.raises(ConfigError, match=r"d\.yaml: extends: expected a path"):
        load_recipe(tmp_path / "d.yaml")
    (tmp_path / "c.yaml").write_text("extends: aa.yaml\n")
    with pytest.raises(ConfigError, match=r"aa\.yaml: no such recipe; did you mean 'a\.yaml'"):
        load_recipe(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.lrr=1", r"optim\.lrr: unknown key; did you mean 'lr'\?"),
        ("objective.model.readout.slot=1", r"objective\.model\.readout\.slot: unknown key; did you mean 'slots'\?"),
        ("data.sources.a.weigth=1", r"data\.sources\.a\.weigth: unknown key; did you mean 'weight'\?"),
        ("stepps=1", r"stepps: unknown key; did you mean 'steps'\?"),
        ("optim.lr=fast", r"optim\.lr: .*number.*'fast'"),
        ("optim.lr=-1", r"optim\.lr: .*greater than 0"),
        ("batch_size=1.5", r"batch_size: .*integer"),
        ("objective.model.readout.kind=sparro", r"objective\.model\.readout.*'sparro'"),
        ("objective.model.backbone=ViT-B-61", r"unknown backbone 'ViT-B-61'; did you mean 'ViT-B-16'"),
        ("objective.model.vision.patch_size=15", r"vision\.patch_size=15 does not divide vision\.image_size=32"),
        ("objective.model.readout.grp_size=3", r"readout\.grp_size=3 does not divide readout\.slots=4"),
        ("steps=null", "exactly one of steps, epochs, samples"),
        ("name=../x", r"name: .*pattern"),
    ],
)
def test_mistakes_name_key_value_and_remedy(tree, change, message):
    with pytest.raises(ConfigError, match=message):
        resolve(RunConfig, override(tree, [change]), "recipe.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim.lr", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("steps.x=1", "steps is 12, not a block"),
        ("a=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_are_explained(tree, text, message):
    with pytest.raises(ConfigError, match=message):
        override(tree, [text])


def test_the_resolved_recipe_reads_back_equal_and_is_frozen(tree):
    config = resolve(RunConfig, tree, "recipe")
    assert resolve(RunConfig, parse_yaml(dump(config), "x"), "x") == config
    with pytest.raises(Exception, match="frozen"):
        config.optim.lr = 1.0


def test_a_backbone_fills_what_the_recipe_leaves_open(tree):
    tree["objective"]["model"] = {"backbone": "ViT-B-16", "text": {"context_length": 32}}
    model = resolve(RunConfig, tree, "recipe").objective.model
    assert (model.vision.patch_size, model.vision.width, model.text.context_length, model.text.width) == (
        16,
        768,
        32,
        512,
    )


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tree):
    config = resolve(RunConfig, override(tree, ["objective.model.text.vocab_size=1000"]), "x")
    with pytest.raises(ConfigError, match=r"objective\.model\.text\.vocab_size=1000: CLIP's tokenizer has 49408 ids"):
        build_pipeline(config)


def test_an_epoch_of_fractional_weights_is_counted_as_it_is_read(tree, shards):
    half = {"shards": str(shards / "00000.tar"), "weight": 0.45}
    tree["data"] = {**tree["data"], "sources": dict.fromkeys("abc", half)}
    config = resolve(RunConfig, tree, "x")
    dry = dry_run(config)
    assert dry.epoch_size == build_pipeline(config).plan.epoch_size == 3 * 11
    assert dry.warnings == []
    (warning,) = dry_run(config.model_copy(update={"batch_size": 88})).warnings
    assert "the data has only 72." in warning


def test_yaml_cannot_create_objects(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("a: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_recipe(path)


def test_length_of_a_run_in_steps_samples_and_epochs(tree):
    for key, value, steps in (("samples", 80, 10), ("epochs", 2.5, 30)):
        config = resolve(RunConfig, {**tree, "steps": None, key: value}, "recipe")
        assert config.total_steps(96) == steps
    with pytest.raises(ConfigError, match="warmup_steps=2 must be below"):
        resolve(RunConfig, {**tree, "steps": 2}, "recipe").total_steps(96)


def test_a_recipe_without_a_name_is_named_after_its_file(tree, tmp_path, write_recipe):
    tree.pop("name")
    assert load_run(write_recipe(tree)).name == "recipe"


def test_a_word_of_the_command_line_replaces_and_adds_only_with_a_plus(tree):
    """Such a mapping is merged, so it would silently train on the recipe's own data, too."""
    own = {"mine": {"shards": "data/mine"}}
    assert override(tree, ["data.sources={mine: {shards: data/mine}}"], RunConfig)["data"]["sources"] == own
    refused = r"data\.sources has a and no 'mine'. Write \+data\.sources\.mine\.shards=data/mine to add it, "
    refused += r"or data\.sources='\{mine: \{shards: data/mine\}\}'"
    with pytest.raises(ConfigError, match=refused):
        override(tree, ["data.sources.mine.shards=data/mine"], RunConfig)
    both = override(tree, ["+data.sources.mine.shards=data/mine", "data.sources.mine.weight=2"], RunConfig)
    assert both["data"]["sources"] == {**tree["data"]["sources"], "mine": {"shards": "data/mine", "weight": 2}}
    assert (
        override(tree, ["+data.sources={mine: {shards: data/mine}}", "data.sources.a=null"], RunConfig)["data"][
            "sources"
        ]
        == own
    )
    with pytest.raises(ConfigError, match=r"data\.sources has no 'b'; known: a"):
        override(tree, ["data.sources.b=null"], RunConfig)
    with pytest.raises(ConfigError, match=r"data\.sources: is empty; at least one entry is needed"):
        resolve(RunConfig, override(tree, ["data.sources.a=null"], RunConfig), "x")
    # for tasks, too; the first element is not added to anything, so it is not ambiguous
    once = override(tree, ["eval.tasks.near={task: knn, root: x}"], RunConfig)
    with pytest.raises(ConfigError, match=r"eval\.tasks has near and no 'far'"):
        override(once, ["eval.tasks.far.task=knn"], RunConfig)
    assert override(once, ["eval.tasks.near.task=probe"], RunConfig)["eval"]["tasks"] == {"near": {"task": "probe"}}
    # a block without names is replaced, too, and its fields need no plus
    assert override(tree, ["optim={lr: 1}", "optim.eps=1e-7"], RunConfig)["optim"] == {"lr": 1, "eps": 1e-7}


def test_a_recipe_can_remove_keys_of_its_parent(tmp_path, tree, write_recipe):
    parent = write_recipe(tree)
    (tmp_path / "child.yaml").write_text(f"extends: {parent}\ndata: {{sources: {{a: null, b: {{shards: x}}}}}}\n")
    assert list(load_run(tmp_path / "child.yaml").data.sources) == ["b"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--optim.lr=1e-3", r"--optim\.lr=1e-3: no such option; write optim\.lr=1e-3"),
        ("--steps", "write steps=VALUE"),
        ("--drry", "did you mean '--dry-run'"),
    ],
)
def test_a_key_written_as_an_option_explains_the_syntax(tree, word, message):
    with pytest.raises(ConfigError, match=message):
        override(tree, [word], RunConfig)


def test_the_error_for_a_misplaced_key_names_its_block(tree):
    with pytest.raises(ConfigError, match=r"lr: unknown key; did you mean 'optim\.lr'\?"):
        resolve(RunConfig, override(tree, ["lr=1"], RunConfig), "x")
    with pytest.raises(
        ConfigError, match=r"did you mean 'objective\.model\.vision\.width' or 'objective\.model\.text\.width'"
    ):
        resolve(RunConfig, override(tree, ["width=1"], RunConfig), "x")
    with pytest.raises(ConfigError, match="unknown key"):  # for any content of the blocks
        resolve(RunConfig, {**tree, "objective": "x", "data": {"sources": 3}, "lr": 1}, "x")


def test_every_value_of_a_resolved_recipe_has_its_origin(tmp_path, tree, write_recipe):
    parent = write_recipe({**tree, "optim": {"lr": 1e-3, "warmup_steps": 1}})
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {parent}\noptim: {{warmup_steps: 2}}\n")
    words = ["optim.eps=1e-7", "objective.model={backbone: ViT-B-32}"]
    config = load_run(child, words)
    lines = resolved_lines(config, origins(child, words, RunConfig))
    assert resolve(RunConfig, parse_yaml("\n".join(lines), "x"), "x") == config
    told = {line.partition("#")[0].strip(): line.partition("# ")[2] for line in lines}
    assert told["lr: 0.001"] == str(parent) and told["warmup_steps: 2"] == str(child)
    assert told["eps: 1.0e-07"] == "command line: optim.eps=1e-7" and told["schedule: cosine"] == "default"
    assert told["backbone: ViT-B-32"] == f"command line: {words[1]}" and "follows" in told.values()


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc=.{}[]: ", max_size=8)


@given(st.dictionaries(st.sampled_from("abcd"), scalars | st.dictionaries(st.sampled_from("xyz"), scalars), max_size=4))
def test_differences_are_empty_exactly_for_equal_trees(tree):
    assert differences(tree, tree) == []
    assert len(differences({"k": 1, **{"t": tree}}, {"k": 2, **{"t": tree}})) == 1
