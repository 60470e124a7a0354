"""Ctrl-C in the middle of anything: the exception comes, and the LLM answers correctly afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from script_model import write_script_model

from rimuru.base.shield import Shield

INTERRUPTED = """
import faulthandler, os, random, signal, sys, threading
from rimuru import LLM, SamplingParams as SP

faulthandler.dump_traceback_later(100, exit=True)
chance = random.Random(int(sys.argv[2]))
endless, short = SP(max_tokens=400, temperature=0), SP(max_tokens=40, temperature=0)
llm = LLM(sys.argv[1], memory="64MiB", threads=3)
llm.generate("0", short)
ways = (
    lambda: llm.generate("0", endless),
    lambda: [piece for piece in llm.stream("0", endless)],
    lambda: llm.generate(["0", "0", "0" * 300], endless),
    lambda: llm.logits(list(range(200))),
)
n = 0
for i in range(40):
    try:
        threading.Timer(chance.uniform(0.0, 0.1), os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            ways[i % len(ways)]()
    except KeyboardInterrupt:
        n += 1
    assert llm.generate("!", short)[0].text == "鬱abcdefghijklmnopqrstuvwxyz", i
    report = llm.memory()
    assert report["requests"] == [], (i, report["requests"])
    llm.loaded.engine.audit()
print(n, "interrupts")
"""

LAUNCHES = """
import faulthandler, os, random, signal, threading
import numpy as np
from numba import cfunc
from rimuru.ops.cpu import simd_launch
from rimuru.ops.cpu.simd_calls import WORKER_SIGNATURE, fetch_add, pause

faulthandler.dump_traceback_later(100, exit=True)
simd_launch.set_threads(3)

@cfunc(WORKER_SIGNATURE)
def take_all(context, index):
    while True:
        chunk = fetch_add(context, 1)
        if chunk >= 40:
            return
        for _ in range(50):
            pause()
        fetch_add(context + 8, chunk)

def launched():
    context = np.zeros(2, np.int64)
    simd_launch.launch(take_all.address, simd_launch.address_of(context))
    return context

launched()
chance, n = random.Random(7), 0
for i in range(60):
    try:
        threading.Timer(chance.uniform(0.0, 0.02), os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            assert launched()[1] == 780
    except KeyboardInterrupt:
        n += 1
    pool = simd_launch._pool
    assert pool.memory[simd_launch._STATE] == 0 and not pool.lock.locked(), i
print(n, "interrupts")
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_an_llm_that_was_interrupted_answers_correctly(tmp_path: Path, seed: int) -> None:
    model = write_script_model(tmp_path / "script.gguf")
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(model), str(seed)], capture_output=True, text=True, timeout=200
    )
    assert (ended.returncode, ended.stdout) == (0, "40 interrupts\n"), ended.stderr[-3000:]


def test_what_runs_behind_the_shield_is_finished_and_the_order_holds() -> None:
    """An interrupt ends the waiting only; the next call comes after what the one before it began."""
    import _thread
    import time

    shield, done = Shield(), []

    def work() -> None:
        done.append("begun")
        _thread.interrupt_main()
        time.sleep(0.1)
        done.append("ended")

    with pytest.raises(KeyboardInterrupt):
        shield.call(work)
    assert shield.call(lambda: list(done)) == ["begun", "ended"]
    with pytest.raises(ZeroDivisionError):
        shield.call(lambda: 1 // 0)
    assert shield.call(max, 3, 5) == 5
    shield.close()
    assert shield.call(max, 3, 5) == 5
    shield.close()


def test_a_launch_is_over_when_an_interrupt_comes_out_of_it() -> None:
    """Kernels under a hail of signals, without a shield: after each, none is open and no thread is inside."""
    ended = subprocess.run([sys.executable, "-c", LAUNCHES], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "60 interrupts\n"), ended.stderr[-3000:]
