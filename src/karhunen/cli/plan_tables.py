"""The tables of `karhunen plan`."""

from typing import Any

from karhunen.byte_sizes import said_bytes
from karhunen.cli.screen import Screen, grid
from karhunen.planning.plan import Plan, Row
from karhunen.planning.shape import CacheLayer


def show(screen: Screen, plan: Plan) -> None:
    """On stdout, most asked for first."""
    screen.table(layers_table(plan))
    screen.table(rates_table(plan))
    screen.table(capacity_table(plan))
    if any(row.rate.tables for row in plan.rows):
        screen.table(storage_table(plan))
    if plan.exact:
        exact = grid("stays exact", "why")
        for what, why in plan.exact:
            exact.add_row(what, why)
        screen.table(exact)
    for remark in plan.advice:
        screen.say(f"advice: {remark.said}: {remark.because}")
    for remark in plan.warnings:
        screen.say(f"watch out: {remark.said}: {remark.because}")
    for line in hints(plan):
        screen.say(line)


def layers_table(plan: Plan) -> Any:
    """Bytes of the uncompressed cache, by kind of layer."""
    shape, work = plan.shape, plan.work
    many = f"{work.batch} sequence{'s' * (work.batch > 1)} of {work.context:,} tokens, {work.cache_dtype}"
    table = grid(
        *("layers", "kind", "KV heads × (K + V)", "bytes per token", "cache", ""),
        title=f"{shape.name} ({shape.architecture}), uncompressed: {many}",
        right=(0, 3, 4, 5),
    )
    for layer, n in shape.alike:
        n_bytes = work.batch * n * layer.dense_bytes(work.context, work.cache_bits)
        each = layer.elements_per_token * n * work.cache_bits / 8
        table.add_row(str(n), _kind(layer), _sizes(layer), f"{each:,.0f}", f"{n_bytes:,.0f}", said_bytes(n_bytes))
    table.add_section()
    table.add_row("", "all", "", "", f"{plan.dense.held_bytes:,.0f}", said_bytes(plan.dense.held_bytes))
    if plan.weight_bytes is not None:
        said = "as published" if plan.work.weights is None else str(plan.work.weights)
        table.add_row("", "weights", said, "", f"{plan.weight_bytes:,.0f}", said_bytes(plan.weight_bytes))
    return table


def rates_table(plan: Plan) -> Any:
    """What each rate makes of the cache: on paper, and with its window at this context."""
    table = grid(
        *("rate", "bits coded", "nominal", f"at {plan.work.context:,} tokens", "cache held", "tables"),
        title="rates: nominal is of coded tokens, the next column of all tokens and layers",
        right=(1, 2, 3, 4, 5),
    )
    for row in plan.rows:
        bits, ratio = row.rate.coded_bits(plan.shape), row.rate.nominal_ratio(plan.shape)
        tables = row.rate.table_bytes(plan.shape)
        table.add_row(
            row.rate.name,
            "" if bits is None else f"{bits:.2f}",
            "" if ratio is None else f"{ratio:.2f}×",
            f"{row.capacity.ratio:.2f}×",
            said_bytes(row.capacity.held_bytes),
            said_bytes(tables) if tables else "",
        )
    return table


def capacity_table(plan: Plan) -> Any:
    """Context, batch and time; what they are of the uncompressed cache's stands beside them."""
    machine, work = plan.machine, plan.work
    where = "no memory said" if machine.memory_bytes is None else _where(plan)
    table = grid(
        *("rate", f"longest context, batch {work.batch}", f"largest batch, {work.context:,} tokens"),
        *("decode step, at least", "tokens/s, at most"),
        title=f"capacity: {where}",
        right=(1, 2, 3, 4),
    )
    for row in plan.rows:
        table.add_row(row.rate.name, *_capacity(plan, row))
    return table


def storage_table(plan: Plan) -> Any:
    """Shared tables of the calibrated rates, per layer and head group."""
    table = grid(
        *("rate", "layers", "transforms", "codebooks and widths", "a layer", "of it each head group"),
        title="storage of transforms, once for the model",
        right=(1, 2, 3, 4, 5),
    )
    for row in plan.rows:
        for layer, n in plan.shape.alike:
            if (found := row.rate.tables.get(layer)) is not None:
                parts = (found.transforms, found.codebooks, found.total, found.total // found.n_groups)
                table.add_row(row.rate.name, f"{n} of {_sizes(layer)}", *(f"{part:,}" for part in parts))
    return table


def hints(plan: Plan) -> list[str]:
    """What would say more."""
    found = [f"source: {plan.shape.source}"]
    if plan.machine.memory_bytes is None:
        found.append("give --memory 24GiB for the longest context and the largest batch")
    elif plan.machine.memory_bytes % 10**9 == 0:
        gigabytes = plan.machine.memory_bytes // 10**9
        found.append(f"a card sold as {gigabytes} GB has {gigabytes} GiB, 7 % more: --memory {gigabytes}GiB")
    if plan.machine.bandwidth is None:
        found.append("give --bandwidth 3.35TB/s for the floor of a decode step")
    return found


def _capacity(plan: Plan, row: Row) -> tuple[str, str, str, str]:
    mine, times = row.capacity, plan.end_to_end(row)
    step = best = ""
    if mine.step_seconds is not None:
        too_many = mine.max_batch is not None and mine.max_batch < plan.work.batch
        step = f"{1e3 * mine.step_seconds:.2f} ms{_beside(times['step_speed'], 'faster')}"
        step += ", if it fitted" * too_many
    if mine.best_tokens_per_second is not None:
        best = f"{mine.best_tokens_per_second:,.0f}{_beside(times['throughput'])}"
    return (
        _count(mine.max_context, mine.unlimited, times["context"]),
        _count(mine.max_batch, mine.unlimited, times["batch"]),
        step,
        best,
    )


def _count(n: int | None, unlimited: bool, times: float | None) -> str:
    if n is None:
        return "no limit" if unlimited else ""
    return f"{n:,}{_beside(times)}"


def _beside(times: float | None, word: str = "") -> str:
    return "" if times is None or times == 1 else f" ({times:.1f}×{f' {word}' * bool(word)})"


def _kind(layer: CacheLayer) -> str:
    if layer.kind == "sliding":
        return f"sliding, {layer.window_tokens:,} tokens"
    return f"{layer.kind}, and a state" if layer.state_bytes() and layer.kind != "linear" else layer.kind


def _sizes(layer: CacheLayer) -> str:
    if not layer.elements_per_token:
        return f"state of {layer.state + layer.recurrent:,}" if layer.state_bytes() else ""
    return f"{layer.n_kv_heads} × ({layer.key_dim} + {layer.value_dim})"


def _where(plan: Plan) -> str:
    machine = plan.machine
    assert machine.memory_bytes is not None, "said where memory is"
    usable = machine.usable_bytes or 0
    room = usable - (plan.weight_bytes or 0)
    each = f"{machine.n_devices} × {said_bytes(machine.memory_bytes)} ({machine.memory_bytes / 2**30:.1f} GiB)"
    free = f"{said_bytes(machine.reserve_bytes)} of each left free"
    return f"{each}, {free}; {said_bytes(max(0.0, room))} beside the weights"
