"""Poses and lenses of pinhole cameras, validated, in one convention.

A pose is camera to world, (4, 4). The convention is that of OpenGL and Blender (x right, y up, looking along -z);
OpenCV's (x right, y down, looking along z) is converted. A lens is (fx, fy, cx, cy) in pixels, where (0, 0) is the
upper left corner of the first pixel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ...core.errors import BadSampleError

Convention = Literal["opengl", "opencv"]
_FLIP_YZ = np.diag([1.0, -1.0, -1.0, 1.0])
_MAX_DISTANCE = 1e15  # world units; squared distances must be representable in fp32
_ROTATION_TOLERANCE = 1e-3  # distance from a rotation; rounded numbers in JSON files are this close


def convert_pose(pose: np.ndarray, source: Convention, target: Convention = "opengl") -> np.ndarray:
    """Convert (…, 4, 4) to another convention by flipping the camera's y and z axes."""
    return pose if source == target else pose @ _FLIP_YZ


def parse_pose(table: Any, convention: Convention = "opengl") -> np.ndarray:
    """Return (4, 4) fp64 in OpenGL's convention from rows (4, 4) or (3, 4); a scale common to all three axes is removed.

    Raises:
        BadSampleError: not such numbers, or not a rotation: singular, skewed, or mirrored.
    """
    try:
        pose = np.asarray(table, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise BadSampleError("a camera's pose is not a matrix of numbers") from None
    if pose.shape == (3, 4):
        pose = np.concatenate([pose, [[0.0, 0.0, 0.0, 1.0]]])
    if pose.shape != (4, 4) or not np.isfinite(pose).all():
        raise BadSampleError("a camera's pose is not 4 x 4 finite numbers")
    if np.abs(pose).max() > _MAX_DISTANCE:
        raise BadSampleError(f"a camera is farther from the origin than {_MAX_DISTANCE:g}")
    # Remove the scale, which exporters of rescaled scenes write into the rotation.
    lengths = np.linalg.norm(pose[:3, :3], axis=0)
    if lengths.min() < 1e-8 or abs(np.linalg.det(pose[:3, :3] / np.maximum(lengths, 1e-8))) < 1e-6:
        raise BadSampleError("a camera's pose is singular")
    turn = pose[:3, :3] / lengths.mean()
    if (
        np.abs(turn.T @ turn - np.eye(3)).max() > _ROTATION_TOLERANCE
        or np.abs(pose[3] - [0, 0, 0, 1]).max() > _ROTATION_TOLERANCE
    ):
        raise BadSampleError("a camera's pose is not a rotation and a translation")
    # A mirrored camera sees another scene, and correcting it would guess which axis was meant.
    if np.linalg.det(turn) < 0:
        raise BadSampleError("a camera's pose is mirrored")
    return convert_pose(np.block([[turn, pose[:3, 3:]], [np.array([[0.0, 0.0, 0.0, 1.0]])]]), convention)


def parse_lens(camera_params: Mapping[str, Any], width: int, height: int) -> np.ndarray:
    """Return (4,) fp64 fx, fy, cx, cy of an image, in pixels.

    The input is `fl_x`, `fl_y`, `cx`, `cy` in pixels of `w` x `h` (nerfstudio), `fov` (vertical, in degrees), or
    `camera_angle_x`, `camera_angle_y` (Blender, in radians).

    Raises:
        BadSampleError: none of them, values that are not positive and finite, or a lens whose rays overflow fp32.
    """
    wide, tall = _number(camera_params, "w", width), _number(camera_params, "h", height)
    # Lenses refer to the image as it was taken; this one may be smaller.
    if "fl_x" in camera_params:
        fx = _number(camera_params, "fl_x") * width / wide
        fy = _number(camera_params, "fl_y", _number(camera_params, "fl_x")) * height / tall
    elif "fov" in camera_params:
        fx = fy = height / 2 / np.tan(np.radians(_angle(camera_params, "fov", 180.0)) / 2)
    elif "camera_angle_x" in camera_params:
        fx = width / 2 / np.tan(_angle(camera_params, "camera_angle_x", np.pi) / 2)
        fy = (
            height / 2 / np.tan(_angle(camera_params, "camera_angle_y", np.pi) / 2)
            if "camera_angle_y" in camera_params
            else fx
        )
    else:
        raise BadSampleError("a camera without fov, fl_x or camera_angle_x")
    cx = _number(camera_params, "cx", wide / 2) * width / wide
    cy = _number(camera_params, "cy", tall / 2) * height / tall
    lens = np.array([fx, fy, cx, cy])
    if not (np.abs(lens) < _MAX_DISTANCE).all():  # even for finite input: 1e308 scaled to a smaller image
        raise BadSampleError(f"a camera's focal length or principal point is not below {_MAX_DISTANCE:g} pixels")
    return lens


def cut_lens(lens: np.ndarray, width: int, height: int, size: int) -> np.ndarray:
    """Return the lens of an image's centre crop at `size` pixels per side, as cut by `eval_pixels`."""
    scale = size / min(width, height)
    # Round like torchvision's resize rounds the longer side.
    wide, tall = (size if n == min(width, height) else int(size * n / min(width, height)) for n in (width, height))
    # Its centre crop rounds to the even number, as Python does.
    left, top = round((wide - size) / 2), round((tall - size) / 2)
    sx, sy = (scale if width <= height else wide / width), (scale if height <= width else tall / height)
    fx, fy, cx, cy = lens
    return np.array([fx * sx, fy * sy, cx * sx - left, cy * sy - top])


def look_at(eye: Any, target: Any, up: Any = (0.0, 0.0, 1.0)) -> np.ndarray:
    """Return the pose of a camera at `eye` that looks at `target`."""
    back = np.subtract(eye, target).astype(np.float64)
    back /= np.linalg.norm(back)
    right = np.cross(up, back)
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3] = np.stack([right, np.cross(back, right), back, np.asarray(eye, np.float64)], axis=1)
    return pose


def _number(camera_params: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = camera_params.get(name, default)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan
    except OverflowError:  # an integer with more digits than a float can hold
        number = np.inf
    if not np.isfinite(number):
        raise BadSampleError(f"a camera's {name} is not a finite number")
    if number <= 0 and name not in ("cx", "cy"):
        raise BadSampleError(f"a camera's {name} is not above 0")
    return number


def _angle(camera_params: Mapping[str, Any], name: str, limit: float) -> float:
    value = _number(camera_params, name)
    if value >= limit:
        raise BadSampleError(f"a camera's {name} is not below {limit:g}")
    return value
