"""Request bodies, limited while they are read, and errors as answers that a user can act on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from sparo_train.core.errors import BadSampleError, ConfigError, SparoError
from sparo_train.core.files import escape_control_chars

from .selection_file import ChangedError

MAX_JSON_BYTES, MAX_IMAGE_BYTES = 4 << 20, 64 << 20  # limit in bytes for a body
_MAX_BODY_BYTES = 4 * MAX_IMAGE_BYTES  # limit in bytes for all bodies in memory


def json_object(data: bytes) -> dict[str, Any]:
    """Return a body's JSON object. Raises `ConfigError` for anything else."""
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ConfigError("the request contains no JSON object")
    return body


class _BodyMemory:
    """Counter of the bytes of request bodies in memory; only the event loop's thread uses it."""

    def __init__(self) -> None:
        self._reserved_bytes = 0

    @contextmanager
    def reserve(self, size: int) -> Iterator[bool]:
        """Reserve `size` bytes during the block; yields False if the memory for bodies is full."""
        granted = self._reserved_bytes + size <= _MAX_BODY_BYTES
        self._reserved_bytes += size if granted else 0
        try:
            yield granted
        finally:
            self._reserved_bytes -= size if granted else 0


_body_memory = _BodyMemory()


async def respond_to_body(request: Request, max_bytes: int, work: Callable[[bytes], Any]) -> Response:
    """Answer with `work` of a request's body; 413 for more than `max_bytes` bytes, 503 while other bodies fill the memory."""
    length = request.headers.get("content-length", "")
    announced = (
        int(length) if length.isascii() and length.isdigit() else max_bytes
    )  # a chunked body may have any length
    too_long = JSONResponse({"error": f"more than {max_bytes >> 20} MB. Give something smaller."}, 413)
    if announced > max_bytes:
        return too_long
    with _body_memory.reserve(announced) as granted:
        if not granted:
            wait = {"error": "other uploads have not ended yet. Try again in a moment."}
            return JSONResponse(wait, 503, {"retry-after": "2"})
        data = bytearray()
        try:
            async for chunk in request.stream():
                data += chunk
                # While receiving, because a body of gigabytes must not be stored before it is refused.
                if len(data) > announced:
                    return too_long
        except ClientDisconnect:
            return Response(status_code=400)
        return await respond(lambda: work(bytes(data)))


async def respond(work: Callable[[], Any]) -> Response:
    """Answer with what `work` returns, as JSON; with the message of a user error, and 409 if a file was changed meanwhile."""
    try:
        # On a thread, because a computing model must not block the page.
        result = await run_in_threadpool(work)
    except ChangedError as error:
        return JSONResponse({"error": escape_control_chars(str(error)), "changed": True}, 409)
    except BadSampleError as error:
        return JSONResponse({"error": escape_control_chars(error.full_message())}, 400)
    except SparoError as error:
        return JSONResponse({"error": escape_control_chars(str(error))}, 400)
    except OSError as error:
        return JSONResponse({"error": escape_control_chars(f"{error.filename or ''}: {error.strerror or error}")}, 400)
    return result if isinstance(result, Response) else JSONResponse(result)
