"""Shell lines around a job's srun: where its ranks meet, and whether it is started again.

They run in the batch script on the job's first node, outside of any container, where SLURM's commands are.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

# The first node under the address by which SLURM reaches it (its name, where it has no other); a port there that nobody listens on,
# below those that the kernel hands out. The trap keeps bash alive through a pre-emption's SIGTERM;
# srun takes the processors of a rank from a variable of its own since SLURM 22.05.
_MEET = """\
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

# Again: saved after a signal (75), ended by one before it listened (140, 143), killed (137: out of memory, or by the srun of
# an earlier start on a node that came back, for which our step has the same number), left by a lost rank, or never
# started by its node; but only while the job is running (it is not where it was cancelled) and has not been restarted.
_AGAIN = """\
code=$?
restart=${SLURM_RESTART_COUNT:-0}
mark=JOBS/.$SLURM_JOB_ID-$restart
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # of an array this element alone
job=${job:-$SLURM_JOB_ID}
again=no
[[ " 75 137 140 143 " != *" $code "* ]] || again=yes
[ ! -e "$mark.lost" ] || again=yes
[ $code -eq 0 ] || [ -e "$mark.started" ] || [ "$restart" -ge 3 ] || again=yes
rm -f "$mark".*
for try in $(seq 60); do
  [ $again = yes ] || break
  case "$(scontrol show job "$job" -o 2>/dev/null) " in
    *" JobState=RUNNING "*" Restarts=$restart "*) scontrol requeue "$job" && trap - TERM && exec sleep 60 ;;
    *" JobState="*) break ;;
  esac
  sleep 5
done
exit $code"""


def before(setup: tuple[str, ...], environment: Mapping[str, str], code: Path) -> list[str]:
    """Lines before srun: the cluster's own, its variables, the snapshot's path, and where the ranks meet."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    path = f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"
    # without the last one `python -m` would look into the folder of the launch, a checkout perhaps, before the snapshot
    return [*setup, *exports, path, "export PYTHONSAFEPATH=1", *_MEET.splitlines()]


def after(jobs: Path) -> list[str]:
    """Lines behind srun; `jobs` holds the marks that ranks leave (`launch.jobs.job.mark`)."""
    return _AGAIN.replace("JOBS", shlex.quote(str(jobs))).splitlines()
