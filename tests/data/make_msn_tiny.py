# pyright: reportMissingImports=false
"""Write msn_tiny-train.tfrecord-00000-of-00001 with TFDS' serialiser and sunds' specification: two scenes of three cameras.

msn_tiny_rays.npz has the rays that sunds computes for them. Run in a separate environment:

    pip install tensorflow-cpu tensorflow-datasets sunds && python tests/data/make_msn_tiny.py
"""

from pathlib import Path

import numpy as np
import sunds
import tensorflow as tf
import tensorflow_datasets as tfds
from sunds.core import tf_geometry

HEIGHT = WIDTH = 8
CAMERAS = ("camera_0", "camera_1", "camera_10")


def described():
    """Return the features of MultiShapeNet's frames (sunds/datasets/kubric/utils.py), without categories."""
    camera = sunds.specs.camera_spec(
        color_image=True, depth_image=True, instance_image=tfds.features.Image(shape=(HEIGHT, WIDTH, 1)),
        img_shape=(HEIGHT, WIDTH),
    )  # fmt: skip
    frame = dict(sunds.specs.frame_spec(cameras=dict.fromkeys(CAMERAS, camera)))
    frame.pop("timestamp")
    return tfds.features.FeaturesDict(frame)


def looking(eye):
    """Return the world-to-camera pose with OpenCV's axes: z points ahead, y down."""
    ahead = -np.asarray(eye) / np.linalg.norm(eye)
    right = np.cross(ahead, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    turn = np.stack([right, np.cross(ahead, right), ahead])
    return {"R": turn.astype(np.float32), "t": (-turn @ eye).astype(np.float32)}


def camera(scene, number):
    ramp = np.arange(HEIGHT * WIDTH)
    return {
        "intrinsics": {
            "image_width": WIDTH, "image_height": HEIGHT, "type": "PERSPECTIVE",
            "K": np.array([[9.0, 0, 4.25], [0, 8.5, 3.75], [0, 0, 1]], np.float32),
            "distortion": {"radial": np.zeros(3, np.float32), "tangential": np.zeros(2, np.float32)},
        },
        "extrinsics": looking([4.0 + scene, 1.0 + number, 3.0]),
        "color_image": (np.arange(HEIGHT * WIDTH * 3) * (7 + number) % 256).reshape(HEIGHT, WIDTH, 3).astype(np.uint8),
        "instance_image": ((ramp + number) % 4).reshape(HEIGHT, WIDTH, 1).astype(np.uint8),
        "depth_image": (1.5 + ramp / 8 + (1e10 if scene else 0) * (ramp == 5)).reshape(HEIGHT, WIDTH, 1).astype(np.float32),
    }  # fmt: skip


def scene(number):
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]] if number else np.eye(3), np.float32)
    return {
        "scene_name": f"scene_{number}", "frame_name": f"scene_{number}",
        "pose": {"R": turn, "t": np.array([0.5, 0, 0], np.float32) * number},
        "cameras": {name: camera(number, at) for at, name in enumerate(CAMERAS)},
    }  # fmt: skip


def rays(made):
    """Return origins and unit directions (H, W, 3) of each camera's rays, computed by sunds."""
    found = {}
    frame = tf_geometry.Isometry(**made["pose"])
    for name, told in made["cameras"].items():
        whole = frame * tf_geometry.Isometry(**told["extrinsics"]).inverse()
        pinhole = tf_geometry.PinholeCamera(K=told["intrinsics"]["K"], image_width=WIDTH, image_height=HEIGHT)
        origins, directions = tf_geometry.rays_from_image_grid(camera=pinhole, world_from_camera=whole)
        found[name] = np.stack([origins.numpy(), directions.numpy()])
    return np.stack([found[name] for name in CAMERAS])


if __name__ == "__main__":
    place = Path(__file__).parent
    made = [scene(number) for number in range(2)]
    with tf.io.TFRecordWriter(str(place / "msn_tiny-train.tfrecord-00000-of-00001")) as writer:
        kind = described()
        serializer = tfds.core.example_serializer.ExampleSerializer(kind.get_serialized_info())
        for one in made:
            writer.write(serializer.serialize_example(kind.encode_example(one)))
    np.savez(place / "msn_tiny_rays.npz", rays=np.stack([rays(one) for one in made]))
