"""Many small jobs as one array: checkpoints x tasks, or parts of a conversion. Their folder records which are done.

FOLDER/plan.json   kind, and the `sparo` arguments of every element
FOLDER/parts/      one file per finished element; results.json once all are there
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evals.report.results_file import write_results
from evals.tasks.result import Result
from sparo_train.core.disk.checkpoint_store import CheckpointStore
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import read_json, write_whole


class FanOut:
    """A folder of elements.

    Args:
        folder: folder with a plan.json.
        plan: its content, if it is not written yet.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, folder: Path, plan: dict[str, Any] | None = None):
        self.folder = folder
        path = folder / "plan.json"
        if plan is None and not path.is_file():
            raise ConfigError(
                f"{folder}: has no plan.json, so it is not a folder of `sparo launch eval` or `sparo launch data`"
            )
        plan = read_json(path, dict) if plan is None else plan
        if not isinstance(plan.get("kind"), str) or not isinstance(plan.get("elements"), list):
            raise ConfigError(
                f"{path}: lacks the key `kind` or `elements`, so it is not the plan of a launch. Launch again with another --name."
            )
        self.kind: str = plan["kind"]
        self.elements: list[dict[str, Any]] = plan["elements"]

    @classmethod
    def make(cls, folder: Path, kind: str, elements: Sequence[dict[str, Any]], write: bool = True) -> FanOut:
        """Write the plan (unless `write` is false); an existing plan must be equal."""
        path = folder / "plan.json"
        content = {"kind": kind, "elements": list(elements)}
        if path.exists() and read_json(path, dict) != content:
            raise ConfigError(f"{folder}: contains another plan. Give another --name.")
        if write:
            write_whole(path, json.dumps(content, indent=1))
        return cls(folder, content)

    def part(self, number: int) -> Path:
        return self.folder / "parts" / f"{number:05d}.json"

    @staticmethod
    def arguments(number: int, folder: str) -> tuple[str, ...]:
        """Return the arguments of a job for one element."""
        return ("launch", "element", folder, str(number))

    def missing_elements(self) -> list[int]:
        """Return the elements that are not done yet."""
        return [number for number in range(len(self.elements)) if not self.part(number).exists()]

    def job_name(self) -> str:
        """Return a name for the queue: eval-CHECKPOINT-TASK, with the number of further ones; otherwise the command, data-convert."""
        if self.kind != "eval":
            return "-".join(self.elements[0]["arguments"][:2])
        parts = ["eval"]
        for key in ("checkpoint", "task"):
            names = list(dict.fromkeys(str(element[key]) for element in self.elements))
            # A checkpoint's own name is often `export` or a step, so the run's name comes with it.
            first = "-".join(Path(names[0]).parts[-2:]) if key == "checkpoint" else names[0]
            parts.append(
                re.sub(r"[^A-Za-z0-9._+-]+", "_", first).strip("_") + (f"+{len(names) - 1}" if names[1:] else "")
            )
        return "-".join(parts)

    def run(self, number: int, call: Callable[[Sequence[str]], None]) -> None:
        """Run one element in this process, unless it is done. The last one to finish merges the results."""
        if not self.part(number).exists():
            target = self.part(number)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Unique for this attempt, so that files of a killed one are not mistaken for its result.
            temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
            arguments = [word.replace("{part}", str(temporary)) for word in self.elements[number]["arguments"]]
            call(arguments)
            if self.kind != "eval":
                temporary.write_text(json.dumps({"arguments": arguments}), encoding="utf-8")
            # A part exists when its element is done, so killed elements run again.
            temporary.replace(target)
        # Two elements may both be last: they write the same file, atomically.
        if self.kind == "eval" and not self.missing_elements():
            self.merge()

    def merge(self) -> None:
        """Merge all parts to results.json, in the form of `sparo eval --json`, and to each run's evals/latest.json."""
        results = {
            f"{checkpoint}/{task}": r for checkpoint, by_task in self.results().items() for task, r in by_task.items()
        }
        write_results(self.folder / "results.json", {}, results)
        for checkpoint, by_task in self.results().items():
            # Do not write to a checkpoint that is not a run folder, because it may belong to someone else.
            if (Path(checkpoint) / "config.yaml").is_file():
                write_results(Path(checkpoint) / "evals" / "latest.json", {"checkpoint": checkpoint}, by_task)

    def results(self) -> dict[str, dict[str, Result]]:
        """Return the results so far, by checkpoint and task."""
        by_checkpoint: dict[str, dict[str, Result]] = {}
        for number, element in enumerate(self.elements):
            if self.kind == "eval" and self.part(number).exists():
                task_results = json.loads(self.part(number).read_text(encoding="utf-8"))["results"]
                prefix = (
                    f"{Path(element['checkpoint']).name}/"  # prefix before a task's name, which may contain slashes
                )
                for name, facts in task_results.items():
                    by_checkpoint.setdefault(element["checkpoint"], {})[name.removeprefix(prefix)] = Result.from_dict(
                        facts
                    )
        return by_checkpoint

    def outdated(self) -> list[str]:
        """Return messages for runs that were trained further after they were scored, because a plan is executed once."""
        messages = {}
        for number, element in enumerate(self.elements):
            part, run = self.part(number), Path(element.get("checkpoint", ""))
            if self.kind != "eval" or not part.exists() or not (run / "config.yaml").is_file():
                continue
            newest = CheckpointStore(run / "checkpoints").latest()
            if newest is not None and newest.stat().st_mtime > part.stat().st_mtime:
                messages[run] = (
                    f"{run}: was scored before {newest.name} was written. Use another --name to score it again."
                )
        return list(messages.values())


def plan_name(elements: Sequence[dict[str, Any]]) -> str:
    """Return a name that is equal for equal plans."""
    return hashlib.sha256(json.dumps(elements, sort_keys=True).encode()).hexdigest()[:8]
