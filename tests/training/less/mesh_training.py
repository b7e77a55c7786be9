"""Trains LESS kernels on meshes of eight virtual devices: run by test_train_less in a process of its own."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cli import train_less
from kvjax.methods.less import checkpoint
from kvjax.models.sharding import parse_mesh
from kvjax.training.less import run
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.record import Features
from kvjax.training.less.train import Training, train, training_mesh
from tests.compiling import compile_fast

RECIPE = Recipe(features=2, hidden=4, batch=4, epochs=3, rate=1e-2, halve_every=2)
LAYERS, TEXTS, N = 4, 16, 6  # two texts are held out: one for each device along data=2, too few for data=4


def features_of(model: kvjax.Model) -> Features:
    """Random numbers in place of what texts would leave; nothing has left at first, later more of some texts."""
    config, rng = model.config, np.random.default_rng(0)
    of_keys = LAYERS, TEXTS, config.kv_heads, N, config.head_width
    of_queries = LAYERS, TEXTS, config.kv_heads, config.groups, N, config.head_width
    leaving = np.arange(N) > np.arange(TEXTS)[:, None, None] % 4
    shapes = dict(q=of_queries, k=of_keys, v=of_keys, sparse=of_queries, full=of_queries, lse=of_queries[:-1])
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return Features(**arrays, leaving=jnp.broadcast_to(leaving, of_keys[:-1]).astype(jnp.float32))


def same(ours: Any, theirs: Any) -> None:
    """Equal but for rounding."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-6), *jax.device_get((ours, theirs)))


def main(out: Path) -> None:
    """Compare what is trained, and trained further from another mesh's checkpoint, with one device's."""
    jax.config.update("jax_num_cpu_devices", 8)
    compile_fast()
    model = kvjax.load("tiny")
    features = features_of(model)
    assert training_mesh(model.config).shape == {"data": 1, "model": 4, "slots": 1}
    assert training_mesh(model.config, parse_mesh("model=3,data=2")).shape == {"data": 2, "model": 2, "slots": 1}

    def trained(name: str, mesh: str, epochs: int | None = None) -> Training:
        return train(model, features, out / name, RECIPE, mesh=parse_mesh(mesh), epochs=epochs)

    alone = trained("alone", "data=1,model=1")
    spread = trained("spread", "data=2,model=4", epochs=2)
    kernel = spread.params["phi"]["first"]
    assert len(kernel.sharding.device_set) == 8 and kernel.addressable_shards[0].data.shape[0] == 1
    for mesh in ("data=1,model=1", "model=2,data=4"):
        shutil.copytree(out / "spread", out / mesh)
        restored = trained(mesh, mesh, epochs=2)
        jax.tree.map(np.testing.assert_array_equal, *jax.device_get((restored, spread)))
        assert restored.params["phi"]["first"].sharding.mesh.size == parse_mesh(mesh).size
        same(trained(mesh, mesh), alone)

    text = out / "text.txt"
    text.write_text("what `sample_texts` does not read")
    words = f"--text {text} --out {out / 'kernels'} --budget 4 --sequences {TEXTS} --length {N} --features 2 --hidden 4"
    words += " --epochs 3 --rate 1e-2 --halve-every 2 --mesh model=2,data=4"
    assert train_less.main(words.split()) == 2  # batches of two
    shutil.copytree(out / "spread", out / "kernels" / "training")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "sample_texts", lambda *_: np.zeros((TEXTS, N), int))
        patch.setattr(run, "collect", lambda *_, **__: (out / "kernels" / "training" / "features").mkdir() or features)
        assert train_less.main([*words.split(), "--batch", "4"]) == 0
    same(checkpoint.load(out / "kernels", model, "h2o")[0], alone.best)
    print("all as on one device")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
