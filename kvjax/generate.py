"""Continue prompts on a fixed KV budget: `python -m kvjax.generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax import policies
from kvjax.commands import finish
from kvjax.compilation import enable_compilation_cache
from kvjax.engine.state import cache_bytes, full_cache_bytes, slot_limits
from kvjax.files import read_text
from kvjax.policies.fastgen import Profiled
from kvjax.policies.policy import Policy
from kvjax.sampling.sample import Sampling
from kvjax.sampling.texts import Generation, Stream, encode, generate_ids
from kvjax.settings import PART_KEYS, parse_budget, parse_settings, read_config
from kvjax.types import setting_names


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = argparse.ArgumentParser(prog="kvjax generate", description=__doc__, allow_abbrev=False)
    options.add_argument("--model", default="tiny", help="tiny (embedded), a directory, or a hub id")
    source = options.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; standard input if neither this nor a file is given")
    source.add_argument("--prompt-file", type=Path, help="a file with the text to continue")
    options.add_argument("--policy", help="which tokens stay in the cache; `list` shows all parts (default: full)")
    options.add_argument("--budget", help="slots per head, or a fraction of prompt + new tokens (default: 1.0)")
    options.add_argument("--plan", help="how the budget is spread over layers or heads")
    options.add_argument("--residual", help="what becomes of evicted pairs: less")
    options.add_argument("--codec", help="how a slot lies in memory: plain, int8 or int4")
    options.add_argument("--selection", help="which of the held tokens a query reads: topk")
    options.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=value",
        dest="settings",
        help="settings of the policy, and of its parts: recent=0.3 residual.kernels=performer plan.floor=0.3",
    )
    options.add_argument("--less-checkpoint", metavar="DIR", help="kernels of LESS, from kvjax.train_less")
    options.add_argument("--config", help="a TOML file or the name of a shipped one; options override it")
    options.add_argument("--prefill-chunk", type=int, help="compress after every so many prompt tokens")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.8)
    options.add_argument("--top-k", type=int)
    options.add_argument("--top-p", type=float)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--ignore-eos", action="store_true", help="go on past the end of a text")
    options.add_argument("--chat", action="store_true", help="wrap the prompt with the tokenizer's chat template")
    options.add_argument("--json", action="store_true", help="print one object instead of the text")
    options.add_argument("--show-cache", action="store_true", help="print the prompt, shaded by what the cache holds")
    options.add_argument("--save-cache-map", type=Path, metavar="FILE.png", help="draw layers x positions held")
    return options


def list_policies() -> str:
    """One line for each policy and each member of the other parts, then its settings and their defaults."""
    entries = [(name, method, policies.settings_of(name)) for name, method in policies.REGISTRY.items()]
    lines = ["policies (--policy)", *_listed(entries)]
    for part, table in (("plan", policies.PLANS), ("residual", policies.RESIDUALS), ("selection", policies.SELECTIONS)):
        parts = [(name, kind, _settings(kind, part)) for name, kind in table.items()]
        lines += ["", f"{part}s (--{part})", *_listed(parts)]
    return "\n".join([*lines, "", "codecs (--codec)", f"  {', '.join(policies.CODECS)}"])


def _listed(entries: Sequence[tuple[str, Any, dict[str, Any]]]) -> list[str]:
    lines = []
    for name, described, settings in entries:
        summary = (described.__doc__ or "").strip().splitlines()[0]
        lines.append(f"  {name:<16} {summary}")
        lines.append(f"  {'':<16} {', '.join(f'{key}={value!r}' for key, value in settings.items())}".rstrip())
    return lines


def _settings(kind: type[Any], part: str) -> dict[str, Any]:
    names = setting_names(kind)
    return {f"{part}.{field.name}": field.default for field in dataclasses.fields(kind) if field.name in names}


def _choice(options: argparse.Namespace) -> tuple[Policy, int | float | Sequence[int], int | None]:
    config = read_config(options.config) if options.config else {}
    name = options.policy or config.get("policy", "full")
    parts = {part: getattr(options, part) or config.get(part) for part in PART_KEYS}
    # A config's settings are those of its own policy and parts.
    chosen = {"policy": name, **parts}
    own = {setting: setting.partition(".")[0] if "." in setting else "policy" for setting in config.get("settings", {})}
    settings = {setting: config["settings"][setting] for setting, of in own.items() if chosen[of] == config.get(of)}
    settings |= parse_settings(options.settings)
    if options.less_checkpoint is not None:
        settings["checkpoint" if name == "less" else "residual.checkpoint"] = options.less_checkpoint
    policy = policies.policy(name, **parts, **settings)
    budget = config.get("budget", 1.0) if options.budget is None else parse_budget(options.budget)
    chunk = config.get("prefill_chunk") if options.prefill_chunk is None else options.prefill_chunk
    return policy, budget, chunk


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file is None:
        return sys.stdin.read()
    return read_text(options.prompt_file)


def _report(made: Generation, policy: Policy, seed: int, text: str) -> dict[str, Any]:
    rate = made.decode_tokens_per_second
    return {
        "text": text,
        "prompt_tokens": len(made.prompts[0]),
        "new_tokens": len(made.tokens[0]),
        "policy": policies.name_of(policy),
        "budget": round(float(np.mean(slot_limits(made.state)))),
        "cache_bytes": cache_bytes(made.state),
        "full_cache_bytes": full_cache_bytes(made.state),
        "compile_seconds": made.compile_seconds,
        "prefill_seconds": made.prefill_seconds,
        "decode_tokens_per_second": rate,
        "seed": seed,
        **_choices(made),
    }


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
        f"budget {report['budget']}"
    )


def run(options: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        ValueError: it asks for something that cannot be, said in one sentence.
    """
    if options.policy == "list":
        print(list_policies())
        return
    from kvjax.model import load

    policy, budget, chunk = _choice(options)
    Sampling(options.temperature, options.top_k, options.top_p)
    prompt = _prompt(options)
    model = load(options.model, dtype=options.dtype)
    ids = encode(model, prompt, options.chat)
    stream = Stream(model.tokenizer, lambda text: print(text, end="", flush=True))
    made = generate_ids(
        model,
        [ids],
        policy=policy,
        budget=budget,
        prefill_chunk=chunk,
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
        if options.show_cache:
            cache_map.show(model.tokenizer, ids, held.mean(0), sys.stderr if options.json else sys.stdout)
        if options.save_cache_map:
            cache_map.save(held, options.save_cache_map, policies.name_of(policy))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    options = parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
    enable_compilation_cache()
    return finish("generate", lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
