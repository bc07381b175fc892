"""Test that exports work alone: model card, checksums, modes, the error without the plug-in, and a stand-in of the hub with its documented calls."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml

from evals.encoders.loading import load_encoder
from evals.interop.exporting import export_run
from evals.report.results_file import append
from evals.tasks.result import Result
from launch.commands.hub import upload
from sparo_train.core.errors import CheckpointError, ConfigError, SparoError
from tests.helpers.processes import sparo


@pytest.fixture(scope="module")
def run(world):
    return world / "runs/s0"  # by name, because other modules add runs to this folder


@pytest.fixture
def export(run, tmp_path):
    done = sparo("export", str(run), "--out", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    return tmp_path / "model"


def test_an_export_has_a_card_checksums_and_usual_modes(run, export):
    card = (export / "README.md").read_text()
    assert f'local-dir:{export}"' in card and "trained parameters" in card and "| a | 96 |" in card
    lines = (export / "SHA256SUMS").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["open_clip_config.json", "open_clip_model.safetensors"]
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((export / name).read_bytes()).hexdigest() == digest
    assert {path.stat().st_mode & 0o777 for path in export.iterdir()} == {0o644}
    code = card.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_single_file_export_has_a_card_and_a_checksum(run, tmp_path):
    done = sparo("export", str(run), "--layout", "sparo-clip", "--out", str(tmp_path / "x.pt"))
    assert done.returncode == 0, done.stderr
    digest, name = (tmp_path / "x.pt.sha256").read_text().strip().split("  ")
    assert name == "x.pt" and hashlib.sha256((tmp_path / "x.pt").read_bytes()).hexdigest() == digest
    assert "load_encoder" in (tmp_path / "x.pt.md").read_text()


def test_every_form_of_a_model_normalises_pixels_as_its_run_does(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    recipe = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    recipe["objective"] |= {"mean": [0.5, 0.4, 0.3], "std": [0.3, 0.25, 0.2]}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(recipe))
    for more in ((), ("--layout", "sparo-clip", "--out", str(tmp_path / "x.pt"))):
        assert sparo("export", str(tmp_path / "run"), *more).returncode == 0
    folder = tmp_path / "run/export"
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    wanted = load_encoder(tmp_path / "run").encode(pixels)
    for form in (folder, folder / "open_clip_model.safetensors", tmp_path / "x.pt"):
        torch.testing.assert_close(load_encoder(form).encode(pixels), wanted)
    assert not torch.allclose(load_encoder(run).encode(pixels), wanted, atol=1e-3)

    raw = torch.load(tmp_path / "x.pt", weights_only=True)
    torch.save(
        {**raw, "sparo_config": raw["sparo_config"]["model"]}, tmp_path / "old.pt"
    )  # as earlier versions wrote it
    torch.testing.assert_close(load_encoder(tmp_path / "old.pt").encode(pixels), load_encoder(run).encode(pixels))
    for told, says in (({"std": [0.1, 0.2]}, "mean and std of three"), ({"mean": ["a"] * 3}, "mean and std of three")):
        torch.save({**raw, "sparo_config": {**raw["sparo_config"], **told}}, tmp_path / "odd.pt")
        with pytest.raises(CheckpointError, match=says):
            load_encoder(tmp_path / "odd.pt")
    config = json.loads((folder / "open_clip_config.json").read_text())
    for change, says in (
        ({"resize_mode": "squash"}, r"preprocess_cfg\.resize_mode: .*got 'squash'.*open_clip:NAME@FILE"),
        ({"interpolation": "bilinear"}, "preprocess_cfg.interpolation"),
        ({"mean": [0.5]}, "not an open_clip config"),
        ({"std": [0.5, 0.0, 0.5]}, "not an open_clip config"),
        ({"std": [0.5, 0.5, float("nan")]}, "not an open_clip config"),
    ):
        odd = {**config, "preprocess_cfg": {**config["preprocess_cfg"], **change}}
        (folder / "open_clip_config.json").write_text(json.dumps(odd))
        for form in (folder, folder / "open_clip_model.safetensors"):
            with pytest.raises(CheckpointError, match=says):
                load_encoder(form)


def test_a_foreign_readme_is_not_overwritten(run, tmp_path):
    (tmp_path / "README.md").write_text("# my project")
    for _ in range(2):
        assert sparo("export", str(run), "--out", str(tmp_path)).returncode == 0
    assert (tmp_path / "README.md").read_text() == "# my project"
    assert "trained parameters" in (tmp_path / "MODEL_CARD.md").read_text()
    (tmp_path / "file").write_text("x")
    done = sparo("export", str(run), "--out", str(tmp_path / "file"))
    assert done.returncode == 2 and "is a file, but layout open_clip writes a folder" in done.stderr
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.long
def test_open_clip_without_the_plug_in_names_the_import(export):
    code = f"import open_clip; open_clip.create_model('local-dir:{export}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "'import sparo.openclip first" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_an_export_made_before_the_package_sparo_loads(export, tmp_path):
    shutil.copytree(export, tmp_path / "old")
    config = tmp_path / "old/open_clip_config.json"
    text = config.read_text()
    assert text.count("import sparo.openclip first") >= 1
    config.write_text(text.replace("import sparo.openclip first", "import sparo_train.openclip first"))
    old, new = load_encoder(tmp_path / "old"), load_encoder(export)
    side = new.model.config.vision.image_size
    pixels = torch.randint(0, 255, (2, 3, side, side), dtype=torch.uint8)
    assert torch.equal(old.encode(pixels), new.encode(pixels))
    code = f"import sparo.openclip, open_clip; open_clip.create_model('local-dir:{tmp_path / 'old'}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class _Hub(BaseHTTPRequestHandler):
    """Serve the hub's calls for creating a repository, choosing the upload method, LFS's batch and uploads, and the commit."""

    def do_GET(self):
        self._answer(404, {})

    def do_PUT(self):
        self.server.to_store[self.path.rpartition("/")[2]] = self._body()  # type: ignore[attr-defined]
        self._answer(200, {})

    def do_POST(self):
        body, host = self._body(), f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_good":
            self._answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))  # type: ignore[attr-defined]
            self._answer(200, {"url": f"{host}/me/model", "name": "me/model"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(("safetensors", "pt")) else "regular",
                      "shouldIgnore": False, "oid": None} for f in files]  # fmt: skip
            self._answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{host}/upload/{o['oid']}"}}} for o in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects}, "application/vnd.git-lfs+json")
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])  # type: ignore[attr-defined]
                if line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.to_store[value["oid"]]  # type: ignore[attr-defined]
            self._answer(200, {"commitUrl": f"{host}/me/model/commit/1", "commitOid": "1", "pullRequestUrl": None})
        else:  # check the front matter of the card
            self._answer(200, {"errors": [], "warnings": []})

    def _body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, code, content, kind="application/json"):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.created, server.to_store, server.files = [], {}, {}  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _upload(hub, *arguments, token="hf_good"):
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    # In a separate process: the library reads the HF_ variables when it is imported.
    line = [sys.executable, "-m", "launch.cli", "export", *map(str, arguments)]
    return subprocess.run(line, env=os.environ | place, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_hub_gets_every_file_that_loading_needs(run, tmp_path, hub):
    done = _upload(hub, run, "--out", tmp_path / "m", "--hub", "me/model", "--private")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith("/me/model"), done.stderr
    assert hub.created[0]["organization"] == "me" and (
        hub.created[0].get("private") or hub.created[0]["visibility"] == "private"
    )
    assert set(hub.files) == {"README.md", "SHA256SUMS", "open_clip_config.json", "open_clip_model.safetensors"}
    assert b'"hf-hub:me/model"' in hub.files["README.md"] and str(tmp_path).encode() not in hub.files["README.md"]
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    for name, content in hub.files.items():
        (fetched / name).write_bytes(content)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    ours, theirs = (load_encoder(place) for place in (run, fetched))
    torch.testing.assert_close(ours.encode(pixels), theirs.encode(pixels))


def test_a_refusal_of_the_hub_loses_nothing(export, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(SparoError, match=r"--hub me/model: HfHubHTTPError: .*401.*HF_TOKEN.*The export is in"):
        upload(export, "me/model", False)
    with pytest.raises(ConfigError, match="--hub model: expected OWNER/NAME"):
        upload(export, "model", False)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(SparoError, match=r"--hub me/model: .*Check the connection"):
        upload(export, "me/model", False)
    assert (export / "open_clip_model.safetensors").is_file()
    done = sparo("export", str(export), "--private")
    assert done.returncode == 2 and "--private: applies to --hub" in done.stderr


def test_the_card_lists_scores_with_intervals_and_steps(run, tmp_path):
    """Scores of other weights than the exported ones are recognised. Scores with a limit or a choice of slots are not the model's."""
    result = Result("zeroshot", 40, "acc1", {"acc1": 0.5}, 0.25, intervals={"acc1": (0.35, 0.65)})
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    label = {"checkpoint": {"label": str(copy / "checkpoints/step-00000006")}}
    append(copy / "evals", "run", "zero|shot", result, label)
    append(copy / "evals", "run (slots 1)", "near", result, label)
    append(copy / "evals", "run", "some", result, {**label, "limit": 3})
    assert sparo("export", str(copy), "--out", str(tmp_path / "m")).returncode == 0
    card = (tmp_path / "m/README.md").read_text()
    assert (
        "| zero\\|shot | acc1 | 50.0 | 35.0 to 65.0 | 40 | 25.0 | 6 |" in card
        and "near" not in card
        and "some" not in card
    )
    assert "weights of step 12. Scores of other steps belong to other weights" in card


def test_an_export_replaces_only_what_an_export_wrote(run, tmp_path):
    """The user's weights are refused before anything is written, and other files of the user keep their modes."""
    own = tmp_path / "model"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    (own / "notes.txt").chmod(0o600)
    for _ in range(2):
        export_run(run, own, None)
        export_run(run, own / "one.pt", "sparo-clip")
    names = [line.split("  ")[1] for line in (own / "SHA256SUMS").read_text().splitlines()]
    assert names == ["open_clip_config.json", "open_clip_model.safetensors"]
    assert (own / "notes.txt").stat().st_mode & 0o777 == 0o600
    (own / "best.pt").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"--out: .*best\.pt exists, and no checksum of an export lists it"):
        export_run(run, own, None)
    with pytest.raises(ConfigError, match=r"--out: .*best\.pt exists"):
        export_run(run, own / "best.pt", "sparo-clip")
    assert (own / "best.pt").read_bytes() == b"mine"
