"""What an engine is told about its store: the codec, the address, and how much work may wait.

Strict: an unknown setting is refused with the known ones, because a setting that is misspelt would be silent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

from karhunen.codec import Codec
from karhunen.stores import Counted, open_store

WHOLE_NUMBERS = ("page_tokens", "max_store_bytes", "max_queued_bytes", "loads_at_a_time")
COUNTS = ("recent_tokens", "accuracy_every")


@final
@dataclass(frozen=True)
class ServingSettings:
    """`codec`: a folder as `karhunen calibrate` writes it. `store`: a folder or an address of `open_store`.

    `page_tokens`: tokens of a page, None: one block of the engine. `max_store_bytes`: of a folder. `max_queued_bytes`:
    blocks copied and not yet coded; what does not fit is not stored. `loads_at_a_time`: requests whose pages are read
    at once. `recent_tokens`: at least so many tokens at a prompt's end are read, not restored, and so exact; None: as
    many as the codec's window keeps exact. `lookup_seconds`: a store that has not answered by then holds nothing.
    `timeout_seconds`: of Redis. `accuracy_every`: of so many pages that are coded, one is decoded again and compared
    (`attention_accuracy_delta`); 0: none. `coding_share`: of the coding thread's time beside an engine that computes
    steps; it takes all its time while the engine is idle, and while more than half of `max_queued_bytes` waits.
    """

    codec: str
    store: str
    page_tokens: int | None = None
    max_store_bytes: int | None = None
    max_queued_bytes: int = 1 << 30
    loads_at_a_time: int = 2
    recent_tokens: int | None = None
    lookup_seconds: float = 2.0
    timeout_seconds: float = 5.0
    accuracy_every: int = 0
    coding_share: float = 0.2

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ServingSettings":
        """ValueError for what is missing, unknown, or of another type."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(data.keys() - set(known)):
            raise ValueError(f"unknown setting(s) {unknown} of karhunen; known: {known}")
        for name in ("codec", "store"):
            if not isinstance(data.get(name), str) or not data[name]:
                raise ValueError(f"karhunen needs `{name}`, a text; given: {data.get(name)!r}")
        for name, value in data.items():
            if name in WHOLE_NUMBERS and value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} of karhunen is not a whole number above 0")
            if name in COUNTS and value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name}={value!r} of karhunen is not a whole number from 0 on")
            if name.endswith("_seconds") and (not isinstance(value, int | float) or value <= 0):
                raise ValueError(f"{name}={value!r} of karhunen is not a time above 0, in seconds")
            if name == "coding_share" and (not isinstance(value, int | float) or not 0 < value <= 1):
                raise ValueError(f"coding_share={value!r} of karhunen is not a share above 0, at most 1")
        return cls(**data)

    def load_codec(self) -> Codec:
        """ValueError, with the folder, if there is none."""
        return Codec.from_pretrained(Path(self.codec).expanduser())

    def open_store(self) -> Counted:
        """Its failures are misses."""
        return Counted(open_store(self.store, self.max_store_bytes, self.timeout_seconds))
