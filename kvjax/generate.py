"""Continue prompts on a KV cache of fixed budget."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.cli import options as shared
from kvjax.cli.batch_files import answer_lines, continue_lines
from kvjax.cli.commands import Parser, add_model_options, command, leave, load_model, unreadable_input
from kvjax.cli.output import print_written, report, samples, summary, text_fields
from kvjax.evaluation import cache_map, figures, trace
from kvjax.generation.generate import Stream, check_beams, generate_ids
from kvjax.generation.prompts import encode
from kvjax.generation.speculative import full_tokens_per_second
from kvjax.inference.budget import BUDGET_BASES
from kvjax.utils.files import JSON_LINES, check_writable, parse_json, read_text
from kvjax.utils.settings import Chat, Messages, conversation, whole_number


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    options = Parser(
        prog="kvjax generate",
        description=__doc__,
        epilog="kvjax generate --policy NAME --help shows the settings of one policy.",
        add_help=False,
    )
    options.add_argument("-h", "--help", action="store_true", help="show this, or with --policy NAME its settings")
    add_model_options(options)
    source = options.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", help="text to continue; standard input if there is no other source")
    source.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='file with the text to continue; a FILE.jsonl has a line of JSON for each prompt, {"prompt": "..."} or '
        '{"messages": [...]}, and results are lines of JSON',
    )
    source.add_argument(
        "--messages", type=Path, metavar="FILE", help="a conversation to answer: a JSON list of role and content"
    )
    options.add_argument("--chat", action="store_true", help="wrap the prompt with the tokenizer's chat template")
    options.add_argument("--system", metavar="TEXT", help="system prompt of a chat")
    shared.add_template_option(options)
    options.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help='answer each line (or {"question": "..."} in FILE.jsonl) about the prompt, which is read once',
    )
    shared.add_policy_options(options, "full", 1.0, BUDGET_BASES[0])
    shared.add_lossless_options(options)
    options.add_argument("-n", "--max-new-tokens", type=int, default=128, help="number of tokens to generate")
    shared.add_sampling_options(options)
    shared.add_end_options(options)
    options.add_argument("--num-samples", type=int, default=1, help="texts per prompt, after a single prefill")
    options.add_argument("--beams", type=int, default=1, help="number of beams of a search for the likeliest text")
    options.add_argument(
        "--length-penalty", type=float, default=1.0, help="of the beam search: above 0 favors long texts"
    )
    options.add_argument("--ignore-eos", action="store_true", help="continue beyond the end of a text")
    options.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    options.add_argument(
        "--logprobs",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="add the log-probability of each token to the JSON, and with N those of the N likeliest tokens",
    )
    options.add_argument("--out", type=Path, metavar="FILE.jsonl", help="file for results; resumes an interrupted run")
    options.add_argument("--batch-size", type=int, help="prompts or questions per batch (default: 8)")
    options.add_argument("--show-cache", action="store_true", help="print the prompt, shaded by cached tokens")
    options.add_argument(
        "--save-cache-map", type=Path, metavar="FILE.png", help="draw the cached prompt tokens by layer"
    )
    options.add_argument("--trace", type=Path, metavar="FILE", help="write evictions and kept attention: .json, .png")
    return options


def _of_lines(options: argparse.Namespace) -> bool:
    return options.prompt_file is not None and options.prompt_file.suffix == JSON_LINES


def _check(options: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Refuse options that do not go together, before anything is read."""
    check_beams(options.beams, options.length_penalty, settings)
    for name in ("num_samples", "max_new_tokens"):
        whole_number(name, getattr(options, name))
    if options.logprobs is not None:
        whole_number("logprobs", options.logprobs, 0)
    several = _of_lines(options) or options.questions is not None
    pictures = options.show_cache or options.save_cache_map is not None or options.trace is not None
    for option, ok, sentence in (
        (options.out, several, "--out takes what comes of --prompt-file FILE.jsonl or --questions; leave it out"),
        (options.batch_size, several, "--batch-size is of --prompt-file FILE.jsonl and --questions; leave it out"),
        (several and pictures, False, "--show-cache, --save-cache-map and --trace draw one prompt; leave them out"),
        (_of_lines(options) and options.questions, False, "--questions are about one prompt, not about a file of them"),
        (
            options.num_samples > 1 and pictures,
            False,
            "--show-cache, --save-cache-map and --trace draw one text; leave them out",
        ),
        (options.logprobs is not None, options.json or several, "--logprobs is told in JSON; give --json, too"),
    ):
        if option and not ok:
            raise ValueError(f"{sentence}.")
    if options.batch_size is not None:
        whole_number("batch_size", options.batch_size)
    if options.out is not None:
        check_writable(options.out, JSON_LINES)
    if options.save_cache_map is not None:
        figures.check_figure(options.save_cache_map)
    if options.trace is not None:
        trace.check_file(options.trace)


def prompt_of(options: argparse.Namespace) -> str | Messages:
    """Return the prompt that the options name: a text or messages."""
    if options.prompt is not None:
        return options.prompt
    if options.messages is not None:
        messages = parse_json(read_text(options.messages), str(options.messages))
        try:
            return conversation(messages, waits=options.questions is None)
        except TypeError as error:
            raise ValueError(f"{options.messages}: {error}") from None
    if options.prompt_file is not None:
        text = read_text(options.prompt_file)
    elif sys.stdin is None or sys.stdin.closed:
        raise ValueError("standard input is closed; give --prompt or --prompt-file.")
    else:
        try:
            text = sys.stdin.read().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise unreadable_input(error) from None
    return text.removesuffix("\n")  # editors and echo append it


def run(options: argparse.Namespace) -> None:
    """Run the command line."""
    if shared.print_policy_help(options, parser):
        return
    policy, reading = shared.policy_and_budget(options)
    settings: dict[str, Any] = dict(policy=policy, **reading, **shared.sampling_settings(options))
    settings |= shared.lossless_settings(options)
    settings |= {name: getattr(options, name) for name in ("max_new_tokens", "num_samples", "logprobs", "beams")}
    settings |= {"stop_at_eos": not options.ignore_eos, "length_penalty": options.length_penalty}
    _check(options, settings)
    chat = shared.template_settings_of(options) or options.chat or options.system is not None
    if _of_lines(options):
        continue_lines(options, settings, chat)
    elif options.questions is not None:
        answer_lines(options, settings, chat, prompt_of(options))
    else:
        _continue_one(options, settings, chat)


def _continue_one(options: argparse.Namespace, settings: dict[str, Any], chat: Chat) -> None:
    prompt, policy, stop = prompt_of(options), settings["policy"], settings["stop"]
    model = load_model(options)
    if options.beams == 1:
        shared.tell_sampling_defaults("generate", model, settings)
    ids = encode(model, prompt, chat, options.system)
    settings["chat"] = bool(chat) or not isinstance(prompt, str)
    streams = not options.json and options.num_samples == options.beams == 1
    stream = Stream(model.tokenizer, lambda text: print(text, end="", flush=True), stop, ids)
    generation = generate_ids(model, [ids], **settings, on_tokens=stream if streams else None)
    texts = text_fields(model, generation, stop)
    facts = report(generation, policy, options.seed, samples(texts))
    if len(generation.padded.decoder.decoders) > 1:
        facts["full_tokens_per_second"] = full_tokens_per_second(generation.padded)
    if options.verifier is not None:
        facts["verifier"] = options.verifier
    if options.json:
        print(json.dumps(facts))
    else:
        if streams:
            stream.flush()
            print(flush=True)
        for number, fields in enumerate([] if streams else texts, 1):
            heading = f"--- {number} of {len(texts)}\n" if len(texts) > 1 else ""
            print(f"{heading}{fields['text']}", flush=True)
        print(summary(generation, facts), file=sys.stderr)
    if "policy_map" in facts:
        cache_map.print_choices(facts["choices"], facts["policy_map"], sys.stderr)
    if options.show_cache or options.save_cache_map:
        shares = cache_map.share_held(generation.cache_positions, len(ids))
        words = cache_map.words_of(model.tokenizer, ids)
        if options.show_cache:
            cache_map.print_shaded(words, shares.mean(0), sys.stderr if options.json else sys.stdout)
        if options.save_cache_map:
            title = f"What {model.name} holds of its prompt: {facts['policy']}, {facts['budget']:g} slots per head"
            cache_map.save_png(shares, words, options.save_cache_map, title)
            print_written(f"map of {len(ids)} prompt tokens", options.save_cache_map)
    if options.trace:
        used = {name: settings[name] for name in ("budget_of", "plan", "prefill_chunk") if name in settings}
        record = trace.trace(model, policy, ids, generation.tokens[0], settings["budget"], seed=options.seed, **used)
        trace.save(record, options.trace, {name: facts[name] for name in ("policy", "budget")})
        print_written(f"trace of {len(generation.tokens[0])} new tokens", options.trace)


main = command("generate", parser, run)
"""Run the command line and return its exit code."""


if __name__ == "__main__":
    leave(main(None))
