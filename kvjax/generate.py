"""Continue prompts on a fixed KV budget: `python -m kvjax.generate`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax import policies
from kvjax.commands import Help, finish, leave
from kvjax.compilation import enable_compilation_cache
from kvjax.engine.prepare import WHOLES, prepare
from kvjax.engine.state import allocated_slots, cache_bytes, full_cache_bytes, slot_limits
from kvjax.files import read_text
from kvjax.options import (
    add_policy_options,
    add_sampling_options,
    chosen,
    explain_policy,
    list_policies,
    sampling_settings,
)
from kvjax.policies.fastgen import Profiled
from kvjax.policies.policy import Policy
from kvjax.prompt_files import JSON_LINES, Line, Results, of_line, read_prompts, read_questions
from kvjax.sampling.prompts import encode
from kvjax.sampling.questions import answer, encode_questions
from kvjax.sampling.texts import Generation, Stream, check_beams, check_room, generate_ids, texts_of
from kvjax.settings import Messages, conversation, whole_number

if TYPE_CHECKING:
    from kvjax.model import Model


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = argparse.ArgumentParser(
        prog="kvjax generate",
        description=__doc__,
        epilog="kvjax generate --policy NAME --help shows the settings of one policy.",
        allow_abbrev=False,
        add_help=False,
        formatter_class=Help,
    )
    options.add_argument("-h", "--help", action="store_true", help="show this, or with --policy NAME its settings")
    options.add_argument("--model", default="tiny", help="tiny (embedded), a directory, or a hub id")
    source = options.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; standard input if no other source is given")
    source.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='a file with the text to continue; if FILE.jsonl, a line of JSON for each prompt, {"prompt": "..."} or '
        '{"messages": [...]}, and lines of JSON come out',
    )
    source.add_argument(
        "--messages", type=Path, metavar="FILE", help="a conversation to answer: a JSON list of role and content"
    )
    options.add_argument("--chat", action="store_true", help="wrap the prompt with the tokenizer's chat template")
    options.add_argument("--system", metavar="TEXT", help="the system's turn before a chat")
    options.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help='answer each line (or {"question": "..."} in FILE.jsonl) about the prompt, which is read once',
    )
    add_policy_options(options, "full", 1.0, WHOLES[0])
    options.add_argument("--max-new-tokens", type=int, default=128, help="tokens to write")
    add_sampling_options(options)
    options.add_argument("--num-samples", type=int, default=1, help="texts from one prompt, which is read once")
    options.add_argument("--beams", type=int, default=1, help="search for the likeliest text with so many beams")
    options.add_argument(
        "--length-penalty", type=float, default=1.0, help="of the search: above 0 favours long texts, below short ones"
    )
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    options.add_argument("--ignore-eos", action="store_true", help="go on past the end of a text")
    options.add_argument("--json", action="store_true", help="print one object instead of the text")
    options.add_argument(
        "--logprobs",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="tell the log-probability of each token in JSON, and with N those of the N likeliest ones",
    )
    options.add_argument("--out", type=Path, metavar="FILE.jsonl", help="gets the lines of JSON; a cut run goes on")
    options.add_argument("--batch-size", type=int, help="prompts or questions of a file at once (default: 8)")
    options.add_argument("--show-cache", action="store_true", help="print the prompt, shaded by what the cache holds")
    options.add_argument("--save-cache-map", type=Path, metavar="FILE.png", help="draw layers x prompt tokens held")
    return options


def _of_lines(options: argparse.Namespace) -> bool:
    return options.prompt_file is not None and options.prompt_file.suffix == JSON_LINES


def _check(options: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing together, before anything is read."""
    check_beams(options.beams, options.length_penalty, settings)
    for name in ("num_samples", "max_new_tokens"):
        whole_number(name, getattr(options, name))
    if options.logprobs is not None:
        whole_number("logprobs", options.logprobs, 0)
    several = _of_lines(options) or options.questions is not None
    pictures = options.show_cache or options.save_cache_map is not None
    for given, ok, sentence in (
        (options.out, several, "--out takes what comes of --prompt-file FILE.jsonl or --questions; leave it out"),
        (options.batch_size, several, "--batch-size is of --prompt-file FILE.jsonl and --questions; leave it out"),
        (several and pictures, False, "--show-cache and --save-cache-map draw one prompt; leave them out"),
        (_of_lines(options) and options.questions, False, "--questions are about one prompt, not about a file of them"),
        (
            options.num_samples > 1 and pictures,
            False,
            "--show-cache and --save-cache-map draw one text; leave them out",
        ),
        (options.logprobs is not None, options.json or several, "--logprobs is told in JSON; give --json, too"),
    ):
        if given and not ok:
            raise ValueError(f"{sentence}.")
    if options.batch_size is not None:
        whole_number("batch_size", options.batch_size)
    if options.save_cache_map is not None:
        from kvjax.pictures import cache_map

        cache_map.check_file(options.save_cache_map)


def _prompt(options: argparse.Namespace) -> str | Messages:
    if options.prompt is not None:
        return options.prompt
    if options.messages is not None:
        try:
            return conversation(json.loads(read_text(options.messages)), waits=options.questions is None)
        except json.JSONDecodeError as error:
            raise ValueError(f"{options.messages} is not JSON: {error}.") from None
    if options.prompt_file is not None:
        text = read_text(options.prompt_file)
    elif sys.stdin is None or sys.stdin.closed:
        raise ValueError("standard input is closed; give --prompt or --prompt-file.")
    else:
        try:
            text = sys.stdin.read().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not {error.encoding} text.") from None
    return text.removesuffix("\n")  # which editors and echo put behind a text


def _report(made: Generation, policy: Policy, seed: int, told: dict[str, Any]) -> dict[str, Any]:
    rate = made.decode_tokens_per_second
    return {
        "text": told["text"],
        "prompt_tokens": len(made.prompts[0]),
        "new_tokens": len(made.tokens[0]),
        "policy": policies.name_of(policy),
        "budget": round(float(np.mean(slot_limits(made.state)))),
        "allocated_slots": round(allocated_slots(made.state)),
        "cache_bytes": cache_bytes(made.state),
        "full_cache_bytes": full_cache_bytes(made.state),
        "compile_seconds": made.compile_seconds,
        "prefill_seconds": made.prefill_seconds,
        "decode_tokens_per_second": rate,
        "seed": seed,
        **_choices(made),
        **told,
    }


def _told(model: Model, made: Generation, stop: tuple[str, ...]) -> list[dict[str, Any]]:
    """What JSON says of each text."""
    texts = texts_of(model, made, stop)
    told = [
        {"text": text, "prompt_tokens": len(prompt), "new_tokens": len(tokens)}
        for text, prompt, tokens in zip(texts, made.prompts, made.tokens, strict=True)
    ]
    for each, known in zip(told, made.logprobs or (), strict=made.logprobs is not None):
        each["logprobs"] = [
            {"token": token, "text": model.tokenizer.decode([token]), "logprob": logprob}
            | ({"likeliest": [{"token": other, "logprob": its} for other, its in likeliest]} if likeliest else {})
            for token, logprob, likeliest in known
        ]
    return told


def _samples(told: list[dict[str, Any]]) -> dict[str, Any]:
    """What JSON says of the texts of one prompt: the first one's, and all of them if there are several."""
    return told[0] | ({"samples": told} if len(told) > 1 else {})


def _choices(made: Generation) -> dict[str, Any]:
    """What each head of the first row was found to need, by layer, for policies that choose so."""
    plan = made.state.policy.plan
    if not isinstance(plan, Profiled):
        return {}
    maps = {} if made.beams > 1 else {"policy_map": _policy_map(made)}  # a search leaves the pages
    return {
        "choices": ["+".join(parts) or "full" for parts in plan.choices],
        **maps,
        "slots": [limit[0].tolist() for limit in slot_limits(made.state)],
    }


def _policy_map(made: Generation) -> list[list[int]]:
    return [np.asarray(layer.plan.choice)[0].tolist() for layer in made.state.storage.states()]


def _summary(made: Generation, report: dict[str, Any]) -> str:
    kept = np.mean([(positions >= 0).sum(-1).mean() for positions in made.cache_positions])
    rate = report["decode_tokens_per_second"]
    speed = "too few to time" if rate is None else f"{rate:,.0f} tokens/s"
    return (
        f"prompt: {report['prompt_tokens']} tokens in {report['prefill_seconds']:.2f} s; "
        f"new: {report['new_tokens']} tokens, {speed}; compilation: {report['compile_seconds']:.1f} s\n"
        f"cache: {report['cache_bytes']:,} bytes, a full cache {report['full_cache_bytes']:,} bytes; "
        f"{report['policy']} kept {kept:.0f} of {report['prompt_tokens']} prompt tokens per head, "
        f"budget {report['budget']}: {report['allocated_slots']} slots{_excess(made, report)}"
    )


def _excess(made: Generation, report: dict[str, Any]) -> str:
    """Why a cache is larger than the full one, if it is."""
    if report["policy"] == "full" or report["cache_bytes"] <= report["full_cache_bytes"]:
        return ""
    needed = int(np.max(made.state.end))
    if report["budget"] >= needed:
        return f"\nThis is more than a full cache, for the whole text has no more than {needed} tokens."
    return (
        "\nThis is more than a full cache, for what the policy remembers beside keys and values takes more than the "
        "slots that it saves; texts that are long for their budget save memory."
    )


def run(options: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        ValueError: it asks for something that cannot be, said in one sentence.
    """
    if options.help and options.policy is not None:
        explain_policy(options.policy, sys.stdout)
        return
    if options.help:
        parser().print_help()
        return
    if options.policy == "list":
        list_policies(sys.stdout)
        return
    policy, reading = chosen(options)
    settings = dict(
        policy=policy,
        **reading,
        **sampling_settings(options),
        max_new_tokens=options.max_new_tokens,
        num_samples=options.num_samples,
        logprobs=options.logprobs,
        stop_at_eos=not options.ignore_eos,
    )
    _check(options, settings)
    if _of_lines(options):
        _continue_lines(options, settings)
    elif options.questions is not None:
        _answer_questions(options, settings)
    else:
        _continue_one(options, settings)


def _load(options: argparse.Namespace) -> Model:
    from kvjax.model import load

    return load(options.model, dtype=options.dtype)


def _continue_one(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    prompt, policy, stop = _prompt(options), settings["policy"], settings["stop"]
    model = _load(options)
    ids = encode(model, prompt, options.chat or options.system is not None, options.system)
    streams = not options.json and options.num_samples == options.beams == 1
    stream = Stream(model.tokenizer, lambda text: print(text, end="", flush=True), stop)
    search = dict(beams=options.beams, length_penalty=options.length_penalty)
    made = generate_ids(model, [ids], **settings, **search, on_tokens=stream if streams else None)
    told = _told(model, made, stop)
    report = _report(made, policy, options.seed, _samples(told))
    if options.json:
        print(json.dumps(report))
    else:
        if streams:
            stream.flush()
            print(flush=True)
        for number, each in enumerate([] if streams else told, 1):
            heading = f"--- {number} of {len(told)}\n" if len(told) > 1 else ""
            print(f"{heading}{each['text']}", flush=True)
        print(_summary(made, report), file=sys.stderr)
    if "policy_map" in report:
        from kvjax.pictures import policy_map

        policy_map.show(report["choices"], report["policy_map"], sys.stderr)
    if options.show_cache or options.save_cache_map:
        from kvjax.pictures import cache_map

        held = cache_map.share_held(made.cache_positions, len(ids))
        words = cache_map.words_of(model.tokenizer, ids)
        if options.show_cache:
            cache_map.show(words, held.mean(0), sys.stderr if options.json else sys.stdout)
        if options.save_cache_map:
            title = f"What {model.name} holds of its prompt: {report['policy']}, {report['budget']:g} slots per head"
            cache_map.save(held, words, options.save_cache_map, title)


def _run_of(options: argparse.Namespace, source: Path, prompt: Any = None) -> dict[str, Any]:
    """What decides what comes of a file: its content, the prompt, and all options but those of where and how fast."""
    others = {name: value for name, value in vars(options).items() if name not in ("out", "batch_size", "json")}
    return others | {"content": hashlib.sha256(source.read_bytes()).hexdigest(), "read": prompt}


def _continue_lines(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Each prompt of a file, those of about one length together."""
    file, samples = options.prompt_file, options.num_samples
    lines = read_prompts(file)
    results = Results(options.out, _run_of(options, file), len(lines))
    model, chat = _load(options), options.chat or options.system is not None
    names = "budget", "budget_of", "max_new_tokens"
    reading: dict[str, Any] = {name: settings[name] for name in names} | {"lengths": None, "key": None, "plan": None}

    def ids_of(line: Line) -> list[int]:
        prompt, policy = encode(model, line.prompt, chat, options.system), settings["policy"]
        check_room(len(prompt), settings["max_new_tokens"], policy, model)
        prepare(model, policy, [prompt], chunk=settings["prefill_chunk"], **reading)
        return prompt

    encoded = [(line, of_line(file, line.number, lambda line=line: ids_of(line))) for line in lines]
    left = sorted((pair for pair in encoded if pair[0].number not in results.done), key=lambda pair: len(pair[1]))
    size, search = options.batch_size or 8, dict(beams=options.beams, length_penalty=options.length_penalty)
    with results:
        for start in range(0, len(left), size):
            batch = left[start : start + size]
            made = generate_ids(model, [ids for _, ids in batch], **settings, **search)
            told = _told(model, made, settings["stop"])
            for row, (line, _) in enumerate(batch):
                results.write(line.number, line.given | _samples(told[row * samples : (row + 1) * samples]))


def _answer_questions(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Each question of a file about one prompt."""
    file, samples = options.questions, options.num_samples
    lines, prompt = read_questions(file), _prompt(options)
    results = Results(options.out, _run_of(options, file, prompt), len(lines))
    model, chat = _load(options), options.chat or options.system is not None
    before, asked = encode_questions(model, prompt, [str(line.prompt) for line in lines], chat, options.system)
    left = [(line, ids) for line, ids in zip(lines, asked, strict=True) if line.number not in results.done]
    search = dict(beams=options.beams, length_penalty=options.length_penalty, batch_size=options.batch_size or 8)

    def answers() -> Iterator[dict[str, Any]]:
        for made in answer(model, before, [ids for _, ids in left], **settings, **search):
            told = _told(model, made, settings["stop"])
            for start in range(0, len(told), samples):
                yield _samples(told[start : start + samples])

    if options.json or options.out is not None:
        with results:
            for (line, _), told in zip(left, answers() if left else (), strict=True):
                results.write(line.number, line.given | told)
        return
    for (line, _), told in zip(left, answers(), strict=True):
        print(f"--- {line.prompt.strip() if isinstance(line.prompt, str) else ''}")
        for each in told.get("samples", [told]):
            print(each["text"], flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    options = parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
    enable_compilation_cache()
    return finish("generate", lambda: run(options))


if __name__ == "__main__":
    leave(main())
