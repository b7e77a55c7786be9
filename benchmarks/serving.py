"""Throughput, latency and memory of a server with a fixed cache: `kvjax bench serving`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.store import Store
from kvjax.cli.bench import say
from kvjax.cli.commands import Parser, finish
from kvjax.generation.generate import generate_ids
from kvjax.generation.sampling import GREEDY, Sampling
from kvjax.model import Model, load
from kvjax.serving.engine import Engine
from kvjax.serving.requests import Finished, Piece, Request, Ticket
from kvjax.utils.files import output_directory, write_text
from kvjax.utils.markdown import markdown_table
from kvjax.utils.progress import Bar
from kvjax.utils.settings import whole_number

DISTINCT = 400
"""Number of different requests in an endurance run, each of which is also answered alone."""
DISCONNECTS = 0.05
"""Share of the clients that disconnect during their answer."""
SAMPLES = 100
"""Samples of the resident memory in an endurance run."""
CLIENTS = 16
CONTEXT = 1024
BUDGET = CONTEXT // 4


class Client:
    """A client that waits for an answer, and may disconnect before the end.

    Args:
        request: the request.
        leaves_after: number of tokens after which the client disconnects; None for never.
        done: function to call at the end.
    """

    def __init__(self, request: Request, leaves_after: int | None, done: Callable[[Client], None]) -> None:
        self.request, self.leaves_after, self.done = request, leaves_after, done
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.ticket: Ticket | None = None
        self.times: list[tuple[float, int]] = []
        """Seconds since the request, and the number of tokens that arrived then."""
        self.began = time.perf_counter()
        self.seconds = 0.0

    def told(self, news: Piece | Finished) -> None:
        """Receive a part of the answer."""
        now = time.perf_counter() - self.began
        if isinstance(news, Finished):
            self.finished, self.seconds = news, now
            self.done(self)
            return
        self.tokens += news.tokens
        self.times.append((now, len(news.tokens)))
        if self.leaves_after is not None and len(self.tokens) >= self.leaves_after and self.ticket is not None:
            self.ticket.cancel()


def ask(
    engine: Engine, wanted: Iterable[tuple[Request, int | None]], clients: int, done: Callable[[Client], None]
) -> None:
    """Send requests with a number of parallel clients, and wait for all answers.

    Args:
        engine: the engine.
        wanted: requests, each with the number of tokens after which its client disconnects.
        clients: number of parallel clients; each sends its next request after an answer.
        done: function to call for each client, on the engine's thread.
    """
    places = threading.Semaphore(clients)

    def ended(client: Client) -> None:
        done(client)
        places.release()

    for request, leaves_after in wanted:
        places.acquire()
        client = Client(request, leaves_after, ended)
        client.ticket = engine.submit(request, client.told)
    for _ in range(clients):
        places.acquire()


def mixed_requests(count: int, model: Model, budget: int, context: int, seed: int = 0) -> list[Request]:
    """Return mixed requests: different lengths, budgets, sampling settings and ends."""
    rng = np.random.default_rng(seed)
    made: list[Request] = []
    for number in range(count):
        new = int(rng.integers(4, 65))
        length = int(np.exp(rng.uniform(np.log(5), np.log(min(1000, context - new)))))
        temperature = float(rng.choice([0.0, 0.7, 1.0]))
        top_p, top_k = (0.9, None) if rng.random() < 0.3 else (None, 40 if rng.random() < 0.3 else None)
        penalties = rng.uniform(0, 1, 2) * (rng.random(2) < 0.2)
        made.append(
            Request(
                tuple(rng.integers(3, model.config.vocab_size, length).tolist()),
                max_tokens=new,
                sampling=Sampling(temperature, top_k, top_p, repetition_penalty=1.1 if rng.random() < 0.1 else None),
                presence_penalty=float(penalties[0]),
                frequency_penalty=float(penalties[1]),
                seed=number,
                stop=("the",) if rng.random() < 0.2 else (),
                stop_ids=(int(rng.integers(3, model.config.vocab_size)),) if rng.random() < 0.2 else (),
                ignore_eos=bool(rng.random() < 0.5),
                budget=int(rng.integers(budget // 4, budget + 1)) if rng.random() < 0.5 else None,
                logprobs=2 if rng.random() < 0.05 else None,
            )
        )
    return made


def endurance(model: Model, requests: int, rows: int) -> dict[str, Any]:
    """Run many mixed requests; return statistics of answers, programs and resident memory."""
    rng = np.random.default_rng(1)
    pool = mixed_requests(min(DISTINCT, requests), model, BUDGET, CONTEXT)
    alone: dict[int, list[int]] = {}
    with Engine(model, "h2o", BUDGET, rows, CONTEXT) as engine:
        engine.warm_up()
        for number, request in enumerate(pool):
            ask(engine, [(request, None)], 1, lambda client, number=number: alone.update({number: client.tokens}))
        numbers = {request.seed: number for number, request in enumerate(pool)}
        compiled, told = engine.numbers()["compilations"], dict.fromkeys(("whole", "left", "failed", "other"), 0)
        memory: list[tuple[int, float]] = []
        every = max(1, requests // SAMPLES)

        def wanted() -> Iterator[tuple[Request, int | None]]:
            for _ in range(requests):
                leaves = int(rng.integers(1, 8)) if rng.random() < DISCONNECTS else None
                yield pool[int(rng.integers(len(pool)))], leaves

        with Bar("requests", requests) as bar:

            def done(client: Client) -> None:
                answer, found = alone[numbers[client.request.seed]], client.tokens
                assert client.finished is not None
                if client.finished.reason == "failed":
                    told["failed"] += 1
                elif client.finished.reason == "cancelled":
                    told["left" if found == answer[: len(found)] else "other"] += 1
                else:
                    told["whole" if found == answer else "other"] += 1
                count = sum(told.values())
                if count % every == 0:
                    memory.append((count, resident_bytes()))
                bar.advance()

            began = time.perf_counter()
            ask(engine, wanted(), 2 * rows, done)
            seconds = time.perf_counter() - began
        after = engine.numbers()
    counts, sizes = (np.asarray(each, float) for each in zip(*memory, strict=True))

    def slope(since: int) -> float:
        return float(np.polyfit(counts[since:], sizes[since:], 1)[0]) * 1000

    return {
        "requests": requests,
        "distinct": len(pool),
        "rows": rows,
        "answers": told,
        "lost": requests - sum(told.values()),
        "compilations": int(after["compilations"] - compiled),
        "resident_bytes": sizes.astype(int).tolist(),
        "resident_bytes_per_1000_requests": slope(len(memory) // 10),
        "resident_bytes_per_1000_requests_of_the_later_half": slope(len(memory) // 2),
        "cache_bytes": int(after["cache_bytes"]),
        "snapshot_bytes": int(after["snapshot_bytes"]),
        "reused_tokens": int(after["reused_tokens_total"]),
        "seconds": seconds,
        "tokens_per_second": after["tokens_total"] / seconds,
    }


def resident_bytes() -> float:
    """Return the resident bytes of this process, as reported by Linux.

    Raises:
        ValueError: this is no Linux.
    """
    file = Path("/proc/self/statm")
    if not file.exists():
        raise ValueError("an endurance run reads the process's memory from /proc, which is not here; leave it out.")
    return float(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def even_requests(count: int, model: Model, prompt: tuple[int, int], new: tuple[int, int]) -> list[Request]:
    """Return greedy requests, with token counts from the first number of each range to below the second."""
    rng = np.random.default_rng(0)
    return [
        Request(
            tuple(rng.integers(3, model.config.vocab_size, rng.integers(*prompt)).tolist()),
            max_tokens=int(rng.integers(*new)),
            sampling=Sampling(0.0),
            ignore_eos=True,
        )
        for _ in range(count)
    ]


def served(model: Model, requests: Sequence[Request], clients: int, policy: str, rows: int) -> dict[str, Any]:
    """Measure throughput and latencies of an engine."""
    with Engine(model, policy, BUDGET, rows, CONTEXT, snapshot_bytes=0) as engine:
        engine.warm_up()
        ask(engine, [(request, None) for request in requests[:clients]], clients, lambda client: None)
        found: list[Client] = []
        began = time.perf_counter()
        ask(engine, [(request, None) for request in requests], clients, found.append)
        seconds = time.perf_counter() - began
        cache = engine.numbers()["cache_bytes"]
    between: list[float] = []
    for client in found:
        steps = zip(client.times, client.times[1:], strict=False)
        between += [(after - before) / count for (before, _), (after, count) in steps for _ in range(count)]
    first = [client.times[0][0] for client in found if client.times]
    return summary(requests, seconds, [client.seconds for client in found], first, between) | {"cache_bytes": cache}


def in_batches(model: Model, requests: Sequence[Request], clients: int, policy: str) -> dict[str, Any]:
    """Run the same requests in batches that begin and end together, each as long as its longest text."""
    batches = [requests[at : at + clients] for at in range(0, len(requests), clients)]

    def answer(batch: Sequence[Request]) -> float:
        began, longest = time.perf_counter(), max(request.max_tokens for request in batch)
        settings: dict[str, Any] = dict(policy=policy, budget=BUDGET, max_new_tokens=longest, **GREEDY)
        generate_ids(model, [request.prompt for request in batch], stop_at_eos=False, **settings)
        return time.perf_counter() - began

    for batch in batches:
        answer(batch)
    seconds = [answer(batch) for batch in batches]
    waited = [each for each, batch in zip(seconds, batches, strict=True) for _ in batch]
    return summary(requests, sum(seconds), waited, [], [])


def summary(
    requests: Sequence[Request], seconds: float, waited: list[float], first: list[float], between: list[float]
) -> dict[str, Any]:
    """Return rates and percentiles, in seconds."""

    def percentiles(name: str, values: list[float]) -> dict[str, float]:
        if not values:
            return {}
        return {f"{name}_p{share}": float(np.percentile(values, share)) for share in (50, 95, 99)}

    tokens = sum(request.max_tokens for request in requests)
    found = {"requests": len(requests), "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
    return (
        found
        | percentiles("latency", waited)
        | percentiles("first_token", first)
        | percentiles("between_tokens", between)
    )


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to answer the same requests."""

    name: str
    measure: Callable[[Model, Sequence[Request]], dict[str, Any]]


WAYS = (
    Way("one at a time, 1 row", lambda model, requests: served(model, requests, 1, "h2o", 1)),
    Way(f"batches of {CLIENTS}", lambda model, requests: in_batches(model, requests, CLIENTS, "h2o")),
    Way(f"served, {CLIENTS} rows", lambda model, requests: served(model, requests, CLIENTS, "h2o", CLIENTS)),
)
SAME_BYTES = (
    Way("full, 4 rows", lambda model, requests: served(model, requests, CLIENTS, "full", CLIENTS // 4)),
    Way(f"h2o, {CLIENTS} rows", lambda model, requests: served(model, requests, CLIENTS, "h2o", CLIENTS)),
)
GROUPS = {
    "questions": (WAYS, (10, 101), (32, 257)),
    "texts": (WAYS, (100, 601), (16, 129)),
    "same bytes": (SAME_BYTES, (200, 801), (16, 161)),
}
"""Compared ways, with the tokens of prompts and answers."""


def measure(store: Store, model: Model, requests: int, repeats: int) -> None:
    """Measure the values that the page needs for a model and that are not on disk."""
    settings = {"model": model.name, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if requests:
        store.measure(
            f"{model.name}: endurance", settings | {"requests": requests}, lambda: endurance(model, requests, CLIENTS)
        )
    count = 4 * CLIENTS
    for group, (ways, prompt, new) in GROUPS.items():
        asked = even_requests(count, model, prompt, new)

        def rounds(ways: Sequence[Way] = ways, asked: Sequence[Request] = asked) -> list[dict[str, Any]]:
            # Alternate, so other work of the machine affects all of them.
            found = [[way.measure(model, asked) for way in ways] for _ in range(repeats)]
            return [
                {key: statistics.median(each[i][key] for each in found) for key in found[0][i]} | {"way": way.name}
                for i, way in enumerate(ways)
            ]

        lengths = {"prompt": prompt, "new": new}
        store.measure(f"{model.name}: {group}", settings | {"repeats": repeats, "count": count} | lengths, rounds)


def page(results: dict[str, Any]) -> str:
    """Return the report of all measurements."""
    models = list(dict.fromkeys(name.partition(": ")[0] for name in results))
    lines = [
        "# Serving on constant memory",
        "",
        "Made by `kvjax bench serving`, for other models than the embedded one with `--model M --requests 0`; what is "
        "on disk is not measured again. What a table compares ran by turns in one run on one machine: read ratios, "
        f"not times. {CLIENTS} clients wait at once, and each asks again as soon as it has its answer; texts come to "
        f"at most {CONTEXT} tokens, and h2o keeps {BUDGET} of them in each head. Rates, times of answers and of first "
        "tokens, and times between tokens are in units of the last row's rate, median answer and median token. A CPU "
        "gains less by batches than chips do: it reads a prompt no faster among others, and two cores took 6 to 8 "
        "times as long for a step of 16 rows as for one row of the embedded model, 3 times for SmolLM2.",
    ]
    for name in models:
        lines += ["", f"## {name}"]
        if kept := results.get(f"{name}: endurance"):
            lines += ["", _endured(kept)]
        for group, (ways, prompt, new) in GROUPS.items():
            if kept := results.get(f"{name}: {group}"):
                what = f"Prompts of {prompt[0]} to {prompt[1] - 1} tokens, answers of {new[0]} to {new[1] - 1}"
                rates = [_times(kept[-1], other) for other in kept[:-1]]
                if ways is SAME_BYTES:
                    sizes = " and ".join(f"{row['cache_bytes'] / 1e6:.1f} MB" for row in kept)
                    said = f"**A quarter of the slots, four times the rows.** {what}; caches of {sizes}: {rates[0]}"
                else:
                    said = (
                        f"**Continuous batching.** {what}: {rates[0]} of one request at a time (aim: 4), {rates[1]} of "
                        "batches that begin and end together (aim: 1.5)"
                    )
                lines += ["", f"{said} in tokens per second.", "", _compared(kept)]
    return "\n".join(lines).rstrip() + "\n"


def _times(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} times"


def _compared(kept: Sequence[dict[str, Any]]) -> str:
    # In units of the last row: absolute seconds mean little on a machine with other work.
    units = {
        "tokens_per_second": ("tokens_per_second",),
        "latency_p50": ("latency_p50", "latency_p95", "latency_p99", "first_token_p50", "first_token_p95"),
        "between_tokens_p50": ("between_tokens_p50", "between_tokens_p99"),
    }
    rows = [
        [
            row["way"],
            *(f"{row[name] / kept[-1][unit]:.2f}" if name in row else None for unit in units for name in units[unit]),
        ]
        for row in kept
    ]
    heads = ["", "tokens/s", "answer p50", "p95", "p99", "first token p50", "p95", "next token p50", "p99"]
    return markdown_table(heads, rows).rstrip()


def _endured(kept: dict[str, Any]) -> str:
    answers, sizes = kept["answers"], kept["resident_bytes"]
    first, last = sizes[len(sizes) // 10], sizes[-1]
    megabytes = {name: f"{kept[name] / 1e6:.1f} MB" for name in ("cache_bytes", "snapshot_bytes")}
    slope, later = (kept[f"resident_bytes_per_1000_requests{part}"] / 1e6 for part in ("", "_of_the_later_half"))
    became = ", ".join(
        f"{count:,} {what}"
        for what, count in (
            ("equal to the one given alone", answers["whole"]),
            ("beginnings of it for those who left", answers["left"]),
            ("others", answers["other"]),
            ("failed", answers["failed"]),
            ("lost", kept["lost"]),
        )
    )
    return (
        f"**Endurance.** {kept['requests']:,} requests on {kept['rows']} rows, drawn from {kept['distinct']} of all "
        "kinds (prompts of 5 to 1000 tokens, budgets, greedy and drawn, penalties, stop ids and strings, "
        f"log-probabilities), {DISCONNECTS:.0%} of the clients leaving in between. Answers: {became}. Programs "
        f"compiled after the first request: {kept['compilations']:,}. Resident memory went from {first / 1e6:,.1f} to "
        f"{last / 1e6:,.1f} MB after the first tenth, a slope of {slope:+.2f} MB per 1000 requests ({later:+.2f} in "
        f"the later half); caches take {megabytes['cache_bytes']}, snapshots {megabytes['snapshot_bytes']}."
    )


def run(options: argparse.Namespace) -> None:
    """Measure the missing values, and write `serving.md`.

    Raises:
        ValueError: a number is out of its range, or there is no such model.
    """
    requests, repeats = whole_number("requests", options.requests, 0), whole_number("repeats", options.repeats)
    store = Store(options.out / "serving.json", options.redo, say)
    try:
        measure(store, load(options.model, "float32"), requests, repeats)
    finally:
        if store.results():
            write_text(options.out / "serving.md", page(store.results()))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = Parser(prog="kvjax bench serving", description=__doc__)
    options.add_argument("--model", default="tiny", help="as for kvjax serve")
    options.add_argument("--requests", type=int, default=10_000, help="of the endurance run, 0 for none")
    options.add_argument("--repeats", type=int, default=3, help="of each comparison, whose medians are told")
    options.add_argument("--redo", action="store_true", help="measure again what is on disk")
    options.add_argument(
        "--out", type=output_directory, default="docs/results", help="where serving.md and its rows are"
    )
    return finish("bench serving", lambda: run(options.parse_args(argv)))
