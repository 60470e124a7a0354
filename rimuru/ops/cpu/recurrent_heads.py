"""Convolutions and recurrences of one head (or block of channels) of one sequence, on the CPU.

Tokens are taken in order, in pieces of _PIECE: the inputs of a piece are brought into padded rows, then a few state
rows at a time walk through the piece. States are read from and written to their pages.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from rimuru.ops.cpu.lanes import W, dot, exp, floats, fma
from rimuru.ops.cpu.pointwise import copy_row, row_of, sigmoid
from rimuru.ops.cpu.recurrent_rows import ROWS, delta_rows, scan_rows, scan_rows_each

_PIECE = 64


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _softplus(z):  # type: ignore[no-untyped-def]
    """log(1 + exp(z)), formed in float64."""
    wide = np.float64(z)
    return max(wide, 0.0) + math.log1p(math.exp(-abs(wide)))


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _softplus_fast(z):  # type: ignore[no-untyped-def]
    """log(1 + exp(z)) of a float32; loops over it become vector code.

    With u = exp(-|z|) in (0, 1]: log(1 + u) = 2 artanh(s), s = u / (2 + u) <= 1/3, whose series ends with s^15.
    """
    small = exp(-abs(z))
    s = small / (small + np.float32(2.0))
    square = s * s
    series = np.float32(1.0 / 15.0)
    series = fma(series, square, np.float32(1.0 / 13.0))
    series = fma(series, square, np.float32(1.0 / 11.0))
    series = fma(series, square, np.float32(1.0 / 9.0))
    series = fma(series, square, np.float32(1.0 / 7.0))
    series = fma(series, square, np.float32(1.0 / 5.0))
    series = fma(series, square, np.float32(1.0 / 3.0))
    series = fma(series, square, np.float32(1.0))
    return max(z, np.float32(0.0)) + np.float32(2.0) * s * series


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _keep_alive(*arrays):  # type: ignore[no-untyped-def]
    """Marks a last use: Numba frees an array after it, also where an address of it is still in use."""
    return len(arrays)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _add_product(target, a, b):  # type: ignore[no-untyped-def]
    """target[i] += a[i] * b[i]."""
    for i in range(target.size):
        target[i] += a[i] * b[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _scale_row(target, factor, source):  # type: ignore[no-untyped-def]
    """target[i] = factor * source[i] for all of source."""
    for i in range(source.size):
        target[i] = factor * source[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _add_scaled(target, values, factor, source):  # type: ignore[no-untyped-def]
    """target[i] = values[i] + factor * source[i] for all of source."""
    for i in range(source.size):
        target[i] = values[i] + factor * source[i]


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
            # Slices, because an index with an offset is compiled as possibly negative, and then not as a vector.
            _add_product(sums, taps[tap], row[start:stop])
        target = row_of(out, t)[start:stop]
        if silu:
            for i in range(sums.size):
                target[i] = sums[i] * sigmoid(sums[i])
        else:
            copy_row(target, sums)
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
def _padded_state(n_rows, width):  # type: ignore[no-untyped-def]
    """Padded rows for a state whose own are no whole vectors, or nothing: then it is updated where it lies."""
    if width % W == 0 and n_rows % ROWS == 0:
        return np.zeros((0, width), np.float32)
    return np.zeros(((n_rows + ROWS - 1) // ROWS * ROWS, (width + W - 1) // W * W), np.float32)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _open_state(address, n_rows, width, fresh, padded):  # type: ignore[no-untyped-def]
    """Address of the rows to work on; they are zero where the sequence starts here."""
    stored = carray(floats(address), (n_rows, width))
    if padded.size == 0:
        if fresh:
            stored[:] = np.float32(0.0)
        return np.int64(address)
    if not fresh:
        for row in range(n_rows):
            copy_row(padded[row], stored[row])
    return np.int64(padded.ctypes.data)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _close_state(address, n_rows, width, padded):  # type: ignore[no-untyped-def]
    if padded.size > 0:
        stored = carray(floats(address), (n_rows, width))
        for row in range(n_rows):
            copy_row(stored[row], padded[row, :width])


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
    padded = _padded_state(dim, dim)
    queries, keys = np.zeros((_PIECE, width), np.float32), np.zeros((_PIECE, width), np.float32)
    values, results = np.zeros((_PIECE, n_rows), np.float32), np.empty((_PIECE, n_rows), np.float32)
    decay, gain = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.float32)
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    state = _open_state(address, dim, dim, fresh, padded)
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
            place = state + row * width * 4
            for i in range(count):
                delta_rows(
                    place, keys.ctypes.data + i * width * 4, queries.ctypes.data + i * width * 4,
                    values.ctypes.data + (i * n_rows + row) * 4, decay[i], gain[i],
                    results.ctypes.data + (i * n_rows + row) * 4, width,
                )  # fmt: skip
        for i in range(count):
            copy_row(row_of(out, start + i)[head * dim :], results[i, :dim])
    _close_state(address, dim, dim, padded)
    _keep_alive(queries, keys, values, decay, gain)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def mamba2_head(xbc, dt, rate, skip, dt_bias, head, n_heads, n_groups, dim, size, first, last, address, fresh, out):  # type: ignore[no-untyped-def]
    """One head of one sequence."""
    inner, group = n_heads * dim, head // (n_heads // n_groups)
    width, n_rows = (size + W - 1) // W * W, (dim + ROWS - 1) // ROWS * ROWS
    padded = _padded_state(dim, size)
    b_rows, c_rows = np.zeros((_PIECE, width), np.float32), np.zeros((_PIECE, width), np.float32)
    gains, results = np.zeros((_PIECE, n_rows), np.float32), np.empty((_PIECE, n_rows), np.float32)
    decay = np.empty(_PIECE, np.float32)
    state = _open_state(address, dim, size, fresh, padded)
    for start in range(first, last, _PIECE):
        count = min(_PIECE, last - start)
        for i in range(count):
            row = row_of(xbc, start + i)
            step = _softplus(np.float64(dt[start + i, head]) + dt_bias)
            decay[i] = math.exp(rate * step)
            copy_row(b_rows[i], row[inner + group * size : inner + (group + 1) * size])
            copy_row(c_rows[i], row[inner + (n_groups + group) * size : inner + (n_groups + group + 1) * size])
            _scale_row(gains[i], np.float32(step), row[head * dim : (head + 1) * dim])
        for row_start in range(0, n_rows, ROWS):
            place = state + row_start * width * 4
            for i in range(count):
                scan_rows(
                    place, b_rows.ctypes.data + i * width * 4, c_rows.ctypes.data + i * width * 4,
                    gains.ctypes.data + (i * n_rows + row_start) * 4, decay[i],
                    results.ctypes.data + (i * n_rows + row_start) * 4, width,
                )  # fmt: skip
        for i in range(count):
            source = row_of(xbc, start + i)[head * dim : (head + 1) * dim]
            _add_scaled(row_of(out, start + i)[head * dim :], results[i], skip, source)
    _close_state(address, dim, size, padded)
    _keep_alive(b_rows, c_rows, gains, results, decay)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def mamba1_block(x, dt, b, c, a, d, start_channel, stop_channel, first, last, address, fresh, out):  # type: ignore[no-untyped-def]
    """Channels start_channel .. stop_channel - 1 of one sequence. address: of the first of their state rows."""
    size, count_channels = a.shape[1], stop_channel - start_channel
    width, n_rows = (size + W - 1) // W * W, (count_channels + ROWS - 1) // ROWS * ROWS
    padded, rates = _padded_state(count_channels, size), np.zeros((n_rows, width), np.float32)
    b_rows, c_rows = np.zeros((_PIECE, width), np.float32), np.zeros((_PIECE, width), np.float32)
    steps, gains = np.zeros((_PIECE, n_rows), np.float32), np.zeros((_PIECE, n_rows), np.float32)
    results = np.empty((_PIECE, n_rows), np.float32)
    state = _open_state(address, count_channels, size, fresh, padded)
    skips = d[start_channel:stop_channel]
    for channel in range(start_channel, stop_channel):
        copy_row(rates[channel - start_channel], a[channel, :size])
    for start in range(first, last, _PIECE):
        count = min(_PIECE, last - start)
        for i in range(count):
            copy_row(b_rows[i], b[start + i, :size])
            copy_row(c_rows[i], c[start + i, :size])
            raw = row_of(dt, start + i)[start_channel:stop_channel]
            inputs = row_of(x, start + i)[start_channel:stop_channel]
            for j in range(count_channels):
                steps[i, j] = _softplus_fast(raw[j])
                gains[i, j] = steps[i, j] * inputs[j]
        for row in range(0, n_rows, ROWS):
            place = row * width * 4
            for i in range(count):
                at = (i * n_rows + row) * 4
                scan_rows_each(
                    state + place, rates.ctypes.data + place, b_rows.ctypes.data + i * width * 4,
                    c_rows.ctypes.data + i * width * 4, steps.ctypes.data + at, gains.ctypes.data + at,
                    results.ctypes.data + at, width,
                )  # fmt: skip
        for i in range(count):
            target, inputs = row_of(out, start + i)[start_channel:], row_of(x, start + i)[start_channel:]
            for j in range(count_channels):
                target[j] = results[i, j] + skips[j] * inputs[j]
    _close_state(address, count_channels, size, padded)
    _keep_alive(rates, b_rows, c_rows, steps, gains, results)
