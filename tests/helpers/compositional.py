"""Compositional sets in their published formats with made-up images and captions, and an encoder that ignores the order of words."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from evals.encoders.encoder import Encoder, TextEncoder
from evals.encoders.pixels import Pixels

NOUNS, ADJECTIVES, RELATIONS = (
    ("cat", "dog", "cup", "tree"),
    ("red", "small", "old"),
    ("above", "left of", "near", "by"),
)


class BagOfWords(Encoder, TextEncoder):
    """Encodes images by a hash of their pixels and texts by the sum of their words' vectors, so that captions with the same words are exact ties."""

    image_size, width, architecture, text_weights = 8, 16, "bag", "bag"  # type: ignore[assignment]

    def __init__(self) -> None:
        model = nn.Linear(1, 1)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # equal weights, so that the store recognises the model
        super().__init__(model, (0.0,) * 3, (1.0,) * 3, "bag of words")
        self.transform, self.num_images, self.num_texts = Pixels(8, 8), 0, 0

    def encode(self, pixels):
        self.num_images += len(pixels)
        return torch.stack([vector(image.numpy().tobytes()) for image in pixels])

    def text(self, captions):
        self.num_texts += len(captions)
        words = [sorted(caption.lower().split()) for caption in captions]
        return F.normalize(torch.stack([sum(map(vector, some), torch.zeros(16)) for some in words]), dim=-1)

    def similarity(self, image: Image.Image, text: str) -> float:
        """Return the cosine, as the authors' scripts compute it."""
        pixels = torch.from_numpy(np.array(self.transform(image))).permute(2, 0, 1)[None]
        one, other = F.normalize(self.encode(pixels), dim=-1)[0], self.text([text])[0]
        return float((one * other).sum())


def vector(of: str | bytes) -> torch.Tensor:
    data = of.encode() if isinstance(of, str) else of
    seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
    return torch.from_numpy(np.random.default_rng(seed).normal(size=16).astype(np.float32))


def picture(path: Path, seed: int, size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def caption(seed: int) -> str:
    rng = np.random.default_rng(seed)
    a, b = rng.choice(NOUNS, 2, replace=False)
    return f"a {rng.choice(ADJECTIVES)} {a} {rng.choice(RELATIONS)} a {rng.choice(ADJECTIVES)} {b}"


def swapped(text: str) -> str:
    """Return the caption with its nouns exchanged, so that its words are the same."""
    words = text.split()
    places = [i for i, word in enumerate(words) if word in NOUNS]
    words[places[0]], words[places[1]] = words[places[1]], words[places[0]]
    return " ".join(words)


def parquet(path: Path, rows: list[dict]) -> None:
    """Write rows as the hub does: images are structs of bytes and path, in small row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)


def embedded(folder: Path, seed: int) -> dict:
    picture(folder / "one.png", seed)
    data = (folder / "one.png").read_bytes()
    (folder / "one.png").unlink()
    return {"bytes": data, "path": f"{seed}.png"}


def winoground(root: Path, rows: int = 8) -> Path:
    folder = root / "winoground"
    lines = []
    for i in range(rows):
        for place in (0, 1):
            picture(folder / f"images/ex_{i}_img_{place}.png", 2 * i + place)
        captions = {"caption_0": caption(i), "caption_1": swapped(caption(i)) if i == 3 else caption(100 + i)}
        tags = {"tag": "Noun", "secondary_tag": "", "num_main_preds": 1, "collapsed_tag": ("Object", "Relation")[i % 2]}
        lines.append(json.dumps({"id": i, "image_0": f"ex_{i}_img_0", "image_1": f"ex_{i}_img_1", **captions, **tags}))
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def mmvp(root: Path, pairs: int = 6) -> Path:
    folder = root / "mmvp_vlm"
    rows = [["Question ID", "Type", "Statement"]]
    for number in range(1, 2 * pairs + 1):
        kind = ("Color", "Spatial")[(number - 1) // 6]
        picture(folder / f"MLLM_VLM Images/{kind}/{number}.jpg", number)
        rows.append([str(number), kind, caption(number)])
    write_csv(folder / "Questions.csv", rows)
    return folder


def colorswap(root: Path, rows: int = 6) -> Path:
    folder = root / "colorswap"
    content = []
    for i in range(rows):
        for place in (1, 2):
            picture(folder / f"images/img_{i}_{place}.png", 10 * i + place)
        content.append({
            "id": i, "caption_1": caption(i), "caption_2": swapped(caption(i)), "image_1": f"images/img_{i}_1.png",
            "image_2": f"images/img_{i}_2.png", "image_source": "midjourney", "caption_source": "human",
        })  # fmt: skip
    (folder / "test.json").write_text(json.dumps(content))
    return folder


def bivlc(root: Path, rows: int = 8) -> Path:
    folder = root / "bivlc"
    folder.mkdir(parents=True)
    parquet(folder / "data/test-00000-of-00001.parquet", [
        {
            "image": embedded(folder, 10 * i), "caption": caption(i), "negative_caption": caption(50 + i),
            "negative_image": embedded(folder, 10 * i + 1), "type": ("replace", "swap", "add")[i % 3], "subtype": "obj",
        }
        for i in range(rows)
    ])  # fmt: skip
    return folder


def cola(root: Path, rows: int = 6) -> Path:
    folder = root / "cola"
    content = []
    for i in range(rows):
        picture(folder / f"{('images', 'VG_100K')[i % 2]}/{i}.jpg", i)
        picture(folder / f"VG_100K_2/{1000 + i}.jpg", 1000 + i)
        url = "https://example.org/vg_gqa_images"
        content.append([f"{url}/{i}.jpg", caption(i), f"{url}/{1000 + i}.jpg", caption(60 + i)])
    path = folder / "data/COLA_multiobjects_matching_benchmark.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    return folder


def eqben(root: Path, rows: int = 8) -> Path:
    folder = root / "eqben"
    content = []
    for i in range(rows):
        source = ("eqbenag", "eqbenyoucook2")[i % 2]
        names = []
        for place in (0, 1):
            name = f"{source}/{i}_{place}." + ("npy" if i % 2 else "png")
            picture(folder / f"{source}/{i}_{place}.png", 7 * i + place)
            if i % 2:
                array = np.asarray(Image.open(folder / f"{source}/{i}_{place}.png"))[:, :, ::-1]
                np.save(folder / name, array)
            names.append(name)
        content.append({"image0": names[0], "image1": names[1], "caption0": caption(i), "caption1": caption(80 + i)})
    (folder / "eqben_subset_10percent_final.json").write_text(json.dumps(content))
    return folder


def sugar_crepe_pp(root: Path) -> Path:
    folder = root / "sugar_crepe_pp"
    (folder / "data").mkdir(parents=True)
    sizes = {"swap_obj": 4, "swap_att": 5, "replace_obj": 6, "replace_att": 3, "replace_rel": 7}
    for place, (name, count) in enumerate(sizes.items()):
        rows = []
        for i in range(count):
            seed = 20 * place + i
            picture(folder / f"val2017/{seed % 11:012d}.jpg", seed % 11)
            # A wrong caption that equals the right one can never be distinguished from it.
            wrong = caption(seed) if i == 1 else caption(400 + seed)
            rows.append({
                "id": i, "filename": f"{seed % 11:012d}.jpg", "caption": caption(seed), "caption2": caption(200 + seed),
                "negative_caption": wrong,
            })  # fmt: skip
        (folder / f"data/{name}.json").write_text(json.dumps(rows))
    return folder


def aro(root: Path, rows: int = 70) -> Path:
    folder = root / "aro"
    relation, attribution = [], []
    for i in range(rows):
        picture(folder / f"images/{i % 9}.jpg", i % 9, (30, 20))
        box = {"bbox_x": i % 7, "bbox_y": 2, "bbox_w": 9 + i % 3, "bbox_h": 22}  # some exceed the image
        name = RELATIONS[i % 4]
        texts = {"true_caption": caption(i), "false_caption": swapped(caption(i)) if i % 5 == 0 else caption(300 + i)}
        item = {"image_id": i % 9, "image_path": f"{i % 9}.jpg", **box, **texts}
        relation.append({**item, "relation_name": name})
        pair = ["red", "old"] if i < 40 else ["small", "red"] if i < 66 else ["old", "small"]
        attribution.append({**item, "attributes": pair, "obj1_name": "cat", "obj2_name": "dog"})
    (folder / "visual_genome_relation.json").write_text(json.dumps(relation))
    (folder / "visual_genome_attribution.json").write_text(json.dumps(attribution))
    return folder


def orders(root: Path, rows: int = 7) -> Path:
    folder = root / "aro/coco_order"
    folder.mkdir(parents=True)
    parquet(folder / "data/test-00000-of-00001.parquet", [
        {
            "images": embedded(folder, i), "correct_caption": caption(i), "hard_text_1": swapped(caption(i)) if i % 2 else caption(70 + i),
            **{f"hard_text_{k}": caption(70 * k + i) for k in (2, 3, 4)},
        }
        for i in range(rows)
    ])  # fmt: skip
    return folder


def negbench(root: Path, rows: int = 12) -> Path:
    folder = root / "negbench"
    names = [f"caption_{k}" for k in range(4)]
    table = [["image_path", "correct_answer", *names, "correct_answer_template"]]
    captions = [["positive_objects", "negative_objects", "filepath", "image_id", "captions"]]
    for i in range(rows):
        picture(folder / f"val2017/{i % 5:012d}.jpg", i % 5)
        kind = ("positive", "negative", "hybrid")[i % 3]
        texts = [f"this image has no {NOUNS[k]} but {caption(10 * i + k)}" for k in range(4)]
        if i == 4:
            texts[2] = texts[0]
        table.append([f"/home/author/val2017/{i % 5:012d}.jpg", str(i % 2), *texts, kind])
        if i < 5:
            both = [caption(i), f'no, there is "{caption(i + 1)}"']
            captions.append(["['cat']", "['']", f"/home/author/{i:012d}.jpg", str(i), repr(both)])
    write_csv(folder / "COCO_val_mcq_llama3.1_rephrased.csv", table)
    write_csv(folder / "COCO_val_retrieval.csv", captions)
    return folder


def valse(root: Path) -> Path:
    folder = root / "valse"
    (folder / "data").mkdir(parents=True)
    for place, (name, images) in enumerate(
        {"existence": "visual7w/images", "plurals": "plurals/test_images", "relations": "relations"}.items()
    ):
        rows = {}
        for i in range(9):
            picture(folder / images / f"v7w_{i}.jpg", 30 * place + i)
            votes = {"foil": 0, "caption": 1 + i % 3, "other": 0}
            rows[f"{name}_{i}"] = {
                "dataset": "visual7w", "original_split": "test", "dataset_idx": i, "linguistic_phenomena": name,
                "image_file": f"v7w_{i}.jpg", "caption": caption(40 * place + i), "foil": caption(500 + i), "mturk": votes,
                "classes": "cat", "classes_foil": "dog",
            }  # fmt: skip
        (folder / f"data/{name}.json").write_text(json.dumps(rows))
    return folder


def svo(root: Path, rows: int = 12) -> Path:
    folder = root / "svo_probes"
    names = ["sentence", "pos_triplet", "neg_triplet", "pos_url", "neg_url", "pos_image_id", "neg_image_id", "subj_neg", "verb_neg", "obj_neg"]  # fmt: skip
    table = [names]
    for i in range(rows):
        kinds = [str(i % 4 == k or i == 11) for k in range(3)]
        table.append(
            [caption(i), "a,b,c", "a,b,d", "http://x/1.jpg", "http://x/2.jpg", str(i % 6), f"{i + 10}.0", *kinds]
        )
        picture(folder / f"images/{i % 6}.jpg", i % 6)
        if i != 5:  # a dead link
            picture(folder / f"images/{i + 10}.jpg", i + 10)
    write_csv(folder / "svo_probes.csv", table)
    return folder


def whatsup(root: Path, objects: int = 3) -> Path:
    folder = root / "whatsup"
    rows, relations = [], ("on", "under", "left_of", "right_of")
    for i in range(objects):
        for place, relation in enumerate(relations):
            name = f"beer-bottle_{relation}_thing{i}.jpeg"
            picture(folder / f"controlled_images/{name}", 4 * i + place)
            options = [
                f"a beer bottle {'to the ' if 'of' in r else ''}{r.replace('_', ' ')} a thing{i}" for r in relations
            ]
            options = [options[place], *options[:place], *options[place + 1 :]]
            rows.append({"image_path": f"data/controlled_images/{name}", "caption_options": options})
    (folder / "controlled_images_dataset.json").write_text(json.dumps(rows))
    picture(folder / "val2017/000000000042.jpg", 42)
    two = [[42, caption(1), caption(2)], [42, caption(3), swapped(caption(3))]]
    (folder / "coco_qa_two_obj.json").write_text(json.dumps(two))
    return folder


def crepe(root: Path) -> Path:
    folder = root / "crepe"
    for kind in ("atom", "swap"):
        rows = [["image_id", "caption", "x", "y", "width", "height", "hard_negs"]]
        for i in range(5):
            picture(folder / f"VG_100K{'_2' if i % 2 else ''}/{i}.jpg", i, (20, 20))
            negatives = [caption(90 + 6 * i + k) for k in range(5 if kind == "atom" else 3)]
            rows.append([str(i), caption(i), "3", "4", "10", "30", repr(negatives)])
        write_csv(folder / f"prod_hard_negatives/{kind}/prod_vg_hard_negs_{kind}_complexity_4.csv", rows)
    return folder


def write_csv(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)


WRITERS = (
    winoground,
    mmvp,
    colorswap,
    bivlc,
    cola,
    eqben,
    sugar_crepe_pp,
    aro,
    orders,
    negbench,
    valse,
    svo,
    whatsup,
    crepe,
)
