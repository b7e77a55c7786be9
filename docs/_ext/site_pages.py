"""Pages that are made when the site is built: one for each member of the registry, and files that stand elsewhere.

They are written to folders of docs/ that git ignores, and only where something changed: Sphinx reads no page twice.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

import kvjax
import site_figures
from kvjax.cache.buffers import allocated_bytes, slot_bytes
from kvjax.cache.slots import empty_slots
from kvjax.inference.decode import trace_step
from kvjax.inference.prepare import bind_policy
from kvjax.inference.shapes import empty_state, state_shapes
from kvjax.methods import describe
from kvjax.methods.describe import Description
from kvjax.policies.base import Part
from kvjax.policies.policy import Policy
from kvjax.policies.stats import StatRequest
from kvjax.utils.markdown import markdown_table

DOCS = Path(__file__).parent.parent
HERE = DOCS.parent
MADE = DOCS / "parts"
BORROWED = DOCS / "project"
PROJECT = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kvjax/tiny/weights/README.md": "tiny.md",
}
"""Files of the repository that are pages here."""

INTRODUCTION = """A policy is a record of parts, and any part can be replaced by any other of its kind. Each page is
made from the file that it is about, and from the rows of measurements beside
[the report on SmolLM2](../results/smollm2.md)."""

SLOTS = 128
"""Of each head in the steps whose operations are counted, and twice as many."""


class Costs(NamedTuple):
    """What a policy costs on the embedded model, in float32.

    Args:
        slot: bytes of a slot beside key and value.
        head: bytes of a KV head beside its slots.
        operations: of a decode step beyond `window`'s, for each slot of each KV head; None if they cannot be counted.
        fixed: the same for each KV head, however many slots it has.
        uncounted: why they cannot be.
    """

    slot: int
    head: int
    operations: float | None
    fixed: float | None
    uncounted: str = ""


def costs(model: kvjax.Model, policy: Policy) -> Costs:
    """What a policy costs, from the shapes of its buffers and from programs before they are compiled."""
    slot, head = _bytes(model, policy)
    layer = model.config.layer_configs[0]
    pair = (layer.key_width + layer.value_width) * model.weights.dtype.itemsize
    if policy.plan.sizing.per_head:
        return Costs(slot - pair, head, None, None, "Heads have slots of their own: a step depends on the text.")
    step = _step(model, policy, SLOTS)
    if "stablehlo.while" in step.as_text():
        return Costs(slot - pair, head, None, None, "A step has loops in it, whose operations XLA does not count.")
    heads = model.config.layers * layer.kv_heads
    few = _operations(step) - _window_operations(SLOTS)
    many = _operations(_step(model, policy, 2 * SLOTS)) - _window_operations(2 * SLOTS)
    each = (many - few) / SLOTS / heads
    return Costs(slot - pair, head, each, few / heads - SLOTS * each)


@functools.cache
def _window_operations(slots: int) -> float:
    return _operations(_step(kvjax.load("tiny"), kvjax.policy("window"), slots))


def _operations(step: Any) -> float:
    return step.cost_analysis()["flops"]


def _step(model: kvjax.Model, policy: Policy, slots: int) -> Any:
    if policy.bounded:  # an empty state has the same buffers, and no prompt's program is traced
        state = empty_state(model, bind_policy(model, policy, slots, None), 1, 2 * slots, slots)
    else:
        state = state_shapes(model, policy, 1, slots, max_new_tokens=slots)
    return trace_step(state).lower()


def _bytes(model: kvjax.Model, policy: Policy) -> tuple[int, int]:
    bound, layer = policy.bind(model).sized((SLOTS,) * model.config.layers).layer(0), model.config.layer_configs[0]
    limit, dtype = jnp.ones((1, layer.kv_heads), jnp.int32), model.weights.dtype
    made = jax.eval_shape(functools.partial(empty_slots, bound, layer, 0, slots=1, dtype=dtype), limit=limit)
    return slot_bytes(made), allocated_bytes(made.state) // layer.kv_heads


def page(entry: Description, part: str, body: Sequence[str]) -> str:
    """A page of Markdown about a member of a table."""
    return "\n\n".join(
        [
            f"# {entry.name}" if part == "policy" else f"# {entry.name}, a {part}",
            f"{_prose(entry.summary)} From: {entry.paper.rstrip('.')}.",
            f"**When to take it:** {_prose(entry.when)}",
            *body,
            _use(entry, part),
            _file(entry),
        ]
    )


def _use(entry: Description, part: str) -> str:
    chosen = f"--policy {entry.name}" if part == "policy" else f"--policy h2o --{part} {entry.name}"
    call = f'"{entry.name}"' if part == "policy" else f'"h2o", {part}="{entry.name}"'
    plan = kvjax.policy(entry.name if part == "policy" else "h2o").plan
    budget = " --budget 64" if plan.sizing.mode == "budget" else ""
    command = f'kvjax generate --prompt "Once upon a time" {chosen}{budget}'
    return f"## Use\n\n```sh\n{command}\n```\n\n```python\npolicy = kvjax.policy({call})\n```"


def _prose(text: str) -> str:
    # Docstrings are reStructuredText; of its marks their first sentences have none but code.
    return re.sub(r"\*\*|__", lambda found: "\\" + found[0], text)


def _explained(sources: Iterable[Any]) -> str:
    """What the docstrings of a method's parts say, formulas among it."""
    found = {source: describe.explanation(source) for source in sources}
    said = [
        f"```{{eval-rst}}\n{text}\n```" if len(found) == 1 else f"**{_title(source)}**\n\n```{{eval-rst}}\n{text}\n```"
        for source, text in found.items()
        if text
    ]
    return "\n\n".join(["## What it does", *said])


def _title(source: Any) -> str:
    summary = (inspect.getdoc(source) or "").partition("\n")[0]
    kind = next((base.__name__.lower() for base in getattr(source, "__mro__", ()) if base in _KINDS), "policy")
    first = summary.partition(" ")[0]
    begun = summary if first[1:].lower() != first[1:] else summary[0].lower() + summary[1:]
    return f"{kind.capitalize()}: {begun.rstrip('.')}."


_REQUESTS = tuple(request.__name__ for request in get_args(StatRequest))
_KINDS = (kvjax.Score, kvjax.Protection, kvjax.Plan, kvjax.Residual, kvjax.Selection)


def _attention(sources: Iterable[Any]) -> str:
    """Return the section about the attention statistics that the parts request, from their methods."""
    sources, title = list(sources), "## Attention statistics"
    inherited = Part.attention_stats
    requesting = [source for source in sources if getattr(source, "attention_stats", inherited) is not inherited]
    if any(isinstance(source, type) and issubclass(source, kvjax.Selection) for source in sources):
        return f"{title}\n\nIt computes every probability, and selects the tokens that a query attends to by them."
    if not requesting:
        return f"{title}\n\nIt requests none."
    lines = []
    for source in requesting:
        wanted = re.findall(rf"\b({'|'.join(_REQUESTS)})\b", inspect.getsource(source.attention_stats))
        names = ", ".join(f"{{py:class}}`kvjax.{name}`" for name in dict.fromkeys(wanted))
        summary = (inspect.getdoc(source.attention_stats) or "").partition("\n")[0]
        lines.append(f"- {names}: {summary}" if names else f"- {summary}")
    return "\n".join([f"{title}\n", *lines])


def _settings(entry: Description) -> str:
    if not entry.settings:
        return ""
    rows = [
        [f"`{setting.name}`", f"`{setting.kind}`", f"`{setting.default!r}`", _prose(setting.meaning)]
        for setting in entry.settings
    ]
    return "## Settings\n\n" + markdown_table(["setting", "type", "default", "meaning"], rows)


def _costs(found: Costs) -> str:
    lines = [
        f"- {found.slot} bytes for each slot beside its key and value, 4 of them for its position.",
        f"- {found.head:,} bytes for each KV head beside its slots.",
    ]
    if found.operations is None or found.fixed is None:
        lines.append(f"- {found.uncounted}")
    else:
        lines.append(
            f"- {_count(found.operations)} for each slot and {_count(found.fixed)} for each KV head of a decode step "
            "more than `window` has, as XLA counts them before it optimises; attention itself takes 256 for a slot."
        )
    note = f"Of the embedded model in float32 (4 layers, 2 KV heads of width 32, {SLOTS} slots)."
    return "\n".join(["## What it costs\n", note + "\n", *lines])


def _count(number: float) -> str:
    rounded = round(number)
    return f"{rounded:,} operation{'' if rounded == 1 else 's'}"


def _file(entry: Description) -> str:
    file = Path(inspect.getsourcefile(entry.sources[0]) or "").resolve()
    name = file.relative_to(HERE.resolve())
    shown = ""
    if name.parts[:2] == ("kvjax", "methods"):
        target = "/".join([".."] * 3 + list(name.parts))
        shown = f"\n\n```{{literalinclude}} {target}\n:language: python\n```"
    return f"## The file\n\n`{name}`{shown}"


def overview(
    policies: dict[str, list[Description]], parts: dict[str, list[Description]], found: dict[str, Costs]
) -> str:
    """The table of all policies and parts."""
    said = ["# Policies and parts", INTRODUCTION]
    rows = [
        [
            f"[`{entry.name}`](policies/{entry.name}.md)",
            _prose(entry.summary),
            entry.paper,
            "no" if "requests none" in _attention(entry.sources) else "yes",
            found[entry.name].slot,
        ]
        for entries in policies.values()
        for entry in entries
    ]
    said += [
        "## Policies",
        markdown_table(["policy", "keeps", "from", "attention statistics", "bytes per slot beyond K and V"], rows),
    ]
    for part, entries in parts.items():
        rows = [[f"[`{e.name}`]({part}s/{e.name}.md)", _prose(e.summary), e.paper.rstrip(".")] for e in entries]
        said += [f"## {part.capitalize()}s", markdown_table([part, "does", "from"], rows)]
    for title, entries, folder in [
        *((group[0].upper() + group[1:], entries, "policies") for group, entries in policies.items()),
        *((f"{part.capitalize()}s", entries, f"{part}s") for part, entries in parts.items()),
    ]:
        names = "\n".join(f"{folder}/{entry.name}" for entry in entries)
        said.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n:maxdepth: 1\n{names}\n```")
    return "\n\n".join(said)


def make_pages(app: Sphinx) -> None:
    """Write all pages that are made."""
    model = kvjax.load("tiny")
    measured = site_figures.rows(DOCS / "results" / "smollm2")
    policies, parts = describe.policies(), describe.parts()
    written: set[Path] = set()
    found: dict[str, Costs] = {}
    for names in policies.values():
        for entry in (describe.describe_policy(entry.name) for entry in names):
            found[entry.name] = costs(model, kvjax.policy(entry.name))
            body = [_explained(entry.sources), _attention(entry.sources), _costs(found[entry.name]), _settings(entry)]
            written |= _write(entry, "policy", "policies", body, measured)
    for part, entries in parts.items():
        for entry in entries:
            body = [_explained(entry.sources)]
            if part == "plan" and not kvjax.methods.PLANS[entry.name]().sizing.per_head:
                file = MADE / f"{part}s" / f"{entry.name}_slots.svg"
                site_figures.budgets(kvjax.methods.PLANS[entry.name](), file)
                written.add(file)
                said = "Slots of a head in each of 32 layers, at a budget of 128"
                body.append(f"![{said}]({file.name})\n\n*{said}.*")
            if part in ("residual", "codec"):
                body.append(_costs(costs(model, kvjax.policy("h2o", **{part: entry.name}))))
            body += [_attention(entry.sources)] if part in ("plan", "selection") else []
            written |= _write(entry, part, f"{part}s", [*body, _settings(entry)], measured)
    written.add(_put(MADE / "index.md", overview(policies, parts, found)))
    for name, file in PROJECT.items():
        written.add(_put(BORROWED / file, (HERE / name).read_text(encoding="utf-8")))
    for notebook in sorted((HERE / "notebooks").glob("*.ipynb")):
        text = with_badge(notebook.read_text(encoding="utf-8"), notebook.name, app.config.repository)
        written.add(_put(BORROWED / "notebooks" / notebook.name, text))
    site_figures.floors(HERE / "pyproject.toml", BORROWED / "floors.svg")
    written.add(BORROWED / "floors.svg")
    for folder in (MADE, BORROWED):
        for file in folder.rglob("*"):
            if file.is_file() and file not in written and not file.name.startswith("."):
                file.unlink()


def with_badge(notebook: str, name: str, repository: str) -> str:
    """Return a notebook's JSON with a badge on top that opens it in Colab.

    Args:
        notebook: its JSON.
        name: of its file in `notebooks/`.
        repository: `owner/name` on GitHub; empty for no badge.
    """
    if not repository:
        return notebook
    colab = "https://colab.research.google.com"
    badge = (
        f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/github/{repository}/blob/main/notebooks/{name})"
    )
    content = json.loads(notebook)
    content["cells"].insert(0, {"cell_type": "markdown", "id": "colab", "metadata": {}, "source": [badge]})
    return json.dumps(content, indent=1)


def _write(entry: Description, part: str, folder: str, body: Sequence[str], measured: Sequence[Any]) -> set[Path]:
    file = MADE / folder / f"{entry.name}.md"
    figures = site_figures.quality(measured, entry.name, part, file.parent)
    whose = site_figures.SHOWN_BY.get((part, entry.name), entry.name)
    said = f"Perplexity of SmolLM2 against the bytes of the cache, {whose} among the others"
    shown = " ".join(f"![{said}]({figure.name}){{.half}}" for figure in figures)
    caption = f"*{said} ([all numbers](../../results/smollm2.md)).*" if figures else ""
    _put(file, page(entry, part, [*filter(None, [shown, caption, *body])]))
    return {file, *figures}


def _put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(file)
    return file


def mend_links(app: Sphinx, name: str, content: list[str]) -> None:
    """Let links to files of the repository lead to the pages that they are here."""
    folder = (DOCS / name).parent
    if name.startswith("project/"):
        source = next((each for each, page in PROJECT.items() if f"project/{page}" == f"{name}.md"), None)
        folder = (HERE / source).parent if source else HERE / "notebooks"

    def mended(found: re.Match[str]) -> str:
        target = os.path.relpath((folder / found[1]).resolve(), HERE.resolve())
        here = (DOCS / name).parent
        if target in PROJECT:
            return f"]({os.path.relpath(BORROWED / PROJECT[target], here)}{found[2] or ''})"
        if name.startswith("project/") and (HERE / target).exists():
            return f"]({os.path.relpath(HERE / target, here)}{found[2] or ''})"
        return found[0]

    content[0] = re.sub(r"\]\(([\w./-]+\.(?:md|ipynb|py|toml|png))(#[\w-]+)?\)", mended, content[0])


def setup(app: Sphinx) -> ExtensionMetadata:
    """Tell Sphinx."""
    app.add_config_value("repository", "", "html", str)
    app.connect("builder-inited", make_pages)
    app.connect("source-read", mend_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
