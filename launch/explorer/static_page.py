"""`sparo slots explore --static FOLDER`: the explorer with its model in the browser, as a folder for any web server or as one file."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

from evals.encoders.loading import read_run
from evals.encoders.onnx_encoder import OnnxEncoder, from_onnx, weights_file
from evals.interop.exporting import export_run
from sparo_data.npm import install_packages
from sparo_train.core.errors import ConfigError
from sparo_train.core.files import cache_folder, read_bytes, write_whole
from sparo_train.core.registries import METHODS

from .app import Explorer
from .offline_page import PAGE, build_offline_page
from .opened import Side

RUNTIME = {"onnxruntime-web": "1.30.0"}
_RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
_PREFIX = "onnx:"


def write_static(explorer: Explorer, checkpoint: str, precision: str, out: Path, one_file: bool) -> list[Path]:
    """Write the page to a folder, or as one file; return the paths, the page first.

    Args:
        explorer: the page with its first checkpoint.
        checkpoint: a run, or `onnx:FOLDER`.
        precision: precision of the exported programs: fp32, fp16 or int8.
        out: folder or file.
        one_file: write everything into one HTML file.

    Raises:
        ConfigError: the checkpoint cannot be exported as ONNX, or needs more than its encodings for a score.
        DataError: npm cannot fetch onnxruntime-web.
    """
    modules = install_packages(cache_folder() / "npm", RUNTIME, "--static")
    assets = {name: read_bytes(modules / "onnxruntime-web/dist" / name, ConfigError) for name in _RUNTIME_FILES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = _programs(checkpoint, Path(temporary))
        encoder = from_onnx(f"{folder}?precision={precision}")
        assert isinstance(encoder, OnnxEncoder)
        suffix = "" if precision == "fp32" else f".{precision}"
        for name in ("image", *(["text"] if encoder.facts.text else [])):
            program = folder / f"{name}{suffix}.onnx"
            if weights_file(program).is_file():
                raise ConfigError(
                    f"--static: {checkpoint} has more than 2 GB, which browsers cannot load. Run sparo slots explore without --static."
                )
            assets[f"{name}.onnx"] = read_bytes(program, ConfigError)
        if encoder.facts.text:
            assets["tokenizer.json"] = read_bytes(folder / "tokenizer.json", ConfigError)
    side = explorer.sides[explorer.first]
    bundle = {**_bundle(explorer), **_model(side, encoder)}
    page = build_offline_page(PAGE, bundle, assets if one_file else {}, with_model=True)
    if one_file:
        return [write_whole(out, page.decode())]
    out.mkdir(parents=True, exist_ok=True)
    paths = [write_whole(out / "index.html", page.decode())]
    for name, data in assets.items():
        paths.append(out / name)
        write_whole(paths[-1], data)
    return paths


def refuse_unsupported(checkpoint: str, target: Path, one_file: bool) -> None:
    """Raise `ConfigError` if a checkpoint cannot run in a browser, or if the target has files that are not from an earlier call."""
    if one_file and target.is_dir():
        raise ConfigError(f"--static {target}: is a folder. Name a file.")
    page = target if one_file else target / "index.html"
    occupied = page.exists() if one_file else target.is_dir() and any(target.iterdir())
    if occupied and not (page.is_file() and b'id="offline-data"' in page.read_bytes()):
        raise ConfigError(
            f"--static {target}: has other content, which would be overwritten. Name a new {'file' if one_file else 'folder'}."
        )
    if checkpoint.startswith(_PREFIX):
        encoder = from_onnx(str(_onnx_folder(checkpoint)))
        assert isinstance(encoder, OnnxEncoder)
        data, pooled = encoder.facts.image, encoder.facts.text is not None and "patches" in encoder.facts.image.outputs
    elif Path(checkpoint).is_dir():
        config, _ = read_run(Path(checkpoint))
        if "onnx" not in METHODS.get(config.objective.kind).exports:
            raise ConfigError(
                f"--static: {checkpoint} is a run of {config.objective.kind}, which cannot be exported to ONNX. Use a run of CLIP or DINO."
            )
        model = getattr(config.objective, "model", None)
        data, pooled = config.data, bool(getattr(getattr(model, "readout", None), "conditioned", False))
    else:
        raise ConfigError(
            f"--static: {checkpoint} is neither a run nor onnx:FOLDER. Name a run, or a folder that `sparo export --layout onnx` wrote."
        )
    if data.bands is not None or data.pixel_range != "by_type":
        raise ConfigError(
            f"--static: {checkpoint} has data.bands or data.pixel_range, but browsers read only 8-bit red, green and blue."
        )
    if pooled:
        raise ConfigError(
            f"--static: slots of {checkpoint} depend on the text, so an image alone has none. Use another readout."
        )


def _onnx_folder(checkpoint: str) -> Path:
    return Path(checkpoint.removeprefix(_PREFIX).partition("?")[0])


def _programs(checkpoint: str, temporary: Path) -> Path:
    """Return a folder with ONNX programs of a checkpoint."""
    if checkpoint.startswith(_PREFIX):
        return _onnx_folder(checkpoint)
    exported = export_run(Path(checkpoint), temporary / "onnx", "onnx")
    return exported if exported.is_dir() else exported.parent


def _bundle(explorer: Explorer) -> dict[str, Any]:
    """Return the data of the page as it opens, with the attention of all of its images."""
    first = explorer.first
    for image in range(len(explorer.pictures.entries)):
        explorer.attention(first, image)
    selection = explorer.files[first].facts()
    keys = ("chosen", "names", "notes", "looked_at")
    bundle = explorer.offline_bundle(
        {"sides": [{"id": first, **{key: selection.get(key) for key in keys}}], "image": 0}
    )
    for side in bundle["facts"]["sides"]:  # the page may be published: names of files, without folders of this machine
        side["label"] = Path(side["label"]).name
        side["selection"] = {**side["selection"], "path": Path(side["selection"]["path"]).name}
    return bundle


def _model(side: Side, encoder: OnnxEncoder) -> dict[str, Any]:
    """Return the facts with which the page runs the programs, and the encodings of its images."""
    facts = encoder.facts
    vectors = side.vectors
    model = {
        "image": facts.image.model_dump(exclude={"bands", "pixel_range"}),
        "text": facts.text and facts.text.model_dump(),
        "units": side.units.number,
        "slots": side.units.kind == "slots",
        "dimension": vectors.shape[-1],
    }
    data = vectors.numpy().astype("<f4").tobytes()
    return {"model": model, "vectors": base64.b64encode(data).decode()}
