"""Model card: training data and scores of a model, from the records of its run, with three lines of Python that load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCardData, metadata_load
from yaml import YAMLError

from ..tasks.result import Result, format_metric, is_share


class DataFacts(NamedTuple):
    """A source: its samples, and how often each was read."""

    name: str
    samples: int
    passes: float


class CardScore(NamedTuple):
    """A result of the run, the step whose weights were scored (None: unknown), and the precision of the model."""

    task: str
    result: Result
    step: int | None
    precision: str = "fp32"


class CardFacts(NamedTuple):
    """Facts about the weights.

    `what` describes the model, `use` is Python that loads the export, `tags` and `library` are for the hub, which shows how to load
    with the library.
    """

    name: str
    what: str
    parameters: int
    step: int
    samples: int
    data: Sequence[DataFacts]
    scores: Sequence[CardScore]
    use: str
    tags: Sequence[str]
    version: str
    library: str | None = None


def model_card(facts: CardFacts) -> str:
    """Return Markdown with the front matter that the Hugging Face hub reads."""
    header = ModelCardData(tags=list(facts.tags), library_name=facts.library)
    lines = [
        "---",
        *header.to_yaml().splitlines(),
        "---",
        "",
        f"# {facts.name}",
        "",
        f"{facts.what}, {facts.parameters:,} trained parameters.",
        "",
    ]
    lines += ["## Use", "", "```python", facts.use, "```", ""] if facts.use else []
    lines += ["## Training", ""]
    lines += [f"{facts.step:,} steps, {facts.samples:,} samples, with sparo {facts.version}.", ""]
    lines += ["| data | samples | passes |", "|---|---|---|"]
    lines += [f"| {_cell(source.name)} | {source.samples:,} | {source.passes:.2f} |" for source in facts.data]
    lines += ["", "## Scores", "", *_scores(facts)]
    return "\n".join(lines) + "\n"


def bands_text(bands: Sequence[int] | None, pixel_range: object) -> str:
    """Return a clause for the card on the bands of a run and how values become 8 bits; empty for the defaults."""
    mapping = f"mapped to 8 bits by data.pixel_range={pixel_range}"
    if bands is None:
        return "" if pixel_range == "by_type" else f", for images {mapping}"
    return f", for bands {', '.join(map(str, bands))} of an image, {mapping}"


def is_own_card(path: Path) -> bool:
    """Return whether a file is a model card that sparo wrote, and may write again."""
    try:
        tags = (metadata_load(path) or {}).get("tags")
    except (OSError, ValueError, YAMLError):
        return False
    return isinstance(tags, list) and "sparo" in tags


def _scores(facts: CardFacts) -> list[str]:
    if not facts.scores:
        return ["None: these weights were not scored."]
    lines = ["| task | metric | score | 95 % interval | n | chance | step |", "|---|---|---|---|---|---|---|"]
    for score in facts.scores:
        r = score.result
        low, high = (format_metric(r.headline, end) for end in r.interval)
        # PSNR and errors have no chance level.
        chance = format_metric(r.headline, r.chance) if is_share(r.headline) else ""
        value = format_metric(r.headline, r.value, unit=True)
        step = "" if score.step is None else f"{score.step:,}"
        task = _cell(score.task) if score.precision == "fp32" else f"{_cell(score.task)} ({score.precision})"
        lines.append(f"| {task} | {r.headline} | {value} | {low} to {high} | {r.n:,} | {chance} | {step} |")
    lines += ["", "Scores are per cent where they are shares."]
    if any(score.step not in (None, facts.step) for score in facts.scores):
        lines.append(f"These are the weights of step {facts.step:,}. Scores of other steps belong to other weights.")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
