"""A search service that routes every search and reports clicks. With a configuration that has dim = 64 and the models
trigrams and words:

    pip install 'pointsman[async]' fastapi uvicorn
    pointsman route --config shop.toml --serve-uniform &
    uvicorn search:app                                                          # in this directory
    curl 'localhost:8000/search?q=red+shoes'
    curl -X POST 'localhost:8000/click?request_id=...&item=2'

Learn with join.on_missing = "default": a search without a click earned nothing.
"""

import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from pointsman import Problem, Unreachable
from pointsman.aio import AsyncPointsmanClient
from pydantic import BaseModel

DIM = 64
ITEMS = ["red running shoes", "blue shoes for children", "a red kettle", "kettle of steel, 2 litres", "running watch"]

Vector = npt.NDArray[np.float32]


def hashed(parts: list[str]) -> Vector:
    """The sum of a pseudo-random direction for each part."""
    seeds = [zlib.crc32(part.encode()) for part in parts]
    directions = np.stack([np.random.default_rng(seed).standard_normal(DIM, np.float32) for seed in seeds])
    return np.asarray(directions.sum(axis=0))


def trigrams(text: str) -> Vector:
    padded = f"  {text.lower()} "
    return hashed([padded[i : i + 3] for i in range(len(padded) - 2)])


def words(text: str) -> Vector:
    return hashed(text.lower().split() or [""])


# Stand-ins for your embedding models, with an index each. The router gets the embedding of one of them.
MODELS = {"trigrams": trigrams, "words": words}
INDEXES = {name: np.stack([model(item) for item in ITEMS]) for name, model in MODELS.items()}
ROUTED_BY = trigrams
FALLBACK = "words"


class Hit(BaseModel):
    item: int
    text: str
    score: float


class Results(BaseModel):
    request_id: str | None
    """None: the search was not routed, so it is not learned from and its clicks need not be sent."""
    model: str
    hits: list[Hit]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    url, token = os.environ.get("POINTSMAN_URL", "http://127.0.0.1:9464"), os.environ.get("POINTSMAN_TOKEN")
    timeout_s = float(os.environ.get("POINTSMAN_TIMEOUT_S", "0.5"))
    async with AsyncPointsmanClient(url, token, timeout_s) as client:
        app.state.pointsman = client
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/search")
async def search(q: str) -> Results:
    try:
        answer = await app.state.pointsman.route(ROUTED_BY(q))
        model, request_id = answer.model, answer.request_id
    except (Problem, Unreachable):
        model, request_id = FALLBACK, None
    query, index = MODELS[model](q), INDEXES[model]
    scores = index @ query / (np.linalg.norm(index, axis=1) * np.linalg.norm(query))
    best = np.argsort(-scores)[:3]
    hits = [Hit(item=int(i), text=ITEMS[i], score=float(scores[i])) for i in best]
    return Results(request_id=request_id, model=model, hits=hits)


@app.post("/click", status_code=202)
async def click(request_id: str, item: int) -> None:
    # A second click on the same item counts once.
    await app.state.pointsman.reward(request_id, 1.0, event_id=f"click-{item}")
