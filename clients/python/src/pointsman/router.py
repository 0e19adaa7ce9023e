"""Routing: parameters and a query in, a distribution over models and a draw out.

    score_m(q) = bias_m + linear_m . q + sum_i eigenvalue_i (eigenvector_i . q)^2 + correction_m(q) - charge_m     |q| = 1
    correction   of a query in the head table of frequent queries; otherwise zero
    charge_m     sum_j lambda_j outcome_mj: what the expected outcomes of the model cost
    softmax      core = softmax(score)
    inverse gap  core_m = 1 / (M + g (max score - score_m)) for all but the best, the rest for the best
    p = (1 - floor) core + floor floor_distribution
    u = first 53 bits of BLAKE2b-64(key, space | 0 | request id or draw key), read as a little-endian number, / 2^53

If only some models are eligible, core and floor_distribution are conditioned on them, with M the number of these.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .decision import Decision, check_id, random_id
from .errors import BadModels, BadParams
from .params import Params
from .query import Query, key_constants, query_key, unit

_log = logging.getLogger(__name__)

DEFAULT_KEY: Final = b"pointsman"

_KEY_BYTES_MAX = 64


@dataclass(frozen=True)
class Distribution:
    """The distributions of one decision, by model."""

    policy: dict[str, float]
    """The policy, before the exploration floor is mixed in."""
    propensities: dict[str, float]
    """The distribution that the model is drawn from."""


@dataclass(frozen=True)
class Explanation:
    """The components of a model's score for a query: score = bias + linear + sum(parts) + correction - charge."""

    score: float
    bias: float
    linear: float
    parts: tuple[float, ...]
    """Each eigenvalue times the squared product of its eigenvector with the query."""
    policy: float
    propensity: float
    correction: float = 0.0
    """The correction of a query in the head table of frequent queries."""
    charge: float = 0.0
    """What the model's expected outcomes cost."""


class Router:
    """Routes the queries of one space with the newest parameters it has received. Thread-safe."""

    def __init__(self, params: Params, key: bytes = DEFAULT_KEY) -> None:
        if not 1 <= len(key) <= _KEY_BYTES_MAX:
            raise ValueError(f"the draw key has {len(key)} bytes: use 1 to {_KEY_BYTES_MAX} bytes")
        self._key: Final = bytes(key)
        # Replaced, never modified: each decision uses one consistent version.
        self._compiled = _Compiled(params)
        self._writer: Final = threading.Lock()
        self._file: _ParamsFile | None = None

    @classmethod
    def from_bytes(cls, params: bytes, key: bytes = DEFAULT_KEY) -> Router:
        """Create a router from the bytes of a parameters file or message. `key` is `router.key` of the sidecars."""
        return cls(Params.decode(params), key)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], key: bytes = DEFAULT_KEY, reload_s: float | None = 1.0
    ) -> Router:
        """Create a router from a parameters file, and reload the file when it is replaced.

        A call looks at the file's status when `reload_s` seconds have passed since the last look, and the one that finds
        another file reads it, while other threads route by the parameters they have. Older parameters are ignored. If the
        file is invalid or missing, the router logs a warning and keeps its parameters. None: only `reload` reads the file.
        """
        if reload_s is not None and not reload_s >= 0.0:
            raise ValueError(f"reload_s = {reload_s} is not valid: expected 0 or more seconds, or None")
        file = _ParamsFile(path, reload_s)
        router = cls.from_bytes(file.read_new() or b"", key)
        router._file = file
        return router

    def reload(self) -> bool:
        """Read the parameters file now if it was replaced. Return whether its parameters were newer.

        Raises `OSError` or `BadParams` if they cannot be used; the router keeps the ones it has.
        """
        file = self._file
        if file is None:
            raise ValueError("the router has no parameters file: create it with Router.from_file, or use offer")
        with file.lock:
            data = file.read_new()
            return data is not None and self.offer(data)

    @property
    def params(self) -> Params:
        """The current parameters."""
        return self._current().params

    def offer(self, params: bytes | Params) -> bool:
        """Apply parameters if they are newer than the current ones. Return whether they were. Never goes back."""
        new = params if isinstance(params, Params) else Params.decode(params)
        with self._writer:
            old = self._compiled.params
            if new.space != old.space:
                raise BadParams(f"the parameters are for space {new.space}, but this router serves space {old.space}")
            if new.stamp <= old.stamp:
                return False
            self._compiled = _Compiled(new)
            return True

    def route(
        self,
        query: Query,
        request_id: str | None = None,
        *,
        models: Collection[str] | None = None,
        exclude: Collection[str] = (),
        draw_key: str | None = None,
    ) -> Decision:
        """Choose a model for a query. The same request ID draws the same model on every router with the same key.

        Only `models` may answer, without those in `exclude`. Requests with one `draw_key`, such as the ID of a session,
        draw alike: they keep their model while the distribution stays the same. Raises `BadModels` if a name is unknown or
        no model is left.
        """
        by = self._current()
        request_id = random_id() if request_id is None else request_id
        check_id("request_id", request_id)
        u = draw(self._key, by.params.space, request_id if draw_key is None else draw_key)
        eligible = by.eligible(models, exclude)
        core, propensities = by.distribution(by.scores(by.view(query)), eligible)
        names = [by.params.models[m] for m in eligible]
        chosen = select(propensities, u)
        return Decision(
            request_id=request_id,
            space=by.params.space,
            model=names[chosen],
            propensity=propensities[chosen],
            propensities=dict(zip(names, propensities)),
            params_version=by.params.version,
            params_epoch=by.params.epoch,
            policy=dict(zip(names, core)),
            draw_key=draw_key,
        )

    def scores(self, query: Query) -> dict[str, float]:
        """Return the score of each model."""
        by = self._current()
        return dict(zip(by.params.models, by.scores(by.view(query))))

    def distribution(
        self, query: Query, *, models: Collection[str] | None = None, exclude: Collection[str] = ()
    ) -> Distribution:
        """Return the probability of each eligible model: see `route`."""
        by = self._current()
        eligible = by.eligible(models, exclude)
        core, propensities = by.distribution(by.scores(by.view(query)), eligible)
        names = [by.params.models[m] for m in eligible]
        return Distribution(dict(zip(names, core)), dict(zip(names, propensities)))

    def explain(self, query: Query) -> dict[str, Explanation]:
        """Explain the score and the probability of each model."""
        by = self._current()
        view = by.view(query)
        scores = by.scores(view)
        core, propensities = by.distribution(scores, by.eligible(None, ()))
        parts, linear = by.parts(view)
        corrections = [0.0] * len(scores) if view.corrections is None else view.corrections.tolist()
        charges = by.charges
        return {
            model: Explanation(
                scores[m], form.bias, linear[m], parts[m], core[m], propensities[m], corrections[m], charges[m]
            )
            for m, (model, form) in enumerate(zip(by.params.models, by.params.scores))
        }

    def _current(self) -> _Compiled:
        file = self._file
        # A thread that does not get the lock routes by the present parameters.
        if file is not None and file.is_due() and file.lock.acquire(blocking=False):
            try:
                self._follow(file)
            finally:
                file.lock.release()
        return self._compiled

    def _follow(self, file: _ParamsFile) -> None:
        try:
            data = file.read_new()
            if data is not None:
                self.offer(data)
            problem = ""
        except (OSError, BadParams) as error:
            problem = str(error)
        if problem and problem != file.problem:
            version = self._compiled.params.version
            _log.warning("cannot reload parameters from %s, keeping version %d: %s", file.path, version, problem)
        file.problem = problem


class _ParamsFile:
    """A parameters file that is read again when it was replaced."""

    def __init__(self, path: str | os.PathLike[str], reload_s: float | None) -> None:
        self.path: Final = os.fspath(path)
        self.lock: Final = threading.Lock()
        """Held by the thread that reads the file."""
        self.problem = ""
        """Why the last read failed, to log it once."""
        self._reload_s: Final = reload_s
        self._look_at_s = 0.0
        self._seen: tuple[int, ...] | None = None

    def is_due(self) -> bool:
        """Whether it is time to look at the file."""
        return self._reload_s is not None and time.monotonic() >= self._look_at_s

    def read_new(self) -> bytes | None:
        """Return the contents, or None if it is the file that was read last."""
        if self._reload_s is not None:
            self._look_at_s = time.monotonic() + self._reload_s
        if _identity(os.stat(self.path)) == self._seen:
            return None
        with open(self.path, "rb") as file:
            # Of the open file: its path may name another one by now.
            seen = _identity(os.fstat(file.fileno()))
            data = file.read()
        self._seen = seen
        return data


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, eq=False)
class _View:
    """A query, as the parameters see it."""

    products: npt.NDArray[np.float64]
    """Products of the rows with the unit query."""
    corrections: npt.NDArray[np.float32] | None
    """Those of a query in the head table."""


class _Compiled:
    """The vectors of all models as rows of one matrix, so that scoring a query is one product."""

    __slots__ = ("params", "charges", "_rows", "_eigenvalues", "_owners", "_linear", "_biases", "_constants")

    def __init__(self, params: Params) -> None:
        forms = params.scores
        self.params: Final = params
        self.charges: Final = [0.0] * len(forms) if params.outcomes is None else params.outcomes.charges()
        self._eigenvalues: Final = np.concatenate([form.eigenvalues for form in forms]).astype(np.float64)
        self._owners: Final = np.repeat(np.arange(len(forms)), [form.eigenvalues.size for form in forms])
        self._linear: Final = np.flatnonzero([form.linear is not None for form in forms])
        linear = [form.linear[np.newaxis] for form in forms if form.linear is not None]
        self._rows: Final = np.concatenate([*(form.eigenvectors for form in forms), *linear])
        self._biases: Final = np.array([form.bias for form in forms], np.float64)
        self._constants: Final = None if params.head is None else key_constants(params.dim)

    def view(self, query: Query) -> _View:
        """Return what the scores depend on."""
        q = unit(query, self.params.dim)
        head, constants = self.params.head, self._constants
        corrections = None if head is None or constants is None else head.get(query_key(q, constants))
        return _View((self._rows @ q.astype(np.float32)).astype(np.float64), corrections)

    def scores(self, view: _View) -> list[float]:
        """The score of each model."""
        products = view.products
        rank = self._eigenvalues.size
        parts = self._eigenvalues * products[:rank] ** 2
        quadratic = np.bincount(self._owners, weights=parts, minlength=len(self._biases))
        scores = self._biases + np.asarray(quadratic, np.float64)
        scores[self._linear] += products[rank:]
        if view.corrections is not None:
            scores += view.corrections
        return [float(score) - charge for score, charge in zip(scores, self.charges)]

    def parts(self, view: _View) -> tuple[list[tuple[float, ...]], list[float]]:
        """Return the quadratic and linear parts of each model's score."""
        products = view.products
        rank = self._eigenvalues.size
        parts = self._eigenvalues * products[:rank] ** 2
        models = range(len(self._biases))
        linear = dict(zip(self._linear.tolist(), products[rank:]))
        quadratic = [tuple(float(part) for part in parts[self._owners == m]) for m in models]
        return quadratic, [float(linear.get(m, 0.0)) for m in models]

    def eligible(self, models: Collection[str] | None, exclude: Collection[str]) -> list[int]:
        """Return the places of the models that may answer, in order."""
        known = self.params.models
        for argument, names in (("models", known if models is None else models), ("exclude", exclude)):
            if isinstance(names, str):
                raise BadModels(f"{argument} is {names!r}: expected a list of names")
            unknown = next((name for name in names if name not in known), None)
            if unknown is not None:
                raise BadModels(f"{argument}: space {self.params.space} has no model {unknown!r}")
        eligible = [m for m, name in enumerate(known) if (models is None or name in models) and name not in exclude]
        if not eligible:
            raise BadModels(f"models and exclude leave no model of space {self.params.space}")
        return eligible

    def distribution(self, scores: Sequence[float], eligible: list[int]) -> tuple[list[float], list[float]]:
        """Return the core distribution over the eligible models, and the one with the floor mixed in."""
        params = self.params
        among = [scores[m] for m in eligible]
        core = softmax(among) if params.inverse_gap is None else inverse_gap(params.inverse_gap, among)
        floor, shares = params.floor, list(params.floor_distribution)
        if len(eligible) < len(scores):
            shares = [shares[m] for m in eligible]
            total = sum(shares)
            shares = [share / total if total > 0.0 else 1.0 / len(shares) for share in shares]
        return core, [(1.0 - floor) * p + floor * f for p, f in zip(core, shares)]


def softmax(scores: Sequence[float]) -> list[float]:
    """Return probabilities proportional to the exponential of the scores."""
    best = max(scores)
    # The minimum weight is exp(-700): still positive, so that every model can be drawn.
    weights = [math.exp(max(score - best, -700.0)) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def inverse_gap(gap: float, scores: Sequence[float]) -> list[float]:
    """Return inverse-gap probabilities; the first of the best scores gets the rest."""
    best = max(range(len(scores)), key=scores.__getitem__)
    core = [1.0 / (len(scores) + gap * (scores[best] - score)) for score in scores]
    core[best] = 1.0 - sum(p for m, p in enumerate(core) if m != best)
    return core


def draw(key: bytes, space: str, draw_key: str) -> float:
    """Return the draw of a request ID, or of another key, in [0, 1), reproducible with the router's key."""
    # Space names contain no zero byte, so the encoding is unambiguous.
    text = space.encode("ascii") + b"\0" + check_id("draw_key", draw_key)
    digest = hashlib.blake2b(text, digest_size=8, key=key).digest()
    return float((int.from_bytes(digest, "little") >> 11) / (1 << 53))


def select(propensities: Sequence[float], u: float) -> int:
    """Return the model that a draw selects from the cumulative distribution; never one of probability zero."""
    left, chosen = u, 0
    for m, p in enumerate(propensities):
        if p <= 0.0:
            continue
        chosen = m
        left -= p
        if left < 0.0:
            break
    return chosen
