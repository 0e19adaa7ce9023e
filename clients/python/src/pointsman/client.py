"""HTTP client of the router sidecar. Uses only the standard library for HTTP."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from . import calls
from .calls import Attempts, Call, Choice, Feedback, Settings
from .decision import Answer
from .errors import Problem, Unreachable
from .query import Query

T = TypeVar("T")

_IDLE_MAX = 32
_CHUNK_BYTES = 64 << 10
# What a connection that the router has closed while it was idle raises.
_STALE = (ConnectionError, ssl.SSLEOFError)


class PointsmanClient:
    """Client of a router sidecar, which also logs decisions and rewards. Thread-safe.

    It keeps connections open between calls; `close`, or `with`, closes them. It retries what can pass: no connection, and the
    statuses 429, 502, 503 and 504. A retry carries the same request ID (or event ID), so that the router answers it with the
    same decision and logs it once. A call takes at most `timeout_s`, retries and pauses included; `attempt_timeout_s` bounds
    one attempt.

    It ignores the proxy settings of the environment and does not follow redirects, so the token reaches only the router.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        timeout_s: float = calls.TIMEOUT_S,
        retries: int = calls.RETRIES,
        attempt_timeout_s: float | None = None,
    ) -> None:
        self._settings = Settings(base_url, token, timeout_s, retries, attempt_timeout_s)
        self._headers = self._settings.headers()
        self._pool = _Pool(self._settings)

    def route(
        self,
        query: Query,
        request_id: str | None = None,
        space: str | None = None,
        *,
        models: Collection[str] | None = None,
        exclude: Collection[str] = (),
        draw_key: str | None = None,
    ) -> Answer:
        """Choose a model for a query. The router logs the decision.

        The same `request_id` with the same query returns the same answer. The same `request_id` with another query raises
        `Problem` with status 409. Without a `request_id` the client generates one.

        Only `models` may answer, without those in `exclude`; a name that is unknown, or no model that is left, raises
        `Problem` with status 422. Requests with one `draw_key`, such as the ID of a session, draw alike: they keep their
        model while the distribution stays the same.
        """
        return self._send(calls.route(query, request_id, space, Choice(models, exclude, draw_key)))

    def route_batch(
        self,
        queries: Sequence[Query] | npt.NDArray[Any],
        request_ids: Sequence[str] | None = None,
        space: str | None = None,
        *,
        models: Collection[str] | None = None,
        exclude: Collection[str] = (),
        draw_key: str | None = None,
    ) -> list[Answer]:
        """Choose a model for each of up to 1,000 queries of one space, all or none. Return the answers in order.

        `models`, `exclude` and `draw_key` hold for each of the queries: see `route`.
        """
        return self._send(calls.route_batch(queries, request_ids, space, Choice(models, exclude, draw_key)))

    def reward(
        self,
        request_id: str,
        reward: float | None = None,
        space: str | None = None,
        event_id: str | None = None,
        *,
        outcomes: Mapping[str, float] | None = None,
        failed: bool = False,
        rewards: Mapping[str, float] | None = None,
        preferred: str | None = None,
        over: str | None = None,
    ) -> None:
        """Report what came of a request: at least one of the following. Reports with the same `event_id` count once.

        - `reward`: how good the answer was.
        - `outcomes`: what it took, such as money or time, by name.
        - `failed`: the model did not answer. After several failures in a row the router rests the model.
        - `rewards`: how good the answers of several models were, by model.
        - `preferred` and `over`: the answer of one model was preferred to that of another.

        A reward outside of `reward.range` raises `Problem` with status 422 if the router is configured to reject it. Without
        an `event_id` the client generates one.
        """
        feedback = Feedback(reward, outcomes, failed, rewards, preferred, over)
        self._send(calls.reward(request_id, feedback, space, event_id))

    def close(self) -> None:
        """Close idle connections. Later calls raise `RuntimeError`."""
        self._pool.close()

    def __enter__(self) -> PointsmanClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call[T]) -> T:
        attempts = Attempts(self._settings)
        while True:
            try:
                return self._attempt(call, attempts.timeout_s())
            except (Unreachable, Problem) as error:
                time.sleep(attempts.pause_s(error))

    def _attempt(self, call: Call[T], timeout_s: float) -> T:
        while True:
            connection, is_reused = self._pool.take(timeout_s)
            try:
                path = self._settings.parts.path + call.path
                connection.request("POST", path, call.body, self._headers)
                response = connection.getresponse()
                data = _read(response)
            except BaseException as error:
                connection.close()
                if is_reused and isinstance(error, _STALE):
                    continue
                if isinstance(error, (OSError, http.client.HTTPException)):
                    raise self._settings.unreachable(error) from error
                raise
            if response.will_close:
                connection.close()
            else:
                self._pool.put(connection)
            return call.result(response.status, response.reason, response.headers.get("Retry-After"), data)


class _Pool:
    """Idle connections. A forked process opens its own."""

    def __init__(self, settings: Settings) -> None:
        self._parts = settings.parts
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._owner = os.getpid()
        self._is_closed = False

    def take(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it has been used before."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed: create another one")
            if self._owner != os.getpid():
                self._idle, self._owner = [], os.getpid()
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            connection.sock.settimeout(timeout_s)
            return connection, True
        host, port = str(self._parts.hostname), self._parts.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s), False
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls), False

    def put(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next call."""
        with self._lock:
            if not self._is_closed and self._owner == os.getpid() and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for connection in idle:
            connection.close()


def _read(response: http.client.HTTPResponse) -> bytes:
    """Return the body. Raises `HTTPException` if it breaks off or is too large."""
    if response.length is not None and response.length <= calls.ANSWER_BYTES_MAX:
        return response.read()
    parts: list[bytes] = []
    size = 0
    while response.length is None:
        part = response.read(_CHUNK_BYTES)
        parts.append(part)
        size += len(part)
        if not part:
            return b"".join(parts)
        if size > calls.ANSWER_BYTES_MAX:
            break
    raise http.client.HTTPException(f"the answer has more than {calls.ANSWER_BYTES_MAX} bytes")
