"""Static schedules that the TPU compiler writes as text: one line for each VLIW bundle, about a cycle each."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:((?:\s*>)*)\s*\{(.*)$")
_BRANCH = re.compile(r"sbr\.rel \(!?%(\w+?)(?:_p\d+)?\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_START = re.compile(
    r"(?<!for )%\d+ = dma\.(?!done)\w+ +(?:\[thread:\$\d+\] +)?(?:\(([^)]*)\), )?.*?dst_syncflagno=\*/(\[[^\]]*\])"
)
_WAIT = re.compile(r"= dma\.done\.wait (?:\(([^)]*)\), )?(\[[^\]]*\])")
_PIPELINE = "pipeline-emitter-dma-wait"


class Schedule(NamedTuple):
    """Bundles of a kernel by region, and the waits of its grid steps."""

    once: int
    """Bundles before and after the loop over grid steps."""
    step: int
    """Bundles of every grid step."""
    rarely: int
    """Bundles that a grid step may skip: at the beginning or end of a row."""
    inner: int
    """Bundles of `step` and `rarely` in loops inside of a step; each iteration takes the same number."""
    copies: int
    """Copies that start and finish in the same grid step."""
    waits: int
    """Waits of every grid step for these copies; copies that are in flight together take one latency."""
    rare_waits: int = 0
    """Waits in code that a grid step may skip: at the beginning or end of a row."""

    def cycles(self, steps: int, rows: int, turns: int = 0) -> int:
        """Return the cycles of the whole kernel.

        Args:
            steps: number of grid steps.
            rows: how often the last dimension of the grid restarts.
            turns: iterations of a loop at the end of a row; 0 if unknown, which counts as one.
        """
        return self.once + steps * self.step + rows * (self.rarely + max(turns - 1, 0) * self.inner)


class _Bundle(NamedTuple):
    depth: int
    conditions: tuple[str, ...]
    text: str


def read_schedule(text: str) -> Schedule:
    """Read the schedule of a kernel from a `final_bundles` dump.

    The pipeline guards the body of a grid step by a jump, because its loop begins before the first step. If one more
    jump guards all matrix products, it skips masked work; the schedule counts this work as if it always ran. Any other
    jump depends on the place in a row. A kernel without matrix products is an exception: the body is unknown, so
    everything counts as if no jump were taken. A copy counts as awaited in the step that started it if two conditions
    hold: the wait comes later in the program, and every condition of the wait also guards the start.

    Args:
        text: content of the file.

    Raises:
        ValueError: there are no bundles in it.
    """
    bundles = _bundles(text)
    if not bundles:
        raise ValueError("this is no dump of final bundles: it has no line like '0x1 : { ... }'.")
    guards = _guards(bundles)
    # A grid of one step has no loop.
    loops = any(bundle.depth for bundle in bundles)
    looped = [(bundle, set(bundle.conditions) - guards) for bundle in bundles if bundle.depth or not loops]
    copies, waits, rare_waits = _awaited(looped)
    return Schedule(
        once=len(bundles) - len(looped),
        step=sum(not conditions for _, conditions in looped),
        rarely=sum(bool(conditions) for _, conditions in looped),
        inner=sum(bundle.depth > 1 for bundle, _ in looped),
        copies=copies,
        waits=waits,
        rare_waits=rare_waits,
    )


def _bundles(text: str) -> list[_Bundle]:
    found: list[_Bundle] = []
    skipping: dict[str, str] = {}  # the region where a jump lands, and its condition
    pending: list[tuple[str, str]] = []
    body: list[str] = []

    def close() -> None:
        if body and found:
            found[-1] = found[-1]._replace(text="\n".join(body))

    seen: set[str] = set()
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            body.append(line)  # the text of the bundle continues
            continue
        close()
        body = [match[3]]
        skipping |= {region: condition for condition, region in pending}
        pending = []
        begun = set(_REGION.findall(line))
        seen |= begun
        for region in begun:
            skipping.pop(region, None)
        found.append(_Bundle(match[2].count(">"), tuple(skipping.values()), match[3]))
        # A jump to an earlier region is the loop's.
        pending = [(name, region) for name, region in _BRANCH.findall(line) if region not in seen]
    close()
    return found


def _guards(bundles: list[_Bundle]) -> set[str]:
    looped = [bundle for bundle in bundles if bundle.depth]
    # The pipeline waits for its blocks at the beginning of a step: the conditions of these waits hold in every step.
    known = {name for bundle in looped if _PIPELINE in bundle.text for name in bundle.conditions}
    under = Counter(name for bundle in looped for name in bundle.conditions)
    products = [set(bundle.conditions) - known for bundle in looped if "vmatmul" in bundle.text]
    if not products:
        return set(under)
    if not all(products):
        return known
    return known | {name for names in products for name in names if under[name] > len(looped) / 2}


def _awaited(looped: list[tuple[_Bundle, set[str]]]) -> tuple[int, int, int]:
    flying: dict[str, tuple[int, set[str]]] = {}
    copies = waits = rare_waits = 0
    fresh = False  # whether a copy has started since the last wait
    for bundle, conditions in looped:
        for predicate, flag in _START.findall(bundle.text):
            flying[flag] = (flying.get(flag, (0, set()))[0] + 1, conditions | {predicate} - {""})
            fresh = True
        if _PIPELINE in bundle.text:
            continue
        for predicate, flag in _WAIT.findall(bundle.text):
            number, started = flying.get(flag, (0, set[str]()))
            awaited = conditions | {predicate} - {""}
            if number and awaited <= started:
                copies += number
                waits += fresh and not awaited
                rare_waits += fresh and bool(awaited)
                fresh = False
                del flying[flag]
    return copies, waits, rare_waits
