"""The node's cache of remote samples: saved requests, and what kills, damage, a full disk and other runs do to it."""

import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from sparo_train.core.errors import ConfigError
from sparo_train.data.servers import cache as cache_module
from sparo_train.data.servers.cache import CacheConfig, CachedFile, SampleCache
from sparo_train.data.sources.base import close_storages
from tests.unit.test_remote import batches, server, shards  # noqa: F401  fixtures


def equal(one, two):
    return one.cursor == two.cursor and all(torch.equal(one.batch[name], two.batch[name]) for name in one.batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_second_epoch_comes_from_the_cache(server, shards, workers, tmp_path):  # noqa: F811
    keys = {"prefetch": 1, "cache": {"path": str(tmp_path / "node"), "gb": 1}}
    disk = batches(shards.paths, 20, 0)
    first = batches(shards.urls, 20, workers, **keys)
    assert all(map(equal, disk, first))
    server.sent = 0
    again = batches(shards.urls, 20, workers, **keys)
    assert all(map(equal, disk, again)) and server.sent <= 0.02 * shards.size
    files = [path for path in (tmp_path / "node").rglob("data") if path.is_file()]
    assert len(files) == 3 and sum(path.stat().st_size for path in files) <= shards.size


def test_damage_is_noticed_and_repaired(server, shards, tmp_path):  # noqa: F811
    keys = {"prefetch": 1, "cache": {"path": str(tmp_path / "node"), "gb": 1}}
    disk = batches(shards.paths, 10, 0)
    batches(shards.urls, 20, 0, **keys)
    for number, path in enumerate(sorted((tmp_path / "node").rglob("data"))):
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        if number == 0:
            data[middle : middle + 20_000] = bytes(
                20_000
            )  # as after a power failure: marks were written, data were not
        elif number == 1:
            data[middle] ^= 1
        else:
            data = data[:middle]
        path.write_bytes(data)
    server.sent = 0
    assert all(map(equal, disk, batches(shards.urls, 10, 0, **keys)))
    assert 10_000 < server.sent < 0.6 * shards.size
    server.sent = 0
    batches(shards.urls, 10, 0, **keys)
    assert server.sent == 0


def test_the_limit_is_kept_and_the_rest_is_read_from_the_server(server, shards, tmp_path):  # noqa: F811
    keys = {"prefetch": 1, "cache": {"path": str(tmp_path / "node"), "gb": 0.4 * shards.size / 1e9}}
    disk = batches(shards.paths, 10, 0)
    for _ in range(2):
        server.sent = 0
        assert all(map(equal, disk, batches(shards.urls, 10, 2, **keys)))
    # Windows that are announced early belong to the next epoch.
    assert 0.3 * shards.size < server.sent < 1.7 * shards.size
    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "node").rglob("data"))
    assert on_disk < 0.4 * shards.size + 120 * 2 * 4096  # samples do not end at the borders of blocks


def fill(path, ready, seed):
    cache, files = SampleCache(CacheConfig(path=path, gb=1)), {}
    for n in range(10**9):
        number = (seed + 7 * n) % 50
        file = files.setdefault(n % 3, CachedFile(cache, f"http://x/{n % 3}.tar", b"", 50_000))
        data = bytes([n % 3, number]) * 500
        stored = file.get(number, 1000 * number, 1000 * number + 1000)
        assert stored in (None, data)
        file.put(number, 1000 * number, data)
        if n == 20:
            ready.set()


def test_processes_share_it_and_a_kill_leaves_no_wrong_sample(tmp_path):
    context = multiprocessing.get_context("fork")
    for round_ in range(6):
        started = []
        for seed in range(2):
            ready = context.Event()
            process = context.Process(target=fill, args=(str(tmp_path), ready, seed))
            process.start()
            started.append((process, ready))
        for process, ready in started:
            assert ready.wait(30)
            time.sleep(0.01 * round_)
            assert process.is_alive()
            process.kill()
            process.join()
    cache = SampleCache(CacheConfig(path=str(tmp_path), gb=1))
    found = 0
    for shard in range(3):
        file = CachedFile(cache, f"http://x/{shard}.tar", b"", 50_000)
        for number in range(50):
            data = file.get(number, 1000 * number, 1000 * number + 1000)
            assert data in (None, bytes([shard, number]) * 500)
            found += data is not None
    assert found > 30


def test_space_is_freed_from_files_that_no_run_uses(tmp_path):
    cache = SampleCache(CacheConfig(path=str(tmp_path), gb=340_000 / 1e9))
    files = [CachedFile(cache, f"http://x/{i}.tar", b"", 100_000) for i in range(4)]
    for file in files[:3]:
        file.put(0, 0, b"x" * 99_000)
    now = time.time()
    os.utime(tmp_path / files[0].name, (now - 7200, now - 7200))
    os.utime(tmp_path / files[1].name, (now - 9000, now - 9000))
    cache.reserve_space([files[3]])  # it needs a third of the space: the oldest file is removed, the second stays
    assert [(tmp_path / file.name).is_dir() for file in files[:3]] == [True, False, True]
    new = SampleCache(CacheConfig(path=str(tmp_path), gb=340_000 / 1e9))
    later = CachedFile(new, "http://x/3.tar", b"", 100_000)
    later.put(0, 0, b"y" * 90_000)
    assert later.get(0, 0, 90_000) == b"y" * 90_000
    later.put(1, 90_000, b"z" * 90_000)
    assert later.get(1, 90_000, 180_000) is None  # there is no space left
    new.reserve_space([CachedFile(new, "http://y/0.tar", b"", 300_000)])
    assert (tmp_path / files[2].name).is_dir()  # used within the last hour


def test_versions_of_a_file_are_cached_separately(tmp_path):
    cache = SampleCache(CacheConfig(path=str(tmp_path), gb=1))
    one, two = (CachedFile(cache, "http://x/a.tar", version, 10) for version in (b"1", b"2"))
    one.put(0, 0, b"one")
    assert two.get(0, 0, 3) is None and one.get(0, 0, 3) == b"one"
    assert one.missing_ranges(0, 4) == [(1, 4)] and two.missing_ranges(2, 4) == [(2, 4)]
    one.put(2, 6, b"two")
    assert one.missing_ranges(0, 4) == [(1, 2), (3, 4)]


def test_a_full_disk_is_reported_once_and_ends_no_run(tmp_path, monkeypatch, caplog):
    cache = SampleCache(CacheConfig(path=str(tmp_path), gb=1))
    file = CachedFile(cache, "http://x/a.tar", b"", 1000)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "pwrite", refuse)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            file.put(number, 0, b"x")
    assert caplog.text.count("No space left on device") == 1 and "from the server" in caplog.text


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache\.path: .*/file cannot be written"):
        SampleCache(CacheConfig(path=str(tmp_path / "file"), gb=1))
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    with pytest.raises(ConfigError, match=r"data\.cache\.path: \$NO_SUCH_VARIABLE/x contains an environment variable"):
        SampleCache(CacheConfig(path="$NO_SUCH_VARIABLE/x", gb=1))
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    SampleCache(CacheConfig(path="$NODE_DISK/x", gb=1))
    assert Path(tmp_path / "x/used").is_file()
    close_storages()
