"""Routing parameters: one safetensors file per space (format versions 1 and 2)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from .errors import BadParams

FORMAT = "pointsman.params"
FORMAT_VERSION = 2
"""The newest version that is read."""
HEAD_VERSION = 2
"""The first version with a head table."""
HEAD_QUERIES_MAX = 65_536
HEAD_KEYS = ".head.keys"
HEAD_CORRECTIONS = ".head.corrections"
OUTCOMES_VERSION = 2
"""The first version with priced outcomes."""
OUTCOMES_MAX = 64
OUTCOME_NAME_BYTES_MAX = 64

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII)
_MODEL_NAME = re.compile(r"[A-Za-z0-9_:@+-][A-Za-z0-9._:/@+-]{0,127}", re.ASCII)
_F32 = np.dtype("<f4")
# Not every version of the library has type annotations.
_deserialize: Any = safetensors.deserialize


@dataclass(frozen=True, eq=False)
class ScoreForm:
    """bias + linear . q + sum_i eigenvalue_i (eigenvector_i . q)^2"""

    eigenvalues: npt.NDArray[np.float32]
    eigenvectors: npt.NDArray[np.float32]
    linear: npt.NDArray[np.float32] | None
    bias: float


@dataclass(frozen=True, eq=False)
class HeadTable:
    """Corrections of the scores of frequent queries, by the exact key of the query."""

    keys: npt.NDArray[np.uint64]
    """Strictly ascending."""
    corrections: npt.NDArray[np.float32]
    """One row per key, one column per model."""

    def get(self, key: int) -> npt.NDArray[np.float32] | None:
        """Return the correction of each model's score, for a query in the table."""
        wanted = np.uint64(key)
        row = int(np.searchsorted(self.keys, wanted))
        return self.corrections[row] if row < self.keys.size and self.keys[row] == wanted else None


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Expected outcomes of the models, such as money or time, and what they cost in units of the score."""

    names: tuple[str, ...]
    prices: tuple[float, ...]
    """lambda: what one unit of each outcome takes from a score."""
    expected: npt.NDArray[np.float32]
    """One row per model, one column per outcome."""

    def charges(self) -> list[float]:
        """Return what each model's score loses."""
        return [sum(price * float(x) for price, x in zip(self.prices, row)) for row in self.expected]


@dataclass(frozen=True, eq=False)
class Params:
    """Routing parameters of one space."""

    space: str
    epoch: int
    version: int
    revision: int
    models: tuple[str, ...]
    dim: int
    created_ms: int
    algorithm: str
    inverse_gap: float | None
    """g of inverse-gap sampling; None for softmax."""
    floor: float
    floor_distribution: tuple[float, ...]
    scores: tuple[ScoreForm, ...]
    head: HeadTable | None = None
    """Corrections of frequent queries; None without any."""
    outcomes: Outcomes | None = None
    """What models cost besides their reward; None if nothing has a price."""

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Epoch, version and revision, which order the parameters of a space."""
        return (self.epoch, self.version, self.revision)

    @staticmethod
    def decode(data: bytes) -> Params:
        """Decode and validate parameters."""
        try:
            tensors = dict(_deserialize(bytes(data)))
        except safetensors.SafetensorError as error:
            raise BadParams(f"not a safetensors file: {error}") from None
        # The library validates the header, but does not expose its metadata.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta = _Metadata(header.get("__metadata__") or {})
        if meta.text("format") != FORMAT:
            raise meta.bad("format", f"{meta.text('format')!r} is not {FORMAT}")
        format_version = meta.whole("format_version")
        if format_version > FORMAT_VERSION:
            raise meta.bad("format_version", f"{format_version} is newer than this package reads ({FORMAT_VERSION}): upgrade it")
        models = meta.names("models")
        dim = meta.whole("dim")
        if dim == 0:
            raise meta.bad("dim", "must be at least 1")
        return Params(
            space=meta.name("space"),
            epoch=meta.whole("epoch"),
            version=meta.whole("version"),
            revision=meta.whole("revision"),
            models=models,
            dim=dim,
            created_ms=meta.whole("created_ms"),
            algorithm=meta.text("algorithm"),
            inverse_gap=meta.sampling(),
            floor=meta.number("floor", 1.0),
            floor_distribution=meta.floor_distribution(len(models)),
            scores=tuple(_score_form(tensors, model, dim) for model in models),
            head=_head_table(tensors, format_version, len(models)),
            outcomes=_outcomes(meta, tensors, format_version, models),
        )


class _Metadata:
    def __init__(self, entries: dict[str, str]) -> None:
        self._entries = entries

    def bad(self, key: str, problem: str) -> BadParams:
        return BadParams(f"metadata {key}: {problem}")

    def has(self, key: str) -> bool:
        return key in self._entries

    def text(self, key: str) -> str:
        if key not in self._entries:
            raise self.bad(key, "missing")
        return self._entries[key]

    def json(self, key: str) -> Any:
        text = self.text(key)
        try:
            return json.loads(text)
        except ValueError as error:
            raise self.bad(key, f"{text!r}: {error}") from None

    def whole(self, key: str) -> int:
        value = self.json(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.bad(key, f"{value!r} is not a non-negative integer")
        return value

    def number(self, key: str, most: float) -> float:
        value = self.json(key)
        if not _is_number(value):
            raise self.bad(key, f"{value!r} is not a number")
        if not 0.0 <= value <= most:
            raise self.bad(key, f"{value} is not between 0 and {most}")
        return float(value)

    def name(self, key: str) -> str:
        name = self.text(key)
        if not is_space_name(name):
            raise self.bad(key, f"{name!r} is not a name")
        return name

    def names(self, key: str) -> tuple[str, ...]:
        names = self.json(key)
        if not isinstance(names, list) or not names:
            raise self.bad(key, "must list at least one model")
        for i, name in enumerate(names):
            if not isinstance(name, str) or not is_model_name(name):
                raise self.bad(key, f"{name!r} is not a name")
            if name in names[:i]:
                raise self.bad(key, f"{name} is listed twice")
        return tuple(names)

    def sampling(self) -> float | None:
        sampling = self.text("sampling")
        if sampling == "softmax":
            return None
        if sampling == "inverse_gap":
            return self.number("inverse_gap", math.nextafter(math.inf, 0.0))
        raise self.bad("sampling", f"{sampling!r} is not softmax or inverse_gap")

    def floor_distribution(self, models: int) -> tuple[float, ...]:
        key = "floor_distribution"
        if key not in self._entries:
            return (1.0 / models,) * models
        shares = self.json(key)
        good = (
            isinstance(shares, list)
            and len(shares) == models
            and all(_is_number(p) and 0.0 <= p <= 1.0 for p in shares)
            and abs(sum(shares) - 1.0) < 1e-6
        )
        if not good:
            raise self.bad(key, "is not a distribution over the models")
        return tuple(float(p) for p in shares)


def is_space_name(name: str) -> bool:
    """Whether this may be the name of a space."""
    return _NAME.fullmatch(name) is not None


def is_model_name(name: str) -> bool:
    """Whether this may be the name of a model."""
    return _MODEL_NAME.fullmatch(name) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _head_table(tensors: dict[str, Any], format_version: int, models: int) -> HeadTable | None:
    present = [name for name in (HEAD_KEYS, HEAD_CORRECTIONS) if name in tensors]
    if not present:
        return None
    if len(present) == 1:
        missing = HEAD_KEYS if present == [HEAD_CORRECTIONS] else HEAD_CORRECTIONS
        raise BadParams(f"tensor {missing}: missing, but there is {present[0]}")
    if format_version < HEAD_VERSION:
        raise BadParams(f"tensor {HEAD_KEYS}: needs format_version {HEAD_VERSION}, but it is {format_version}")
    found = tensors[HEAD_KEYS]
    sizes = tuple(found["shape"])
    if found["dtype"] != "U64" or len(sizes) != 1 or sizes[0] > HEAD_QUERIES_MAX:
        problem = f"type {found['dtype']} with shape {list(sizes)} is not U64 [n]"
        raise BadParams(f"tensor {HEAD_KEYS}: {problem} with n of at most {HEAD_QUERIES_MAX}")
    keys = np.frombuffer(found["data"], dtype="<u8").astype(np.uint64)
    if (keys[:-1] >= keys[1:]).any():
        raise BadParams(f"tensor {HEAD_KEYS}: keys must be strictly ascending")
    shape = (keys.size, models)
    corrections = _tensor(tensors, HEAD_CORRECTIONS, shape, f"F32 {list(shape)}")
    return HeadTable(keys, corrections) if corrections is not None and keys.size > 0 else None


def _outcomes(
    meta: _Metadata, tensors: dict[str, Any], format_version: int, models: tuple[str, ...]
) -> Outcomes | None:
    present = [key for key in ("outcomes", "lambda") if meta.has(key)]
    if not present:
        stray = next((f"{model}.outcomes" for model in models if f"{model}.outcomes" in tensors), None)
        if stray is not None:
            raise meta.bad("outcomes", f"missing, but there is tensor {stray}")
        return None
    if len(present) == 1:
        missing = "outcomes" if present == ["lambda"] else "lambda"
        raise meta.bad(missing, f"missing, but there is {present[0]}")
    if format_version < OUTCOMES_VERSION:
        raise meta.bad("outcomes", f"needs format_version {OUTCOMES_VERSION}, but it is {format_version}")
    names, prices = meta.json("outcomes"), meta.json("lambda")
    if not isinstance(names, list) or not 1 <= len(names) <= OUTCOMES_MAX:
        raise meta.bad("outcomes", f"must list 1 to {OUTCOMES_MAX} names")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not 1 <= len(name.encode("utf-8", "replace")) <= OUTCOME_NAME_BYTES_MAX:
            raise meta.bad("outcomes", f"names must have 1 to {OUTCOME_NAME_BYTES_MAX} bytes")
        if name in names[:i]:
            raise meta.bad("outcomes", f"{name} is listed twice")
    if not isinstance(prices, list) or len(prices) != len(names):
        raise meta.bad("lambda", f"must list {len(names)} prices, one for each outcome")
    if not all(_is_number(price) and math.isfinite(price) for price in prices):
        raise meta.bad("lambda", "contains a price that is not a finite number")
    expected = np.zeros((len(models), len(names)), np.float32)
    for m, model in enumerate(models):
        row = _tensor(tensors, f"{model}.outcomes", (len(names),), f"F32 [{len(names)}]")
        if row is not None:
            expected[m] = row
    return Outcomes(tuple(names), tuple(float(price) for price in prices), expected)


def _score_form(tensors: dict[str, Any], model: str, dim: int) -> ScoreForm:
    fits = f"dim = {dim}"
    eigenvalues = _tensor(tensors, f"{model}.eigenvalues", (None,), fits)
    if eigenvalues is None:
        eigenvalues = np.zeros(0, np.float32)
    rank = eigenvalues.size
    eigenvectors = _tensor(tensors, f"{model}.eigenvectors", (rank, dim), fits)
    if eigenvectors is None:
        if rank > 0:
            raise BadParams(f"tensor {model}.eigenvectors: missing, but there are {rank} eigenvalues")
        eigenvectors = np.zeros((0, dim), np.float32)
    linear = _tensor(tensors, f"{model}.linear", (dim,), fits)
    bias = _tensor(tensors, f"{model}.bias", (1,), fits)
    return ScoreForm(eigenvalues, eigenvectors, linear, 0.0 if bias is None else float(bias[0]))


def _tensor(
    tensors: dict[str, Any], name: str, shape: tuple[int | None, ...], expected: str
) -> npt.NDArray[np.float32] | None:
    if name not in tensors:
        return None
    found = tensors[name]
    sizes = tuple(found["shape"])
    fits = len(sizes) == len(shape) and all(e is None or e == s for s, e in zip(sizes, shape))
    if found["dtype"] != "F32" or not fits:
        raise BadParams(f"tensor {name}: type {found['dtype']} with shape {list(sizes)} does not match {expected}")
    values = np.frombuffer(found["data"], dtype=_F32).astype(np.float32).reshape(sizes)
    if not np.isfinite(values).all():
        raise BadParams(f"tensor {name}: contains a number that is not finite")
    return values
