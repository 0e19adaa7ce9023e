"""Decisions, and the events that they are logged as."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from .errors import BadRequestId
from .query import Query, encode

ID_BYTES_MAX = 256


@dataclass(frozen=True)
class Answer:
    """Which model a query goes to."""

    request_id: str
    """What rewards must name."""
    space: str
    model: str
    propensity: float
    """The probability with which this model was drawn."""
    propensities: dict[str, float]
    """The whole distribution that it was drawn from."""
    params_version: int
    params_epoch: int


@dataclass(frozen=True)
class Decision(Answer):
    """An answer that was found in process: nobody has logged it yet."""

    policy: dict[str, float]
    """The distribution before the floor was mixed in."""

    def event(self, query: Query, ts_ms: int) -> dict[str, Any]:
        """The query event that the learner needs, for `json.dumps`; `query` is what was routed."""
        event = {
            "request_id": self.request_id,
            "space": self.space,
            "ts_ms": int(ts_ms),
            "query": encode(query),
            "model": self.model,
            "propensities": dict(self.propensities),
            "params_version": self.params_version,
        }
        if self.policy != self.propensities:
            event["policy"] = dict(self.policy)
        return event


def random_id() -> str:
    """A request id that nobody else has."""
    return secrets.token_hex(16)


def check_id(field: str, value: str) -> bytes:
    """The bytes of an id: 1 to 256 of them."""
    try:
        data = value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequestId(f"{field} is not Unicode text") from None
    if not 1 <= len(data) <= ID_BYTES_MAX:
        raise BadRequestId(f"{field} must have 1 to {ID_BYTES_MAX} bytes, not {len(data)}")
    return data
