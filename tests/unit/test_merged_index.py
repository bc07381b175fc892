"""One file with the indexes of many shards: its content, the requests it saves, and damage."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparo_data.writer import write_shards
from sparo_train.core.errors import BadSampleError, ConfigError, DataError
from sparo_train.data.servers import remote
from sparo_train.data.sources.base import close_storages, open_source
from sparo_train.data.sources.fingerprint import fingerprint
from sparo_train.data.sources.shards import ShardsConfig
from tests.helpers.processes import sparo
from tests.helpers.samples import sample
from tests.unit.test_remote import server  # noqa: F401  a fixture


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "set", (sample(i) for i in range(40)), 10)
    done = sparo("data", "index", "set", "--merge", "set/all.safetensors", cwd=tmp_path)
    assert done.returncode == 0 and "4 shards, 40 samples, 0 truncated or unreadable" in done.stderr, done.stderr
    return tmp_path / "set"


def opened(patterns, index=None):
    return open_source("a", ShardsConfig(shards=patterns, index=None if index is None else str(index)))


def keys(source):
    return [storage.read(n)[0] for storage in source.storages for n in range(len(storage))]


def test_a_merged_index_opens_the_same_shards(folder, monkeypatch):
    done = sparo("data", "check", str(folder), "--hash")
    assert done.returncode == 0
    sparo("data", "index", str(folder), "--merge", str(folder / "all.safetensors"))
    for patterns, count in (
        (str(folder), 4),
        (f"{folder}/{{00001..00002}}.tar", 2),
        (f"{folder}/*3.tar", 1),
        ((f"{folder}/00002.tar", f"{folder}/00000.tar"), 2),
        (f"{folder.parent}/set/../set", 4),
    ):
        plain, merged = opened(patterns), opened(patterns, folder / "all.safetensors")
        assert len(merged.storages) == count and fingerprint([plain]) == fingerprint([merged])
        assert keys(plain) == keys(merged) and "content" in fingerprint([merged])["a"]
    monkeypatch.chdir(folder.parent)  # relative names, as in recipes
    assert keys(opened("./set", "set/all.safetensors")) == keys(opened("set"))


def test_a_start_asks_for_no_shard_and_downloads_the_index_once(folder, server, tmp_path, monkeypatch):  # noqa: F811
    paths = [f"/set/{path.name}" for path in sorted(folder.iterdir())]
    server.files = {path: (tmp_path / path[1:]).read_bytes() for path in paths}
    monkeypatch.setattr(remote, "_PAUSES", ())
    index = f"{server.at}/set/all.safetensors"
    server.sent = 0
    with ThreadPoolExecutor(4) as pool:  # four ranks of a node
        sources = list(pool.map(lambda _: opened(f"{server.at}/set/{{00000..00003}}.tar", index), range(4)))
    assert server.sent == len(server.files["/set/all.safetensors"])
    assert [keys(source) for source in sources] == [keys(opened(str(folder)))] * 4
    close_storages()


def test_shards_that_changed_or_are_missing_are_noticed(folder):
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.shards: .*00009\.tar' is not in the index"):
        opened(f"{folder}/00009.tar", folder / "all.safetensors")
    shutil.copy(folder / "00000.tar", folder / "old.tar")
    (folder / "00000.tar").write_bytes((folder / "old.tar").read_bytes()[:-512])
    with pytest.raises(
        DataError, match=r"00000\.tar has \d+ bytes, but \d+ according to the index\. Write the index again"
    ):
        opened(str(folder), folder / "all.safetensors")


def test_a_part_cannot_be_merged(folder):
    done = sparo("data", "index", str(folder), "--merge", "x", "--part", "0/2")
    assert done.returncode == 2 and "--merge: needs all shards" in done.stderr


def test_damaged_merged_indexes_end_in_an_error(folder):
    good = (folder / "all.safetensors").read_bytes()
    read = 0
    for number in range(60):
        rng, data = random.Random(number), bytearray(good)
        if number % 4 == 0:
            data = data[: rng.randrange(len(data))]
        elif number % 4 == 1:
            for _ in range(4):
                data[rng.randrange(8, len(data))] = rng.randrange(256)
        elif number % 4 == 2:
            data[:8] = rng.randrange(1 << 40).to_bytes(8, "little")
        else:
            data = bytearray(rng.randbytes(len(data)))
        path = folder / f"{number}.safetensors"
        path.write_bytes(data)
        try:
            source = opened(str(folder), path)
            for storage in source.storages:
                for n in range(min(len(storage), 20)):
                    try:
                        storage.read(n)
                        read += 1
                    except BadSampleError:
                        pass
        except (DataError, ConfigError) as error:
            assert Path(path).name in str(error) or ".tar" in str(error), error
    assert read > 5


def test_an_index_elsewhere_finds_its_shards(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, shards in (
        ("other/place/all.safetensors", "set"),
        ("all.safetensors", "set"),
        ("set/x.safetensors", str(folder)),
    ):
        done = sparo("data", "index", shards, "--merge", file, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert keys(opened("set", file)) == keys(opened(str(folder), str(tmp_path / file))) == keys(opened("set"))


def test_a_home_that_cannot_be_written_is_explained(folder, server, tmp_path, monkeypatch):  # noqa: F811
    server.files["/all.safetensors"] = (folder / "all.safetensors").read_bytes()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="Set XDG_CACHE_HOME"):
        opened(f"{server.at}/00000.tar", f"{server.at}/all.safetensors")
