"""What every policy promises, over the one table."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array

import kvjax
from kvjax.inference import decode, decoder, prefill, press
from kvjax.inference.extend import lower_prefill
from kvjax.inference.state import held_positions, slot_limits
from kvjax.methods.register import REGISTRY
from kvjax.model import Model
from kvjax.models import Rope
from kvjax.testing import CHECKS
from kvjax.testing.policies import Texts
from kvjax.utils.compilation import temporary_bytes
from pallas_kernels.operands import Quantised
from tests.cases import FIRST, PAIRS, POLICIES, Case, slow
from tests.held import unpacked
from tests.small_models import GQA, MHA, random_model, small_config

MODEL = random_model(GQA)
LENGTHS = (41, 25, 33)
RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, GQA.vocab_size, (3, 120))
CASES = POLICIES | PAIRS
MIXED = ["streaming+adakv", "h2o+adakv+int8", "less+snapkv+adakv", "less+fastgen-low+int8", "streaming+int8"]
"""Pairs that together go every way through the engine; methods/test_oracles.py compares what each pair computes."""
IN_CORE = ("h2o", "streaming", "less-performer", "fastgen")
WAYS = ("h2o", "snapkv", "lightkv", "fastgen", *MIXED[2:])
"""Cases that go every way through the engine, for promises that hardly depend on the score."""
IN_STEPS = ("lsh_e",)
"""Cases that read prompts token by token, and so all layers in one program."""
AS_USERS_DO = ("h2o", "keyformer", "streaming", "fastgen")
"""Cases whose rows are compared in programs as users have them: one for each way to ask and to hold."""


def _cases(
    names: Iterable[str], usual: Iterable[str], in_core: Iterable[str] = (), as_users_do: Iterable[str] = ()
) -> Any:
    def marks(name: str) -> Iterator[pytest.MarkDecorator]:
        if name not in usual:
            yield pytest.mark.slow
        if name in in_core:
            yield pytest.mark.core
        if name in as_users_do:
            yield pytest.mark.compiled_well

    return pytest.mark.parametrize("name", [pytest.param(name, marks=list(marks(name))) for name in names])


every_case = _cases([*POLICIES, *MIXED], [*FIRST, *MIXED])
every_policy = _cases(POLICIES, FIRST, IN_CORE)
every_first = _cases(FIRST, FIRST)
every_core_first = _cases(FIRST, FIRST, IN_CORE)
every_way = _cases(FIRST, WAYS)
every_mixture = _cases([*FIRST, *MIXED], WAYS)
every_first_by_rows = _cases(FIRST, [*WAYS, *AS_USERS_DO], IN_CORE, AS_USERS_DO)
"""Comparisons with oracles have rows of two lengths for every policy."""
every_mixture_by_rows = _cases([*FIRST, *MIXED], WAYS, (), AS_USERS_DO)


def read(
    case: Case,
    budget: Any = None,
    *,
    model: Model = MODEL,
    rows: Any = slice(None),
    changes: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> tuple[kvjax.State, Array]:
    """A ragged batch read by the policy of a case; tests that leave the shapes alone share its program."""
    arguments = {"plan": case.plan, "prefill_chunk": case.prefill_chunk, "max_new_tokens": 40} | arguments
    arguments = {"lengths": np.array(LENGTHS)[rows]} | arguments
    policy = case.make(**(changes or {}))
    budget = case.budget if budget is None else budget
    if policy.plan.sizing.mode == "profiled":
        budget, arguments["plan"] = 1.0, None
    return kvjax.prefill(model, policy, TEXT[rows, :41], budget, **arguments)


def follow(state: kvjax.State, steps: int = 30) -> tuple[kvjax.State, tuple[np.ndarray, list[np.ndarray]]]:
    """Greedy text of some steps: the last state, logits [steps, b, vocab] and by layer positions [steps, b, h, c]."""
    token, seen = jnp.zeros(state.position.shape, jnp.int32), []
    for _ in range(steps):
        state, logits = kvjax.decode_step(state, token)
        token = jnp.asarray(np.argmax(logits, -1), jnp.int32)
        seen.append((np.asarray(logits), *held_positions(state)))
    logits, *positions = (np.stack(step) for step in zip(*seen, strict=True))
    return state, (logits, positions)


@functools.partial(jax.jit, static_argnames="steps")
def scan(state: kvjax.State, token: Array, steps: int) -> tuple[Any, Array]:
    """`follow` compiled as a whole: the last positions and the logits of every step."""

    def one(carry: tuple[kvjax.State, Array], _: None) -> tuple[tuple[kvjax.State, Array], Array]:
        state, token = carry
        state, logits = kvjax.decode_step(state, token)
        return (state, jnp.argmax(logits, -1).astype(jnp.int32)), logits

    (state, _), logits = jax.lax.scan(one, (state, token), length=steps)
    return state.cache.stored_positions(), logits


@functools.cache
def full(lengths: tuple[int, ...] = LENGTHS, steps: int = 0) -> tuple[Array, np.ndarray | None]:
    """Logits of the full cache: after the prompt, and of some steps."""
    state, logits = kvjax.prefill(MODEL, "full", TEXT[:, :41], lengths=lengths, max_new_tokens=40)
    return logits, follow(state, steps)[1][0] if steps else None


def close(a: Any, b: Any, tolerance: float = 2e-4) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


class OfCase(Texts):
    """Texts as a case reads them, with smaller differences than `check_policy` allows."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def read(self, policy: Any, budget: Any = None, *, model: Any = None, rows: Any = None, **settings: Any) -> Any:
        return read(self.case, budget, model=model or MODEL, rows=slice(None) if rows is None else rows, **settings)

    def follow(self, state: kvjax.State, rows: Any = None, steps: int = 30) -> Any:
        _, (logits, layers) = follow(state, steps)
        return logits, [list(step) for step in zip(*layers, strict=True)]

    def close(self, actual: Any, expected: Any, what: str) -> None:
        close(actual, expected, 1e-5 if what.startswith("after the prompt") else 1e-4)


def checked(name: str, check: str) -> None:
    """Check a case as `kvjax.testing.check_policy` checks the policies of others."""
    case = CASES[name]
    CHECKS[check](case.make() if case.plan is None else case.make(plan=case.plan), OfCase(case))


def programs() -> list[int]:
    """How many programs have been compiled to read prompts and to take steps."""
    functions: list[Any] = [prefill.read_together, decoder.compiled_step, press.pack_pages]
    return [function._cache_size() for function in functions]


@every_case
def test_equals_the_full_cache_when_there_is_room(name: str) -> None:
    case = CASES[name]
    if not case.equals_full:
        pytest.skip("restricts attention whatever the room")
    # 12 + 20 tokens in 32 slots, which are as many as the usual budget's buffers have.
    lengths = (12, 9, 10)
    room = [32] * GQA.layers if case.make().plan.sizing.mode != "unbounded" else 1.0
    plan = case.plan if case.plan == "adakv" else None
    state, logits = read(case, room, plan=plan, lengths=lengths, changes=case.full)
    expected, following = full(lengths, 20)
    close(logits, expected)
    close(follow(state, 20)[1][0], following)


@every_mixture
def test_layers_that_share_a_program_read_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In deep models each layer reads a whole prompt by a program that equal ones share."""
    case = CASES[name]
    state, logits = read(case)
    monkeypatch.setattr(prefill, "DEEP", GQA.layers)
    layer: Any = prefill.read_one_layer
    before = layer._cache_size()
    alone, found = read(case)
    sizes = 1 if state.policy.plan.sizing.per_head else len({view.shape for view in state.cache.positions()})
    assert layer._cache_size() - before == (0 if name in IN_STEPS else sizes)
    close(logits, found)
    jax.tree.map(close, state.cache.memory, alone.cache.memory)


OWN_SIZE = {"fastgen", "simlayerkv", "duoattention"}
"""Policies that decide how many slots each head gets, up to the planned end of a text."""


@every_way
def test_texts_go_on_beyond_what_was_planned(name: str) -> None:
    """Only where slots were set aside for a text of that length there is nothing after it."""
    state, _ = read(CASES[name], max_new_tokens=3)
    _, (logits, _) = follow(state, 6)
    assert np.isfinite(logits[:3]).all()
    assert bool(np.isfinite(logits[3:]).all()) is (name not in OWN_SIZE | {"full", "topk_oracle"})


@every_policy
def test_never_holds_more_than_its_limit_nor_a_position_twice(name: str) -> None:
    checked(name, "limits")


@every_first
def test_protected_tokens_survive(name: str) -> None:
    case = CASES[name]
    special = int(TEXT[0, 7])
    if case.make().plan.sizing.mode == "unbounded":
        pytest.skip("nothing leaves")
    state, _ = read(case, 24, plan="uniform", changes={"sinks": 2, "recent": 9, "special": (special,)})
    _, (_, positions) = follow(state)
    for layer in positions:
        for step, held in enumerate(layer):
            for row, length in enumerate(LENGTHS):
                wanted = {0, 1, *range(length + step - 8, length + step + 1)}
                wanted |= set(np.flatnonzero(TEXT[row, :length] == special).tolist()[:3])
                for head in held[row]:
                    assert wanted <= set(head.tolist())


@every_way
def test_budgets_by_layer_equal_one_number(name: str) -> None:
    case = CASES[name]
    if case.make().plan.sizing.mode != "budget":
        pytest.skip("has no budget")
    if case.make().plan.sizing.per_head:
        pytest.skip("gives slots to heads of all layers together")
    one, logits = read(case, 24, plan="uniform")
    each, expected = read(case, [24] * GQA.layers, plan=None)
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(follow(one)[1][0], follow(each)[1][0])


@every_way
def test_plain_calls_jit_scan_vmap_and_in_place_agree(name: str) -> None:
    state, _ = read(CASES[name])
    token = jnp.zeros(3, jnp.int32)
    after, (plain, positions) = follow(state, 3)
    # jit, of vmap, of scan: one program tells of all three.
    branches = jax.jit(jax.vmap(lambda token: scan(state, token, 3)))
    held, scanned = branches(jnp.stack([token, token + 1]))
    close(scanned[0], plain, 1e-5)
    for layer, cached in enumerate(unpacked(state.cache, held)):
        np.testing.assert_array_equal(cached[0], positions[layer][-1])
    branch = jax.tree.map(jnp.copy, state)
    moved, again = kvjax.decode_step_in_place(branch, token)
    close(again, plain[0], 1e-5)
    np.testing.assert_array_equal(moved.position + 2, after.position)
    close(kvjax.decode_step(state, token)[1], plain[0], 0)


@every_core_first
def test_one_compilation_serves_a_bucket_and_other_weights(name: str) -> None:
    case = CASES[name]
    arguments = {"plan": case.plan, "prefill_chunk": case.prefill_chunk, "max_new_tokens": 40}

    def run(model: Model, length: int) -> None:
        size = case.budget if case.make().plan.sizing.mode != "unbounded" or "topk" in name else 1.0
        # Which heads get how many slots must not differ either; see methods/test_fastgen.py for those that do.
        state, _ = kvjax.prefill(model, case.make(**case.full), TEXT[:, :length], size, **arguments)
        kvjax.decode_step(state, jnp.zeros(3, jnp.int32))

    run(MODEL, 41)
    before = programs()
    run(MODEL, 46)
    run(random_model(GQA, seed=9), 43)
    assert programs() == before


@pytest.mark.parametrize(
    ("name", "sweep"),
    [
        ("snapkv", [dict(recent=8), dict(recent=5), dict(recent=2, sinks=3)]),
        (
            "h2o",
            [{"plan": "interleaved", "plan.ratio": 2.0}, {"plan": "interleaved", "plan.ratio": 2.5, "recent": 0.2}],
        ),
        ("dilated_window", [dict(dilation=1), dict(dilation=2)]),
        ("topk_oracle", [dict(k=4), dict(k=7)]),
        ("keyformer", [dict(damping=0.9), dict(damping=0.8, tau_end=1.5)]),
        ("lightkv", [dict(omega=4.0), dict(omega=2.0)]),
        ("fastgen", [dict(special=(3,), threshold=0.5), dict(special=(3,), threshold=0.6, frequent=0.35)]),
    ],
)
def test_numbers_are_arguments_of_one_program(name: str, sweep: list[dict[str, Any]]) -> None:
    found, compiled = [], []
    for numbers in sweep:
        policy, budget = kvjax.policy(name, **numbers), 1.0 if name in ("topk_oracle", "fastgen") else 16
        state, _ = kvjax.prefill(MODEL, policy, TEXT[:2, :30], budget, max_new_tokens=40)
        found.append(np.asarray(kvjax.decode_step(state, jnp.zeros(2, jnp.int32))[1]))
        compiled.append(programs())
    assert compiled[1:] == compiled[:-1]
    assert all((logits != found[0]).any() for logits in found[1:])


@every_mixture_by_rows
def test_permuting_the_batch_permutes_the_output(name: str) -> None:
    checked(name, "order of rows")


@every_first_by_rows
def test_a_row_does_not_know_its_neighbours(name: str) -> None:
    checked(name, "padding")


@every_mixture
def test_bfloat16_stays_finite(name: str) -> None:
    state, logits = read(CASES[name], model=random_model(GQA, dtype=jnp.bfloat16))
    pairs = state.cache.slots[0].kv if state.cache.pool is None else state.cache.pool.kv
    if isinstance(pairs.k, Quantised):
        assert pairs.k.codes.dtype == jnp.int8
    else:
        assert isinstance(pairs.k, jax.Array) and pairs.k.dtype == jnp.bfloat16
    assert np.isfinite(logits).all() and np.isfinite(follow(state)[1][0]).all()


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("h2o", "streaming", "keyformer-shared", "snapkv", "lightkv", "less-performer") else slow(name)
        for name in [*FIRST, "keyformer-shared", "h2o-cache-positions"]
    ],
)
@pytest.mark.parametrize("chunk", [slow(1), 16])
def test_reading_in_chunks_equals_reading_whole_when_nothing_leaves(name: str, chunk: int) -> None:
    case = CASES[name]
    if not case.equals_full:
        pytest.skip("restricts attention whatever the room")
    if case.make().plan.sizing.per_head or case.make().score.requires.whole_prompt:
        with pytest.raises(ValueError, match="only the whole prompt can tell"):
            read(case, prefill_chunk=chunk)
        return
    budget: Any = 1.0 if case.make().plan.sizing.mode == "unbounded" else [128] * GQA.layers
    _, logits = read(case, budget, prefill_chunk=chunk, plan=None)
    close(logits, full()[0])


@pytest.mark.parametrize(
    "name",
    [
        *("streaming", "h2o", "keyformer", "lsh_e", "snapkv", "less-performer"),
        *map(slow, ("window", "tova", "l2")),
    ],
)
@pytest.mark.compiled_well
def test_a_step_needs_no_memory_beside_its_cache(name: str) -> None:
    model = random_model(MHA)
    state, _ = kvjax.prefill(model, CASES[name].make() if name in POLICIES else name, TEXT[:2, :41], 2048)
    compiled = decode.lower_step(state).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        pytest.skip("this backend has no memory analysis")
    cache = kvjax.cache_bytes(state)
    limits = sum(limit.nbytes for limit in slot_limits(state))
    assert memory.alias_size_in_bytes >= 0.95 * (cache - limits)
    # With d = 8 the logits of one layer are a large share of a cache; models have d of 64 and more.
    logits = 4 * 2 * MHA.heads * 2048
    assert memory.temp_size_in_bytes < 0.05 * cache + 8 * logits


@pytest.mark.parametrize(
    ("name", "plan", "codec"),
    [
        *(("h2o", None, codec) for codec in ("int8", "int4", "fp8")),
        *(("h2o", "adakv", "int8"), ("streaming", None, "int8"), ("snapkv", None, "int4")),
        *(slow("h2o", "adakv", codec) for codec in ("int4", "fp8")),
        *(slow("streaming", None, codec) for codec in ("int4", "fp8")),
        *(slow("snapkv", None, codec) for codec in ("int8", "fp8")),
    ],
)
@pytest.mark.compiled_well
def test_a_step_over_codes_decodes_no_layer(name: str, plan: str | None, codec: str) -> None:
    rows, slots, width = 4, 2048, 64
    config = small_config(4, 2, width=64, head_width=width, rope=Rope(width=width), max_positions=2 * slots)
    policy = kvjax.policy(name, codec=codec, plan=plan)
    state, _ = kvjax.prefill(random_model(config), policy, TEXT[[0, 1, 2, 0], :40], slots, max_new_tokens=slots)
    memory = decode.lower_step(state).compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend has no memory analysis")
    logits = 4 * rows * config.heads * slots
    most = 0.05 * kvjax.cache_bytes(state) + 8 * logits
    # Keys of one layer as floats, or both halves of 4 bits unpacked, would be more than that.
    layer = rows * config.kv_heads * slots * width * {"int8": 4, "int4": 2, "fp8": 4}[codec]
    assert most < layer
    # Codes are never decoded; of other formats a block of pages is.
    assert memory.temp_size_in_bytes < (layer if (codec, plan) == ("fp8", "adakv") else most)


# An oracle sorts what it frees nothing of.
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("h2o", "keyformer", "less") else slow(name)
        for name in sorted(set(REGISTRY) - OWN_SIZE - {"full", "topk_oracle"})
    ],
)
@pytest.mark.parametrize(("rows", "slots"), [(8, 512), slow(1, 256)])
@pytest.mark.compiled_well
def test_a_step_of_the_embedded_model_needs_a_twentieth_of_its_cache(name: str, rows: int, slots: int) -> None:
    model = kvjax.load("tiny")
    state, _ = kvjax.prefill(model, name, np.ones((rows, 40), int), slots, max_new_tokens=slots)
    memory = decode.lower_step(state).compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend has no memory analysis")
    # Where slots are compared with each other or with outputs, this takes a few numbers for each slot of a layer, and
    # pages are more than their slots.
    most = {"cur": 0.2, "triattention": 0.2, "dropkv": 0.2, "criticalkv": 0.2, "kvzip": 0.2, "rkv": 0.4}
    assert memory.temp_size_in_bytes < most.get(name, 0.05) * kvjax.cache_bytes(state)


@pytest.mark.parametrize(
    "name",
    [*("h2o", "keyformer", "scissorhands", "snapkv", "lightkv", "dropkv", "rkv"), *map(slow, ("streaming", "tova"))],
)
@pytest.mark.compiled_well
def test_a_long_prompt_needs_less_than_one_matrix_of_its_length(name: str) -> None:
    n = 8192
    model = random_model(small_config(4, 2, layers=1, max_positions=n))
    temporary = temporary_bytes(lower_prefill(model, name, np.zeros((1, n), int), 128))
    if temporary is None:
        pytest.skip("this backend has no memory analysis")
    assert temporary < 4 * n * n


@settings(max_examples=6)
@given(
    name=st.sampled_from(["streaming", "h2o", "keyformer", "tova", "random"]),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=2),
    budget=st.sampled_from([8, 13, 16]),
    chunk=st.sampled_from([None, 8]),
)
def test_any_lengths_and_budgets_respect_the_limit(
    name: str, lengths: list[int], budget: int, chunk: int | None
) -> None:
    prompts = [TEXT[row, :length].tolist() for row, length in enumerate(lengths)]
    state, logits = kvjax.prefill(MODEL, name, prompts, budget, max_new_tokens=20, prefill_chunk=chunk)
    assert np.isfinite(logits).all()
    for positions in held_positions(state):
        held = (positions >= 0).sum(-1)
        assert (held == np.minimum(np.array(lengths), budget)[:, None]).all()


def test_the_full_cache_says_when_it_is_full() -> None:
    state, _ = kvjax.prefill(MODEL, "full", TEXT[:1, :20], max_new_tokens=2)
    for finite in (True, True, False):
        state, logits = kvjax.decode_step(state, jnp.zeros(1, jnp.int32))
        assert bool(np.isfinite(logits).all()) is finite


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(policy="nope"), "no policy 'nope'"),
        (dict(policy="h2o", budget=0), "budget=0"),
        (dict(policy="h2o", budget=1.5), "budget=1.5"),
        (dict(policy="streaming", budget=3), "sinks \\+ recent"),
        (dict(policy="h2o", budget=[8]), "each of 2 layers"),
        (dict(policy="h2o", budget=8, plan="steep"), "no plan 'steep'"),
        (dict(policy="h2o", budget=2, plan="pyramid"), "no slot"),
        (dict(policy="snapkv", budget=16), "sinks \\+ recent"),
        (dict(policy="h2o", budget=8, prefill_chunk=0), "prefill_chunk=0"),
        (dict(policy="h2o", budget=8, max_new_tokens=0), "max_new_tokens=0"),
        (dict(policy=kvjax.policy("keyformer", shared=True), budget=16, plan="arithmetic"), "equal budgets"),
        (dict(policy="fastgen"), "fastgen needs special"),
        (dict(policy=kvjax.policy("fastgen", special=(7,)), budget=16), "leave it out"),
        (dict(policy=kvjax.policy("fastgen", special=(7,)), plan="pyramid"), "leave both out"),
        (dict(policy="tova", budget=16, plan="adakv"), "same slots in every head"),
        (dict(policy="topk_oracle", budget=16, plan="adakv"), "this policy evicts nothing"),
        (dict(policy="h2o", budget=16, plan="adakv", prefill_chunk=8), "only the whole prompt can tell"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        kvjax.prefill(MODEL, arguments.pop("policy"), TEXT[:1, :20], **arguments)
    assert "\n" not in str(raised.value)


def test_bad_prompts_are_one_sentence() -> None:
    long, halves = np.zeros((1, 5000), int), np.full((1, 3), 0.5)
    for tokens, message in (([[]], "empty"), ([[99]], "vocabulary"), (long, "4096 positions"), (halves, "integers")):
        with pytest.raises(ValueError, match=message):
            kvjax.prefill(MODEL, "h2o", tokens, 8)
