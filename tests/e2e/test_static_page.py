"""Test `sparo slots explore --static`: the page with the model in the browser gives the results of Python."""

import functools
import http.server
import io
import shutil
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

from evals.encoders.loading import load_encoder
from evals.encoders.pixels import Pixels
from evals.sets.pictures import decode_image
from evals.slots.attend import attend, preprocess_image
from evals.slots.units import make_units
from launch.explorer.offline_page import PAGE
from sparo_train.data.examples.image_text import ClipTokenizer, decode_words
from tests.helpers.browser import Watched, chromium, until
from tests.helpers.processes import sparo

pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[onnx]'")
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm: apt-get install npm")

CAPTIONS = [
    "a red cube", "", "  Two   spaces\tand A TAB ", "it's they've I'll", "naïve café — “quotes” … 42 %", "日本語のキャプション 🐈‍⬛",
    "antidisestablishmentarianism " * 30, "x" * 200, "e\u0301 İstanbul ßẞ", "<b>&lt;", "a_b-c.d/e", "it’s ‘so’", "ﬁne ﬂow Ａ１", "Ĳssel",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@contextmanager
def served(folder):
    """Serve files only, like an ordinary web server."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


@pytest.mark.long
def test_browser_and_python_compute_equal_pixels_and_tokens(browser, tmp_path):
    shutil.copytree(PAGE, tmp_path / "page")
    (tmp_path / "blank.html").write_text("<!doctype html><title>blank</title>")
    rng = np.random.default_rng(0)
    with served(tmp_path) as address:
        page = browser.new_page()
        page.goto(f"{address}blank.html")
        for width, height, size, resize in (
            (64, 64, 32, 32),
            (97, 61, 32, 37),
            (13, 30, 32, 32),
            (200, 31, 24, 24),
            (32, 32, 32, 32),
        ):
            rgb = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(rgb).save(file, "PNG")
            found = page.evaluate(
                """async ([bytes, size, resize]) => {
                    const { decodeImage, modelPixels } = await import("/page/pixels.js");
                    const { pixels } = modelPixels(await decodeImage(new Blob([Uint8Array.from(bytes)])), size, resize);
                    return [...pixels];
                }""",
                [list(file.getvalue()), size, resize],
            )
            expected = Pixels(size, resize)(Image.fromarray(rgb)).transpose(2, 0, 1)
            assert (np.array(found).reshape(3, size, size) == expected).all(), (width, height)
        from evals.interop.tokenizer_file import tokenizer_json

        for length in (16, 77):
            found = page.evaluate(
                """async ([content, length, captions]) => {
                    const { Tokenizer } = await import("/page/tokenizer.js");
                    const tokenizer = new Tokenizer(content, length);
                    return captions.map((caption) => { const ids = tokenizer.encode(caption); return [ids, tokenizer.words(ids)]; });
                }""",
                [tokenizer_json(length), length, CAPTIONS],
            )
            for caption, (ids, words) in zip(CAPTIONS, found, strict=True):
                expected = ClipTokenizer(length)(caption)
                if "&" in caption:  # HTML entities are not decoded in the browser
                    continue
                assert ids == expected, caption
                assert [tuple(word) for word in words] == decode_words(expected), caption
        page.close()


def expected(run, path, caption, captions):
    encoder = load_encoder(run)
    image = decode_image(path.read_bytes(), path, encoder.decoding)
    (one,) = attend(encoder, [image], [caption])
    units = make_units(encoder)
    with torch.inference_mode():
        vector = units.images(encoder.encode(encoder.stack([preprocess_image(encoder, image)])).flatten(1))
    return one, (vector * units.texts(encoder.text(captions))).sum((1, 2)).tolist()


def agrees(browser, address, run, path):
    """Add an image with a caption, search, and compare captions: the page shows what Python computes."""
    watched = Watched(browser, address)
    page = watched.page
    number = page.locator("#images [role=option]").count()
    page.set_input_files("#own-image", path)
    page.fill("#own-caption", "a thing of 3")
    page.click("#own button")
    until(page.locator("#picture-words")).to_contain_text("a thing of 3", timeout=30_000)
    one, similarities = expected(run, path, "a thing of 3", ["a red square", "a blue circle"])
    for slot in range(4):
        text = page.inner_text(f"#slots [data-slot='{slot}'] .fact")
        peak, cosine = text.removeprefix("peak ").split(" %, cosine ")
        assert float(peak) == pytest.approx(100 * float(one.maps[slot].max()), abs=0.1)
        assert float(cosine) == pytest.approx(float(one.cosine[slot]), abs=0.006)
    page.fill("#captions-text", "a red square\na blue circle")
    page.click("#captions button")
    page.wait_for_selector("#captions-found table")
    rows = page.locator("#captions-found tbody td:nth-child(2)").all_inner_texts()
    assert [float(text.removesuffix(" best")) for text in rows] == pytest.approx(similarities, abs=1.1e-3)
    page.fill("#query", "a thing")
    page.press("#query", "Enter")
    until(page.locator("#status")).to_contain_text("fits “a thing” best", timeout=30_000)
    page.click("#alike button")
    until(page.locator("#alike-found button")).to_have_count(8)
    (path.parent / "no.png").write_bytes(b"no image")
    page.set_input_files("#own-image", path.parent / "no.png")
    page.click("#own button")
    until(page.locator("#error-text")).to_contain_text("no.png: is not an image")
    assert page.locator("#images [role=option]").count() == number + 1
    watched.fine()
    return watched


def own_image(folder):
    rng = np.random.default_rng(5)
    Image.fromarray(rng.integers(0, 256, (70, 45, 3), dtype=np.uint8)).save(folder / "own.png")
    return folder / "own.png"


STATIC = ("--data", "tasks.yaml", "--features", "store", "--task", "ret")


@pytest.mark.long
def test_a_folder_for_a_web_server(world, browser, tmp_path):
    done = sparo("slots", "explore", "runs/s0", *STATIC, "--static", str(tmp_path / "page"), cwd=world)
    assert done.returncode == 0 and " MB" in done.stdout, done.stderr
    with served(tmp_path / "page") as address:
        watched = agrees(browser, f"{address}index.html", world / "runs/s0", own_image(tmp_path))
        assert watched.page.locator("#compare").is_hidden()
        assert str(world) not in (tmp_path / "page/index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_one_file_from_an_onnx_export(world, browser, tmp_path, precision):
    done = sparo("export", "runs/s0", "--layout", "onnx", "--out", str(tmp_path / "onnx"), cwd=world)
    assert done.returncode == 0, done.stderr
    words = ("--static", str(tmp_path / "one.html"), "--precision", precision)
    done = sparo("slots", "explore", f"onnx:{tmp_path / 'onnx'}", *STATIC, *words, cwd=world)
    assert done.returncode == 0, done.stderr
    if precision == "fp32":
        agrees(browser, (tmp_path / "one.html").as_uri(), world / "runs/s0", own_image(tmp_path))


def test_unsuitable_exports_are_refused(world):
    for words, problem in (
        (("runs/s0", "--precision", "fp16"), "applies to --static only"),
        (("runs/s0", "--static", "x", "--compare", "runs/s1"), "does not apply to --static"),
        (("runs/s0", "--static", "x", "--precision", "bf16"), "--precision bf16"),
    ):
        done = sparo("slots", "explore", *words, *STATIC, cwd=world)
        assert done.returncode == 2 and problem in done.stderr.replace("\n", " "), done.stderr
    assert not (world / "x").exists()
    (world / "occupied").mkdir()
    (world / "occupied/index.html").write_text("mine")
    (world / "occupied.html").write_text("mine")
    for target in ("occupied", "occupied.html", ""):
        done = sparo("slots", "explore", "runs/s0", *STATIC, "--static", target, cwd=world)
        assert done.returncode == 2 and "has other content" in done.stderr, done.stderr
    assert (world / "occupied/index.html").read_text() == (world / "occupied.html").read_text() == "mine"
