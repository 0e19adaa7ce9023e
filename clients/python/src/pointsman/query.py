"""Query vectors: stored as f32, as in events, and normalised in f64; and the keys of queries.

    x_i = floor(65536 q_i + 1/2)           q of length 1
    key = sum_i x_i c_i  mod 2^64          c_i: output number i of splitmix64 with seed 0
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import BadQuery

Query: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]
"""A query embedding. It need not be normalised."""


def vector(query: Query) -> npt.NDArray[np.float32]:
    """Return the components in single precision: one dimension, finite, not all zero."""
    try:
        # Values too large for f32 become infinite and are rejected below.
        with np.errstate(over="ignore", invalid="ignore"):
            components = np.asarray(query, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadQuery(f"the query must be a vector of numbers: {error}") from None
    if components.ndim != 1:
        raise BadQuery(f"the query has shape {components.shape}: expected one dimension")
    finite = np.isfinite(components)
    if not finite.all():
        index = int(np.argmin(finite))
        raise BadQuery(f"component {index} of the query is {components[index]}: all components must be finite in f32")
    if not components.any():
        raise BadQuery("the query is empty or the zero vector, which has no direction")
    return components


def unit(query: Query, dim: int) -> npt.NDArray[np.float64]:
    """Return the query normalised to length 1, in double precision."""
    components = vector(query)
    if components.size != dim:
        raise BadQuery(f"the query has {components.size} components, but the space has dim = {dim}")
    precise = components.astype(np.float64)
    # Summed in order, as every router does: another order could change the last bit, and with it the key.
    norm = math.sqrt(float(np.add.accumulate(precise * precise)[-1]))
    return precise / norm


def key_constants(dim: int) -> npt.NDArray[np.uint64]:
    """Return the constants of keys of this dimension: outputs of splitmix64."""
    z = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def query_key(unit: npt.NDArray[np.float64], constants: npt.NDArray[np.uint64]) -> int:
    """Return the key of a query of length 1. Arithmetic of arrays is modulo 2^64."""
    steps = np.floor(65536.0 * unit + 0.5).astype(np.int64).view(np.uint64)
    return int((steps * constants).sum(dtype=np.uint64))


def encode(query: Query) -> str | list[float]:
    """Return the query for JSON: base64 of little-endian f32 for an array, a list otherwise."""
    components = vector(query)
    if isinstance(query, np.ndarray):
        return base64.b64encode(components.astype("<f4").tobytes()).decode("ascii")
    return [float(x) for x in query]
