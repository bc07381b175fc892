"""`sparo export`: a run's newest weights in the layouts of other programs, with a model card and checksums."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparo_train import __version__
from sparo_train.core.disk.checkpoint_store import CheckpointStore, checkpoint_warnings, read_run_meta
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.core.files import whole_file
from sparo_train.core.registries import EXPORTS, METHODS
from sparo_train.data.read.plan import epoch_sizes, source_shares
from sparo_train.data.sources.base import DataConfig
from sparo_train.models.vit_config import ARCHS, VitConfig
from sparo_train.models.weight_files.description import CONFIG_KEY
from sparo_train.models.weight_files.dino_files import write_dino
from sparo_train.models.weight_files.weights import to_sparo_clip
from sparo_train.objectives.clip import scored_weights
from sparo_train.train.build import num_trained_parameters
from sparo_train.train.run_config import RunConfig

from ..encoders.loading import read_run
from ..report.model_card import CardFacts, CardScore, DataFacts, bands_text
from ..report.results_file import read_records
from .checkpoint_average import mean_weights, newest_checkpoints
from .export_files import file_versions, pack, refuse_foreign_weights


def card_facts(name: str, objective: Any, meta: Mapping[str, Any], run: Path, parameters: int, use: str) -> CardFacts:
    """Return facts for a model card from a checkpoint's own records.

    Args:
        name: name of the run.
        objective: the `objective` block of its recipe.
        meta: meta of the checkpoint.
        run: the run folder, whose scores are read.
        parameters: number of trained parameters.
        use: Python that loads the export.
    """
    sources = {name: facts for name, facts in meta["fingerprint"].items() if name != "plan"}
    # As recorded when the run read them, because shards may be gone now.
    source_samples = [facts["samples"] for facts in sources.values()]
    read = source_shares(source_samples, [facts["weight"] for facts in sources.values()], meta["samples"])
    data = [DataFacts(name, n, passes) for name, n, (_, passes) in zip(sources, source_samples, read, strict=True)]
    kind = objective.kind
    readout = getattr(getattr(objective, "model", None), "readout", None)
    what = f"{kind} with the readout {readout.kind}" if readout is not None else kind
    return CardFacts(
        name, what, parameters, meta["step"], meta["samples"], data, _scores(run), use, _tags(kind, readout), __version__
    )  # fmt: skip


def _tags(kind: str, readout: Any) -> list[str]:
    tags = ["sparo", kind, *([] if readout is None else [f"readout-{readout.kind}"])]
    # Models that open_clip loads have texts, too.
    more = ["zero-shot-image-classification"] if "open_clip" in METHODS.get(kind).exports else []
    return list(dict.fromkeys([*tags, *more]))


def _scores(run: Path) -> list[CardScore]:
    try:
        records = read_records([run])
    except DataError:
        return []
    # Scores of some slots or of some images are not scores of the model.
    own = [record for record in records if " (slots " not in record.checkpoint and not record.facts.get("limit")]
    return [
        CardScore(record.task, record.result, _step(record.facts), str(record.facts.get("precision") or "fp32"))
        for record in own
    ]


def _step(facts: Mapping[str, Any]) -> int | None:
    label = str(facts.get("checkpoint", {}).get("label", ""))
    number = Path(label).name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


logger = logging.getLogger(__name__)

_EXPORTED_KEYS = {"model", "mean", "std"}  # of a method's block, next to weights in single files
_LOAD = """from sparo import load_encoder

encoder = load_encoder("PLACE")"""
_OPEN_CLIP_LOAD = """import open_clip
import sparo.openclip  # registers SPARO's readouts in open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:PLACE")
tokenizer = open_clip.get_tokenizer("local-dir:PLACE")"""


class TrainedWeights(NamedTuple):
    """Input of an export.

    Attributes:
        name: name of the run.
        objective: the `objective` block of its recipe.
        weights: state dict of the objective.
        epochs: passes over the data so far.
        batch_size, lr: values of the recipe.
        data: the `data` block of its recipe; None: its defaults.
    """

    name: str
    objective: Any
    weights: Mapping[str, Tensor]
    epochs: int
    batch_size: int
    lr: float
    data: DataConfig | None = None

    @staticmethod
    def from_checkpoint(config: RunConfig, weights: Mapping[str, Tensor], epochs: int = 0) -> TrainedWeights:
        return TrainedWeights(
            config.name, config.objective, weights, epochs, config.batch_size, config.optim.lr, config.data
        )


@dataclass(frozen=True)
class Export:
    """Entry of `sparo.exports`.

    Args:
        write: writes weights to a path and returns the files that it wrote.
        name: name in RUN/export; empty: the folder itself.
        use: Python that loads the export, for the model card, or a function of the `objective` block that returns it; PLACE stands for the
            path. Empty: the card names no program.
        methods: methods whose runs it can write, in addition to those that name it in their `exports`, for a layout
            that a package adds to a method of another package.
        folder: `name` is a folder.
        library: the library for which the Hugging Face hub shows how to load the export, under the hub's name.
    """

    write: Callable[[TrainedWeights, Path], Path]
    name: str = ""
    use: str | Callable[[Any], str] = ""
    methods: tuple[str, ...] = ()
    folder: bool = False
    library: str | None = None

    @property
    def is_folder(self) -> bool:
        return self.folder or not self.name


def export_run(
    run: Path,
    to: Path | None,
    layout: str | None,
    average: str | None = None,
) -> Path:
    """Write a run's newest weights with card, checksums and the file mode of the umask; return the path.

    Args:
        run: the run or checkpoint.
        to: path of the export; None: in the run folder.
        layout: entry of sparo.exports (docs/guides/export.md); None: the method's default.
        average: `last:N`: export the mean of the newest N checkpoints instead.

    Raises:
        ConfigError: the layout does not support the method, or there are fewer than N checkpoints.
    """
    if layout is not None and layout not in EXPORTS.names():
        EXPORTS.get(layout, "--layout")
    config, step = read_run(run)
    if checkpoint_warning := checkpoint_warnings(run, step):
        logger.warning(checkpoint_warning)
    # The export of a checkpoint also goes to the run's folder, where users look for it.
    folder = run.parent.parent if (run / "meta.json").is_file() else run
    steps = [step] if average is None else newest_checkpoints(folder, step, average)
    meta, weights = read_run_meta(step), mean_weights(steps)
    # In a separate folder, so that the mean is not mistaken for the weights exported before.
    newest = CheckpointStore(folder / "checkpoints").latest()
    older = f"-{step.name}" if newest is not None and step.name != newest.name else ""
    home = folder / (f"export{older}" if average is None else f"export-{average.replace(':', '-')}{older}")
    trained = TrainedWeights.from_checkpoint(config, weights, _epochs_done(config.samples_per_epoch, meta))
    export, place = _export_place(trained, home, to, layout)
    if to is not None:
        refuse_foreign_weights(place, export.is_folder)
    before = file_versions(place)
    path = export.write(trained, place)
    if layout in ("timm", "transformers", "torch") and config.data.pixel_range != "by_type":
        logger.warning(
            f"--layout {layout}: the exported transform does not apply data.pixel_range={config.data.pixel_range}. Scale pixel values to 8 bits yourself "
            "before you apply the transform, or use --layout onnx."
        )
    use = export.use if isinstance(export.use, str) else export.use(config.objective)
    parameters = num_trained_parameters(config, weights)
    facts = card_facts(config.name, config.objective, meta, folder, parameters, use.replace("PLACE", path.as_posix()))
    facts = facts._replace(
        library=export.library, what=facts.what + bands_text(config.data.bands, config.data.pixel_range)
    )
    if average is not None:
        mean = f"the mean of the weights at steps {', '.join(str(read_run_meta(s)['step']) for s in steps)}"
        facts = facts._replace(what=f"{facts.what}: {mean}", scores=[])  # scores are of single steps
    pack(path, facts, before)
    return path


def _epochs_done(samples_per_epoch: int | None, meta: Mapping[str, Any]) -> int:
    """Return complete passes over the sources, or over the recipe's epoch."""
    sources = [facts for name, facts in meta["fingerprint"].items() if name != "plan"]
    epoch_samples = epoch_sizes([facts["samples"] for facts in sources], [facts["weight"] for facts in sources])
    return meta["samples"] // max(1, samples_per_epoch or sum(epoch_samples))


def export_weights(trained: TrainedWeights, home: Path, to: Path | None = None, layout: str | None = None) -> Path:
    """Write the weights of a run; return the path: `to`, or the layout's default name in `home`."""
    export, place = _export_place(trained, home, to, layout)
    return export.write(trained, place)


def _export_place(trained: TrainedWeights, home: Path, to: Path | None, layout: str | None) -> tuple[Export, Path]:
    kind = trained.objective.kind
    fitting = METHODS.get(kind).exports
    if layout is None and not fitting:
        raise ConfigError(
            f"objective.kind={kind}: no export layout supports it. Use the run folder itself "
            "(`sparo eval RUN`, `load_encoder(RUN)`)."
        )
    name = layout or fitting[0]
    export: Export = EXPORTS.get(name, "--layout")
    if name not in fitting and kind not in export.methods:
        raise ConfigError(f"--layout {name!r}: runs of objective {kind} support {' or '.join(fitting) or 'no layout'}")
    place = to or home / export.name
    if export.is_folder and place.is_file():
        raise ConfigError(f"--out {place}: is a file, but layout {name} writes a folder. Name another path.")
    if not export.is_folder and place.is_dir():
        raise ConfigError(f"--out {place}: is a folder, but layout {name} writes a file. Name {place / export.name}.")
    return export, place


def _open_clip(trained: TrainedWeights, folder: Path) -> Path:
    from sparo_train import openclip  # wraps open_clip's builders

    objective, weights = trained.objective, scored_weights(trained.weights)
    return openclip.export(objective.model, weights, folder, objective.mean, objective.std, _own_reading(trained))


def _own_reading(trained: TrainedWeights) -> dict[str, Any]:
    """Return how the run maps pixels to 8 bits, which `load_encoder` then does, too."""
    return {"pixel_range": "by_type" if trained.data is None else trained.data.pixel_range}


def _sparo_clip(trained: TrainedWeights, path: Path) -> Path:
    readout = trained.objective.model.readout
    if readout.placement.text and readout.kind != "sparo":
        raise ConfigError(
            f"--layout sparo-clip: does not support the readout {readout.kind!r}. Use --layout open_clip."
        )
    # What shapes do not show; sparo-clip's loader ignores it.
    objective_config = trained.objective.model_dump(mode="json", include=_EXPORTED_KEYS) | _own_reading(trained)
    state = to_sparo_clip(scored_weights(trained.weights))
    with whole_file(path) as temporary, temporary.open("wb") as stream:
        content = {"epoch": trained.epochs, "name": trained.name, "state_dict": state, CONFIG_KEY: objective_config}
        torch.save(content, stream)
    return path


def _dino(trained: TrainedWeights, path: Path) -> Path:
    objective = trained.objective
    if trained.data is not None and trained.data.bands is not None:
        raise ConfigError(
            "--layout dino: the official code reads red, green and blue, got a run with data.bands. Use another layout."
        )
    if objective.model.timm_model_name is not None:
        raise ConfigError("--layout dino: the official DINO code has no timm models. Use --layout timm or torch.")
    description = objective.model_dump(mode="json", include=_EXPORTED_KEYS) | _own_reading(trained)
    args = {
        "arch": _arch(objective.model),
        "patch_size": objective.model.patch_size,
        "drop_path_rate": objective.model.drop_path,
        "out_dim": objective.head.out_dim,
        "norm_last_layer": objective.head.norm_last_layer,
        "use_bn_in_head": objective.head.use_bn,
        "batch_size": trained.batch_size,
        "lr": trained.lr,
    }
    return write_dino(path, dict(trained.weights), description, args, trained.epochs)


def _arch(model: VitConfig) -> str:
    """Return the official name of a model of these sizes, or the model's own name."""
    sizes = {"width": model.width, "depth": model.depth, "heads": model.heads}
    return next((name for name, arch_sizes in ARCHS.items() if arch_sizes == sizes), f"vit_{model.width}x{model.depth}")


OPEN_CLIP = Export(_open_clip, use=_OPEN_CLIP_LOAD, library="open_clip")
SPARO_CLIP = Export(_sparo_clip, "sparo_clip.pt", _LOAD)
DINO = Export(_dino, "dino.pth", _LOAD)
