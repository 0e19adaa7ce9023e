#!/usr/bin/env python3
"""Writes query and reward events to files, one JSON object per line.

    python3 examples/produce_events.py data/log 1000
    pointsman replay --set learner.dim=3 --queries data/log/queries/app.jsonl --rewards data/log/rewards/app.jsonl

Your service logs the same objects: a query event when it routes a query, a reward event when it knows how
good the answer was. On Kafka each object is the value of one message, on the topics of transport.kafka.topics.
Needs Python 3.10 or newer, and nothing else.
"""

import json
import random
import sys
from pathlib import Path

MODELS = ("minilm", "bge")


def events(number, seed=1):
    """Yields pairs of a query event and a reward event."""
    draw = random.Random(seed)
    for i in range(number):
        query = [round(draw.gauss(0.0, 1.0), 4) for _ in range(3)]
        # The distribution that the model is drawn from. Log what you drew from, not what you intended.
        propensities = {"minilm": 0.5, "bge": 0.5}
        model = draw.choices(MODELS, weights=[propensities[name] for name in MODELS])[0]
        good = "minilm" if abs(query[0]) > abs(query[1]) else "bge"
        request_id, ts_ms = f"r-{i}", 1_700_000_000_000 + 100 * i
        yield (
            {
                "request_id": request_id,
                "ts_ms": ts_ms,
                "query": query,
                "model": model,
                "propensities": propensities,
            },
            {"request_id": request_id, "ts_ms": ts_ms + 2000, "reward": 0.9 if model == good else 0.3},
        )


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: produce_events.py DIRECTORY NUMBER")
    directory, number = Path(sys.argv[1]), int(sys.argv[2])
    paths = [directory / side / "app.jsonl" for side in ("queries", "rewards")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    with paths[0].open("w") as queries, paths[1].open("w") as rewards:
        for query, reward in events(number):
            print(json.dumps(query), file=queries)
            print(json.dumps(reward), file=rewards)


if __name__ == "__main__":
    main()
