"""Program of the process that renders chat templates; `kvjax.generation.templates` starts it.

It imports nothing of kvjax and so starts in a tenth of a second. Its arguments are a number of seconds, of bytes and of
characters that limit a template, and the directories of jinja2 and of what that imports.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import signal
import sys
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[4:]  # behind the standard library, which packages beside jinja2 may shadow

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks answers for training and renders its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse the block as a call of `content`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

    def content(self, caller: Any) -> str:
        """Render the content."""
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """A namespace without attributes that begin with an underscore, which the sandbox reserves."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *pairs = args
        attributes = dict(*pairs, **attributes)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def raise_exception(message: str) -> None:
    """Refuse the conversation."""
    raise jinja2.exceptions.TemplateError(message)


def strftime_now(form: str) -> str:
    """Format the local time."""
    return datetime.datetime.now().strftime(form)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON, without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def dictionary(*pairs: Any, **items: Any) -> dict[str, Any]:
    """Make a dictionary; the class itself has methods that templates need not reach."""
    return dict(*pairs, **items)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return an environment like that of transformers' `apply_chat_template`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    environment.globals.update(dict=dictionary, namespace=_Namespace)
    return environment


@functools.lru_cache(8)
def _compile(source: str) -> jinja2.Template:
    """Compile a template."""
    return _environment().from_string(source)


@functools.lru_cache(8)
def _names(source: str) -> list[str]:
    """Return the names that a template reads without defining them."""
    return sorted(jinja2.meta.find_undeclared_variables(_environment().parse(source)) - set(_environment().globals))


def _answer(request: dict[str, Any], characters: int) -> dict[str, Any]:
    """Render a template, or list its names; see `kvjax.generation.templates.Renderer`."""
    if "variables" not in request:
        return {"names": _names(request["template"])}
    pieces, length = list[str](), 0
    for piece in _compile(request["template"]).generate(request["variables"]):
        pieces.append(piece)
        length += len(piece)
        if length > characters:
            return {"excess": "characters"}
    return {"text": "".join(pieces)}


def answer_line(line: bytes, characters: int) -> str:
    """Answer a request in JSON; errors of the template are answers, too."""
    try:
        return json.dumps(_answer(json.loads(line), characters))
    except MemoryError:
        reply = {"excess": "bytes"}
    except RecursionError:
        reply = {"excess": "recursion"}
    except jinja2.TemplateSyntaxError as error:
        reply = {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # a template can raise any error
        reply = {"error": str(error)[:1000] or type(error).__name__}
    return json.dumps(reply)


def limit_memory(size: int) -> None:
    """Limit the address space of this process, where the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def limit_time(seconds: float) -> None:
    """Let the system end this process after some seconds of computing, where it can; 0 for no limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Answer lines until standard input ends."""
    seconds, size, characters = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limit_memory(size)
    for line in sys.stdin.buffer:
        limit_time(seconds)
        reply = answer_line(line, characters)
        limit_time(0)
        sys.stdout.buffer.write(f"{reply}\n".encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
