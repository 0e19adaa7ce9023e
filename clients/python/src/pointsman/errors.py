"""What can go wrong, by who has to do something about it."""

from __future__ import annotations


class PointsmanError(Exception):
    """Any error of this package."""


class BadParams(PointsmanError, ValueError):
    """Bytes are not parameters that this version can route by."""


class BadQuery(PointsmanError, ValueError):
    """A vector cannot be routed."""


class BadRequestId(PointsmanError, ValueError):
    """A request id has no bytes, or too many."""


class Unreachable(PointsmanError):
    """The router did not answer: no connection, or not in time."""


class Problem(PointsmanError):
    """The router answered that something is wrong (RFC 9457)."""

    def __init__(
        self, status: int, title: str, detail: str, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        place = f" ({field})" if field else ""
        super().__init__(f"{status} {title}{place}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.field = field
        """The field that is wrong, as a path; None if it is not about one."""
        self.retry_after_s = retry_after_s
        """When to try again, if the router said so."""
