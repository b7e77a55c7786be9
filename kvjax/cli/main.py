"""Console script: `kvjax NAME ...` runs the module of the command NAME."""

from __future__ import annotations

import importlib
import sys

from kvjax.cli.commands import BROKEN_PIPE, INTERRUPTED, configure_streams, exit_on_interrupt, leave, module_exists
from kvjax.utils.compilation import version
from kvjax.utils.modes import on_the_host
from kvjax.utils.suggest import choices

COMMANDS = {
    "generate": ("kvjax.generate", "continue prompts on a KV cache of fixed budget"),
    "chat": ("kvjax.cli.chat", "chat, with a cache that never grows"),
    "serve": ("kvjax.cli.serve", "serve OpenAI's API over HTTP"),
    "bench": ("kvjax.cli.bench", "measure speed and memory of policies and budgets"),
    "evaluate": ("kvjax.cli.evaluate", "measure the loss of quality under policies and budgets"),
    "tune": ("kvjax.cli.tune", "benchmark kernels on this machine's GPU and cache the fastest"),
    "convert": ("kvjax.cli.convert", "write a model as an Orbax checkpoint"),
    "train_less": ("kvjax.cli.train_less", "train LESS kernels for a model and a policy"),
    "calibrate": ("kvjax.cli.calibrate", "average a model's queries over a text, for triattention"),
    "env": ("kvjax.cli.env", "print versions, devices and caches, for an issue"),
    "train_tiny": ("experiments.tiny.train", "train the embedded model"),
}
"""Module whose `main(argv) -> int` a subcommand runs, and its line in the listing, by name."""


@on_the_host
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
        lines = "\n".join(f"  {name:<{max(map(len, commands))}}  {summary}" for name, (_, summary) in commands.items())
        hint = "kvjax COMMAND --help lists the settings of one command, kvjax --version says which kvjax this is."
        print(f"usage: kvjax COMMAND ...\n\n{lines}\n\n{hint}")
        return 0
    if words[0] == "--version":
        print(f"kvjax {version()}")
        return 0
    name = words[0].replace("-", "_")
    if name in commands:
        return importlib.import_module(commands[name][0]).main(words[1:])
    print(f"kvjax has no command {words[0]!r}: {choices(words[0], commands)}", file=sys.stderr)
    return 2


def available() -> dict[str, tuple[str, str]]:
    """Return the commands whose modules exist, without importing them."""
    return {name: command for name, command in COMMANDS.items() if module_exists(command[0])}
