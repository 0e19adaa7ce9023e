"""What becomes of the messages of a parameters topic; no broker."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import pytest
from pointsman import BadParams
from pointsman.kafka import Follower, Routers, consumer_config

from .shared import made

EOF = -191


@dataclass
class Code:
    number: int

    def code(self) -> int:
        return self.number


@dataclass
class Record:
    key_bytes: bytes | str | None = b"default"
    data: bytes | None = None
    number: int = 0
    problem: Code | None = None

    def key(self) -> bytes | str | None:
        return self.key_bytes

    def value(self) -> bytes | None:
        return self.data

    def error(self) -> Code | None:
        return self.problem

    def topic(self) -> str:
        return "routing-params"

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return 7


def test_messages_become_routers() -> None:
    routers = Routers(key=b"other")
    assert routers.take(Record(b"default", made()))
    kept = routers["default"]
    assert not routers.take(Record(b"default", made()))
    assert routers.take(Record("shop", made(space="shop")))
    assert routers.take(Record(b"default", made(version=6)))
    assert not routers.take(Record(b"default", made(version=4)))
    assert not routers.take(Record(b"default", None)), "a space that was deleted is still routed"
    assert sorted(routers) == ["default", "shop"] and len(routers) == 2
    assert routers["default"] is kept and kept.params.version == 6
    with pytest.raises(KeyError):
        routers["gone"]


@pytest.mark.parametrize("record", [Record(b"default", b"junk"), Record(b"shop", made()), Record(None, made())])
def test_bad_messages_change_nothing(record: Record) -> None:
    routers = Routers()
    with pytest.raises(BadParams):
        routers.take(record)
    assert len(routers) == 0


def test_what_must_be_so_cannot_be_configured_away() -> None:
    config = consumer_config({"bootstrap.servers": "b:9", "group.id": "mine", "enable.auto.commit": True})
    assert config["bootstrap.servers"] == "b:9" and config["group.id"] == "mine"
    assert config["isolation.level"] == "read_committed" and config["enable.auto.commit"] is False


class Consumer:
    """Gives records, then nothing; errors of its own it raises."""

    def __init__(self, records: list[Record | Exception]) -> None:
        self.records = records
        self.idle = threading.Event()
        self.closed = False

    def poll(self, timeout: float) -> Record | None:
        if not self.records:
            self.idle.set()
            return None
        record = self.records.pop(0)
        if isinstance(record, Exception):
            raise record
        return record

    def close(self) -> None:
        self.closed = True


def test_a_follower_goes_on_through_trouble(caplog: pytest.LogCaptureFixture) -> None:
    consumer = Consumer(
        [
            Record(problem=Code(-195)),
            RuntimeError("broken"),
            Record(b"default", b"junk", 3),
            Record(b"default", made(), 0),
            Record(number=0, problem=Code(EOF)),
            Record(b"shop", made(space="shop"), 1),
            Record(number=1, problem=Code(EOF)),
        ]
    )
    with caplog.at_level(logging.WARNING), Follower(consumer, {0, 1}, EOF, Routers()) as follower:
        assert follower.wait(timeout_s=10)
        assert sorted(follower.routers) == ["default", "shop"]
        assert consumer.idle.wait(10)
    assert consumer.closed and follower.routers["shop"].params.version == 5
    assert "ignored invalid parameters at ('routing-params', 3, 7): not a safetensors file" in caplog.text
    assert "broken" in caplog.text


def test_nothing_is_ready_before_every_partition_is_read() -> None:
    consumer = Consumer([Record(number=0, problem=Code(EOF))])
    with Follower(consumer, {0, 1}, EOF, Routers()) as follower:
        assert consumer.idle.wait(10)
        assert not follower.wait(timeout_s=0)
