"""Files that are whole or not there, and texts that are read with a clear refusal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

from kvjax.utils.processes import writes

JSON_LINES = ".jsonl"
Read = TypeVar("Read")


@contextlib.contextmanager
def written_aside(file: Path) -> Generator[Path]:
    """A path to write to, which takes the file's name once everything has been written.

    Of the processes of a run only the first one's does.
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
    """Give an empty directory to write to, which takes the name of another once everything has been written.

    It has one name, so that what a killed process left is written over by the next. On Windows no directory takes the
    place of another: one that is there steps aside before, and is found again where the process is killed in between.

    Args:
        directory: is replaced where it is there.
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
    """Give a directory back its name that a process was killed before replacing."""
    before = directory.with_name(f".{directory.name}.before")
    if before.exists() and not directory.exists():
        before.replace(directory)
    shutil.rmtree(before, ignore_errors=True)


def read_text(file: Path) -> str:
    """A UTF-8 file's content, without a byte order mark.

    Raises:
        ValueError: there is none, or it is not UTF-8.
    """
    if not file.is_file():
        raise ValueError(f"{file} is not a file; give a text file.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text; save it in that encoding.") from None


def read_lines(file: Path, read: Callable[[str], Read]) -> list[tuple[int, Read]]:
    """The lines of a file that are not empty: their numbers from 1, and what a function makes of them.

    Raises:
        ValueError: there is no such line, or the function refuses one, said with its number.
    """
    found: list[tuple[int, Read]] = []
    for number, text in enumerate(read_text(file).split("\n"), 1):
        if text.strip():
            found.append((number, of_line(file, number, lambda text=text: read(text.removesuffix("\r")))))
    if not found:
        raise ValueError(f"{file} has no line; give at least one.")
    return found


def of_line(file: Path, number: int, do: Callable[[], Read]) -> Read:
    """What a function makes of a line of a file.

    Raises:
        ValueError: what it raises, with the line's number.
    """
    try:
        return do()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}, line {number}: {error}") from error


def parse_json(text: str) -> Any:
    """What a text of JSON says.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}.") from None


def check_writable(file: Path, ending: str) -> None:
    """Refuse a file that could not be written, before the work that it is to hold.

    Raises:
        ValueError: its name does not end so, or its directory is not there or not writable.
    """
    directory = file.absolute().parent
    if file.suffix != ending or not directory.is_dir():
        raise ValueError(f"{file} is not a {ending} file in an existing directory.")
    if file.is_dir() or not os.access(directory, os.W_OK):
        raise ValueError(f"{file} cannot be written; give a file in a directory that you may write to.")


def append_line(file: Path, line: str) -> None:
    """One more line of a text file, on disk when this returns; by the first process of a run alone."""
    if not writes():
        return
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")
        stream.flush()
        os.fsync(stream.fileno())


def write_text(file: Path, content: str) -> None:
    """A text file, written aside and then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside:
        aside.write_text(content, encoding="utf-8")
