"""The shipped cluster files for conda, Apptainer and pyxis, with stand-ins for these programs, which are not installed here."""

import sys
from pathlib import Path

import pytest
import yaml

from tests.slurm.conftest import Lab

pytestmark = pytest.mark.slurm
ENVIRONMENT = Path(sys.executable).parent
# Each logs its arguments, and then does what the program would do if this machine were its container.
STAND_INS = {
    "apptainer": f"""#!/bin/bash
echo "apptainer $*" >> LOG
[ "$1 $2 $3 $4 $5" = "exec --nv --bind /scratch /images/sparo.sif" ] || exit 1
shift 5
PATH={ENVIRONMENT}:$PATH exec "$@"
""",
    "srun": f"""#!/bin/bash
words=() container=
for word; do
  case $word in --container-*) container=yes; echo "srun $word" >> LOG ;; *) words+=("$word") ;; esac
done
[ -z "$container" ] || export PATH={ENVIRONMENT}:$PATH
exec /usr/bin/srun "${{words[@]}}"
""",
}
CONDA = f"""conda() {{ echo "conda $*" >> LOG; [ "$1 $2" = "activate sparo" ] && export PATH={ENVIRONMENT}:$PATH; }}
"""


@pytest.fixture
def equipped(lab: Lab, tmp_path, monkeypatch):
    """Copy the lab's folder, with stand-ins in PATH and in the home folder."""
    log = tmp_path / "log.txt"
    for name, text in STAND_INS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text.replace("LOG", str(log)))
        (tmp_path / "bin" / name).chmod(0o755)
    profile = tmp_path / "miniforge3/etc/profile.d/conda.sh"
    profile.parent.mkdir(parents=True)
    profile.write_text(CONDA.replace("LOG", str(log)))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(lab.cluster.env, "PATH", f"{tmp_path}/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return lab, log


@pytest.mark.parametrize(
    ("name", "signs"),
    [
        ("conda", ["conda activate sparo"]),
        ("apptainer", ["apptainer exec --nv --bind /scratch /images/sparo.sif python3 -u -m submitit.core._submit"]),
        ("container", ["srun --container-image=/images/sparo.sqsh", "srun --container-mounts=/scratch:/scratch"]),
    ],
)
def test_a_shipped_environment_passes_the_check(equipped, name, signs):
    lab, log = equipped
    here = {
        "extends": str(Path(f"configs/clusters/slurm_{name}.yaml").resolve()),
        "partition": "main",
        "gpus_per_node": 0,
    }
    here |= {"cpus_per_task": 1, "environment": {"OMP_NUM_THREADS": "1"}}
    (lab.root / f"configs/clusters/in_{name}.yaml").write_text(yaml.safe_dump(here))
    said = lab.sparo("launch", "check", "--cluster", f"in_{name}")
    assert ": ok, 1 rank(s), Python" in said, said
    lines = log.read_text().splitlines()
    assert all(any(line.startswith(sign) for line in lines) for sign in signs), lines
