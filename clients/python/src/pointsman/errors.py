"""Exceptions of this package."""

from __future__ import annotations


class PointsmanError(Exception):
    """Base class of all exceptions of this package."""


class BadParams(PointsmanError, ValueError):
    """The parameters are invalid or not supported by this version."""


class BadQuery(PointsmanError, ValueError):
    """The query vector is invalid."""


class BadRequestId(PointsmanError, ValueError):
    """A request ID, draw key or event ID is empty, too long or not valid Unicode."""


class BadModels(PointsmanError, ValueError):
    """Named models do not exist, or none is left that may answer."""


class BadLog(PointsmanError, ValueError):
    """A row cannot be written to a log."""


class Unreachable(PointsmanError):
    """The router cannot be reached, or did not answer within the timeout."""


class Problem(PointsmanError):
    """The router returned an error (RFC 9457)."""

    def __init__(
        self, status: int, title: str, detail: str, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        place = f" ({field})" if field else ""
        super().__init__(f"{status} {title}{place}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.field = field
        """Path of the invalid field; None if the error does not concern a field."""
        self.retry_after_s = retry_after_s
        """Seconds to wait before a retry, if the router sent Retry-After."""
