"""Errors that a user can act on: the file or dotted key, the value, the remedy."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class SparoError(Exception):
    """A problem the user can fix; the command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2
    repeated = False  # another rank prints it
    on_all_ranks = False  # every rank has it, so all of them can still act together


class UnexpectedError(SparoError):
    """Something broke off in a way that nobody foresaw: its kind, its words and its place, which is all that other ranks can be sent."""

    @classmethod
    def of(cls, error: Exception) -> UnexpectedError:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return cls(f"{type(error).__name__}: {error}; {place.filename}:{place.lineno}")


class ConfigError(SparoError):
    """A recipe or an override is wrong."""


class DataError(SparoError):
    """Shards, images or captions are missing, damaged or inconsistent."""


class BadSampleError(Exception):
    """A sample that is skipped; the message is the reason under which it is counted.

    A reason says what is wrong, never which sample: as many counts are kept as there are reasons.  `key`: of the sample, for the log.
    `detail`: the values that are wrong in this sample, for messages about it alone.
    """

    def __init__(self, reason: str, key: str = "", detail: str = ""):
        super().__init__(reason)
        self.key, self.detail = key, detail

    def full_message(self) -> str:
        """Return the reason with the detail."""
        return f"{self} ({self.detail})" if self.detail else str(self)


class WorkerLostError(DataError):
    """A process that reads data ended by itself; this process is whole, and can save."""

    exit_code = 3


class CheckpointError(SparoError):
    """A checkpoint is missing, damaged or belongs to something else."""


class TrainingError(SparoError):
    """Training cannot go on (too many non-finite steps, a run folder in use)."""

    exit_code = 3


class LostRankError(TrainingError):
    """Another rank died or does not answer: every rank that is left says so itself."""


class StoppedError(SparoError):
    """A signal ended training (EX_TEMPFAIL); the same command resumes it.

    Args:
        signal: its name.
        saved: whether there is a checkpoint to continue from.
    """

    exit_code = 75

    def __init__(self, signal: str, saved: bool = True):
        super().__init__(signal, saved)  # its arguments, so that it can be sent to other ranks
        self.signal, self.saved = signal, saved

    def __str__(self) -> str:
        if not self.saved:
            return "stopped before the first step, so nothing was saved. Run the same command again to start."
        return "run the same command again to resume"


class SupersededError(TrainingError):
    """Another start owns the run folder: this process may not write into it."""


_MAX_LISTED = 60  # names that an error lists


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a near miss, else a list of what is known, or of the first of very many."""
    candidates = list(candidates)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    names = sorted(candidates)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"known: {', '.join(names[:_MAX_LISTED])}{more}" if names else "nothing is known here"
