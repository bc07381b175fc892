"""Segmentation without training: dense encodings, windows, classes and votes compared with restatements, and published sets."""

import io
import itertools

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix
from sklearn.neighbors import NearestNeighbors
from torch.nn import functional as F

from evals.encoders.clip_encoder import ClipEncoder
from evals.encoders.dense import dense_patches, last_tokens, slot_similarity
from evals.encoders.pixels import SquarePixels
from evals.sets.pictures import label_image
from evals.sets.segmentation_files import open_segmentation
from evals.suite import catalogue
from evals.suite.patch_segmentation import KnnSegmentationTaskConfig
from evals.suite.rank_task import RankTaskConfig
from evals.suite.suite import Suite
from evals.suite.zeroshot_segmentation import WindowPixels, ZeroshotSegmentationTaskConfig
from evals.tasks import dense_segmentation as dense
from sparo_data.writer import write_wds_layout
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import jpeg

SIZES = {
    "vision": {"image_size": 32, "patch_size": 8, "width": 128, "layers": 3},
    "text": {"width": 16, "heads": 2, "layers": 2, "context_length": 16},
    "embed_dim": 12,
}
READOUTS = {"token": {"kind": "token"}, "sparo": {"kind": "sparo", "slots": 3, "slot_width": 4, "head_width": 4}}


def clip(kind="token", **readout):
    torch.manual_seed(0)
    tree = {"backbone": "ViT-Tiny-16", "readout": {**READOUTS.get(kind, {"kind": kind}), **readout}, **SIZES}
    model = Clip(ClipConfig.model_validate(tree))
    for parameter in model.parameters():  # nontrivial biases and scales
        torch.nn.init.normal_(parameter, 0, 0.07)
    return ClipEncoder(model.eval())


def png(array):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def labelled(folder, count=4, classes=("cat", "dog", "tree"), sizes=((40, 36), (70, 33), (32, 90), (36, 36))):
    rng, samples = np.random.default_rng(0), []
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        mask = rng.integers(0, len(classes), (height // 6 + 1, width // 6 + 1)).astype(np.uint8)
        mask = np.kron(mask, np.ones((6, 6), np.uint8))[:height, :width].copy()
        mask[:3] = 255
        samples.append((f"s{i}", {"jpg": jpeg(i, (width, height)), "mask.png": png(mask)}))
    write_wds_layout(folder, samples, classnames=list(classes), templates=["a {c}.", "the {c}"])
    return samples


def test_the_last_block_with_other_attention():
    visual = clip().model.visual
    x = torch.randn(2, 3, 32, 32)
    block, inputs = visual.transformer.resblocks[-1], []
    hook = block.register_forward_pre_hook(lambda _m, args, kwargs: inputs.append(args[0] if args else kwargs["q_x"]), with_kwargs=True)  # fmt: skip
    whole = visual.hidden(x)
    hook.remove()
    assert torch.allclose(last_tokens(visual, x, "standard"), whole, atol=1e-6)
    # Token by token: a sequence of one token attends to itself, as in MaskCLIP.
    alone = torch.stack([torch.cat([block(t[None, None])[0] for t in row]) for row in inputs[0]])
    assert torch.allclose(last_tokens(visual, x, "values"), alone, atol=1e-4)
    # SCLIP, head by head.
    normed = block.ln_1(inputs[0])
    q, k, v = (normed @ block.attn.in_proj_weight.T + block.attn.in_proj_bias).chunk(3, -1)
    heads = []
    for h in range(2):
        part = slice(64 * h, 64 * h + 64)
        weights = sum(((one[..., part] @ one[..., part].mT) / 8).softmax(-1) for one in (q, k))
        heads.append(weights @ v[..., part])
    y = inputs[0] + torch.cat(heads, -1) @ block.attn.out_proj.weight.T + block.attn.out_proj.bias
    y = y + block.mlp(block.ln_2(y))
    assert torch.allclose(last_tokens(visual, x, "correlative"), y, atol=1e-4)


def test_dense_patches_of_open_clip_and_of_readouts():
    tower = clip().model.visual
    x = torch.randn(2, 3, 32, 32)
    theirs = open_clip.transformer.VisionTransformer(32, 8, 128, 3, 2, 4.0, output_dim=12)
    theirs.load_state_dict(tower.state_dict())
    expected = theirs.ln_post(tower.hidden(x))[:, 1:] @ theirs.proj
    for visual in (tower, theirs.eval()):
        assert torch.allclose(dense_patches(visual, x), expected, atol=1e-4)
    for kind, readout in (("sparo", {}), ("sparo", {"attend_cls": False}), ("gap", {}), ("attpool", {})):
        encoder = clip(kind, **readout)
        found = encoder.dense(torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8))
        assert found.shape == (2, 16, encoder.width), kind
    # A readout sees one patch only, so if all tokens of an image are equal, the encoding of the image is that of its patches.
    encoder = clip("sparo", attend_cls=False)
    visual = encoder.model.visual
    token = torch.randn(1, 1, 128).expand(1, 17, 128)
    visual.hidden = lambda _x: token
    whole = visual._read(token, False).flat()
    alone = token[:, 1:].reshape(-1, 1, 128).expand(-1, 2, -1)
    assert torch.allclose(visual._read(alone, False).flat(), whole.expand(16, -1), atol=1e-6)


def test_parts_of_patches_add_up_to_the_similarity_of_the_image():
    encoder = clip("sparo", attend_cls=False)
    pixels = torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8)
    slots = encoder.image_slots(list(pixels.permute(0, 2, 3, 1).numpy()))
    texts = encoder.text(["a cat", "a dog"])
    image = F.normalize(encoder.encode(pixels), dim=-1)
    parts = slot_similarity(slots.attention, image.unflatten(-1, (3, 4)), texts.unflatten(-1, (3, 4)))
    assert torch.allclose(parts.mean(1), image @ texts.T, atol=1e-4)


def test_windows_cover_every_pixel_and_are_averaged():
    for length, window, stride in itertools.product((8, 9, 11, 16, 33), (8,), (3, 4, 8)):
        starts = dense.window_starts(length, window, stride)
        assert starts == sorted(set(starts)) and starts[-1] == length - window
        assert set().union(*(range(s, s + window) for s in starts)) == set(range(length))
    assert dense.window_starts(8, 8, 4) == [0]
    parts = [torch.full((2, 4, 4), float(i)) for i in range(2)]
    mean = dense.over_windows(parts, [(0, 0), (0, 2)], (4, 6))
    assert mean[0, 0].tolist() == [0, 0, 0.5, 0.5, 1, 1]
    for size in ((10, 400), (400, 10), (32, 32), (3000, 40)):
        shape = WindowPixels(32, 48, 200)(Image.new("RGB", size)).shape
        assert min(shape[:2]) >= 32 and max(shape[:2]) <= 200


def test_classes_of_pixels():
    rng = np.random.default_rng(0)
    similarity, owner = torch.from_numpy(rng.normal(size=(4, 3, 5))).float() / 10, torch.tensor([0, 1, 1, 2])
    found = dense.classify(similarity, owner, 3, 40.0, 0.6)
    for y, x in itertools.product(range(3), range(5)):
        p = np.exp(40 * similarity[:, y, x].numpy().astype(np.float64))
        p /= p.sum()
        by_class = [p[0], max(p[1], p[2]), p[3]]
        assert int(found[y, x]) == (int(np.argmax(by_class)) if max(by_class) >= 0.6 else 0)


@pytest.mark.parametrize("windows", ["slide", "whole"])
@pytest.mark.parametrize(("kind", "features"), [("token", "patches"), ("sparo", "patches"), ("sparo", "attention")])
def test_zeroshot_segmentation_equals_a_plain_restatement(tmp_path, windows, kind, features):
    samples = labelled(tmp_path)
    encoder = clip(kind)
    task = ZeroshotSegmentationTaskConfig(root=str(tmp_path), windows=windows, features=features, workers=0)
    result = Suite({"s": task}).run(encoder)["s"]
    texts = torch.stack([
        F.normalize(F.normalize(encoder.text([f"a {c}.", f"the {c}"]), dim=-1).mean(0), dim=0) for c in ("cat", "dog", "tree")
    ])  # fmt: skip
    table = np.zeros((3, 3))
    for _, fields in samples:
        image = Image.open(io.BytesIO(fields["jpg"])).convert("RGB")
        mask = label_image(fields["mask.png"], "mask")
        transform = SquarePixels(32, 32) if windows == "whole" else WindowPixels(32, 48)
        pixels = torch.from_numpy(np.array(transform(image))).permute(2, 0, 1)
        height, width = pixels.shape[1:]
        total, count = torch.zeros(3, height, width), torch.zeros(height, width)
        for r, c in itertools.product(*({*range(0, side - 31, 16), side - 32} for side in (height, width))):
            window = pixels[None, :, r : r + 32, c : c + 32]
            if features == "patches":
                scores = F.normalize(encoder.dense(window), dim=-1)[0] @ texts.T
            else:
                slots = encoder.image_slots([window[0].permute(1, 2, 0).numpy()])
                own = F.normalize(encoder.encode(window), dim=-1).view(3, 4)
                scores = 16 * sum(
                    slots.attention[0, i, 1:, None] * (own[i] @ texts.view(3, 3, 4)[:, i].T)[None] for i in range(3)
                )
            grid = scores.T.reshape(1, 3, 4, 4)
            total[:, r : r + 32, c : c + 32] += F.interpolate(grid, (32, 32), mode="bilinear")[0]
            count[r : r + 32, c : c + 32] += 1
        full = F.interpolate((total / count)[None], mask.shape, mode="bilinear")[0]
        there = mask != 255
        table += confusion_matrix(mask[there], full.argmax(0).numpy()[there], labels=range(3))
    iou = np.diag(table) / (table.sum(0) + table.sum(1) - np.diag(table))
    assert result.metrics["miou"] == pytest.approx(iou.mean(), abs=2e-3)
    assert result.metrics["pixel_accuracy"] == pytest.approx(np.diag(table).sum() / table.sum(), abs=2e-3)
    assert result.options["windows"] == windows and result.n == 4 and len(result.keys) == 4


def test_backgrounds_names_and_errors(tmp_path):
    labelled(tmp_path)
    base = ZeroshotSegmentationTaskConfig(root=str(tmp_path), windows="whole", workers=0)
    encoder = clip()
    plain = Suite({"s": base}).run(encoder)["s"]
    # Without the background, names belong to the classes from 1 on.
    (tmp_path / "classnames.txt").write_text("dog\ntree\n")
    without = Suite({"s": base.model_copy(update={"ignore_background": True})}).run(encoder)["s"]
    assert set(without.options["iou"]) == {0, 1} and set(plain.options["iou"]) == {0, 1, 2}
    with pytest.raises(DataError, match=r"has class 2, but there are 2 class names\. Set the key `ignore`"):
        Suite({"s": base}).run(encoder)
    everything = base.model_copy(update={"background_threshold": 0.999})
    (tmp_path / "classnames.txt").write_text("other, thing\ndog\ntree, plant, shrub\n")
    named = everything.model_copy(update={"several_names": True})
    only = Suite({"s": named}).run(encoder)["s"]
    assert only.options["iou"][1] == 0 and only.options["iou"][0] > 0
    (tmp_path / "classnames.txt").write_text(", \ndog\ntree\n")
    with pytest.raises(DataError, match="contains no name"):
        Suite({"s": named}).check()
    attention = base.model_copy(update={"features": "attention"})
    with pytest.raises(ConfigError, match=r"s\.features=attention: .* has no slots with attention to patches"):
        Suite({"s": attention}).run(encoder)
    other = attention.model_copy(update={"last_block": "values"})
    with pytest.raises(ConfigError, match="last_block=values: applies to features=patches only"):
        Suite({"s": other}).run(clip("sparo"))


def test_labels_of_patches_and_votes():
    masks = torch.tensor([[[0, 0, 1, 255], [0, 2, 1, 1], [255, 255, 0, 1], [255, 255, 0, 1]]])
    shares = dense.patch_labels(masks, 2, 3, 255)[0]
    assert torch.allclose(shares, torch.tensor([[0.75, 0, 0.25], [0, 1, 0], [0, 0, 0], [0.5, 0.5, 0]]))
    voted = dense.vote(torch.tensor([[0.9, 0.88]]), torch.tensor([[[1.0, 0], [0, 1.0]]]), 0.02)
    assert voted[0, 0] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-4)


def test_knn_segmentation_equals_a_plain_restatement(tmp_path):
    labelled(tmp_path / "train", 6, sizes=((32, 32),))
    labelled(tmp_path / "test", 4, sizes=((32, 32),))
    task = KnnSegmentationTaskConfig(
        train=str(tmp_path / "train/test"), test=str(tmp_path / "test/test"), k=5, temperature=0.1, workers=0
    )
    encoder = clip()
    result = Suite({"k": task}).run(encoder)["k"]
    sets = {}
    for part in ("train", "test"):
        samples = labelled(tmp_path / "again", {"train": 6, "test": 4}[part], sizes=((32, 32),))
        pixels = torch.stack([
            torch.from_numpy(np.array(encoder.transform(Image.open(io.BytesIO(f["jpg"]))))).permute(2, 0, 1) for _, f in samples
        ])  # fmt: skip
        masks = np.stack([label_image(f["mask.png"], "") for _, f in samples])
        sets[part] = F.normalize(encoder.tokens(pixels)[:, 1:], dim=-1), masks
    patches, masks = sets["train"]
    labels = np.zeros((6, 16, 3))
    for i, p in itertools.product(range(6), range(16)):
        block = masks[i, p // 4 * 8 : p // 4 * 8 + 8, p % 4 * 8 : p % 4 * 8 + 8]
        labels[i, p] = [(block == c).sum() / (block != 255).sum() for c in range(3)]
    search = NearestNeighbors(n_neighbors=5, metric="cosine").fit(patches.flatten(0, 1).numpy())
    queries, truth = sets["test"]
    distance, row = search.kneighbors(queries.flatten(0, 1).numpy())
    weights = np.exp((1 - distance) / 0.1)
    voted = (weights[..., None] * labels.reshape(-1, 3)[row]).sum(1) / weights.sum(1)[:, None]
    maps = torch.from_numpy(voted).float().view(4, 4, 4, 3).permute(0, 3, 1, 2)
    predicted = F.interpolate(maps, (32, 32), mode="bilinear").argmax(1).numpy()
    there = truth != 255
    table = confusion_matrix(truth[there], predicted[there], labels=range(3))
    iou = np.diag(table) / (table.sum(0) + table.sum(1) - np.diag(table))
    assert result.metrics["miou"] == pytest.approx(iou.mean(), abs=5e-3)
    fewer = Suite({"k": task.model_copy(update={"bank": 10})}).run(encoder)["k"]
    assert fewer.options["bank"] == 10 and 0 <= fewer.value <= 1


def voc(root):
    rng = np.random.default_rng(0)
    top = root / "VOCdevkit/VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (top / folder).mkdir(parents=True)
    for name in ("2007_1", "2007_2"):
        (top / f"JPEGImages/{name}.jpg").write_bytes(jpeg(1, (40, 36)))
        mask = Image.fromarray(rng.choice([0, 1, 20, 255], (36, 40)).astype(np.uint8), "P")
        mask.putpalette([v for i in range(256) for v in (i, 255 - i, 7)])
        mask.save(top / f"SegmentationClass/{name}.png")
    (top / "ImageSets/Segmentation/val.txt").write_text("2007_1\n2007_2\n")


def test_voc_ade_and_coco_stuff_as_published(tmp_path):
    voc(tmp_path / "voc2012")
    found = open_segmentation(tmp_path / "voc2012", "voc2012", "test", False)
    key, image, mask = found.read(0)
    assert key == "JPEGImages/2007_1.jpg" and image.size == (40, 36) and set(np.unique(mask)) == {0, 1, 20, 255}
    assert len(found.classnames()) == 20 and found.classnames()[14] == "person"
    assert open_segmentation(tmp_path / "voc2012", "voc2012", "test", True).classnames()[0] == "background"
    ade = tmp_path / "ade20k/ADEChallengeData2016"
    for folder in ("images/validation", "annotations/validation"):
        (ade / folder).mkdir(parents=True)
    (ade / "images/validation/A_1.jpg").write_bytes(jpeg(2, (10, 8)))
    (ade / "annotations/validation/A_1.png").write_bytes(png(np.full((8, 10), 150, np.uint8)))
    rows = "".join(f"{i}\t0.1\t5\t5\tname {i}, other\n" for i in range(1, 151))
    (ade / "objectInfo150.txt").write_text("Idx\tRatio\tTrain\tVal\tName\n" + rows)
    found = open_segmentation(tmp_path / "ade20k", "ade20k", "test", False)
    assert found.classnames()[149] == "name 150" and found.read(0)[2].max() == 150
    stuff = tmp_path / "coco_stuff"
    for folder in ("val2017", "stuffthingmaps/val2017"):
        (stuff / folder).mkdir(parents=True)
    (stuff / "val2017/000000000139.jpg").write_bytes(jpeg(2, (4, 1)))
    (stuff / "stuffthingmaps/val2017/000000000139.png").write_bytes(png(np.array([[0, 12, 181, 255]], np.uint8)))
    (stuff / "labels.txt").write_text("0: unlabeled\n" + "".join(f"{i}: name {i}\n" for i in range(1, 183)))
    found = open_segmentation(stuff, "coco_stuff", "test", True)
    # 13 is the twelfth class, because number 12 does not occur.
    assert found.read(0)[2].tolist() == [[0, 11, 170, 255]] and len(found.classnames()) == 171
    listed = {entry.name: entry for entry in catalogue.datasets() if entry.group == "segmentation"}
    for name, count in (("voc2012", 2), ("voc2012_background", 2), ("ade20k", 1), ("coco_stuff", 1)):
        note = catalogue.check_presence(listed[name], tmp_path).note
        assert note == f"{count} images instead of {listed[name].n:,}", (name, note)
    voc_task = catalogue.tasks("voc2012_background", tmp_path)["voc2012_background"]
    assert 0 <= Suite({"v": voc_task}).run(clip())["v"].value <= 1
    (ade / "objectInfo150.txt").write_text("Idx\n1\n")
    with pytest.raises(DataError, match="expected 150 rows of five columns, got 1"):
        open_segmentation(tmp_path / "ade20k", "ade20k", "test", False)
    (stuff / "labels.txt").write_text("person\n")
    with pytest.raises(DataError, match="expected lines such as '1: person', got 'person'"):
        open_segmentation(stuff, "coco_stuff", "test", True)
    (tmp_path / "voc2012/VOCdevkit/VOC2012/SegmentationClass/2007_1.png").write_bytes(png(np.zeros((3, 3), np.uint8)))
    with pytest.raises(DataError, match="has 3 x 3 pixels, but its image"):
        open_segmentation(tmp_path / "voc2012", "voc2012", "test", False).read(0)
    with pytest.raises(ConfigError, match="layout=segmentation: benchmark_name=voc2011: did you mean 'voc2012'"):
        open_segmentation(tmp_path, "voc2011", "test", False)


def _scored(ranks, root):
    tasks = {
        "zero": ZeroshotSegmentationTaskConfig(root=str(root), workers=0),
        "knn": KnnSegmentationTaskConfig(train=str(root / "test"), test=str(root / "test"), k=3, workers=0),
        "rank": RankTaskConfig(images=str(root / "test"), views=2, workers=0),
    }
    results = Suite(tasks).run(clip(), ranks=ranks)
    return {name: (result.metrics, result.keys, result.options["facts"]) for name, result in results.items()}


def test_two_ranks_share_the_images(tmp_path):
    labelled(tmp_path, 5, sizes=((32, 32),))
    alone = run_ranks(1, _scored, tmp_path)[0]
    for found in run_ranks(2, _scored, tmp_path):
        assert {name: result[1:] for name, result in found.items()} == {name: r[1:] for name, r in alone.items()}
        for name, (metrics, *_) in found.items():
            assert metrics == pytest.approx(alone[name][0], rel=1e-5), name
