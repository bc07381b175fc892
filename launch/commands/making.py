"""Implementation of `sparo data scenes|objects|tetrominoes|emoji|movi-like|scenes3d|convert`, with progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparo_data.emoji import install
from sparo_data.emoji_sets import make_emoji
from sparo_data.official.formats import convert_published, find_source_files
from sparo_data.official.published import PublishedConfig, WriteSummary
from sparo_data.synthetic.object_scenes import ObjectSetConfig, render_objects
from sparo_data.synthetic.scene_questions import SceneQuestionsConfig, render_questions
from sparo_data.synthetic.scene_sets import ScenesConfig, render_scenes
from sparo_data.synthetic.tetrominoes import TetrominoesConfig, make_tetrominoes
from sparo_data.synthetic.video_sets import VideoSetConfig, render_videos
from sparo_data.synthetic.viewed_sets import MultiViewSetConfig, render_multi_view
from sparo_train.core.config import resolve

from ..views.progress import Bar


def make_scenes(folder: Path, train: int, size: int, seed: int, processes: int = 2, **sizes: int) -> None:
    """Render scenes into `folder`; existing shards are kept."""
    config = resolve(ScenesConfig, {"train": train, "size": size, "seed": seed, **sizes}, str(folder))
    with Bar() as bar:
        task = bar.start_task_named("rendering scenes")
        render_scenes(folder, config, processes, lambda done, total: bar.show(task, done, total))


def make_scene_questions(folder: Path, processes: int, **options: int) -> None:
    """Render compositional sets into `folder`; finished sets are kept."""
    config = resolve(SceneQuestionsConfig, options, str(folder))
    with Bar() as bar:
        task = bar.start_task_named("rendering questions")
        render_questions(folder, config, processes, lambda done, total: bar.show(task, done, total))


def make_tetromino_set(folder: Path, **options: Any) -> None:
    """Draw Tetrominoes into `folder`; existing files are kept."""
    config = resolve(TetrominoesConfig, options, str(folder))
    with Bar() as bar:
        task = bar.start_task_named("drawing tetrominoes")
        make_tetrominoes(folder, config, lambda done, total: bar.show(task, done, total))


def make_object_set(folder: Path, processes: int, **options: Any) -> None:
    """Render scenes of objects into `folder`; existing shards are kept."""
    config = resolve(ObjectSetConfig, options, str(folder))
    with Bar() as bar:
        task = bar.start_task_named("rendering scenes")
        render_objects(folder, config, processes, lambda done, total: bar.show(task, done, total))


def make_video_set(folder: Path, processes: int, **options: Any) -> None:
    """Render videos of thrown solids into `folder`; existing shards are kept."""
    config = resolve(VideoSetConfig, options, str(folder))
    with Bar() as bar:
        task = bar.start_task_named("rendering videos")
        render_videos(folder, config, processes, lambda done, total: bar.show(task, done, total))


def make_viewed_set(folder: Path, processes: int, blender: str | None, **options: Any) -> None:
    """Render scenes with several cameras into `folder`; existing shards are kept."""
    config = resolve(MultiViewSetConfig, options, str(folder))
    with Bar() as bar:
        task = bar.start_task_named("rendering scenes")
        render_multi_view(folder, config, processes, lambda done, total: bar.show(task, done, total), blender)


def convert_published_set(source: Path, folder: Path, kind: str, **options: Any) -> WriteSummary:
    """Convert a published set to shards in `folder`."""
    # Before the progress bar, so that a wrong name is reported without one.
    places = find_source_files(source, kind)
    config = resolve(PublishedConfig, {"source": kind, "files": [p.name for p in places], **options}, str(folder))
    with Bar() as bar:
        task = bar.start_task_named("converting")
        return convert_published(places, folder, config, lambda done: bar.show(task, done, config.limit))


def make_emoji_set(folder: Path, size: int, seed: int, processes: int) -> dict[str, int]:
    """Fetch and rasterise the emoji; return the samples per part."""
    with Bar() as bar:
        npm = bar.start_task_named("npm install")
        modules = install(folder / "npm")
        bar.update(npm, visible=False)
        task = bar.start_task_named("rasterising emoji")
        return make_emoji(folder, modules, size, seed, processes, lambda done, total: bar.show(task, done, total))
