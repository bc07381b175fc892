"""Verdicts on the papers' claims, from records of sweeps and tests that were stated before the runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from evals.report.seed_average import Spread, difference, spread

from .index import Claim, ClaimTest, Control
from .sweep_record import SweepRecord, score_axis

Outcome = Literal["shown", "refuted", "not decided"]


class Finding(NamedTuple):
    """Result of one test: the difference, or the mean, over seeds with its 95 % interval, and what follows."""

    test: ClaimTest
    outcome: Outcome
    spread: Spread | None
    seeds: int
    reason: str

    @property
    def text(self) -> str:
        """Return the result in words, in per cent where the score is a fraction."""
        t = self.test
        if self.spread is None:
            return f"{test_text(t)}: {self.reason}"
        rows = _rows(t)
        times, name = score_axis(t.score)
        unit = f" {name}" if name else ""
        numbers = [times * value for value in self.spread if value is not None]
        interval = f" ({numbers[1]:.1f} to {numbers[2]:.1f})" if len(numbers) == 3 else ""
        found = f"{numbers[0]:.1f}{interval}{unit}, {self.seeds} seed{'' if self.seeds == 1 else 's'}"
        return f"{t.score}: {rows} is {found}. Expected {_describe_expected(t)}: {self.outcome}"


class Verdict(NamedTuple):
    """Verdict on a claim: shown if all tests are, refuted if one is, otherwise not decided; with the reason."""

    claim: Claim
    outcome: Outcome
    findings: tuple[Finding, ...]
    reason: str


def _rows(test: ClaimTest) -> str:
    return f"`{test.row}` minus `{test.than}`" if test.than else f"`{test.row}`"


def _describe_expected(test: ClaimTest) -> str:
    times, _ = score_axis(test.score)
    value = 0.0 if test.than else test.value
    low, middle, high = (f"{times * (value + step):g}" for step in (-test.margin, 0.0, test.margin))
    return {
        "greater": f"above {high}",
        "less": f"below {low}",
        "at_least": f"at least {low}",
        "equal": f"between {low} and {high}",
        "different": f"not {middle} (refuted if the interval is between {low} and {high})",
    }[test.expect]


def test_text(test: ClaimTest) -> str:
    """Describe a test: score, rows, and expected range."""
    return f"{test.score}: {_rows(test)}, expected {_describe_expected(test)}"


def control_text(control: Control) -> str:
    """Describe the sign that a baseline has learned."""
    times, unit = score_axis(control.score)
    return f"{control.score} of `{control.row}` must exceed {times * control.above:g}{f' {unit}' if unit else ''} with every seed ({control.why})"


def decide(claim: Claim, record: SweepRecord) -> Verdict:
    """Return the verdict on a claim."""
    findings = tuple(_finding(test, claim.seeds, record) for test in claim.tests)
    outcomes = [finding.outcome for finding in findings]
    if problem := next(filter(None, (_not_learned(control, record) for control in claim.controls)), ""):
        return Verdict(claim, "not decided", findings, problem)
    if "refuted" in outcomes:
        return Verdict(claim, "refuted", findings, "")
    if all(outcome == "shown" for outcome in outcomes):
        return Verdict(claim, "shown", findings, "")
    return Verdict(claim, "not decided", findings, "; ".join(_reasons(findings)))


def _reasons(findings: Iterable[Finding]) -> list[str]:
    return list(dict.fromkeys(f.reason for f in findings if f.outcome == "not decided"))


def _not_learned(control: Control, record: SweepRecord) -> str:
    """Return why the baseline counts as untrained; empty if it has learned in every seed."""
    row = record.row(control.row)
    values = {} if row is None else row.values(control.score)
    if not values:
        return f"{control.row} has no {control.score}"
    seed, lowest = min(values.items(), key=lambda item: item[1])
    times, unit = score_axis(control.score)
    if lowest > control.above:
        return ""
    return (
        f"{control.row} has not learned: {control.score} {times * lowest:.1f} {unit} with seed {seed}, needed above "
        f"{times * control.above:.1f} ({control.why})"
    )


def _finding(test: ClaimTest, seeds: int, record: SweepRecord) -> Finding:
    rows = [record.row(name) for name in (test.row, test.than) if name]
    values = [[] if row is None else list(row.values(test.score).values()) for row in rows]
    fewest = min(map(len, values))
    if not fewest:
        return Finding(test, "not decided", None, 0, "no scores")
    found = difference(*values) if test.than else spread(values[0], mean=True)
    if fewest < seeds:
        return Finding(test, "not decided", found, fewest, f"{fewest} of {seeds} seeds")
    low, high = (found.value if end is None else end for end in found[1:])
    center = 0.0 if test.than else test.value
    outcome = _outcome(test, low - center, high - center)
    return Finding(
        test,
        outcome,
        found,
        fewest,
        "the interval reaches beyond the expected range" if outcome == "not decided" else "",
    )


def _outcome(test: ClaimTest, low: float, high: float) -> Outcome:
    """Return the outcome of a test from the interval (low, high), relative to the test's value."""
    if test.expect == "different":
        if low > 0 or high < 0:
            return "shown"
        return "refuted" if -test.margin < low and high < test.margin else "not decided"
    bounds = {
        "greater": (test.margin, float("inf")), "less": (float("-inf"), -test.margin),
        "at_least": (-test.margin, float("inf")), "equal": (-test.margin, test.margin),
    }  # fmt: skip
    bottom, top = bounds[test.expect]
    if bottom < low and high < top:
        return "shown"
    return "refuted" if high < bottom or low > top else "not decided"
