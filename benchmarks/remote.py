"""Training data from a server with latency against the same data on the local disk.

    python benchmarks/remote.py [--quick] [--json FILE]

A web server in another process answers every request after 20 ms. Two workers prepare batches of 64 with crops of 224
pixels from JPEG files of 256 pixels. The rate is compared with the local disk, and the bytes that the server sent are
compared with the size of the shards: by the scan of the first start, when they have no index, per epoch, and per epoch
with a cache (`data.cache`) that an earlier run has filled.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from pathlib import Path

LATENCY = 0.02
BATCH, WORKERS = 64, 2


def serve(folder: Path) -> None:
    """Serve the files of a folder by byte ranges, until killed. `/sent` answers with the number of bytes sent."""
    files = {f"/{path.name}": path.read_bytes() for path in folder.glob("*.tar")}
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            method, path = head.decode().split(" ")[:2]
            if path == "/sent":
                body, lines = str(sent).encode(), ""
            else:
                await asyncio.sleep(LATENCY)
                data = files.get(path, b"")
                span = re.search(r"range: bytes=(\d+)-(\d+)", head.decode().lower())
                first, last = (int(span[1]), int(span[2])) if span else (0, len(data) - 1)
                body = data[first : last + 1]
                sent += len(body) if method == "GET" else 0
                lines = f"Accept-Ranges: bytes\r\nContent-Range: bytes {first}-{first + len(body) - 1}/{len(data)}\r\n"
            status = "206 Partial Content" if body else "404 Not Found"
            writer.write(f"HTTP/1.1 {status}\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode())
            writer.write(body if method == "GET" else b"")
            await writer.drain()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(run())


def rate(urls: list[str], batches: int, node: str | None = None) -> float:
    """Return images per second after the first batches; without batches, only the indexes are made.

    Args:
        urls: the shards.
        batches: number of batches.
        node: folder of a cache; None: no cache.
    """
    import torch

    from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
    from sparo_train.data.read.loader import Pipeline
    from sparo_train.data.servers.cache import CacheConfig
    from sparo_train.data.sources.base import DataConfig
    from sparo_train.data.sources.shards import ShardsConfig

    torch.set_num_threads(1)
    cache = CacheConfig(path=node, gb=10) if node else None
    config = DataConfig(
        sources={"x": ShardsConfig(shards=tuple(urls))}, workers=WORKERS, shuffle_window=256, cache=cache
    )
    pipeline = Pipeline(config, BATCH, ImageTextExamples(config, 224, 77, ClipTokenizer(77)), 0)
    if not batches:
        return 0.0
    with closing(pipeline.start()) as started:
        for _ in range(2 * WORKERS * config.prefetch):
            next(started)
        begin = time.perf_counter()
        for _ in range(batches):
            next(started)
        return batches * BATCH / (time.perf_counter() - begin)


def in_process(urls: list[str], batches: int, cache: Path, node: Path | None = None) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, __file__, "--measure", json.dumps([urls, batches, node and str(node)])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    from common import parser, report, row
    from loader import make_shards

    options = parser(__doc__).parse_args()
    rounds, batches = (1, 64) if options.quick else (5, 256)
    with tempfile.TemporaryDirectory() as root:
        paths = make_shards(Path(root), 256, 4096)
        size = sum(Path(path).stat().st_size for path in paths)
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(Path(paths[0]).parent)], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"

        def sent() -> int:
            return int(urllib.request.urlopen(f"{address}/sent").read())

        try:
            urls = [f"{address}/{Path(path).name}" for path in paths]
            cache = Path(root, "cache")
            in_process(urls, 0, cache)
            scanned = sent()
            pairs, shares, cached, cached_shares = [], [], [], []
            in_process(urls, 96, cache, Path(root, "node"))  # more than an epoch of 64 batches
            for _ in range(rounds):
                places = [sent()]
                far = in_process(urls, batches, cache)
                places.append(sent())
                in_process(urls, batches // 4, cache)
                places.append(sent())
                # The difference of both runs, because each of them also fetches a window that it does not read.
                extra = places[1] - places[0] - (places[2] - places[1])
                shares.append(extra / (batches - batches // 4) / BATCH * 4096 / size)
                disk = in_process(paths, batches, cache)
                pairs.append((far, disk))
                before = sent()
                cached.append((in_process(urls, batches, cache, Path(root, "node")), disk))
                cached_shares.append((sent() - before) / (batches * BATCH / 4096) / size)
            rows = [
                row("server / disk", pairs, 0.9, "images/s", True),
                row("server with a filled cache / disk", cached, None, "images/s", True),
            ]
            report(f"two workers, {1000 * LATENCY:.0f} ms latency", rows, options.json)
            low, high = min(shares), max(shares)
            print(f"sent with the cache: {min(cached_shares):.4f} to {max(cached_shares):.4f} in each epoch")
            print(f"sent: {scanned / size:.2f} of the shards by the scan, {low:.3f} to {high:.3f} in each epoch")
        finally:
            server.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--measure"]:
        print(rate(*json.loads(sys.argv[2])))
    else:
        main()
