"""Command-line options for policies, budgets and sampling, and the tables of policies and settings."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvjax import methods
from kvjax.generation.detokenize import stop_strings
from kvjax.generation.sampling import TEMPERATURE, Sampling, defaults_in_force
from kvjax.inference.budget import BUDGET_BASES
from kvjax.inference.prepare import check_bounded
from kvjax.methods import describe
from kvjax.methods.notation import combination, combined_parts, parse_policy
from kvjax.models.model import SETTINGS, LanguageModel
from kvjax.policies.policy import Policy
from kvjax.utils.settings import (
    PART_KEYS,
    parse_budgets,
    parse_pairs,
    parse_settings,
    read_config,
    seed_number,
    template_settings,
)


def add_policy_options(options: argparse.ArgumentParser, policy: str, budget: float, base: str) -> None:
    """Add the options of a policy and its budget; the defaults only appear in the help."""
    add_policy(options, policy)
    options.add_argument(
        "--budget", help=f"slots per head, a fraction, or slots for each layer as 64,48,32,16 (default: {budget})"
    )
    options.add_argument(
        "--budget-of", choices=BUDGET_BASES, help=f"base of a fraction; text is prompt + new tokens (default: {base})"
    )
    options.add_argument("--prefill-chunk", type=int, help="compress after each chunk of this many prompt tokens")


def add_template_option(options: argparse.ArgumentParser) -> None:
    """Add the option for settings of the chat template."""
    options.add_argument(
        "--template-setting",
        dest="template_settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the model's chat template, such as enable_thinking=false; may be repeated",
    )


def template_settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the chat template that a command line gives."""
    return template_settings(parse_pairs("--template-setting", options.template_settings)) or {}


def add_policy(options: argparse.ArgumentParser, policy: str) -> None:
    """Add the options of a policy: its name, parts, settings and config."""
    options.add_argument(
        "--policy",
        help="eviction policy, also with parts and settings, h2o+int8[recent=16]; `list` shows all, "
        f"FILE.py:NAME is your own (default: {policy})",
    )
    add_parts(options)
    options.add_argument("--less-checkpoint", metavar="DIR", help="directory of LESS kernels from kvjax train_less")
    options.add_argument("--config", help="TOML file, or name of a config in the package; options override it")


def add_policies(options: argparse.ArgumentParser, policies: str, also: str = "") -> None:
    """Add the options of several policies; `also` tells of a word that stands for several, such as `all`."""
    options.add_argument(
        "--policies",
        "--policy",
        default=policies,
        help=f"policies with parts and settings, separated by commas: h2o,h2o+less+int8,keyformer[noise=none]{also}",
    )
    add_parts(options)


def add_parts(options: argparse.ArgumentParser) -> None:
    """Add the options of the parts and settings of policies."""
    for part, table, what in (
        ("plan", methods.PLANS, "how the budget is spread over layers or heads"),
        ("residual", methods.RESIDUALS, "what becomes of evicted pairs"),
        ("codec", methods.CODECS, "how a slot lies in memory"),
        ("selection", methods.SELECTIONS, "which of the held tokens a query reads"),
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


def add_lossless_options(options: argparse.ArgumentParser) -> None:
    """Add the options of a policy that drafts for the full cache."""
    options.add_argument(
        "--lossless", action="store_true", help="write the full cache's text: the policy drafts it on its small cache"
    )
    add_verifier(options)
    options.add_argument(
        "--draft-tokens",
        type=lambda text: text if text == "auto" else int(text),
        metavar="N",
        help="tokens to draft before they are verified, or auto for as many as pay (default: 4)",
    )
    add_refresh_option(options)


def add_refresh_option(options: argparse.ArgumentParser) -> None:
    """Add the option of a draft whose slots are chosen anew."""
    options.add_argument(
        "--refresh",
        action="store_true",
        help="choose the draft's slots anew after each verification, by its attention to the full cache",
    )


def add_verifier(options: argparse.ArgumentParser) -> None:
    """Add the option of the policy whose text `--lossless` writes."""
    options.add_argument(
        "--verifier",
        metavar="NAME",
        help="full cache that verifies drafts: full, or full+int8 for the text of a cache in 8 bits (default: full)",
    )


def lossless_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a draft as keywords of `kvjax.generation.generate.begin`."""
    drafts = {name: getattr(options, name) for name in ("draft_tokens", "verifier", "refresh")}
    drafts = {name: value for name, value in drafts.items() if value is not None and value is not False}
    for name in () if options.lossless else drafts:
        raise ValueError(f"--{name.replace('_', '-')} is of --lossless; give that, too.")
    if "verifier" in drafts:
        drafts["verifier"] = combination(drafts["verifier"])
    return {"lossless": options.lossless, **drafts}


def add_sampling_options(options: argparse.ArgumentParser, temperature: float = TEMPERATURE, also: str = "") -> None:
    """Add the options of sampling; `temperature` is the default without one of the model, `also` ends each help."""
    for name, kind, what, default in (
        ("temperature", float, "divides the logits; 0 is greedy", temperature),
        ("top-k", int, "sample from this many likeliest tokens, 0 for all", 0),
        ("top-p", float, "sample from the likeliest tokens up to this probability", 1.0),
        ("min-p", float, "sample from tokens above this fraction of the top probability", 0.0),
        ("repetition-penalty", float, "divides positive logits of tokens in the text", 1.0),
    ):
        options.add_argument(f"--{name}", type=kind, help=f"{what} (default: the model's, or {default}{also})")


def add_end_options(options: argparse.ArgumentParser) -> None:
    """Add the options of stop conditions, and the seed."""
    options.add_argument(
        "--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="strings before which a text ends"
    )
    options.add_argument(
        "--stop-token-ids", nargs="+", type=int, action="extend", default=[], metavar="ID", help="ids that end a text"
    )
    options.add_argument("--seed", type=int, default=0, help="random seed, from 0 to 2^32 - 1")


def user_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling settings that a user gives, after checking them."""
    settings = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    Sampling(**settings)
    return settings


def tell_sampling_defaults(command: str, model: LanguageModel, settings: Mapping[str, Any]) -> None:
    """Print which of the model's sampling defaults apply beside a user's settings, if any do, on standard error."""
    values = defaults_in_force(model.sampling_defaults, settings)
    if values:
        shown = ", ".join(f"{name}={value:g}" for name, value in values.items())
        print(f"kvjax {command}: {model.sampling_defaults.source} sets {shown}; options replace them.", file=sys.stderr)


def sampling_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling settings and stop conditions as keywords of `kvjax.generation.generate.begin`."""
    settings = user_sampling(options)
    ends = {"stop": stop_strings(options.stop), "stop_token_ids": tuple(options.stop_token_ids)}
    return settings | ends | {"seed": seed_number(options.seed)}


def print_policy_help(options: argparse.Namespace, parser: Callable[[], argparse.ArgumentParser]) -> bool:
    """Print help or the list of policies if a command line asks for it; return whether it did."""
    helps = vars(options).get("help", False)
    if helps and options.policy is not None:
        explain_policy(options.policy)
    elif helps:
        parser().print_help()
    elif options.policy == "list":
        list_policies()
    else:
        return False
    return True


def list_policies() -> None:
    """Print the policies in groups and the choices of the other parts, with their settings."""
    groups = [(f"policies (--policy): {group}", entries) for group, entries in describe.policies().items()]
    groups += [(f"{part}s (--{part})", entries) for part, entries in describe.parts().items()]
    shown = console(110)
    for title, entries in groups:
        columns = Column(no_wrap=True, min_width=15), Column(ratio=1), Column(width=24)
        table = _table(title, *columns, show_header=False)
        for entry in entries:
            settings = "  ".join(f"{setting.name}={setting.default!r}" for setting in entry.settings)
            text = Text(entry.summary)
            table.add_row(entry.name, text.append(f"\n{settings}", "dim") if settings else text, entry.paper)
        shown.print(table, "")
    common = ", ".join(f"{setting.name}={setting.default!r}" for setting in describe.common())
    shown.print(f"Nearly every policy also takes {common}. --policy NAME --help explains the settings.")


def explain_policy(name: str) -> None:
    """Print what a policy and the parts in its name are, with tables of their settings, defaults and meanings."""
    spec, shown = parse_policy(name), console(110)
    for entry in describe.describe_named(spec.name, spec.parts):
        heading = [f"{entry.name}: {entry.summary}", f"From: {entry.paper.rstrip('.')}." if entry.paper else ""]
        shown.print(" ".join(filter(None, heading)))
        shown.print(f"When: {entry.when}\n" if entry.when else "")
        columns = Column("setting", no_wrap=True), Column("default", no_wrap=True), Column("meaning", ratio=1)
        table = _table("settings (--set key=value)", *columns)
        for setting in entry.settings:
            needed = setting.default is inspect.Parameter.empty
            table.add_row(setting.name, Text("needed" if needed else repr(setting.default)), Text(setting.meaning))
        if entry.settings:
            shown.print(table)


def _table(title: str, *columns: Column, **settings: Any) -> Table:
    style: dict[str, Any] = dict(title_justify="left", title_style="bold", box=None, padding=(0, 1))
    return Table(*columns, title=title, **style, **settings)


def console(width: int) -> Console:
    """Return a console as wide as the terminal, or `width` if the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=False)


def parts_of(options: argparse.Namespace) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Return the parts by kind, and the settings, from the options of `add_parts`."""
    return {part: getattr(options, part) for part in PART_KEYS}, parse_settings(options.settings)


def policy_and_budget(
    options: argparse.Namespace, default: str = "full", slots: float = 1.0, base: str = BUDGET_BASES[0]
) -> tuple[Policy, dict[str, Any]]:
    """Return the policy that a command line names, and its budget and chunk settings as keywords of `kvjax.prefill`.

    Args:
        slots: budget if none is named, for policies that have one.
        base: what a fractional budget is a fraction of, unless an option sets it.
    """
    policy, config = policy_and_config(options, default)
    bounded = policy.plan.sizing.mode == "budget"
    slots = config.get("budget", slots if bounded else 1.0)
    budget = slots if options.budget is None else parse_budgets(options.budget)
    check_bounded(policy, budget)
    chunk = config.get("prefill_chunk") if options.prefill_chunk is None else options.prefill_chunk
    base = options.budget_of or config.get("budget_of", base)
    return policy, {"budget": budget, "budget_of": base, "prefill_chunk": chunk}


def policy_and_config(options: argparse.Namespace, default: str) -> tuple[Policy, dict[str, Any]]:
    """Return the policy, or the default one, and the config that a command line names."""
    config = read_config(options.config) if options.config is not None else {}
    preset = parse_policy(config.get("policy", default))
    spec = preset if options.policy is None else parse_policy(options.policy)
    preset_parts = preset.parts | {part: config[part] for part in PART_KEYS if part in config}
    parts, option_settings = parts_of(options)
    option_parts = combined_parts(spec.parts, parts)
    parts = preset_parts | {part: name for part, name in option_parts.items() if name is not None}
    # A config's settings apply only to its own policy and parts.
    defaults = preset.settings | config.get("settings", {})
    same = {part: parts.get(part) == preset_parts.get(part) for part in PART_KEYS}
    same["policy"] = spec.name == preset.name
    # A part that does not exist differs in nothing, so that `policy` refuses it.
    settings = {
        key: defaults[key] for key in defaults if same.get(key.partition(".")[0] if "." in key else "policy", True)
    }
    settings |= spec.settings | option_settings
    if options.less_checkpoint is not None:
        settings["checkpoint" if spec.name == "less" else "residual.checkpoint"] = options.less_checkpoint
    return methods.policy(spec.name, **parts, **settings), config
