"""Sampling: exact support, right frequencies, rows that do not know of each other, clear refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.generation.sampling import Sampling, sample

PROBS = np.array([0.05, 0.4, 0.02, 0.3, 0.13, 0.1])
LOGITS = jnp.log(jnp.asarray(PROBS, jnp.float32))
DRAWS = 20_000


def draw(sampling: Sampling, logits: jax.Array = LOGITS, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Tokens drawn from one distribution [draws]."""
    keys = jax.random.split(jax.random.key(seed), draws)
    return np.asarray(sample(jnp.tile(logits, (draws, 1)), keys, sampling))


def expected(sampling: Sampling, probs: np.ndarray = PROBS) -> np.ndarray:
    """The distribution that the settings ask for, written out plainly."""
    probs = probs ** (1 / sampling.temperature)
    order = np.argsort(-probs, kind="stable")[: sampling.top_k]
    share = probs[order] / probs[order].sum()
    if sampling.top_p is not None:
        order = order[: np.searchsorted(np.cumsum(share), sampling.top_p) + 1]
    if sampling.min_p is not None:
        order = order[probs[order] >= sampling.min_p * probs.max()]
    kept = np.zeros_like(probs)
    kept[order] = probs[order]
    return kept / kept.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(2.0),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=3),
        Sampling(1.0, top_k=100),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, top_p=0.75),
        Sampling(0.7, top_p=0.9),
        Sampling(1.5, top_k=4, top_p=0.8),
        Sampling(1.0, top_k=2, top_p=0.5),
        Sampling(1.0, min_p=0.3),
        Sampling(2.0, min_p=0.4, top_k=5),
        Sampling(1.0, min_p=1.0),
    ],
    ids=str,
)
def test_support_and_frequencies(sampling: Sampling) -> None:
    probs = expected(sampling)
    counts = np.bincount(draw(sampling), minlength=len(probs))
    assert set(np.flatnonzero(counts)) == set(np.flatnonzero(probs))
    kept = probs > 0
    chi_square = ((counts - DRAWS * probs)[kept] ** 2 / (DRAWS * probs[kept])).sum()
    assert chi_square < 30  # five degrees of freedom at most: one honest run in 60,000 is above 30


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.0, top_k=3, top_p=0.5), Sampling(1e-30)], ids=str)
def test_no_temperature_takes_the_likeliest_token(sampling: Sampling) -> None:
    logits = jax.random.normal(jax.random.key(1), (32, 50))
    tokens = sample(logits, jax.random.split(jax.random.key(2), 32), sampling)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_without_filters_it_is_categorical() -> None:
    logits = jax.random.normal(jax.random.key(1), (64, 50))
    keys = jax.random.split(jax.random.key(2), 64)
    plain = jax.vmap(jax.random.categorical)(keys, logits / 0.8)
    for sampling in (
        Sampling(),
        Sampling(top_p=1.0),
        Sampling(top_k=50),
        Sampling(top_k=0),
        Sampling(top_k=-1),
        Sampling(top_k=99, top_p=1.0),
    ):
        np.testing.assert_array_equal(sample(logits, keys, sampling), plain)


@given(
    rows=st.sampled_from([1, 2, 5]),
    settings=st.sampled_from([(None, None), (3, None), (None, 0.7), (30, 0.4)]),
    seed=st.integers(0, 2**31),
)
def test_a_row_does_not_know_its_neighbours(rows: int, settings: tuple[int | None, float | None], seed: int) -> None:
    sampling = Sampling(1.3, *settings)
    logits = jax.random.normal(jax.random.key(seed), (rows, 17))
    keys = jax.random.split(jax.random.key(seed + 1), rows)
    together = sample(logits, keys, sampling)
    alone = [int(sample(logits[i : i + 1], keys[i : i + 1], sampling)[0]) for i in range(rows)]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(sample(logits[::-1], keys[::-1], sampling), together[::-1])


def test_rows_with_settings_of_their_own_draw_as_alone() -> None:
    each = [
        Sampling(0.0),
        Sampling(1.3),
        Sampling(1.3, top_k=3),
        Sampling(0.9, top_p=0.6),
        Sampling(1.0, 9, 0.8, 0.1, 1.5),
    ]
    numbers = zip(*(sampling.tree_flatten()[0] for sampling in each), strict=True)
    together = Sampling.tree_unflatten(None, tuple(map(jnp.asarray, numbers)))
    for seed in range(8):
        logits = 2 * jax.random.normal(jax.random.key(seed), (len(each), 17))
        keys, seen = jax.random.split(jax.random.key(seed + 1), len(each)), logits > 2
        alone = [sample(logits[i : i + 1], keys[i : i + 1], own, seen[i : i + 1]) for i, own in enumerate(each)]
        np.testing.assert_array_equal(sample(logits, keys, together, seen), jnp.concatenate(alone))


def test_ties_and_excluded_tokens() -> None:
    tied = jnp.zeros(6)
    assert len(set(draw(Sampling(1.0, top_k=3), tied, 2000))) == 3
    assert len(set(draw(Sampling(1.0, top_p=0.5), tied, 2000))) == 3
    excluded = LOGITS.at[1].set(-jnp.inf)
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=6), Sampling(1.0, top_p=0.999)):
        assert 1 not in draw(sampling, excluded, 2000)


def test_low_precision_logits_are_sampled_in_float32() -> None:
    logits = LOGITS.astype(jnp.bfloat16)
    for sampling in (Sampling(1.0), Sampling(0.8, top_k=4, top_p=0.9)):
        np.testing.assert_array_equal(draw(sampling, logits, 2000), draw(sampling, logits.astype(jnp.float32), 2000))


def test_tokens_of_the_text_are_penalised() -> None:
    logits = jnp.array([[2.0, -1.0, 1.9, -0.5], [2.0, -1.0, 1.9, -0.5]])
    seen = jnp.array([[True, True, False, False], [False] * 4])
    keys = jax.random.split(jax.random.key(0), 2)
    assert sample(logits, keys, Sampling(0.0, repetition_penalty=1.5), seen).tolist() == [2, 0]
    assert sample(-logits, keys, Sampling(0.0, repetition_penalty=3.0), seen).tolist() == [3, 1]
    np.testing.assert_array_equal(sample(logits, keys, Sampling(), seen), sample(logits, keys, Sampling()))
    with pytest.raises(ValueError, match=r"penalty=1.5 is on tokens that the text has: give them as `in_text`"):
        sample(logits, keys, Sampling(repetition_penalty=1.5))


@pytest.mark.usefixtures("x64")
def test_double_precision_stays() -> None:
    logits = jnp.asarray(np.log(PROBS))
    assert logits.dtype == jnp.float64
    counts = np.bincount(draw(Sampling(1.0, top_p=0.75), logits, 5000), minlength=6)
    assert set(np.flatnonzero(counts)) == {1, 3, 4}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": -0.5}, r"^The temperature is -0\.5: give 0 for greedy decoding or a positive number\.$"),
        ({"temperature": float("nan")}, r"^The temperature is nan"),
        ({"temperature": float("inf")}, r"^The temperature is inf"),
        *(({name: "hot"}, rf"^{name} is 'hot': give a number\.$") for name in vars(Sampling())),
        ({"top_k": True}, r"^top_k is True: give a number\.$"),
        ({"top_p": [0.5]}, r"^top_p is \[0\.5\]: give a number\.$"),
        ({"temperature": None}, r"^temperature is None: give a number\.$"),
        ({"top_k": -2}, r"^top_k is -2: give a whole number of tokens, at least 1, or 0 for all\.$"),
        ({"top_k": 2.5}, r"^top_k is 2\.5"),
        ({"top_k": float("inf")}, r"^top_k is inf"),
        ({"top_p": -0.1}, r"^top_p is -0\.1: give a share of the probability, 0 to 1, or None\.$"),
        ({"top_p": 1.1}, r"^top_p is 1\.1"),
        ({"top_p": float("nan")}, r"^top_p is nan"),
        ({"min_p": 1.5}, r"^min_p is 1\.5: give a share of the likeliest token's probability, 0 to 1, or None\.$"),
        ({"min_p": float("nan")}, r"^min_p is nan"),
        ({"repetition_penalty": 0}, r"^repetition_penalty is 0: give a positive number, 1 for no penalty, or None\.$"),
        ({"repetition_penalty": float("inf")}, r"^repetition_penalty is inf"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(1.0, top_p=1e-300), {1}),
        (Sampling(1e30, top_p=0), {1}),
        (Sampling(1e-300), {1}),
        (Sampling(10**400), {0, 1, 2, 3, 4, 5}),
        (Sampling(1.0, min_p=1e-300), {0, 1, 2, 3, 4, 5}),
        (Sampling(1.0, repetition_penalty=1e-300), {4}),
        (Sampling(1.0, top_k=1, repetition_penalty=1e300), {1}),
    ],
    ids=str,
)
def test_numbers_that_float32_does_not_have_keep_their_effect(sampling: Sampling, tokens: set[int]) -> None:
    keys = jax.random.split(jax.random.key(0), 500)
    seen = jnp.zeros((500, 6), bool).at[:, 4].set(True)
    logits = jnp.tile(LOGITS + 5.0, (500, 1))
    assert set(np.asarray(sample(logits, keys, sampling, seen)).tolist()) == tokens


def test_one_key_per_row() -> None:
    with pytest.raises(ValueError, match=r"^3 rows need as many random keys, not \(\): use jax\.random\.split\.$"):
        sample(jnp.zeros((3, 5)), jax.random.key(0), Sampling())
