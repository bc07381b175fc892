"""Label maps of videos and images whose numbers, backgrounds or owners would silently be taken for others."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from evals.sets.pictures import label_image
from evals.tasks.objects.segmentation import image_scores
from object_centric.tasks.video_task import VideoMasksTaskConfig
from object_centric.video.clip_examples import hint_labels
from sparo_data.official.folders import coco
from sparo_data.official.published import decode_array
from sparo_data.official.viewed import _frame
from sparo_train.core.errors import BadSampleError, DataError
from sparo_train.data.video.episode import Episode, is_episode
from tests.helpers.samples import jpeg


def gray_png(table, bits):
    """Return a grey PNG with `bits` per pixel, which Pillow does not write."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b""
    for row in table:
        text = "".join(f"{value:0{bits}b}" for value in row)
        rows += b"\0" + bytes(int(text[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(text), 8))
    head = struct.pack(">IIBBBBB", table.shape[1], table.shape[0], bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_labels_of_few_bits_keep_their_numbers(bits):
    table = np.arange(16).reshape(4, 4) % min(2**bits, 16)
    data = gray_png(table, bits)
    assert np.array_equal(label_image(data, "x"), table) and np.array_equal(decode_array(data, "x", labels=True), table)
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    episode = Episode({"000.png": buffer.getvalue(), "000.mask.png": data})
    assert np.array_equal(episode.labels(0), table)


@pytest.mark.parametrize("digits", [3, 4, 6])
def test_frames_may_be_numbered_with_more_digits(digits):
    frames = {f"{t:0{digits}d}.jpg": jpeg(t) for t in range(12)}
    episode = Episode(frames)
    assert is_episode(frames) and len(episode) == 12
    assert np.array_equal(episode.image(11), Episode({"000.jpg": jpeg(11)}).image(0))
    assert not is_episode({"2021.jpg": jpeg(0)})


def test_the_background_of_instances_is_also_that_of_classes():
    true = np.repeat([[0, 1, 2, 2]], 4, 0)
    classes = np.repeat([[0, 5, 3, 3]], 4, 0)
    predicted = np.repeat([[0, 1, 1, 2]], 4, 0)
    expected = image_scores(true, predicted, classes=classes)["mbo_c"]
    renamed = np.asarray([7, 0, 2])[true]  # the same masks, with background 7
    assert image_scores(renamed, predicted, background=7, classes=classes)["mbo_c"] == pytest.approx(expected)
    zero = np.asarray([9, 0, 3])[true]  # class 0 is an object if its instances are
    assert image_scores(true, predicted, classes=zero)["mbo_c"] == pytest.approx(expected)


def test_void_pixels_are_neither_scored_nor_objects():
    assert VideoMasksTaskConfig(root="x").ignore == 255
    assert hint_labels(np.asarray([[0, 1], [255, 2]]), 3).tolist() == [[0, 1], [0, 2]]
    with pytest.raises(BadSampleError, match="outside the numbers of the slots"):
        hint_labels(np.asarray([[0, 3]]), 3)


def test_objects_of_merged_files_are_not_mixed(tmp_path, caplog):
    pytest.importorskip("pycocotools")
    (tmp_path / "train").mkdir()
    (tmp_path / "annotations").mkdir()
    for name in "ab":
        (tmp_path / f"train/{name}.jpg").write_bytes(jpeg(0, (8, 8)))
    box = {"category_id": 1, "iscrowd": 0, "segmentation": [[0, 0, 4, 0, 4, 4, 0, 4]]}
    tree = {
        "images": [{"id": 1, "file_name": f"{name}.jpg", "height": 8, "width": 8} for name in "ab"],
        "annotations": [{"id": 1, "image_id": 1, **box}, {"id": 2, "image_id": 3, **box}],
        "categories": [{"id": 1, "name": "x"}],
    }
    path = tmp_path / "annotations/instances_train.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match="2 images have the id 1, so it is unclear which objects"):
        list(coco(path))
    tree["images"][1]["id"] = 2
    path.write_text(json.dumps(tree))
    assert len(list(coco(path))) == 2
    assert "1 objects belong to 1 image ids that the file does not list" in caplog.text


def test_cameras_have_the_axes_that_their_file_names(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0, (8, 8)))
    frame = {"file_path": "a.jpg", "transform_matrix": np.eye(4).tolist()}
    lens = {"fl_x": 8.0, "fl_y": 8.0}
    views = [_frame(tmp_path / "t.json", 0, {**lens, **more}, frame) for more in ({}, {"convention": "OpenCV"})]
    assert np.allclose(views[0].pose, np.eye(4)) and np.allclose(views[1].pose, np.diag([1, -1, -1, 1]))
    with pytest.raises(DataError, match=r"convention must be one of opengl, opencv, got 'colmap'"):
        _frame(tmp_path / "t.json", 0, {**lens, "camera_convention": "colmap"}, frame)
