"""The HTTP client, against a server that answers as it is told."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from pointsman import Answer, BadQuery, BadRequestId, PointsmanClient, Problem, Unreachable

DECISION = {
    "request_id": "r-1",
    "space": "shop",
    "model": "bge",
    "propensity": 0.75,
    "propensities": {"bge": 0.75, "minilm": 0.25},
    "params_version": 12,
    "params_epoch": 1,
}


class Fake:
    """A router that notes what it is sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: list[tuple[str, dict[str, str], Any]] = []


@contextmanager
def fake(status: int, body: object, headers: dict[str, str] | None = None) -> Iterator[Fake]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            router.seen.append((self.path, dict(self.headers), json.loads(sent)))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    router = Fake(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield router
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_route() -> None:
    query = np.array([0.5, -1.0])
    with fake(200, {**DECISION, "more": 1}) as router:
        answer = PointsmanClient(router.url + "/", token="secret").route(query, request_id="r-1", space="shop")
    assert answer == Answer(**DECISION)  # type: ignore[arg-type]
    [(path, headers, body)] = router.seen
    assert path == "/v1/route" and headers["Authorization"] == "Bearer secret"
    assert headers["Content-Type"] == "application/json"
    encoded = base64.b64encode(query.astype("<f4").tobytes()).decode()
    assert body == {"query": encoded, "request_id": "r-1", "space": "shop"}


def test_route_of_a_list_says_nothing_else() -> None:
    with fake(200, DECISION) as router:
        PointsmanClient(router.url).route([1, 2])
    [(_, headers, body)] = router.seen
    assert body == {"query": [1.0, 2.0]} and "Authorization" not in headers


def test_reward() -> None:
    with fake(202, b"") as router:
        client = PointsmanClient(router.url)
        client.reward("größe", 1)
        client.reward("r-2", 0.5, space="shop", event_id="e")
    assert [body for _, _, body in router.seen] == [
        {"request_id": "größe", "reward": 1.0},
        {"request_id": "r-2", "reward": 0.5, "space": "shop", "event_id": "e"},
    ]
    assert router.seen[0][0] == "/v1/rewards"


def test_problems_carry_field_and_detail() -> None:
    body = {"title": "Unprocessable Entity", "status": 422, "detail": "the query has 3 components", "field": "query"}
    with fake(422, body) as router, pytest.raises(Problem) as error:
        PointsmanClient(router.url).route([1.0, 2.0, 3.0])
    problem = error.value
    assert (problem.status, problem.field, problem.detail) == (422, "query", "the query has 3 components")
    assert str(problem) == "422 Unprocessable Entity (query): the query has 3 components"
    assert problem.retry_after_s is None


@pytest.mark.parametrize(
    ("status", "body", "headers", "said", "retry_after_s"),
    [
        (503, {"title": "Service Unavailable", "status": 503, "detail": "wait"}, {"Retry-After": "1"}, "wait", 1.0),
        (502, b"<html>bad gateway", {}, "<html>bad gateway", None),
        (500, b"", {}, "no detail", None),
        (500, b"[1]", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, "[1]", None),
        (302, b"", {"Location": "http://127.0.0.1:1/"}, "no detail", None),
        (200, b"not json", {}, "unexpected response, not from a Pointsman router", None),
        (200, {"model": "bge"}, {}, "unexpected response, not from a Pointsman router", None),
        (200, [1], {}, "unexpected response, not from a Pointsman router", None),
    ],
)
def test_other_answers(
    status: int, body: object, headers: dict[str, str], said: str, retry_after_s: float | None
) -> None:
    with fake(status, body, headers) as router, pytest.raises(Problem) as error:
        PointsmanClient(router.url).route([1.0])
    problem = error.value
    assert (problem.status, problem.field, problem.retry_after_s) == (status, None, retry_after_s)
    assert said in problem.detail
    assert len(router.seen) == 1


def test_nobody_there_and_nobody_answering() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unreachable, match="timed out"):
            PointsmanClient(url, timeout_s=0.05).route([1.0])
    with pytest.raises(Unreachable, match="cannot reach the router at"):
        PointsmanClient(url).reward("r", 1.0)


def test_an_answer_that_breaks_off() -> None:
    with fake(200, b"{}", {"Content-Length": "100"}) as router, pytest.raises((Unreachable, Problem)):
        PointsmanClient(router.url, timeout_s=0.2).route([1.0])


def test_what_is_not_sent() -> None:
    client = PointsmanClient("http://127.0.0.1:1")
    with pytest.raises(BadQuery):
        client.route([float("nan")])
    with pytest.raises(BadRequestId):
        client.route([1.0], request_id="")
    with pytest.raises(BadRequestId):
        client.reward("r", 1.0, event_id="")
    with pytest.raises(ValueError, match="expected a finite number"):
        client.reward("r", float("inf"))


@pytest.mark.parametrize("url", ["127.0.0.1:9464", "file:///etc/passwd", "http://", ""])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="is not valid: expected a URL"):
        PointsmanClient(url)


def test_bad_timeouts() -> None:
    for timeout_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_s"):
            PointsmanClient("http://127.0.0.1:1", timeout_s=timeout_s)
