"""A real learner's parameters on a real broker. Needs the program as `cargo test` builds it, Java and Maven."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pointsman.kafka import follow

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "target" / "debug" / "pointsman"


@pytest.fixture
def brokers() -> Iterator[str]:
    given = os.environ.get("POINTSMAN_TEST_BROKERS")
    missing = [name for name in ("java", "mvn") if shutil.which(name) is None]
    if not PROGRAM.exists():
        missing.append(str(PROGRAM))
    if missing and not given:
        assert os.environ.get("CI") != "true", f"missing: {missing}"
        pytest.skip(f"no {missing}")
    if given:
        yield given
        return
    with subprocess.Popen(
        [ROOT / "tests" / "broker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None and script.stdin is not None
        line = script.stdout.readline().split()
        assert line[:1] == ["ready"], line
        yield line[1]
        # It ends with its standard input.
        script.stdin.close()


def test_follows_a_learner(brokers: str, tmp_path: Path) -> None:
    kafka: Any = importlib.import_module("confluent_kafka")
    prefix = f"python-{uuid.uuid4().hex[:8]}"
    names = {name: f"{prefix}-{name}" for name in ("queries", "rewards", "params", "dead_letters", "snapshots")}
    config = tmp_path / "pointsman.toml"
    topics = "".join(f"{name} = {json.dumps(topic)}\n" for name, topic in names.items())
    config.write_text(
        f"""
[learner]
dim = 3
models = ["a", "b"]
[store]
dir = {json.dumps(str(tmp_path / "store"))}
[transport]
kind = "kafka"
[transport.kafka]
brokers = {json.dumps(brokers)}
[transport.kafka.topics]
{topics}"""
    )

    def run(*arguments: str) -> str:
        done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("topics", "init", "--config", str(config))
    producer = kafka.Producer({"bootstrap.servers": brokers})
    for i in range(30):
        query = {"query": [1, 2, i - 15], "model": "ab"[i % 2], "propensities": {"a": 0.5, "b": 0.5}}
        ids = {"request_id": f"r{i}", "ts_ms": 1_700_000_000_000 + i}
        producer.produce(names["queries"], json.dumps({**ids, **query}))
        producer.produce(names["rewards"], json.dumps({**ids, "reward": i % 2}))
    assert producer.flush(20) == 0
    run("learn", "--once", "--config", str(config))

    with follow({"bootstrap.servers": brokers}, names["params"]) as follower:
        assert follower.wait(20)
        router = follower.routers["default"]
        assert router.params.version == 30
        decided = router.route([1.0, 2.0, 3.0], request_id="r-1")
    assert decided.propensities["b"] > 0.5, "b was rewarded"

    # The program says the same of the same bytes.
    consumer = kafka.Consumer({"bootstrap.servers": brokers, "group.id": prefix, "enable.auto.commit": False})
    place = kafka.TopicPartition(names["params"], 0, kafka.OFFSET_BEGINNING)
    consumer.assign([place])
    newest: Any = None
    while newest is None or newest.offset() + 1 < consumer.get_watermark_offsets(place)[1]:
        newest = consumer.poll(20)
        assert newest is not None and newest.error() is None
    consumer.close()
    (tmp_path / "params").write_bytes(newest.value())
    (tmp_path / "query").write_text("[1.0, 2.0, 3.0]")
    scored = json.loads(run("params", "score", "--params", str(tmp_path / "params"), "--query", str(tmp_path / "query")))
    assert decided.propensities == pytest.approx(scored["propensities"], abs=1e-5)
