"""What the HTTP clients share: requests, answers, and when to retry. No I/O."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import SplitResult, urlsplit

import numpy.typing as npt

from .decision import Answer, check_id, random_id
from .errors import BadQuery, Problem, Unreachable
from .query import Query, encode

T = TypeVar("T")

BATCH_MAX = 1000
ANSWER_BYTES_MAX = 64 << 20
TIMEOUT_S = 2.0
RETRIES = 2

_PAUSE_S = 0.05
_PAUSE_S_MAX = 1.0
_TRANSIENT = frozenset({429, 502, 503, 504})


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request that may be sent more than once: its IDs make the router answer and count it once."""

    path: str
    body: bytes
    parse: Callable[[Any], T]

    def result(self, status: int, reason: str, retry_after: str | None, data: bytes) -> T:
        """Return what the router answered. Raises `Problem` if it is an error."""
        if not 200 <= status < 300:
            raise _problem(status, reason, retry_after, data)
        try:
            return self.parse(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Problem(status, reason, f"unexpected response, not from a Pointsman router: {error!r}") from None


@dataclass(frozen=True)
class Choice:
    """Which models may answer, and what the model is drawn by."""

    models: Collection[str] | None = None
    exclude: Collection[str] = ()
    draw_key: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request."""
        fields: dict[str, Any] = {}
        for name, models in (("models", self.models), ("exclude", self.exclude or None)):
            if isinstance(models, str):
                raise ValueError(f"{name} is {models!r}: expected a list of names")
            if models is not None:
                fields[name] = list(models)
        if self.draw_key is not None:
            check_id("draw_key", self.draw_key)
            fields["draw_key"] = self.draw_key
        return fields


def route(query: Query, request_id: str | None, space: str | None, choice: Choice) -> Call[Answer]:
    """`POST /v1/route`."""
    body = {**_request(query, request_id), **choice.fields(), **_optional(space=space)}
    return _call("/v1/route", body, lambda data: _answer(json.loads(data)))


def route_batch(
    queries: Sequence[Query] | npt.NDArray[Any],
    request_ids: Sequence[str] | None,
    space: str | None,
    choice: Choice,
) -> Call[list[Answer]]:
    """`POST /v1/route:batch`."""
    if not 1 <= len(queries) <= BATCH_MAX:
        raise ValueError(f"the batch has {len(queries)} queries: send 1 to {BATCH_MAX} in one call")
    if request_ids is not None and len(request_ids) != len(queries):
        raise ValueError(f"{len(request_ids)} request_ids for {len(queries)} queries: pass one ID per query")
    requests = []
    for i, query in enumerate(queries):
        try:
            requests.append({**_request(query, None if request_ids is None else request_ids[i]), **choice.fields()})
        except BadQuery as error:
            raise BadQuery(f"queries[{i}]: {error}") from None

    def parse(data: bytes) -> list[Answer]:
        decisions = json.loads(data)["decisions"]
        if len(decisions) != len(requests):
            raise ValueError(f"{len(decisions)} decisions for {len(requests)} queries")
        return [_answer(decision) for decision in decisions]

    return _call("/v1/route:batch", {"requests": requests, **_optional(space=space)}, parse)


@dataclass(frozen=True)
class Feedback:
    """What came of a request."""

    reward: float | None = None
    outcomes: Mapping[str, float] | None = None
    failed: bool = False
    rewards: Mapping[str, float] | None = None
    preferred: str | None = None
    over: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a reward: those that say something."""
        fields: dict[str, Any] = {}
        if self.reward is not None:
            fields["reward"] = _finite("reward", self.reward)
        for name, numbers in (("outcomes", self.outcomes), ("rewards", self.rewards)):
            if numbers:
                fields[name] = {key: _finite(f"{name}[{key!r}]", number) for key, number in numbers.items()}
        if self.failed:
            fields["failed"] = True
        if (self.preferred is None) != (self.over is None) or (self.preferred is not None and self.preferred == self.over):
            raise ValueError("preferred and over are not valid: expected both or neither, and two different models")
        fields.update(_optional(preferred=self.preferred, over=self.over))
        if not fields:
            raise ValueError("the feedback is empty: pass reward, outcomes, failed, rewards, or preferred and over")
        return fields


def _finite(name: str, number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{name} = {number} is not valid: expected a finite number")
    return float(number)


def reward(request_id: str, feedback: Feedback, space: str | None, event_id: str | None) -> Call[None]:
    """`POST /v1/rewards`. Without an `event_id` the call gets one, so that a retry counts once."""
    event_id = random_id() if event_id is None else event_id
    check_id("request_id", request_id)
    check_id("event_id", event_id)
    body = {"request_id": request_id, "event_id": event_id, **feedback.fields(), **_optional(space=space)}
    return _call("/v1/rewards", body, lambda data: None)


@dataclass(frozen=True)
class Settings:
    """Where the router is, and how long and how often to try."""

    base_url: str
    token: str | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S
    retries: int = RETRIES
    attempt_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not _is_address(self.parts):
            raise ValueError(f"base_url {self.base_url!r} is not valid: expected a URL such as http://127.0.0.1:9464")
        for name, seconds in (("timeout_s", self.timeout_s), ("attempt_timeout_s", self.attempt_timeout_s)):
            if seconds is not None and not (seconds > 0.0 and math.isfinite(seconds)):
                raise ValueError(f"{name} = {seconds} is not valid: expected a positive number of seconds")
        if not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries = {self.retries} is not valid: expected 0 or more")

    @property
    def parts(self) -> SplitResult:
        """The parts of the base URL."""
        return urlsplit(self.base_url.rstrip("/"))

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return headers

    def unreachable(self, error: BaseException) -> Unreachable:
        """Return the error for a connection that failed."""
        reason = "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return Unreachable(f"cannot reach the router at {self.base_url.rstrip('/')}: {reason}")


class Attempts:
    """The attempts of one call: at most `retries` + 1, all within `timeout_s`."""

    def __init__(self, settings: Settings) -> None:
        self._deadline = time.monotonic() + settings.timeout_s
        self._attempt_timeout_s = settings.attempt_timeout_s
        self._retries_left = settings.retries
        self._pause_s = _PAUSE_S

    def timeout_s(self) -> float:
        """Return the time that the next attempt may take."""
        left = max(self._deadline - time.monotonic(), 1e-3)
        return left if self._attempt_timeout_s is None else min(left, self._attempt_timeout_s)

    def pause_s(self, error: Unreachable | Problem) -> float:
        """Return the time to wait before the next attempt. Raises the error if there is no next attempt.

        The pause doubles from attempt to attempt, with jitter, and is at least what Retry-After asks for.
        """
        is_transient = isinstance(error, Unreachable) or error.status in _TRANSIENT
        if not is_transient or self._retries_left == 0:
            raise error
        self._retries_left -= 1
        pause = random.uniform(0.5, 1.0) * self._pause_s
        self._pause_s = min(2.0 * self._pause_s, _PAUSE_S_MAX)
        if isinstance(error, Problem) and error.retry_after_s is not None:
            pause = max(pause, error.retry_after_s)
        if time.monotonic() + pause >= self._deadline:
            raise error
        return pause


def _is_address(parts: SplitResult) -> bool:
    try:
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # The port is not a number.
        return False


def _call(path: str, body: dict[str, Any], parse: Callable[[Any], T]) -> Call[T]:
    return Call(path, json.dumps(body, allow_nan=False).encode(), parse)


def _request(query: Query, request_id: str | None) -> dict[str, Any]:
    # An ID of the client's own: if the answer is lost, a retry gets the same decision.
    request_id = random_id() if request_id is None else request_id
    check_id("request_id", request_id)
    return {"query": encode(query), "request_id": request_id}


def _optional(**fields: str | None) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value is not None}


def _answer(body: Any) -> Answer:
    return Answer(
        request_id=str(body["request_id"]),
        space=str(body["space"]),
        model=str(body["model"]),
        propensity=float(body["propensity"]),
        propensities={str(model): float(p) for model, p in body["propensities"].items()},
        params_version=int(body["params_version"]),
        params_epoch=int(body["params_epoch"]),
    )


def _problem(status: int, reason: str, retry_after: str | None, data: bytes) -> Problem:
    title, detail, place = reason, "", None
    text = data.decode("utf-8", "replace")
    try:
        body = json.loads(text)
        title, detail, place = body.get("title", title), body["detail"], body.get("field")
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = text.strip()[:200] or "no detail"
    return Problem(status, str(title), str(detail), place, _seconds(retry_after))


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
