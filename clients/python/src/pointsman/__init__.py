"""Route queries to embedding models with the parameters that Pointsman learns.

`Router` decides in process, from a parameters file that it reloads. `PointsmanClient` calls a router sidecar over HTTP, and
`pointsman.aio` does so asynchronously. `pointsman.kafka` keeps in-process routers up to date from the parameters topic.
`pointsman.logs` writes data frames as logs that the program reads.
"""

from .client import PointsmanClient
from .decision import Answer, Decision
from .errors import BadLog, BadModels, BadParams, BadQuery, BadRequestId, PointsmanError, Problem, Unreachable
from .params import Params
from .query import Query
from .router import Distribution, Explanation, Router

__all__ = [
    "Answer",
    "BadLog",
    "BadModels",
    "BadParams",
    "BadQuery",
    "BadRequestId",
    "Decision",
    "Distribution",
    "Explanation",
    "Params",
    "PointsmanClient",
    "PointsmanError",
    "Problem",
    "Query",
    "Router",
    "Unreachable",
]
