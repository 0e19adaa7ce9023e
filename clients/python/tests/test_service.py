"""Clients and the example service with a real router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
import trustme
from pointsman import PointsmanClient, Problem, Router, Unreachable
from pointsman.aio import AsyncPointsmanClient

from .shared import Serve, free_url, run

CONFIG = """
[learner]
dim = 3
models = ["minilm", "bge"]
"""


def test_requests_are_decided_once(serve: Serve) -> None:
    service = serve(CONFIG)
    queries = np.eye(3, dtype=np.float32)
    with PointsmanClient(service.url, timeout_s=30.0) as client:
        first = client.route(queries[0], request_id="r-1")
        assert first.propensities == {"minilm": 0.5, "bge": 0.5} and first.model in first.propensities
        assert client.route(queries[0], request_id="r-1") == first
        with pytest.raises(Problem, match="409"):
            client.route(queries[1], request_id="r-1")
        batch = client.route_batch(queries, request_ids=["r-1", "r-2", "r-3"])
        assert [answer.request_id for answer in batch] == ["r-1", "r-2", "r-3"] and batch[0] == first
        with pytest.raises(Problem) as error:
            client.route_batch([[1.0, 0.0, 0.0], [1.0]])
        assert (error.value.status, error.value.field) == (422, "requests[1].query")
        client.reward("r-1", 1.0, event_id="click")
        client.reward("r-2", 0.5)

    async def repeat() -> None:
        async with AsyncPointsmanClient(service.url, timeout_s=30.0) as client:
            assert await client.route(queries[0], request_id="r-1") == first
            assert await client.route_batch(queries, request_ids=["r-1", "r-2", "r-3"]) == batch
            await client.reward("r-3", 0.0)

    anyio.run(repeat)
    service.stop()
    assert [event["request_id"] for event in service.events("queries")] == ["r-1", "r-2", "r-3"]
    rewards = service.events("rewards")
    assert [(event["request_id"], event["reward"]) for event in rewards] == [("r-1", 1.0), ("r-2", 0.5), ("r-3", 0.0)]


def test_eligible_models_and_feedback_are_logged(serve: Serve) -> None:
    service = serve(CONFIG)
    with PointsmanClient(service.url, timeout_s=30.0) as client:
        answer = client.route([1.0, 0.0, 0.0], "r-1", exclude=["bge"], draw_key="session-7")
        assert (answer.model, answer.propensities) == ("minilm", {"minilm": 1.0})
        with pytest.raises(Problem) as error:
            client.route([1.0, 0.0, 0.0], models=["e5"])
        assert (error.value.status, error.value.field) == (422, "models")
        client.reward("r-1", failed=True, outcomes={"cost": 0.25}, preferred="bge", over="minilm", event_id="e")
    service.stop()
    (query,), (reward,) = service.events("queries"), service.events("rewards")
    assert (query["propensities"], query["draw_key"]) == ({"minilm": 1.0}, "session-7")
    feedback = {"failed": True, "outcomes": {"cost": 0.25}, "preferred": "bge", "over": "minilm", "event_id": "e"}
    assert {key: reward[key] for key in feedback} == feedback and "reward" not in reward


def test_a_call_outlasts_a_restart(serve: Serve) -> None:
    first = serve(CONFIG)
    with PointsmanClient(first.url, timeout_s=30.0, retries=1000) as client, ThreadPoolExecutor(1) as pool:
        client.route([1.0, 0.0, 0.0], request_id="r-1")
        first.stop()
        answer = pool.submit(client.route, [1.0, 0.0, 0.0], "r-2")
        serve(CONFIG, first.url)
        assert answer.result(30).request_id == "r-2"


def test_tls(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    files = f'certificate = "{tmp_path}/certificate.pem"\nkey = "{tmp_path}/key.pem"\n'
    config = f'{CONFIG}[http]\ntoken = "secret-secret-secret"\n[http.tls]\n{files}'
    url = serve(config, free_url("https")).url

    async def route() -> str:
        async with AsyncPointsmanClient(url, token="secret-secret-secret", timeout_s=30.0, retries=0) as client:
            await client.route([1.0, 0.0, 0.0])
            return (await client.route([1.0, 0.0, 0.0], request_id="r-2")).request_id

    unverified = "(?i)certificate.verify.failed"
    with PointsmanClient(url, timeout_s=30.0, retries=0) as client, pytest.raises(Unreachable, match=unverified):
        client.route([1.0, 0.0, 0.0])
    with pytest.raises(Unreachable, match=unverified):
        anyio.run(route)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    assert anyio.run(route) == "r-2"
    with PointsmanClient(url, token="secret-secret-secret", timeout_s=30.0, retries=0) as client:
        client.route([1.0, 0.0, 0.0])
        assert client.route([1.0, 0.0, 0.0], request_id="r-1").request_id == "r-1"
    with PointsmanClient(url, timeout_s=30.0, retries=0) as client, pytest.raises(Problem, match="401"):
        client.route([1.0, 0.0, 0.0])


def test_the_example(program: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve('[learner]\ndim = 64\nmodels = ["trigrams", "words"]\n[join]\non_missing = "default"\n')
    monkeypatch.setenv("POINTSMAN_URL", service.url)
    monkeypatch.setenv("POINTSMAN_TIMEOUT_S", "30")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    import search

    async def visit() -> str:
        transport = httpx.ASGITransport(search.app)
        async with search.lifespan(search.app), httpx.AsyncClient(transport=transport, base_url="http://shop") as web:
            found = (await web.get("/search", params={"q": "red shoes"})).json()
            assert found["hits"][0]["text"] == "red running shoes" and found["model"] in ("trigrams", "words")
            clicked = {"request_id": found["request_id"], "item": found["hits"][0]["item"]}
            for _ in range(2):
                assert (await web.post("/click", params=clicked)).status_code == 202
            assert (await web.get("/search", params={"q": "kettle"})).json()["request_id"] != found["request_id"]
            service.stop()
            alone = (await web.get("/search", params={"q": "red shoes"})).json()
            assert alone["request_id"] is None and alone["hits"][0]["text"] == "red running shoes"
            return str(found["request_id"])

    request_id = anyio.run(visit)
    queries, rewards = service.events("queries"), service.events("rewards")
    assert len(queries) == 2 and [event["request_id"] for event in rewards] == [request_id] * 2

    # The learner learns the click once, and a router in process reads what it publishes.
    place = service.config.parent
    run(program, "learn", "--once", "--config", service.config, "--set", f"transport.file.dir={service.log}", cwd=place)
    router = Router.from_file(service.log / "params" / "default.safetensors")
    assert router.params.version == 1
    assert router.route(search.trigrams("red shoes")).model in search.MODELS
