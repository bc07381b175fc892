"""Programs that the tests run on the null GPU: `python -m tests.nullgpu.programs NAME JSON`. Each prints its result as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image

from evals.tasks import knn
from sparo_data.writer import write_shards
from sparo_train.core.config import resolve
from sparo_train.core.contracts import Engine, Objective, Progress
from sparo_train.core.disk import metrics
from sparo_train.core.recipe.layers import load_recipe, merge, override
from sparo_train.core.registries import ENGINES
from sparo_train.engine.engine_kind import Sizes
from sparo_train.engine.local import ENGINE, LocalEngine, LocalEngineConfig
from sparo_train.train.build import build_objective, build_pipeline
from sparo_train.train.dry_run import memory_estimate
from sparo_train.train.run_config import RunConfig
from sparo_train.train.step import gradients
from tests.helpers.object_centric import object_centric
from tests.helpers.recipes import dino_recipe, slots_recipe, tiny_recipe
from tests.helpers.samples import sample
from tests.helpers.teachers import write_teacher
from tests.resume.test_videos import video_recipe

from . import counters
from .fake_ranks import CountCollectives, SingleRank, all_reduce_bucket

OWN_PACKAGES = ("/sparo_train/", "/object_centric/", "/evals/", "/launch/")
CONFIGS = Path(__file__).parents[2] / "configs"
PROGRESS = Progress(3, 1000, 0, 10)
EAGER = {"device": "cuda", "precision": "bf16", "compile": False}


def device() -> dict[str, Any]:
    """Return which devices torch finds."""
    return {"own": counters.on_null_gpu(), "name": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}


def nearest(queries: int, rows: int) -> dict[str, int]:
    """Return the counters of a k-NN search."""
    asked, bank = torch.randn(queries, 16, device="cuda"), torch.randn(rows, 16).half()
    with counters.count() as counter:
        knn.score(
            knn.find_nearest(asked, bank, 20), torch.zeros(rows).long(), torch.zeros(queries).long(), 9, (20,), 0.07, 20
        )
    return dict(counter)


def encode(kind: str) -> dict[str, list[str]]:
    """Return the devices of encodings of images and texts, of their products, and of the scores of a zero-shot task's classes."""
    from evals.suite.task import build_encoder

    with tempfile.TemporaryDirectory() as root:
        config = resolve(RunConfig, tiny(kind, Path(root)), "x")
        encoder = build_encoder(build_objective(config).to("cuda"), config)
    devices = {}
    for precision in ("fp32", "tf32", "bf16"):
        encoder.precision = precision
        images = encoder.images([Image.new("RGB", (64, 64), name) for name in ("red", "white")])
        texts = encoder.text(["a red heart", "a flag"])
        devices[precision] = [str(x.device) for x in (images, texts, images @ texts.T)]
    return devices


# ---- one step ----


def tiny(kind: str, root: Path) -> dict[str, Any]:
    """Return a tiny recipe of an objective, with its data below `root`."""
    if kind in ("clip", "sigmoid", "flair", "dino", "dino_batch_norm", "dinov3", "distill", "slate"):
        write_shards(root / "shards", (sample(i) for i in range(96)), 24)
    if kind in ("clip", "sigmoid", "flair"):
        tree = tiny_recipe(root / "shards", root)
        if kind == "sigmoid":
            tree["objective"]["loss"] = {"kind": "sigmoid"}
            tree["objective"]["model"]["init_logit_bias"] = -10.0
        if kind == "flair":
            tree["objective"]["model"]["readout"] = {"kind": "flair", "heads": 2}
            tree["objective"]["loss"] = {"kind": "sigmoid"}
            tree["objective"]["model"]["init_logit_bias"] = -10.0
        return tree
    if kind.startswith("dino"):
        tree = dino_recipe(root / "shards", root)
        if kind == "dino_batch_norm":
            tree["objective"]["head"]["use_bn"] = True
        if kind == "dinov3":
            tree["objective"] |= {"koleo": 0.1, "centering": "sinkhorn_knopp", "ibot": {}}
            tree["objective"]["gram"] = {"first_step": 1, "update_steps": 1, "crop_size": 48}
            tree["objective"]["model"] |= {
                "registers": 2,
                "layer_scale": 0.1,
                "positions": "rope",
                "ffn_layer": "swiglu",
            }
        return tree
    if kind == "distill":
        write_teacher(root / "teacher.pth")
        tree = dino_recipe(root / "shards", root)
        tree["objective"] = {
            "kind": "distill",
            "teacher": str(root / "teacher.pth"),
            "model": tree["objective"]["model"],
        }
        return tree
    if kind == "slate":
        tree = slots_recipe(root / "shards", root)
        tree["objective"] = {
            "kind": "slate",
            "model": {
                "image_size": 16,
                "dvae": {"vocab": 16, "channels": 8},
                "decoder": {"width": 16, "blocks": 1, "heads": 2},
                "encoder": {"kind": "tokens", "width": 16},
                "grouping": {"preset": "sa", "slots": 3, "width": 16},
            },
        }
        return tree
    if kind == "slot_contrast":
        return {**video_recipe(root, kind)[0], "out": str(root)}
    return object_centric(kind, root)


def run_step(engine: Engine, objective: Objective, batch: dict[str, Any], micro_batch_size: int = 10**9) -> None:
    """Run one training step as the trainer does, on a batch in pinned memory."""
    on_device = engine.device_context.prefetch_to_device(batch)
    gradients(engine, objective, objective.preprocess_batch(on_device, PROGRESS), PROGRESS, micro_batch_size)
    engine.step(PROGRESS)


def steps(
    kinds: list[str], engine_options: dict[str, Any], optim: dict[str, Any], micro_batch_size: int
) -> dict[str, Any]:
    """Return the counters of each objective's third step: waits by line, launches and copies, and the allocator's peak; or the error."""
    out: dict[str, Any] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as root:
            try:
                out[kind] = _one_step(tiny(kind, Path(root)), engine_options, optim, micro_batch_size)
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{frame.filename}:{frame.lineno}"
                out[kind] = {"error": f"{type(error).__name__}: {str(error)[:300]} at {place}"}
    return out


def _prepared(
    tree: dict[str, Any], engine_options: dict[str, Any], optim: dict[str, Any]
) -> tuple[Objective, LocalEngine, dict[str, Any]]:
    """Return the objective of a recipe, its engine, and a batch in pinned memory."""
    tree["data"]["workers"] = 0
    tree["optim"] = {**tree.get("optim", {}), **optim}
    config = resolve(RunConfig, tree, "recipe")
    with contextlib.closing(build_pipeline(config).start(None)) as batches:
        batch = {key: value.pin_memory() for key, value in next(batches).batch.items()}
    objective = build_objective(config)
    block = LocalEngineConfig.model_validate({**EAGER, **engine_options})
    engine = LocalEngine(block, config.optim)
    engine.prepare(objective)
    return objective, engine, batch


def _one_step(
    tree: dict[str, Any], engine_options: dict[str, Any], optim: dict[str, Any], micro_batch_size: int
) -> dict[str, Any]:
    objective, engine, batch = _prepared(tree, engine_options, optim)
    run_step(engine, objective, batch, micro_batch_size)
    with counters.find_syncs(OWN_PACKAGES) as waits:
        run_step(engine, objective, batch, micro_batch_size)
    torch.cuda.reset_peak_memory_stats()
    with counters.count() as counts:
        run_step(engine, objective, batch, micro_batch_size)
    short = {"/".join(line.split("/")[-3:]): number for line, number in waits.items()}
    return {"waits": short, "counts": counts, "peak": torch.cuda.max_memory_allocated()}


def autograd_functions() -> dict[str, Any]:
    """Return for each hand-written autograd function whether its gradients have the dtypes of its inputs, in each precision; or the error."""
    from tests.unit.test_autocast import CASES

    def gradient_dtypes(case: Any, forward: bool, backward: bool) -> bool:
        with torch.device("cuda"):
            call, inputs = case()
        with torch.autocast("cuda", torch.bfloat16, enabled=forward):
            value = call()
        with torch.autocast("cuda", torch.bfloat16, enabled=backward):
            gradients_ = torch.autograd.grad(value, inputs, allow_unused=True)
        pairs = zip(inputs, gradients_, strict=True)
        return all(g is None or (g.dtype, g.device) == (x.dtype, x.device) for x, g in pairs)

    out: dict[str, Any] = {}
    for name, case in CASES.items():
        for forward in (False, True):
            for backward in (False, True):
                key = f"{name}, autocast in forward: {forward}, in backward: {backward}"
                try:
                    out[key] = gradient_dtypes(case, forward, backward)
                except Exception as error:
                    out[key] = f"{type(error).__name__}: {str(error)[:300]}"
    return out


def graph_breaks(kinds: list[str], backend: str) -> dict[str, Any]:
    """Return the reasons for which torch.compile splits the graph of each objective; or the error.

    Args:
        backend: `aot_eager` also derives the backward pass, which takes several times as long as `eager`.
    """
    from torch._dynamo.utils import counters as dynamo

    out: dict[str, Any] = {}
    for kind in kinds:
        torch._dynamo.reset()
        dynamo.clear()
        with tempfile.TemporaryDirectory() as root:
            objective, engine, batch = _prepared(tiny(kind, Path(root)), {}, {})
        compiled = torch.compile(objective, backend=backend, dynamic=False)
        batch = objective.preprocess_batch(engine.device_context.prefetch_to_device(batch), PROGRESS)
        with engine.device_context.autocast():
            loss = compiled(batch, PROGRESS)
        loss.total.backward()
        out[kind] = [reason.split("\n")[0] for reason in dynamo["graph_break"]]
    return out


def launches(world_size: int, engine_options: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """Return the launches of a step of CLIP+SPARO on rank 0, and the number of graphs after captions of one, two and all lengths."""
    from torch._dynamo.utils import counters as dynamo

    with _many_ranks(world_size):
        config = _shipped(changes)
        objective = build_objective(config)
        engine = _engine_of_rank_0(config, engine_options, objective, world_size)
        graphs = []
        for lengths in ([77], [40], range(8, 77, 8)):
            for length in lengths:
                run_step(engine, objective, _pairs(16, length))
            graphs.append(dynamo["stats"]["unique_graphs"])
        batch = _pairs(16, 77)
        with counters.count() as counts:
            run_step(engine, objective, batch)
    return {"launch": counts["launch"], "graphs": graphs}


# ---- many ranks ----


def ranks(world_size: int, engine_options: dict[str, Any], changes: list[str], pairs: int = 16) -> dict[str, Any]:
    """Return the counters of rank 0 of `world_size` ranks in a step of CLIP+SPARO: collectives, launches, memory, and the estimates.

    Args:
        engine_options: the recipe's `engine` block.
        changes: overrides of the recipe.
        pairs: pairs per rank.
    """
    with _many_ranks(world_size):
        config = _shipped(changes)
        objective = build_objective(config)
        entry = ENGINES.get(engine_options["kind"])
        block = entry.config.model_validate({**EAGER, **engine_options})
        costs = entry.costs(block, Sizes.from_objective(objective), world_size)
        engine = _engine_of_rank_0(config, engine_options, objective, world_size)
        batch = _pairs(pairs, 77)
        run_step(engine, objective, batch)
        between = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with CountCollectives() as collectives, counters.count() as counts:
            run_step(engine, objective, batch)
    return {
        "number": collectives.number,
        "bytes": collectives.bytes,
        "between": between,
        "peak": torch.cuda.max_memory_allocated(),
        "kept": costs.weights + costs.optimizer,
        "sent": costs.sent,
        "units": len(objective.shard_units()),
        "counts": counts,
    }


@contextlib.contextmanager
def _many_ranks(world_size: int) -> Iterator[None]:
    """Act as rank 0 of a process group whose other ranks do not exist."""
    import torch.distributed as dist
    import torch.nn.parallel.distributed as ddp
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DDP compares shapes with those of the other ranks, which do not exist.
    ddp._verify_param_shape_across_processes = lambda *_: None  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    yield
    dist.destroy_process_group()


def _engine_of_rank_0(
    config: RunConfig, engine_options: dict[str, Any], objective: Objective, world_size: int
) -> Engine:
    entry = ENGINES.get(engine_options["kind"])
    block = entry.config.model_validate({**EAGER, **engine_options})
    engine = entry.build(block, config.optim, SingleRank(world_size))
    engine.prepare(objective)
    if engine_options["kind"] == "ddp":
        engine._root.register_comm_hook(None, all_reduce_bucket)
    return engine


def _pairs(count: int, length: int) -> dict[str, torch.Tensor]:
    """Return `count` pairs whose captions have `length` tokens, in host memory."""
    return {
        "image": torch.zeros(count, 3, 224, 224, dtype=torch.uint8),
        "text": torch.zeros(count, length, dtype=torch.long),
    }


def _shipped(changes: list[str], recipe: str = "clip/cc15m_sparo.yaml") -> RunConfig:
    return resolve(RunConfig, {**override(load_recipe(str(CONFIGS / recipe)), changes, RunConfig), "name": "x"}, "x")


def against_estimate(
    recipe: str, changes: list[str], engine_options: dict[str, Any], world_size: int, samples: int
) -> dict[str, Any]:
    """Return the allocator's peak, the estimate of `sparo train --dry-run`, launches and sent bytes of a step with `samples` per rank."""
    with _many_ranks(world_size):
        config = _shipped(changes, recipe)
        block = ENGINES.get(engine_options["kind"]).config.model_validate({**EAGER, **engine_options})
        with torch.device("meta"):
            meta = build_objective(config)
        footprint = meta.footprint(samples, samples * world_size)
        estimate = memory_estimate(block, config.optim, world_size, samples, meta, footprint)
        objective = build_objective(config)
        engine = _engine_of_rank_0(config, engine_options, objective, world_size)
        batch = _pairs(samples, 77) if config.objective.kind == "clip" else _crops(samples)
        run_step(engine, objective, batch)
        torch.cuda.reset_peak_memory_stats()
        with CountCollectives() as collectives, counters.count() as counts:
            run_step(engine, objective, batch)
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "estimate": sum(estimate.values()),
        "launch": counts["launch"],
        "waits": counts.get("stream_sync", 0),
        "collectives": sum(collectives.number.values()),
    }


def _crops(count: int) -> dict[str, torch.Tensor]:
    shapes = {"global_crops": (count, 2, 3, 224, 224), "local_crops": (count, 8, 3, 96, 96)}
    return {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}


# ---- whole runs ----


def train(kind: str, engine_options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Train with checkpoints, stop after half of the steps, resume; return the exit codes and the last records."""
    from sparo_train.train.fit import fit

    with tempfile.TemporaryDirectory() as root:
        tree = merge(tiny(kind, Path(root)), {"out": root, "name": "r", "steps": 6, **changes})
        tree["engine"] = {**EAGER, **engine_options}
        tree["eval"] = {"tasks": {}}
        ends = [fit(resolve(RunConfig, {**tree, **more}, "x")).reason for more in ({"stop_after_steps": 3}, {})]
        rows = metrics.read(Path(root) / "r" / "metrics.jsonl", "train")
        saved = yaml.safe_load((Path(root) / "r" / "config.yaml").read_text())
        return {"ends": ends, "steps": len(rows), "memory": rows[-1]["memory"], "device": saved["engine"]["device"]}


def save_twice() -> dict[str, Any]:
    """Save a checkpoint of a small run twice; return the tensors of one, and how often the second save waits for the device."""
    from sparo_train.core.disk.checkpoint_store import CheckpointStore
    from sparo_train.train.checkpointing import Saver

    with tempfile.TemporaryDirectory() as root:
        config = _shipped(["objective.model.vision.layers=2", "objective.model.text.layers=2"])
        objective = build_objective(config)
        engine = LocalEngine(LocalEngineConfig.model_validate(EAGER), config.optim)
        engine.prepare(objective)
        run_step(engine, objective, _pairs(8, 77))
        saver = Saver(CheckpointStore(Path(root)), SingleRank(1))
        saver.save(1, engine.pieces(), {})
        saver.wait()
        with counters.count() as counts:
            saver.save(2, engine.pieces(), {})
            saver.wait()
        saver.close()
    return {"tensors": sum(map(len, engine.pieces().values())), "counts": dict(counts)}


def train_with_workers() -> dict[str, Any]:
    """Train with loader workers; return whether they were forked after CUDA had started, and whether batches were pinned."""
    from sparo_train.data.read import workers
    from sparo_train.engine.device_context import Device
    from sparo_train.train.fit import fit

    start, prefetch, pinned = workers._start_worker, Device.prefetch_to_device, []

    with tempfile.TemporaryDirectory() as root:

        def noted_start(number: int) -> None:
            (Path(root) / f"worker-{number}").write_text(json.dumps(torch.cuda._initialized))
            start(number)

        def noted_prefetch(self: Device, batch: dict[str, torch.Tensor]) -> Any:
            pinned.extend(value.is_pinned() and value.is_contiguous() for value in batch.values())
            return prefetch(self, batch)

        workers._start_worker, Device.prefetch_to_device = noted_start, noted_prefetch
        tree = merge(tiny("clip", Path(root)), {"out": root, "name": "r", "steps": 3, "data": {"workers": 2}})
        end = fit(resolve(RunConfig, {**tree, "engine": EAGER, "eval": {"tasks": {}}}, "x")).reason
        forked_late = [json.loads(path.read_text()) for path in sorted(Path(root).glob("worker-*"))]
        environment = json.loads((Path(root) / "r/environment.json").read_text())
    return {"end": end, "forked_late": forked_late, "pinned": pinned, "machine": environment["machine"]}


def reserved_memory(expandable: bool) -> dict[str, Any]:
    """Return the bytes that tensors took, and that the allocator reserved, in steps with captions of changing lengths."""
    config = _shipped([f"objective.model.{tower}.layers=2" for tower in ("vision", "text")])
    objective = build_objective(config)
    engine = LocalEngine(LocalEngineConfig.model_validate({**EAGER, "expandable_segments": expandable}), config.optim)
    engine.prepare(objective)
    for length in (40, 77, 8, 60, 25, 70, 33, 50, 15):
        run_step(engine, objective, _pairs(64, length))
    segments = torch.cuda.memory_snapshot()
    return {
        "expandable": sorted({segment["is_expandable"] for segment in segments}),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def local_memory(pairs: int) -> dict[str, Any]:
    """Return the bytes that `sparo train --dry-run` estimates for CLIP+SPARO B/16 with two blocks, and those of the allocator."""
    config = _shipped([f"objective.model.{tower}.layers=2" for tower in ("vision", "text")])
    objective, block = build_objective(config), LocalEngineConfig.model_validate(EAGER)
    costs = ENGINE.costs(block, Sizes.from_objective(objective), 1)
    engine = LocalEngine(block, config.optim)
    engine.prepare(objective)
    batch = _pairs(pairs, 77)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        run_step(engine, objective, batch)
    return {
        "kept": costs.weights + costs.optimizer,
        "states": costs.states,
        "gathered": costs.gathered,
        "between": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def run_and_exit(name: str, arguments: list[Any]) -> None:
    """Print the result of a program as the last line, and end the process."""
    assert counters.on_null_gpu(), "this program needs the null GPU: python -m tests.nullgpu.build python -m …"
    print(json.dumps(globals()[name](*arguments)), flush=True)
    # As in `sparo train` on several ranks: threads of process groups can abort an interpreter that shuts down.
    os._exit(0)


if __name__ == "__main__":
    run_and_exit(sys.argv[1], json.loads(sys.argv[2]))
