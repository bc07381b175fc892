"""Debian's chromium with Playwright, and a running explorer for it."""

from __future__ import annotations

import http.client
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.processes import start_sparo

CHROMIUM = shutil.which("chromium")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser; skip the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def explorer(*words: str, cwd: Path, **environment: str) -> Iterator[str]:
    """Run `sparo slots explore …` on a free port and yield its address. It must end by Ctrl-C with code 0."""
    process = start_sparo("slots", "explore", *words, "--port", "0", "--features", "store", cwd=cwd, **environment)
    try:
        until = time.monotonic() + 200
        while not (found := re.search(r"http://\S+", process.stdout_now())):
            assert process.poll() is None and time.monotonic() < until, process.stderr_now()
            time.sleep(0.1)
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in told, told


def until(locator: Any) -> Any:
    """Return Playwright's `expect`, which retries; its `wait_for_function` needs `eval`, which the page forbids."""
    from playwright.sync_api import expect

    return expect(locator)


class Watched:
    """A page in a separate context, and what must not happen on it: errors, and requests to another host."""

    def __init__(self, browser: Any, address: str, **options: Any):
        self.host, self.wrong = urlsplit(address).netloc, list[str]()
        self.context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **options})
        self.page = self.tab()
        self.go(address)

    def tab(self) -> Any:
        page = self.context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", lambda request: self._asked(request.url))
        page.on("console", lambda line: self._said(line))
        page.on("dialog", lambda dialog: dialog.accept())  # asked when a page with unsaved changes is left
        return page

    def go(self, address: str, page: Any = None) -> None:
        (page or self.page).goto(address)
        (page or self.page).wait_for_selector("body[data-ready=yes]")

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "file") and parts.netloc != self.host:
            self.wrong.append(f"asked {url}")

    def _said(self, line: Any) -> None:
        # Tests expect refusals. Everything else is an error, including a violated content policy.
        if (
            line.type in ("error", "warning")
            and "Failed to load resource: the server responded with a status of 4" not in line.text
        ):
            self.wrong.append(f"{line.type}: {line.text}")

    def fine(self) -> None:
        """Assert that no error happened, and that axe finds nothing on any tab."""
        from axe_playwright_python.sync_playwright import Axe

        for page in self.context.pages:
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        assert self.wrong == []


@contextmanager
def proxy(address: str, prefix: str, host: str | None = None) -> Iterator[int]:
    """Serve `address` below a prefix, as JupyterHub and tunnels do; yields the port.

    Args:
        address: the server, http://127.0.0.1:PORT.
        prefix: path that is removed from requests.
        host: the Host header that the server receives; None: that of the browser.
    """
    target = urlsplit(address)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {**dict(self.headers), **({} if host is None else {"Host": host})}
            upstream = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
            upstream.request(self.command, "/" + self.path.removeprefix(prefix), body, headers)
            answer = upstream.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815  the name that http.server calls

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
