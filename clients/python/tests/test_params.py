"""Parameters are read, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from pointsman import BadParams, Params, Router

from .shared import PARAMS_FILE, PARAMS_FILE_2, PARAMS_FILE_2_OUTCOMES, made

F32 = np.float32


def headed(
    keys: npt.ArrayLike = (1, 2), dtype: npt.DTypeLike = np.uint64, shape: tuple[int, ...] = (2, 2), version: int = 2
) -> bytes:
    """Parameters with a head table."""
    tensors = {".head.keys": np.array(keys, dtype), ".head.corrections": np.zeros(shape, F32)}
    return made(tensors, format_version=version)


def priced(
    version: int = 2,
    without: tuple[str, ...] = (),
    outcomes: str = '["cost", "latency_ms"]',
    prices: str = "[2.0, 0.01]",
) -> bytes:
    """Parameters whose model a costs money."""
    tensors = {"a.bias": np.array([1.0], F32), "a.outcomes": np.array([0.5, 0.0], F32)}
    return made(tensors, without, format_version=version, outcomes=outcomes, **{"lambda": prices})


def test_outcomes_take_their_price_from_the_scores() -> None:
    router = Router.from_bytes(priced())
    outcomes = router.params.outcomes
    assert outcomes is not None and (outcomes.names, outcomes.prices) == (("cost", "latency_ms"), (2.0, 0.01))
    assert outcomes.expected.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert router.scores([3.0, 4.0]) == {"a": 0.0, "b": 0.0}
    assert router.explain([3.0, 4.0])["a"].charge == 1.0
    assert Params.decode(made()).outcomes is None


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (priced(version=1), "outcomes: needs format_version 2, but it is 1"),
        (priced(without=("lambda",)), "metadata lambda: missing, but there is outcomes"),
        (priced(without=("outcomes",)), "metadata outcomes: missing, but there is lambda"),
        (priced(without=("outcomes", "lambda")), "missing, but there is tensor a.outcomes"),
        (priced(outcomes="[]"), "must list 1 to 64 names"),
        (priced(outcomes='["cost", ""]'), "names must have 1 to 64 bytes"),
        (priced(outcomes='["cost", "cost"]'), "cost is listed twice"),
        (priced(prices="[1.0]"), "must list 2 prices"),
        (priced(prices="[1.0, NaN]"), "not a finite number"),
        (priced(outcomes='["cost"]', prices="[1.0]"), r"shape \[2\] does not match F32 \[1\]"),
    ],
)
def test_bad_outcomes(data: bytes, problem: str) -> None:
    with pytest.raises(BadParams, match=problem):
        Params.decode(data)


def test_an_empty_head_table_is_none() -> None:
    assert Params.decode(headed(keys=(), shape=(0, 2))).head is None
    assert Params.decode(headed()).head is not None


def test_the_golden_file() -> None:
    params = Router.from_file(PARAMS_FILE).params
    assert (params.space, params.stamp, params.models, params.dim) == ("shop", (2, 1234, 3), ("bge", "mini.lm"), 3)
    assert (params.inverse_gap, params.floor, params.floor_distribution) == (30.5, 0.1, (0.75, 0.25))
    assert (params.created_ms, params.algorithm) == (1_731_700_000_000, "hpg")
    bge, mini = params.scores
    assert bge.eigenvalues.tolist() == [1.5, -0.5] and bge.eigenvectors.shape == (2, 3) and bge.linear is None
    assert mini.linear is not None and mini.linear.tolist() == [1.0, 2.0, 3.0] and mini.bias == -0.25
    assert mini.eigenvalues.size == 0
    assert params.head is None


def test_the_golden_file_of_version_2() -> None:
    params = Router.from_file(PARAMS_FILE_2).params
    assert params.head is not None
    assert params.head.keys.shape == (2,) and params.head.corrections.shape == (2, 2)
    without = Router.from_file(PARAMS_FILE)
    for query, corrections in [([3.0, 4.0, 0.0], [0.5, -0.125]), ([0.0, 0.0, -2.0], [-2.0, 4.0]), ([0.0, 0.0, 2.0], [0, 0])]:
        scores, plain = Router(params).scores(query), without.scores(query)
        assert [scores[model] - plain[model] for model in params.models] == pytest.approx(corrections, abs=1e-12)
        explained = Router(params).explain(query)
        assert [explained[model].correction for model in params.models] == corrections


def test_what_is_absent_is_zero() -> None:
    params = Params.decode(made(without=("floor_distribution",)))
    assert params.floor_distribution == (0.5, 0.5)
    assert Router(params).scores([3.0, 4.0]) == {"a": 1.0, "b": 0.0}


def test_the_golden_file_with_outcomes() -> None:
    router, without = Router.from_file(PARAMS_FILE_2_OUTCOMES), Router.from_file(PARAMS_FILE)
    scores, plain = router.scores([3.0, 4.0, 0.0]), without.scores([3.0, 4.0, 0.0])
    assert {model: plain[model] - scores[model] for model in plain} == pytest.approx({"bge": 4.0, "mini.lm": 0.0})


@pytest.mark.parametrize("path", [PARAMS_FILE, PARAMS_FILE_2, PARAMS_FILE_2_OUTCOMES])
def test_every_cut_is_told(path: Path) -> None:
    data = path.read_bytes()
    for end in range(len(data)):
        with pytest.raises(BadParams, match="not a safetensors file"):
            Params.decode(data[:end])


@pytest.mark.parametrize("data", [b"", b"[1, 2, 3] and more of it", b"\x00" * 64, b"PK\x03\x04" * 10])
def test_foreign_bytes(data: bytes) -> None:
    with pytest.raises(BadParams, match="not a safetensors file"):
        Params.decode(data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (made(without=("format",)), "metadata format: missing"),
        (made(format="pointsman.parade"), "'pointsman.parade' is not pointsman.params"),
        (made(format_version=3), "format_version: 3 is newer than this package reads"),
        (made(format_version="x"), "metadata format_version"),
        (made(epoch=-1), "-1 is not a non-negative integer"),
        (made(version="true"), "metadata version: True is not a non-negative integer"),
        (made(revision=1.5), "1.5 is not a non-negative integer"),
        (made(without=("created_ms",)), "metadata created_ms: missing"),
        (made(space=".hop"), "'.hop' is not a name"),
        (made(space="shop\n"), "is not a name"),
        (made(models="[]"), "at least one model"),
        (made(models='"a"'), "at least one model"),
        (made(models="[1]"), "1 is not a name"),
        (made(models='["a", "a"]'), "a is listed twice"),
        (made(dim=0), "metadata dim: must be at least 1"),
        (made(sampling="greedy"), "'greedy' is not softmax or inverse_gap"),
        (made(sampling="inverse_gap"), "metadata inverse_gap: missing"),
        (made(sampling="inverse_gap", inverse_gap=-1), "inverse_gap: -1 is not between 0 and"),
        (made(sampling="inverse_gap", inverse_gap="Infinity"), "inverse_gap: inf is not between 0 and"),
        (made(floor=1.1), "floor: 1.1 is not between 0 and 1"),
        (made(floor="NaN"), "floor: nan is not between 0 and 1"),
        (made(floor='"0"'), "floor: '0' is not a number"),
        (made(floor_distribution="[0.5, 0.6]"), "not a distribution over the models"),
        (made(floor_distribution="[1]"), "not a distribution over the models"),
        (made(floor_distribution='["x", 1]'), "not a distribution over the models"),
        (made({"a.bias": np.zeros(1)}), "tensor a.bias: type F64 with shape [1] does not match"),
        (made({"a.bias": np.zeros(2, F32)}), "tensor a.bias: type F32 with shape [2] does not match"),
        (made({"a.linear": np.zeros(3, F32)}), "tensor a.linear: type F32 with shape [3] does not match dim = 2"),
        (made({"a.linear": np.array([np.nan, 0], F32)}), "tensor a.linear: contains a number that is not finite"),
        (made({"b.eigenvalues": np.zeros((1, 1), F32)}), "tensor b.eigenvalues: type F32 with shape [1, 1]"),
        (made({"b.eigenvalues": np.zeros(2, F32)}), "b.eigenvectors: missing, but there are 2 eigenvalues"),
        (made({"b.eigenvectors": np.zeros((1, 2), F32)}), "tensor b.eigenvectors: type F32 with shape [1, 2]"),
        (headed(version=1), "tensor .head.keys: needs format_version 2, but it is 1"),
        (headed(keys=(2, 1)), "tensor .head.keys: keys must be strictly ascending"),
        (headed(keys=(1, 1)), "tensor .head.keys: keys must be strictly ascending"),
        (headed(dtype=np.int64), "tensor .head.keys: type I64 with shape [2] is not U64 [n]"),
        (headed(keys=[[1, 2]]), "tensor .head.keys: type U64 with shape [1, 2] is not U64 [n]"),
        (headed(keys=np.arange(65537), shape=(65537, 2)), "tensor .head.keys: type U64 with shape [65537] is not U64"),
        (headed(shape=(2, 3)), "tensor .head.corrections: type F32 with shape [2, 3] does not match F32 [2, 2]"),
        (headed(shape=(4,)), "tensor .head.corrections: type F32 with shape [4] does not match F32 [2, 2]"),
        (
            made({".head.keys": np.array([1], np.uint64)}, format_version=2),
            "tensor .head.corrections: missing, but there is .head.keys",
        ),
        (
            made({".head.corrections": np.zeros((1, 2), F32)}, format_version=2),
            "tensor .head.keys: missing, but there is .head.corrections",
        ),
        (
            made(
                {".head.keys": np.array([1], np.uint64), ".head.corrections": np.array([[np.nan, 0]], F32)},
                format_version=2,
            ),
            "tensor .head.corrections: contains a number that is not finite",
        ),
    ],
)
def test_what_cannot_be_routed_by(data: bytes, problem: str) -> None:
    with pytest.raises(BadParams) as error:
        Params.decode(data)
    assert problem in str(error.value)
    router = Router.from_bytes(made())
    with pytest.raises(BadParams):
        router.offer(data)
    assert router.params.version == 5
