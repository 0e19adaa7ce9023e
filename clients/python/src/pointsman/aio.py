"""Asynchronous HTTP client of the router sidecar. Needs `pip install 'pointsman[async]'`."""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

try:
    import anyio
    import httpx
except ImportError as error:
    raise ImportError(f"pointsman.aio needs httpx and anyio: pip install 'pointsman[async]' ({error})") from error

from . import calls
from .calls import Attempts, Call, Choice, Feedback, Settings
from .decision import Answer
from .errors import Problem, Unreachable
from .query import Query

T = TypeVar("T")


class AsyncPointsmanClient:
    """Client of a router sidecar, which also logs decisions and rewards. For use within one event loop.

    It keeps connections open between calls; `aclose`, or `async with`, closes them. Timeouts, retries, proxies and redirects
    are those of `PointsmanClient`. At most `connections_max` connections are open at one time; further calls wait for one
    within their timeout.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        timeout_s: float = calls.TIMEOUT_S,
        retries: int = calls.RETRIES,
        attempt_timeout_s: float | None = None,
        connections_max: int = 100,
    ) -> None:
        self._settings = Settings(base_url, token, timeout_s, retries, attempt_timeout_s)
        self._http = httpx.AsyncClient(
            headers=self._settings.headers(),
            # The whole attempt has a timeout, which these would only repeat.
            timeout=None,
            limits=httpx.Limits(max_connections=connections_max, max_keepalive_connections=connections_max),
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def route(
        self,
        query: Query,
        request_id: str | None = None,
        space: str | None = None,
        *,
        models: Collection[str] | None = None,
        exclude: Collection[str] = (),
        draw_key: str | None = None,
    ) -> Answer:
        """Choose a model for a query: see `PointsmanClient.route`."""
        return await self._send(calls.route(query, request_id, space, Choice(models, exclude, draw_key)))

    async def route_batch(
        self,
        queries: Sequence[Query] | npt.NDArray[Any],
        request_ids: Sequence[str] | None = None,
        space: str | None = None,
        *,
        models: Collection[str] | None = None,
        exclude: Collection[str] = (),
        draw_key: str | None = None,
    ) -> list[Answer]:
        """Choose a model for each of up to 1,000 queries: see `PointsmanClient.route_batch`."""
        return await self._send(calls.route_batch(queries, request_ids, space, Choice(models, exclude, draw_key)))

    async def reward(
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
        """Report what came of a request: see `PointsmanClient.reward`."""
        feedback = Feedback(reward, outcomes, failed, rewards, preferred, over)
        await self._send(calls.reward(request_id, feedback, space, event_id))

    async def aclose(self) -> None:
        """Close all connections. Later calls raise `RuntimeError`."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncPointsmanClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _send(self, call: Call[T]) -> T:
        attempts = Attempts(self._settings)
        while True:
            try:
                return await self._attempt(call, attempts.timeout_s())
            except (Unreachable, Problem) as error:
                await anyio.sleep(attempts.pause_s(error))

    async def _attempt(self, call: Call[T], timeout_s: float) -> T:
        url = self._settings.base_url.rstrip("/") + call.path
        try:
            with anyio.fail_after(timeout_s):
                async with self._http.stream("POST", url, content=call.body) as response:
                    data = await _read(response)
        except (OSError, httpx.RequestError) as error:
            raise self._settings.unreachable(error) from error
        return call.result(response.status_code, response.reason_phrase, response.headers.get("Retry-After"), data)


async def _read(response: httpx.Response) -> bytes:
    data = bytearray()
    async for part in response.aiter_bytes():
        data += part
        if len(data) > calls.ANSWER_BYTES_MAX:
            raise httpx.ReadError(f"the answer has more than {calls.ANSWER_BYTES_MAX} bytes")
    return bytes(data)
