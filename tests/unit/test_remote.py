"""Shards on a web server that does not answer, fails, stops in the middle, redirects or has no byte ranges."""

import io
import random
import re
import shutil
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import boto3
import fsspec
import numpy as np
import pytest
import torch
import yaml
from moto.server import ThreadedMotoServer

from evals.suite.labelled_tasks import KnnTaskConfig
from sparo_data.writer import write_shard, write_shards
from sparo_train.core.config import resolve
from sparo_train.core.errors import ConfigError, DataError
from sparo_train.data.examples.image_text import ClipTokenizer, ImageTextExamples
from sparo_train.data.read.loader import Pipeline
from sparo_train.data.servers import ranges, remote
from sparo_train.data.servers.remote import find_shards, open_filesystem
from sparo_train.data.sources.base import DataConfig, open_source
from sparo_train.data.sources.fingerprint import fingerprint
from sparo_train.data.sources.shard_index import load_index
from sparo_train.data.sources.shards import ShardReader, ShardsConfig, close_reader, merge_indexes, open_shards
from tests.helpers.processes import sparo
from tests.helpers.recipes import tiny_recipe
from tests.helpers.samples import jpeg, sample


class _Handler(BaseHTTPRequestHandler):
    """Serves `server.files`; `server.trouble` lists the problems of the next answers, one by one."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are separate packets

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer()

    def answer(self, head=False):
        server = self.server
        server.asked += 1
        if self.path == "/moved.tar":
            return self.plain(302, {"Location": "/a.tar"})
        if self.path == "/circle.tar":
            return self.plain(302, {"Location": "/circle.tar"})
        data = server.files.get(self.path)
        if data is None:
            return self.plain(404)
        trouble = "" if head or not server.trouble else server.trouble.pop(0)
        if trouble and server.once is not None:
            request = self.path, self.headers.get("Range")
            if request in server.once:  # only once, because four failures in a row are an error
                server.trouble.insert(0, trouble)
                trouble = ""
            server.once.add(request)
        if trouble.isdigit():
            return self.plain(int(trouble))
        if trouble == "silent":
            server.released.wait(30)
            self.close_connection = True
            return None
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (
            (int(asked[1]), min(int(asked[2]), len(data) - 1)) if asked and server.ranges else (0, len(data) - 1)
        )
        # Servers that declare wrong lengths: they send more bytes than requested, or fewer.
        body = data[first : last + 1 + {"more": 100, "fewer": -100}.get(trouble, 0)]
        server.sent += 0 if head else len(body)
        self.send_response(206 if asked and server.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        if server.ranges:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        if trouble == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        if trouble == "trickle":
            with suppress(OSError):
                for byte in body[:40]:
                    self.wfile.write(bytes([byte]))
                    server.released.wait(0.2)
            self.close_connection = True
            return None
        if not head:
            with suppress(OSError):  # the reader may have closed the connection
                self.wfile.write(body[: len(body) // 2] if trouble == "short" else body)
        if trouble == "short":
            self.close_connection = True
        return None

    def plain(self, status, headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_PAUSES", (0.01, 0.02, 0.03))
    monkeypatch.setattr(remote, "_SILENCE", 0.5)
    monkeypatch.setattr(remote, "_WHOLE", 2.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shard(tmp_path / "a.tar", (sample(i) for i in range(8)))
    found = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    found.files, found.trouble, found.ranges = {"/a.tar": (tmp_path / "a.tar").read_bytes()}, [], True
    found.asked, found.sent, found.once = 0, 0, None
    found.released, found.daemon_threads = threading.Event(), True
    found.at = f"http://127.0.0.1:{found.server_port}"
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.released.set()
    found.shutdown()
    found.server_close()


def read(url):
    """Read every sample by an index that was scanned from the server."""
    (shard,) = find_shards(url)
    index = load_index(shard)
    assert index.intact and len(index) == 8
    reader = ShardReader()
    try:
        return [reader.read(shard, number) for number in range(len(index))]
    finally:
        reader.close()


@pytest.mark.parametrize(
    "trouble", [[], ["500"], ["503", "500", "429"], ["short"], ["silent"], ["short", "502", "silent"]]
)
@pytest.mark.parametrize("name", ["a.tar", "moved.tar"])
def test_passing_failures_are_retried(server, trouble, name, tmp_path):
    server.trouble = list(trouble)
    found = read(f"{server.at}/{name}")
    reader = ShardReader()
    load_index(str(tmp_path / "a.tar"))
    assert found == [reader.read(str(tmp_path / "a.tar"), number) for number in range(8)]
    assert not server.trouble


@pytest.mark.parametrize(
    ("name", "trouble", "says"),
    [
        ("a.tar", ["500"] * 99, "in 4 tries"),
        ("a.tar", ["silent"] * 99, "in 4 tries"),
        ("a.tar", ["short"] * 99, "in 4 tries"),
        ("a.tar", ["trickle"] * 99, "in 4 tries"),
        ("gone.tar", [], "Check the address"),
        ("circle.tar", [], "Check the address"),
        ("a.tar", ["403"] * 99, "403"),
    ],
)
def test_lasting_failures_are_one_error_with_the_address(server, name, trouble, says):
    server.trouble = list(trouble)
    start = time.monotonic()
    with pytest.raises(DataError, match=rf"{re.escape(server.at)}/{name}: cannot be read.*{says}"):
        read(f"{server.at}/{name}")
    assert time.monotonic() - start < 30


def test_a_server_without_byte_ranges_is_refused(server, tmp_path):
    server.ranges = False
    with pytest.raises(DataError, match=r"a\.tar: .*byte ranges"):
        read(f"{server.at}/a.tar")
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_a_shard_that_fails_during_training_is_an_error_instead_of_a_bad_sample(server):
    url = f"{server.at}/a.tar"
    load_index(url)
    reader = ShardReader()
    reader.index(url)
    server.trouble = ["500"] * 99
    with pytest.raises(DataError, match=r"a\.tar: cannot be read in 4 tries"):
        reader.read(url, 3)
    server.trouble = []
    assert reader.read(url, 3)[0] == sample(3)[0]  # a later read makes a new request


def large(number):
    """Return a sample whose image is larger than a request for headers."""
    key, fields = sample(number)
    return key, {**fields, "jpg": jpeg(number, (240, 200))}


@pytest.fixture
def shards(server, tmp_path):
    """Write three shards of 40 samples on disk and on the server, with their indexes in the cache."""
    paths = write_shards(tmp_path / "shards", (large(i) for i in range(120)), 40)
    server.files |= {f"/{path.name}": path.read_bytes() for path in paths}
    urls = tuple(f"{server.at}/{path.name}" for path in paths)
    for place in (*urls, *map(str, paths)):
        load_index(place)
    server.sent = server.asked = 0
    return SimpleNamespace(urls=urls, paths=tuple(map(str, paths)), size=sum(path.stat().st_size for path in paths))


def batches(shards, count, workers, cursor=None, **keys):
    config = DataConfig(
        sources={"a": ShardsConfig(shards=shards)}, workers=workers, streams=4, shuffle_window=16, chunk=4, **keys
    )
    pipeline = Pipeline(config, 12, ImageTextExamples(config, 32, 16, ClipTokenizer(16)), 3)
    with closing(pipeline.start(cursor)) as started:
        return list(islice(started, count))


def equal(one, two):
    return one.cursor == two.cursor and all(torch.equal(one.batch[name], two.batch[name]) for name in one.batch)


@pytest.mark.parametrize("limit", [1 << 30, 20_000, 0])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_from_a_server_is_fetched_once_and_equals_the_disks(server, shards, workers, limit, monkeypatch):
    monkeypatch.setattr(ranges, "_AHEAD_BYTES", limit)
    monkeypatch.setattr(ranges, "_IN_FLIGHT", 2)
    disk = batches(shards.paths, 20, 0)
    far = batches(shards.urls, 10, workers, prefetch=1)
    assert all(map(equal, disk, far))
    # Windows that are announced early, and batches that workers prepare ahead, belong to the next epoch.
    assert 0.9 * shards.size < server.sent < 1.7 * shards.size
    again = batches(shards.urls, 7, workers, far[2].cursor)  # in the middle of a window
    assert all(map(equal, disk[3:], again))


@pytest.mark.parametrize("workers", [0, 2])
def test_training_survives_passing_failures(server, shards, workers):
    disk = batches(shards.paths, 12, 0)
    server.once = set()
    kinds = ["503", "short", "reset", "429", "fewer", "silent", "500"]
    server.trouble = [kinds[i // 3 % len(kinds)] if i % 3 == 0 else "" for i in range(60)]
    assert all(map(equal, disk, batches(shards.urls, 12, workers, prefetch=1)))
    assert len(server.trouble) < 40


@pytest.mark.parametrize(("trouble", "says"), [("more", "byte ranges"), ("fewer", "in 4 tries"), ("503", "in 4 tries")])
def test_a_server_that_keeps_failing_ends_training_with_one_error(server, shards, trouble, says):
    server.trouble = [""] * 10 + [trouble] * 1000
    start = time.monotonic()
    with pytest.raises(DataError, match=rf"{server.at}/0000\d\.tar: .*{says}"):
        batches(shards.urls, 40, 2, prefetch=1)
    assert time.monotonic() - start < 60


def test_announced_samples_are_requested_together_and_once(server, shards):
    index = load_index(shards.urls[0])
    reader = ShardReader()
    reader.index(shards.urls[0])
    server.sent = server.asked = 0
    reader.read_ahead(shards.urls[0], 8, 24, index.offsets)
    reader.read_ahead(shards.urls[0], 20, 30, index.offsets)  # some of them will be read twice
    numbers = [*range(8, 24), *range(20, 30)]
    random.Random(0).shuffle(numbers)
    assert [reader.read(shards.urls[0], number)[0] for number in numbers] == [f"{number:06d}" for number in numbers]
    assert server.asked == 2
    assert server.sent == sum(int(index.offsets[b] - index.offsets[a]) for a, b in ((8, 24), (20, 30)))
    assert not reader._ranges._waiting and not reader._ranges._bytes
    reader.close()


def test_a_shard_that_is_read_in_order_takes_few_requests(server, shards):
    (source,) = [open_source("a", ShardsConfig(shards=shards.urls[0]))]
    server.sent = server.asked = 0
    keys = [source.storages[0].read(number)[0] for number in range(40)]
    assert keys == [f"{number:06d}" for number in range(40)] and server.asked <= 5
    assert server.sent == int(source.storages[0].index.offsets[-1] - source.storages[0].index.offsets[0])
    close_reader()


def test_a_slow_request_is_made_a_second_time(server, shards, monkeypatch):
    monkeypatch.setattr(ranges, "_HEDGE_SECONDS", 0.1)
    monkeypatch.setattr(remote, "_SILENCE", 20.0)
    reader = ShardReader()
    reader.index(shards.urls[0])
    server.trouble = ["silent"]
    start = time.monotonic()
    reader.read_ahead(shards.urls[0], 0, 4, reader.index(shards.urls[0]).offsets)
    assert reader.read(shards.urls[0], 1)[0] == sample(1)[0] and time.monotonic() - start < 10
    server.released.set()
    reader.close()


def test_a_scan_reads_headers_and_no_images(server, shards, tmp_path):
    shutil.rmtree(tmp_path / "cache")
    for url, path in zip(shards.urls, shards.paths, strict=True):
        far, near = load_index(url), load_index(path)
        assert far.offsets.tolist() == near.offsets.tolist() and far.intact and not any(far.digest)
    assert server.sent < 0.45 * shards.size  # images of 15 KB; a request of 4 KB for each sample
    source = open_source("a", ShardsConfig(shards=(*shards.urls[:2], shards.paths[2])))
    assert "seen" not in fingerprint([source])["a"]


@pytest.mark.parametrize("damage", [None, "other size", "no index", "too large"])
def test_an_index_next_to_a_shard_on_a_server_is_used(server, shards, damage, tmp_path):
    load_index(shards.paths[0], write_index=True)
    table = np.load(f"{shards.paths[0]}.idx.npy")
    shutil.rmtree(tmp_path / "cache")
    if damage == "other size":
        table[1] += 1
    content = io.BytesIO()
    np.save(content, table)
    data = {"no index": b"<html>", "too large": bytes(1 << 20)}.get(damage, content.getvalue())
    server.files["/00000.tar.idx.npy"] = data
    server.sent = 0
    far = load_index(shards.urls[0])
    assert far.offsets.tolist() == load_index(shards.paths[0]).offsets.tolist()
    assert (server.sent == len(data) and any(far.digest)) if damage is None else server.sent > 40 * 4000
    server.sent = 0
    load_index(shards.urls[0])
    assert server.sent == 0  # from the cache


@pytest.mark.parametrize(
    "url",
    [
        "https://me:secret@host.org:8080/{0..3}.tar",
        "https://secret@host.org/v@1/a.tar",
        "https://host.org/a.tar?b=1&X-Amz-Signature=sec@secret",
        "az://data/a.tar?sv=1&sig=secret",
        "data/a.tar::https://me:secret@host.org/b.tar",
    ],
)
@pytest.mark.parametrize("key", ["shards", "parquet", "mds"])
def test_addresses_with_credentials_are_refused(url, key):
    with pytest.raises(
        ValueError, match=r"(host\.org|az://data) contains a (password|signature).* Remove it\."
    ) as refused:
        DataConfig.model_validate({"sources": {"a": {key: url}}})
    assert "secret" not in str(refused.value)
    for fine in (
        "https://host.org:80/a@b:c/x.tar?version=3@4",
        "abfs://box@account/x.tar",
        "s3://a/[0-9].tar",
        "data/a?.tar",
    ):
        DataConfig.model_validate({"sources": {"a": {key: fine}}})


def test_addresses_in_eval_tasks_and_messages_have_no_credentials():
    with pytest.raises(ConfigError, match=r"https://host\.org contains a password") as refused:
        resolve(KnnTaskConfig, {"task": "knn", "train": "https://me:secret@host.org/a.tar", "test": "b"}, "x")
    assert "secret" not in str(refused.value)
    text = "404, url='https://me:secret@host.org/a/b.jpg?sig=secret&x=1' of s3://box/c.jpg"
    assert remote.without_credentials(text) == "404, url='https://host.org/a/b.jpg' of s3://box/c.jpg"


@pytest.mark.parametrize("command", ["check", "index"])
def test_commands_do_not_print_a_refused_password(command):
    done = sparo("data", command, "https://me:secret@host.org/a.tar")
    assert done.returncode == 2 and "contains a password" in done.stderr
    assert "secret" not in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_time_limits_keep_the_users_settings_of_fsspec(monkeypatch):
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 5, "s3": {"addressing_style": "path"}}}
    )
    monkeypatch.setitem(fsspec.config.conf, "https", {"client_kwargs": {"headers": {"A": "b"}}})
    limits = remote._limits("s3")["config_kwargs"]
    assert limits == {"connect_timeout": 20.0, "read_timeout": 5, "s3": {"addressing_style": "path"}}
    web = remote._limits("https")["client_kwargs"]
    assert web["headers"] == {"A": "b"} and web["timeout"].sock_read == 30 and web["trust_env"]


def versions_differ_where_only_the_content_does(client, path, tmp_path):
    """The node's cache would return samples of the old file: a scan on a server reads no content, and all offsets are equal."""
    url, found, merged = "s3://data/other/00000.tar", [], []
    content = Path(path).read_bytes()
    for data in (content, content, content[:700] + bytes([content[700] ^ 1]) + content[701:]):
        client.put_object(Bucket="data", Key="other/00000.tar", Body=data)
        open_filesystem(url)[0].invalidate_cache("data/other")
        (shard,) = open_shards([url], write_index=True)
        found.append(shard.version())
        merge_indexes(tmp_path / "all.idx", [shard])
        (again,) = open_source("a", ShardsConfig(shards=url, index=str(tmp_path / "all.idx"))).storages
        merged.append(again.version())
    assert found[0] == found[1] != found[2] and merged == found


@pytest.mark.long
def test_a_bucket_is_indexed_and_trained_from(shards, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3 = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    s3.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*s3.get_host_and_port()))
        client = boto3.client("s3")
        client.create_bucket(Bucket="data")
        for path in shards.paths:
            client.upload_file(path, "data", f"mine/{Path(path).name}")
        done = sparo("data", "index", "s3://data/mine")
        assert done.returncode == 0 and "3 shards, 120 samples, 0 truncated or unreadable" in done.stderr
        names = [item["Key"] for item in client.list_objects_v2(Bucket="data")["Contents"]]
        assert [name for name in names if name.endswith(".idx.npy")] == [f"mine/0000{i}.tar.idx.npy" for i in range(3)]
        shutil.rmtree(tmp_path / "cache")
        for place in ("s3://data/mine", "s3://data/mine/{00000..00002}.tar"):
            assert all(map(equal, batches(shards.paths, 5, 0), batches(place, 5, 2)))
        monkeypatch.chdir(tmp_path)
        tree = tiny_recipe("s3://data/mine", tmp_path) | {"name": "from_s3", "steps": 3}
        (tmp_path / "from_s3.yaml").write_text(yaml.safe_dump(tree))
        done = sparo("train", "from_s3.yaml")
        written = [path.read_bytes() for path in (tmp_path / "from_s3").rglob("*") if path.is_file()]
        assert done.returncode == 0 and written, done.stderr
        assert not any(b"a secret" in content for content in [*written, (done.stdout + done.stderr).encode()])
        versions_differ_where_only_the_content_does(client, shards.paths[0], tmp_path)
        client.delete_object(Bucket="data", Key="mine/00001.tar")
        with pytest.raises(DataError, match=r"s3://data/mine/00001\.tar: cannot be read"):
            batches(("s3://data/mine/00001.tar",), 1, 0)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        done = sparo("data", "index", "s3://data/mine")
        assert done.returncode == 2 and "error: s3://data/mine: cannot be read (" in done.stderr
        assert "Set the credentials" in done.stderr and "Traceback" not in done.stderr
    finally:
        s3.stop()
