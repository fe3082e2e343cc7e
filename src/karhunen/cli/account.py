"""The byte account of a cache as a table: held by kind, beside the uncompressed cache."""

from rich.table import Table

from karhunen.cli.screen import grid
from karhunen.store.report import Report


def account_table(report: Report) -> Table:
    """One row per kind, in bytes and as a share of the uncompressed cache."""
    total = report.total
    n_tokens = max((layer.n_tokens for layer in report.layers), default=0)
    n_coded = max((layer.n_coded for layer in report.layers), default=0)
    table = grid(
        "bytes", "", "of dense", title=f"cache of {n_tokens:,} tokens, {n_coded:,} of them coded", right=(1, 2)
    )
    for name, size in (
        ("dense (the uncompressed cache)", total.dense),
        ("held", total.held),
        ("  codes", total.codes),
        ("  scales and gains", total.side),
        ("  exact tokens", total.exact),
    ):
        table.add_row(name, f"{size:,}", f"{size / total.dense:.1%}" if total.dense else "")
    table.add_section()
    table.add_row("shared tables, once per model", f"{report.table_bytes:,}", "")
    table.add_row("largest dense copy of a layer, in passing", f"{report.transient_bytes:,}", "")
    table.add_section()
    table.add_row("ratio", f"{total.ratio:.2f}", "")
    table.add_row("bits per element, all tokens", f"{total.bits_per_element:.3f}", "")
    coded_bits = f"{total.coded_bits_per_element:.3f}" if n_coded else "none coded"
    table.add_row("bits per element, coded tokens", coded_bits, "")
    if (repaid := report.tokens_to_repay_tables) is not None:
        table.add_row("coded tokens that repay the tables", f"{repaid:,}", "")
    return table
