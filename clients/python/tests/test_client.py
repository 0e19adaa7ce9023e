"""The HTTP clients, against a server that answers from a script. Every test runs with both."""

from __future__ import annotations

import base64
import functools
import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import anyio.from_thread
import numpy as np
import pytest
from pointsman import Answer, BadQuery, BadRequestId, PointsmanClient, Problem, Unreachable
from pointsman.aio import AsyncPointsmanClient

DECISION = {
    "request_id": "r-1",
    "space": "shop",
    "model": "bge",
    "propensity": 0.75,
    "propensities": {"bge": 0.75, "minilm": 0.25},
    "params_version": 12,
    "params_epoch": 1,
}


class Client(Protocol):
    """What both clients do."""

    def route(
        self,
        query: Any,
        request_id: str | None = None,
        space: str | None = None,
        *,
        models: Collection[str] | None = None,
        exclude: Collection[str] = (),
        draw_key: str | None = None,
    ) -> Answer: ...

    def route_batch(
        self,
        queries: Any,
        request_ids: Sequence[str] | None = None,
        space: str | None = None,
        *,
        models: Collection[str] | None = None,
        exclude: Collection[str] = (),
        draw_key: str | None = None,
    ) -> list[Answer]: ...

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
    ) -> None: ...

    def close(self) -> None: ...


class Waiting:
    """The asynchronous client, in an event loop of its own, with blocking methods."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, client: AsyncPointsmanClient) -> None:
        self._portal = portal
        self._client = client

    def route(self, *arguments: Any, **named: Any) -> Answer:
        return self._portal.call(functools.partial(self._client.route, *arguments, **named))

    def route_batch(self, *arguments: Any, **named: Any) -> list[Answer]:
        return self._portal.call(functools.partial(self._client.route_batch, *arguments, **named))

    def reward(self, *arguments: Any, **named: Any) -> None:
        self._portal.call(functools.partial(self._client.reward, *arguments, **named))

    def close(self) -> None:
        self._portal.call(self._client.aclose)


Connect = Callable[..., Client]

# A busy machine must not fail a test.
PATIENT: dict[str, Any] = {"timeout_s": 30.0}


@pytest.fixture(params=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with ExitStack() as stack:
        if request.param == "sync":
            yield lambda *arguments, **named: stack.enter_context(PointsmanClient(*arguments, **{**PATIENT, **named}))
            return
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal(request.param))

        def make(*arguments: Any, **named: Any) -> Client:
            async def client() -> AsyncPointsmanClient:
                return AsyncPointsmanClient(*arguments, **{**PATIENT, **named})

            waiting = Waiting(portal, portal.call(client))
            stack.callback(waiting.close)
            return waiting

        yield make


class Fake:
    """A router that records what it is sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.connections = 0

    def bodies(self) -> list[Any]:
        return [body for _, _, body in self.seen]


@contextmanager
def fake(status: int, body: object, headers: dict[str, str] | None = None) -> Iterator[Fake]:
    """Answers every request alike."""
    with scripted([(status, body, headers or {})]) as router:
        yield router


@contextmanager
def scripted(answers: list[tuple[int, object, dict[str, str]] | str]) -> Iterator[Fake]:
    """Answers requests in turn, the last answer again and again. `drop`: closes the connection instead; `close`: answers with
    a decision, then closes the connection without a word."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            router.connections += 1

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            answer = answers[min(len(router.seen), len(answers) - 1)]
            router.seen.append((self.path, dict(self.headers), json.loads(sent)))
            self.close_connection = isinstance(answer, str)
            if answer == "drop":
                return
            status, body, more = (200, DECISION, dict[str, str]()) if isinstance(answer, str) else answer
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            # What the header promises does not come.
            self.close_connection |= more.get("Content-Length", str(len(data))) != str(len(data))

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # Idle connections stay open until their client closes them.
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    router = Fake(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield router
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_route(connect: Connect) -> None:
    query = np.array([0.5, -1.0])
    with fake(200, {**DECISION, "more": 1}) as router:
        answer = connect(router.url + "/", token="secret").route(query, request_id="r-1", space="shop")
    assert answer == Answer(**DECISION)  # type: ignore[arg-type]
    [(path, headers, body)] = router.seen
    named = {name.lower(): value for name, value in headers.items()}
    assert path == "/v1/route" and named["authorization"] == "Bearer secret"
    assert named["content-type"] == "application/json"
    encoded = base64.b64encode(query.astype("<f4").tobytes()).decode()
    assert body == {"query": encoded, "request_id": "r-1", "space": "shop"}


def test_route_of_a_list_gets_an_id(connect: Connect) -> None:
    with fake(200, DECISION) as router:
        client = connect(router.url)
        client.route([1, 2])
        client.route([1, 2])
    first, second = router.bodies()
    assert sorted(first) == ["query", "request_id"] and first["query"] == [1.0, 2.0]
    assert len(first["request_id"]) == 32 and first["request_id"] != second["request_id"]
    assert all("authorization" not in {name.lower() for name in headers} for _, headers, _ in router.seen)


@pytest.mark.parametrize("queries", [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]], np.float32)])
def test_route_batch(connect: Connect, queries: Any) -> None:
    decisions = [DECISION, {**DECISION, "request_id": "r-2", "model": "minilm"}]
    with fake(200, {"decisions": decisions}) as router:
        client = connect(router.url)
        answers = client.route_batch(queries, request_ids=["r-1", "r-2"], space="shop")
        client.route_batch(queries)
    assert [(answer.request_id, answer.model) for answer in answers] == [("r-1", "bge"), ("r-2", "minilm")]
    path, _, body = router.seen[0]
    assert path == "/v1/route:batch" and body["space"] == "shop"
    assert [item["request_id"] for item in body["requests"]] == ["r-1", "r-2"]
    generated = {item["request_id"] for item in router.bodies()[1]["requests"]}
    assert len(generated) == 2 and "space" not in router.bodies()[1]


def test_bad_batches(connect: Connect) -> None:
    client = connect("http://127.0.0.1:1")
    for queries, ids, problem in [
        ([], None, "the batch has 0 queries: send 1 to 1000"),
        (np.ones((1001, 2)), None, "the batch has 1001 queries"),
        ([[1.0]], ["a", "b"], "2 request_ids for 1 queries"),
        ([[1.0], [float("nan")]], None, r"queries\[1\]: component 0 of the query is nan"),
    ]:
        with pytest.raises(ValueError, match=problem):
            client.route_batch(queries, ids)
    with fake(200, {"decisions": [DECISION]}) as router, pytest.raises(Problem, match="1 decisions for 2 queries"):
        connect(router.url).route_batch([[1.0], [2.0]])


def test_reward(connect: Connect) -> None:
    with fake(202, b"") as router:
        client = connect(router.url)
        client.reward("größe", 1)
        client.reward("r-2", 0.5, space="shop", event_id="e")
    first, second = router.bodies()
    assert len(first.pop("event_id")) == 32
    assert first == {"request_id": "größe", "reward": 1.0}
    assert second == {"request_id": "r-2", "reward": 0.5, "space": "shop", "event_id": "e"}
    assert router.seen[0][0] == "/v1/rewards"


def test_problems_carry_field_and_detail(connect: Connect) -> None:
    body = {"title": "Unprocessable Entity", "status": 422, "detail": "the query has 3 components", "field": "query"}
    with fake(422, body) as router, pytest.raises(Problem) as error:
        connect(router.url).route([1.0, 2.0, 3.0])
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
    connect: Connect, status: int, body: object, headers: dict[str, str], said: str, retry_after_s: float | None
) -> None:
    with fake(status, body, headers) as router, pytest.raises(Problem) as error:
        connect(router.url, retries=0).route([1.0])
    problem = error.value
    assert (problem.status, problem.field, problem.retry_after_s) == (status, None, retry_after_s)
    assert said in problem.detail
    assert len(router.seen) == 1


def test_nobody_there_and_nobody_answering(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unreachable, match="timed out"):
            connect(url, timeout_s=0.05).route([1.0])
    with pytest.raises(Unreachable, match="cannot reach the router at"):
        connect(url).reward("r", 1.0)


def test_an_answer_that_breaks_off(connect: Connect) -> None:
    with fake(200, b"{}", {"Content-Length": "100"}) as router, pytest.raises(Unreachable):
        connect(router.url, retries=1).route([1.0])
    assert len(router.seen) == 2


def test_connections_are_kept(connect: Connect) -> None:
    with fake(200, DECISION) as router:
        client = connect(router.url)
        for _ in range(5):
            client.route([1.0])
        assert router.connections == 1
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.route([1.0])
    assert len(router.seen) == 5


def test_problems_keep_the_connection(connect: Connect) -> None:
    with fake(422, {"detail": "no"}) as router:
        client = connect(router.url)
        for _ in range(3):
            with pytest.raises(Problem):
                client.route([1.0])
    assert router.connections == 1


def test_a_connection_that_the_router_has_closed_is_replaced(connect: Connect) -> None:
    with scripted(["close", "close", (200, DECISION, {})]) as router:
        client = connect(router.url)
        for _ in range(3):
            client.route([1.0])
    assert (router.connections, len(router.seen)) == (3, 3)


TRANSIENT: list[tuple[int, object, dict[str, str]] | str] = [
    "drop",
    (429, {"detail": "slow down"}, {"Retry-After": "0"}),
    (502, b"", {}),
    (503, {"detail": "not ready"}, {}),
    (504, b"", {}),
]


@pytest.mark.parametrize("trouble", TRANSIENT)
def test_retries_carry_the_same_ids(connect: Connect, trouble: Any) -> None:
    calls: list[Callable[[Client], object]] = [
        lambda client: client.route([1.0, 2.0]),
        lambda client: client.reward("r-1", 1.0),
        lambda client: client.route_batch([[1.0]]),
    ]
    for call in calls:
        answer: Any = {**DECISION, "decisions": [DECISION]}
        with scripted([trouble, trouble, (200, answer, {})]) as router:
            call(connect(router.url))
        first, second, third = router.bodies()
        assert first == second == third and ("event_id" in first or "request_id" in json.dumps(first))


@pytest.mark.parametrize("trouble", TRANSIENT)
def test_retries_end(connect: Connect, trouble: Any) -> None:
    with scripted([trouble]) as router, pytest.raises((Problem, Unreachable)):
        connect(router.url, retries=1).route([1.0])
    assert len(router.seen) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 409, 413, 422, 500])
def test_what_cannot_pass_is_not_retried(connect: Connect, status: int) -> None:
    with fake(status, {"detail": "no"}) as router, pytest.raises(Problem):
        connect(router.url, retries=5).route([1.0])
    assert len(router.seen) == 1


def test_no_retry_after_the_time_of_the_call(connect: Connect) -> None:
    with fake(503, {"detail": "wait"}, {"Retry-After": "60"}) as router, pytest.raises(Problem) as error:
        connect(router.url).route([1.0])
    assert error.value.retry_after_s == 60.0 and len(router.seen) == 1


def test_an_attempt_that_hangs_is_retried(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unreachable, match="timed out"):
            connect(url, retries=2, attempt_timeout_s=0.2).route([1.0])
        silent.setblocking(False)
        for _ in range(3):
            silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_calls_from_many_threads(connect: Connect) -> None:
    with fake(200, DECISION) as router:
        client = connect(router.url)
        threads = [threading.Thread(target=lambda: [client.route([1.0]) for _ in range(20)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(router.seen) == 160 and router.connections <= 8
    assert len({body["request_id"] for body in router.bodies()}) == 160


def test_a_base_url_may_have_a_path(connect: Connect) -> None:
    with fake(200, DECISION) as router:
        connect(router.url + "/pointsman/").route([1.0])
    assert router.seen[0][0] == "/pointsman/v1/route"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork")  # the server's threads do not matter to the child
def test_a_forked_process_opens_its_own_connection() -> None:
    with fake(200, DECISION) as router, PointsmanClient(router.url, **PATIENT) as client:
        client.route([1.0])
        child = os.fork()
        if child == 0:
            # No pytest here: only whether it works.
            try:
                client.route([1.0])
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        client.route([1.0])
    assert (router.connections, len(router.seen)) == (2, 3)


def test_what_is_not_sent(connect: Connect) -> None:
    client = connect("http://127.0.0.1:1")
    with pytest.raises(BadQuery):
        client.route([float("nan")])
    with pytest.raises(BadRequestId):
        client.route([1.0], request_id="")
    with pytest.raises(BadRequestId):
        client.reward("r", 1.0, event_id="")
    with pytest.raises(ValueError, match="expected a finite number"):
        client.reward("r", float("inf"))


@pytest.mark.parametrize("url", ["127.0.0.1:9464", "file:///etc/passwd", "http://", "", "http://a:port"])
def test_bad_addresses(connect: Connect, url: str) -> None:
    with pytest.raises(ValueError, match="is not valid: expected a URL"):
        connect(url)


def test_bad_settings(connect: Connect) -> None:
    for timeout_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="^timeout_s"):
            connect("http://127.0.0.1:1", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="attempt_timeout_s"):
        connect("http://127.0.0.1:1", attempt_timeout_s=0.0)
    with pytest.raises(ValueError, match="retries = -1"):
        connect("http://127.0.0.1:1", retries=-1)


def test_eligible_models_and_draw_keys_are_sent(connect: Connect) -> None:
    choice: dict[str, Any] = {"models": ("bge", "minilm"), "exclude": ["minilm"], "draw_key": "session-7"}
    sent = {"models": ["bge", "minilm"], "exclude": ["minilm"], "draw_key": "session-7"}
    with scripted([(200, DECISION, {}), (200, {"decisions": [DECISION, DECISION]}, {}), (200, DECISION, {})]) as router:
        client = connect(router.url)
        client.route([1.0, 0.0], "r-1", **choice)
        client.route_batch([[1.0, 0.0], [0.0, 1.0]], ["r-1", "r-2"], **choice)
        client.route([1.0, 0.0], "r-1", models=[])
    one, batch, none = router.bodies()
    assert one == {"query": [1.0, 0.0], "request_id": "r-1", **sent}
    assert [{**item, "query": 0} for item in batch["requests"]] == [{"query": 0, "request_id": f"r-{i}", **sent} for i in (1, 2)]
    assert none == {"query": [1.0, 0.0], "request_id": "r-1", "models": []}


def test_bad_choices_are_not_sent(connect: Connect) -> None:
    with fake(200, DECISION) as router:
        client = connect(router.url)
        bad: list[dict[str, Any]] = [{"models": "bge"}, {"exclude": "bge"}, {"draw_key": ""}]
        for choice in bad:
            with pytest.raises(ValueError):
                client.route([1.0, 0.0], **choice)
    assert router.seen == []


def test_rewards_say_what_they_are_given(connect: Connect) -> None:
    cases: list[dict[str, Any]] = [
        {"reward": 1.0},
        {"outcomes": {"cost": 0.002}, "failed": True},
        {"rewards": {"bge": 1.0, "minilm": 0.0}},
        {"preferred": "bge", "over": "minilm", "reward": 0.0},
    ]
    with fake(202, b"") as router:
        client = connect(router.url)
        for case in cases:
            client.reward("r-1", event_id="e", **case)
        client.reward("r-1", 0.5, event_id="e", outcomes={}, failed=False, rewards=None)
        bad: list[dict[str, Any]] = [
            {},
            {"failed": False},
            {"preferred": "bge"},
            {"over": "bge"},
            {"preferred": "bge", "over": "bge"},
            {"outcomes": {"cost": float("nan")}},
            {"rewards": {"bge": float("inf")}},
            {"reward": float("nan")},
        ]
        for case in bad:
            with pytest.raises(ValueError):
                client.reward("r-1", event_id="e", **case)
    assert router.bodies() == [{"request_id": "r-1", "event_id": "e", **case} for case in [*cases, {"reward": 0.5}]]
