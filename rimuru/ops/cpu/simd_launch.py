"""Running compiled kernels on several cores.

A *worker* is a Numba C function `worker(context, index)`; `context` is the address of an int64 array that holds all its
arguments. Workers take chunks of work from the counter in context[0] until none is left, so results do not depend on
who did what, and a launch is over when the work is: a core that is busy with something else is not waited for.

That is why this is no `prange`: its barrier waits for every thread, and on a machine with other programs each launch
then takes a scheduler's time slice. The threads here spin for a fraction of a millisecond after a launch, then sleep.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.core import config as _numba_config

from rimuru.ops.cpu.simd_calls import call, exchange, fetch_add, i64_at, load_atomic, pause

numba_config: Any = _numba_config  # its names are made at run time
_OPEN = 1 << 32
_SPINS = 20_000
"""About 0.3 ms of waiting before a thread sleeps: longer than the pause between two launches of a decode step."""
_LINE = 8  # int64s of a cache line
_STATE, _GENERATION, _PARKED = 0, 1 * _LINE, 3 * _LINE  # a line of their own each; _PARKED one per thread
_WORKER, _CONTEXT, _USABLE = 2 * _LINE, 2 * _LINE + 1, 2 * _LINE + 2

_I64 = types.int64
_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
"""Number of Linux's system call for sleeping on a word of memory: compiled code needs no lock of Python's for it."""
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE, both private to this process; the word is the int64's low half
_syscall: Any = types.ExternalFunction("syscall", _I64(_I64, _I64, _I64, _I64, _I64))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@njit(types.void(_I64, _I64, _I64, _I64), cache=True, nogil=True, fastmath=False)
def _launch(pool: int, worker: int, context: int, n_threads: int) -> None:
    """Announce work, wake who sleeps, take part, and wait until nobody is at work.

    One call, because a signal (Ctrl-C) can raise an exception between any two steps of Python code: then threads would
    still write to arrays that their owner has freed, or a launch would stay open for ever.
    """
    p = i64_at(pool, (3 + n_threads) * _LINE)
    p[_WORKER] = worker
    p[_CONTEXT] = context
    fetch_add(pool + _GENERATION * 8, 1)
    fetch_add(pool + _STATE * 8, _OPEN)
    for i in range(1, p[_USABLE]):
        parked = pool + (_PARKED + i * _LINE) * 8
        if load_atomic(parked) == 1 and exchange(parked, 0) == 1:
            _syscall(_FUTEX, parked, _WAKE, 1, 0)
    call(worker, (context, 0))
    inside = fetch_add(pool + _STATE * 8, -_OPEN) - _OPEN
    n = 0
    while inside != 0:
        pause()
        n += 1
        if n > _SPINS:
            _sched_yield()
        inside = load_atomic(pool + _STATE * 8)


@njit(types.void(_I64, _I64), cache=True, nogil=True, fastmath=False)
def _run_here(worker: int, context: int) -> None:
    call(worker, (context, 0))


@njit(types.void(_I64, _I64), cache=True, nogil=True, fastmath=False)
def _serve(pool: int, index: int) -> None:
    """Take part in launches for ever: spin for some time after one, then sleep until the next."""
    state, generation, parked = pool + _STATE * 8, pool + _GENERATION * 8, pool + (_PARKED + index * _LINE) * 8
    served, idle = 0, 0
    while True:
        if idle >= _SPINS:
            idle = 0
            # whoever turns the flag back to 0 first decides that this thread is awake
            exchange(parked, 1)
            if load_atomic(state) < _OPEN or load_atomic(generation) == served or exchange(parked, 0) == 0:
                while load_atomic(parked) == 1:
                    _syscall(_FUTEX, parked, _WAIT, 1, 0)
        if load_atomic(generation) == served or load_atomic(state) < _OPEN:
            pause()
            idle += 1
            continue
        if fetch_add(state, 1) >= _OPEN:
            # inside: the launch cannot end, so its description cannot change
            served = load_atomic(generation)
            p = i64_at(pool, 3 * _LINE)
            if index < p[_USABLE]:
                call(p[_WORKER], (p[_CONTEXT], index))
                idle = 0
        fetch_add(state, -1)
        idle += 1


class _Pool:
    """Threads that wait for launches. Thread 0 is the caller's."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self.usable = n_threads
        self.pid = os.getpid()
        self.memory = aligned_empty((3 + n_threads) * _LINE * 8).view(np.int64)
        self.memory[:] = 0
        self.memory[_USABLE] = n_threads
        self.address = address_of(self.memory)
        self.lock = threading.Lock()
        for i in range(1, n_threads):
            threading.Thread(target=self._thread, args=(i,), name=f"rimuru-cpu-{i}", daemon=True).start()

    def _thread(self, i: int) -> None:
        _serve(self.address, i)  # `self` keeps the memory for as long as the thread is there

    def launch(self, worker: int, context: int) -> None:
        with self.lock:
            _launch(self.address, worker, context, self.n_threads)


_pool: _Pool | None = None
_threads = numba_config.NUMBA_NUM_THREADS
_pool_lock = threading.Lock()


def set_threads(n: int) -> None:
    """Cores to use from now on, at least 1."""
    global _threads
    _threads = max(1, n)
    numba.set_num_threads(min(_threads, numba_config.NUMBA_NUM_THREADS))


def threads() -> int:
    """Cores in use."""
    return _threads


def _current_pool() -> _Pool:
    global _pool
    pool = _pool
    if pool is None or pool.n_threads < _threads or pool.pid != os.getpid():
        with _pool_lock:
            pool = _pool = _Pool(_threads)
    if pool.usable != _threads:
        with pool.lock:
            pool.usable = _threads
            pool.memory[_USABLE] = _threads
    return pool


def launch(worker: int, context: int, parallel: bool = True) -> None:
    """Run a worker on all cores, or in this thread where the work is not worth sharing (a few microseconds)."""
    if parallel and _threads > 1:
        _current_pool().launch(worker, context)
    else:
        _run_here(worker, context)


_word_at = ctypes.c_int64.from_address
_DATA_AT = object.__basicsize__  # NumPy's C interface: an array object is a header, then the pointer to its data


def _address_by_layout(array: np.ndarray) -> int:
    return _word_at(id(array) + _DATA_AT).value


def _address_by_attribute(array: np.ndarray) -> int:
    return array.ctypes.data


def _layout_holds() -> bool:
    sample = np.arange(12.0).reshape(3, 4)[1:, 2:]
    return type(sample) is np.ndarray and _address_by_layout(sample) == _address_by_attribute(sample)


address_of: Callable[[np.ndarray], int] = _address_by_layout if _layout_holds() else _address_by_attribute
"""Address of an array's first element. The attribute takes microseconds, and a decode step asks for hundreds."""


CONTEXT_FIELDS = 4096
"""Numbers that a launch may hand to its workers."""


def aligned_empty(n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] that starts on a cache line."""
    raw = np.empty(n_bytes + 64, np.uint8)
    start = -address_of(raw) % 64
    return raw[start : start + n_bytes]


class Workspace:
    """Memory of the workers of one kind of kernel, grown on demand and kept.

    One per calling thread (`workspace`), so that two threads that run kernels never share it.
    """

    def __init__(self) -> None:
        self.context = np.zeros(CONTEXT_FIELDS, np.int64)
        self.context_f64 = self.context.view(np.float64)
        self.context_address = address_of(self.context)
        self.scratch = aligned_empty(0)
        self.scratch_address = 0

    def reserve(self, n_bytes_per_worker: int) -> int:
        """Address of n_bytes_per_worker bytes for each of the cores in use."""
        n_bytes = n_bytes_per_worker * threads()
        if self.scratch.nbytes < n_bytes:
            self.scratch = aligned_empty(n_bytes)
            self.scratch[:] = 0
            self.scratch_address = address_of(self.scratch)
        return self.scratch_address


_local = threading.local()


def workspace() -> Workspace:
    """The calling thread's workspace."""
    found = getattr(_local, "workspace", None)
    if found is None:
        found = _local.workspace = Workspace()
    return found
