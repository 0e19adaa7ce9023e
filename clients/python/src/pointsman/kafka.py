"""Routers that are kept up to date from the parameters topic. Needs `pip install pointsman[kafka]`."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from .errors import BadParams
from .params import Params
from .router import DEFAULT_KEY, Router

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_METADATA_TIMEOUT_S = 10.0


class Message(Protocol):
    """The part of a Kafka message that is used."""

    def key(self) -> bytes | str | None: ...

    def value(self) -> bytes | str | None: ...


class Routers(Mapping[str, Router]):
    """Routers by space, built from the messages of a parameters topic."""

    def __init__(self, key: bytes = DEFAULT_KEY) -> None:
        self._key = key
        # Replaced as a whole, so that concurrent iteration is safe.
        self._routers: dict[str, Router] = {}

    def take(self, message: Message) -> bool:
        """Apply a message. Return whether its parameters were newer. Call it from one thread only.

        A tombstone (the space was deleted from the topic) changes nothing: the router keeps its parameters. Raises
        `BadParams` if the parameters are invalid.
        """
        value = message.value()
        if value is None:
            return False
        params = Params.decode(_bytes(value))
        key = message.key()
        if key is None or _bytes(key) != params.space.encode():
            raise BadParams(f"the message key {key!r} does not match space {params.space}")
        known = self._routers.get(params.space)
        if known is not None:
            return known.offer(params)
        self._routers = {**self._routers, params.space: Router(params, self._key)}
        return True

    def __getitem__(self, space: str) -> Router:
        return self._routers[space]

    def __iter__(self) -> Iterator[str]:
        return iter(self._routers)

    def __len__(self) -> int:
        return len(self._routers)


class Follower:
    """Reads a parameters topic on a background thread until it is closed."""

    def __init__(self, consumer: Any, partitions: set[int], eof: int, routers: Routers) -> None:
        self.routers = routers
        """Routers by space, always with the newest parameters."""
        self._consumer = consumer
        self._behind = set(partitions)
        self._eof = eof
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pointsman-params", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything that was on the topic at the start has been read. Return whether it has."""
        return self._ready.wait(timeout_s)

    def close(self) -> None:
        """Stop reading. Routers keep their current parameters."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._step(self._consumer.poll(_POLL_S))
                except Exception:
                    # A client error must not end the thread silently, nor flood the log.
                    _log.exception("cannot read parameters")
                    self._stop.wait(_POLL_S)
        finally:
            self._consumer.close()

    def _step(self, message: Any) -> None:
        if message is None:
            return
        error = message.error()
        if error is not None and error.code() == self._eof:
            self._behind.discard(message.partition())
            if not self._behind:
                self._ready.set()
        elif error is not None:
            _log.warning("cannot read parameters: %s", error)
        else:
            try:
                self.routers.take(message)
            except BadParams as bad:
                place = (message.topic(), message.partition(), message.offset())
                _log.error("ignored invalid parameters at %s: %s", place, bad)


def follow(config: Mapping[str, Any], topic: str, key: bytes = DEFAULT_KEY) -> Follower:
    """Read a parameters topic from its beginning. `config` is a librdkafka configuration with `bootstrap.servers`.

    Every follower reads all partitions. It joins no consumer group and commits no offsets.
    """
    kafka: Any = importlib.import_module("confluent_kafka")
    routers = Routers(key)
    consumer = kafka.Consumer(consumer_config(config))
    try:
        partitions = _partitions(consumer, topic)
        consumer.assign([kafka.TopicPartition(topic, p, kafka.OFFSET_BEGINNING) for p in partitions])
    except BaseException:
        consumer.close()
        raise
    return Follower(consumer, partitions, kafka.KafkaError._PARTITION_EOF, routers)


def consumer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the consumer configuration with the required settings."""
    return {
        # The library requires a group name, though no group is joined.
        "group.id": "pointsman-params",
        **config,
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
    }


def _partitions(consumer: Any, topic: str) -> set[int]:
    deadline = time.monotonic() + _METADATA_TIMEOUT_S
    while True:
        found = consumer.list_topics(topic, timeout=_METADATA_TIMEOUT_S).topics[topic]
        if found.error is None and found.partitions:
            return set(found.partitions)
        if time.monotonic() > deadline:
            raise LookupError(f"topic {topic} does not exist: {found.error}")
        time.sleep(_POLL_S)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
