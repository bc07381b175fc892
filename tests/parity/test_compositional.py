"""Compositional sets in their published files, compared with restatements of the authors' scores, on an encoder with exact ties."""

import ast
import csv
import io
import json
from collections import defaultdict

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torch.nn import functional as F

from evals.feature_store.features import FeatureStore
from evals.sets.question_files import open_valse
from evals.suite import catalogue
from evals.suite.suite import Suite
from tests.helpers import compositional as made


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("compositional")
    for write in made.WRITERS:
        write(root)
    return root


@pytest.fixture(scope="module")
def scored(root):
    listed = [entry for entry in catalogue.datasets() if entry.group == "compositional"]
    names = [entry.name for entry in listed if catalogue.check_presence(entry, root).state != "absent"]
    tasks = {name: task for name in names for _, task in catalogue.tasks(name, root).items()}
    return Suite(tasks, FeatureStore()).run(made.BagOfWords())


@pytest.fixture(scope="module")
def similarity(root):
    encoder, images = made.BagOfWords(), {}

    def cosine(image, text):
        if not isinstance(image, Image.Image):
            image = images.setdefault(image, Image.open(image).convert("RGB"))
        return encoder.similarity(image, text)

    return cosine


def winoground_scores(rows):
    """Return text, image and group scores as in Thrush et al. (2022), and GroupMatch, for [[s(i0,c0), s(i0,c1)], [s(i1,c0), s(i1,c1)]]."""
    text = [a[0] > a[1] and b[1] > b[0] for a, b in rows]
    image = [a[0] > b[0] and b[1] > a[1] for a, b in rows]
    match = [a[0] + b[1] > a[1] + b[0] for a, b in rows]
    group = [one and other for one, other in zip(text, image, strict=True)]
    return {
        name: np.mean(of) for name, of in {"text": text, "image": image, "group": group, "group_match": match}.items()
    }


def squares(similarity, items):
    return [[[similarity(image, text) for text in texts] for image in images] for images, texts in items]


def test_sets_of_two_images_and_two_captions(root, scored, similarity):
    folder = root / "winoground"
    lines = [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]
    items = {"winoground": [
        ([folder / f"images/{row[f'image_{k}']}.png" for k in (0, 1)], [row["caption_0"], row["caption_1"]]) for row in lines
    ]}  # fmt: skip
    folder = root / "colorswap"
    items["colorswap"] = [
        ([folder / row["image_1"], folder / row["image_2"]], [row["caption_1"], row["caption_2"]])
        for row in json.loads((folder / "test.json").read_text())
    ]
    table = pq.read_table(next((root / "bivlc/data").glob("*.parquet"))).to_pylist()
    items["bivlc"] = [
        ([Image.open(io.BytesIO(row[name]["bytes"])) for name in ("image", "negative_image")], [row["caption"], row["negative_caption"]])
        for row in table
    ]  # fmt: skip
    for name, rows in items.items():
        expected = winoground_scores(squares(similarity, rows))
        found = scored[name]
        assert {metric: found.metrics[metric] for metric in expected} == pytest.approx(expected), name
        assert found.headline == "group" and found.n == len(rows) and found.chance == pytest.approx(1 / 6)
        assert found.options["chance_group_match"] == pytest.approx(0.5)
    assert scored["winoground"].metrics.keys() >= {"group/Object", "image/Relation"}
    kinds = [row["type"] for row in table]
    rows = [row for row, kind in zip(squares(similarity, items["bivlc"]), kinds, strict=True) if kind == "swap"]
    assert scored["bivlc"].metrics["group/swap"] == pytest.approx(winoground_scores(rows)["group"])


def test_sets_whose_captions_choose_images(root, scored, similarity):
    folder = root / "mmvp_vlm"
    with (folder / "Questions.csv").open() as stream:
        rows = list(csv.reader(stream))[1:]
    right = defaultdict(list)
    for (id1, kind, first), (id2, _, second) in zip(rows[::2], rows[1::2], strict=True):
        images = [folder / "MLLM_VLM Images" / kind / f"{number}.jpg" for number in (id1, id2)]
        picks = [np.argmax([similarity(image, f"a photo of {text}") for image in images]) for text in (first, second)]
        right[kind].append(picks == [0, 1])
    found = scored["mmvp_vlm"]
    assert found.value == pytest.approx(np.mean(right["Color"] + right["Spatial"])) and found.headline == "image"
    assert found.metrics["image/Color"] == pytest.approx(np.mean(right["Color"]))
    folder, right = root / "cola", []
    for url1, first, url2, second in json.loads(
        (folder / "data/COLA_multiobjects_matching_benchmark.json").read_text()
    ):
        images = [next(folder.glob(f"*/{url.rpartition('/')[2]}")) for url in (url1, url2)]
        (a, b), (c, d) = [[similarity(image, text) for text in (first, second)] for image in images]
        right.append(a > c and d > b)
    assert scored["cola"].value == pytest.approx(np.mean(right)) and scored["cola"].chance == pytest.approx(0.25)
    folder, right = root / "svo_probes", defaultdict(list)
    with (folder / "svo_probes.csv").open() as stream:
        for row in csv.DictReader(stream):
            kinds = [kind for kind in ("subj", "verb", "obj") if row[f"{kind}_neg"] == "True"]
            images = [folder / f"images/{int(float(row[name]))}.jpg" for name in ("pos_image_id", "neg_image_id")]
            if len(kinds) == 1 and all(image.is_file() for image in images):
                positive, negative = (similarity(image, row["sentence"]) for image in images)
                right[kinds[0]].append(positive > negative)
    found = scored["svo_probes"]
    assert {kind: found.metrics[f"acc/{kind}"] for kind in right} == pytest.approx(
        {k: np.mean(v) for k, v in right.items()}
    )
    assert found.counts["skipped"] == 1 and any("1 of" in remark for remark in found.remarks())


def test_eqben_reads_frames_in_blue_green_red(root, scored, similarity):
    folder, by_source = root / "eqben", defaultdict(list)
    for row in json.loads((folder / "eqben_subset_10percent_final.json").read_text()):
        images = [
            Image.fromarray(np.load(folder / name)[:, :, [2, 1, 0]], "RGB") if name.endswith("npy") else folder / name
            for name in (row["image0"], row["image1"])
        ]
        by_source[row["image0"].split("/")[0]].append((images, [row["caption0"], row["caption1"]]))
    expected = {name: winoground_scores(squares(similarity, items))["group"] for name, items in by_source.items()}
    found = scored["eqben"]
    assert {name: found.metrics[f"group/{name}"] for name in expected} == pytest.approx(expected)
    assert found.value == pytest.approx(np.mean(list(expected.values())))


def test_sugar_crepe_pp(root, scored, similarity):
    folder, encoder = root / "sugar_crepe_pp", made.BagOfWords()
    itt, tot = {}, {}
    for path in (folder / "data").glob("*.json"):
        image_hits, text_hits = [], []
        for line in json.loads(path.read_text()):
            first, second, wrong = (line[key] for key in ("caption", "caption2", "negative_caption"))
            p1, p2, neg = (similarity(folder / "val2017" / line["filename"], text) for text in (first, second, wrong))
            image_hits.append(p1 > neg and p2 > neg)
            a, b, c = (F.normalize(encoder.text([text]), dim=-1)[0] for text in (first, second, wrong))
            text_hits.append(bool((a * b).sum() > (a * c).sum() and (a * b).sum() > (b * c).sum()))
        itt[path.stem], tot[path.stem] = np.mean(image_hits), np.mean(text_hits)
    found = scored["sugar_crepe_pp"]
    assert {kind: found.metrics[f"itt/{kind}"] for kind in itt} == pytest.approx(itt)
    assert {kind: found.metrics[f"tot/{kind}"] for kind in tot} == pytest.approx(tot)
    assert found.value == pytest.approx(np.mean(list(itt.values()))) and found.chance == pytest.approx(1 / 3)
    assert found.metrics["tot"] == pytest.approx(np.mean(list(tot.values())))
    assert 0 <= found.metrics["blind"] <= 1 and found.n == 25


def test_aro(root, scored, similarity):
    folder = root / "aro"

    def predictions(name):
        for item in json.loads((folder / name).read_text()):
            x, y, w, h = (item[f"bbox_{key}"] for key in "xywh")
            image = Image.open(folder / "images" / item["image_path"]).convert("RGB").crop((x, y, x + w, y + h))
            scores = [similarity(image, text) for text in (item["false_caption"], item["true_caption"])]
            yield item, np.argmax(scores) == 1

    by_relation = defaultdict(list)
    for item, right in predictions("visual_genome_relation.json"):
        by_relation[item["relation_name"]].append(right)
    kept = {name: np.mean(of) for name, of in by_relation.items() if name not in ("near", "by")}  # symmetric relations
    found = scored["aro/vg_relation"]
    assert found.value == pytest.approx(np.mean(list(kept.values())))
    assert {name: found.metrics[f"acc/{name}"] for name in kept} == pytest.approx(
        kept
    ) and "acc/near" not in found.metrics
    by_pair = defaultdict(list)
    for item, right in predictions("visual_genome_attribution.json"):
        by_pair[f"{item['attributes'][0]}_{item['attributes'][1]}"].append(right)
    kept = {name: np.mean(of) for name, of in by_pair.items() if len(of) >= 25}
    assert len(kept) == 2 and len(by_pair) == 3
    assert scored["aro/vg_attribution"].value == pytest.approx(np.mean(list(kept.values())))
    right = []
    for row in pq.read_table(next((root / "aro/coco_order/data").glob("*.parquet"))).to_pylist():
        image = Image.open(io.BytesIO(row["images"]["bytes"]))
        texts = [row["correct_caption"], *(row[f"hard_text_{k}"] for k in (1, 2, 3, 4))]
        right.append(np.argmax([similarity(image, text) for text in texts]) == 0)
    found = scored["aro/coco_order"]
    assert found.value == pytest.approx(np.mean(right)) and found.options["ties"] == "first"
    assert found.chance == pytest.approx(0.2)


def test_negbench(root, scored, similarity):
    folder, right = root / "negbench", defaultdict(list)
    with (folder / "COCO_val_mcq_llama3.1_rephrased.csv").open() as stream:
        for row in csv.DictReader(stream):
            image = folder / "val2017" / row["image_path"].rpartition("/")[2]
            scores = [similarity(image, row[f"caption_{k}"]) for k in range(4)]
            right[row["correct_answer_template"]].append(np.argmax(scores) == int(row["correct_answer"]))
    found = scored["negbench/coco_mcq"]
    assert found.value == pytest.approx(np.mean([hit for hits in right.values() for hit in hits]))
    assert {k: found.metrics[f"acc/{k}"] for k in right} == pytest.approx({k: np.mean(v) for k, v in right.items()})
    images, texts, owner = [], [], []
    with (folder / "COCO_val_retrieval.csv").open() as stream:
        for number, row in enumerate(csv.DictReader(stream)):
            images.append(folder / "val2017" / row["filepath"].rpartition("/")[2])
            for text in ast.literal_eval(row["captions"]):
                texts.append(text)
                owner.append(number)
    hits = [
        np.argmax([similarity(image, text) for image in images]) == of for text, of in zip(texts, owner, strict=True)
    ]
    found = scored["negbench/coco_retrieval"]
    assert found.metrics["image_R@1"] == pytest.approx(np.mean(hits)) and len(hits) == 10


def test_valse_whatsup_and_crepe(root, scored, similarity):
    folder, accuracy = root / "valse", {}
    for name, images in {
        "existence": "visual7w/images",
        "plurals": "plurals/test_images",
        "relations": "relations",
    }.items():
        foils = json.loads((folder / f"data/{name}.json").read_text())
        accuracy[name] = np.mean([
            similarity(folder / images / foil["image_file"], foil["caption"]) > similarity(folder / images / foil["image_file"], foil["foil"])
            for foil in foils.values() if foil["mturk"]["caption"] >= 2
        ])  # fmt: skip
    found = scored["valse"]
    assert found.value == pytest.approx(np.mean(list(accuracy.values()))) and found.n == 18
    incomplete = open_valse(root / "valse").incomplete
    assert incomplete.startswith("8 of 11 instruments are missing: counting-hard, counting-small-quant,")
    folder, correct = root / "whatsup", {}
    for row in json.loads((folder / "controlled_images_dataset.json").read_text()):
        image = folder / row["image_path"].removeprefix("data/")
        scores = [similarity(image, text) for text in row["caption_options"]]
        words = image.name.split("_")
        correct[words[0] + words[-1], words[1]] = np.argmax(scores) == 0
    objects = {name for name, _ in correct}
    pairs = [
        correct[name, one] and correct[name, other]
        for name in objects
        for one, other in (("left", "right"), ("on", "under"))
    ]
    sets = [all(correct[name, relation] for relation in ("left", "right", "on", "under")) for name in objects]
    found = scored["whatsup/a"]
    assert found.value == pytest.approx(np.mean(list(correct.values())))
    assert (found.metrics["pair"], found.metrics["set"]) == pytest.approx((np.mean(pairs), np.mean(sets)))
    assert found.options["chance_pair"] == pytest.approx(1 / 16) and found.options["chance_set"] == pytest.approx(
        1 / 256
    )
    # Exchanged nouns are an exact tie, which the authors' argmax counts as right.
    assert scored["whatsup/coco_two"].metrics["acc"] >= 0.5
    folder, hits = root / "crepe", []
    for path in (folder / "prod_hard_negatives").glob("*/*.csv"):
        with path.open() as stream:
            for row in csv.DictReader(stream):
                x, y, w, h = (int(row[key]) for key in ("x", "y", "width", "height"))
                image = Image.open(next(folder.glob(f"VG_100K*/{row['image_id']}.jpg"))).crop((x, y, x + w, y + h))
                texts = [row["caption"], *ast.literal_eval(row["hard_negs"])]
                hits.append(all(similarity(image, texts[0]) > similarity(image, text) for text in texts[1:]))
    found = scored["crepe/productivity"]
    assert found.value == pytest.approx(np.mean(hits)) and found.chance == pytest.approx((1 / 6 + 1 / 4) / 2)


def test_every_set_of_the_pack_was_scored(scored):
    expected = {entry.name for entry in catalogue.datasets() if entry.group == "compositional"}
    absent = {"sugar_crepe", "aro/flickr30k_order", "negbench/voc2007_mcq", "negbench/coco_negated_retrieval", "whatsup/b", "whatsup/coco_one",
              "whatsup/vg_one", "whatsup/vg_two", "crepe/systematicity_atom", "crepe/systematicity_comp"}  # fmt: skip
    assert scored.keys() == expected - absent
