"""What the tests share: the golden files of the repository, and parameters made by hand."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "target" / "debug" / "pointsman"
GOLDEN = ROOT / "tests" / "golden"
PARAMS_FILE = GOLDEN / "formats" / "params-1.safetensors"
PARAMS_FILE_2 = GOLDEN / "formats" / "params-2.safetensors"
PARAMS_FILE_2_OUTCOMES = GOLDEN / "formats" / "params-2-outcomes.safetensors"


@dataclass
class Service:
    """A running router."""

    url: str
    config: Path
    log: Path
    stop: Callable[[], None]

    def events(self, side: str) -> list[dict[str, Any]]:
        """The events that it has logged: queries or rewards."""
        files = sorted((self.log / side).glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class Serve(Protocol):
    """Starts routers."""

    def __call__(self, config: str, url: str = "") -> Service: ...


def free_url(scheme: str = "http") -> str:
    """A loopback address that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"{scheme}://127.0.0.1:{free.getsockname()[1]}"


def run(program: Path, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Run the program, which must succeed, and return its standard output."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def vectors() -> list[dict[str, Any]]:
    """Cases that the Rust router wrote, for each version of the format."""
    files = ("vectors.json", "vectors-2.json", "vectors-3.json")
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
