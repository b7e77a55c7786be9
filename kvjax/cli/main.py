"""Console script: `kvjax NAME ...` runs the module of the command NAME."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from kvjax.cli.commands import BROKEN_PIPE, INTERRUPTED, configure_streams, exit_on_interrupt, leave, module_exists
from kvjax.utils.compilation import version
from kvjax.utils.suggest import choices


class Command(NamedTuple):
    """A subcommand: the module whose `main(argv) -> int` it runs, and one line for the listing."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("generate", "kvjax.generate", "continue prompts on a KV cache of fixed budget"),
    Command("chat", "kvjax.cli.chat", "chat, with a cache that never grows"),
    Command("serve", "kvjax.cli.serve", "serve OpenAI's API over HTTP"),
    Command("bench", "kvjax.cli.bench", "measure speed and memory of policies and budgets"),
    Command("evaluate", "kvjax.cli.evaluate", "measure the loss of quality under policies and budgets"),
    Command("tune", "kvjax.cli.tune", "benchmark kernels on this machine's GPU and cache the fastest"),
    Command("convert", "kvjax.cli.convert", "write a model as an Orbax checkpoint"),
    Command("train_less", "kvjax.cli.train_less", "train LESS kernels for a model and a policy"),
    Command("calibrate", "kvjax.cli.calibrate", "average a model's queries over a text, for triattention"),
    Command("env", "kvjax.cli.env", "print versions, devices and caches, for an issue"),
    Command("train_tiny", "experiments.tiny.train", "train the embedded model"),
)


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, or list all of them.

    Args:
        argv: the words after `kvjax`; None for those of the process, which then exits.

    Returns:
        The exit code: the subcommand's own, or one of `finish`.
    """
    configure_streams()
    if argv is None:
        exit_on_interrupt()
        leave(main(sys.argv[1:]))

    try:
        return _run(argv)
    except KeyboardInterrupt:  # while a command's modules are imported
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE


def _run(words: list[str]) -> int:
    commands = available()
    if not words or words[0] in ("-h", "--help"):
        print(listing(commands))
        return 0
    if words[0] == "--version":
        print(f"kvjax {version()}")
        return 0
    for command in commands:
        if command.name == words[0].replace("-", "_"):
            return importlib.import_module(command.module).main(words[1:])
    names = [command.name for command in commands]
    print(f"kvjax has no command {words[0]!r}: {choices(words[0], names)}", file=sys.stderr)
    return 2


def available() -> tuple[Command, ...]:
    """Return the commands whose modules exist, without importing them."""
    return tuple(command for command in COMMANDS if module_exists(command.module))


def listing(commands: tuple[Command, ...]) -> str:
    """Return the usage and one line per command."""
    width = max((len(command.name) for command in commands), default=0)
    lines = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in commands)
    rest = "kvjax COMMAND --help lists the settings of one command, kvjax --version says which kvjax this is."
    return f"usage: kvjax COMMAND ...\n\n{lines}\n\n{rest}"
