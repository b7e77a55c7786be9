"""Files of prompts and of questions, and their results as lines of JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.cli.commands import load_model
from kvjax.cli.options import tell_sampling_defaults
from kvjax.cli.output import Totals, samples, text_fields
from kvjax.generation.generate import Generation, check_room, generate_ids
from kvjax.generation.prompts import encode
from kvjax.generation.questions import answer, encode_questions
from kvjax.generation.sampling import defaults_in_force
from kvjax.inference.padding import bucket_rows
from kvjax.inference.prepare import prepare
from kvjax.model import Model
from kvjax.utils import files
from kvjax.utils.progress import Bar
from kvjax.utils.settings import Chat, Messages, conversation

BATCH_SIZE = 8
"""Lines per batch, unless an option sets it."""


class Line(NamedTuple):
    """A line of a file of prompts or questions."""

    number: int
    prompt: str | Messages
    fields: dict[str, Any]
    """Fields that the result repeats: the `id`, if there is one, or the question."""


def read_prompt_lines(file: Path) -> list[Line]:
    """Read lines of JSON with a `prompt` or `messages`, and optionally an `id`; skip empty lines."""

    def prompt(value: Any) -> tuple[str | Messages, dict[str, Any]]:
        keys = set(value) if isinstance(value, dict) else set[str]()
        if keys - {"id"} not in ({"prompt"}, {"messages"}) or not isinstance(value.get("prompt", ""), str):
            raise ValueError('it is not of the form {"prompt": "..."} or {"messages": [...]}, with an "id" or without.')
        fields = {"id": value["id"]} if "id" in keys else {}
        return value["prompt"] if "prompt" in keys else conversation(value["messages"]), fields

    return [Line(number, *read) for number, read in files.read_lines(file, lambda text: prompt(files.parse_json(text)))]


def read_question_lines(file: Path) -> list[Line]:
    """Read one question per line, or {"question": "..."} from a JSON Lines file; skip empty lines."""

    def question(text: str) -> tuple[str, dict[str, Any]]:
        value = files.parse_json(text) if file.suffix == files.JSON_LINES else {"question": text}
        question_text = value.get("question") if isinstance(value, dict) and set(value) == {"question"} else None
        if not isinstance(question_text, str) or not question_text.strip():
            raise ValueError('it is not of the form {"question": "..."}.')
        return question_text, {"question": question_text}

    return [Line(number, *read) for number, read in files.read_lines(file, question)]


class Results:
    """Results as lines of JSON, on standard output or in a file that appears only once it is complete.

    Until then a hidden file beside it keeps the finished lines, and the same run resumes from there.

    Args:
        file: None for standard output. A finished file has a hidden file beside it that identifies its run. The same
            run leaves it unchanged; any other run raises an error.
        run: everything that determines the results, JSON-serializable.
    """

    def __init__(self, file: Path | None, run: Any, numbers: Sequence[int]) -> None:
        self.file, self.numbers = file, sorted(numbers)
        self.done: dict[int, str] = {}
        """Finished lines by their number."""
        self._printed = 0
        if file is None:
            return
        files.check_writable(file, files.JSON_LINES)
        self._run = hashlib.sha256(json.dumps(run, sort_keys=True, default=str).encode()).hexdigest()
        self._aside, self._run_file = (file.with_name(f".{file.name}.{word}") for word in ("begun", "run"))
        if file.exists():
            files.check_regular(file)
            content = file.read_bytes()
            if not self._run_file.exists() or self._run_file.read_text(encoding="utf-8") != self._note(content):
                raise ValueError(f"{file} exists and is not of this run; name another file, or delete it.")
            lines, count = content.decode().splitlines(), "all"
        elif self._aside.exists():
            # The last line is truncated or empty.
            header, *lines = files.read_text(self._aside).split("\n")[:-1] or [""]
            if header != json.dumps({"run": self._run}):
                raise ValueError(
                    f"{self._aside} has the beginning of a run with other prompts or settings; go on with those, or "
                    "delete it to begin anew."
                )
            count = len(lines)
        else:
            return
        with files.damage_named(f"{self._aside} is damaged ({{reason}}); delete it to begin anew."):
            self.done = {json.loads(line)["line"]: line for line in lines}
        print(f"{file}: {count} of {len(numbers)} lines are already done.", file=sys.stderr)

    def _note(self, content: bytes) -> str:
        """Return a record that identifies a finished file and its run."""
        return json.dumps({"run": self._run, "file": hashlib.sha256(content).hexdigest()})

    def __enter__(self) -> Results:
        if self.file is not None:
            # Rewrite the file: its last line may be truncated.
            lines = [json.dumps({"run": self._run}), *self.done.values()]
            files.write_text(self._aside, "".join(f"{line}\n" for line in lines))
        self._bar = Bar("lines", len(self.numbers), len(self.done)).__enter__()
        if len(self.done) < len(self.numbers):
            self._bar.update(len(self.done), "lines")
        return self

    def write(self, number: int, result: dict[str, Any]) -> None:
        """Write the result of a line."""
        text = self.done[number] = json.dumps({"line": number} | result)
        if self.file is None:
            self._print()
        else:
            files.append_line(self._aside, text)

    def show(self, speed: str) -> None:
        """Show how many lines are done, and the speed so far."""
        self._bar.update(len(self.done), f"lines, {speed}")

    def _print(self, skip_unfinished: bool = False) -> None:
        """Print finished lines in file order up to the first unfinished one, or with `skip_unfinished` all."""
        for number in self.numbers[self._printed :]:
            if number not in self.done and not skip_unfinished:
                return
            self._printed += 1
            if number in self.done:
                print(self.done[number], flush=True)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._bar.__exit__(None, None, None)
        if self.file is None:
            if error is not BrokenPipeError:
                self._print(skip_unfinished=True)
            return
        if error is None:
            content = "".join(f"{self.done[number]}\n" for number in sorted(self.done))
            files.write_text(self._run_file, self._note(content.encode()))
            files.write_text(self.file, content)
        if error is None or not self.done:
            self._aside.unlink()


def _start(
    options: argparse.Namespace, settings: dict[str, Any], file: Path, lines: Sequence[Line], prompt: Any = None
) -> tuple[Results, Model]:
    """Return the results of a command line, which resume an interrupted run of the same one, and the model."""
    model = load_model(options)
    run = {name: value for name, value in vars(options).items() if name not in ("out", "batch_size", "json")}
    content = hashlib.sha256(file.read_bytes()).hexdigest()
    identity: dict[str, Any] = {"content": content, "prompt": prompt, "run": run}
    if options.beams == 1 and (values := defaults_in_force(model.sampling_defaults, settings)):
        tell_sampling_defaults("generate", model, settings)
        identity["sampling"] = values
    return Results(options.out, identity, [line.number for line in lines]), model


def _result_fields(model: Model, generation: Generation, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each line's result."""
    texts, count = text_fields(model, generation, settings["stop"]), settings["num_samples"]
    return [samples(texts[start : start + count]) for start in range(0, len(texts), count)]


def continue_lines(options: argparse.Namespace, settings: dict[str, Any], chat: Chat) -> None:
    """Continue each prompt of `--prompt-file`, in batches of similar length."""
    file, size = options.prompt_file, options.batch_size or BATCH_SIZE
    lines = read_prompt_lines(file)
    results, model = _start(options, settings, file, lines)
    prefill_settings: dict[str, Any] = {name: settings[name] for name in ("budget", "budget_of", "max_new_tokens")}
    prefill_settings |= {"chunk": settings["prefill_chunk"], "lengths": None, "key": None, "plan": None}
    rows = bucket_rows(1, model.mesh)  # rows of a batch with this line alone

    def ids_of(line: Line) -> list[int]:
        prompt, policy = encode(model, line.prompt, chat, options.system), settings["policy"]
        check_room(len(prompt), settings["max_new_tokens"], policy, model)
        prepare(model, policy, [prompt] * rows, **prefill_settings)
        return prompt

    encoded = [(line, files.of_line(file, line.number, lambda line=line: ids_of(line))) for line in lines]
    queue = sorted((pair for pair in encoded if pair[0].number not in results.done), key=lambda pair: len(pair[1]))
    totals = Totals()
    # Turns end on other tokens than plain texts, so a batch never mixes them.
    with results:
        for turn in (False, True):
            pairs = [pair for pair in queue if turn == (bool(chat) or not isinstance(pair[0].prompt, str))]
            for start in range(0, len(pairs), size):
                batch = pairs[start : start + size]
                generation = generate_ids(model, [ids for _, ids in batch], chat=turn, **settings)
                totals.add(generation, len(batch))
                for (line, _), fields in zip(batch, _result_fields(model, generation, settings), strict=True):
                    results.write(line.number, line.fields | fields)
                results.show(totals.speed)
    _print_summary(totals, options.out)


def answer_lines(options: argparse.Namespace, settings: dict[str, Any], chat: Chat, prompt: str | Messages) -> None:
    """Answer each question of `--questions` about one prompt, which is read once; see `continue_lines`."""
    lines = read_question_lines(options.questions)
    results, model = _start(options, settings, options.questions, lines, prompt)
    before, question_ids = encode_questions(model, prompt, [str(line.prompt) for line in lines], chat, options.system)
    queue = [(line, ids) for line, ids in zip(lines, question_ids, strict=True) if line.number not in results.done]
    longest, totals = max(map(len, question_ids)), Totals()

    def batches() -> Iterator[list[tuple[Line, dict[str, Any]]]]:
        """Yield the lines of each batch with their results."""
        questions, turn = [ids for _, ids in queue], bool(chat) or not isinstance(prompt, str)
        keywords: dict[str, Any] = settings | {"chat": turn, "batch_size": options.batch_size or BATCH_SIZE}
        for generation in answer(model, before, questions, longest=longest, **keywords) if queue else ():
            results_of_lines, done = _result_fields(model, generation, settings), totals.lines
            totals.add(generation, len(results_of_lines))
            yield [(line, fields) for (line, _), fields in zip(queue[done:], results_of_lines, strict=False)]

    if options.json or options.out is not None:
        with results:
            for batch in batches():
                for line, fields in batch:
                    results.write(line.number, line.fields | fields)
                results.show(totals.speed)
    else:
        with Bar("questions", len(queue)) as bar:
            bar.update(0, "questions")
            for batch in batches():
                for line, fields in batch:
                    print(f"--- {str(line.prompt).strip()}")
                    for sample in fields.get("samples", [fields]):
                        print(sample["text"], flush=True)
                bar.update(totals.lines, f"questions, {totals.speed}")
    _print_summary(totals, options.out)


def _print_summary(totals: Totals, file: Path | None) -> None:
    """Print the summary of a run, unless another one had done all lines."""
    if totals.lines:
        print(totals.summary(file), file=sys.stderr)
