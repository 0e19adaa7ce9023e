"""Query vectors: kept as f32, as events carry them, and normalised in f64."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import BadQuery

Query: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]
"""A query embedding, not necessarily normalised."""


def vector(query: Query) -> npt.NDArray[np.float32]:
    """The components in single precision: one dimension, finite, not all zero."""
    try:
        # What is too large for f32 becomes infinite, and is told below.
        with np.errstate(over="ignore", invalid="ignore"):
            components = np.asarray(query, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadQuery(f"the query must be a vector of numbers: {error}") from None
    if components.ndim != 1:
        raise BadQuery(f"the query must have one dimension, not the shape {components.shape}")
    finite = np.isfinite(components)
    if not finite.all():
        index = int(np.argmin(finite))
        raise BadQuery(f"component {index} of the query is {components[index]}: every component must be finite in f32")
    if not components.any():
        raise BadQuery("the query is the zero vector (or empty): it has no direction")
    return components


def unit(query: Query, dim: int) -> npt.NDArray[np.float32]:
    """The query of length 1."""
    components = vector(query)
    if components.size != dim:
        raise BadQuery(f"the query has {components.size} components, the space has dim = {dim}")
    precise = components.astype(np.float64)
    norm = math.sqrt(float(np.dot(precise, precise)))
    return (precise / norm).astype(np.float32)


def encode(query: Query) -> str | list[float]:
    """The query as JSON carries it: base64 of little-endian f32 of an array, a list of anything else."""
    components = vector(query)
    if isinstance(query, np.ndarray):
        return base64.b64encode(components.astype("<f4").tobytes()).decode("ascii")
    return [float(x) for x in query]
