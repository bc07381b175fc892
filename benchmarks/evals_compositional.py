"""All compositional sets of a checkpoint in one command, compared with one set after another in the form of the authors' scripts.

    python benchmarks/evals_compositional.py [--quick] [--json FILE]

The sets have the published numbers of questions (--quick: a fortieth), generated captions and images of noise: SugarCrepe,
SugarCrepe++ and NegBench over the same images, and ARO's relations, attributes and orders. The scripts encode every
question, one at a time (SugarCrepe, SugarCrepe++) or in batches of 32 or 64 (ARO, NegBench), with captions padded to the
whole context. Scores are compared before times are reported. Both sides use the same untrained ViT-Tiny.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleave, parser, peak_growth, report, row, seconds
from evals_pairs import encodings_counted, write_sugar_crepe
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from evals.encoders.clip_encoder import ClipEncoder
from evals.feature_store.features import FeatureStore
from evals.sets.captions import SPLITS
from evals.suite import catalogue
from evals.suite.suite import Suite
from sparo_data.synthetic.scene_questions import shuffle_words
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip

NAMES = (
    "sugar_crepe",
    "sugar_crepe_pp",
    "negbench/coco_mcq",
    "aro/vg_relation",
    "aro/vg_attribution",
    "aro/coco_order",
)
PLUS = {"swap_obj": 245, "swap_att": 666, "replace_obj": 1652, "replace_att": 788, "replace_rel": 1406}
NOUNS, ADJECTIVES = ("cube", "sphere", "cylinder"), ("red", "blue", "green", "small", "large", "metal", "rubber")
Question = tuple[str, Image.Image, list[str], int]  # kind, image, captions, the right one


def caption(rng: np.random.Generator) -> str:
    parts = [f"a {' '.join(rng.choice(ADJECTIVES, 2, replace=False))} {rng.choice(NOUNS)}" for _ in range(2)]
    return f"{parts[0]} {rng.choice(['left of', 'in front of', 'under'])} {parts[1]}"


def write_sets(root: Path, fraction: int) -> None:
    """Write all sets; SugarCrepe's images serve SugarCrepe++ and NegBench, too."""
    rng = np.random.default_rng(0)
    (root / "sugar_crepe").mkdir()
    write_sugar_crepe(root / "sugar_crepe", fraction)
    images = sorted(path.name for path in (root / "sugar_crepe/val2017").iterdir())
    for name in ("sugar_crepe_pp", "negbench"):
        (root / name / "data").mkdir(parents=True)
        (root / name / "val2017").symlink_to(root / "sugar_crepe/val2017")
    for name, count in PLUS.items():
        keys = ("caption", "caption2", "negative_caption")
        rows = [
            {"id": i, "filename": images[i % len(images)], **{key: caption(rng) for key in keys}}
            for i in range(count // fraction)
        ]
        (root / f"sugar_crepe_pp/data/{name}.json").write_text(json.dumps(rows))
    table = [["image_path", "correct_answer", *(f"caption_{k}" for k in range(4)), "correct_answer_template"]]
    for i in range(5914 // fraction):
        texts = [f"{word} {caption(rng)}" for word in ("there is", "there is no", "a photo without", "a photo with")]
        table.append([f"val2017/{images[i % len(images)]}", "0", *texts, ("positive", "negative", "hybrid")[i % 3]])
    with (root / "negbench/COCO_val_mcq_llama3.1_rephrased.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(table)
    _write_aro(root / "aro", fraction, rng)


def _write_aro(folder: Path, fraction: int, rng: np.random.Generator) -> None:
    pool = 5000 // fraction
    for place in (folder / "images", folder / "coco_order/images"):
        place.mkdir(parents=True)
        for i in range(pool):
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(place / f"{i}.jpg")
    for file, count in (("visual_genome_relation", 23937), ("visual_genome_attribution", 28748)):
        rows = []
        for i in range(count // fraction):
            x, y, w, h = (int(v) for v in (*rng.integers(0, 30, 2), *rng.integers(20, 34, 2)))
            box = {"bbox_x": x, "bbox_y": y, "bbox_w": w, "bbox_h": h}
            texts = {"true_caption": caption(rng), "false_caption": caption(rng)}
            kind = {"relation_name": "under" if i % 2 else "holding", "attributes": [str(i % 3), "x"]}
            rows.append({"image_path": f"{i % pool}.jpg", **box, **texts, **kind})
        (folder / f"{file}.json").write_text(json.dumps(rows))
    orders = []
    for i in range(25010 // fraction):
        text = caption(rng)
        orders.append({"image_path": f"{i % pool}.jpg", "captions": [text, *shuffle_words(text, rng)]})
    (folder / "coco_order/order.json").write_text(json.dumps(orders))


class Script:
    """The form of the authors' scripts: images and captions are encoded for every question."""

    def __init__(self, encoder: ClipEncoder, root: Path):
        self.encoder, self.root = encoder, root

    def scores(self) -> dict[str, float]:
        """Return the headline score of each set, one set after another."""
        root = self.root
        crepe = ((split, *item) for split in SPLITS for item in self._crepe(split))
        found = {"sugar_crepe": self._macro(crepe, 1, all_right=False)}
        plus = ((name, *item) for name in PLUS for item in self._plus(name))
        found["sugar_crepe_pp"] = self._macro(plus, 1, all_right=True)
        with (root / "negbench/COCO_val_mcq_llama3.1_rephrased.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        mcq = (
            ("", Image.open(root / "negbench" / r["image_path"]), [r[f"caption_{k}"] for k in range(4)], 0)
            for r in rows
        )
        found["negbench/coco_mcq"] = self._macro(mcq, 64)
        found["aro/vg_relation"] = self._macro(self._regions("visual_genome_relation", "relation_name"), 32)
        found["aro/vg_attribution"] = self._macro(self._regions("visual_genome_attribution", "attributes"), 32)
        listed = json.loads((root / "aro/coco_order/order.json").read_text())
        orders = (("", Image.open(root / "aro/coco_order/images" / r["image_path"]), r["captions"], 0) for r in listed)
        found["aro/coco_order"] = self._macro(orders, 32)
        return found

    def _crepe(self, split: str) -> Iterator[tuple[Image.Image, list[str], int]]:
        for item in json.loads((self.root / f"sugar_crepe/{split}.json").read_text()).values():
            image = Image.open(self.root / "sugar_crepe/val2017" / item["filename"])
            yield image, [item["caption"], item["negative_caption"]], 0

    def _plus(self, name: str) -> Iterator[tuple[Image.Image, list[str], int]]:
        for item in json.loads((self.root / f"sugar_crepe_pp/data/{name}.json").read_text()):
            image = Image.open(self.root / "sugar_crepe_pp/val2017" / item["filename"])
            yield image, [item["caption"], item["caption2"], item["negative_caption"]], 0

    def _regions(self, file: str, key: str) -> Iterator[Question]:
        for item in json.loads((self.root / f"aro/{file}.json").read_text()):
            x, y, w, h = (item[f"bbox_{k}"] for k in "xywh")
            image = Image.open(self.root / "aro/images" / item["image_path"]).crop((x, y, x + w, y + h))
            yield str(item[key]), image, [item["false_caption"], item["true_caption"]], 1

    def _macro(self, questions: Iterator[Question], size: int, all_right: bool = False) -> float:
        """Return the mean over kinds of the share of right answers, in batches of `size`."""
        right: dict[str, list[bool]] = {}
        batch: list[Question] = []
        for question in questions:
            batch.append(question)
            if len(batch) == size:
                self._answer(batch, right, all_right)
                batch = []
        if batch:
            self._answer(batch, right, all_right)
        return float(np.mean([np.mean(hits) for hits in right.values()]))

    def _answer(self, batch: Sequence[Question], right: dict[str, list[bool]], all_right: bool) -> None:
        model, pixels = self.encoder.model, [self._prepared(image) for _, image, _, _ in batch]
        with torch.no_grad():
            images = F.normalize(model.encode_image(torch.stack(pixels)), dim=-1)
            options = [[texts[k] for _, _, texts, _ in batch] for k in range(len(batch[0][2]))]
            # Padded to the whole context, as by their tokenizers.
            tokens = [self._padded(texts) for texts in options]
            texts = torch.stack([F.normalize(model.encode_text(t), dim=-1) for t in tokens], 1)
        scores = torch.einsum("bd,bkd->bk", images, texts)
        for (kind, *_, answer), found in zip(batch, scores, strict=True):
            hit = bool(found[0] > found[2] and found[1] > found[2]) if all_right else int(found.argmax()) == answer
            right.setdefault(kind, []).append(hit)

    def _prepared(self, image: Image.Image) -> Tensor:
        return self.encoder.normalize(self.encoder.stack([np.asarray(self.encoder.transform(image.convert("RGB")))]))[0]

    def _padded(self, texts: list[str]) -> Tensor:
        tokens = self.encoder.tokenizer.batch(texts)
        return F.pad(tokens, (0, 77 - tokens.shape[1]))


def compare(quick: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    sizes = {"vision": {"image_size": 64}, "text": {"context_length": 77, "width": 128, "heads": 4, "layers": 4}}
    encoder = ClipEncoder(
        Clip(ClipConfig.model_validate({"backbone": "ViT-Tiny-16", "readout": {"kind": "token"}, **sizes}))
    )
    found: dict[str, dict[str, float]] = {}
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name, encodings_counted(encoder.model) as counted:
        root = Path(name)
        write_sets(root, 40 if quick else 1)
        tasks = {n: catalogue.tasks(n, root)[n].model_copy(update={"workers": 0}) for n in NAMES}
        script = Script(encoder, root)

        def ours() -> None:
            counted.clear()
            with tempfile.TemporaryDirectory() as store:
                results = Suite(tasks, FeatureStore(store)).run(encoder)
            found["ours"] = {n: result.value for n, result in results.items()}
            counts["ours"] = dict(counted)

        def theirs() -> None:
            counted.clear()
            found["theirs"] = script.scores()
            counts["theirs"] = dict(counted)

        growth = peak_growth(ours) / 2**20
        timed = interleave(lambda: seconds(ours), lambda: seconds(theirs), 2 if quick else 1)
    for n in NAMES:  # rounding of near ties: batches of other sizes
        assert abs(found["ours"][n] - found["theirs"][n]) < 0.01, (n, found["ours"][n], found["theirs"][n])
    scale = "a fortieth of six sets" if quick else "six sets"
    rows = [row(f"{scale}, ViT-Tiny-16 at 64 px", timed, 5, "s", False)]
    for kind in ("images", "texts"):
        rows.append(row(f"{kind} encoded", [(counts["ours"][kind], counts["theirs"][kind])], None, kind, False))  # type: ignore[arg-type]
    return [*rows, row("growth of memory", [(growth, growth)], None, "MiB", False)]


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(2)
    report("compositional sets: ours, the authors' scripts", compare(arguments.quick), arguments.json)
