"""Continue prompts on a fixed KV budget: `python -m kvjax.generate`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvjax import policies
from kvjax.commands import Help, add_model_options, finish, leave
from kvjax.compilation import enable_compilation_cache
from kvjax.engine.prepare import WHOLES
from kvjax.engine.state import allocated_slots, cache_bytes, full_cache_bytes, slot_limits
from kvjax.files import read_text
from kvjax.policies import describe
from kvjax.policies.fastgen import Profiled
from kvjax.policies.policy import Policy
from kvjax.sampling.sample import Sampling
from kvjax.sampling.texts import Generation, Stream, encode, generate_ids
from kvjax.settings import PART_KEYS, parse_budgets, parse_settings, read_config, seed_number


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
    add_model_options(options)
    source = options.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; standard input if neither this nor a file is given")
    source.add_argument("--prompt-file", type=Path, help="a file with the text to continue")
    options.add_argument(
        "--policy", help="which tokens stay in the cache; `list` shows all, FILE.py:NAME is your own (default: full)"
    )
    options.add_argument(
        "--budget",
        help="slots per head, a fraction, or slots for each layer as 64,48,32,16 (default: 1.0)",
    )
    options.add_argument(
        "--budget-of", choices=WHOLES, help="what a fraction is of; text is prompt + new tokens (default: text)"
    )
    for part, table, what in (
        ("plan", policies.PLANS, "how the budget is spread over layers or heads"),
        ("residual", policies.RESIDUALS, "what becomes of evicted pairs"),
        ("codec", policies.CODECS, "how a slot lies in memory"),
        ("selection", policies.SELECTIONS, "which of the held tokens a query reads"),
    ):
        options.add_argument(
            f"--{part}", metavar="NAME", help=f"{what}: {', '.join(table)} (default: the policy's own)"
        )
    options.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=value",
        dest="settings",
        help="settings of the policy, and of its parts: recent=0.3 residual.kernels=performer plan.floor=0.3",
    )
    options.add_argument("--less-checkpoint", metavar="DIR", help="kernels of LESS, from kvjax train_less")
    options.add_argument("--config", help="a TOML file or the name of a shipped one; options override it")
    options.add_argument("--prefill-chunk", type=int, help="compress after every so many prompt tokens")
    options.add_argument("--max-new-tokens", type=int, default=128, help="tokens to write")
    options.add_argument("--temperature", type=float, default=0.8, help="divides the logits; 0 is greedy")
    options.add_argument("--top-k", type=int, help="draw from this many likeliest tokens (default: all)")
    options.add_argument("--top-p", type=float, help="draw from the likeliest tokens of this share (default: 1.0)")
    options.add_argument("--seed", type=int, default=0, help="of all randomness, from 0 to 2^32 - 1")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    options.add_argument("--ignore-eos", action="store_true", help="go on past the end of a text")
    options.add_argument("--chat", action="store_true", help="wrap the prompt with the tokenizer's chat template")
    options.add_argument("--json", action="store_true", help="print one object instead of the text")
    options.add_argument("--show-cache", action="store_true", help="print the prompt, shaded by what the cache holds")
    options.add_argument("--save-cache-map", type=Path, metavar="FILE.png", help="draw layers x prompt tokens held")
    return options


def list_policies(file: TextIO) -> None:
    """A table of the policies in groups, and of the members of the other parts, with their settings."""
    groups = [(f"policies (--policy): {group}", entries) for group, entries in describe.policies().items()]
    groups += [(f"{part}s (--{part})", entries) for part, entries in describe.parts().items()]
    tables: list[Any] = []
    for title, entries in groups:
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), show_header=False
        )
        table.add_column(no_wrap=True, min_width=15)
        table.add_column(ratio=1)
        table.add_column(width=24)
        for entry in entries:
            settings = "  ".join(f"{setting.name}={setting.default!r}" for setting in entry.settings)
            text = Text(entry.summary)
            table.add_row(entry.name, text.append(f"\n{settings}", "dim") if settings else text, entry.paper)
        tables += [table, ""]
    console = _console(file)
    console.print(*tables, sep="\n", highlight=False)
    usual = ", ".join(f"{setting.name}={setting.default!r}" for setting in describe.common())
    console.print(
        f"codecs (--codec): {', '.join(policies.CODECS)}\n\n"
        f"Nearly every policy also takes {usual}. --policy NAME --help says what settings mean.",
        highlight=False,
        markup=False,
    )


def explain_policy(name: str, file: TextIO) -> None:
    """What a policy is, and a table of its settings, their defaults and meanings.

    Raises:
        ValueError: there is no such policy.
    """
    if name not in policies.REGISTRY:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(policies.REGISTRY)}.")
    entry = describe.described(name)
    console = _console(file)
    console.print(f"{entry.name}: {entry.summary} From: {entry.paper}.", highlight=False, markup=False)
    table = Table(
        title="settings (--set key=value)", title_justify="left", title_style="bold", box=None, padding=(0, 1)
    )
    for heading in ("setting", "default"):
        table.add_column(heading, no_wrap=True, justify="left")
    table.add_column("meaning", ratio=1)
    for setting in entry.settings:
        table.add_row(setting.name, Text(repr(setting.default)), Text(setting.meaning))
    console.print(table)


def _console(file: TextIO) -> Console:
    return Console(file=file, width=None if file.isatty() else 110)


def _choice(options: argparse.Namespace) -> tuple[Policy, dict[str, Any]]:
    config = read_config(options.config) if options.config is not None else {}
    name = config.get("policy", "full") if options.policy is None else options.policy
    given = {part: getattr(options, part) for part in PART_KEYS}
    parts = {part: config.get(part) if word is None else word for part, word in given.items()}
    # A config's settings are those of its own policy and parts.
    chosen = {"policy": name, **parts}
    own = {setting: setting.partition(".")[0] if "." in setting else "policy" for setting in config.get("settings", {})}
    settings = {setting: config["settings"][setting] for setting, of in own.items() if chosen[of] == config.get(of)}
    settings |= parse_settings(options.settings)
    if options.less_checkpoint is not None:
        settings["checkpoint" if name == "less" else "residual.checkpoint"] = options.less_checkpoint
    policy = policies.policy(name, **parts, **settings)
    budget = config.get("budget", 1.0) if options.budget is None else parse_budgets(options.budget)
    if options.budget is not None and not policy.plan.bounded and policy.selection is None:
        raise ValueError(
            f"budget={options.budget} means nothing to policy {name}, which keeps everything; leave it out, or choose "
            "another policy."
        )
    chunk = config.get("prefill_chunk") if options.prefill_chunk is None else options.prefill_chunk
    whole = options.budget_of or config.get("budget_of", WHOLES[0])
    return policy, {"budget": budget, "budget_of": whole, "prefill_chunk": chunk}


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return options.prompt
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


def _report(made: Generation, policy: Policy, seed: int, text: str) -> dict[str, Any]:
    rate, local = made.decode_tokens_per_second, _local_windows(made)
    return {
        "text": text,
        "prompt_tokens": len(made.prompts[0]),
        "new_tokens": len(made.tokens[0]),
        "policy": policies.name_of(policy),
        "budget": round(float(np.mean([limit for i, limit in enumerate(slot_limits(made.state)) if i not in local]))),
        "allocated_slots": round(allocated_slots(made.state)),
        "cache_bytes": cache_bytes(made.state),
        "full_cache_bytes": full_cache_bytes(made.state),
        "compile_seconds": made.compile_seconds,
        "prefill_seconds": made.prefill_seconds,
        "decode_tokens_per_second": rate,
        "seed": seed,
        **({"local_windows": local} if local else {}),
        **_choices(made),
    }


def _local_windows(made: Generation) -> dict[int, int]:
    """The window of each layer that it bounds, by its index: budgets are about the others."""
    layers, end = enumerate(made.state.config.layer_configs), int(np.max(made.state.end))
    return {index: layer.window for index, layer in layers if layer.window is not None and layer.bounds(end)}


def _choices(made: Generation) -> dict[str, Any]:
    """What each head of the first row was found to need, by layer, for policies that choose so."""
    plan = made.state.policy.plan
    if not isinstance(plan, Profiled):
        return {}
    return {
        "choices": ["+".join(parts) or "full" for parts in plan.choices],
        "policy_map": [np.asarray(layer.plan.choice)[0].tolist() for layer in made.state.storage.states()],
        "slots": [limit[0].tolist() for limit in slot_limits(made.state)],
    }


def _summary(made: Generation, report: dict[str, Any]) -> str:
    kept = np.mean([(positions >= 0).sum(-1).mean() for positions in made.cache_positions])
    rate = report["decode_tokens_per_second"]
    speed = "too few to time" if rate is None else f"{rate:,.0f} tokens/s"
    return (
        f"prompt: {report['prompt_tokens']} tokens in {report['prefill_seconds']:.2f} s; "
        f"new: {report['new_tokens']} tokens, {speed}; compilation: {report['compile_seconds']:.1f} s\n"
        f"cache: {report['cache_bytes']:,} bytes, a full cache {report['full_cache_bytes']:,} bytes; "
        f"{report['policy']} kept {kept:.0f} of {report['prompt_tokens']} prompt tokens per head, "
        f"budget {report['budget']}: {report['allocated_slots']} slots{_local(made)}{_excess(made, report)}"
    )


def _local(made: Generation) -> str:
    """What the budget is not about, if there is such a thing."""
    windows, layers = _local_windows(made), made.state.config.layers
    if not windows:
        return ""
    return (
        f"\n{len(windows)} of {layers} layers see {', '.join(map(str, sorted(set(windows.values()))))} tokens only and "
        "hold so many under any policy; the budget is that of the other layers."
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
    from kvjax.model import load

    policy, reading = _choice(options)
    Sampling(options.temperature, options.top_k, options.top_p)
    seed_number(options.seed)
    if options.save_cache_map is not None:
        from kvjax.pictures import cache_map

        cache_map.check_file(options.save_cache_map)
    prompt = _prompt(options)
    model = load(options.model, options.dtype, options.revision, options.weights)
    ids = encode(model, prompt, options.chat)
    stream = Stream(model.tokenizer, lambda text: print(text, end="", flush=True))
    made = generate_ids(
        model,
        [ids],
        policy=policy,
        **reading,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_at_eos=not options.ignore_eos,
        on_tokens=None if options.json else stream,
    )
    text = model.tokenizer.decode(made.tokens[0], skip_special_tokens=True)
    report = _report(made, policy, options.seed, text)
    if options.json:
        print(json.dumps(report))
    else:
        stream.flush()
        print(flush=True)
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


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    options = parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
    enable_compilation_cache()
    return finish("generate", lambda: run(options))


if __name__ == "__main__":
    leave(main())
