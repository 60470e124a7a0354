"""A hostile template ends with one line, soon, and without filling the memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from rimuru.base.errors import BadInputError
from rimuru.text import sandbox
from rimuru.text.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate
from rimuru.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]
DOUBLING = "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = OP %}{% endfor %}{{ ns.s }}"
BOMBS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in range(9) recursive %}{{ loop([1, 2, 3]) if loop.depth < 100 }}{% endfor %}",
    "macro without end": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "long range": "{{ range(100001) | list }}",
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat list": "{{ (range(100000) | list) * 1000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "doubling +": DOUBLING.replace("OP", "ns.s + ns.s"),
    "doubling ~": DOUBLING.replace("OP", "ns.s ~ ns.s"),
    "doubling join": DOUBLING.replace("OP", "[ns.s, ns.s] | join"),
    "doubling format": DOUBLING.replace("OP", "'%s%s' % (ns.s, ns.s)"),
    "shared list": "{% set b = 'x' * 1000000 %}{{ [b] * 100000 }}",
    "shared list as json": "{% set b = 'x' * 1000000 %}{{ ([b] * 100000) | tojson }}",
    "shared list as text": "{% set b = 'x' * 1000000 %}{{ (([b] * 100000) ~ '') | length }}",
    "nested lists": DOUBLING.replace("OP", "[ns.s, ns.s]"),
    "list in itself": "{% set a = [] %}{% for i in range(4999) %}{% set _ = a.append(a) %}{% endfor %}{{ a }}",
    "appending": "{% set a = [] %}{% for i in range(99999) %}{% set _ = a.append(i) %}{% endfor %}{{ a }}",
    "doubling append": "{% set a = ['x'] %}{% for i in range(60) %}{% set b = [a] %}{% set _ = a.append([a, b]) %}"
    "{% endfor %}{{ a ~ '' }}",
    "same value formatted": "{% set b = 'x' * 1000000 %}{{ ('{0}' * 10000).format(b) }}",
    "replace": "{% set b = 'x' * 1000000 %}{{ b.replace('x', b) }}",
    "replace filter": "{% set b = 'x' * 1000000 %}{{ b | replace('x', b) }}",
    "join": "{% set b = 'x' * 1000000 %}{{ ([b] * 100000) | join }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "indent": "{{ 'x\ny' | indent(10000000000) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "star width": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "ljust": "{{ 'x'.ljust(99999999999) }}",
    "fixed text": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "text in a block": "{% set x %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}{{ x }}",
    "block": "{% set b = 'x' * 1000000 %}{% set x %}{% for i in range(999) %}{{ b }}{% endfor %}{% endset %}",
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "source": "x" * (MAX_SOURCE_CHARACTERS + 1),
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_stopped(small_bpe: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_ROUNDS", 5_000)
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 2 << 20)
    template = ChatTemplate(small_bpe, {"default": BOMBS[name]})
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(BadInputError) as caught:
            template.render(USER)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.perf_counter() - start < 6.0
    assert peak_bytes < 64 << 20


def test_the_clock_ends_slow_rounds(small_bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    template = ChatTemplate(
        small_bpe, {"default": "{% set l = [0] * 9999 %}{% for i in range(99999) %}{{ l | sum }}{% endfor %}"}
    )
    with pytest.raises(BadInputError, match=r"more than 0.05 seconds"):
        template.render(USER)


def test_limits_start_anew_for_each_rendering(small_bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_ROUNDS", 1000)
    template = ChatTemplate(small_bpe, {"default": "{% for i in range(900) %}x{% endfor %}"})
    for _ in range(3):
        assert template.render(USER).text == "x" * 900


def test_long_conversations_fit(small_bpe: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello " * 20_000}] * 20
    assert len(ChatTemplate(small_bpe).render(messages).text) > 2_000_000
