"""Shards on a web server that is silent, fails, breaks off, redirects or has no byte ranges."""

import re
import shutil
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sparo_data.writer import write_shard
from sparo_train.core.errors import DataError
from sparo_train.data.read import remote
from sparo_train.data.read.remote import find_shards
from sparo_train.data.read.shards import ShardReader, load_index
from tests.helpers.samples import sample


class _Handler(BaseHTTPRequestHandler):
    """Serves `server.data`; `server.trouble` has what goes wrong with the next answers, one by one."""

    protocol_version = "HTTP/1.1"

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
        if self.path != "/a.tar":
            return self.plain(404)
        trouble = "" if head or not server.trouble else server.trouble.pop(0)
        if trouble.isdigit():
            return self.plain(int(trouble))
        if trouble == "silent":
            server.released.wait(30)
            self.close_connection = True
            return None
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (
            (int(asked[1]), min(int(asked[2]), len(server.data) - 1))
            if asked and server.ranges
            else (0, len(server.data) - 1)
        )
        body = server.data[first : last + 1]
        self.send_response(206 if asked and server.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        if server.ranges:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(server.data)}")
        self.end_headers()
        if trouble == "trickle":
            with suppress(OSError):
                for byte in body[:40]:
                    self.wfile.write(bytes([byte]))
                    server.released.wait(0.2)
            self.close_connection = True
            return None
        if not head:
            with suppress(OSError):  # the reader may have gone
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
    found.data, found.trouble, found.ranges, found.asked = (tmp_path / "a.tar").read_bytes(), [], True, 0
    found.released, found.daemon_threads = threading.Event(), True
    found.at = f"http://127.0.0.1:{found.server_port}"
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.released.set()
    found.shutdown()
    found.server_close()


def read(url):
    """Every sample, by an index that was scanned from the server."""
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
def test_what_passes_is_waited_for(server, trouble, name, tmp_path):
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
def test_what_stays_is_one_error_with_the_address(server, name, trouble, says):
    server.trouble = list(trouble)
    start = time.monotonic()
    with pytest.raises(DataError, match=rf"{re.escape(server.at)}/{name}: cannot be read.*{says}"):
        read(f"{server.at}/{name}")
    assert time.monotonic() - start < 30


def test_a_server_without_byte_ranges_is_refused(server, tmp_path):
    server.ranges = False
    assert len(read(f"{server.at}/a.tar")) == 8  # small enough to be fetched whole
    shutil.rmtree(tmp_path / "cache")
    write_shard(
        tmp_path / "large.tar", ((key, {**fields, "bin": bytes(4 << 20)}) for key, fields in map(sample, range(3)))
    )
    server.data = (tmp_path / "large.tar").read_bytes()
    with pytest.raises(DataError, match=r"a\.tar: .*byte ranges"):
        read(f"{server.at}/a.tar")
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_a_shard_that_fails_in_the_middle_of_training_is_an_error_and_no_bad_sample(server):
    url = f"{server.at}/a.tar"
    load_index(url)
    reader = ShardReader()
    reader.index(url)
    server.trouble = ["500"] * 99
    with pytest.raises(DataError, match=r"a\.tar: cannot be read in 4 tries"):
        reader.read(url, 3)
    server.trouble = []
    assert reader.read(url, 3)[0] == sample(3)[0]  # a later read opens another connection
