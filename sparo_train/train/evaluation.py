"""Scores of a step while training waits: by all ranks where each has the model, and left at a signal."""

from __future__ import annotations

from typing import cast

from ..core.contracts import Engine, Objective
from ..core.distributed import Ranks
from ..core.errors import StoppedError
from ..core.world import World
from .reporting import Reporter
from .state import Evaluate

_SINGLE_RANK = Ranks(World(), "gloo", 0.0)


class Evaluation:
    """Steps are scored once, however often the run is stopped and goes on.

    Args:
        evaluate: scores the objective; None: nothing does.
        every: steps between two; 0: only when asked.
    """

    def __init__(self, evaluate: Evaluate | None, every: int, engine: Engine, ranks: Ranks, reporter: Reporter):
        self.evaluate, self.every, self.engine, self.ranks, self.reporter = evaluate, every, engine, ranks, reporter
        self.scored: set[int] = set()

    def due(self, step: int) -> bool:
        """Whether it is this step's turn, and it has no scores yet."""
        return bool(self.every and step and step % self.every == 0) and self.missing(step)

    def missing(self, step: int) -> bool:
        return self.evaluate is not None and step not in self.scored

    def run(self, step: int) -> str | None:
        """Score this step; returns the signal for which it was left: without a record, so that the resumed run begins with it."""
        evaluate = self.evaluate
        assert evaluate is not None
        with self.engine.full_model() as model:
            objective = cast(Objective, model)
            try:
                on_all_ranks = self.engine.replicated  # or the others have no model, and wait
                scores = (
                    # Each its share where all hold the model, so that no GPU waits for rank 0.
                    evaluate(objective, step, self.ranks)
                    if on_all_ranks
                    else self.ranks.rank0_broadcast(lambda: evaluate(objective, step, _SINGLE_RANK))
                )
            except StoppedError as stopped:
                return stopped.signal
        self.reporter.write("eval", step, scores)
        # Behind the record: a step that was left half scored is scored again.
        self.scored.add(step)
        return None
