"""Query vectors: stored as f32, as in events, and normalised in f64."""

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


def unit(query: Query, dim: int) -> npt.NDArray[np.float32]:
    """Return the query normalised to length 1."""
    components = vector(query)
    if components.size != dim:
        raise BadQuery(f"the query has {components.size} components, but the space has dim = {dim}")
    precise = components.astype(np.float64)
    norm = math.sqrt(float(np.dot(precise, precise)))
    return (precise / norm).astype(np.float32)


def encode(query: Query) -> str | list[float]:
    """Return the query for JSON: base64 of little-endian f32 for an array, a list otherwise."""
    components = vector(query)
    if isinstance(query, np.ndarray):
        return base64.b64encode(components.astype("<f4").tobytes()).decode("ascii")
    return [float(x) for x in query]
