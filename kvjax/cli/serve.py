"""Serve OpenAI's API over HTTP, with caches that never grow."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from kvjax.cli import options as shared
from kvjax.cli.commands import Parser, add_model_options, command, leave, load_model
from kvjax.serving.requests import CHUNK, SIZES, SNAPSHOT_BYTES, STEPS
from kvjax.utils.compilation import Compiling
from kvjax.utils.files import read_text
from kvjax.utils.progress import time_left
from kvjax.utils.settings import whole_number

NEEDS = ("prometheus_client", "starlette", "uvicorn")
"""Packages that the extra `kvjax[serve]` installs."""
POLICY, BUDGET = "h2o", 512
"""Default policy and budget."""


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    options = Parser(prog="kvjax serve", description=__doc__)
    add_model_options(options, processes=False)
    options.add_argument("--distributed", dest="processes", nargs="?", const="", help=argparse.SUPPRESS)
    options.add_argument("--name", help="name of the model in the API (default: that of --model)")
    shared.add_policy(options, POLICY)
    options.add_argument("--budget", type=int, help=f"slots per head of each row (default: {BUDGET})")
    options.add_argument(
        "--lossless",
        action="store_true",
        help="write the full cache's texts: the policy drafts them on its budget, and rows keep the full cache, too",
    )
    shared.add_verifier(options)
    options.add_argument(
        "--draft-tokens", type=int, metavar="N", help="tokens to draft before they are verified, 1 to 16 (default: 4)"
    )
    shared.add_refresh_option(options)
    options.add_argument("--rows", type=int, default=8, help="texts that are generated in parallel")
    options.add_argument("--context", type=int, help="maximum tokens of a text (default: the model's positions)")
    options.add_argument("--chunk", type=int, help=f"prompt tokens per chunk of prefill (default: {CHUNK})")
    options.add_argument("--steps", type=int, help=f"maximum tokens per row and dispatch (default: {STEPS})")
    options.add_argument("--queue", type=int, default=64, help="maximum waiting requests; others get status 429")
    options.add_argument(
        "--snapshot-bytes",
        type=int,
        help=f"bytes for cached prompt prefixes, 0 for none (default: {SNAPSHOT_BYTES})",
    )
    options.add_argument(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile all programs before the first request, not when requests need them (default: yes)",
    )
    shared.add_sampling_options(options, 1.0, "; requests may give their own")
    options.add_argument("--chat-tokens", type=int, default=512, help="maximum tokens of a chat answer, by default")
    options.add_argument("--host", default="127.0.0.1", help="address to listen on")
    options.add_argument("--port", type=int, default=8000, help="port to listen on; 0 for any free port")
    options.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        type=_origin,
        help="origin that CORS allows, such as https://example.org, or * for any; may be repeated",
    )
    options.add_argument("--quiet", action="store_true", help="do not log requests")
    key = options.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the accepted API keys, one per line")
    key.add_argument("--no-key", action="store_true", help="accept every client on a public address")
    options.add_argument("--max-body", type=int, default=4 * 2**20, metavar="BYTES", help="maximum size of a request")
    for name, what in (
        ("grace", "running requests at shutdown"),
        ("read-timeout", "a request to arrive"),
        ("write-timeout", "a client to accept data"),
    ):
        options.add_argument(f"--{name}", type=float, default=30.0, metavar="SECONDS", help=f"time for {what}")
    return options


def _origin(text: str) -> str:
    """Check an origin and return it."""
    if text != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no origin such as https://example.org, without a path, nor *")
    return text


def run(options: argparse.Namespace) -> None:
    """Run the server until a signal ends it; an interruption is raised again once running requests have ended."""
    if shared.print_policy_help(options, parser):
        return
    _check(options)
    from kvjax.inference.speculation import MOST_DRAFT_TOKENS
    from kvjax.serving.app import Server, Service, is_loopback
    from kvjax.serving.engine import Engine

    policy, config = shared.policy_and_config(options, POLICY)
    budget = config.get("budget", BUDGET) if options.budget is None else options.budget
    if type(budget) is not int:
        raise ValueError(
            f"budget={budget} of config {options.config} is no number of slots, which rows of any text have; give "
            "--budget SLOTS."
        )
    whole_number("budget", budget)
    if options.chunk is None:
        options.chunk = config.get("prefill_chunk")
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    for name, size in sizes.items():
        whole_number(name, size, *SIZES[name])
    lossless = shared.lossless_settings(options)
    whole_number("draft_tokens", lossless.get("draft_tokens", 1), 1, MOST_DRAFT_TOKENS)
    sampling, file = shared.user_sampling(options), options.api_key_file
    keys = [] if file is None else [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if file is not None and not keys:
        raise ValueError(f"{file} has no key; write one, or several on a line each.")
    # The port is bound before a model is loaded, in case it is taken.
    with _bind(options.host, options.port) as listener, _ends_at_sigterm():
        host, port = listener.getsockname()[:2]
        public = not is_loopback(host)
        if public and not keys and not options.no_key:
            raise ValueError(
                f"{options.host} is not a loopback address; give --api-key-file FILE, or --no-key to accept all."
            )
        hosts = None if public or keys else [options.host]
        _say(f"loading {options.model}")
        model = load_model(options)
        model.name = options.name or model.name
        shared.tell_sampling_defaults("serve", model, sampling)
        model.sampling_defaults = model.sampling_defaults.replaced(sampling)
        sizes |= {"rows": options.rows, "queue": options.queue}
        with Compiling() as compiling, Engine(model, policy=policy, budget=budget, **sizes, **lossless) as engine:
            if options.warmup:
                getattr(model.tokenizer, "chat_template", None)  # imports transformers now, before the first chat
                engine.warm_up(_progress(compiling))
            settings = options.max_body, options.chat_tokens, options.read_timeout
            service = Service(engine, keys, hosts, *settings, origins=options.cors, log=not options.quiet)
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            on = "" if model.mesh is None else f" on {model.mesh.size} devices"
            drafts = f", which drafts for {options.verifier or 'the full cache'}" if options.lossless else ""
            what = f"{model.name} under {engine.policy_name} with {engine.budget} slots{on}{drafts}"
            server = Server(service, options.grace, options.write_timeout, lambda: _say(f"{what} is ready at {url}"))
            server.run([listener])
        if server.interrupted:
            raise KeyboardInterrupt


def _check(options: argparse.Namespace) -> None:
    """Refuse options that no server can have, and name the packages that are missing."""
    if options.processes is not None:
        raise ValueError(
            "requests reach only one of several processes, so the others could not join its programs; leave "
            "--distributed out, and start a server on each host, or one with a --mesh of its host's devices."
        )
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}; install it with pip install 'kvjax[serve]'.")
    for name in ("rows", "queue", "chat_tokens", "max_body"):
        whole_number(name, getattr(options, name))
    whole_number("port", options.port, 0, 65_535)
    for name, minimum in (("grace", 0.0), ("read_timeout", 0.001), ("write_timeout", 0.001)):
        if not minimum <= getattr(options, name) <= 86_400:
            raise ValueError(f"{name}={getattr(options, name)} is not a number of seconds up to a day.")


@contextlib.contextmanager
def _ends_at_sigterm() -> Generator[None]:
    """Exit immediately with code 0 at SIGTERM, while no requests are running that could be drained."""
    if threading.current_thread() is not threading.main_thread():  # only that one can handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: leave(0, at_once=True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _progress(compiling: Compiling) -> Callable[[int, int], None]:
    """Return a function that prints how many programs of all are there, and the time left."""
    began = time.monotonic()

    def tell(done: int, total: int) -> None:
        reads = compiling.read > 0 and compiling.read >= compiling.programs
        action = f"reading {done} of {total} programs from disk" if reads else f"compiling {done} of {total} programs"
        _say(f"{action}{time_left(done, total - done, time.monotonic() - began)}")

    return tell


def _say(line: str) -> None:
    """Print a progress line to standard error."""
    print(f"kvjax serve: {line}", file=sys.stderr, flush=True)


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ValueError(f"there is no address {host!r} to listen on: {error.strerror}.") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port.") from None
    return listener


main = command("serve", parser, run)
"""Run the command line and return its exit code."""
