"""Shell lines of a job's batch script: where its ranks meet, a test of every node before they start, and restarts.

They run on the job's first node, outside of any container, because SLURM's commands are available there.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from .clusters import ClusterConfig

# MASTER_ADDR is the address by which SLURM reaches the first node (or its name), and MASTER_PORT a port there on which
# nothing listens, below the ephemeral ports. The trap keeps bash alive through a pre-emption's SIGTERM. Since SLURM
# 22.05, srun takes the processors of a rank from a separate variable.
_MEET: str = """\
trap : TERM USR1 USR2
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$MASTER_ADDR" -o | tr ' ' '\\n' | sed -n 's/^NodeAddr=//p')
MASTER_ADDR=${address:-$MASTER_ADDR}
for try in $(seq 0 31); do
  MASTER_PORT=$((20000 + (SLURM_JOB_ID + try * 367) % 12000))
  (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null || break
done
export MASTER_ADDR MASTER_PORT"""

# The job of this script for scontrol, and files about this start of it.
_NAMES: str = """\
restart=${SLURM_RESTART_COUNT:-0}
mark=JOBS/.$SLURM_JOB_ID-$restart # as ranks name it
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # of an array this element alone
job=${job:-$SLURM_JOB_ID}
nodes=JOBS/.$job.nodes # nodes that failed the test, at any start"""
# A function that restarts the job: only while it is running (not if it was
# cancelled) and has not been restarted. Nodes that failed the test below are excluded, because SLURM would choose them
# again; it allows that as soon as the job is requeued.
_REQUEUE: str = """\
sparo_requeue() {
  for try in $(seq 60); do
    case "$(scontrol show job "$job" -o 2>/dev/null) " in
      *" Requeue=0 "*) return ;; # --no-requeue
      *" JobState=RUNNING "*" Restarts=$restart "*)
        if scontrol requeue "$job"; then
          bad=$(cut -f 1 "$nodes" 2>/dev/null | sort -u | paste -s -d , -)
          exclude=EXCLUDE
          exclude=$exclude${exclude:+${bad:+,}}$bad
          for again in 1 2 3 4 5; do
            [ -n "$bad" ] || break
            scontrol update "jobid=$job" "excnodelist=$exclude" && break
            sleep 1
          done
          trap - TERM
          exec sleep 60
        fi ;;
      *" JobState="*) return ;;
    esac
    sleep 5
  done
}"""

# Every node says whether a rank could start there. A node that does not answer, or has a problem, is reported by name;
# without this, the other ranks would wait for its ranks. If no node answers, srun itself has a problem, which the
# ranks' own srun reports.
_TEST: str = """\
answers=$(timeout -k 5 120 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
  --cpus-per-task=1 --chdir=/ --kill-on-bad-exit=0 --input=none bash -c PROBE 2>&1)
bad_nodes= good_node=
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  answer=$(printf '%s\\n' "$answers" | sed -n "s/^sparo-node $node //p" | head -n 1)
  [ "$answer" = ok ] && good_node=yes && continue
  case "$answers" in *"sparo-node "*) ;; *) echo "$answers" >&2; break ;; esac
  bad_nodes="$bad_nodes $node"
  echo "sparo: $node: ${answer:-did not start a process within 120 s}" >&2
  printf '%s\\t%s\\n' "$node" "${answer:-did not start a process within 120 s}" >> "$nodes"
done
# A problem of all nodes is a mistake in the options, or of the site: other nodes would have it, too.
if [ -n "$bad_nodes" ]; then
  [ -z "$good_node" ] || [ "$restart" -ge 3 ] || sparo_requeue
  exit 1
fi"""
_PROBE: str = """\
say() { echo "sparo-node ${SLURMD_NODENAME:-$(hostname)} $*"; }
file=JOBS/.node-$SLURM_JOB_ID-$SLURM_NODEID
if [ ! -d JOBS ]; then say "the run folder is not there:" JOBS
elif ! touch "$file" 2>/dev/null; then say "the run folder cannot be written:" JOBS
elif [ ! -d CWD ]; then say "the folder of the launch is not there:" CWD
elif ! answer=$(PYTHON -c "import submitit" 2>&1); then say PYTHON_TEXT "failed to import submitit:" \\
  "$(echo "$answer" | tail -n 1 | sed "s/^.*bash: line [0-9]*: //")"
else say ok
fi
rm -f "$file" 2>/dev/null"""

# Restart if the job was saved after a signal (75), ended by one before its handlers were installed (140, 143), killed
# (137: out of memory, or by the srun of an earlier start on a node that returned, for which our step has the same
# number), if a rank was lost, or if a node never started it. A rank that failed for its own reason before training
# makes srun end the others, with 75.
_AGAIN: str = """\
code=$?
again=no
[[ " 75 137 140 143 " != *" $code "* ]] || again=yes
[ ! -e "$mark.failed" ] || again=no
[ ! -e "$mark.lost" ] || again=yes
[ $code -eq 0 ] || [ -e "$mark.started" ] || [ "$restart" -ge 3 ] || again=yes
rm -f "$mark".started "$mark".lost "$mark".failed
[ $again = no ] || sparo_requeue
exit $code"""


def lines_before(
    cluster: ClusterConfig, python: str, code: Path, jobs: Path, cwd: Path, restarts: bool = True
) -> list[str]:
    """Return the lines before srun: the cluster's own, its variables, the snapshot's path, the meeting place, the test of nodes.

    Args:
        cluster: its `setup`, `environment` and `exclude`.
        python: the interpreter, as a shell command.
        code: the snapshot that runs.
        jobs: folder of logs and marks.
        cwd: working directory of the ranks.
        restarts: whether the job may be requeued; in an allocation of a user's shell, it may not.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()]
    path = f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"
    # Without the last one, `python -m` would search the folder of the launch, perhaps a checkout, before the snapshot.
    return [
        *_setup_lines(cluster), *exports, path, "export PYTHONSAFEPATH=1", *_MEET.splitlines(), *requeue_lines(jobs, cluster.exclude, restarts),
        *_test_lines(cluster, python, jobs, cwd),
    ]  # fmt: skip


def _setup_lines(cluster: ClusterConfig) -> list[str]:
    """Return the cluster's `setup`, and a message if it ends the job: otherwise, no log would say why."""
    if not cluster.setup:
        return []
    # A variable instead of `trap - EXIT`, which would remove a trap that the setup itself has set.
    trap = """trap 'code=$?; [ -z "${SPARO_SETUP:-}" ] || echo "setup: ended the job with exit code $code" >&2' EXIT"""
    return ["SPARO_SETUP=1", trap, *cluster.setup, "unset SPARO_SETUP"]


def requeue_lines(jobs: Path, exclude: str | None, restarts: bool = True) -> list[str]:
    """Return the function that restarts the job, without the nodes in `exclude` and those that failed the test."""
    names = _fill(_NAMES, JOBS=shlex.quote(str(jobs)))
    if not restarts:
        return [*names.splitlines(), "sparo_requeue() { return 0; }"]
    return [*names.splitlines(), *_fill(_REQUEUE, EXCLUDE=shlex.quote(exclude or "")).splitlines()]


def _test_lines(cluster: ClusterConfig, python: str, jobs: Path, cwd: Path) -> list[str]:
    # In a container, the interpreter is another one, and starting the container only for this may take minutes.
    in_container = any(word.startswith("--container") for word in cluster.srun_args)
    probe = _fill(
        _PROBE,
        PYTHON_TEXT=shlex.quote(python),
        PYTHON="true" if in_container else python,
        JOBS=shlex.quote(str(jobs)),
        CWD=shlex.quote(str(cwd)),
    )
    return _fill(_TEST, PROBE=shlex.quote(probe)).splitlines()


def _fill(text: str, **values: str) -> str:
    """Return the text with names in it replaced by values, in one pass, because a value may contain a name."""
    return re.sub("|".join(sorted(values, key=len, reverse=True)), lambda match: values[match[0]], text)


def lines_after() -> list[str]:
    """Return the lines after srun, which read the marks that ranks leave (`launch.jobs.job.mark`)."""
    return _AGAIN.splitlines()
