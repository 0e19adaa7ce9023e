"""A real router, as `cargo test` builds it."""

from __future__ import annotations

import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .shared import PROGRAM, Serve, Service, free_url


@pytest.fixture(scope="session")
def program() -> Path:
    if not PROGRAM.exists():
        assert os.environ.get("CI") != "true", f"missing: {PROGRAM}"
        pytest.skip(f"no {PROGRAM}")
    return PROGRAM


@pytest.fixture
def serve(program: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts `pointsman route --serve-uniform` with a configuration, at a free address or a given one."""
    with ExitStack() as services:
        yield lambda config, url="": services.enter_context(_Running(program, config, url or free_url(), tmp_path))


class _Running:
    def __init__(self, program: Path, config: str, url: str, place: Path) -> None:
        path = place / "pointsman.toml"
        path.write_text(config)
        listen = f"http.listen={url.partition('://')[2]}"
        arguments = ["route", "--config", str(path), "--serve-uniform", "--set", listen]
        arguments += ["--set", f"transport.file.dir={place}/log"]
        self.process = subprocess.Popen([program, *arguments], cwd=place, stderr=subprocess.PIPE, text=True)
        self.service = Service(url, path, place / "log", self.stop)

    def __enter__(self) -> Service:
        deadline = time.monotonic() + 30
        while not _is_ready(self.service.url):
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            assert time.monotonic() < deadline, "the router is not ready"
            time.sleep(0.02)
        return self.service

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()


def _is_ready(url: str) -> bool:
    unverified = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), unverified)
    try:
        with opener.open(f"{url}/ready", timeout=1) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False
