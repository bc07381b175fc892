# pyright: reportMissingImports=false
"""Write small records in MOVi's format with TFDS' own serialiser.

movi_tiny-train.tfrecord-00000-of-00001: two videos with MOVi-A's features, the second without `size_label`.
movi_tiny_bc-train.tfrecord-00000-of-00001: one with MOVi-B's and one with MOVi-C's. Run in a separate environment:

    pip install tensorflow-cpu tensorflow-datasets && python tests/data/make_movi_tiny.py
"""

from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets import features as kinds

TIMES, HEIGHT, WIDTH = 4, 8, 12


def tensor(*shape, dtype=tf.float32):
    return kinds.Tensor(shape=shape, dtype=dtype)


SHAPES = ("cube", "cylinder", "sphere", "cone", "torus", "gear", "torus_knot", "sponge", "spot", "teapot", "suzanne")
CATEGORIES = (
    "Action Figures", "Bag", "Board Games", "Bottles and Cans and Cups", "Camera", "Car Seat", "Consumer Goods", "Hat", "Headphones",
    "Keyboard", "Legos", "Media Cases", "Mouse", "None", "Shoe", "Stuffed Toys", "Toys",
)  # fmt: skip
OWN = {  # features of an object; features that only two objects of a video have
    "a": (
        {
            "shape_label": kinds.ClassLabel(names=["cube", "cylinder", "sphere"]),
            "color": tensor(3),
            "color_label": kinds.ClassLabel(
                names=["blue", "brown", "cyan", "gray", "green", "purple", "red", "yellow"]
            ),
            "material_label": kinds.ClassLabel(names=["metal", "rubber"]),
            "size_label": kinds.ClassLabel(names=["small", "large"]),
        },
        (
            {"shape_label": "cube", "color_label": "red", "material_label": "metal", "size_label": "large"},
            {"shape_label": "sphere", "color_label": "blue", "material_label": "rubber", "size_label": "small"},
        ),
    ),
    "b": (
        {
            "shape_label": kinds.ClassLabel(names=list(SHAPES)),
            "color": tensor(3),
            "material_label": kinds.ClassLabel(names=["metal", "rubber"]),
        },
        ({"shape_label": "sponge", "material_label": "rubber"}, {"shape_label": "suzanne", "material_label": "metal"}),
    ),
    "c": (
        {"asset_id": kinds.Text(), "category": kinds.ClassLabel(names=list(CATEGORIES)), "scale": tf.float32},
        (
            {"asset_id": "Shoe_of_Someone", "category": "Shoe", "scale": 1.5},
            {"asset_id": "Caf\u00e9_Mug", "category": "Toys", "scale": 0.75},
        ),
    ),
}
OWN["a without sizes"] = tuple(
    {k: v for k, v in part.items() if k != "size_label"} if isinstance(part, dict) else
    tuple({k: v for k, v in one.items() if k != "size_label"} for one in part)
    for part in OWN["a"]
)  # fmt: skip


def described(variant):
    """Return the features of a variant of MOVi at this size (kubric, challenges/movi)."""
    instance = {
        **dict.fromkeys(("mass", "friction", "restitution"), tf.float32),
        **{name: tensor(TIMES, 3) for name in ("positions", "velocities", "angular_velocities")},
        "quaternions": tensor(TIMES, 4),
        "bboxes_3d": tensor(TIMES, 8, 3),
        "image_positions": tensor(TIMES, 2),
        "bboxes": kinds.Sequence(kinds.BBoxFeature()),
        "bbox_frames": kinds.Sequence(tensor(dtype=tf.int32)),
        "visibility": tensor(TIMES, dtype=tf.uint16),
        **OWN[variant][0],
    }
    collision = {"instances": tensor(2, dtype=tf.uint16), "frame": tf.int32, "force": tf.float32, "position": tensor(3),
                 "image_position": tensor(2), "contact_normal": tensor(3)}  # fmt: skip
    flow = kinds.Sequence(tensor(HEIGHT, WIDTH, 2, dtype=tf.uint16), length=TIMES)
    return kinds.FeaturesDict(
        {
            "metadata": {
                "video_name": kinds.Text(),
                **dict.fromkeys(("width", "height", "num_frames"), tf.int32),
                "num_instances": tf.uint16,
                **{f"{name}_range": tensor(2) for name in ("depth", "forward_flow", "backward_flow")},
            },
            "instances": kinds.Sequence(feature=instance),
            "camera": {
                **dict.fromkeys(("focal_length", "sensor_width", "field_of_view"), tf.float32),
                "positions": tensor(TIMES, 3),
                "quaternions": tensor(TIMES, 4),
            },
            "events": {"collisions": kinds.Sequence(collision)},
            "video": kinds.Video(shape=(TIMES, HEIGHT, WIDTH, 3)),
            "segmentations": kinds.Sequence(kinds.Image(shape=(HEIGHT, WIDTH, 1), dtype=tf.uint8), length=TIMES),
            "forward_flow": flow,
            "backward_flow": flow,
            "depth": kinds.Sequence(kinds.Image(shape=(HEIGHT, WIDTH, 1), dtype=tf.uint16), length=TIMES),
            "normal": kinds.Video(shape=(TIMES, HEIGHT, WIDTH, 3), dtype=tf.uint16),
            "object_coordinates": kinds.Video(shape=(TIMES, HEIGHT, WIDTH, 3), dtype=tf.uint16),
        }
    )


def ramp(*shape, step=1, mod=65536, dtype=np.uint16):
    return (np.arange(np.prod(shape)) * step % mod).reshape(shape).astype(dtype)


def numbers(*shape, more=0.0):
    return (np.arange(np.prod(shape), dtype=np.float32) / 8 + more).reshape(shape)


def instance(number, variant):
    seen = list(range(TIMES)) if number == 0 else [1, 3]
    return {
        "mass": 1.5 + number, "friction": 0.4, "restitution": 0.3,
        "positions": numbers(TIMES, 3, more=number), "quaternions": numbers(TIMES, 4, more=number),
        "velocities": numbers(TIMES, 3, more=10 + number), "angular_velocities": numbers(TIMES, 3, more=20 + number),
        "bboxes_3d": numbers(TIMES, 8, 3), "image_positions": numbers(TIMES, 2) / 10,
        "bboxes": [kinds.BBox(ymin=0.125 * number, xmin=0.25, ymax=0.5, xmax=0.5 + 0.0625 * t) for t in seen],
        "bbox_frames": np.array(seen, np.int32), "visibility": np.arange(TIMES).astype(np.uint16) * (number + 1),
        **({"color": numbers(3) / 4} if "color" in OWN[variant][0] else {}), **OWN[variant][1][number],
    }  # fmt: skip


def video(name, variant):
    collision = {"instances": np.array([0, 65535], np.uint16), "frame": 2, "force": 1.0, "position": numbers(3),
                 "image_position": numbers(2), "contact_normal": numbers(3)}  # fmt: skip
    ranges = {"depth_range": [2, 12], "forward_flow_range": [-4, 4], "backward_flow_range": [-3, 5]}
    return {
        "metadata": {"video_name": name, "width": WIDTH, "height": HEIGHT, "num_frames": TIMES, "num_instances": 2,
                     **{key: np.array(bounds, np.float32) for key, bounds in ranges.items()}},
        "instances": [instance(number, variant) for number in range(2)],
        "camera": {"focal_length": 35.0, "sensor_width": 32.0, "field_of_view": 0.85, "positions": numbers(TIMES, 3),
                   "quaternions": numbers(TIMES, 4)},
        "events": {"collisions": [collision]},
        "video": list(ramp(TIMES, HEIGHT, WIDTH, 3, step=7, mod=256, dtype=np.uint8)),
        "segmentations": list(ramp(TIMES, HEIGHT, WIDTH, 1, mod=3, dtype=np.uint8)),
        "forward_flow": ramp(TIMES, HEIGHT, WIDTH, 2, step=91), "backward_flow": ramp(TIMES, HEIGHT, WIDTH, 2, step=83),
        "depth": list(ramp(TIMES, HEIGHT, WIDTH, 1, step=101)),
        "normal": list(ramp(TIMES, HEIGHT, WIDTH, 3)), "object_coordinates": list(ramp(TIMES, HEIGHT, WIDTH, 3)),
    }  # fmt: skip


if __name__ == "__main__":
    files = {"movi_tiny": (("17", "a"), ("18/b", "a without sizes")), "movi_tiny_bc": (("b", "b"), ("c", "c"))}
    for stem, videos in files.items():
        place = Path(__file__).with_name(f"{stem}-train.tfrecord-00000-of-00001")
        with tf.io.TFRecordWriter(str(place)) as writer:
            for name, variant in videos:
                made = described(variant)
                serializer = tfds.core.example_serializer.ExampleSerializer(made.get_serialized_info())
                writer.write(serializer.serialize_example(made.encode_example(video(name, variant))))
