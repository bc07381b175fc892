"""Who may talk to the explorer: a browser on this machine, or one that was given the token."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_MAX_PATH_LENGTH = 200  # characters of a path: none of ours is longer


class Guard:
    """ASGI middleware.

    Args:
        app: behind it.  host: that the server listens on.  token: that has to be shown once as `?token=`, None on loopback.

    The Host header must name this machine, or a page elsewhere could reach the server under a name of its own (DNS rebinding). What
    changes something must come from the explorer's own page: the Origin is its own, and a header is there that forms cannot send.
    """

    def __init__(self, app: Any, host: str, token: str | None):
        self.app, self._host, self._token = app, host, token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        extra = list(_HEADERS)
        query_token = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if not self._is_allowed_host(headers.get("host", "")):
            await _refuse(send, 400, "The Host header names another machine; use the address that sparo printed.")
            return
        if len(scope["path"]) > _MAX_PATH_LENGTH:
            await _refuse(send, 404, "There is nothing here.")
            return
        # By its port: cookies of one host are sent to all of its ports.
        cookie = f"sparo_explore_{scope.get('server', ('', 0))[1]}"
        if self._token is not None:
            if query_token and secrets.compare_digest(query_token.encode(), self._token.encode()):
                # The token leaves the address bar: what is there gets copied and logged.
                cookie_header = f"{cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                extra += [(b"set-cookie", cookie_header.encode()), (b"location", b"/")]
                await _refuse(send, 303, "", extra)
                return
            if not secrets.compare_digest(_cookie(headers, cookie).encode(), self._token.encode()):
                await _refuse(send, 403, "A token is needed; open the whole address that sparo printed.")
                return
        if scope["method"] not in ("GET", "HEAD") and not _is_same_origin(headers):
            await _refuse(send, 403, "Only the explorer's own page may change something.")
            return

        started = False

        async def send_with_headers(message: dict[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except (
            asyncio.CancelledError
        ):  # Ctrl-C: the server ends, and would print a traceback for every request that is under way
            if not started:
                await _refuse(send, 503, "The explorer was stopped.")

    def _is_allowed_host(self, value: str) -> bool:
        try:
            name = "" if "@" in value else (urlsplit(f"//{value}").hostname or "").lower()
        except ValueError:
            return False
        if is_loopback(name):
            return True
        if self._token is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {self._host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        return True  # an address is no name that somebody else could point here


def is_loopback(name: str) -> bool:
    """`localhost`, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _is_same_origin(headers: dict[str, str]) -> bool:
    origin = headers.get("origin")
    try:
        same = origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False
    return same and headers.get("x-sparo") == "explore"


def _cookie(headers: dict[str, str], name: str) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


async def _refuse(send: Any, status: int, text: str, headers: list[tuple[bytes, bytes]] = _HEADERS) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [*headers, kind]})
    await send({"type": "http.response.body", "body": text.encode()})
