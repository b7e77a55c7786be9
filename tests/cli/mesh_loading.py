"""Loads weights onto meshes of eight virtual devices: run by test_convert in a process of its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import kvjax
from kvjax.cli.convert import convert
from kvjax.generation.generate import generate_ids
from kvjax.models.checkpoints import orbax, tensors
from kvjax.models.checkpoints.loading import read_checkpoint
from kvjax.models.checkpoints.tensors import Tensor
from kvjax.models.mlp import DenseMlp
from kvjax.models.sharding import weight_shardings
from tests.compiling import compile_fast


def in_shards(*fields: Any) -> Tensor:
    """A tensor that cannot be read whole."""
    tensor = Tensor(*fields)

    def read(dtype: np.dtype, sharding: jax.sharding.Sharding | None = None) -> Any:
        return sys.exit("a tensor was read whole") if sharding is None else tensor.read(dtype, sharding)

    return dataclasses.replace(tensor, read=read)


def main(directory: str) -> None:
    """Compare weights, their places and greedy tokens with those on one device."""
    jax.config.update("jax_num_cpu_devices", 8)
    compile_fast()
    plain = kvjax.load(directory)
    prompts = [list(range(10, 30)), list(range(50, 70))]
    greedy: dict[str, Any] = dict(policy="h2o", budget=12, max_new_tokens=6, temperature=0.0)
    wanted = generate_ids(plain, prompts, **greedy).tokens
    with pytest.MonkeyPatch.context() as patch:
        for reader in (orbax, tensors):
            patch.setattr(reader, "Tensor", in_shards)
        for shape, place in (((8, 1), directory), ((2, 4), directory), ((2, 4), "tiny")):
            mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
            model = kvjax.load(place, mesh=mesh)
            jax.tree.map(np.testing.assert_array_equal, model.weights, plain.weights)
            shardings = weight_shardings(model.config, mesh)
            jax.tree.map(
                lambda leaf, sharding: leaf.sharding == sharding or sys.exit("misplaced"), model.weights, shardings
            )
            layer = model.weights.layers[0]
            assert isinstance(layer.mlp, DenseMlp)
            for spread, axis in (
                (layer.mlp.up.weight, 0),
                (layer.mixer.output.weight, 1),
            ):  # though there are but two KV heads
                assert spread.addressable_shards[0].data.shape[axis] * shape[1] == spread.shape[axis]
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    assert generate_ids(kvjax.load(directory, mesh=mesh), prompts, **greedy).tokens == wanted
    alone, spread = (kvjax.load("tiny", weights="int8", mesh=each) for each in (None, mesh))
    jax.tree.map(np.testing.assert_array_equal, spread.weights, alone.weights)
    again = Path(directory).with_name("spread")
    convert(read_checkpoint(directory, "float32", mesh=mesh), again)
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(again).weights, plain.weights)
    with pytest.raises(ValueError, match="a mesh with the axes x is none of data, model, slots"):
        kvjax.load("tiny", mesh=jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)))
    print("all as on one device")


if __name__ == "__main__":
    main(sys.argv[1])
