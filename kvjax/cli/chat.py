"""Talk to a model whose cache never grows: `kvjax chat`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from kvjax.cli import options as shared
from kvjax.cli.commands import Help, Parser, add_model_options, command, load_model, unreadable_input
from kvjax.cli.output import print_written
from kvjax.generation.chat import Conversation, check_devices
from kvjax.utils.files import expanded
from kvjax.utils.settings import whole_number
from kvjax.utils.suggest import choices

POLICY, BUDGET, WHOLE = "h2o", 512, "context"
"""Defaults: policy, budget, and what a fraction is of."""

HELP = """\
/new          forget the conversation and begin another one
/save NAME    keep the conversation in the directory NAME
/load NAME    go on with the one kept there
/help         show this
/quit         leave, as the end of the input does
Anything else is your turn. Ctrl-C stops an answer; the conversation goes on from what was written."""


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    options = Parser(
        prog="kvjax chat",
        description=(__doc__ or "").strip(),
        epilog=f"Each line of the input is a turn, or a command.\n{HELP}",
        add_help=False,
        formatter_class=_Help,
    )
    options.add_argument("-h", "--help", action="store_true", help="show this, or with --policy NAME its settings")
    add_model_options(options)
    options.add_argument("--system", metavar="TEXT", help="system prompt")
    shared.add_template_option(options)
    options.add_argument("--load", type=Path, metavar="NAME", help="continue a conversation saved in this directory")
    shared.add_policy_options(options, POLICY, BUDGET, WHOLE)
    shared.add_lossless_options(options)
    options.add_argument(
        "--context", type=int, help="planned tokens of the whole chat (default: the model's positions)"
    )
    options.add_argument("-n", "--max-new-tokens", type=int, default=256, help="maximum tokens of an answer")
    shared.add_sampling_options(options)
    shared.add_end_options(options)
    return options


class _Help(Help, argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps the line breaks of the list of commands."""


@contextlib.contextmanager
def _interruptions() -> Generator[Callable[[], bool]]:
    """Yield a function that returns whether an interruption came; only the second one raises.

    Interrupting a decode step would lose the cache.
    """
    signals: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    before = signal.signal(signal.SIGINT, record)
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """Interpreter of input lines, each a turn or a command of a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.commands: dict[str, Callable[[str], None]] = {
            "/new": lambda _: conversation.forget(),
            "/save": self._save,
            "/load": self._load,
            "/help": lambda _: print(HELP, file=sys.stderr),
        }

    def line(self, line: str) -> None:
        """Run a line: a command, or else a turn."""
        word, _, argument = line.strip().partition(" ")
        if word in self.commands:
            with _interruptions():  # a file that is half read or written would be of no use
                self.commands[word](argument.strip())
            return
        if word.startswith("/"):
            unknown = f"there is no command {word}; {choices(word, [*self.commands, '/quit'])}"
            if sys.stdin.isatty():
                raise ValueError(unknown)
            warnings.warn(f"{unknown} The line is read as a turn.", stacklevel=2)
        self._say(line)

    def _say(self, turn: str) -> None:
        with _interruptions() as interrupted:
            for piece in self.conversation.reply(turn):
                print(piece, end="", flush=True)
                if interrupted():
                    break
            print(flush=True)
            if interrupted():
                print("(stopped)", file=sys.stderr)
        self._show()

    def _show(self) -> None:
        use = self.conversation.use()
        counts = f"{use.tokens:,} tokens seen; {use.slots:,.0f} of {use.limit:,.0f} slots per head hold one"
        print(f"[{counts}; {use.bytes:,} bytes]", file=sys.stderr, flush=True)

    def _save(self, argument: str) -> None:
        directory = _name("/save", argument)
        self.conversation.save(directory)
        print_written(f"conversation of {self.conversation.use().tokens:,} tokens", directory)

    def _load(self, argument: str) -> None:
        self.conversation.load(_name("/load", argument))
        self._show()


def _name(command: str, argument: str) -> Path:
    if not argument:
        raise ValueError(f"{command} needs a name: {command} NAME.")
    return expanded(argument)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input, with a prompt if it is a terminal."""
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError("standard input is closed; a conversation needs turns.")
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # makes lines editable
    while True:
        try:
            line = input("> ") if typed else next(sys.stdin).removesuffix("\n").removeprefix("\ufeff")
        except (EOFError, StopIteration):
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print("\n(/quit leaves)", file=sys.stderr)  # Ctrl-C may come right after an answer
            continue
        except UnicodeDecodeError as error:
            raise unreadable_input(error) from None
        yield line


def run(options: argparse.Namespace) -> None:
    """Run the command line."""
    if shared.print_policy_help(options, parser):
        return
    from kvjax.models.sharding import parse_mesh

    policy, reading = shared.policy_and_budget(options, POLICY, BUDGET, WHOLE)
    settings: dict[str, Any] = dict(policy=policy, **reading, **shared.sampling_settings(options))
    settings |= shared.lossless_settings(options)
    settings["max_new_tokens"] = whole_number("max_new_tokens", options.max_new_tokens)
    settings["chat"] = shared.template_settings_of(options) or None
    if options.mesh is not None:
        check_devices(parse_mesh(options.mesh).shape["data"])
    model = load_model(options)
    shared.tell_sampling_defaults("chat", model, settings)
    chat = Chat(Conversation(model, system=options.system, context=options.context, **settings))
    if options.load is not None:
        chat.line(f"/load {options.load}")
    for line in _lines():
        if not line.strip():
            continue
        if line.split()[0] == "/quit":
            return
        try:
            chat.line(line)
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError) or not sys.stdin.isatty():
                raise
            print(" ".join(str(error).split()), file=sys.stderr)


main = command("chat", parser, run)
"""Run the command line and return its exit code."""
