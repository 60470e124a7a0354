"""Convolutions and recurrences of one head (or block of channels) of one sequence, on the CPU.

Tokens are taken in order, in pieces of _PIECE: the inputs of a piece are brought into padded rows, then a few state
rows at a time walk through the piece. States are read from and written to their pages.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from rimuru.ops.cpu.lanes import W, dot, floats
from rimuru.ops.cpu.pointwise import copy_row, row_of, sigmoid
from rimuru.ops.cpu.recurrent_rows import ROWS, delta_rows, scan_rows, scan_rows_each

_PIECE = 64


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _softplus(z):  # type: ignore[no-untyped-def]
    """log(1 + exp(z)), formed in float64."""
    wide = np.float64(z)
    return max(wide, 0.0) + math.log1p(math.exp(-abs(wide)))


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _keep_alive(*arrays):  # type: ignore[no-untyped-def]
    """Marks a last use: Numba frees an array after it, also where an address of it is still in use."""
    return len(arrays)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def conv_item(u, weight, bias, silu, first_token, last_token, state, page_bytes, fresh, start, stop, out):  # type: ignore[no-untyped-def]
    """Channels start .. stop - 1 of one sequence. state: address of its oldest row, page_bytes to the next."""
    channels, n_taps = weight.shape
    sums = np.empty(stop - start, np.float32)
    taps = np.empty((n_taps, stop - start), np.float32)
    for tap in range(n_taps):
        for c in range(start, stop):
            taps[tap, c - start] = weight[c, tap]
    for t in range(first_token, last_token):
        sums[:] = np.float32(0.0)
        if bias.size > 0:
            copy_row(sums, bias[start:stop])
        for tap in range(n_taps):
            source = t - first_token + tap - (n_taps - 1)
            if source < 0 and fresh:
                continue
            if source < 0:
                row = carray(floats(state + (n_taps - 1 + source) * page_bytes), (channels,))
            else:
                row = row_of(u, first_token + source)
            for i in range(sums.size):
                sums[i] += taps[tap, i] * row[start + i]
        target = row_of(out, t)
        if silu:
            for i in range(sums.size):
                target[start + i] = sums[i] * sigmoid(sums[i])
        else:
            copy_row(target[start:stop], sums)
    n_tokens = last_token - first_token
    for kept in range(n_taps - 1):  # ascending: a row is overwritten after it has moved
        source = n_tokens + kept
        target = carray(floats(state + kept * page_bytes), (channels,))
        if source >= n_taps - 1:
            copy_row(target[start:stop], row_of(u, first_token + source - (n_taps - 1))[start:stop])
        elif fresh:
            target[start:stop] = np.float32(0.0)
        else:
            copy_row(target[start:stop], carray(floats(state + source * page_bytes), (channels,))[start:stop])


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _load_rows(address, n_rows, width, fresh, target):  # type: ignore[no-untyped-def]
    """State rows -> padded rows; zeros where the sequence starts here."""
    stored = carray(floats(address), (n_rows, width))
    for row in range(n_rows):
        if fresh:
            target[row, :width] = np.float32(0.0)
        else:
            copy_row(target[row], stored[row])


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _store_rows(address, n_rows, width, source):  # type: ignore[no-untyped-def]
    stored = carray(floats(address), (n_rows, width))
    for row in range(n_rows):
        copy_row(stored[row], source[row, :width])


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _unit(source, eps, scale, target):  # type: ignore[no-untyped-def]
    """target = scale * source / sqrt(sum(source^2) + eps)."""
    factor = scale / np.sqrt(dot(source.ctypes.data, source.ctypes.data, source.size) + eps)
    for i in range(source.size):
        target[i] = source[i] * factor


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def delta_head(qkv, beta, alpha, rate, dt_bias, head, key_head, n_key, dim, eps, first, last, address, fresh, out):  # type: ignore[no-untyped-def]
    """One value head of one sequence."""
    width, n_rows = (dim + W - 1) // W * W, (dim + ROWS - 1) // ROWS * ROWS
    state = np.zeros((n_rows, width), np.float32)
    queries, keys = np.zeros((_PIECE, width), np.float32), np.zeros((_PIECE, width), np.float32)
    values, results = np.zeros((_PIECE, n_rows), np.float32), np.empty((_PIECE, n_rows), np.float32)
    decay, gain = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.float32)
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    _load_rows(address, dim, dim, fresh, state)
    for start in range(first, last, _PIECE):
        count = min(_PIECE, last - start)
        for i in range(count):
            row = row_of(qkv, start + i)
            _unit(row[key_head * dim : (key_head + 1) * dim], eps, scale, queries[i])
            _unit(row[(n_key + key_head) * dim : (n_key + key_head + 1) * dim], eps, np.float32(1.0), keys[i])
            copy_row(values[i], row[(2 * n_key + head) * dim : (2 * n_key + head + 1) * dim])
            decay[i] = math.exp(rate * _softplus(np.float64(alpha[start + i, head]) + dt_bias))
            gain[i] = sigmoid(beta[start + i, head])
        for row in range(0, n_rows, ROWS):
            place = state.ctypes.data + row * width * 4
            for i in range(count):
                delta_rows(
                    place, keys.ctypes.data + i * width * 4, queries.ctypes.data + i * width * 4,
                    values.ctypes.data + (i * n_rows + row) * 4, decay[i], gain[i],
                    results.ctypes.data + (i * n_rows + row) * 4, width,
                )  # fmt: skip
        for i in range(count):
            copy_row(row_of(out, start + i)[head * dim :], results[i, :dim])
    _store_rows(address, dim, dim, state)
    _keep_alive(queries, keys, values, decay, gain)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def mamba2_head(xbc, dt, rate, skip, dt_bias, head, n_heads, n_groups, dim, size, first, last, address, fresh, out):  # type: ignore[no-untyped-def]
    """One head of one sequence."""
    inner, group = n_heads * dim, head // (n_heads // n_groups)
    width, n_rows = (size + W - 1) // W * W, (dim + ROWS - 1) // ROWS * ROWS
    state = np.zeros((n_rows, width), np.float32)
    b_rows, c_rows = np.zeros((_PIECE, width), np.float32), np.zeros((_PIECE, width), np.float32)
    gains, results = np.zeros((_PIECE, n_rows), np.float32), np.empty((_PIECE, n_rows), np.float32)
    decay = np.empty(_PIECE, np.float32)
    _load_rows(address, dim, size, fresh, state)
    for start in range(first, last, _PIECE):
        count = min(_PIECE, last - start)
        for i in range(count):
            row = row_of(xbc, start + i)
            step = _softplus(np.float64(dt[start + i, head]) + dt_bias)
            decay[i] = math.exp(rate * step)
            copy_row(b_rows[i], row[inner + group * size : inner + (group + 1) * size])
            copy_row(c_rows[i], row[inner + (n_groups + group) * size : inner + (n_groups + group + 1) * size])
            for j in range(dim):
                gains[i, j] = np.float32(step) * row[head * dim + j]
        for row_start in range(0, n_rows, ROWS):
            place = state.ctypes.data + row_start * width * 4
            for i in range(count):
                scan_rows(
                    place, b_rows.ctypes.data + i * width * 4, c_rows.ctypes.data + i * width * 4,
                    gains.ctypes.data + (i * n_rows + row_start) * 4, decay[i],
                    results.ctypes.data + (i * n_rows + row_start) * 4, width,
                )  # fmt: skip
        for i in range(count):
            source, target = row_of(xbc, start + i), row_of(out, start + i)
            for j in range(dim):
                target[head * dim + j] = results[i, j] + skip * source[head * dim + j]
    _store_rows(address, dim, size, state)
    _keep_alive(b_rows, c_rows, gains, results, decay)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def mamba1_block(x, dt, b, c, a, d, start_channel, stop_channel, first, last, address, fresh, out):  # type: ignore[no-untyped-def]
    """Channels start_channel .. stop_channel - 1 of one sequence. address: of the first of their state rows."""
    size, count_channels = a.shape[1], stop_channel - start_channel
    width, n_rows = (size + W - 1) // W * W, (count_channels + ROWS - 1) // ROWS * ROWS
    state, rates = np.zeros((n_rows, width), np.float32), np.zeros((n_rows, width), np.float32)
    b_rows, c_rows = np.zeros((_PIECE, width), np.float32), np.zeros((_PIECE, width), np.float32)
    steps, gains = np.zeros((_PIECE, n_rows), np.float32), np.zeros((_PIECE, n_rows), np.float32)
    results = np.empty((_PIECE, n_rows), np.float32)
    _load_rows(address, count_channels, size, fresh, state)
    for channel in range(start_channel, stop_channel):
        copy_row(rates[channel - start_channel], a[channel, :size])
    for start in range(first, last, _PIECE):
        count = min(_PIECE, last - start)
        for i in range(count):
            copy_row(b_rows[i], b[start + i, :size])
            copy_row(c_rows[i], c[start + i, :size])
            for j in range(count_channels):
                step = np.float32(_softplus(dt[start + i, start_channel + j]))
                steps[i, j] = step
                gains[i, j] = step * x[start + i, start_channel + j]
        for row in range(0, n_rows, ROWS):
            place = row * width * 4
            for i in range(count):
                at = (i * n_rows + row) * 4
                scan_rows_each(
                    state.ctypes.data + place, rates.ctypes.data + place, b_rows.ctypes.data + i * width * 4,
                    c_rows.ctypes.data + i * width * 4, steps.ctypes.data + at, gains.ctypes.data + at,
                    results.ctypes.data + at, width,
                )  # fmt: skip
        for i in range(count):
            for j in range(count_channels):
                channel = start_channel + j
                out[start + i, channel] = results[i, j] + d[channel] * x[start + i, channel]
    _store_rows(address, count_channels, size, state)
    _keep_alive(rates, b_rows, c_rows, steps, gains, results)
