"""Who may use the explorer, and how many requests at once."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from launch.explorer import app, bodies
from launch.explorer.serve import Guard
from sparo_train.core.errors import ConfigError

OWN = {"host": "127.0.0.1:8765", "x-sparo": "explore"}


def asked(listens, token, method="GET", path="/", query="", names=(), **headers):
    """Return status and headers of a reply to a request; in header names, _ replaces -."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})

    sent = []

    async def send(message):
        sent.append(message)

    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": named,
        "server": ("127.0.0.1", 8765),
    }
    asyncio.run(Guard(app, listens, token, names)(scope, None, send))
    if sent[0]["status"] != 200:
        assert b"secret" not in b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:1", "LOCALHOST", "[::1]:1", "127.9.9.9"])
def test_requests_of_this_machine_are_accepted(host):
    status, headers = asked("127.0.0.1", None, host=host)
    assert status == 200 and headers[b"content-security-policy"].startswith(b"default-src 'self'")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "192.0.2.1",
        "",
        "[",
        "localhost@evil.example:1",
        "evil.example@localhost",
        "0x7f.1",
    ],
)
def test_other_host_names_are_refused(host):
    assert asked("127.0.0.1", None, host=host)[0] == 400


def test_only_the_page_itself_may_change_data():
    def post(**headers):
        return asked("127.0.0.1", None, "POST", "/save/0", **headers)[0]

    own = {name.replace("-", "_"): value for name, value in OWN.items()}
    assert post(**own) == 200 and post(**own, origin="http://127.0.0.1:8765") == 200
    assert post(host=OWN["host"]) == 403  # what a form of another page sends
    assert (
        post(**own, origin="http://evil.example")
        == post(**own, origin="http://[")
        == post(**own, origin="null")
        == post(**own, origin="http://127.0.0.1:1")
        == 403
    )


def test_other_machines_need_a_token():
    def seen(query="", **headers):
        return asked("0.0.0.0", "tok", query=query, **{"host": "192.0.2.7:8765", **headers})

    assert (
        seen()[0]
        == seen("token=no")[0]
        == seen(cookie="sparo_explore_8765=no")[0]
        == seen(cookie='sparo_explore_8765="tö')[0]
        == 403
    )
    status, headers = seen("token=tok")
    assert status == 303 and headers[b"location"] == b"./"
    assert headers[b"set-cookie"] == b"sparo_explore_8765=tok; HttpOnly; SameSite=Strict"
    assert asked("127.0.0.1", None, host="localhost", path="/image/" + "9" * 5000)[0] == 404
    assert seen(cookie="other=1; sparo_explore_8765=tok")[0] == 200
    assert seen(cookie="sparo_explore_8765=tok", host="evil.example")[0] == 400
    assert asked("0.0.0.0", "tok", "POST", host="192.0.2.7", cookie="sparo_explore_8765=tok")[0] == 403


def test_named_hosts_need_a_token_and_their_own_page():
    def reply(method="GET", token="tok", **headers):
        return asked("127.0.0.1", token, method, names=("Hub.example",), host="hub.example:443", **headers)[0]

    cookie = "sparo_explore_8765=tok"
    assert reply() == 403 and reply(cookie=cookie) == 200 and reply(token=None) == 400
    page = {"cookie": cookie, "x_sparo": "explore", "origin": "https://hub.example"}
    assert reply("POST", **page) == 403  # the proxy's port differs from that of Host
    assert reply("POST", **page, sec_fetch_site="same-origin") == 200
    assert reply("POST", **page, sec_fetch_site="cross-site") == 403
    assert reply("POST", cookie=cookie, sec_fetch_site="same-origin") == 403  # without the header that the page sends


def test_a_server_that_ends_leaves_no_traceback_of_a_request():
    begun, sent = asyncio.Event(), []

    async def app(scope, receive, send):
        begun.set()
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    async def cancelled():
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
        }
        task = asyncio.create_task(Guard(app, "127.0.0.1", None)(scope, None, send))
        await begun.wait()
        task.cancel()
        await task

    asyncio.run(cancelled())
    assert [message.get("status") for message in sent] == [503, None]


class _Stream:
    """A request whose body arrives in given pieces."""

    def __init__(self, length=None):
        self.headers = {} if length is None else {"content-length": length}
        self.pieces = asyncio.Queue()

    async def stream(self):
        while (piece := await self.pieces.get()) is not None:
            yield piece


def test_uploads_that_are_read_at_once_have_a_limit():
    async def all_of_it():
        async def answer(request, most=8):
            return await bodies.respond_to_body(request, most, lambda data: {"length": len(data)})

        assert (await answer(_Stream("9"))).status_code == 413  # before a byte of it was read
        open_ones = [_Stream() for _ in range(4)]
        waiting = [asyncio.create_task(answer(request, bodies.MAX_IMAGE_BYTES)) for request in open_ones]
        await asyncio.sleep(0)
        refused = await answer(_Stream("5"))
        assert refused.status_code == 503 and refused.headers["retry-after"] and b"Try again" in refused.body
        for request in open_ones:
            for piece in (b"ab", b"c", None):
                request.pieces.put_nowait(piece)
        assert [json.loads((await task).body) for task in waiting] == [{"length": 3}] * 4
        longer = _Stream("2")  # longer than its declared length
        longer.pieces.put_nowait(b"abc")
        assert (await answer(longer)).status_code == 413
        fine = _Stream("2")
        fine.pieces.put_nowait(b"ab")
        fine.pieces.put_nowait(None)
        assert json.loads((await answer(fine)).body) == {"length": 2}

    asyncio.run(all_of_it())


def test_loading_a_slow_checkpoint_does_not_block_the_model(tmp_path):
    opening, go_on = threading.Event(), threading.Event()

    def another(checkpoint):
        opening.set()
        assert go_on.wait(30)
        raise ConfigError(f"{checkpoint}: is gone")

    side = SimpleNamespace(encoder=SimpleNamespace(weights="0" * 64))
    explorer = app.Explorer(side, None, tmp_path / "selection.json", another)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(explorer.compare, "far")
        assert opening.wait(30)
        assert explorer.run_locked(lambda: {"a": 1}) == {"a": 1}
        with pytest.raises(ConfigError, match="near: another checkpoint is being opened"):
            explorer.compare("near")
        go_on.set()
        with pytest.raises(ConfigError, match="far: is gone"):
            slow.result()
    with pytest.raises(ConfigError, match="near: is gone"):
        explorer.compare("near")
