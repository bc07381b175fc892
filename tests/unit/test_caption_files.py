"""Retrieval sets of long captions and of several languages, in their published files."""

import json

import pytest

from evals.feature_store.features import FeatureStore
from evals.suite import catalogue
from evals.suite.suite import Suite
from sparo_train.core.errors import ConfigError, DataError
from tests.helpers.compositional import BagOfWords, picture


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def root(tmp_path):
    for i in range(4):
        write(tmp_path / f"urban1k/caption/{i}.txt", f"A street {i}.  \nmore that is not read\n")
        picture(tmp_path / f"urban1k/image/{i}.jpg", i)
        annotation = {
            "image": f"sa_{i}.jpg",
            "short_caption": f"A yard {i}.",
            "extra_caption": "It is wide.\nAnd \n\n empty </s> now",
            "mask_data": {},
        }
        write(tmp_path / f"dci/densely_captioned_images/annotations/{i}.json", json.dumps(annotation))
        picture(tmp_path / f"dci/densely_captioned_images/photos/sa_{i}.jpg", i)
    lines = [
        {
            "example_id": f"test_{i}",
            "split": "test" if i else "train",
            "image_file": f"{i}.jpg",
            "description": f"a\u2028{i}",
        }
        for i in range(4)
    ]
    write(
        tmp_path / "docci/docci_descriptions.jsonlines",
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines),
    )
    items = [
        {"image": f"sam/images/sa_{i}.jpg", "conversations": [{"value": "?"}, {"value": f"one\ntwo {i}"}]}
        for i in range(1003)
    ]
    write(tmp_path / "sharegpt4v_1k/share-captioner_coco_lcs_sam_1246k_1107.json", json.dumps(items))
    keys = ("de", "en")
    rows = [{"image/key": f"k{i}", **{key: {"caption": [f"{key} {i}", "second"]} for key in keys}} for i in range(3)]
    write(tmp_path / "crossmodal3600/captions.jsonl", "\n".join(map(json.dumps, rows)) + "\n")
    names = ["COCO_train2014_000000000001.jpg", "COCO_val2014_000000000002.jpg"]
    write(tmp_path / "xtd10/XTD10/test_image_names.txt", "\n".join(names) + "\n")
    write(tmp_path / "xtd10/MIC/test_1kcaptions_de.txt", "ein Haus\u2028 am See\nzwei\n")
    write(tmp_path / "xtd10/MIC/test_1kcaptions_en.txt", "a house\n")
    for name, folder in zip(names, ("train2014", "images"), strict=True):
        picture(tmp_path / f"xtd10/{folder}/{name}", 1)
    for i in range(3):
        picture(tmp_path / f"crossmodal3600/images/k{i}.jpg", i)
        picture(tmp_path / f"docci/images/{i + 1}.jpg", i)
    return tmp_path


def opened(name, root):
    from evals.sets.open_set import open_set

    (task,) = catalogue.tasks(name, root).values()
    return open_set(task, "captions")


def test_captions_are_those_of_the_authors_scripts(root):
    assert [fact for _, _, fact in opened("urban1k", root)] == [[f"A street {i}."] for i in range(4)]
    (first, *_) = opened("dci", root)
    assert first[0] == "photos/sa_0.jpg" and first[2] == ["A yard 0. It is wide. And. empty. now"]
    assert [(key, fact) for key, _, fact in opened("docci", root)] == [
        (f"images/{i}.jpg", [f"a\u2028{i}"]) for i in (1, 2, 3)
    ]
    share = opened("sharegpt4v_1k", root)
    assert len(share) == 1000 and share.describe(999) == ("sam/images/sa_999.jpg", ["one two 999"])
    assert [fact for _, _, fact in opened("crossmodal3600/de", root)] == [["de 0"], ["de 1"], ["de 2"]]
    found = [(key, fact) for key, _, fact in opened("xtd10/de", root)]
    assert found == [
        ("train2014/COCO_train2014_000000000001.jpg", ["ein Haus\u2028 am See"]),
        ("images/COCO_val2014_000000000002.jpg", ["zwei"]),
    ]


def test_languages_are_sets_whose_images_are_encoded_once(root, tmp_path):
    tasks = catalogue.tasks("crossmodal3600", root)
    assert len(tasks) == 36 and tasks["crossmodal3600/no"].split == "no"
    encoder, both = (
        BagOfWords(),
        {name: tasks[name].model_copy(update={"k": (1,)}) for name in ("crossmodal3600/en", "crossmodal3600/de")},
    )
    results = Suite(both, FeatureStore(tmp_path / "store")).run(encoder)
    assert encoder.num_images == 3 and {result.n for result in results.values()} == {3}
    with pytest.raises(DataError, match=r"captions\.jsonl, line 1: has no caption in fr"):
        opened("crossmodal3600/fr", root)
    with pytest.raises(DataError, match=r"test_1kcaptions_en\.txt: has 1 lines, but there are 2 images"):
        opened("xtd10/en", root)
    (task,) = catalogue.tasks("xtd10/de", root).values()
    from evals.sets.open_set import open_set

    with pytest.raises(ConfigError, match=r"split: XTD10 has no language dee; did you mean 'de'"):
        open_set(task.model_copy(update={"split": "dee"}), "captions")


@pytest.mark.parametrize(
    ("name", "file", "content", "match"),
    [
        ("urban1k", "urban1k/caption/0.txt", "\nlate", r"0\.txt: has no caption in its first line"),
        ("dci", "dci/densely_captioned_images/annotations/0.json", '{"image": "a"}', r"0\.json: lacks 'short_caption'"),
        ("docci", "docci/docci_descriptions.jsonlines", '{"split": "test"}', r"line 1: lacks 'description'"),
        ("docci", "docci/docci_descriptions.jsonlines", "{}", r"has no line of split test"),
        ("sharegpt4v_1k", "sharegpt4v_1k/share-captioner_coco_lcs_sam_1246k_1107.json", "[3]", r"entry 0: does not have the form of ShareGPT4V"),
        ("crossmodal3600/de", "crossmodal3600/captions.jsonl", "[]", r"line 1"),
        ("crossmodal3600/de", "crossmodal3600/captions.jsonl", '{"image/key": "../../x", "de": {"caption": ["a"]}}', r"expected names of images"),
    ],
)  # fmt: skip
def test_odd_files_are_named(name, file, content, match, root):
    write(root / file, content)
    with pytest.raises(DataError, match=match):
        opened(name, root)


def test_captions_of_several_images_are_counted(tmp_path):
    """Equal captions of one image are no problem: any of them counts as right."""
    for name, text in (("a", "a dog"), ("b", "a dog"), ("c", "a cat")):
        write(tmp_path / f"urban1k/caption/{name}.txt", f"{text}\n")
        picture(tmp_path / f"urban1k/image/{name}.jpg", ord(name))
    tasks = {"urban1k": catalogue.tasks("urban1k", tmp_path)["urban1k"].model_copy(update={"k": (1,)})}
    (result,) = Suite(tasks).run(small_clip()).values()
    assert result.counts["shared_captions"] == 2
    assert any("2 of 3 captions also belong to another image" in remark for remark in result.remarks())
    write(tmp_path / "urban1k/caption/b.txt", "a bird\n")
    (result,) = Suite(tasks).run(small_clip()).values()
    assert "shared_captions" not in result.counts


def small_clip():
    from evals.encoders.clip_encoder import ClipEncoder
    from sparo_train.models.clip_config import ClipConfig
    from sparo_train.models.clip_model import Clip

    text = {"width": 32, "layers": 1, "heads": 2, "context_length": 12}
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16}
    return ClipEncoder(
        Clip(ClipConfig.model_validate({"embed_dim": 32, "vision": vision, "text": text, "readout": {"kind": "token"}}))
    )


def test_captions_that_fill_the_context_are_counted(tmp_path):
    write(
        tmp_path / "urban1k/caption/a.txt",
        "a very long caption of a street with more words than the text tower can read\n",
    )
    write(tmp_path / "urban1k/caption/b.txt", "short\n")
    for name in "ab":
        picture(tmp_path / f"urban1k/image/{name}.jpg", ord(name))
    tasks = {"urban1k": catalogue.tasks("urban1k", tmp_path)["urban1k"].model_copy(update={"k": (1,)})}
    (result,) = Suite(tasks).run(small_clip()).values()
    assert result.counts["captions_at_limit"] == 1
    assert any("1 of 2 captions reach the largest number of tokens" in remark for remark in result.remarks())
