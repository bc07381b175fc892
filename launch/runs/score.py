"""`sparo eval`: several checkpoints scored, printed and kept; what one of them lacks costs the others nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from evals.report.results_file import refuse_unwritable, write_results
from evals.sets.task_config import TaskConfig
from evals.suite.evaluate import EvalOptions, evaluate_checkpoint
from evals.tasks.result import Result
from sparo_train.core.distributed import Ranks
from sparo_train.core.errors import ConfigError, LostRankError, SparoError, StoppedError
from sparo_train.core.world import find_world

from ..views.eval_tables import Encoding
from ..views.results_table import results_table
from ..views.terminal import console, out

Known = Mapping[str, Mapping[str, TaskConfig]]


def score_checkpoints(checkpoints: Sequence[str], known: Known, how: EvalOptions, json_file: Path | None) -> None:
    """Score each on its tasks, by all ranks together; the results are written before they are printed.

    Raises:
        ConfigError: a folder that results are to go to cannot be written, said before anything is scored.
        SparoError: what a checkpoint failed with; the scores of the others are printed and kept.
    """
    if json_file is not None:
        if json_file.is_dir():
            raise ConfigError(f"--json {json_file}: is a folder; name a file")
        refuse_unwritable(json_file.parent, f"--json {json_file}")
    if how.results is not None:
        refuse_unwritable(how.results, "--results")
    # An hour: a rank may wait for another's encoding of a whole set.
    ranks = Ranks(find_world(), "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", 3600.0)
    try:
        found, failed = _scored(checkpoints, known, how, ranks)
        if ranks.rank == 0:
            _show(found, how, json_file)
        if failed is not None:
            raise failed
    finally:
        ranks.close()


def _scored(
    checkpoints: Sequence[str], known: Known, how: EvalOptions, ranks: Ranks
) -> tuple[dict[str, dict[str, Result]], SparoError | None]:
    found: dict[str, dict[str, Result]] = {}
    failed: SparoError | None = None

    def say(text: str) -> None:
        if ranks.rank == 0:
            console.print(text, soft_wrap=True)

    # Twice the same would be one column with the other's name.
    for checkpoint in dict.fromkeys(checkpoints):
        name, results = Path(checkpoint).name, dict[str, Result]()
        try:
            with Encoding(checkpoint, ranks.rank > 0) as report:
                evaluate_checkpoint(checkpoint, dict(known[checkpoint]), how, ranks, report, say, results)
        except (LostRankError, StoppedError):
            raise
        except SparoError as error:
            if (
                ranks.size > 1 and not error.everywhere
            ):  # the others are elsewhere, and could not follow to the next one
                raise
            if failed is not None and not failed.repeated:
                say(f"error: {failed}")  # the last one is told at the end
            failed = error
            if not results:
                continue
        # Two checkpoints of one name are told apart by the whole of what was typed.
        found[name if name not in found else checkpoint] = results
    return found, failed


def _show(found: Mapping[str, dict[str, Result]], how: EvalOptions, json_file: Path | None) -> None:
    unwritten: OSError | None = None
    if json_file is not None and any(found.values()):
        facts = {"slots": str(how.slots) if isinstance(how.slots, Path) else how.slots} if how.slots else {}
        try:
            write_results(json_file, facts, {f"{c}/{t}": r for c, by_task in found.items() for t, r in by_task.items()})
        except OSError as error:  # a disk that filled up meanwhile: the table is all that there is
            unwritten = error
    if any(found.values()):
        chosen = f", slots {how.slots_named} of the images alone" if how.slots else ""
        out.print(results_table(found, f"per cent, 95 % intervals{chosen}"))
    if unwritten is not None:
        raise ConfigError(f"--json {json_file}: could not be written ({unwritten}); the table above has the scores")
