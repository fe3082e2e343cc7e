"""Scores of attention from bytes on a CPU where a block is too short to fold its tables with the query.

Two quads of entries make a vector of eight, which meets q′ in registers, eight sums at a time. Three rows lie in four
lanes; for them four tokens at a time keep twelve sums, none of a row that is not there, and read four bytes as a word.
"""

from numba import njit

from karhunen.kernels.simd import byte, entry_pair, fma, four_bytes, load, splat, store, sums_of_eight


@njit(nogil=True)
def score_direct(rows, problem, keys, batch, head, first_row, block, start, stop, scores, out):
    """Scores of tokens start … stop, the rows of each side by side."""
    n_rows = len(rows)
    n_live = min(n_rows, problem.q - first_row)
    done = 0
    if n_live == 3 and n_rows == 4:
        done = _three_rows(problem, keys, batch, head, first_row, block, start, stop, scores, out)
    if start + done < stop:
        _any_rows(rows, problem, keys, batch, head, first_row, block, start + done, stop, scores, out + done * n_rows)


@njit(nogil=True)
def _three_rows(problem, keys, batch, head, first_row, block, start, stop, scores, out):
    """Four tokens at a time, whose fourth row repeats the third; how many are done."""
    left, n_pairs, codes = _keys_of(keys, batch, head, start)
    plane, entries, query = keys.tables.quad_plane, keys.tables.narrow, problem.q_frames
    frame_x = frame_of(problem, batch, head, first_row, block)
    frame_y = frame_of(problem, batch, head, first_row + 1, block)
    frame_z = frame_of(problem, batch, head, first_row + 2, block)
    n_done = (stop - start) // 4 * 4
    for n in range(0, n_done, 4):
        zero = splat(8, 0.0)
        ax, ay, az, bx, by, bz = zero, zero, zero, zero, zero, zero
        cx, cy, cz, dx, dy, dz = zero, zero, zero, zero, zero, zero
        for pair in range(n_pairs):
            i = (left + 2 * pair) * 1024
            f = four_bytes(codes + n + plane[left + 2 * pair] * keys.plane_stride)
            g = four_bytes(codes + n + plane[left + 2 * pair + 1] * keys.plane_stride)
            x, y, z = (
                load(8, query, frame_x + 8 * pair),
                load(8, query, frame_y + 8 * pair),
                load(8, query, frame_z + 8 * pair),
            )
            e = _entries(entries, i, f, g, 0)
            ax, ay, az = fma(e, x, ax), fma(e, y, ay), fma(e, z, az)
            e = _entries(entries, i, f, g, 8)
            bx, by, bz = fma(e, x, bx), fma(e, y, by), fma(e, z, bz)
            e = _entries(entries, i, f, g, 16)
            cx, cy, cz = fma(e, x, cx), fma(e, y, cy), fma(e, z, cz)
            e = _entries(entries, i, f, g, 24)
            dx, dy, dz = fma(e, x, dx), fma(e, y, dy), fma(e, z, dz)
        store(scores, out + 4 * n, sums_of_eight(ax, ay, az, az, bx, by, bz, bz))
        store(scores, out + 4 * n + 8, sums_of_eight(cx, cy, cz, cz, dx, dy, dz, dz))
    return n_done


@njit(nogil=True)
def _any_rows(rows, problem, keys, batch, head, first_row, block, start, stop, scores, out):
    """Eight (token, row) sums at once: sum i is of token i // n_rows and row i % n_rows.

    Loads that are equal become one. Past the last token it is read again.
    """
    n_rows = len(rows)
    left, n_pairs, codes = _keys_of(keys, batch, head, start)
    plane, entries = keys.tables.quad_plane, keys.tables.narrow
    last = stop - start - 1
    query = problem.q_frames
    frame_s = frame_of(problem, batch, head, first_row, block)
    frame_t = frame_of(problem, batch, head, first_row + 1 % n_rows, block)
    frame_u = frame_of(problem, batch, head, first_row + 2 % n_rows, block)
    frame_v = frame_of(problem, batch, head, first_row + 3 % n_rows, block)
    frame_w = frame_of(problem, batch, head, first_row + 4 % n_rows, block)
    frame_x = frame_of(problem, batch, head, first_row + 5 % n_rows, block)
    frame_y = frame_of(problem, batch, head, first_row + 6 % n_rows, block)
    frame_z = frame_of(problem, batch, head, first_row + 7 % n_rows, block)
    for n in range(0, last + 1, 8 // n_rows):
        a, b = codes + n, codes + min(n + 1 // n_rows, last)
        c, d = codes + min(n + 2 // n_rows, last), codes + min(n + 3 // n_rows, last)
        e, f = codes + min(n + 4 // n_rows, last), codes + min(n + 5 // n_rows, last)
        g, h = codes + min(n + 6 // n_rows, last), codes + min(n + 7 // n_rows, last)
        zero = splat(8, 0.0)
        s, t, u, v, w, x, y, z = zero, zero, zero, zero, zero, zero, zero, zero
        for pair in range(n_pairs):
            i = (left + 2 * pair) * 1024
            p = plane[left + 2 * pair] * keys.plane_stride
            q = plane[left + 2 * pair + 1] * keys.plane_stride
            at = 8 * pair
            s = fma(_entries(entries, i, byte(a + p), byte(a + q), 0), load(8, query, frame_s + at), s)
            t = fma(_entries(entries, i, byte(b + p), byte(b + q), 0), load(8, query, frame_t + at), t)
            u = fma(_entries(entries, i, byte(c + p), byte(c + q), 0), load(8, query, frame_u + at), u)
            v = fma(_entries(entries, i, byte(d + p), byte(d + q), 0), load(8, query, frame_v + at), v)
            w = fma(_entries(entries, i, byte(e + p), byte(e + q), 0), load(8, query, frame_w + at), w)
            x = fma(_entries(entries, i, byte(f + p), byte(f + q), 0), load(8, query, frame_x + at), x)
            y = fma(_entries(entries, i, byte(g + p), byte(g + q), 0), load(8, query, frame_y + at), y)
            z = fma(_entries(entries, i, byte(h + p), byte(h + q), 0), load(8, query, frame_z + at), z)
        store(scores, out + n * n_rows, sums_of_eight(s, t, u, v, w, x, y, z))


@njit(nogil=True)
def _keys_of(keys, batch, head, start):
    """The first quad of a head, its pairs of quads, and where the first byte of token `start` lies."""
    left = keys.tables.head_quads[head]
    n_pairs = (keys.tables.head_quads[head + 1] - left) // 2
    return left, n_pairs, keys.codes + batch * keys.batch_stride + start


@njit(nogil=True)
def _entries(entries, i, a, b, shift):
    """Of two neighbouring quads from entry `i` on, at the bytes of `a` and `b` from bit `shift` on."""
    return entry_pair(entries, i + 4 * ((a >> shift) & 255), i + 1024 + 4 * ((b >> shift) & 255))


@njit(nogil=True)
def frame_of(problem, batch, head, row, block):
    """Where the q′ of a row begins; rows past the last repeat it."""
    row = (batch * problem.h + head) * problem.q + min(row, problem.q - 1)
    return (row * problem.n + block) * problem.q_frame_stride
