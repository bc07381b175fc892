"""Inputs that were valid before random changes: recipes, shards, weight files, results and a server's answers.

The ordinary run takes a few of each kind; `pytest -m stress tests/hostile/test_mutations.py` takes 200 of each.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from evals.encoders.loading import load_encoder
from evals.report.results_file import append, read_records
from evals.tasks.result import Result
from launch.cli.main import app
from launch.cli.process import call
from sparo_data.writer import write_shard
from sparo_train.core.errors import BadSampleError, SparoError
from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
from sparo_train.data.servers import remote
from sparo_train.data.sources.base import DataConfig, open_source
from sparo_train.data.sources.shard_index import load_index
from sparo_train.data.sources.shards import ShardReader, ShardsConfig
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import sample
from tests.parity.test_weight_files import tiny

NUMBERS = [pytest.param(range(8), id="few"), pytest.param(range(8, 200), id="many", marks=pytest.mark.stress)]
ODD = [
    None, True, -1, 0, 1e400, float("nan"), 10**30, "", "a\0b", "é" * 500, "../../x", "{a: 1}", [], {}, [[[]]], {"kind": "x"},
    {"x": {"y": None}}, "1e-3", "nan", "/dev/zero", "s3://", "data:,x", "${HOME}", -0.5, [1, 2, 3],
]  # fmt: skip
MEMORY = 3 << 30  # bytes that one input may allocate in addition


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Change, remove, repeat or insert some bytes, or cut off the end."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at, length = rng.randrange(len(content) or 1), rng.choice((1, 4, 64, 512))
        how = rng.randrange(5)
        if how == 0:
            content[at : at + length] = rng.randbytes(min(length, len(content) - at))
        elif how == 1:
            del content[at : at + length]
        elif how == 2:
            content[at:at] = content[rng.randrange(len(content) or 1) :][:length]
        elif how == 3:
            content[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"99999999", b"-1      "))
        else:
            del content[at + rng.randrange(len(content) or 1) :]
    return bytes(content)


def odd_tree(tree, rng: random.Random):
    """Replace, rename, move or remove one to three leaves, keys or blocks of a tree."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not tree:
            break
        block, key = tree, rng.choice(sorted(tree))
        while isinstance(block[key], dict) and block[key] and rng.random() < 0.8:
            block = block[key]
            key = rng.choice(sorted(block))
        how = rng.randrange(4)
        if how == 0:
            del block[key]
        elif how == 1:
            block[rng.choice(("kind", key + "x", "*", "0", ""))] = block.pop(key)
        else:
            block[key] = rng.choice(ODD)
    return tree


@contextmanager
def bounded(seconds: float = 30.0) -> Iterator[None]:
    """Assert that an input is accepted, or refused with an error that a user can solve, within a time and a limit of memory."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    except (SparoError, BadSampleError) as error:
        assert str(error), type(error)
    assert time.monotonic() - start < seconds
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MEMORY


@pytest.mark.parametrize("numbers", NUMBERS)
def test_recipes(numbers, shards, tmp_path, capsys):
    whole = tiny_recipe(shards, tmp_path / "runs", steps=3)
    path = tmp_path / "r.yaml"
    for number in numbers:
        rng = random.Random(number)
        if rng.random() < 0.3:
            path.write_bytes(damaged(yaml.safe_dump(whole).encode(), rng))
        else:
            path.write_text(yaml.safe_dump(odd_tree(whole, rng), allow_unicode=True))
        with bounded(60):
            code, error = call(app, ["train", str(path), "--dry-run"])
        said = capsys.readouterr().err
        assert error is None or isinstance(error, SparoError), (number, path.read_bytes()[:300], repr(error))
        assert code in (0, 2, 3) and "Traceback" not in said, (number, code, said)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_shards(numbers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shard(tmp_path / "whole.tar", (sample(i) for i in range(6)))
    whole = (tmp_path / "whole.tar").read_bytes()
    examples = ImageTextExamples(
        DataConfig(sources={"a": ShardsConfig(shards=str(tmp_path / "whole.tar"))}), 32, 16, ClipTokenizer(16)
    )
    source = open_source("a", ShardsConfig(shards=str(tmp_path / "whole.tar")))
    for number in numbers:
        path = tmp_path / f"{number}.tar"
        path.write_bytes(damaged(whole, random.Random(number)))
        with bounded():
            reader = ShardReader()
            for ordinal in range(len(load_index(str(path)))):
                with bounded():
                    _, fields = reader.read(str(path), ordinal)
                    examples.prepare(fields, source, np.random.default_rng(0))
            reader.close()


@pytest.mark.parametrize("numbers", NUMBERS)
def test_weight_files(numbers, tmp_path):
    state = {name: t.clone() for name, t in tiny().state_dict().items()}
    save_file(state, tmp_path / "whole.safetensors")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "whole.pt")
    for number in numbers:
        rng = random.Random(number)
        form = rng.choice(("safetensors", "pt", "state"))
        path = tmp_path / f"{number}.{'pt' if form == 'state' else form}"
        if form == "state":  # a valid file with other content
            odd = dict(state)
            for name in rng.sample(sorted(odd), 3):
                value = odd.pop(name)
                odd[rng.choice((name, name + "x", "module." + name))] = rng.choice(
                    (
                        value[..., :1],
                        value.flatten(),
                        value * float("nan"),
                        value.long(),
                        torch.zeros(0),
                        7,
                        "x",
                        [value],
                    )
                )
            torch.save(rng.choice((odd, {"state_dict": odd}, {"model": {"x": odd}}, [odd])), path)
        else:
            path.write_bytes(damaged((tmp_path / f"whole.{form}").read_bytes(), rng))
        with bounded():
            load_encoder(path)
        path.unlink()


@pytest.mark.parametrize("numbers", NUMBERS)
def test_results(numbers, tmp_path):
    result = Result("zeroshot", 12, "acc1", {"acc1": 0.5}, 0.1, {}, {}, {"skipped": 1})
    append(tmp_path / "whole", "runs/a", "zero", result, {"checkpoint": {"label": "x", "sha256": "0" * 64}})
    line = (tmp_path / "whole/results.jsonl").read_text()
    for number in numbers:
        rng = random.Random(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        text = (
            damaged(line.encode(), rng) if rng.random() < 0.4 else json.dumps(odd_tree(json.loads(line), rng)).encode()
        )
        (folder / "results.jsonl").write_bytes(text + b"\n" + line.encode())
        with bounded():
            for record in read_records([folder]):
                record.result.remarks()
        code, error = call(app, ["eval", "table", str(folder)])
        assert code in (0, 2) and (error is None or isinstance(error, SparoError)), (number, text, repr(error))


def _answers(answer: Callable[[bytes], bytes]) -> tuple[str, Callable[[], None]]:
    """Start a server whose reply to each request is `answer`. Yield its address, and stop it afterwards."""
    door = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            try:
                asked = connection.recv(65536)
                connection.sendall(answer(asked) if asked else b"")
            except OSError:
                pass

    def serve() -> None:
        while True:
            try:
                connection, _ = door.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{door.getsockname()[1]}", door.close


@pytest.mark.parametrize("numbers", NUMBERS)
def test_answers_of_a_server(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_PAUSES", (0.01,))
    monkeypatch.setattr(remote, "_SILENCE", 0.3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shard(tmp_path / "a.tar", (sample(i) for i in range(3)))
    data = (tmp_path / "a.tar").read_bytes()
    for number in numbers:
        rng = random.Random(number)

        def answer(asked: bytes, rng: random.Random = rng) -> bytes:
            status = rng.choice(
                (b"200 OK", b"206 Partial Content", b"204 No Content", b"302 Found", b"500 No", b"999 ?", b"x")
            )
            length = rng.choice((len(data), len(data), 0, 7, -1, 10**18))
            headers = [
                b"HTTP/1.1 " + status, b"Content-Length: %d" % length, b"Accept-Ranges: bytes", b"Content-Range: bytes 0-5/%d" % length,
                b"Location: " + rng.choice((b"/a.tar", b"//", b"file:///etc/passwd", b"http://127.0.0.1:1/")), b"Connection: close",
            ]  # fmt: skip
            body = b"" if asked.startswith(b"HEAD") else rng.choice((data, data[: len(data) // 2], b"<html>", b""))
            whole = b"\r\n".join(h for h in headers if rng.random() < 0.8) + b"\r\n\r\n" + body
            return damaged(whole, rng) if rng.random() < 0.3 else whole

        address, end = _answers(answer)
        with bounded():
            reader = ShardReader()
            for ordinal in range(len(load_index(f"{address}/{number}.tar"))):
                with bounded():
                    reader.read(f"{address}/{number}.tar", ordinal)
            reader.close()
        end()
