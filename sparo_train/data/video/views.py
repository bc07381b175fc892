"""Scenes seen by several cameras, in shards: one episode per camera, and a JSON with the cameras.

    c0.000.png, c0.000.mask.png, c0.000.depth.png …   camera 0, frame 0: the members of an episode (episode.py) after
    the camera's number
    c1.000.png …                                      camera 1
    json    `cameras`: for each `poses` (T, or one for all frames; 4 x 4, camera to world) and its lens (`fov`, or
        `fl_x` …; cameras.py); `convention` (opengl, opencv); `near`, `far` in world units; `frames`, `ranges`,
            `objects` as in an episode

A static scene has one frame.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from ...core.errors import BadSampleError
from ..decode.bands import PixelRange
from .cameras import Convention, parse_lens, parse_pose
from .episode import IMAGE_KEYS, Episode

_VIEW = re.compile(r"c(\d{1,4})\.(.+)")


def view_member(view: int, name: str) -> str:
    """Return the extension of an episode's member for one of several cameras."""
    return f"c{view}.{name}"


def is_scene(fields: Mapping[str, bytes]) -> bool:
    """Return whether these members are a scene with several cameras."""
    return any(name.startswith("c0.000.") for name in fields)


class MultiViewScene:
    """Members of a scene.

    Args:
        fields: members by extension.
        image_keys: extensions of frames.
        pixel_range: as in `Episode`.

    Raises:
        BadSampleError: no cameras, a missing one, or cameras with different numbers of frames; from its methods: a
            plane that is missing or damaged, a camera without a pose.
    """

    def __init__(
        self,
        fields: Mapping[str, bytes],
        image_keys: Sequence[str] = IMAGE_KEYS,
        pixel_range: PixelRange | None = "by_type",
    ):
        fields_by_view: dict[int, dict[str, bytes]] = {}
        for name, data in fields.items():
            if match := _VIEW.fullmatch(name):
                fields_by_view.setdefault(int(match[1]), {})[match[2]] = data
        if not fields_by_view:
            raise BadSampleError("missing views")
        # A missing view would assign the wrong camera to later ones.
        if sorted(fields_by_view) != list(range(len(fields_by_view))):
            raise BadSampleError("a view is missing")
        shared_fields = {"json": fields["json"]} if "json" in fields else {}
        self.views = [
            Episode({**fields_by_view[number], **shared_fields}, image_keys, pixel_range)
            for number in range(len(fields_by_view))
        ]
        if len({len(view) for view in self.views}) > 1:
            raise BadSampleError("views with different numbers of frames")

    @property
    def frames(self) -> int:
        """Return T."""
        return len(self.views[0])

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the scene's JSON."""
        return self.views[0].metadata

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Return the nearest and farthest distance, world units; None if the JSON has neither.

        Raises:
            BadSampleError: only one of them, or not 0 < near < far.
        """
        near_far = [self.metadata.get("near"), self.metadata.get("far")]
        if near_far == [None, None]:
            return None
        distances = [
            float(n) for n in near_far if isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n)
        ]
        if len(distances) < 2 or not 0 <= distances[0] <= distances[1]:
            raise BadSampleError("json: expected 0 < near < far")
        return distances[0], distances[1]

    def pose(self, view: int, t: int) -> np.ndarray:
        """Return (4, 4) fp64, camera to world, in OpenGL's convention."""
        poses = self._camera(view).get("poses")
        # A static camera may give its pose once.
        if not isinstance(poses, list) or len(poses) not in (1, self.frames):
            raise BadSampleError("a camera needs either one pose in total or one pose per frame")
        convention = self.metadata.get("convention", "opengl")
        if convention not in get_args(Convention):
            raise BadSampleError("the camera convention in the json is neither opengl nor opencv")
        return parse_pose(poses[0 if len(poses) == 1 else t], convention)

    def lens(self, view: int, width: int, height: int) -> np.ndarray:
        """Return (4,) fp64 fx, fy, cx, cy in pixels of its images."""
        return parse_lens(self._camera(view), width, height)

    def check(self) -> None:
        """Check all cameras, and that their images have one size. Raises `BadSampleError` if training could not use them."""
        sizes = {view.image(0).shape[:2] for view in self.views}
        if len(sizes) > 1:
            raise BadSampleError("views of unequal size")
        height, width = self.views[0].image(0).shape[:2]
        _ = self.bounds
        for view in range(len(self.views)):
            self.lens(view, width, height)
            for t in range(self.frames):
                self.pose(view, t)

    def _camera(self, view: int) -> dict[str, Any]:
        cameras = self.metadata.get("cameras")
        if not isinstance(cameras, list) or len(cameras) != len(self.views) or not isinstance(cameras[view], dict):
            raise BadSampleError("the json must list one camera for each view")
        return cameras[view]
