"""What makes an export stand alone: its card, sums by which a copy is told from another file, and a mode that others can read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparo_train import __version__
from sparo_train.core.errors import DataError
from sparo_train.core.files import give_usual_mode, write_whole
from sparo_train.core.registries import METHODS
from sparo_train.data.read.plan import reading
from sparo_train.train.run_config import RunConfig

from ..report.model_card import CARD_BEGINS, CardFacts, CardScore, DataFacts, model_card
from ..report.results_file import read_records

_PIECE = 1 << 20
SUMS = "SHA256SUMS"


def card_facts(config: RunConfig, meta: Mapping[str, Any], run: Path, parameters: int, use: str) -> CardFacts:
    """What a checkpoint's own records say of it.

    Args:
        meta: of the checkpoint.
        run: the run folder, whose scores are read.
        use: Python that loads the export.
    """
    sources = {name: facts for name, facts in meta["fingerprint"].items() if name != "plan"}
    # As the run read them, not as they lie there now: shards may be gone.
    source_samples = [facts["samples"] for facts in sources.values()]
    read = reading(source_samples, [facts["weight"] for facts in sources.values()], meta["samples"])
    data = [DataFacts(name, n, passes) for name, n, (_, passes) in zip(sources, source_samples, read, strict=True)]
    kind = config.objective.kind
    readout = getattr(getattr(config.objective, "model", None), "readout", None)
    what = f"{kind} with the read-out {readout.kind}" if readout is not None else kind
    return CardFacts(
        config.name, what, parameters, meta["step"], meta["samples"], data, _scores(run), use, _tags(kind, readout), __version__
    )  # fmt: skip


def _tags(kind: str, readout: Any) -> list[str]:
    tags = ["sparo", kind, *([] if readout is None else [f"readout-{readout.kind}"])]
    # What open_clip loads has texts, too.
    more = ["zero-shot-image-classification"] if "open_clip" in METHODS.get(kind).exports else []
    return list(dict.fromkeys([*tags, *more]))


def _scores(run: Path) -> list[CardScore]:
    try:
        records = read_records([run])
    except DataError:
        return []
    # Scores of half of the slots, or of some of the images, are not the model's.
    own = [record for record in records if " (slots " not in record.checkpoint and not record.facts.get("limit")]
    return [CardScore(record.task, record.result, _step(record.facts)) for record in own]


def _step(facts: Mapping[str, Any]) -> int | None:
    label = str(facts.get("checkpoint", {}).get("label", ""))
    number = Path(label).name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def pack(export: Path, facts: CardFacts) -> None:
    """Write the card and the sums beside what was exported: README.md and SHA256SUMS in a folder, FILE.md and FILE.sha256."""
    write_whole(card_of(export), model_card(facts))
    if export.is_dir():
        # other layouts of the run may lie here, too, each with sums of its own
        files = sorted(export.glob("open_clip_*")) or sorted(p for p in export.iterdir() if p.is_file())
        files = [path for path in files if path.name not in (SUMS, "README.md", "MODEL_CARD.md")]
        sums = export / SUMS
    else:
        files, sums = [export], export.with_name(f"{export.name}.sha256")
    for path in files:
        give_usual_mode(path)
    write_whole(sums, "".join(f"{sha256(path)}  {path.name}\n" for path in files))


def card_of(export: Path) -> Path:
    """Where an export's card is: README.md, unless somebody else's README lies there."""
    if not export.is_dir():
        return export.with_name(f"{export.name}.md")
    readme = export / "README.md"
    other = readme.is_file() and not readme.read_text(encoding="utf-8", errors="replace").startswith(CARD_BEGINS)
    return export / "MODEL_CARD.md" if other else readme


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, as sha256sum writes it."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
