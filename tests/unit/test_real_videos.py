"""DAVIS and YouTube-VIS as downloaded: frames, object numbers, boxes, and damaged files."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from evals.sets.open_set import open_set
from object_centric.tasks.mask_task import MasksTaskConfig
from object_centric.tasks.video_task import VideoMasksTaskConfig, open_clips
from sparo_data.official.formats import convert_published, find_source_files
from sparo_data.official.published import PublishedConfig
from sparo_data.official.real_videos import REAL_VIDEOS, davis, youtube_vis
from sparo_data.official.run_lengths import decode_run_lengths
from sparo_train.core.errors import DataError
from tests.helpers.processes import sparo

SIDE = (24, 40)  # height, width


def jpg(shade):
    stream = io.BytesIO()
    Image.new("RGB", SIDE[::-1], (shade, 90, 120)).save(stream, "JPEG")
    return stream.getvalue()


def plane(t):
    """Write frames: object 1 moves to the right, object 2 disappears after the first frame, and a corner is not scored."""
    found = np.zeros(SIDE, np.uint8)
    found[2:8, 3 + t : 9 + t] = 1
    if t == 0:
        found[12:20, 20:30] = 2
    found[0, 0] = 255
    return found


def write_davis(root, names=("bear", "dog"), frames=3, masks=True, folder="480p"):
    (root / "ImageSets/2017").mkdir(parents=True)
    (root / "ImageSets/2017/train.txt").write_text("\n".join(names) + "\n")
    for name in names:
        for t in range(frames):
            place = root / "JPEGImages" / folder / name / f"{t:05d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(jpg(10 * t))
            if masks is True or (masks == "first" and t == 0):
                label = root / "Annotations" / folder / name / f"{t:05d}.png"
                label.parent.mkdir(parents=True, exist_ok=True)
                image = Image.fromarray(plane(t), "P")
                image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0] + [0] * 759)
                image.save(label)
    return root / "ImageSets/2017/train.txt"


def runs(mask):
    flat = mask.flatten(order="F").astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *edges, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": counts if not flat[0] else [0, *counts]}


def write_youtube(root, masked=True, **changes):
    frames = [f"cat/{t:05d}.jpg" for t in range(3)]
    for t, name in enumerate(frames):
        place = root / "train/JPEGImages" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(jpg(10 * t))
    masks = [plane(t) for t in range(3)]
    objects = [
        {"id": 7, "video_id": 1, "category_id": 5, "iscrowd": 0, "segmentations": [runs(m == 1) for m in masks]},
        {"id": 9, "video_id": 1, "category_id": 9, "iscrowd": 0, "segmentations": [runs(masks[0] == 2), None, None]},
    ]
    tree = {
        "videos": [{"id": 1, "height": SIDE[0], "width": SIDE[1], "length": 3, "file_names": frames}],
        "categories": [{"id": 5, "name": "cat"}],
        **({"annotations": objects} if masked else {}),
        **changes,
    }
    (root / "train.json").write_text(json.dumps(tree))
    return root / "train.json"


def test_davis_videos_have_the_numbers_of_their_palette(tmp_path):
    bear, dog = davis(write_davis(tmp_path))
    assert (bear.key, dog.key) == ("bear", "dog") and len(bear.frames) == 3
    assert all(np.array_equal(bear.labels[t], plane(t)) for t in range(3))
    assert bear.boxes.shape == (3, 2, 4) and not bear.boxes[1:, 1].any()
    top, left = 2 / SIDE[0], 3 / SIDE[1]
    assert bear.boxes[0, 0, :2] == pytest.approx((top, left))


def test_frames_are_in_the_order_of_their_numbers_whatever_their_suffix(tmp_path):
    split = write_davis(tmp_path, names=("bear",), frames=12, masks=False)
    for place in sorted((tmp_path / "JPEGImages/480p/bear").glob("*.jpg")):
        place.rename(place.with_name(f"{int(place.stem)}{'.JPG' if int(place.stem) % 2 else '.jpeg'}"))
    (bear,) = davis(split)
    assert bear.frames == [jpg(10 * t) for t in range(12)]


def test_frames_that_exif_rotates_without_their_masks_are_refused(tmp_path):
    split = write_davis(tmp_path, names=("bear",))
    place = tmp_path / "JPEGImages/480p/bear/00001.jpg"
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.open(place).save(place, exif=exif)
    with pytest.raises(DataError, match=r"00001\.jpg is rotated by EXIF, but its mask is not"):
        list(davis(split))


def test_videos_whose_frames_are_in_folders_of_one_name_are_separate(tmp_path):
    path = write_youtube(tmp_path, masked=False)
    tree = json.loads(path.read_text())
    (video,) = tree["videos"]
    for number in (1, 2):
        for name in video["file_names"]:
            place = tmp_path / f"train/JPEGImages/v{number}/rgb/{name[4:]}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(jpg(number))
    names = [[f"v{number}/rgb/{name[4:]}" for name in video["file_names"]] for number in (1, 2)]
    tree["videos"] = [{**video, "id": number + 1, "file_names": names[number]} for number in range(2)]
    path.write_text(json.dumps(tree))
    keys = {video.key for video in youtube_vis(path)}
    assert len(keys) == 2 and all("rgb" in key for key in keys)


@pytest.mark.parametrize("masks", [False, "first"])
def test_test_sets_of_davis_have_no_masks(tmp_path, masks, caplog):
    for video in davis(write_davis(tmp_path, masks=masks, folder="Full-Resolution")):
        assert video.labels is None and video.boxes is None and len(video.frames) == 3
    assert not caplog.records


def test_a_video_that_lacks_some_masks_is_reported(tmp_path, caplog):
    split = write_davis(tmp_path)
    (tmp_path / "Annotations/480p/dog/00001.png").unlink()
    with caplog.at_level("WARNING"):
        bear, dog = davis(split)
    assert bear.labels is not None and dog.labels is None
    assert [r.getMessage().partition("Annotations")[2] for r in caplog.records] == [
        "/480p/dog: lacks 1 of 3 masks, so this video is written without masks. Fetch DAVIS' annotations again."
    ]


def test_youtube_videos_have_objects_in_the_order_of_the_file(tmp_path):
    (video,) = youtube_vis(write_youtube(tmp_path))
    assert video.key == "cat" and [o["category"] for o in video.metadata["objects"]] == ["cat", "unknown"]
    for t in range(3):
        expected = plane(t)
        expected[0, 0] = 0
        assert np.array_equal(video.labels[t], expected)
    (validation,) = youtube_vis(write_youtube(tmp_path, masked=False))
    assert validation.labels is None


def test_pixels_of_two_objects_and_of_crowds_are_not_scored(tmp_path):
    mask, other = np.zeros(SIDE, bool), np.zeros(SIDE, bool)
    mask[:10, :10], other[5:15, 5:15] = True, True
    one = {"video_id": 1, "category_id": 5, "segmentations": [runs(mask)] * 3}
    objects = [one, {**one, "segmentations": [runs(other)] * 3, "iscrowd": 1}]
    (video,) = youtube_vis(write_youtube(tmp_path, annotations=objects))
    assert (video.labels[0][mask & ~other] == 1).all() and (video.labels[0][other] == 255).all()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_run_lengths_are_read_as_written(height, width, seed):
    mask = np.random.default_rng(seed).random((height, width)) < 0.5
    assert np.array_equal(decode_run_lengths(runs(mask), mask.shape), mask)


KEYS = st.sampled_from(["size", "counts", "id", "video_id", "file_names"])


@given(
    st.recursive(
        st.none() | st.integers(-9, 99) | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=9,
    )
)
@settings(max_examples=60, deadline=None)
def test_other_files_are_refused_by_name(tmp_path_factory, tree):
    root = tmp_path_factory.mktemp("y")
    for key in ("annotations", "videos", "categories"):
        path = write_youtube(root, **{key: tree})
        try:
            list(youtube_vis(path))
        except DataError as error:
            assert str(path) in str(error)


def test_errors_name_the_cause(tmp_path):
    path = write_davis(tmp_path / "d")
    (tmp_path / "d/Annotations/480p/bear/00001.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"00001.png: is not a readable picture"):
        list(davis(path))
    Image.fromarray(plane(0)[:5]).save(tmp_path / "d/Annotations/480p/bear/00001.png")
    with pytest.raises(DataError, match=r"masks have \(40, 5\) pixels, but 00001.jpg has"):
        list(davis(path))
    path.write_text("../../etc")
    with pytest.raises(DataError, match=r"'../../etc' is not the name of a video"):
        list(davis(path))
    path.write_text("cow")
    with pytest.raises(DataError, match=r"JPEGImages/480p/cow: has no JPEG or PNG files"):
        list(davis(path))
    path = write_youtube(tmp_path / "y", videos=[{"id": 1, "height": 2, "width": 2, "file_names": ["../x.jpg"]}])
    with pytest.raises(DataError, match=r"video 1 has no frames, or the path of a frame points outside of the folder"):
        list(youtube_vis(path))
    short = {"video_id": 1, "category_id": 5, "segmentations": [{"size": list(SIDE), "counts": [3]}] * 3}
    with pytest.raises(DataError, match=r"video cat: object 0, frame 0: run lengths do not match the image"):
        list(youtube_vis(write_youtube(tmp_path / "z", annotations=[short])))
    done = sparo("data", "convert", str(tmp_path / "d"), "out", "--as", "davis", cwd=tmp_path)
    assert done.returncode == 2 and "is a folder; --as davis reads DAVIS/ImageSets/2017/SPLIT.txt" in done.stderr


@pytest.mark.parametrize("name", sorted(REAL_VIDEOS))
def test_converted_videos_are_scored_as_clips_and_as_images(tmp_path, name):
    path = write_davis(tmp_path) if name == "davis" else write_youtube(tmp_path)
    assert find_source_files(path, name) == [path]
    config = PublishedConfig(source=name, test=9, size=32, videos=True)
    convert_published([path], tmp_path / "clips", config)
    clips = open_clips(VideoMasksTaskConfig(task="video_masks", root=str(tmp_path / "clips/clips")))
    assert len(clips) == (2 if name == "davis" else 1)
    _, frames, masks = clips.read(0)
    assert len(frames) == 3 and frames[0].size == (32, 32) and set(np.unique(masks)) >= {0, 1, 2}
    # Whole videos are split, so that no frame of a test video is trained on.
    done = sparo("data", "convert", str(path), "images", "--as", name, "--test", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    images = open_set(MasksTaskConfig(task="masks", root=str(tmp_path / "images/masks")), "masks")
    assert len(images) == (6 if name == "davis" else 3) and images.read(0)[1].size == SIDE[::-1]
