"""Common parts of the benchmarks: options, interleaved timing, the table, and the JSON file."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.append(sys.path.pop(0))  # evals.py beside this file must not stand before the package of that name

from sparo_data.writer import write_shards
from sparo_train.core.contracts import Engine, Progress
from sparo_train.core.disk.rundir import environment, machine_name


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--quick` and `--json FILE`, which every benchmark has."""
    out = argparse.ArgumentParser(description=doc)
    out.add_argument("--quick", action="store_true", help="under 50 s on two cores; wider spread")
    out.add_argument("--json", type=Path, help="write rows and machine here")
    return out


def device_flag(flags: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--device`, for benchmarks whose results differ on a GPU."""
    flags.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return flags


def interleave(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """Return (ours, theirs) of each round. Both sides take turns after one call that is not measured, because the speed of a machine drifts."""
    ours()
    theirs()
    return [(ours(), theirs()) for _ in range(rounds)]


def training_step(engine: Engine, data: dict[str, torch.Tensor], progress: Progress) -> Callable[[], None]:
    """Return a function that runs forward, backward and optimizer step of a prepared engine, and waits for the device."""

    def run() -> None:
        engine.backward(engine.forward(data, progress, last=True).total, last=True)
        engine.step(progress)
        if engine.device_context.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def seconds(call: Callable[[], Any], device: str = "cpu") -> float:
    """Return the seconds of a call, including the wait for the device."""
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence the progress output of another package."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def peak_growth(call: Callable[[], Any], device: str = "cpu") -> float:
    """Return the bytes by which the peak grows during a call: of the resident set (Linux), or of the GPU's allocator."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _peak_resident()
    call()
    return _peak_resident() - before


def _peak_resident() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def noise_shards(folder: Path, count: int) -> None:
    """Write training shards with `count` noise images of 64 pixels with captions."""
    rng = np.random.default_rng(0)

    def samples() -> Any:
        for i in range(count):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(buffer, format="JPEG")
            yield f"{i:06d}", {"jpg": buffer.getvalue(), "txt": f"picture number {i}".encode()}

    write_shards(folder, samples(), count // 4)


def row(
    name: str, pairs: list[tuple[float, float]], bar: float | None, unit: str, more_is_better: bool
) -> dict[str, Any]:
    """Return a row: medians, median of the paired ratios (above one: ours is better), their smallest and largest, ratio of sums, and the aim."""
    costs = [(1 / a, 1 / b) if more_is_better else (a, b) for a, b in pairs]
    ratios = sorted(b / a for a, b in costs)
    ratio = statistics.median(ratios)
    # As it is measured: a piece that is cut short leaves what it had.
    print(f"{name}: {ratio:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), n {len(pairs)}", file=sys.stderr, flush=True)
    return {
        "name": name,
        "ours": statistics.median(a for a, _ in pairs),
        "theirs": statistics.median(b for _, b in pairs),
        "unit": unit,
        "ratio": ratio,
        "spread": [ratios[0], ratios[-1]],
        "sums": _ratio_of_sums(costs),
        "n": len(pairs),
        "bar": bar,
        "ok": bar is None or ratio >= bar,
    }


def _ratio_of_sums(costs: list[tuple[float, float]]) -> list[float]:
    """Return the sum of theirs over the sum of ours, with its 95 % interval over 2,000 resamplings of the rounds."""
    table = np.array(costs)
    drawn = table[np.random.default_rng(0).integers(0, len(table), (2000, len(table)))].sum(1)
    low, high = np.quantile(drawn[:, 1] / drawn[:, 0], (0.025, 0.975))
    return [float(table[:, 1].sum() / table[:, 0].sum()), float(low), float(high)]


def report(title: str, rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the table, and write it to the JSON file if one is given."""
    table = Table(title=f"{title} — {machine_name()}", title_justify="left")
    for column in ("", "ours", "theirs", "unit", "ratio", "spread", "of sums (95 %)", "n", "bar", "ok"):
        table.add_column(column, justify="left" if column in ("", "unit") else "right")
    for r in rows:
        bar = "-" if r["bar"] is None else f"{r['bar']:g}"
        spread = f"{r['spread'][0]:.2f}–{r['spread'][1]:.2f}"
        table.add_row(
            r["name"],
            _short(r["ours"]),
            _short(r["theirs"]),
            r["unit"],
            f"{r['ratio']:.2f}",
            spread,
            f"{r['sums'][0]:.2f} ({r['sums'][1]:.2f}–{r['sums'][2]:.2f})" if "sums" in r and r["n"] > 1 else "-",
            str(r["n"]),
            bar,
            "yes" if r["ok"] else "NO",
        )
    Console(width=150).print(table)
    if path:
        path.write_text(
            json.dumps({"rows": rows, "machine": {"name": machine_name(), **environment()}}, indent=1), encoding="utf-8"
        )


def _short(value: float) -> str:
    return f"{value:.4g}"
