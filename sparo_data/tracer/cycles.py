"""Colours of an episode from Blender's Cycles instead of our ray tracer; positions and masks stay ours, which are exact.

bpy pins numpy and one Python version, so it runs in its own environment through `blender_job.py`, and this module
imports nothing of it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sparo_train.core.errors import ConfigError, DataError

from .render import Body, Stage
from .solids import MONKEY, RING, TUBE, icosahedron_corners, icosahedron_faces

_JOB = Path(__file__).with_name("blender_job.py")
_MAX_OUTPUT_CHARS = 2000  # number of last characters of Blender's output that errors repeat


class Cycles(NamedTuple):
    """Options of Cycles.

    Attributes:
        python: an interpreter with bpy.
        samples: paths per pixel.
        threads: number of its threads.
    """

    python: str
    samples: int = 32
    threads: int = 1

    def check(self) -> None:
        """Raise `ConfigError` if the interpreter does not exist or has no bpy."""
        try:
            process = subprocess.run(
                [self.python, "-I", "-c", "import bpy"], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ConfigError(f"--blender {self.python}: cannot be run ({error})") from None
        if process.returncode:
            message = (process.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(
                f"--blender {self.python}: has no bpy ({message}). Make a separate environment: "
                "python3.11 -m venv blender && blender/bin/pip install bpy, then --blender blender/bin/python"
            )

    def pictures(
        self, shots: Sequence[Sequence[Body]], poses: np.ndarray, fov: float, size: int, stage: Stage
    ) -> np.ndarray:
        """Return (V, T, size, size, 3) uint8 of bodies at T times and poses (V, T, 4, 4), OpenGL's.

        Raises:
            DataError: Blender ended without an image.
        """
        with tempfile.TemporaryDirectory(prefix="sparo-cycles-") as place:
            job = {
                "bodies": [[_body_params(body) for body in bodies] for bodies in shots],
                "cameras": poses.tolist(),
                "fov": fov,
                "size": size,
                "samples": self.samples,
                "threads": self.threads,
                "stage": asdict(stage),
                "out": place,
            }
            path = Path(place) / "job.json"
            path.write_text(json.dumps(job), encoding="utf-8")
            # Isolated, because this project's paths would give it our numpy.
            process = subprocess.run(
                [self.python, "-I", str(_JOB), str(path)], capture_output=True, text=True, check=False
            )
            frames = np.zeros((*poses.shape[:2], size, size, 3), np.uint8)
            for camera, time in np.ndindex(*poses.shape[:2]):
                try:
                    with Image.open(Path(place) / f"{camera}_{time}.png", formats=("PNG",)) as picture:
                        frames[camera, time] = np.asarray(picture.convert("RGB"))
                except (OSError, ValueError) as error:
                    message = (process.stderr + process.stdout)[-_MAX_OUTPUT_CHARS:].strip()
                    raise DataError(
                        f"{self.python}: did not render camera {camera} at time {time} ({error}), and exited with status {process.returncode}: {message}"
                    ) from None
            return frames


def _body_params(body: Body) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if body.shape == "torus":
        more = {"ring": RING, "tube": TUBE}
    elif body.shape == "monkey":
        more = {"spheres": MONKEY}
    elif body.shape == "icosahedron":
        more = {"corners": icosahedron_corners().tolist(), "faces": icosahedron_faces()}
    return {
        "shape": body.shape,
        "color": body.color,
        "metal": body.metal,
        "radius": body.radius,
        "centre": body.centre.tolist(),
        "axes": body.axes.tolist(),
        "stretch": body.stretch,
        "texture": None if body.texture is None else asdict(body.texture),
        **more,
    }
