"""Decisions and their query events."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from .errors import BadRequestId
from .query import Query, encode

ID_BYTES_MAX = 256


@dataclass(frozen=True)
class Answer:
    """The model chosen for a query."""

    request_id: str
    """ID that rewards must carry."""
    space: str
    model: str
    propensity: float
    """Probability with which this model was drawn."""
    propensities: dict[str, float]
    """Full distribution that the model was drawn from, over the models that were eligible."""
    params_version: int
    params_epoch: int


@dataclass(frozen=True)
class Decision(Answer):
    """A decision taken in process. The caller must log it: see `event`."""

    policy: dict[str, float]
    """Distribution before the exploration floor is mixed in."""
    draw_key: str | None = None
    """What the model was drawn by, if not by the request ID."""

    def event(self, query: Query, ts_ms: int) -> dict[str, Any]:
        """Return the query event for the learner, ready for `json.dumps`. `query` is the routed query."""
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
        if self.draw_key is not None:
            event["draw_key"] = self.draw_key
        return event


def random_id() -> str:
    """Return a unique request ID."""
    return secrets.token_hex(16)


def check_id(field: str, value: str) -> bytes:
    """Return the bytes of an ID, which must be 1 to 256."""
    try:
        data = value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequestId(f"{field} is not valid Unicode text") from None
    if not 1 <= len(data) <= ID_BYTES_MAX:
        raise BadRequestId(f"{field} has {len(data)} bytes: must have 1 to {ID_BYTES_MAX}")
    return data
