"""Chat templates, rendered in a process of their own under limits of time, memory and output.

A chat template is a program that comes with a model. Loops, powers and formats have no limit in jinja's sandbox, and a
call into C cannot be interrupted, so only the system can end a template that takes too long.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS, WALL_SECONDS = 1.5, 10.0
"""Time of computing that a template may take, and time on the clock, for systems that cannot limit the former."""
BYTES = 512 * 10**6
"""Address space of the process, of which Python and jinja2 take about a tenth."""
CHARACTERS = 2**23
"""Maximal length of a rendered text."""
_EXCESS: Mapping[str, str] = {
    "seconds": f"takes more than {SECONDS:g} seconds",
    "bytes": f"takes more than {BYTES // 10**6} MB of memory",
    "characters": f"writes more than {CHARACTERS:,} characters",
    "recursion": "is nested or calls itself too deeply",
}


class TemplateError(ValueError):
    """Error of a chat template; the message begins with a verb, whose subject is the template."""


class LimitError(TemplateError):
    """Error of a chat template that exceeds a limit."""


class Renderer:
    """A process that renders chat templates; a request starts it, also after a template that exceeded a limit.

    A request is a line of JSON with the `template` and its `variables`; without these it asks for the names that the
    template reads. The answer has the `text` or the `names`, the `error` that the template raises, or the `excess`: the
    limit that it exceeds. All methods raise TemplateError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None
        self._owner = 0

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template."""
        return self._ask({"template": template, "variables": variables})["text"]

    def names(self, template: str) -> list[str]:
        """Return the names that a template reads without defining them."""
        return self._ask({"template": template})["names"]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        line = f"{json.dumps(request)}\n".encode()
        with self._lock:
            answer = self._answer(line)
        if "error" in answer:
            raise TemplateError(f"refuses the prompt: {_short(answer['error'])}")
        if "excess" in answer:
            raise LimitError(f"{_EXCESS[answer['excess']]}; use another template")
        return answer

    def _answer(self, line: bytes) -> dict[str, Any]:
        process, expired = self._running(), threading.Event()
        assert process.stdin is not None and process.stdout is not None

        def expire() -> None:
            expired.set()
            process.kill()

        watch = threading.Timer(WALL_SECONDS, expire)
        watch.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # an interruption leaves an answer that belongs to no request
            self._end()
            raise
        finally:
            watch.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self._end()
        if expired.is_set() or process.returncode == -getattr(signal, "SIGPROF", 0):
            return {"excess": "seconds"}
        raise LimitError(f"ends the process that renders it (exit code {process.returncode})")

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, after starting it if it has ended or belongs to the process that this was forked from."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            try:
                self._process = _start()
            except OSError as error:
                raise ValueError(f"no process can be started to render chat templates: {error}.") from None
            self._owner = os.getpid()
            self._end = weakref.finalize(self, _end, self._process, self._owner)
        return self._process


def _start() -> subprocess.Popen[bytes]:
    specs = (importlib.util.find_spec(name) for name in ("jinja2", "markupsafe"))
    places = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None]
    program = str(Path(__file__).with_name("template_worker.py"))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", program, *map(str, (SECONDS, BYTES, CHARACTERS)), *dict.fromkeys(places)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for this process
    )


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, unless this one was forked from its owner."""
    if os.getpid() != owner:
        return
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:  # of a request that was not written to its end
                continue
    process.wait()


def _short(message: str) -> str:
    """Return a message in one line of at most 300 characters."""
    line = " ".join(message.split()).rstrip(".")
    return line if len(line) <= 300 else f"{line[:297]}..."


@functools.cache
def renderer() -> Renderer:
    """Return the renderer that all models share."""
    return Renderer()
