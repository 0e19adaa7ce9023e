"""Queries, IDs, newer parameters, reloads and events."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pointsman import BadModels, BadParams, BadQuery, BadRequestId, Decision, Router
from pointsman.router import select

from .shared import made


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ([1.0], "the query has 1 components, but the space has dim = 2"),
        (np.ones(3), "the query has 3 components"),
        ([], "zero vector"),
        ([0.0, -0.0], "zero vector"),
        ([1.0, float("nan")], "component 1 of the query is nan"),
        (np.array([np.inf, 1.0]), "component 0 of the query is inf"),
        ([1e39, 0.0], "component 0 of the query is inf"),
        ([10**400, 0], "must be a vector of numbers"),
        (np.ones((1, 2)), "the query has shape (1, 2): expected one dimension"),
        (["x", 1.0], "must be a vector of numbers"),
        ([None, {}], "must be a vector of numbers"),
        ([[1.0], [1.0, 2.0]], "must be a vector of numbers"),
    ],
)
def test_bad_queries(query: Any, problem: str) -> None:
    router = Router.from_bytes(made())
    for use in (router.route, router.scores, router.distribution, router.explain):
        with pytest.raises(BadQuery) as error:
            use(query)
        assert problem in str(error.value)


@pytest.mark.parametrize("query", [[3, 4], (3.0, 4.0), np.array([3, 4]), np.array([3e30, 4e30], np.float32)])
def test_queries_of_any_kind_and_length(query: Any) -> None:
    tensors = {"a.linear": np.array([1.0, 0.5], np.float32)}
    assert Router.from_bytes(made(tensors)).scores(query)["a"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("request_id", ["", "x" * 257, "ü" * 129, "\ud800"])
def test_bad_request_ids(request_id: str) -> None:
    with pytest.raises(BadRequestId, match="request_id"):
        Router.from_bytes(made()).route([1.0, 0.0], request_id)


def three() -> Router:
    """Three models with a floor that two of them share."""
    tensors = {f"{name}.bias": np.array([bias], np.float32) for name, bias in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    return Router.from_bytes(made(tensors, models='["a", "b", "c"]', floor=0.1, floor_distribution="[0.25, 0.75, 0.0]"))


def test_the_distribution_is_conditioned_on_the_eligible_models() -> None:
    router = three()
    query = [1.0, 0.0]
    for models, exclude, expected, floor in (
        (None, ["a"], ["b", "c"], [1.0, 0.0]),
        (["c", "a"], (), ["a", "c"], [1.0, 0.0]),
        (["c"], (), ["c"], [1.0]),
        (("a", "b", "c"), {"c"}, ["a", "b"], [0.25, 0.75]),
    ):
        full = router.distribution(query).policy
        core = [full[model] / sum(full[model] for model in expected) for model in expected]
        decision = router.route(query, "r", models=models, exclude=exclude)
        assert list(decision.policy.values()) == pytest.approx(core)
        assert list(decision.propensities) == list(decision.policy) == expected
        propensities = [0.9 * p + 0.1 * f for p, f in zip(core, floor)]
        assert list(decision.propensities.values()) == pytest.approx(propensities)
        assert decision.propensities == router.distribution(query, models=models, exclude=exclude).propensities
        assert set(decision.event(query, 1)["propensities"]) == set(expected)


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ({"models": ["a", "d"]}, "models: space default has no model 'd'"),
        ({"exclude": ["d"]}, "exclude: space default has no model 'd'"),
        ({"models": []}, "leave no model"),
        ({"models": ["a"], "exclude": ["a"]}, "leave no model"),
        ({"models": "a"}, "expected a list of names"),
    ],
)
def test_bad_models(named: Any, problem: str) -> None:
    for use in (three().route, three().distribution):
        with pytest.raises(BadModels, match=problem):
            use([1.0, 0.0], **named)


def test_a_draw_key_keeps_the_model() -> None:
    router = Router.from_bytes(made(models=json.dumps([f"m{i}" for i in range(9)])))
    decisions = [router.route([1.0, 0.0], str(i), draw_key="session-7") for i in range(20)]
    assert {decision.model for decision in decisions} == {router.route([1.0, 0.0], "session-7").model}
    assert len({router.route([1.0, 0.0], str(i)).model for i in range(20)}) > 1
    assert decisions[0].event([1.0, 0.0], 1)["draw_key"] == "session-7"
    assert "draw_key" not in router.route([1.0, 0.0]).event([1.0, 0.0], 1)
    with pytest.raises(BadRequestId, match="draw_key"):
        router.route([1.0, 0.0], draw_key="")


def test_ids_are_made_and_draws_are_even() -> None:
    router = Router.from_bytes(made({}))
    decisions = [router.route([1.0, 2.0]) for _ in range(2000)]
    assert len({decision.request_id for decision in decisions}) == 2000
    assert 850 < sum(decision.model == "a" for decision in decisions) < 1150


@pytest.mark.parametrize("key", [b"", b"x" * 65])
def test_bad_keys(key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        Router.from_bytes(made(), key)


def test_offers_never_go_back() -> None:
    router = Router.from_bytes(made())
    for (epoch, version, revision), taken in [
        ((0, 5, 1), False),
        ((0, 4, 9), False),
        ((0, 5, 2), True),
        ((0, 6, 0), True),
        ((1, 0, 0), True),
        ((0, 9, 9), False),
        ((1, 0, 0), False),
    ]:
        before = router.params.stamp
        assert router.offer(made(epoch=epoch, version=version, revision=revision)) is taken
        assert router.params.stamp == ((epoch, version, revision) if taken else before)
    decision = router.route([1.0, 0.0])
    assert (decision.params_epoch, decision.params_version) == (1, 0)
    with pytest.raises(BadParams, match="for space shop, but this router serves space default"):
        router.offer(made(space="shop", epoch=9))


def test_models_and_dimension_may_change() -> None:
    router = Router.from_bytes(made())
    assert router.offer(made({}, models='["b", "c", "d"]', dim=3, version=6))
    assert list(router.route([1.0, 0.0, 0.0]).propensities) == ["b", "c", "d"]


def test_what_is_routed_while_parameters_change_is_all_of_one_version() -> None:
    def at(version: int) -> bytes:
        return made({"a.bias": np.array([version], np.float32)}, version=version)

    router = Router.from_bytes(at(1))
    threads = [
        threading.Thread(target=lambda: [router.offer(at(version)) for version in range(2, 300)]) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    last = 0
    while any(thread.is_alive() for thread in threads):
        decision = router.route([1.0, 0.0])
        odds = np.log(decision.policy["a"] / decision.policy["b"])
        assert odds == pytest.approx(decision.params_version, abs=1e-6)
        assert decision.params_version >= last
        last = decision.params_version
    assert router.params.version == 299


@pytest.mark.parametrize(
    ("propensities", "u", "model"),
    [
        ([0.25, 0.0, 0.75], 0.0, 0),
        ([0.25, 0.0, 0.75], 0.2499, 0),
        ([0.25, 0.0, 0.75], 0.25, 2),
        ([0.25, 0.75, 0.0], 0.9999999999999999, 1),
        ([0.25, 0.75, 0.0], 1.0, 1),
        ([0.0, 1.0], 0.0, 1),
    ],
)
def test_draws_follow_the_cumulative_distribution(propensities: Sequence[float], u: float, model: int) -> None:
    assert select(propensities, u) == model


def decide(floor: float, query: Any) -> Decision:
    return Router.from_bytes(made(floor=floor, floor_distribution="[0.75, 0.25]")).route(query, "größe-1")


def test_events_carry_what_the_learner_needs() -> None:
    query = np.array([0.5, -2.0])
    decision = decide(0.25, query)
    event = json.loads(json.dumps(decision.event(query, ts_ms=1_731_700_000_000), allow_nan=False))
    assert event == {
        "request_id": "größe-1",
        "space": "default",
        "ts_ms": 1_731_700_000_000,
        "query": base64.b64encode(query.astype("<f4").tobytes()).decode(),
        "model": decision.model,
        "propensities": decision.propensities,
        "policy": decision.policy,
        "params_version": 5,
    }
    assert sum(event["propensities"].values()) == pytest.approx(1.0, abs=1e-9)
    assert decision.policy != decision.propensities


def test_events_of_lists_and_without_a_floor() -> None:
    event = decide(0.0, [1, 2.5]).event([1, 2.5], ts_ms=np.int64(7))  # type: ignore[arg-type]
    assert event["query"] == [1.0, 2.5] and event["ts_ms"] == 7 and "policy" not in event
    json.dumps(event)
    with pytest.raises(BadQuery):
        decide(0.0, [1, 2]).event([float("nan"), 1.0], ts_ms=7)


TICKS = itertools.count(1)


def replace(path: Path, data: bytes) -> None:
    """As the learner publishes, but for the times: the clock of the file system may be too coarse for tests."""
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    tick = next(TICKS)
    os.utime(beside, ns=(tick, tick))
    beside.replace(path)


@pytest.fixture
def params_file(tmp_path: Path) -> Path:
    path = tmp_path / "default.safetensors"
    path.write_bytes(made())
    return path


def test_a_replaced_file_is_reloaded(params_file: Path) -> None:
    router = Router.from_file(params_file, reload_s=0.0)
    assert router.route([1.0, 0.0]).params_version == 5
    replace(params_file, made({"b.bias": np.array([9.0], np.float32)}, version=6))
    assert router.route([1.0, 0.0]).params_version == 6
    assert router.scores([1.0, 0.0]) == {"a": 0.0, "b": 9.0}
    # Written in place, as a copy does.
    params_file.write_bytes(made({}, version=7, models='["b", "c", "d"]'))
    assert list(router.distribution([1.0, 0.0]).propensities) == ["b", "c", "d"]
    assert router.params.version == 7 and list(router.explain([1.0, 0.0])) == ["b", "c", "d"]


def test_reloads_never_go_back(params_file: Path) -> None:
    router = Router.from_file(params_file, reload_s=0.0)
    for (epoch, version, revision), version_after in [
        ((0, 4, 9), 5),
        ((0, 5, 1), 5),
        ((0, 5, 2), 5),
        ((1, 2, 0), 2),
        ((0, 9, 0), 2),
    ]:
        replace(params_file, made(epoch=epoch, version=version, revision=revision))
        assert router.route([1.0, 0.0]).params_version == version_after
    assert router.params.stamp == (1, 2, 0)


@pytest.mark.parametrize("data", [None, b"", b"junk", made()[:-1], made(format_version=3), made(space="shop", version=9)])
def test_an_invalid_or_missing_file_changes_nothing(
    params_file: Path, caplog: pytest.LogCaptureFixture, data: bytes | None
) -> None:
    router = Router.from_file(params_file, reload_s=0.0)
    if data is None:
        params_file.unlink()
    else:
        replace(params_file, data)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert router.route([1.0, 0.0]).params_version == 5
    [record] = caplog.records
    assert "cannot reload parameters from" in record.getMessage() and "keeping version 5" in record.getMessage()
    replace(params_file, made(version=6))
    assert router.route([1.0, 0.0]).params_version == 6


def test_explicit_reloads(params_file: Path) -> None:
    router = Router.from_file(params_file, reload_s=None)
    assert not router.reload(), "the file is the same"
    replace(params_file, made(version=6))
    assert router.route([1.0, 0.0]).params_version == 5
    assert router.reload() and router.route([1.0, 0.0]).params_version == 6
    replace(params_file, b"junk")
    with pytest.raises(BadParams):
        router.reload()
    params_file.unlink()
    with pytest.raises(FileNotFoundError):
        router.reload()
    assert router.params.version == 6
    with pytest.raises(ValueError, match="no parameters file"):
        Router.from_bytes(made()).reload()
    with pytest.raises(ValueError, match="reload_s = -1"):
        Router.from_file(params_file, reload_s=-1)


def test_the_file_is_not_looked_at_more_often(params_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("pointsman.router.time.monotonic", lambda: now)
    router = Router.from_file(params_file, reload_s=2.0)
    replace(params_file, made(version=6))
    now += 1.5
    assert router.params.version == 5
    now += 1.0
    assert router.params.version == 6


def test_threads_route_while_the_file_changes(params_file: Path) -> None:
    def at(version: int) -> bytes:
        return made({"a.bias": np.array([version], np.float32)}, version=version)

    replace(params_file, at(1))
    router = Router.from_file(params_file, reload_s=0.0)
    problems: list[str] = []

    def route() -> None:
        last = 0
        while last < 60 and not problems:
            decision = router.route([1.0, 0.0])
            odds = np.log(decision.policy["a"] / decision.policy["b"])
            if abs(odds - decision.params_version) > 1e-6 or decision.params_version < last:
                problems.append(f"{decision} after version {last}")
            last = decision.params_version

    threads = [threading.Thread(target=route) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in range(2, 61):
        replace(params_file, at(version))
    for thread in threads:
        thread.join()
    assert problems == [] and router.params.version == 60
