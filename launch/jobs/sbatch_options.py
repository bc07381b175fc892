"""Options of sbatch: which ones `sparo launch` takes as they are, and what to write instead of the others."""

from __future__ import annotations

from collections.abc import Sequence

from sparo_train.core.errors import ConfigError

# Options with a separate key, or an equivalent one.
OWN = {
    "account": "--account", "constraint": "--constraint", "cpus-per-task": "--cpus-per-task", "exclude": "--exclude",
    "exclusive": "--exclusive", "gpus-per-node": "--gpus-per-node", "job-name": "--job-name", "nodelist": "--nodelist",
    "nodes": "--nodes", "ntasks-per-node": "--tasks-per-node", "partition": "--partition", "qos": "--qos", "time": "--time",
}  # fmt: skip
# Options that sparo sets itself, and what to use instead.
INSTEAD = {
    "array": "a sweep: key=[a,b] or --seeds",
    "batch": "--constraint, because all nodes run ranks",
    "chdir": "`cd`: a job runs in the folder from which it was launched",
    "clusters": "the variable SLURM_CLUSTERS in your shell, so that status and cancel ask the same cluster",
    "container": "--srun-args, as in --srun-args=--container-image=IMAGE",
    "dependency": "--after RUN",
    "error": "`sparo launch logs`",
    "export": "--environment.NAME VALUE",
    "export-file": "--environment.NAME VALUE",
    "get-user-env": "--setup with shell lines",
    "gpus": "--nodes and --gpus-per-node",
    "gpus-per-socket": "--nodes and --gpus-per-node",
    "gpus-per-task": "--gpus-per-node, with one rank per GPU",
    "help": "`sparo launch train --help`",
    "immediate": "--cluster allocation in a shell of `salloc --immediate`",
    "input": "nothing: jobs read no input",
    "nodefile": "--nodelist with the names",
    "ntasks": "--nodes and --tasks-per-node",
    "ntasks-per-core": "--tasks-per-node",
    "ntasks-per-gpu": "--tasks-per-node",
    "ntasks-per-socket": "--tasks-per-node",
    "open-mode": "nothing: logs are appended to after a restart",
    "output": "`sparo launch logs`",
    "parsable": "`sparo launch status --json`",
    "quiet": "nothing: sbatch's output is not shown",
    "signal": "--signal-seconds",
    "test-only": "--dry-run",
    "usage": "`sparo launch train --help`",
    "verbose": "nothing: sbatch's output is shown if it refuses the job",
    "version": "`sbatch --version`",
    "wait": "`sparo launch status RUN --watch`",
    "wrap": "nothing: sparo writes the script",
}  # fmt: skip
# Options that are passed on, without and with a value.
_FLAGS = {
    "contiguous", "hold", "ignore-pbs", "no-kill", "no-requeue", "overcommit", "oversubscribe", "reboot", "requeue",
    "spread-job", "use-min-nodes",
}  # fmt: skip
_PASSED = {
    "acctg-freq", "bb", "bbf", "begin", "cluster-constraint", "comment", "consolidate-segments", "core-spec", "cores-per-socket",
    "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "distribution", "extra", "extra-node-info", "gid", "gpu-bind",
    "gpu-freq", "gres", "gres-flags", "hint", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label",
    "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "oom-kill-step", "power", "prefer",
    "priority", "profile", "propagate", "resv-ports", "reservation", "segment", "signal-children", "sockets-per-node",
    "stepmgr", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task", "uid",
    "wait-all-nodes", "wckey", "x11",
}  # fmt: skip
_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help", "I": "immediate",
    "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes",
    "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec",
    "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip


def spelling(name: str) -> str | None:
    """Return how `sparo launch` takes an option of sbatch: an option, a sentence's end after "Use", or None if unknown."""
    if name in OWN:
        return OWN[name]
    if name in INSTEAD:
        return INSTEAD[name]
    if name in _FLAGS:
        return f"--sbatch.{name} true"
    return f"--sbatch.{name} VALUE" if name in _PASSED else None


def option_table() -> dict[str, str]:
    """Return every option of sbatch with its short form, as `-p, --partition`, and how `sparo launch` takes it."""
    short_forms = {name: f"-{short}, --{name}" for short, name in _SHORT.items()}
    names = sorted({*OWN, *INSTEAD, *_FLAGS, *_PASSED})
    return {short_forms.get(name, f"--{name}"): spelling(name) or "" for name in names}


def translate_options(words: Sequence[str], own_keys: Sequence[str], own_flags: Sequence[str] = ()) -> list[str]:
    """Return a command line in which options of sbatch have the form that clusters' options have.

    Args:
        words: as typed, `-p gpu --ntasks-per-node=4 --hold`.
        own_keys: keys of clusters, whose options stay as they are.
        own_flags: those of them without a value.

    Raises:
        ConfigError: an option that sparo sets itself; the message names the equivalent.
    """
    result: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, value = _split(word)
        if name is None or name.replace("-", "_") in own_keys:
            long = name is None or word.startswith("--")
            result.append(word if long else f"--{name}")
            if not long and value is not None:
                result.append(value)
            # A value may begin with a dash, as in --srun-args --gpu-bind=none.
            if name is not None and value is None and name.replace("-", "_") not in own_flags and rest:
                result.append(rest.pop(0))
        elif name in OWN:
            result += [OWN[name], *([] if value is None else [value])]
        elif name in INSTEAD:
            raise ConfigError(f"{word}: sparo sets it itself. Use {INSTEAD[name]}.")
        elif name in _FLAGS:
            result += [f"--sbatch.{name}", "true"]
        elif name in _PASSED:
            if value is None and not rest:
                raise ConfigError(f"{word}: a value is required")
            result += [f"--sbatch.{name}", rest.pop(0) if value is None else value]
        else:
            result.append(word)
    return result


def _split(word: str) -> tuple[str | None, str | None]:
    """Return the long name of an option and the value in the same word; None for other words."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return (None, None) if "." in name else (name, value if equals else None)
    # `-p gpu` and `-pgpu`; a negative number is none.
    if len(word) > 1 and word[0] == "-" and word[1] in _SHORT:
        return _SHORT[word[1]], word[2:].removeprefix("=") or None
    return None, None
