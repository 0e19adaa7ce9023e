"""Route queries to embedding models with the parameters that Pointsman learns.

`Router` decides in process, from a parameters file. `PointsmanClient` calls a router sidecar over HTTP.
`pointsman.kafka` keeps in-process routers up to date from the parameters topic.
"""

from .client import PointsmanClient
from .decision import Answer, Decision
from .errors import BadParams, BadQuery, BadRequestId, PointsmanError, Problem, Unreachable
from .params import Params
from .query import Query
from .router import Distribution, Explanation, Router

__all__ = [
    "Answer",
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
