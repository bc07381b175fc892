"""Errors that a user can act on. Each names the file or dotted key, the value and the remedy."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class SparoError(Exception):
    """Problem that the user can fix. The command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2
    repeated = False  # another rank prints it
    on_all_ranks = False  # every rank raised it, so all of them can still act together


class UnexpectedError(SparoError):
    """Unforeseen error, reduced to its type, message and location, which can be sent to other ranks."""

    @classmethod
    def from_error(cls, error: Exception) -> UnexpectedError:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return cls(f"{type(error).__name__}: {error}; {place.filename}:{place.lineno}")


class ConfigError(SparoError):
    """Invalid recipe or override."""


class DataError(SparoError):
    """Missing, damaged or inconsistent shards, images or captions."""


class BadSampleError(Exception):
    """Sample that is skipped; the message is the reason under which it is counted.

    A reason states the problem without the sample, because there is one count per reason.

    Args:
        reason: the problem.
        key: key of the sample, for the log.
        detail: the invalid values of this sample, for messages about it alone.
    """

    def __init__(self, reason: str, key: str = "", detail: str = ""):
        super().__init__(reason)
        self.key, self.detail = key, detail

    def full_message(self) -> str:
        """Return the reason with the detail."""
        return f"{self} ({self.detail})" if self.detail else str(self)


class WorkerLostError(DataError):
    """Process that reads data has ended unexpectedly; the main process is intact and can save."""

    exit_code = 3


class CheckpointError(SparoError):
    """Checkpoint that is missing, damaged or of another model."""


class TrainingError(SparoError):
    """Training that cannot continue (too many non-finite steps, a run folder in use)."""

    exit_code = 3


class CollapseError(TrainingError):
    """Representation that has collapsed, in a run that is to end then."""

    exit_code = 4


class LostRankError(TrainingError):
    """Another rank died or does not answer; every remaining rank reports it."""


class StoppedError(SparoError):
    """Training that was ended by a signal (exit code EX_TEMPFAIL); the same command resumes it.

    Args:
        signal: name of the signal.
        saved: whether there is a checkpoint to resume from.
    """

    exit_code = 75

    def __init__(self, signal: str, saved: bool = True):
        super().__init__(signal, saved)  # constructor arguments, so that the error can be pickled for other ranks
        self.signal, self.saved = signal, saved

    def __str__(self) -> str:
        if not self.saved:
            return "stopped before the first step, so nothing was saved. Run the same command again to start."
        return "run the same command again to resume"


class SupersededError(TrainingError):
    """Another start owns the run folder, so this process may not write to it."""


_MAX_LISTED = 60  # number of names that an error lists


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a similar name, otherwise a list of the valid names (or of the first ones)."""
    candidates = list(candidates)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    names = sorted(candidates)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"known: {', '.join(names[:_MAX_LISTED])}{more}" if names else "there are no valid names here"
