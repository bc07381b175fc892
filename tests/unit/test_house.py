"""Project rules that no linter checks."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from sparo_train.core import registries as tables
from sparo_train.core.config import Frozen
from sparo_train.core.contracts import Objective
from sparo_train.core.registry import Registry
from sparo_train.models.readout import ReadOut

ROOT = Path(__file__).parents[2]
FILES = [
    p
    for top in ("sparo", "sparo_train", "sparo_data", "object_centric", "evals", "launch")
    for p in (ROOT / top).rglob("*.py")
]
HEAVY = ("torch", "open_clip", "timm", "torchvision", "numpy", "PIL", "evals", "sparo_data")


@pytest.mark.parametrize(
    "words", [[], ["train"], ["eval", "score"], ["data", "scenes"], ["launch", "train"], ["export"]]
)
def test_help_and_version_import_nothing_heavy(words):
    ask = (
        "import sys; from launch.cli.main import app; app([*sys.argv[1:], '--help'], standalone_mode=False);"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", ask, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-300:]


def test_job_status_needs_no_torch(tmp_path):
    ask = "import sys, launch.monitor.status, launch.jobs.records; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["False"]


def test_public_names_exist_and_load_lazily():
    ask = "import sys, sparo; print(dir(sparo) == sorted(sparo.__all__), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    import sparo

    for name in sparo.__all__:
        value = getattr(sparo, name)
        assert value is not None and not isinstance(value, ModuleType), name
    page = (ROOT / "docs/reference/python_api.head.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in page.splitlines() if "|" in line))) == set(
        sparo.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'Sparro'"):
        _ = sparo.Sparro
    # Names that documentation and notebook import are the public API, and a type checker sees the same names.
    for file in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "docs/tutorials/slots.ipynb"):
        imports = re.findall(r"^\s*\"?from (\w+)[.\w]* import", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert not {"sparo_train", "evals", "launch", "object_centric", "sparo_data"} & set(imports), file
    tree = ast.parse((ROOT / "sparo/__init__.py").read_text(encoding="utf-8"))
    typed = {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    assert set(sparo.__all__) <= typed


def test_every_built_in_entry_exists_with_the_type_of_its_registry():
    rows = {name: table for name, table in vars(tables).items() if isinstance(table, Registry)}
    assert {
        "METHODS",
        "RAY_DECODERS",
        "ENCODERS",
        "TASKS",
        "EXPORTS",
        "READOUTS",
        "ENGINES",
        "LOSSES",
        "OPTIMIZERS",
        "SOURCES",
        "LAYOUTS",
        "SLOT_ENCODERS",
        "TEACHERS",
        "CHECKPOINTS",
    } == rows.keys()
    for table in rows.values():
        for name in table.builtin:
            row = table.get(name)
            assert all(hasattr(row, a) for a in table.attributes) and (table.attributes or callable(row)), name


def test_the_training_step_stays_short():
    lines = (ROOT / "sparo_train/train/trainer.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 250, "a part of the loop has grown out of it; give it a file of its own"


def test_every_key_of_a_recipe_and_a_cluster_has_a_description():
    for file in FILES:
        if "(Frozen)" in file.read_text(encoding="utf-8") or "field(" in file.read_text(encoding="utf-8"):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    models, found = set(), [Frozen]
    while found:
        models |= set(below := found.pop().__subclasses__())
        found += below
    fields = {
        f"{model.__module__}.{model.__name__}.{key}": field.description
        for model in models
        if model.__module__.split(".")[0] in ("sparo_train", "sparo_data", "object_centric", "evals", "launch")
        for key, field in model.model_fields.items()
    }
    assert len(fields) > 200 and [key for key, description in fields.items() if not description] == []


def test_the_loop_imports_only_the_error_budget_and_the_fingerprint_from_data():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (loop,) = [c for c in contracts if c["name"].startswith("the loop knows")]
    read = {
        f"sparo_train.data.{folder}.{path.stem}"
        for folder in ("read", "sources")
        for path in (ROOT / "sparo_train/data" / folder).glob("*.py")
        if path.stem != "__init__"
    }
    rooms = {
        f"sparo_train.data.{p.name}" for p in (ROOT / "sparo_train/data").iterdir() if (p / "__init__.py").is_file()
    }
    budget_and_fingerprint = {"sparo_train.data.read.bad_samples", "sparo_train.data.sources.fingerprint"}
    allowed = {"sparo_train.data.read", "sparo_train.data.sources", *budget_and_fingerprint}
    assert (read | rooms) - set(loop["forbidden_modules"]) == allowed


def test_a_method_is_its_own_file_its_encoder_and_the_registry():
    """So another one, such as I-JEPA, is added with three files."""
    for kind in ("dino", "set_prediction", "video_slots", "video_slate", "slot_contrast", "novel_views"):
        named = {
            str(p.relative_to(ROOT)) for p in FILES if re.search(rf"[\"']{kind}[\"']", p.read_text(encoding="utf-8"))
        }
        entries = [
            f"{r.builtin[kind].partition(':')[0].replace('.', '/')}.py" for r in (tables.METHODS, tables.ENCODERS)
        ]
        entries.append(entries[0].replace(".py", "_config.py"))  # its config, if it has a separate file
        assert named - {"sparo_train/core/recipe/renamed.py"} <= {"sparo_train/core/registries.py", *entries}, kind


def test_no_code_branches_on_the_method():
    found = [
        f"{p}: {line}"
        for p in FILES
        for line in p.read_text(encoding="utf-8").splitlines()
        if re.search("isinstance.*(Dino|ClipObjective)", line)
    ]
    assert not found


def test_required_members_of_contracts_are_enforced():
    for contract in (Objective, ReadOut):
        with pytest.raises(TypeError, match="abstract"):
            contract()


def test_no_dependency_may_be_older_than_its_last_advisory():
    """Require versions without known vulnerabilities of what reads untrusted images, HTML and requests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [Requirement(line) for line in project["dependencies"]]
    for package, old in {
        "pillow": "10.2",
        "jinja2": "3.1.5",
        "opencv-python-headless": "4.11",
        "starlette": "0.49.0",
    }.items():
        (requirement,) = [one for one in named if one.name == package]
        assert old not in requirement.specifier and importlib.metadata.version(package) in requirement.specifier
