"""The feature store: encodes once, never mixes up data, and stores parts completely or not at all."""

import copy
import io
import json
import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from evals.encoders.baselines import PixelEncoder
from evals.encoders.clip_encoder import ClipEncoder
from evals.encoders.encoder import Encoder, TextEncoder
from evals.encoders.pixels import Pixels
from evals.encoders.selection import MaskedEncoder
from evals.feature_store.feature_table import View
from evals.feature_store.features import BatchSize, FeatureStore
from evals.sets.base import Limited, sha256
from evals.sets.wds import WdsSet, open_images
from evals.suite.evaluate import set_precision
from evals.suite.labelled_tasks import KnnTaskConfig, run_knn
from evals.suite.scoring import PartsMissingError, Scoring
from sparo_data.writer import write_shards, write_wds_layout
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import ConfigError, DataError, SparoError
from sparo_train.core.world import World
from sparo_train.models.clip_config import ClipConfig
from sparo_train.models.clip_model import Clip
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import eval_sets, jpeg

ALONE = Ranks(World(), "gloo", 0.0)


class Counting(Encoder, TextEncoder):
    """Multiplies mean colours by a matrix; counts encoded samples."""

    image_size, width, architecture, text_weights = 8, 4, "means", "tower"  # type: ignore[assignment]

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(3, 4), (0.5,) * 3, (0.5,) * 3, f"counting {seed}")
        self.transform, self.images, self.texts = Pixels(8, 8), 0, []

    @torch.inference_mode()
    def encode(self, pixels):
        self.images += len(pixels)
        return self.model(self.normalize(pixels).mean((2, 3)))

    def text(self, captions):
        self.texts += captions
        return torch.tensor([[len(c), c.count("a"), 1, 0] for c in captions]).float()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return 600 images: three parts."""
    root = tmp_path_factory.mktemp("set")
    write_shards(root, ((f"{i:04d}", {"jpg": jpeg(i % 40), "cls": str(i % 5).encode()}) for i in range(600)), 100)
    return open_images(str(root), "label", "test")


def test_the_second_reading_encodes_nothing_and_is_equal(source, tmp_path):
    plain = FeatureStore().images(Counting(), source)
    first, second = Counting(), Counting()
    a, b = (FeatureStore(tmp_path).images(e, source) for e in (first, second))
    assert (first.images, second.images) == (600, 0)
    assert a.keys == b.keys == plain.keys and a.facts == b.facts == [i % 5 for i in range(600)]
    assert torch.equal(a.in_memory(), b.in_memory()) and torch.equal(a.in_memory(), plain.in_memory())
    at = torch.tensor([599, 0, 300, 255, 256])
    assert torch.equal(b.rows(at), plain.in_memory()[at])
    assert torch.equal(torch.cat(list(b.blocks(100))), plain.in_memory())
    manifest = json.loads(next(tmp_path.glob("images/*/manifest.json")).read_text())
    assert manifest["checkpoint"]["sha256"] == first.weights and manifest["data"]["n"] == 600


def test_more_workers_than_shards_read_everything_in_order(tmp_path):
    write_wds_layout(tmp_path, [(f"{i:03d}", {"jpg": jpeg(i % 7), "cls": b"0"}) for i in range(300)], classnames=["a"])
    found = FeatureStore().images(Counting(), WdsSet(tmp_path, "label"), workers=3)
    assert found.keys == [f"{i:03d}" for i in range(300)]


def test_features_depend_on_weights_transforms_precision_views_and_data(source, tmp_path):
    store = FeatureStore(tmp_path)

    def encoded(encoder=None, **options):
        encoder = encoder or Counting()
        store.images(encoder, options.pop("source", source), **options)
        return encoder.images

    assert encoded() == 600 and encoded() == 0
    assert encoded(Counting(1)) == 600
    assert encoded(transform=Pixels(8, 16)) == 600
    other = Counting()
    other.precision = "bf16"
    assert encoded(other) == 600
    assert encoded(source=Limited(source, 100)) == 100
    # A limit above the size of the set means the whole set, instead of repeating its first samples under other names.
    beyond = Limited(source, 10_000)
    assert len(beyond) == 600 and [beyond.read(i)[0] for i in (0, 1, 599)] == [source.read(i)[0] for i in (0, 1, 599)]
    assert len({beyond.read(i)[0] for i in range(0, 600, 7)}) == 86
    assert beyond.identity() != sha256(
        source.identity(), "limit 600"
    )  # older versions stored wrong ones under this identity
    moved = Counting()
    moved.mean = moved.mean + 0.1
    assert encoded(moved) == 600
    assert FeatureStore(tmp_path, "fp16").images(again := Counting(), source) is not None and again.images == 600
    shard = next(iter(s.url for s in source.source.storages))
    os.utime(shard, ns=(1, 1))  # a new modification time, as if it was written again
    assert encoded() == 600


def test_tf32_is_used_while_a_model_runs_and_refused_on_a_cpu(source):
    encoder = Counting()
    encoder.precision = "tf32"
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    with pytest.raises(ZeroDivisionError), encoder.autocast():
        assert [flag.allow_tf32 for flag in flags] == [True, True]
        raise ZeroDivisionError
    assert [flag.allow_tf32 for flag in flags] == before
    with pytest.raises(ConfigError, match=r"--precision tf32: only NVIDIA GPUs have TF32, got cpu\. Use fp32\."):
        set_precision(Counting(), "tf32")


def test_half_precision_is_stored_and_read_as_fp32(source, tmp_path):
    half, full = (FeatureStore(tmp_path, kind).images(Counting(), source) for kind in ("fp16", "fp32"))
    assert half.parts[0].dtype == np.float16 and half.in_memory().dtype == torch.float32
    assert 0 < (half.in_memory() - full.in_memory()).abs().max() < 1e-3


def test_weights_that_are_written_through_data_are_hashed_again(source, tmp_path):
    encoder, store = clip(), FeatureStore(tmp_path)
    before = store.images(encoder, source).in_memory()
    for p in encoder.model.parameters():
        p.data.mul_(1.01)
    after = store.images(encoder, source).in_memory()
    assert not torch.equal(before, after)
    assert torch.equal(after, FeatureStore(tmp_path / "new").images(encoder, source).in_memory())


def test_a_damaged_part_is_encoded_again(source, tmp_path):
    FeatureStore(tmp_path).images(Counting(), source)
    part = sorted(tmp_path.glob("images/*/part-*.npy"))[1]
    part.write_bytes(part.read_bytes()[:200])
    again = Counting()
    found = FeatureStore(tmp_path).images(again, source)
    assert again.images == 256 and torch.equal(found.in_memory(), FeatureStore().images(Counting(), source).in_memory())


class _Killed(Counting):
    def encode(self, pixels):
        if self.images >= 256:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(pixels)


def _killed(root, place):
    FeatureStore(root).images(_Killed(), open_images(place, "label", "test"))


@pytest.mark.long
def test_a_kill_in_the_middle_loses_one_part_at_most(source, tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_killed, args=(tmp_path, str(source.root)))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    rest = Counting()
    found = FeatureStore(tmp_path).images(rest, source)
    assert rest.images == 600 - 256
    assert torch.equal(found.in_memory(), FeatureStore().images(Counting(), source).in_memory())


def test_parts_of_independent_processes_complete_each_other(source, tmp_path):
    counts = []
    for own in range(3):
        encoder = Counting()
        found = FeatureStore(tmp_path).images(encoder, source, part=(own, 3))
        counts.append(encoder.images)
        assert (found is None) == (own < 2)
    assert counts == [256, 256, 88]
    assert torch.equal(found.in_memory(), FeatureStore().images(Counting(), source).in_memory())


def test_a_part_of_a_task_with_two_sets_encodes_both_before_it_waits(source, tmp_path):
    task = KnnTaskConfig(task="knn", k=(1,), train=str(source.root), test=str(source.root), limit=599, workers=0)
    first, second = (Scoring("t", Counting(), FeatureStore(tmp_path), ALONE, (own, 2)) for own in (0, 1))
    other = task.model_copy(update={"test": str(copied(source, tmp_path / "copy"))})
    with pytest.raises(PartsMissingError, match="have not encoded all of"):
        run_knn(first, other)
    assert first.encoder.images == 2 * (599 - 256)
    assert run_knn(second, other).metrics["acc1_k1"] > 0.5 and second.encoder.images == 2 * 256


def copied(source, folder):
    shutil.copytree(source.root, folder)
    for path in folder.iterdir():
        os.utime(path, ns=(5, 5))
    return folder


def _on_rank(ranks, source, root):
    encoder = Counting()
    found = FeatureStore(root).images(encoder, source, ranks=ranks)
    return encoder.images, found.in_memory(), found.keys


def test_ranks_share_the_images_and_all_have_all(source, tmp_path):
    alone = _on_rank(Ranks(World(), "gloo", 0.0), source, None)
    for root in (tmp_path, None):
        results = run_ranks(2, _on_rank, source, root)
        assert sum(images for images, _, _ in results) == 600
        for _, whole, keys in results:
            assert torch.equal(whole, alone[1]) and keys == alone[2]


def _broken_on_rank(ranks, source, root):
    encoder = Counting()
    if ranks.rank == 1:
        encoder.encode = lambda pixels: torch.full((len(pixels), 4), float("nan"))
    try:
        FeatureStore(root).images(encoder, source, ranks=ranks)
    except DataError as error:
        return str(error)


def test_an_error_of_one_rank_ends_all_at_once(source, tmp_path):
    assert all("is not finite" in text for text in run_ranks(2, _broken_on_rank, source, tmp_path))


def test_encodings_that_are_not_finite_name_their_image(source, tmp_path):
    encoder = Counting()
    with torch.no_grad():
        encoder.model.bias[2] = float("inf")
    with pytest.raises(DataError, match=r"the encoding of '0000' is not finite \(in its batch, 256 of 256"):
        FeatureStore(tmp_path).images(encoder, source)
    assert not list(tmp_path.glob("images/*/part-*"))
    large = View("large", lambda pixels: pixels.float().mean((2, 3)) * 1e4)  # finite, but not in 16 bits
    with pytest.raises(DataError, match=r"is not finite .*--storage"):
        FeatureStore(tmp_path, "fp16").images(Counting(), source, view=large)
    measured = FeatureStore(tmp_path, "fp16").images(Counting(), source, view=large._replace(measured=True))
    assert torch.equal(measured.in_memory(), FeatureStore(tmp_path).images(Counting(), source, view=large).in_memory())


def test_texts_are_encoded_once_per_tower(tmp_path):
    encoder, store = Counting(), FeatureStore(tmp_path)
    found = store.texts(encoder, ["a cat", "a dog", "a cat"])
    assert encoder.texts == ["a cat", "a dog"] and torch.equal(found[0], found[2])
    again = FeatureStore(tmp_path).texts(encoder, ["a bird", "a dog"])
    assert encoder.texts == ["a cat", "a dog", "a bird"] and torch.equal(again[1], found[1])
    other = Counting()
    other.text_weights = "another"
    store.texts(other, ["a cat"])
    assert other.texts == ["a cat"]


def test_the_batch_is_halved_until_it_fits_and_remembered(tmp_path):
    path, encoder, sizes = tmp_path / "sizes.json", Counting(), []

    def call(pixels):
        sizes.append(len(pixels))
        if len(pixels) > 20:
            raise torch.OutOfMemoryError("too much")
        return pixels.float().mean((2, 3))

    pixels = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1).expand(-1, 3, 2, 2)
    found = BatchSize(path, 128).run(encoder, "v", call, pixels)
    assert torch.equal(found[:, 0], torch.arange(100).float()) and sizes[:4] == [100, 50, 25, 12]
    assert BatchSize(path, 128).known_size(encoder, "v") == 12
    path.write_text("damaged")
    assert BatchSize(path, 128).known_size(encoder, "v") == 128

    def never(_):
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(SparoError, match="one image does not fit"):
        BatchSize().run(encoder, "v", never, pixels)


def clip():
    torch.manual_seed(0)
    tree = {
        "vision": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8},
        "text": {"context_length": 16, "width": 16, "heads": 2, "layers": 2},
        "readout": {"kind": "sparo", "slots": 3, "slot_width": 4, "head_width": 4},
    }
    return ClipEncoder(Clip(ClipConfig.model_validate(tree)))


def test_a_selection_of_slots_is_an_encoder_over_the_same_stored_features(tmp_path):
    sets = eval_sets(tmp_path / "sets")
    source, store, inner = WdsSet(sets["zero"]["root"], "label"), FeatureStore(tmp_path / "store"), clip()
    whole = store.images(inner, source).in_memory()
    chosen = MaskedEncoder.keep_slots(inner, [0, 2])
    folders = len(list((tmp_path / "store/images").iterdir()))
    found = store.images(chosen, source).in_memory()
    assert len(list((tmp_path / "store/images").iterdir())) == folders
    assert (
        torch.equal(found[:, :4], whole[:, :4]) and not found[:, 4:8].any() and torch.equal(found[:, 8:], whole[:, 8:])
    )
    pixels = inner.stack([inner.transform(image) for _, image, _ in source])
    assert torch.allclose(chosen.encode(pixels), found, atol=1e-6)
    assert isinstance(chosen, TextEncoder) and torch.equal(chosen.text(["a cat"]), inner.text(["a cat"]))
    assert not isinstance(MaskedEncoder(PixelEncoder(4), torch.ones(48)), TextEncoder)
    whole_mask = copy.deepcopy(MaskedEncoder(inner, torch.ones(3)))
    assert isinstance(whole_mask, TextEncoder) and torch.equal(whole_mask.text(["a cat"]), inner.text(["a cat"]))
    for slots in ((number for number in (0, 2)), torch.tensor([0, 2]), np.array([0, 2])):
        assert torch.equal(MaskedEncoder.keep_slots(inner, slots).mask, chosen.mask)
    for slots, message in (
        ([0, 0], "slots: names a slot twice"),
        ([True], "slots True: .* numbered from 0"),
        ([], "slots : "),
    ):
        with pytest.raises(ConfigError, match=message):
            MaskedEncoder.keep_slots(inner, slots)
    with pytest.raises(ConfigError, match=r"expected a mask of shape \(12,\) or \(3,\), got \(5,\)"):
        MaskedEncoder(inner, torch.ones(5))


def test_texts_of_any_length_are_encoded_as_alone():
    encoder = clip()
    captions = [
        "a",
        "a small red cube on a big blue ball",
        "two",
        "a",
        "one two three four five six seven eight nine ten",
    ]
    tokens = encoder.tokenizer.batch(captions)
    with torch.inference_mode():
        alone = encoder.model.encode_text(tokens, normalize=True)
    assert torch.allclose(encoder.text(captions, batch=2), alone, atol=1e-6)


def test_masks_and_slots_are_stored(tmp_path):
    folder, rng = tmp_path / "masks", np.random.default_rng(0)
    masks = [rng.integers(0, 5, (6, 8)).astype(np.uint8) for _ in range(10)]
    rows = []
    for i, mask in enumerate(masks):
        png = io.BytesIO()
        Image.fromarray(mask).save(png, format="PNG")
        rows.append((f"{i:03d}", {"jpg": jpeg(i, (8, 6)), "mask.png": png.getvalue()}))
    write_wds_layout(folder, rows)
    source = WdsSet(folder, "masks")
    slots = View("slots", lambda pixels: pixels.float().mean((2, 3)).unflatten(1, (3, 1)))  # (n, L, D)
    store = FeatureStore(tmp_path / "store")
    for _ in range(2):  # written, then read
        found = store.images(Counting(), source, view=slots)
        assert all(np.array_equal(fact, mask) for fact, mask in zip(found.facts, masks, strict=True))
        assert found.in_memory().shape == (10, 3, 1) and found.width == 3
        assert torch.equal(found.rows(torch.tensor([7, 2])), found.in_memory()[[7, 2]])
    (table,) = (tmp_path / "store").rglob("part-*.facts.npz")
    table.write_bytes(table.read_bytes()[:40])  # incomplete: the part is computed again
    assert np.array_equal(store.images(Counting(), source, view=slots).facts[3], masks[3])
    write_wds_layout(tmp_path / "bad", [("0", {"jpg": jpeg(1), "mask.png": jpeg(2)})])
    with pytest.raises(DataError, match=r"sample 0: \.mask\.png: is not a PNG file"):
        WdsSet(tmp_path / "bad", "masks").read(0)
