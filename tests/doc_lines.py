"""Runs command lines of the documentation on eight virtual devices, a line each of standard input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import sys

from kvjax.cli import main
from kvjax.serving.app import Server


async def _ready(self: Server, sockets: object = None) -> None:
    await _startup(self, sockets)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGTERM)


_startup = Server.startup
Server.startup = _ready  # a server ends once it answers

if __name__ == "__main__":
    for line in sys.stdin:
        out, said = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            try:
                code = main.main(shlex.split(line)[1:])
            except SystemExit as ended:
                code = ended.code
        print(
            json.dumps({"line": line.strip(), "code": code, "out": out.getvalue(), "said": said.getvalue()}), flush=True
        )
