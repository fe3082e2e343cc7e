"""Pages in a Redis server, which drops the least recently used itself where it is told to (`maxmemory-policy`)."""

from collections.abc import Iterator, Sequence
from typing import Any, final

from karhunen.stores.base import Store, check_key

MAX_BYTES = 512 << 20  # the longest value Redis takes


@final
class RedisStore(Store):
    """Pages under `prefix` + key at `url` (`redis://host:port/0`); with `ttl_seconds` the server forgets a page so long
    after it was put or read. `options` go to redis-py (timeouts, TLS)."""

    def __init__(self, url: str, prefix: str = "karhunen:", ttl_seconds: int | None = None, **options: Any) -> None:
        import redis

        if ttl_seconds is not None and ttl_seconds < 1:
            raise ValueError(f"ttl_seconds={ttl_seconds} forgets at once; use 1 or more, or None")
        self.prefix = prefix
        self.ttl_seconds = ttl_seconds
        self._client: Any = redis.Redis.from_url(url, **options)

    @classmethod
    def at(cls, url: str, timeout_seconds: float) -> "RedisStore":
        """One that does not wait: a server that is away, or slower than `timeout_seconds`, is an error at once. A
        connection that was lost, as when the server is started again, is made anew once."""
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        return cls(
            url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds, retry=Retry(NoBackoff(), 1)
        )

    def get(self, key: str) -> bytes | None:
        """As in `Store`."""
        if self.ttl_seconds is None:
            return self._client.get(self._name(key))
        return self._client.getex(self._name(key), ex=self.ttl_seconds)

    def put(self, key: str, data: bytes) -> None:
        """As in `Store`; ValueError if it is larger than Redis takes."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes are more than the {MAX_BYTES} of a Redis value; use shorter pages")
        self._client.set(self._name(key), data, ex=self.ttl_seconds)

    def has(self, key: str) -> bool:
        """As in `Store`."""
        return bool(self._client.exists(self._name(key)))

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        """As in `Store`, in one round trip."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(self._name(key))
        return [bool(found) for found in pipeline.execute()]

    def remove(self, key: str) -> None:
        """As in `Store`."""
        self._client.delete(self._name(key))

    def keys(self) -> Iterator[str]:
        """As in `Store`."""
        for name in self._client.scan_iter(match=f"{self.prefix}*", count=1000):
            text = name.decode() if isinstance(name, bytes) else str(name)
            yield text.removeprefix(self.prefix)

    def _name(self, key: str) -> str:
        check_key(key)
        return self.prefix + key
