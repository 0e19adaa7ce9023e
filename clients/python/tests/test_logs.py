"""Data frames of every kind become logs, and the program reads them."""

from __future__ import annotations

import base64
import gzip
import importlib
import json
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pointsman import BadLog, logs

from .shared import run

# Not all of them have type annotations.
pd: Any = importlib.import_module("pandas")
pl: Any = importlib.import_module("polars")
pa: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")
zstandard: Any = importlib.import_module("zstandard")

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
NOON_MS = 1_769_860_800_000
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a log, with queries as lists of numbers."""
    if path.suffix == ".parquet":
        found = parquet.read_table(path).to_pylist(maps_as_pydicts="strict")
        return [{name: value for name, value in row.items() if value is not None} for row in found]
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    rows = [json.loads(line) for line in data.decode().splitlines()]
    for row in rows:
        if isinstance(row.get("query"), str):
            row["query"] = np.frombuffer(base64.b64decode(row["query"]), "<f4").tolist()
    return rows


COLUMNS: dict[str, list[Any]] = {
    "id": ["a", "b", "c"],
    "at": [NOON, NOON + timedelta(seconds=1), NOON + timedelta(milliseconds=1_500)],
    "emb": [[0.5, -1.0], [1.0, 0.25], [0.0, 2.0]],
    "model": ["bge", "minilm", "bge"],
    "clicked": [1.0, None, 0.0],
    "probs": [{"bge": 0.75, "minilm": 0.25}] * 3,
}
EVENTS: list[dict[str, Any]] = [
    {
        "request_id": COLUMNS["id"][i],
        "ts_ms": NOON_MS + after_ms,
        "query": COLUMNS["emb"][i],
        "model": COLUMNS["model"][i],
        "propensities": COLUMNS["probs"][i],
        **({} if reward is None else {"reward": reward}),
    }
    for i, (after_ms, reward) in enumerate([(0, 1.0), (1_000, None), (1_500, 0.0)])
]
NAMES: dict[str, Any] = {"query": "emb", "model": "model", "request_id": "id", "time": "at", "propensities": "probs"}

FRAMES: dict[str, Callable[[dict[str, list[Any]]], Any]] = {
    "mapping": lambda columns: columns,
    "pandas": pd.DataFrame,
    "pandas-arrays": lambda columns: pd.DataFrame({**columns, "emb": [np.array(row) for row in columns["emb"]]}),
    "pandas-categories": lambda columns: pd.DataFrame(columns).astype({"model": "category", "clicked": "Float64"}),
    "pandas-booleans": lambda columns: pd.DataFrame(
        {**columns, "clicked": pd.array([True, pd.NA, False], dtype="boolean")}
    ),
    "pandas-numpy": lambda columns: pd.DataFrame(
        {**columns, "at": pd.to_datetime(columns["at"]).tz_localize(None).astype("datetime64[s]")}
    ),
    "pandas-elsewhere": lambda columns: pd.DataFrame(
        {**columns, "at": pd.to_datetime(columns["at"]).tz_convert("Asia/Tokyo")}
    ),
    "polars": pl.DataFrame,
    "polars-arrays": lambda columns: pl.DataFrame(columns, schema_overrides={"emb": pl.Array(pl.Float32, 2)}),
    "polars-categories": lambda columns: pl.DataFrame(columns, schema_overrides={"model": pl.Categorical}),
    "polars-elsewhere": lambda columns: pl.DataFrame(columns).with_columns(
        pl.col("at").dt.convert_time_zone("Asia/Tokyo").dt.cast_time_unit("ns")
    ),
    "pyarrow": pa.table,
    "pyarrow-maps": lambda columns: pa.table(
        {**columns, "probs": pa.array([list(p.items()) for p in columns["probs"]], pa.map_(pa.string(), pa.float64()))}
    ),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", FRAMES)
def test_frames_of_every_kind(tmp_path: Path, kind: str, suffix: str) -> None:
    frame = FRAMES[kind](COLUMNS)
    expected: list[dict[str, Any]] = [dict(event) for event in EVENTS]
    if kind == "pandas-numpy":
        expected[2]["ts_ms"] = NOON_MS + 1_000
    path = tmp_path / f"examples{suffix}"
    written = logs.write(frame, path, reward="clicked", **NAMES)
    assert events(path) == expected
    assert written == logs.Written(queries=3, rewards=2, dim=2, models={"bge": 2, "minilm": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing else is left"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_queries_and_rewards_in_separate_files(tmp_path: Path, suffix: str) -> None:
    queries, rewards = tmp_path / f"queries{suffix}", tmp_path / f"rewards{suffix}"
    frame = pd.DataFrame({**COLUMNS, "clicked_at": [NOON + timedelta(minutes=1), None, NOON], "shop": "de"})
    logs.write(frame, queries, rewards=rewards, reward="clicked", space="shop", **NAMES)
    assert events(queries) == [
        {"space": "de", **{name: event[name] for name in event if name != "reward"}} for event in EVENTS
    ]
    assert events(rewards) == [
        {"space": "de", "request_id": "a", "ts_ms": NOON_MS, "reward": 1.0},
        {"space": "de", "request_id": "c", "ts_ms": NOON_MS + 1_500, "reward": 0.0},
    ]
    logs.write(frame, queries, rewards=rewards, reward="clicked", reward_time="clicked_at", **NAMES)
    assert [event["ts_ms"] for event in events(rewards)] == [NOON_MS + 60_000, NOON_MS]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rewards_of_another_frame(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rewards{suffix}"
    frame = pl.DataFrame(
        {
            "search": [7, 8, 9],
            "when": ["2026-01-31T12:00:00Z", "2026-01-31 13:00:00.250+01:00", None],
            "value": [Decimal("0.5"), Decimal(1), None],
            "key": ["x", None, "z"],
        }
    )
    assert logs.write_rewards(frame, path, request_id="search", time="when", reward="value", event_id="key") == 2
    assert events(path) == [
        {"request_id": "7", "ts_ms": NOON_MS, "reward": 0.5, "event_id": "x"},
        {"request_id": "8", "ts_ms": NOON_MS + 250, "reward": 1.0},
    ]


@pytest.mark.parametrize(
    ("times", "unit", "ms"),
    [
        ([NOON], None, NOON_MS),
        ([NOON.replace(tzinfo=None)], None, NOON_MS),
        ([NOON.astimezone(timezone(timedelta(hours=-8)))], None, NOON_MS),
        ([date(2026, 1, 31)], None, NOON_MS - 43_200_000),
        (["2026-01-31T12:00:00Z"], None, NOON_MS),
        (["2026-01-31 12:00:00"], None, NOON_MS),
        (["2026-01-31T14:00:00+02:00"], None, NOON_MS),
        (np.array(["2026-01-31T12:00:00.0009"], "datetime64[ns]"), None, NOON_MS),
        (np.array(["2026-01-31T12"], "datetime64[h]"), None, NOON_MS),
        ([np.datetime64("2026-01-31T12:00:00")], None, NOON_MS),
        ([NOON_MS], None, NOON_MS),
        (np.array([NOON_MS], np.uint64), "ms", NOON_MS),
        ([NOON_MS // 1000], "s", NOON_MS),
        ([NOON_MS / 1000 + 0.123], "s", NOON_MS + 123),
        ([NOON_MS * 1000 + 999], "us", NOON_MS),
        (np.array([NOON_MS * 1_000_000 + 999_999]), "ns", NOON_MS),
        ([17], "ms", 17),
    ],
)
def test_times(tmp_path: Path, times: Any, unit: Any, ms: int) -> None:
    path = tmp_path / "queries.jsonl"
    logs.write({**COLUMNS_1, "at": times}, path, **{**NAMES, "propensities": None}, time_unit=unit)
    assert events(path)[0]["ts_ms"] == ms


COLUMNS_1 = {name: cells[:1] for name, cells in COLUMNS.items()}


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        (np.array([[0.5, -1.0], [1.0, 0.25], [0.0, 2.0]], np.float16), None),
        ([[0.5, -1.0], (1.0, 0.25), np.array([0.0, 2.0])], None),
        (["e_0", "e_1"], None),
        (np.arange(1, 31).reshape(3, 10), np.arange(1.0, 31.0).reshape(3, 10).tolist()),
    ],
)
def test_embeddings_from_elsewhere(tmp_path: Path, query: Any, rows: list[list[float]] | None) -> None:
    path = tmp_path / "queries.jsonl"
    spread = {f"e_{i}": [row[i] for row in COLUMNS["emb"]] for i in range(2)}
    logs.write(pd.DataFrame({**COLUMNS, **spread}), path, **{**NAMES, "query": query})
    assert [event["query"] for event in events(path)] == (rows or COLUMNS["emb"])


def test_long_embeddings_are_base64(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    logs.write(COLUMNS, path, **{**NAMES, "query": np.ones((3, 8))})
    assert all(isinstance(json.loads(line)["query"], str) for line in path.read_text().splitlines())


def test_propensities_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    frame = pd.DataFrame({**COLUMNS, "p_bge": [0.5, 0.25, 1.0], "text": ['{"bge": 1}', '{"minilm": 1}', None]})
    frame["p_minilm"] = 1.0 - frame["p_bge"]
    for propensities, expected in [
        ({"bge": "p_bge", "minilm": "p_minilm"}, [{"bge": p, "minilm": 1.0 - p} for p in (0.5, 0.25, 1.0)]),
        ({"bge": 0.5, "minilm": 0.3, "e5": 0.2}, [{"bge": 0.5, "minilm": 0.3, "e5": 0.2}] * 3),
        ("text", [{"bge": 1.0}, {"minilm": 1.0}, None]),
    ]:
        logs.write(frame, path, **{**NAMES, "propensities": propensities})
        assert [event.get("propensities") for event in events(path)] == expected
    logs.write(frame, path, **{**NAMES, "propensities": None}, propensity="p_bge")
    assert [event["propensity"] for event in events(path)] == [0.5, 0.25, 1.0]
    # Fields of a struct are null where a row does not have them.
    structs = pl.DataFrame({**COLUMNS, "probs": [{"bge": 1.0}, {"minilm": 0.5, "e5": 0.5}, {"bge": 1.0}]}, strict=False)
    logs.write(structs, path, **NAMES)
    assert [event["propensities"] for event in events(path)][1:] == [{"minilm": 0.5, "e5": 0.5}, {"bge": 1.0}]


def test_ids_and_missing_values(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    frame = pd.DataFrame({"id": [1.0, 2.0, 3.0], "r": [np.nan, pd.NA, None], "m": ["a"] * 3})
    written = logs.write(frame, path, query=np.ones((3, 2)), model="m", request_id="id", reward="r")
    assert [event["request_id"] for event in events(path)] == ["1", "2", "3"]
    assert written.rewards == 0 and all("reward" not in event for event in events(path))
    logs.write(frame, path, query=np.ones((3, 2)), model="m", reward="r")
    assert events(path)[0] == {"query": [1.0, 1.0], "model": "a"}


@pytest.mark.parametrize(
    ("changed", "named", "problem"),
    [
        ({}, {"query": "embedding"}, "there is no column 'embedding': the columns are id, at, emb, model, clicked, probs"),
        ({"emb": [[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]]}, {}, "row 1: the query is empty or the zero vector"),
        ({"emb": [[1.0, 2.0], [1.0], [1.0, 1.0]]}, {}, "row 1: the query has 1 components, row 0 has 2"),
        ({"emb": [[1.0, 2.0], [1.0, 1.0], None]}, {}, "row 2: there is no query"),
        ({"emb": ["[1, 2]"] * 3}, {}, "row 0: the query must be a vector of numbers"),
        ({}, {"query": np.array([[1.0], [np.nan], [1.0]])}, "row 1: component 0 of the query is nan"),
        ({}, {"query": np.ones((2, 2))}, "column 'id' has 3 rows, but there are 2 queries"),
        ({"model": ["a", None, "b"]}, {}, "row 1: column 'model' holds None: expected the name of a model"),
        ({"model": ["a", "b c", "b"]}, {}, "row 1: column 'model' holds 'b c'"),
        ({"id": ["a", None, "b"]}, {}, "row 1: column 'id' is empty"),
        ({"id": ["a", "", "b"]}, {}, "row 1: id has 0 bytes"),
        ({"id": [b"a", b"b", b"c"]}, {}, "row 0: column 'id' holds b'a': expected an ID"),
        ({"id": [1.5, 2.0, 3.0]}, {}, "row 0: column 'id' holds 1.5: expected an ID"),
        ({"at": [NOON, None, NOON]}, {}, "row 1: column 'at' is empty"),
        ({"at": [NOON, "yesterday", NOON]}, {}, "row 1: column 'at' holds 'yesterday': expected a time in ISO 8601"),
        ({"at": [NOON_MS // 1000] * 3}, {}, "row 0: .*name another unit with time_unit"),
        ({"at": [True] * 3}, {}, "row 0: column 'at' holds True: expected a time"),
        ({"at": [float("inf")] * 3}, {}, "row 0: column 'at' holds inf: expected a time"),
        ({"clicked": [1.0, "yes", 0.0]}, {}, "row 1: column 'clicked' holds 'yes': expected a finite number"),
        ({"clicked": [1.0, float("inf"), 0.0]}, {}, "row 1: column 'clicked' holds inf"),
        ({"probs": [{"bge": 0.5, "minilm": 0.6}] * 3}, {}, "row 0: .* that sum to 1"),
        ({"probs": [{"minilm": 1.0}] * 3}, {}, "row 0: .* above 0 for bge, the model that answered"),
        ({"probs": [0.5] * 3}, {}, "row 0: column 'probs' holds 0.5: expected a mapping"),
        ({"p": [0.5, 0.0, 1.0]}, {"propensities": None, "propensity": "p"}, "row 1: column 'p' holds 0.0"),
        ({"s": ["a", ".b", "c"]}, {"space": "s"}, "row 1: column 's' holds '.b': expected the name of a space"),
    ],
)
def test_bad_rows(tmp_path: Path, changed: dict[str, Any], named: dict[str, Any], problem: str) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text("before\n")
    with pytest.raises(BadLog, match=problem):
        logs.write({**COLUMNS, **changed}, path, reward="clicked", **{**NAMES, **named})
    assert path.read_text() == "before\n" and len(list(tmp_path.iterdir())) == 1


def test_bad_calls(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "log.csv", {}, "expected a name that ends in .jsonl, .jsonl.gz, .jsonl.zst, .parquet"),
        (path, {"request_id": None}, "name the columns request_id and time"),
        (path, {"rewards": path}, "rewards names a file, but no column"),
        (path, {"rewards": path, "reward": "clicked"}, "are the same file"),
        (path, {"reward_time": "at"}, "reward_time needs a file"),
        (path, {"propensity": "p"}, "propensities and propensity are both given"),
    ]
    for target, named, problem in cases:
        with pytest.raises(ValueError, match=problem):
            logs.write(COLUMNS, target, **{**NAMES, **named})
    assert list(tmp_path.iterdir()) == []


def test_formats_name_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"files ending in .parquet need pyarrow: pip install 'pointsman\[logs\]'"):
        logs.write(COLUMNS, tmp_path / "queries.parquet", **NAMES)
    assert list(tmp_path.iterdir()) == []


# The program reads what was written.

ROWS, DIM = 400, 12


def searches() -> Any:
    """A log with a planted preference: model b is better for queries on one side."""
    rng = np.random.default_rng(7)
    queries: npt.NDArray[np.float64] = rng.standard_normal((ROWS, DIM))
    models = rng.choice(["org/a-1", "b:2"], ROWS)
    is_good = (queries[:, 0] > 0.0) == (models == "b:2")
    return pd.DataFrame(
        {
            "search_id": [f"s-{i}" for i in range(ROWS)],
            "at": pd.Timestamp("2026-01-31", tz="Europe/Berlin") + pd.to_timedelta(np.arange(ROWS), unit="s"),
            "embedding": [row.astype(np.float32) for row in queries],
            "model": models,
            "clicked": is_good.astype(float),
            "probs": [{"org/a-1": 0.5, "b:2": 0.5}] * ROWS,
        }
    )


SEARCHES: dict[str, Any] = {
    "query": "embedding",
    "model": "model",
    "request_id": "search_id",
    "time": "at",
    "reward": "clicked",
    "propensities": "probs",
}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_program_reads_examples(program: Path, tmp_path: Path, suffix: str) -> None:
    frame = searches()
    # Every tenth search has no reward yet.
    frame.loc[::10, "clicked"] = np.nan
    logs.write(frame, tmp_path / f"examples{suffix}", **SEARCHES)
    found = run(program, "init", f"examples{suffix}", "--yes", cwd=tmp_path)
    assert "12 dimensions" in found and "90.0% of the queries have one" in found
    assert "declared_propensities" not in (tmp_path / "pointsman.toml").read_text(), "the logged ones are found"
    replayed = json.loads(run(program, "replay", "--json", "--store", "store", cwd=tmp_path))
    counts = {name: replayed[name] for name in ("queries", "rewards", "joined", "expired", "dead_letters", "pending")}
    assert counts == {
        "queries": ROWS,
        "rewards": ROWS * 9 // 10,
        "joined": ROWS * 9 // 10,
        "expired": ROWS // 10,
        "dead_letters": 0,
        "pending": 0,
    }
    assert replayed["mean_reward"] == pytest.approx(frame["clicked"].mean(), abs=1e-9)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_program_reads_queries_and_rewards(program: Path, tmp_path: Path, suffix: str) -> None:
    queries, rewards = f"queries{suffix}", f"rewards{suffix}"
    frame = searches()
    frame["clicked_at"] = frame["at"] + timedelta(seconds=30)
    logs.write(
        pl.from_pandas(frame), tmp_path / queries, rewards=tmp_path / rewards, reward_time="clicked_at", **SEARCHES
    )
    found = run(program, "init", queries, rewards, "--yes", cwd=tmp_path)
    assert "100.0% of the queries have one" in found
    replayed = json.loads(run(program, "replay", "--json", "--store", "store", cwd=tmp_path))
    counts = [replayed[name] for name in ("queries", "rewards", "joined", "expired", "dead_letters", "orphaned", "late")]
    assert counts == [ROWS, ROWS, ROWS, 0, 0, 0, 0]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_program_reads_events_of_other_frames(program: Path, tmp_path: Path, suffix: str) -> None:
    """Clicks and purchases are events of their own, with text as time."""
    frame = searches()
    logs.write(frame, tmp_path / f"searches{suffix}", **{**SEARCHES, "reward": None})
    for kind, every, value in (("click", 2, 0.25), ("purchase", 8, 1.0)):
        some = frame[::every]
        happened = pd.DataFrame(
            {
                "search": some["search_id"],
                "happened_at": [time.isoformat() for time in some["at"] + timedelta(seconds=20)],
                "kind": kind,
                "key": [f"{kind}-{i}" for i in range(len(some))],
            }
        )
        happened["value"] = happened["kind"].map({"click": 0.25, "purchase": 1.0})
        written = logs.write_rewards(
            happened,
            tmp_path / f"{kind}s{suffix}",
            request_id="search",
            time="happened_at",
            reward="value",
            event_id="key",
        )
        assert written == ROWS // every and set(happened["value"]) == {value}
    files = [f"{name}{suffix}" for name in ("searches", "clicks", "purchases")]
    run(program, "init", *files, "--yes", cwd=tmp_path)
    replayed = json.loads(run(program, "replay", "--json", "--store", "store", cwd=tmp_path))
    counts = {name: replayed[name] for name in ("queries", "rewards", "dead_letters", "orphaned", "late", "evicted")}
    assert counts == {
        "queries": ROWS,
        "rewards": ROWS // 2 + ROWS // 8,
        "dead_letters": 0,
        "orphaned": 0,
        "late": 0,
        "evicted": 0,
    }


def test_the_program_evaluates_examples(program: Path, tmp_path: Path) -> None:
    logs.write(searches(), tmp_path / "examples.parquet", **SEARCHES)
    run(program, "init", "examples.parquet", "--yes", cwd=tmp_path)
    found = json.loads(run(program, "evaluate", "--json", cwd=tmp_path))
    assert found["examples"] == ROWS, found
