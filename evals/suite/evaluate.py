"""`sparo eval`: scores of checkpoints."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sparo_train import __version__
from sparo_train.core.accelerator import has_bf16, has_tf32, is_bf16_slow, is_streaming, set_tf32
from sparo_train.core.config import Frozen, field, resolve
from sparo_train.core.disk.rundir import environment
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import CheckpointError, ConfigError, LostRankError, SparoError, StoppedError, did_you_mean
from sparo_train.core.files import disk_error
from sparo_train.core.recipe.layers import load_recipe
from sparo_train.core.registries import TASKS
from sparo_train.core.torch_settings import standard_settings
from sparo_train.core.world import World
from sparo_train.train.run_config import TaskConfig as AnyTask

from ..encoders.encoder import Encoder, Precision
from ..encoders.loading import load_encoder, read_recipe, refuse_absent, split_slots
from ..encoders.selection import keep_units, read_selection, select_slots
from ..feature_store.features import FeatureStore
from ..report.results_file import append, write_results
from ..sets.task_config import SetTaskConfig, TaskConfig
from ..tasks.result import Result
from . import catalogue
from .eval_options import EvalOptions
from .suite import Suite
from .task import IncompatibleTaskError

logger = logging.getLogger(__name__)


class _Tasks(Frozen):
    tasks: dict[str, AnyTask] = field(..., "Tasks by name; each is an entry of sparo.tasks.")


def tasks_for(
    checkpoint: str,
    data: Path | None,
    only: Sequence[str] | None = None,
    root: Path | None = None,
    option: str = "--tasks",
) -> dict[str, TaskConfig]:
    """Return the tasks to score a checkpoint on.

    Args:
        checkpoint: the checkpoint.
        data: a YAML with `tasks:`, or a recipe with `eval.tasks`; default: `eval.tasks` of the run that the checkpoint
            belongs to.
        only: names of these tasks, of the folder with their data (`scenes` for data/scenes/…), or of the catalogue's
            sets and groups, whose files are below `root`; default: all of the YAML or the run.
        root: folder of the catalogue's sets.
        option: option with the names, for errors.

    Raises:
        ConfigError: no tasks are given, or a name is unknown.
        CheckpointError: the checkpoint does not exist.
    """
    refuse_absent(checkpoint)
    available_tasks = _available_tasks(checkpoint, data)
    if not only and not available_tasks:
        problem = f" {data}: has no tasks" if data else f": missing, and {checkpoint} has no run with eval.tasks"
        raise ConfigError(
            f"--data{problem}. Give --data the recipe, the run's config.yaml or a YAML file with `tasks:`. "
            "Alternatively, name tasks from `sparo eval --list` with --tasks."
        )
    if not only:
        return available_tasks
    selected_tasks: dict[str, TaskConfig] = {}
    for name in only:
        # A folder name stands for all sets that `sparo data` wrote to it.
        folder_tasks = {
            n: t
            for n, t in available_tasks.items()
            if isinstance(t, SetTaskConfig) and Path(t.root).parent.name == name
        }
        listed = catalogue.tasks(name, root or Path("data"))
        matches = {name: available_tasks[name]} if name in available_tasks else folder_tasks or listed
        # A likely mistake, for which suggesting a task name would mislead.
        if not matches and Path(name).suffix in (".yaml", ".yml"):
            raise ConfigError(f"{option} {name}: expected names of tasks. To use a file with tasks, pass it as --data.")
        if not matches:
            candidates = [
                *available_tasks,
                *(Path(t.root).parent.name for t in available_tasks.values() if isinstance(t, SetTaskConfig)),
                *catalogue.names(),
            ]
            raise ConfigError(f"{option} {name}: {_unknown_task(name, available_tasks, candidates)}")
        selected_tasks |= matches
    return selected_tasks


def _unknown_task(name: str, available: Mapping[str, TaskConfig], candidates: Sequence[str]) -> str:
    """Return a similar name, or where names can be found; the catalogue has hundreds."""
    base, colon, kind = name.partition(":")
    if colon and base in candidates:
        return (
            f"only `probe` can follow the name of a set, and only of a set that is scored by prompts, got {kind}. "
            "For other tasks, write a YAML file and give it to --data."
        )
    if name in TASKS.names():
        problem, names = "is a kind of task, not a name", [n for n, task in available.items() if task.task == name]
    else:
        hint = did_you_mean(name, dict.fromkeys(candidates))
        if hint.startswith("did"):
            return hint
        problem, names = "is neither a task nor a set of `sparo eval --list`", list(available)
    return f"{problem}. " + (
        f"Give {', '.join(names)}." if names else "Define tasks in a YAML file, and give it to --data."
    )


def _available_tasks(checkpoint: str, data: Path | None) -> dict[str, TaskConfig]:
    if data is not None:
        tree = load_recipe(data)
        # A recipe is accepted, too, and gives the tasks of its training.
        if "tasks" not in tree and isinstance(tree.get("eval"), dict):
            tree = {"tasks": tree["eval"].get("tasks", {})}
        return dict(resolve(_Tasks, tree, str(data)).tasks)
    try:
        return dict(read_recipe(Path(split_slots(checkpoint)[0])).eval.tasks)
    # A weight file has no run, which only matters if its tasks are needed.
    except CheckpointError:
        return {}


@standard_settings()
def evaluate(
    checkpoint: str | Path | Encoder,
    tasks: str | Sequence[str] | Mapping[str, TaskConfig] | None = None,
    data: str | Path | None = None,
    options: EvalOptions | None = None,
) -> dict[str, Result]:
    """Score a checkpoint in this process, as `sparo eval` does.

    Args:
        checkpoint: anything that `sparo eval` accepts, or a loaded encoder.
        tasks: a name or names as for `sparo eval --tasks`, or configurations by name; default: the tasks of the run or of `data`.
        data: a YAML file with `tasks:`.
        options: by default nothing is written; `latest=True` stores the results in the run folder.

    Returns:
        Results by task name; `result.metrics` are fractions.

    Raises:
        ConfigError: no tasks are known, one does not fit the checkpoint, or an encoder is combined with `data` or
            `options`.
    """
    ranks = Ranks(World(), "gloo", 0.0)
    if tasks is not None and not len(tasks):
        raise ConfigError("tasks: is empty. Name at least one, or leave out `tasks` to score all tasks of the run.")
    if isinstance(checkpoint, Encoder):
        if not isinstance(tasks, Mapping):
            raise ConfigError(
                "tasks: an encoder has no run folder from which to read tasks. Give a mapping from names to task configurations."
            )
        if data is not None or options is not None:
            raise ConfigError("`data` and `options`: apply to checkpoints only, got an encoder. Remove both keys.")
        return Suite(dict(tasks)).run(checkpoint, ranks=ranks)
    if not isinstance(tasks, Mapping):
        names = [tasks] if isinstance(tasks, str) else tasks
        tasks = tasks_for(str(checkpoint), None if data is None else Path(data), names, option="tasks")
    options = options or EvalOptions()
    return evaluate_checkpoint(str(checkpoint), dict(tasks), options, ranks, lambda *_: None)


def evaluate_checkpoint(
    checkpoint: str,
    tasks: dict[str, TaskConfig],
    how: EvalOptions,
    ranks: Ranks,
    on_progress: Callable[[str, int, int], None],
    into: dict[str, Result] | None = None,
    on_scored: Callable[[str, float], None] = lambda name, seconds: None,
) -> dict[str, Result]:
    """Score one checkpoint on `tasks` and store the results; `on_progress` receives a name, the encoded images, and their total.

    Tasks that the encoder does not support are reported and skipped; `IncompatibleTaskError` if none is left. If one
    fails, the others are still scored, and its error is raised at the end.

    Args:
        checkpoint, tasks, how, ranks: checkpoint, tasks, options and ranks.
        into: receives results as they are computed, so that they are available if this raises.
        on_scored: called after each task with its name and the seconds that it took.
    """
    # All ranks together, so that a failure on one does not leave the others waiting. Check the sets first, before hours
    # of encoding.
    ranks.call_on_all(Suite(tasks).check)
    # Reported with the scores, because scores on other images must be marked.
    odd = ranks.call_on_all(lambda: {name: catalogue.oddity(name, task) for name, task in tasks.items()})
    encoder = ranks.call_on_all(lambda: load_encoder(checkpoint, how.model, _device(how.device, ranks)))
    set_precision(encoder, how.precision)
    is_run = (Path(checkpoint) / "config.yaml").is_file()
    scored = str(Path(checkpoint)) if is_run else checkpoint  # normalised as in training
    if how.slots is not None:
        encoder = only_slots(encoder, how.slots)
        # Under a separate name, so that scores of some slots are not mistaken for the model's.
        scored = f"{scored} (slots {how.slots_named})"
    if how.limit is not None:
        tasks = {name: task.model_copy(update={"limit": how.limit}) for name, task in tasks.items()}
    store = FeatureStore(how.features, how.storage, on_progress)
    # Other checkpoints have no folder that sparo may write to.
    folder = how.results or (Path(checkpoint) / "evals" if is_run and how.write_to_run else None)
    if folder is None and how.write_to_run and ranks.rank == 0:  # now, before hours of encoding
        logger.info(f"{checkpoint}: scores are not stored. To compare them later, add --results FOLDER.")
    results: dict[str, Result] = {} if into is None else into
    write_errors: list[SparoError] = []

    def keep(task_results: Mapping[str, Result], seconds: float) -> None:
        for task, task_result in task_results.items():
            results[task] = result = task_result._replace(note=odd[task])
            on_scored(task, seconds)
            for remark in result.remarks():
                logger.warning(f"{task}: {remark}")
            if folder is not None and ranks.rank == 0:
                try:
                    append(folder, scored, task, result, result_facts(encoder, how, seconds))
                except OSError as error:  # a read-only run of another user; its scores are still shown
                    text = f"{folder}: the results of {task} could not be stored ({error})"
                    logger.warning(text)
                    if disk_error(error) not in (None, errno.EROFS):
                        write_errors.append(
                            ConfigError(f"{text}. Free space or give --results, then run the same command again.")
                        )

    incompatible, failed = _score_each(Suite(tasks, store), encoder, how, ranks, keep)
    # Skipping some tasks is fine, skipping all is an error.
    if incompatible and len(incompatible) == len(tasks):
        raise incompatible[0]
    for error in incompatible:
        logger.warning(f"skipped a task: {error}")
    waiting = len(tasks) - len(incompatible) - len(failed) - len(results)
    if waiting and how.part:
        logger.warning(
            f"part {how.part[0]}/{how.part[1]} is encoded; {waiting} task(s) also need the other parts. "
            "When all parts are encoded, run the same command without --part to score these tasks."
        )
    if how.write_to_run and is_run and results and how.slots is None and ranks.rank == 0:
        _write_latest(Path(checkpoint), encoder, results)
    failed += write_errors
    for error in failed[:-1]:
        logger.warning(f"a task failed: {error}")
    if failed:
        raise failed[-1]
    return results


def _write_latest(run: Path, encoder: Encoder, results: dict[str, Result]) -> None:
    """Write the newest scores to the run's folder, if it can be written."""
    try:
        write_results(run / "evals" / "latest.json", {"checkpoint": encoder.label}, results)
    except OSError as error:
        logger.warning(f"{run}/evals/latest.json: could not be written ({error})")


def _score_each(
    suite: Suite, encoder: Encoder, how: EvalOptions, ranks: Ranks, keep: Callable[[Mapping[str, Result], float], None]
) -> tuple[list[IncompatibleTaskError], list[SparoError]]:
    """Score the tasks one by one; return why some were skipped, and the errors of others."""
    incompatible, failed = [], []
    for name in suite.tasks:
        begin = time.monotonic()
        try:
            results = suite.run(encoder, [name], ranks, how.part)
        except IncompatibleTaskError as error:
            incompatible.append(error)
        except (LostRankError, StoppedError):
            raise
        except SparoError as error:
            # Raised on this rank only: the other ranks are elsewhere, and could not continue with the next task.
            if ranks.size > 1 and not error.on_all_ranks:
                raise
            failed.append(error)
        else:
            keep(results, time.monotonic() - begin)
    return incompatible, failed


def only_slots(encoder: Encoder, slots: Sequence[int] | str | Path) -> Encoder:
    """Return an encoder with only these slots, or those of a selection; others are zero. Raises `ConfigError` for a slot that it does not have."""
    if isinstance(slots, str | Path):
        return keep_units(encoder, read_selection(Path(slots)), f"--slots {slots}")
    numbers = slots.tolist() if isinstance(slots, torch.Tensor) else slots
    return keep_units(encoder, select_slots(encoder, tuple(dict.fromkeys(numbers))))


def set_precision(encoder: Encoder, precision: Precision) -> None:
    """Let an encoder compute in a precision. Raises `ConfigError` if its device lacks it, or if its own cannot be changed."""
    if encoder.fixed_precision is not None and precision != "fp32":
        raise ConfigError(
            f"--precision {precision}: {encoder.label} always computes in {encoder.fixed_precision}. Remove --precision."
        )
    if precision == "tf32" and not has_tf32(encoder.device):
        raise ConfigError(f"--precision tf32: only NVIDIA GPUs have TF32, got {encoder.device.type}. Use fp32.")
    if precision == "bf16" and not has_bf16(encoder.device):
        raise ConfigError(f"--precision bf16: {encoder.device.type} has no bfloat16 on this machine. Use fp32.")
    if precision in ("bf16", "fp16") and is_bf16_slow(encoder.device):
        logger.warning(
            f"--precision {precision}: this CPU has no instructions for 16-bit numbers, so encoding takes longer than with fp32."
        )
    if encoder.fixed_precision is None:
        encoder.precision = precision


def result_facts(encoder: Encoder, how: EvalOptions, seconds: float) -> dict[str, Any]:
    """Return everything that a score depends on besides its set: weights, preprocessing, precision, environment."""
    pooling = {"pooling": encoder.pooling} if encoder.pooling else {}
    return {
        "checkpoint": {
            "label": encoder.label,
            "sha256": encoder.weights,
            "architecture": encoder.architecture,
            **pooling,
        },
        "parameters": sum(parameter.numel() for parameter in encoder.model.parameters()),
        "trained_on": "" if encoder.trained is None else ", ".join(encoder.trained.config.data.sources),
        "preprocessing": repr(encoder.transform),
        "precision": encoder.fixed_precision or how.precision,
        "storage": how.storage,
        "limit": how.limit,
        **({"selection": how.selection_facts()} if how.slots else {}),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "sparo": __version__,
        "environment": environment(),
    }


def _device(name: str, ranks: Ranks) -> str:
    set_tf32(False)  # torch's default is TF32 for convolutions, which changes the third digit of encodings
    device = torch.device(name)
    if device.index is not None or not is_streaming(device):
        return name
    return f"{name}:{ranks.world.local_rank % torch.accelerator.device_count()}"
