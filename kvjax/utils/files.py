"""Atomic writing of files, and reading of files and arrays that may be damaged with clear errors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from kvjax.utils.processes import writes

JSON_LINES = ".jsonl"
MOST_JSON = 256 * 2**20
"""Maximal bytes of a file of settings; those of the largest vocabularies take an eighth."""
_KINDS: Mapping[int, str] = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
Read = TypeVar("Read")


@contextlib.contextmanager
def written_aside(file: Path) -> Generator[Path]:
    """Give a path to write to, and rename it to `file` if the block succeeds.

    In a run of several processes, only the first one renames its path.
    """
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield aside
        if writes():
            aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def directory_aside(directory: Path) -> Generator[Path]:
    """Give an empty directory to write to, and rename it to `directory` if the block succeeds.

    Its name is fixed: the next process overwrites the remains of a killed one. Windows cannot rename a directory over
    another, so an existing one is renamed first. If the process is killed in between, `recover_directory` restores it.
    """
    aside, before = (directory.with_name(f".{directory.name}.{word}") for word in ("writing", "before"))
    recover_directory(directory)
    shutil.rmtree(aside, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside.mkdir()
    try:
        yield aside
        if directory.exists():
            directory.replace(before)
        aside.replace(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)


def recover_directory(directory: Path) -> None:
    """Restore a directory's name after a process was killed while replacing it."""
    before = directory.with_name(f".{directory.name}.before")
    if before.exists() and not directory.exists():
        before.replace(directory)
    shutil.rmtree(before, ignore_errors=True)


def expanded(path: str | Path) -> Path:
    """Replace a leading `~` or `~USER` of a path by that user's home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{path} begins with the home of an unknown user; write the directory instead.") from None


def check_regular(file: Path, error: type[ValueError] = ValueError) -> None:
    """Refuse a missing file, a directory, and a pipe, socket or device, of which a read may never end."""
    try:
        kind = stat.S_IFMT(file.stat().st_mode)
    except OSError as reason:
        raise error(f"{file} cannot be read: {reason.strerror}.") from None
    if kind != stat.S_IFREG:
        raise error(f"{file} cannot be read: it is {_KINDS.get(kind, 'something else')}, not a file.")


def check_tree(directory: Path, error: type[ValueError] = ValueError) -> None:
    """Refuse a directory that contains anything but regular files and directories."""
    for path in directory.rglob("*"):
        if not path.is_dir():
            check_regular(path, error)


@contextlib.contextmanager
def damage_named(sentence: str, kind: type[ValueError] = ValueError) -> Generator[None]:
    """Raise any error of a library that reads a file as a `kind`, with the error in place of `{reason}`.

    Libraries raise errors of many types for damaged files. Those in Rust may panic, which Python gets as an error that
    is no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        text = " ".join(str(error).split())[:200].rstrip(".")
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise kind(sentence.replace("{reason}", reason)) from error


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library in Rust; its class cannot be imported."""
    return type(error).__name__ == "PanicException"


def read_text(file: Path) -> str:
    """Read a UTF-8 file, without its byte order mark; raise a ValueError if there is no such text."""
    if not file.is_file():
        raise ValueError(f"{file} is not a file; give a text file.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text; save it in that encoding.") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None
    except MemoryError:
        raise ValueError(f"{file} does not fit in memory; give a smaller file.") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file of settings; raise a ValueError that names the file if there is none."""
    check_regular(file)
    if file.stat().st_size > MOST_JSON:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, more than the {MOST_JSON} of any file of settings.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and numbers of thousands of digits
        raise ValueError(f"{file} is not valid JSON: {error}; copy or download it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def check_not_empty(files: Iterable[Path]) -> None:
    """Refuse files without text."""
    for file in files:
        if not read_text(file).strip():
            raise ValueError(f"{file} is empty; give a file with text.")


def read_lines(file: Path, read: Callable[[str], Read]) -> list[tuple[int, Read]]:
    """Read the lines of a file that are not blank: return their numbers from 1, and the results of `read`.

    An error of `read` gets the line's number.
    """
    results: list[tuple[int, Read]] = []
    for number, text in enumerate(read_text(file).split("\n"), 1):
        if text.strip():
            results.append((number, of_line(file, number, lambda text=text: read(text.removesuffix("\r")))))
    if not results:
        raise ValueError(f"{file} has no line; give at least one.")
    return results


def of_line(file: Path, number: int, do: Callable[[], Read]) -> Read:
    """Call a function that reads a line of a file, and add the line's number to its errors."""
    try:
        return do()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}, line {number}: {error}") from error


def parse_json(text: str | bytes, what: str = "it") -> Any:
    """Parse JSON; raise a ValueError for a text or numbers that are not JSON, or that are nested too deeply."""

    def constant(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON")

    try:
        return json.loads(text, parse_constant=constant)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        reason = f"{error.msg} at {line}column {error.colno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = " ".join(str(error).split())
    raise ValueError(f"{what} is not JSON: {reason}.")


def check_writable(file: Path, ending: str) -> None:
    """Refuse a file that could not be written, or that has another ending, before its content is computed."""
    directory = file.absolute().parent
    if file.suffix != ending or not directory.is_dir():
        raise ValueError(f"{file} is not a {ending} file in an existing directory.")
    if file.is_dir() or not os.access(directory, os.W_OK):
        raise ValueError(f"{file} cannot be written; give a file in a directory that you may write to.")


def output_directory(text: str) -> Path:
    """Parse the directory of a command's results, as a `type` of `argparse`; it may be missing but must be writable."""
    path = Path(text)
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"{place} is a file; name a directory.")
    if not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{place} is not a directory that you may write to; name another one.")
    return path


def output_file(text: str) -> Path:
    """Parse a file that a command writes, as a `type` of `argparse`; its directory may be missing."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory; name a file.")
    return output_directory(str(Path(text).parent)) / Path(text).name


def file_name(text: str) -> str:
    """Parse the name of files in a directory that another option gives, as a `type` of `argparse`."""
    if text in ("", ".", "..") or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name without directories.")
    return text


def append_line(file: Path, line: str) -> None:
    """Append a line to a text file and wait until it is on disk; only the first process of a run writes."""
    if not writes():
        return
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")
        stream.flush()
        os.fsync(stream.fileno())


def write_text(file: Path, content: str) -> None:
    """Write a text file to a temporary name and rename it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside:
        aside.write_text(content, encoding="utf-8")


def restore_arrays(directory: Path, like: Any, sentence: str) -> Any:
    """Restore a tree of arrays into host memory.

    Arrays are read one after the other. If one fails while others are being read, threads of Orbax print errors.

    Args:
        like: tree of the arrays' shapes and dtypes.
        sentence: error for a damaged checkpoint, with `{reason}`; see `damage_named`.
    """
    import orbax.checkpoint as ocp

    check_tree(directory)
    leaves, structure = jax.tree.flatten(like)
    arrays: list[np.ndarray] = []
    with damage_named(sentence), ocp.PyTreeCheckpointer() as checkpointer:
        for index, leaf in enumerate(leaves):
            chosen: list[Any] = [ocp.PLACEHOLDER] * len(leaves)
            chosen[index] = 0
            arguments = ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
            read = ocp.args.PyTreeRestore(
                item=structure.unflatten(chosen), restore_args=structure.unflatten([arguments] * len(leaves))
            )
            array = jax.tree.leaves(checkpointer.restore(directory.absolute(), args=read))[index]
            if array.shape != leaf.shape:
                raise ValueError(f"an array has shape {list(array.shape)}, not {list(leaf.shape)}")
            arrays.append(array)
    return structure.unflatten(arrays)
