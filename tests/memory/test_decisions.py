"""Records of decisions and of fills: what is kept, what is counted, and what they say."""

from __future__ import annotations

from rimuru.memory.decisions import IS_FORETOLD, DecisionLog, FillLog, Record
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout


def test_decisions_are_kept_in_a_ring_and_counted() -> None:
    log = DecisionLog(4)
    for step in range(10):
        log.add(Record(step, "shrink" if step % 2 else "expand", "because", 1, step, 3, 300))
    assert len(log) == 4 and [record.step for record in log.records(2)] == [8, 9]
    assert log.counts == {"shrink": 5, "expand": 5, "refuse": 0, "move": 0, "fill": 0} and log.n == 10
    snapshot = log.snapshot(1)
    assert snapshot["last"] == [
        {"step": 9, "action": "shrink", "reason": "because", "layer": 1, "expert": 9, "pages": 3, "bytes": 300}
    ]


def test_fills_crowd_out_no_decision_and_become_records_when_asked() -> None:
    layout = ExpertLayout(64, (ExpertLayerLayout(0, 6, 2, ()), ExpertLayerLayout(2, 4, 3, ())))
    log = DecisionLog(4)
    log.fills = fills = FillLog(layout, n_kept=4)
    log.add(Record(1, "shrink", "because", 1, 0, 3, 300))
    for step in range(9):
        fills.add(step, step % 2, step % 4, victim=-1 if step == 7 else 3)
    assert [record.action for record in log.records()] == ["shrink"] and log.n == 1
    assert log.counts == {"shrink": 1, "expand": 0, "refuse": 0, "move": 0, "fill": 9}
    assert [record.step for record in fills.records(100)] == [5, 6, 7, 8] and fills.per_layer.tolist() == [5, 4]
    assert fills.records(0) == [] and FillLog().records(3) == []
    fills.n_lost, fills.rows[8 % 4, IS_FORETOLD] = 6, 1
    snapshot = log.snapshot(2)
    assert snapshot["counts"]["fill"] == 15
    assert snapshot["fills"]["unrecorded"] == 6 and snapshot["fills"]["foretold"] == 0
    where = {"step": 7, "action": "fill", "layer": 2, "expert": 3, "pages": 3, "bytes": 192}
    assert snapshot["fills"]["last"][0] == {**where, "reason": "missed, into an empty place"}
    where = {"step": 8, "action": "fill", "layer": 0, "expert": 0, "pages": 2, "bytes": 128}
    assert snapshot["fills"]["last"][1] == {**where, "reason": "foretold, in place of expert 3"}
