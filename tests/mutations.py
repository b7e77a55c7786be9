"""Mutation testing: small changes to what evicts, ranks and attends, and whether the default suite notices them.

    pip install cosmic-ray && python -m tests.mutations --sample 150

changes one place at a time in a copy of the tree and runs the tests that are about it, until one fails. A run that was
cut goes on where it stopped. What survived stands in docs/results/mutations.md, with reasons from mutations.toml here.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import math
import os
import queue
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
FIELDS: tuple[str, ...] = (
    "file",
    "line",
    "column",
    "definition",
    "operator",
    "occurrence",
    "nth",
    "before",
    "after",
    "outcome",
    "by",
)
_ORACLES, _CONTRACT = "tests/methods/test_oracles.py", "tests/policies/test_contract.py"
_CORE, _DEFAULTS = f"{_ORACLES} -m core", "tests/methods/test_defaults.py"
_ATTENTION = (
    _CORE,
    f"{_ORACLES} -k 'snapkv or scissorhands or keyformer'",
    "tests/methods/test_window_attention.py tests/inference/test_layers.py",
    _CONTRACT,
    "tests/methods/test_fastgen.py",
)
_PAGES = (
    f"{_ORACLES} -k 'fastgen or adakv'",
    "tests/methods/test_fastgen.py",
    "tests/cache/test_rows.py tests/inference/test_extend.py",
    "tests/pallas_kernels/test_paged_attention.py",
)
# For each file the tests that are about it, the quickest first. A mutant that all of them let live might still be
# noticed elsewhere in the default suite: what is reported as killed is a lower bound.
TESTS: dict[str, tuple[str, ...]] = {
    "kvjax/methods/h2o.py": (_DEFAULTS, f"{_ORACLES} -k h2o", "tests/methods/test_keyformer.py", f"{_CONTRACT} -k h2o"),
    "kvjax/methods/keyformer.py": (
        _DEFAULTS,
        f"{_ORACLES} -k keyformer",
        "tests/methods/test_keyformer.py tests/inference/test_extend.py -k keyformer",
        f"{_CONTRACT} -k keyformer",
    ),
    "kvjax/methods/l2.py": (_DEFAULTS, f"{_ORACLES} -k l2", f"{_CONTRACT} -k l2"),
    "kvjax/methods/lsh_e.py": (
        _DEFAULTS,
        f"{_ORACLES} -k lsh_e",
        f"{_CONTRACT} -k lsh_e",
        "tests/policies/test_codec.py",
        "tests/methods/test_noise.py",
    ),
    "kvjax/methods/random.py": (_DEFAULTS, f"{_ORACLES} -k random", f"{_CONTRACT} -k random"),
    "kvjax/methods/window.py": (
        _DEFAULTS,
        f"{_ORACLES} -k 'window or streaming or lambda or full'",
        f"{_CONTRACT} -k 'window or streaming or full'",
    ),
    "kvjax/methods/scissorhands.py": (_DEFAULTS, f"{_ORACLES} -k scissorhands", f"{_CONTRACT} -k scissorhands"),
    "kvjax/methods/snapkv.py": (
        _DEFAULTS,
        f"{_ORACLES} -k 'snapkv or pyramidkv'",
        f"{_CONTRACT} -k 'snapkv or pyramid'",
    ),
    "kvjax/methods/tova.py": (_DEFAULTS, f"{_ORACLES} -k tova", f"{_CONTRACT} -k tova"),
    "kvjax/methods/fastgen.py": (
        _DEFAULTS,
        f"{_ORACLES} -k fastgen",
        "tests/methods/test_fastgen.py",
        f"{_CONTRACT} -k fastgen",
    ),
    "kvjax/methods/lightkv.py": (
        _DEFAULTS,
        f"{_ORACLES} -k lightkv",
        "tests/methods/test_window_attention.py",
        "tests/policies/test_allocation.py",
        f"{_CONTRACT} -k lightkv",
    ),
    "kvjax/methods/adakv.py": (
        _DEFAULTS,
        "tests/policies/test_allocation.py",
        f"{_ORACLES} -k 'adakv or ada_kv'",
        "tests/methods/test_fastgen.py",
        "tests/inference/test_extend.py",
        f"{_CONTRACT} -k beyond_what",
    ),
    "kvjax/methods/interleaved.py": (_DEFAULTS, "tests/policies/test_allocation.py", f"{_ORACLES} -k interleaved"),
    "kvjax/methods/pyramidkv.py": (_DEFAULTS, "tests/policies/test_allocation.py", f"{_ORACLES} -k pyramid"),
    "kvjax/policies/allocation.py": (
        _DEFAULTS,
        "tests/policies/test_allocation.py",
        f"{_ORACLES} -k 'pyramid or interleaved or adakv or ada_kv'",
        "tests/methods/test_fastgen.py",
        "tests/inference/test_extend.py",
        f"{_CONTRACT} -k beyond_what",
    ),
    "kvjax/policies/protection.py": (
        _DEFAULTS,
        f"{_ORACLES} -k h2o",
        f"{_CONTRACT} -k protected",
        f"{_ORACLES} -m core",
        "tests/generation/test_generate.py -k one_sentence",
    ),
    "kvjax/methods/less/memory.py": (
        _DEFAULTS,
        f"{_ORACLES} -k less",
        "tests/methods/less/test_less.py",
        "tests/training/less/test_train.py",
        "tests/generation/test_generate.py -k one_sentence",
    ),
    "kvjax/methods/less/feature_maps.py": (
        f"{_ORACLES} -k less",
        "tests/methods/less/test_less.py",
        "tests/training/less/test_recipe.py",
    ),
    "kvjax/training/less/loss.py": ("tests/training/less/test_recipe.py", "tests/training/less/test_train.py"),
    "kvjax/training/less/record.py": ("tests/training/less/test_recipe.py", "tests/training/less/test_train.py"),
    "kvjax/training/less/train.py": ("tests/training/less/test_recipe.py", "tests/training/less/test_train.py"),
    "kvjax/methods/topk_oracle.py": (_DEFAULTS, f"{_ORACLES} -k topk", f"{_CONTRACT} -k topk"),
    "kvjax/policies/codec.py": (
        f"{_ORACLES} -k 'positions or streaming'",
        "tests/policies/test_codec.py tests/policies/test_quantizer.py",
        f"{_ORACLES} -k 'int8 or int4 or fp8'",
        "tests/inference/test_layers.py",
        "tests/cache/test_rows.py tests/inference/test_extend.py",
    ),
    **dict.fromkeys(
        ("kvjax/cache/slots.py", "kvjax/cache/keep.py"),
        (_CORE, "tests/inference/test_extend.py tests/cache/test_rows.py", "tests/methods/test_window_attention.py"),
    ),
    "kvjax/cache/fused.py": ("tests/pallas_kernels/test_evict.py",),
    "kvjax/cache/buffers.py": (
        _CORE,
        "tests/inference/test_extend.py tests/cache/test_rows.py",
        "tests/methods/test_window_attention.py",
    ),
    "kvjax/cache/evict.py": (
        _CORE,
        f"{_ORACLES} -k 'lsh_e or less'",
        "tests/inference/test_extend.py tests/cache/test_rows.py",
    ),
    "kvjax/cache/stats.py": _ATTENTION,
    "kvjax/cache/attention.py": _ATTENTION,
    "kvjax/cache/recompute.py": _ATTENTION,
    "kvjax/cache/paged/build.py": _PAGES,
    "kvjax/cache/paged/pages.py": _PAGES,
    "kvjax/cache/paged/select.py": _PAGES,
    "kvjax/cache/paged/stats.py": _PAGES,
    "kvjax/cache/paged/table.py": _PAGES,
    "kvjax/cache/paged/storage.py": _PAGES,
    "kvjax/policies/quantizer.py": ("tests/policies/test_codec.py", f"{_ORACLES} -k 'int8 or int4'"),
    "kvjax/cache/ranks.py": (
        _CORE,
        "tests/policies/test_allocation.py",
        f"{_ORACLES} -k 'adakv or positions'",
        _CONTRACT,
        "tests/methods/test_fastgen.py",
    ),
    "pallas_kernels/ranking.py": ("tests/pallas_kernels/test_evict.py", _CORE, f"{_CONTRACT} -k h2o"),
    "pallas_kernels/attention.py": (
        "tests/pallas_kernels/test_decode_attention.py",
        "tests/policies/test_allocation.py",
        _CORE,
        "tests/inference/test_layers.py tests/models/test_models.py",
    ),
}


def mutants() -> Iterator[dict[str, str]]:
    """Every change of every place in the files of `TESTS`, without annotations and sentences for people."""
    from cosmic_ray.commands.init import _all_work_items  # pyright: ignore[reportMissingImports]

    for file in TESTS:
        source = (ROOT / file).read_text()
        aside, lines = _aside(ast.parse(source)), source.splitlines()
        for item in _all_work_items([ROOT / file], {}):
            (mutation,) = item.mutations
            line, column = mutation.start_pos
            if any(first <= (line, column) < last for first, last in aside):
                continue
            yield {
                "file": file,
                "line": str(line),
                "column": str(column),
                "definition": mutation.definition_name or "",
                "operator": mutation.operator_name.removeprefix("core/"),
                "occurrence": str(mutation.occurrence),
                "before": lines[line - 1].strip(),
            }


def _aside(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change changes nothing that runs (annotations) or only what is said to people (what is raised)."""
    found: list[ast.expr | ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found += [argument.annotation for argument in arguments if argument.annotation is not None]
            found += [] if node.returns is None else [node.returns]
        elif isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.Raise):
            found.append(node)
        elif isinstance(node, ast.Assign) and not any(isinstance(each, ast.Call) for each in ast.walk(node.value)):
            # Unions of types have names at the top of a module.
            found += [node] if node in tree.body and isinstance(node.value, ast.BinOp) else []
    return [((n.lineno, n.col_offset), (n.end_lineno or n.lineno, n.end_col_offset or 0)) for n in found]


def drawn(size: int, seed: int) -> list[dict[str, str]]:
    """One change each of some places: places are drawn, not changes, for an operator has twelve others to become.

    What is drawn depends on the text of lines, not on their numbers: a change elsewhere leaves most of a sample alone.
    """
    places: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for mutant in mutants():
        mutant["nth"] = str(len(places.setdefault((mutant["file"], mutant["line"], mutant["column"]), [])))
        places[mutant["file"], mutant["line"], mutant["column"]].append(mutant)

    def order(chosen: list[dict[str, str]]) -> str:
        return hashlib.sha256(f"{seed} {' '.join(key(chosen[0])[:3])}".encode()).hexdigest()

    print(
        f"{sum(map(len, places.values()))} changes of {len(places)} places; {size} places are tried.", file=sys.stderr
    )
    return [random.Random(order(chosen)).choice(chosen) for chosen in sorted(places.values(), key=order)[:size]]


def key(mutant: dict[str, str]) -> tuple[str, str, str, str, str]:
    """What tells a change from others wherever its line stands: file, line's text, column, operator, which of them."""
    return mutant["file"], mutant["before"], mutant["column"], mutant["operator"], mutant["nth"]


def tried(mutant: dict[str, str], tree: Path) -> dict[str, str]:
    """A change with its outcome: killed, timeout or survived, and by which tests."""
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

    file = mutant["file"]
    source = (ROOT / file).read_text()
    changed = mutate_code(source, get_operator("core/" + mutant["operator"])(), int(mutant["occurrence"]))
    assert changed is not None
    lines = zip(source.splitlines(), changed.splitlines(), strict=False)
    found = mutant | {"after": next((new.strip() for old, new in lines if new != old), "")}
    (tree / file).write_text(changed)
    try:
        for tests in TESTS[file]:
            outcome = _outcome(tests, tree)
            if outcome:
                (tree / file).write_text(source)
                _check_sound(tests, tree)
                return found | {"outcome": outcome, "by": tests}
        return found | {"outcome": "survived", "by": ""}
    finally:
        (tree / file).write_text(source)


def _outcome(tests: str, tree: Path) -> str:
    """What tests say of a tree: killed, timeout, or nothing."""
    # Most programs are those of the change before.
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(tree.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment = os.environ | kept | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "CI": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    try:
        code = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=900).returncode
    except subprocess.TimeoutExpired:
        return "timeout"
    return "" if code in (0, 5) else "killed"  # 5: no test was chosen


_sound: set[str] = set()


def _check_sound(tests: str, tree: Path) -> None:
    """That tests which noticed a change pass without it."""
    if tests not in _sound and _outcome(tests, tree):
        raise RuntimeError(f"pytest {tests} fails in a tree that nothing was changed in.")
    _sound.add(tests)


EQUAL = "equal: "
"""How reasons begin where the changed program does the same."""


def report(rows: list[dict[str, str]], size: int, seed: int) -> str:
    """The page: how many were killed, file by file, and what survived."""
    reasons = tomllib.loads((Path(__file__).with_suffix(".toml")).read_text())

    def why(row: dict[str, str]) -> str:
        return reasons.get(row["file"], {}).get(row["after"], "not looked at")

    survived = [row for row in rows if row["outcome"] == "survived"]
    equal = sum(why(row).startswith(EQUAL) for row in survived)
    killed, could = len(rows) - len(survived), len(rows) - equal
    low, high = _interval(killed, could)
    lines = [
        "# Mutation testing",
        "",
        f"`python -m tests.mutations --sample {size} --seed {seed}` changed {len(rows)} places in the files below, one "
        f"at a time, and the tests about the file noticed {killed}. Of the {len(survived)} that they did not notice, "
        f"{equal} change nothing that could be noticed; of the others **{killed / could:.0%}** were noticed (95% "
        f"interval {low:.0%} to {high:.0%}). Changes of annotations and of what is raised are left out. What earlier "
        "runs of this sample let live has tests now, so another seed may do worse. Raw rows: mutations.csv.",
        "",
        "| file | tried | noticed |",
        "|---|---|---|",
    ]
    for file in TESTS:
        mine = [row for row in rows if row["file"] == file]
        if mine:
            lines.append(f"| {file} | {len(mine)} | {sum(row['outcome'] != 'survived' for row in mine)} |")
    lines += ["", "## What survived", "", "| where | before | after | why |", "|---|---|---|---|"]
    for row in rows:
        if row["outcome"] == "survived":
            code = (f"`{row[name]}`".replace("|", "\\|") for name in ("before", "after"))
            where = f"{row['file']}, {row['definition']}"
            lines.append(f"| {where} | {' | '.join(code)} | {why(row)} |")
    return "\n".join(lines) + "\n"


def _interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    width = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return middle - width, middle + width


def _copied(tree: Path) -> Path:
    """A copy of what git knows of this tree."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return tree


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sample", type=int, default=150, help="places to change (default: 150)")
    options.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    options.add_argument("--jobs", type=int, default=1, help="places that are changed at a time, each in its own copy")
    given = options.parse_args()
    file = RESULTS / "mutations.csv"
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    done = {key(row): row for row in rows}
    wanted = drawn(given.sample, given.seed)
    with tempfile.TemporaryDirectory() as directory:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(given.jobs):
            trees.put(_copied(Path(directory) / str(job)))

        def one(mutant: dict[str, str]) -> dict[str, str]:
            tree = trees.get()
            try:
                return tried(mutant, tree)
            finally:
                trees.put(tree)

        missing = [mutant for mutant in wanted if key(mutant) not in done]
        with ThreadPool(given.jobs) as pool:
            for row in track(pool.imap_unordered(one, missing), "mutants", total=len(missing)):
                done[key(row)] = row
                aside = file.with_suffix(".part")
                with aside.open("w", newline="") as target:
                    writer = csv.DictWriter(target, FIELDS)
                    writer.writeheader()
                    writer.writerows(done.values())
                aside.replace(file)
    tried_rows = [done[key(mutant)] for mutant in wanted]
    (RESULTS / "mutations.md").write_text(report(tried_rows, given.sample, given.seed))


if __name__ == "__main__":
    main()
