"""The same decisions as the Rust router."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from pointsman import Router
from pointsman.query import key_constants, query_key, unit
from pointsman.router import draw

from .shared import floats, keys, vectors

TOLERANCE = 1e-5


@pytest.mark.parametrize(("query", "key"), keys())
def test_keys_are_those_of_the_golden_file(query: list[float], key: int) -> None:
    assert query_key(unit(query, len(query)), key_constants(len(query))) == key


def near(found: dict[str, float], expected: list[float]) -> bool:
    scale = max(1.0, *(abs(x) for x in expected))
    return all(abs(a - b) <= TOLERANCE * scale for a, b in zip(found.values(), expected, strict=True))


@pytest.mark.parametrize("case", vectors(), ids=lambda case: str(case["name"]))
def test_decisions_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    key = base64.b64decode(case["key"])
    router = Router.from_bytes(base64.b64decode(case["params"]), key)
    params = router.params
    assert (params.space, list(params.models), params.dim) == (case["space"], case["models"], case["dim"])
    for request in case["requests"]:
        query, request_id = floats(request["query"]), request["request_id"]
        models, draw_key = request.get("models"), request.get("draw_key")
        assert draw(key, params.space, draw_key or request_id) == request["u"]
        decision = router.route(query, request_id, models=models, draw_key=draw_key)
        assert (decision.model, decision.request_id) == (request["model"], request_id)
        assert list(decision.propensities) == [model for model in case["models"] if models is None or model in models]
        assert near(router.scores(query), request["scores"])
        assert near(decision.policy, request["policy"])
        assert near(decision.propensities, request["propensities"])
        assert decision.propensity == decision.propensities[decision.model] > 0.0
        distribution = router.distribution(query, models=models)
        assert (distribution.policy, distribution.propensities) == (decision.policy, decision.propensities)
        for model, explained in router.explain(query).items():
            total = explained.bias + explained.linear + sum(explained.parts) + explained.correction - explained.charge
            assert total == pytest.approx(explained.score, rel=1e-12, abs=1e-12)
            assert models is not None or (explained.policy, explained.propensity) == (
                decision.policy[model],
                decision.propensities[model],
            )


def test_the_vectors_have_every_kind() -> None:
    params = [Router.from_bytes(base64.b64decode(case["params"])).params for case in vectors()]
    assert {p.inverse_gap is None for p in params} == {True, False}
    assert {p.dim for p in params} >= {2, 768}
    forms = [form for p in params for form in p.scores]
    assert any(form.linear is not None for form in forms) and any(form.bias != 0.0 for form in forms)
    assert any(form.eigenvalues.size == 0 for form in forms)
    assert {p.head is None for p in params} == {True, False}
    assert {p.outcomes is None for p in params} == {True, False}
    assert any(p.floor > 0.0 and len(set(p.floor_distribution)) > 1 for p in params)
