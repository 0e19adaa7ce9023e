"""Data frames as logs that `pointsman init`, `doctor`, `evaluate` and `replay` read.

A frame is a pandas or polars data frame, a pyarrow table, or a mapping of columns. The suffix of the path names the format:
.jsonl, .jsonl.gz, .jsonl.zst (needs zstandard) or .parquet (needs pyarrow); `pip install 'pointsman[logs]'` installs both.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .decision import check_id
from .errors import BadLog, BadQuery, BadRequestId
from .params import is_model_name, is_space_name
from .query import encode, vector

PathLike: TypeAlias = str | os.PathLike[str]
TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
Row: TypeAlias = dict[str, Any]
Column: TypeAlias = Sequence[Any] | npt.NDArray[Any]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# Numbers without a declared unit must be milliseconds between 1990 and 2200.
_PLAUSIBLE_MS = (631_152_000_000, 7_258_118_400_000)
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
# `pointsman init` takes a shorter text for an ID, not for a vector.
_TEXT_DIM_MIN = 8
_TOLERANCE = 1e-6
_ROW_GROUP = 16_384


@dataclass(frozen=True)
class Written:
    """What was written."""

    queries: int
    rewards: int
    dim: int
    models: dict[str, int]
    """How often each model was played."""


def write(
    frame: Any,
    path: PathLike,
    *,
    query: str | Sequence[str] | Column,
    model: str,
    request_id: str | None = None,
    time: str | None = None,
    reward: str | None = None,
    propensities: str | Mapping[str, str | float] | None = None,
    propensity: str | None = None,
    space: str | None = None,
    rewards: PathLike | None = None,
    reward_time: str | None = None,
    time_unit: TimeUnit | None = None,
) -> Written:
    """Write one query per row, with its reward if `reward` is given.

    With `reward`, the file is a log of examples (`--examples`); with `rewards` as well, it is a log of queries, and the rewards
    go to the file `rewards`. Without `reward` it is a log of queries; write theirs with `write_rewards`. An existing file is
    replaced, as a whole.

    query        column of embeddings (lists or arrays), names of one column per component, or an array with a row per query
    model        column of the model that answered
    request_id   column of IDs; required unless the file is a log of examples
    time         column of times: datetimes (without a time zone: UTC), ISO 8601 text, or numbers in `time_unit`; required unless
                 the file is a log of examples
    reward       column of numbers or booleans. None, NaN and NA mean that the query has no reward: see `join.on_missing`.
    propensities column of distributions (mappings of model to probability), or, by model, a column or a constant
    propensity   column of the probability of the model that answered, where that is all you have
    reward_time  column of the times of rewards; default: that of the query
    time_unit    unit of times that are numbers; default: milliseconds, which must then be between 1990 and 2200
    """
    if rewards is not None and reward is None:
        raise ValueError("rewards names a file, but no column holds rewards: name it with reward")
    if reward_time is not None and rewards is None:
        raise ValueError("reward_time needs a file for the rewards: name it with rewards")
    if propensities is not None and propensity is not None:
        raise ValueError("propensities and propensity are both given: propensities is enough")
    is_examples = reward is not None and rewards is None
    if not is_examples and (request_id is None or time is None):
        raise ValueError("queries and rewards in separate files are joined by ID and time: name the columns request_id and time")
    if rewards is not None and Path(rewards).absolute() == Path(path).absolute():
        raise ValueError(f"path and rewards are the same file, {os.fspath(path)}")

    vectors = _vectors(frame, query)
    shared = _shared(frame, len(vectors), request_id, time, space, time_unit)
    models = [_model(row, model, cell) for row, cell in _rows(frame, model, len(vectors))]
    earned = _optional(frame, reward, len(vectors), _reward)
    distributions = _distributions(frame, propensities, models)
    chosen = _optional(frame, propensity, len(vectors), _probability)
    counts: dict[str, int] = {}
    for name in models:
        counts[name] = counts.get(name, 0) + 1

    def queries() -> Iterator[Row]:
        for i, embedding in enumerate(vectors):
            row = {**shared(i), "query": embedding, "model": models[i]}
            row |= {"propensities": distributions[i], "propensity": chosen[i], "reward": earned[i] if is_examples else None}
            yield row

    columns = [*_shared_columns(request_id, time, space), "query", "model"]
    columns += [name for name, given in (("propensities", propensities), ("propensity", propensity)) if given is not None]
    _write(path, [*columns, *(["reward"] if is_examples else [])], queries())
    if rewards is not None:
        rewarded = _shared(frame, len(vectors), request_id, reward_time or time, space, time_unit, earned)
        lines = ({**rewarded(i), "reward": earned[i]} for i in range(len(vectors)) if earned[i] is not None)
        _write(rewards, [*_shared_columns(request_id, time, space), "reward"], lines)
    dim = len(vectors[0]) if len(vectors) > 0 else 0
    return Written(len(vectors), sum(value is not None for value in earned), dim, counts)


def write_rewards(
    frame: Any,
    path: PathLike,
    *,
    request_id: str,
    time: str,
    reward: str,
    event_id: str | None = None,
    space: str | None = None,
    time_unit: TimeUnit | None = None,
) -> int:
    """Write one reward per row, for queries in another file; return how many. Rows without a reward are left out.

    Columns are as for `write`. `event_id` identifies a reward that is repeated.
    """
    rows = len(_cells(_column(frame, reward)))
    earned = _optional(frame, reward, rows, _reward)
    shared = _shared(frame, rows, request_id, time, space, time_unit, earned)
    events = _optional(frame, event_id, rows, _id)

    def lines() -> Iterator[Row]:
        for i in range(rows):
            if earned[i] is not None:
                yield {**shared(i), "reward": earned[i], "event_id": events[i]}

    columns = [*_shared_columns(request_id, time, space), "reward", *(["event_id"] if event_id is not None else [])]
    _write(path, columns, lines())
    return sum(value is not None for value in earned)


# Columns and cells


def _column(frame: Any, name: str) -> Any:
    names = list(frame) if isinstance(frame, Mapping) else list(getattr(frame, "column_names", getattr(frame, "columns", [])))
    if name not in names:
        raise BadLog(f"there is no column {name!r}: the columns are {', '.join(map(str, names))}")
    return frame[name]


def _cells(column: Any) -> list[Any]:
    for method in ("to_list", "to_pylist", "tolist"):
        if hasattr(column, method):
            return list(getattr(column, method)())
    return list(column)


def _rows(frame: Any, name: str, rows: int) -> Iterator[tuple[int, Any]]:
    cells = _cells(_column(frame, name))
    if len(cells) != rows:
        raise BadLog(f"column {name!r} has {len(cells)} rows, but there are {rows} queries")
    return enumerate(cells)


def _optional(frame: Any, name: str | None, rows: int, read: Callable[[int, str, Any], Any]) -> list[Any]:
    """The cells of a column, None where there is nothing."""
    if name is None:
        return [None] * rows
    return [None if _is_missing(cell) else read(row, name, cell) for row, cell in _rows(frame, name, rows)]


def _is_missing(cell: Any) -> bool:
    if cell is None or isinstance(cell, (Sequence, Mapping, np.ndarray)):
        return cell is None
    try:
        # NaN and NaT differ from themselves; of pandas.NA that is not known.
        return bool(cell != cell)
    except TypeError:
        return True


def _bad(row: int, name: str, cell: Any, expected: str) -> BadLog:
    return BadLog(f"row {row}: column {name!r} holds {cell!r:.80}: expected {expected}")


def _model(row: int, name: str, cell: Any) -> str:
    text = "" if _is_missing(cell) else str(cell)
    if not is_model_name(text):
        raise _bad(row, name, cell, "the name of a model, of A-Z a-z 0-9 . _ : / @ + -")
    return text


def _space(row: int, name: str, cell: Any) -> str:
    text = str(cell)
    if not is_space_name(text):
        raise _bad(row, name, cell, "the name of a space, of A-Z a-z 0-9 . _ -")
    return text


def _id(row: int, name: str, cell: Any) -> str:
    # Whole numbers become floats in a pandas column in which one is missing.
    is_float = isinstance(cell, (float, np.floating))
    if isinstance(cell, bytes) or (is_float and not float(cell).is_integer()):
        raise _bad(row, name, cell, "an ID, as text or a whole number")
    text = str(int(cell)) if is_float else str(cell)
    try:
        check_id(name, text)
    except BadRequestId as error:
        raise BadLog(f"row {row}: {error}") from None
    return text


def _number(row: int, name: str, cell: Any, expected: str) -> float:
    try:
        if isinstance(cell, (str, bytes)):
            raise TypeError
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        raise _bad(row, name, cell, expected) from None
    return number


def _reward(row: int, name: str, cell: Any) -> float:
    expected = "a finite number, true or false; map words to numbers first"
    number = _number(row, name, cell, expected)
    if not math.isfinite(number):
        raise _bad(row, name, cell, expected)
    return number


def _probability(row: int, name: str, cell: Any) -> float:
    expected = "a probability above 0, and at most 1"
    number = _number(row, name, cell, expected)
    if not 0.0 < number <= 1.0:
        raise _bad(row, name, cell, expected)
    return number


def _shared_columns(request_id: str | None, time: str | None, space: str | None) -> list[str]:
    given = (("request_id", request_id), ("space", space), ("ts_ms", time))
    return [name for name, column in given if column is not None]


def _shared(
    frame: Any,
    rows: int,
    request_id: str | None,
    time: str | None,
    space: str | None,
    unit: TimeUnit | None,
    needed: Sequence[Any] | None = None,
) -> Callable[[int], Row]:
    """The fields that queries and rewards share, by row. Only rows that are `needed` must have them."""
    is_needed = [True] * rows if needed is None else [cell is not None for cell in needed]
    ids = _optional(frame, request_id, rows, _id)
    times = [None] * rows if time is None else _times(_column(frame, time), time, unit)
    spaces = _optional(frame, space, rows, _space)
    for name, cells in ((request_id, ids), (time, times)):
        if name is not None and len(cells) != rows:
            raise BadLog(f"column {name!r} has {len(cells)} rows, but there are {rows} queries")
        empty = (row for row in range(rows) if is_needed[row] and cells[row] is None)
        if name is not None and (row := next(empty, None)) is not None:
            raise BadLog(f"row {row}: column {name!r} is empty: fill it, or drop the row")
    return lambda row: {"request_id": ids[row], "space": spaces[row], "ts_ms": times[row]}


# Vectors


def _vectors(frame: Any, query: str | Sequence[str] | Column) -> Column:
    """Valid embeddings of one dimension, each with its row."""
    found: Any = query
    if isinstance(query, str):
        found = _column(frame, query)
    elif isinstance(query, (list, tuple)) and query and all(isinstance(name, str) for name in query):
        found = np.column_stack([np.asarray(_column(frame, str(name))) for name in query])
    if not isinstance(found, (list, tuple)):
        found = np.asarray(found)
        if found.ndim == 2 and found.dtype.kind in "fiu":
            return _table(found)
    vectors = [_vector(row, cell) for row, cell in enumerate(found)]
    for row, embedding in enumerate(vectors):
        if embedding.size != vectors[0].size:
            raise BadLog(f"row {row}: the query has {embedding.size} components, row 0 has {vectors[0].size}")
    return vectors


def _table(found: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        table = found.astype(np.float32, copy=False)
    bad = ~(np.isfinite(table).all(axis=1) & table.any(axis=1))
    if bad.any():
        row = int(np.argmax(bad))
        _vector(row, table[row])
    return table


def _vector(row: int, cell: Any) -> npt.NDArray[np.float32]:
    if _is_missing(cell):
        raise BadLog(f"row {row}: there is no query: drop the row")
    try:
        return vector(cell)
    except BadQuery as error:
        raise BadLog(f"row {row}: {error}") from None


# Times


def _times(column: Any, name: str, unit: TimeUnit | None) -> list[int | None]:
    """Times in milliseconds since 1970."""
    found = np.asarray(column)
    if found.dtype.kind == "M":
        milliseconds = found.astype("datetime64[ms]").astype(np.int64).tolist()
        return [None if missing else ms for ms, missing in zip(milliseconds, np.isnat(found).tolist())]
    return [None if _is_missing(cell) else _time(row, name, cell, unit) for row, cell in enumerate(_cells(column))]


def _time(row: int, name: str, cell: Any, unit: TimeUnit | None) -> int:
    if isinstance(cell, str):
        return _since_epoch(_parsed(row, name, cell))
    if isinstance(cell, np.datetime64):
        return int(cell.astype("datetime64[ms]").astype(np.int64))
    if isinstance(cell, date):
        midnight = datetime(cell.year, cell.month, cell.day)
        return _since_epoch(cell if isinstance(cell, datetime) else midnight)
    if isinstance(cell, (bool, np.bool_)):
        raise _bad(row, name, cell, "a time")
    number = _number(row, name, cell, "a time")
    per_second = _PER_SECOND[unit or "ms"]
    if isinstance(cell, (int, np.integer)):
        milliseconds = int(cell) * 1000 // per_second
    elif math.isfinite(number):
        milliseconds = round(number * 1000 / per_second)
    else:
        raise _bad(row, name, cell, "a time")
    if unit is None and not _PLAUSIBLE_MS[0] <= milliseconds < _PLAUSIBLE_MS[1]:
        raise _bad(row, name, cell, "milliseconds since 1970, between 1990 and 2200; name another unit with time_unit")
    return milliseconds


def _parsed(row: int, name: str, text: str) -> datetime:
    try:
        trimmed = text.strip()
        return datetime.fromisoformat(trimmed[:-1] + "+00:00" if trimmed.endswith(("Z", "z")) else trimmed)
    except ValueError:
        raise _bad(row, name, text, "a time in ISO 8601, such as 2026-01-31T12:00:00Z") from None


def _since_epoch(time: datetime) -> int:
    aware = time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)
    return int((aware - _EPOCH) // timedelta(milliseconds=1))


# Propensities


def _distributions(
    frame: Any, propensities: str | Mapping[str, str | float] | None, models: Sequence[str]
) -> list[dict[str, float] | None]:
    rows = len(models)
    if propensities is None:
        return [None] * rows
    if isinstance(propensities, str):
        found = [(row, cell) for row, cell in _rows(frame, propensities, rows)]
        return [
            None if _is_missing(cell) else _distribution(row, propensities, _mapping(row, propensities, cell), models[row])
            for row, cell in found
        ]
    parts = {
        str(model): _cells(_column(frame, source)) if isinstance(source, str) else [source] * rows
        for model, source in propensities.items()
    }
    name = ", ".join(str(source) for source in propensities.values())
    return [
        _distribution(row, name, {model: cells[row] for model, cells in parts.items()}, models[row]) for row in range(rows)
    ]


def _mapping(row: int, name: str, cell: Any) -> dict[Any, Any]:
    try:
        # pyarrow returns a map as a list of pairs.
        return dict(json.loads(cell) if isinstance(cell, str) else cell)
    except (TypeError, ValueError):
        raise _bad(row, name, cell, "a mapping of models to probabilities") from None


def _distribution(row: int, name: str, cells: Mapping[Any, Any], chosen: str) -> dict[str, float]:
    expected = "probabilities between 0 and 1 that sum to 1"
    # A struct column has a field for every model, empty where a row has no such model.
    present = {str(model): cell for model, cell in cells.items() if not _is_missing(cell)}
    distribution = {model: _number(row, name, cell, expected) for model, cell in present.items()}
    is_valid = all(is_model_name(model) and 0.0 <= p <= 1.0 for model, p in distribution.items())
    if not is_valid or abs(sum(distribution.values()) - 1.0) > _TOLERANCE:
        raise _bad(row, name, distribution, expected)
    if distribution.get(chosen, 0.0) <= 0.0:
        raise _bad(row, name, distribution, f"a probability above 0 for {chosen}, the model that answered")
    return distribution


# Files


def _write(path: PathLike, columns: Sequence[str], rows: Iterator[Row]) -> None:
    """Write the rows to a file beside the path, then put it in place."""
    name = os.fspath(path)
    writer = next((writer for suffix, writer in _FORMATS.items() if name.endswith(suffix)), None)
    if writer is None:
        raise ValueError(f"path {name!r} is not valid: expected a name that ends in {', '.join(_FORMATS)}")
    beside = f"{name}.{secrets.token_hex(4)}.writing"
    try:
        writer(beside, columns, rows)
        os.replace(beside, name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _lines(columns: Sequence[str], rows: Iterator[Row]) -> Iterator[bytes]:
    for row in rows:
        event = {name: row[name] for name in columns if row[name] is not None}
        if "query" in event:
            event["query"] = _encoded(event["query"])
        yield json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _encoded(embedding: npt.NDArray[np.float32]) -> str | list[float]:
    return encode(embedding) if embedding.size >= _TEXT_DIM_MIN else [float(x) for x in embedding]


def _jsonl(path: str, columns: Sequence[str], rows: Iterator[Row]) -> None:
    with open(path, "wb") as file:
        file.writelines(_lines(columns, rows))


def _gzip(path: str, columns: Sequence[str], rows: Iterator[Row]) -> None:
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.writelines(_lines(columns, rows))


def _zstd(path: str, columns: Sequence[str], rows: Iterator[Row]) -> None:
    zstandard = _module("zstandard", ".zst")
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as compressor:
        for line in _lines(columns, rows):
            compressor.write(line)


def _parquet(path: str, columns: Sequence[str], rows: Iterator[Row]) -> None:
    arrow, parquet = _module("pyarrow", ".parquet"), _module("pyarrow.parquet", ".parquet")
    types = {
        "ts_ms": arrow.int64(),
        "query": arrow.list_(arrow.float32()),
        "propensities": arrow.map_(arrow.string(), arrow.float64()),
        "propensity": arrow.float64(),
        "reward": arrow.float64(),
    }
    schema = arrow.schema([(name, types.get(name, arrow.string())) for name in columns])
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(islice(rows, _ROW_GROUP)):
            writer.write_table(arrow.table([_array(arrow, schema, name, group) for name in columns], schema=schema))


def _array(arrow: Any, schema: Any, name: str, group: Sequence[Row]) -> Any:
    cells = [row[name] for row in group]
    if name == "propensities":
        cells = [None if cell is None else list(cell.items()) for cell in cells]
    return arrow.array(cells, schema.field(name).type)


def _module(name: str, suffix: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"files ending in {suffix} need {name}: pip install 'pointsman[logs]'") from None


_FORMATS: dict[str, Callable[[str, Sequence[str], Iterator[Row]], None]] = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _gzip,
    ".jsonl.zst": _zstd,
    ".parquet": _parquet,
}
