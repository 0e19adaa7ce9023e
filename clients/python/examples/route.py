"""Routes one query in process and prints the event to log: python route.py data/log/params/default.safetensors"""

import json
import sys
import time

import numpy as np
from pointsman import Router

router = Router.from_file(sys.argv[1])
query = np.random.default_rng().standard_normal(router.params.dim)  # your embedding
decision = router.route(query)
print(f"{decision.model} with probability {decision.propensity:.3f}", file=sys.stderr)
print(json.dumps(decision.event(query, ts_ms=time.time_ns() // 1_000_000)))
