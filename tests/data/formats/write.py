"""Write the small data sets in this folder with the libraries that own the formats: python write.py {mds|litdata|energon} FOLDER.

They are stored because mosaicml-streaming needs older versions of numpy and transformers than sparo's tests. Versions:
mosaicml-streaming 0.13.0, litdata 0.2.76, megatron-energon 7.4.1. The pictures are random squares.
"""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

COUNT = 12


def picture(number: int) -> Image.Image:
    """Return 4 x 4 random squares of 8 x 8 pixels."""
    squares = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1))


def jpeg(number: int) -> bytes:
    """Return the picture as a JPEG file."""
    buffer = io.BytesIO()
    picture(number).save(buffer, "JPEG")
    return buffer.getvalue()


def caption(number: int) -> str:
    """Return a caption with a non-ASCII letter."""
    return f"caption {number} é"


def write_mds(folder: Path) -> None:
    """Write MDS with encoded files (plain, zstd) and with raw pictures (raw)."""
    from streaming import MDSWriter

    columns = {"image": "bytes", "caption": "str", "label": "int", "meta": "json", "score": "float32"}
    for name, kind, compression in (("plain", "bytes", None), ("raw", "pil", None), ("zstd", "bytes", "zstd")):
        kinds = {**columns, "image": kind}
        out = str(folder / name)
        with MDSWriter(out=out, columns=kinds, compression=compression, size_limit=8000, hashes=["xxh64"]) as writer:
            for i in range(COUNT):
                image = picture(i) if kind == "pil" else jpeg(i)
                row = {"caption": caption(i), "label": i % 3, "meta": {"texts": [f"a {i}", f"b {i}"]}}
                writer.write({**row, "image": image, "score": np.float32(i)})


def write_litdata(folder: Path) -> None:
    """Write LitData with dictionaries (plain), raw pictures (raw) and tuples (tuple)."""
    from litdata.streaming.writer import BinaryWriter

    samples = {
        "plain": lambda i: {"image": jpeg(i), "caption": caption(i), "label": i % 3, "score": i / 2},
        "raw": lambda i: {"image": picture(i), "caption": caption(i)},
        "tuple": lambda i: (jpeg(i), caption(i)),
    }
    for name, make in samples.items():
        (folder / name).mkdir(parents=True)
        writer = BinaryWriter(str(folder / name), chunk_size=5)
        for i in range(COUNT):
            writer[i] = make(i)
        writer.done()
        writer.merge()


def write_energon(folder: Path) -> None:
    """Write two shards of webdataset, and the metadata of `energon prepare`."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    (folder / "parts").mkdir(parents=True)
    for shard in range(3):
        with tarfile.open(folder / f"parts/{shard:03d}.tar", "w") as tar:
            for i in range(4 * shard, 4 * shard + 4):
                for extension, data in (("jpg", jpeg(i)), ("txt", caption(i).encode())):
                    member = tarfile.TarInfo(f"{i:06d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    WebdatasetPreparator.prepare_dataset(
        EPath(folder),
        [f"parts/{shard:03d}.tar" for shard in range(3)],
        split_parts_patterns=[("train", "parts/00[01].tar"), ("val", "parts/002.tar")],
        tar_index_only=False,
    )


if __name__ == "__main__":
    {"mds": write_mds, "litdata": write_litdata, "energon": write_energon}[sys.argv[1]](Path(sys.argv[2]))
