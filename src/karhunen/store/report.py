"""What a cache holds, layer by layer: what is coded, in how many bytes, what was left exact and why."""

from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, final

from karhunen.store.account import Account


@final
@dataclass(frozen=True)
class LayerReport:
    """One layer. `reason` says why it is exact, empty where it is coded; `how_read` how attention last read its coded
    tokens (from bytes, or why not), empty before it did."""

    layer: int
    kind: str
    n_tokens: int
    n_coded: int
    reason: str
    account: Account
    how_read: str = ""


@final
@dataclass(frozen=True)
class Report:
    """All layers; `table_bytes` are shared by every cache of the codec and counted apart; `transient_bytes` is the
    largest dense copy of one layer that attention was handed."""

    recipe: str
    layers: tuple[LayerReport, ...]
    table_bytes: int
    transient_bytes: int

    @property
    def total(self) -> Account:
        """All layers together."""
        return reduce(lambda a, b: a + b, (layer.account for layer in self.layers), Account())

    @property
    def coded(self) -> Account:
        """The layers that a codec codes, their exact tokens included."""
        return reduce(lambda a, b: a + b, (layer.account for layer in self.layers if not layer.reason), Account())

    @property
    def tokens_to_repay_tables(self) -> int | None:
        """Coded tokens after which the shared tables are paid for by what coding saves; None if nothing is saved."""
        total = self.total
        n_coded = max((layer.n_coded for layer in self.layers), default=0)
        saved = total.coded_dense - total.codes - total.side
        return -(-self.table_bytes * n_coded // saved) if saved > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """JSON: totals with ratio and bits per element, then the layers."""
        total = self.total
        return {
            "recipe": self.recipe,
            "bytes": {
                "dense": total.dense,
                "held": total.held,
                "codes": total.codes,
                "scales_and_gains": total.side,
                "exact_tokens": total.exact,
                "shared_tables": self.table_bytes,
                "transient_dense": self.transient_bytes,
            },
            "ratio": total.ratio,
            "bits_per_element": total.bits_per_element,
            "coded_ratio": total.coded_ratio,
            "coded_bits_per_element": total.coded_bits_per_element,
            "layers": [asdict(layer) for layer in self.layers],
        }
