"""Values of attention from bytes on a CPU: a histogram of attention weight for each byte, then its entries once."""

from numba import njit

from karhunen.kernels.simd import add, byte, fma, four_bytes, load, splat, spread, store


@njit(nogil=True)
def count(rows, values, batch, head, span, span_end, weights, histogram):
    """Add each token's weights to the bin of its byte in every plane."""
    n_rows = len(rows)
    low = 255 * n_rows
    first = values.tables.plane_start[head]
    n_planes = values.tables.plane_start[head + 1] - first
    n_tokens = span_end - span
    whole = n_tokens // 4 * 4
    stride = values.plane_stride
    address = values.codes + batch * values.batch_stride + first * stride + span
    for plane in range(0, n_planes // 4 * 4, 4):
        a = address + plane * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        f = plane * 256 * n_rows
        g, h, i = f + 256 * n_rows, f + 512 * n_rows, f + 768 * n_rows
        for n in range(0, whole, 4):
            w, x = four_bytes(a + n) * n_rows, four_bytes(b + n) * n_rows
            y, z = four_bytes(c + n) * n_rows, four_bytes(d + n) * n_rows
            for k in range(4):
                weight = load(rows, weights, (n + k) * n_rows)
                _add_to(rows, histogram, f + ((w >> (8 * k)) & low), weight)
                _add_to(rows, histogram, g + ((x >> (8 * k)) & low), weight)
                _add_to(rows, histogram, h + ((y >> (8 * k)) & low), weight)
                _add_to(rows, histogram, i + ((z >> (8 * k)) & low), weight)
        for n in range(whole, n_tokens):
            weight = load(rows, weights, n * n_rows)
            _add_to(rows, histogram, f + byte(a + n) * n_rows, weight)
            _add_to(rows, histogram, g + byte(b + n) * n_rows, weight)
            _add_to(rows, histogram, h + byte(c + n) * n_rows, weight)
            _add_to(rows, histogram, i + byte(d + n) * n_rows, weight)
    for plane in range(n_planes // 4 * 4, n_planes):
        for n in range(n_tokens):
            at = (plane * 256 + byte(address + plane * stride + n)) * n_rows
            _add_to(rows, histogram, at, load(rows, weights, n * n_rows))


@njit(nogil=True)
def _add_to(rows, histogram, at, weight):
    store(histogram, at, add(load(rows, histogram, at), weight))


@njit(nogil=True)
def weigh_entries(rows, tables, head, scratch):
    """Histograms of weights times the tables, for every row: [quad of the head][4][row].

    Eight bins at a time, of 8 / n_rows entries: lane k is of row k % n_rows.
    """
    n_rows = len(rows)
    first_plane, first_quad = tables.plane_start[head], tables.head_quads[head]
    histogram, sums, lanes, columns = scratch.histogram, scratch.sums, scratch.lanes, tables.columns
    sums[:] = 0
    for plane in range(first_plane, tables.plane_start[head + 1]):
        bins = (plane - first_plane) * 256 * n_rows
        for quad in range(tables.plane_quads[plane], tables.plane_end[plane]):
            at, out = quad * 1024, (quad - first_quad) * 4 * n_rows
            a, b, c, d = splat(8, 0.0), splat(8, 0.0), splat(8, 0.0), splat(8, 0.0)
            for i in range(0, 256, 8 // n_rows):
                weights = load(8, histogram, bins + i * n_rows)
                a = fma(spread(rows, columns, at + i), weights, a)
                b = fma(spread(rows, columns, at + 256 + i), weights, b)
                c = fma(spread(rows, columns, at + 512 + i), weights, c)
                d = fma(spread(rows, columns, at + 768 + i), weights, d)
            store(lanes, 0, a)
            store(lanes, 8, b)
            store(lanes, 16, c)
            store(lanes, 24, d)
            for lane in range(32):
                sums[out + lane // 8 * n_rows + lane % n_rows] += lanes[lane]
