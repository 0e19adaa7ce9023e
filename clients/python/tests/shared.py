"""What the tests share: the golden files of the repository, and parameters made by hand."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "golden"
PARAMS_FILE = GOLDEN / "formats" / "params-1.safetensors"
PARAMS_FILE_2 = GOLDEN / "formats" / "params-2.safetensors"


def vectors() -> list[dict[str, Any]]:
    """Cases that the Rust router wrote, for each version of the format."""
    files = ("vectors.json", "vectors-2.json")
    return [case for file in files for case in json.loads((GOLDEN / "router" / file).read_bytes())["cases"]]


def keys() -> list[tuple[list[float], int]]:
    """Queries and their keys."""
    cases = json.loads((GOLDEN / "router" / "query-keys.json").read_bytes())["keys"]
    return [(case["query"], int(case["key"])) for case in cases]


def floats(text: str) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32)


def made(
    tensors: dict[str, npt.NDArray[Any]] | None = None, without: tuple[str, ...] = (), **metadata: object
) -> bytes:
    """Parameters of two models, a and b, in two dimensions."""
    all_metadata = {
        "format": "pointsman.params",
        "format_version": 1,
        "space": "default",
        "epoch": 0,
        "version": 5,
        "revision": 1,
        "models": '["a", "b"]',
        "dim": 2,
        "sampling": "softmax",
        "floor": 0,
        "created_ms": 0,
        "algorithm": "hpg",
        **metadata,
    }
    default: dict[str, npt.NDArray[Any]] = {"a.bias": np.array([1.0], np.float32)}
    texts = {key: str(value) for key, value in all_metadata.items() if key not in without}
    return save(default if tensors is None else tensors, texts)
