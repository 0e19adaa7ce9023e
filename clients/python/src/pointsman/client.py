"""HTTP client of the router sidecar. Uses only the standard library."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from email.message import Message
from typing import IO, Any, NoReturn
from urllib.parse import urlsplit

from .decision import Answer, check_id
from .errors import Problem, Unreachable
from .query import Query, encode

_ANSWER_BYTES_MAX = 1 << 20


class PointsmanClient:
    """Client of a router sidecar, which also logs decisions and rewards. Thread-safe.

    It ignores the proxy settings of the environment and does not follow redirects, so the token reaches only the router.
    It does not retry. To retry safely, call again with the same `request_id` (or `event_id`).
    """

    def __init__(self, base_url: str, token: str | None = None, timeout_s: float = 2.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url {base_url!r} is not valid: expected a URL such as http://127.0.0.1:9464")
        if not (timeout_s > 0.0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s = {timeout_s} is not valid: expected a positive number of seconds")
        self._base_url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def route(self, query: Query, request_id: str | None = None, space: str | None = None) -> Answer:
        """Choose a model for a query. The router logs the decision.

        The same `request_id` with the same query returns the same answer. The same `request_id` with another query raises
        `Problem` with status 409.
        """
        body: dict[str, Any] = {"query": encode(query)}
        if request_id is not None:
            check_id("request_id", request_id)
            body["request_id"] = request_id
        if space is not None:
            body["space"] = space
        return _answer(self._post("/v1/route", body))

    def reward(self, request_id: str, reward: float, space: str | None = None, event_id: str | None = None) -> None:
        """Report the reward of a request. Rewards with the same `event_id` count once.

        A reward outside of `reward.range` raises `Problem` with status 422 if the router is configured to reject it.
        """
        check_id("request_id", request_id)
        if not math.isfinite(reward):
            raise ValueError(f"reward = {reward} is not valid: expected a finite number")
        body: dict[str, Any] = {"request_id": request_id, "reward": float(reward)}
        if space is not None:
            body["space"] = space
        if event_id is not None:
            check_id("event_id", event_id)
            body["event_id"] = event_id
        self._post("/v1/rewards", body)

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        data = json.dumps(body, allow_nan=False).encode()
        request = urllib.request.Request(self._base_url + path, data, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return bytes(response.read(_ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                _raise_problem(error)
        # Includes socket errors while the response is read, and responses that are not HTTP.
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise Unreachable(f"cannot reach the router at {self._base_url}: {reason or type(error).__name__}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def _answer(data: bytes) -> Answer:
    try:
        body = json.loads(data)
        return Answer(
            request_id=str(body["request_id"]),
            space=str(body["space"]),
            model=str(body["model"]),
            propensity=float(body["propensity"]),
            propensities={str(model): float(p) for model, p in body["propensities"].items()},
            params_version=int(body["params_version"]),
            params_epoch=int(body["params_epoch"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Problem(200, "OK", f"unexpected response, not from a Pointsman router: {error!r}") from None


def _raise_problem(error: urllib.error.HTTPError) -> NoReturn:
    title, detail, field = error.reason, "", None
    try:
        text = error.read(_ANSWER_BYTES_MAX).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        body = json.loads(text)
        title, detail, field = body.get("title", title), body["detail"], body.get("field")
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = text.strip()[:200] or "no detail"
    raise Problem(error.code, str(title), str(detail), field, _seconds(error.headers.get("Retry-After"))) from None


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
