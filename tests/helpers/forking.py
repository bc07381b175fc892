"""A `sparo` for shell commands in tests: a small client of a server that has imported everything, and forks. It starts without importing.

The command has the caller's streams, folder and environment; SIGINT and SIGTERM of the client go to it, and its exit code comes back.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Any

from tests.helpers.processes import CONTEXT

_CLIENT = """#!{python} -IS
import json, os, signal, socket, struct, sys
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
what = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(line, [struct.pack("<I", len(what))], [0, 1, 2])
line.sendall(what)
stream = line.makefile("rb")
pid = struct.unpack("<i", stream.read(4))[0]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _frame: os.kill(pid, n))
code = struct.unpack("<i", stream.read(4))[0]
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def install(tool: Path) -> Any:
    """Write the client to `tool` and start its server; returns the server's process, which the caller must end."""
    address = tool.with_name(f".{tool.name}")
    tool.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(address))
    listening.listen()
    server = CONTEXT.Process(target=_serve, args=(listening,), daemon=False)
    server.start()
    listening.close()
    return server


def _serve(listening: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that answer a call need not be waited for
    while True:
        line, _ = listening.accept()
        if not os.fork():
            listening.close()
            _answer(line)
            os._exit(0)
        line.close()


def _answer(line: socket.socket) -> None:
    """Run one command in a separate process, and report its process id and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(line, 4, 3)
    length, content = struct.unpack("<I", head)[0], b""
    while len(content) < length:
        content += line.recv(length - len(content))
    pid = os.fork()
    if not pid:
        line.close()
        _run(streams, *json.loads(content))
    line.sendall(struct.pack("<i", pid))
    _, status = os.waitpid(pid, 0)
    line.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))


def _run(streams: list[int], arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    code: Any = 1
    # Restore the default handlers: processes that are started in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(n, mode, closefd=False) for n, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv = ["sparo", *arguments]
        import torch

        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "2")))
        from launch.cli.main import main

        main()
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
