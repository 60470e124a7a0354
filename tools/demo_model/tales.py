#!/usr/bin/env python3
"""Short stories that hold together, told by a program from the plots of plots.txt.

    tools/demo_model/tales.py 3        # prints three of them

A plot is text with choices `[a|b]`, which agree where they have a label, `[1=a|b]`, and slots `{word}`. A slot is
drawn once per story; the number behind it makes it another one of its kind (`{animal}`, `{animal2}`). `{a toy}` puts
the article in front, `{toy}s` is the plural, `{in place}` takes the preposition. h is the hero (he, him, his), k a
friend (ke, kim, kis), mom a grown-up of the family (me, mim, mis), worker somebody met on the way (we, wim),
oldperson an old man or woman (oim, ois); pronouns also exist with a capital.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # run as a script

from words import ANIMALS, BOYS, GIRLS, article, phrases, words

SEED = 11
PLOTS = Path(__file__).resolve().parent / "plots.txt"
KINDS: dict[str, str] = {
    "color": "red blue green yellow white black brown orange purple pink golden silver gray",
    "size": "small tiny little big huge fat thin round",
    "clothes": "hat scarf coat mitten sock cap sweater jacket blanket glove shirt ribbon",
    "toy": "ball doll drum puzzle robot top wagon truck train teddy-bear toy-car yo-yo puppet kite rocking-horse",
    "thing": "key coin shell feather button ring stone whistle bell marble spoon book pencil candle nail map rope",
    "food": "apple cookie banana carrot pear bun berry nut peach muffin plum cherry pancake potato melon strawberry",
    "baked": "cake pie chocolate-cake apple-pie honey-cake pizza carrot-cake cherry-pie",
    "breakable": "cup vase bowl plate glass lamp mirror jar teapot clock",
    "old": "old rusty golden heavy strange tiny",
    "hungry": "hungry",
    "best": "prettiest strongest smartest fastest greatest cleverest bravest finest",
    "skill": "swim ride-a-bike whistle skate climb-a-tree jump-rope dance dive juggle ski fly-a-kite read catch-a-ball",
    "day": "day morning afternoon summer-day sunny-day spring-day evening fine-day winter-day",
    "weekday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
}
PLACES = {
    "the park": "in", "the beach": "at", "the forest": "in", "the garden": "in", "the meadow": "in", "the river": "at",
    "the hill": "on", "the lake": "at", "the farm": "on", "the market": "at", "the playground": "on",
    "the village": "in", "the yard": "in", "the pond": "at", "the field": "in", "the old mill": "at", "the sea": "at",
    "the woods": "in", "the barn": "in", "the big tree": "under",
}  # fmt: skip
SHE = {"he": "she", "him": "her", "his": "her"}
FAMILY = {
    "mom": True, "dad": False, "grandma": True, "grandpa": False, "mother": True, "father": False, "aunt": True,
    "uncle": False,
}  # fmt: skip
WORKERS = {
    "farmer": False, "baker": False, "fisherman": False, "teacher": True, "doctor": True, "gardener": False,
    "old woman": True, "old man": False, "sailor": False, "shopkeeper": True, "policeman": False, "painter": True,
    "tall man": False, "young woman": True, "mailman": False, "shepherd": False, "cook": True,
}  # fmt: skip
BEGINNINGS = phrases(
    """
    Once upon a time, there was; Once upon a time, there was; Once upon a time, there was; There once was;
    Long ago, there was; There was once; Once there was; In a small village, there lived; Far away, there lived;
    Not far from here, there lived; In a house by the sea, there lived
    """
)
TRAITS = words("little small brave shy clever kind young curious quiet cheerful good funny")
WEATHER = phrases(
    """
    The sun was shining.; It was a warm day.; A soft wind was blowing.; It was a cold day.; The sky was blue.;
    Summer had come.; The leaves were falling.; It was spring, and the birds were singing.
    """
)
INDOORS = words("rain storm snow picnic dark noise wish kite fishing dragon")
"""Plots that bring their own weather, or need none."""
NO_THINGS = {
    w.replace("-", " ")
    for kind in ("color", "size", "old", "hungry", "best", "skill", "day", "weekday")
    for w in KINDS[kind].split()
}
"""Words of slots that are no things."""
ENDINGS = phrases("The end.; And that is the end of the story.; And so the story ends.")
_SLOT = re.compile(r"\{([^{}]+)\}(s\b)?")
_CHOICE = re.compile(r"\[(?:(\d)=)?([^\[\]]*)\]")
_SENTENCE_START = re.compile(r"(^|\n|[.!?] )([a-z])")


@dataclass(frozen=True)
class Tale:
    """A story, the plot it comes from, and what it is about, for a request."""

    plot: str
    about: str
    text: str


@cache
def plots() -> dict[str, tuple[str, str]]:
    """Name -> (what it is about, text), paragraphs with an empty line between them."""
    found = {}
    for part in re.split(r"^== ", PLOTS.read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, body = part.split("\n", 1)
        name, about = head.split(": ", 1)
        paragraphs = [" ".join(p.split()) for p in body.strip().split("\n\n")]
        found[name] = (about, "\n".join(paragraphs))
    return found


def plural(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh", "o")) else "s")


class Slots:
    """The words of one story."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.words: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        """Which option the choices of a label have."""
        self.animals = rng.sample(ANIMALS, 8)
        names = rng.sample(GIRLS, 2) + rng.sample(BOYS, 2)
        rng.shuffle(names)
        is_girl = self._person("h", "he him his", names[0] in GIRLS)
        self._person("k", "ke kim kis", names[1] in GIRLS)
        self.words["himself"] = "herself" if is_girl else "himself"
        mom, mom2 = rng.sample(sorted(FAMILY), 2)
        self.words |= {"mom": mom, "mom2": mom2, "Mom": mom.capitalize()}
        self._person("", "me mim mis", FAMILY[mom])
        worker = rng.choice(sorted(WORKERS))
        self.words["worker"] = worker
        self._person("", "we wim wis", WORKERS[worker])
        self.words["oldperson"] = rng.choice(["man", "woman"])
        self._person("", "oe oim ois", self.words["oldperson"] == "woman")
        self.words |= {"h": names[0], "k": names[1], "begin": rng.choice(BEGINNINGS)}
        kind = ("girl" if is_girl else "boy") if rng.random() < 0.7 else self.animals.pop()
        self.kind = f"{rng.choice(TRAITS)} {kind}" if rng.random() < 0.5 else kind
        self.place = rng.choice(sorted(PLACES))

    def _person(self, _: str, names: str, is_she: bool) -> bool:
        for name, word in zip(names.split(), ("he", "him", "his"), strict=True):
            said = SHE[word] if is_she else word
            self.words |= {name: said, name.capitalize(): said.capitalize()}
        return is_she

    def __getitem__(self, name: str) -> str:
        if name.startswith("a "):
            return article(self[name[2:]]) if name != "a h" else f"{article(self.kind)} named {self.words['h']}"
        if name in ("place", "in place"):
            return self.place if name == "place" else f"{PLACES[self.place]} {self.place}"
        if name not in self.words:
            kind = name.rstrip("0123456789")
            taken = set(self.words.values())
            choices = self.animals if kind == "animal" else [w.replace("-", " ") for w in KINDS[kind].split()]
            self.words[name] = self.rng.choice([word for word in choices if word not in taken])
        return self.words[name]


def expand(text: str, slots: Slots) -> str:
    """Choices first, inner ones before outer ones, then slots."""
    while (found := _CHOICE.search(text)) is not None:
        options = found[2].split("|")
        number = slots.numbers.setdefault(found[1], slots.rng.randrange(len(options))) if found[1] else None
        chosen = slots.rng.choice(options) if number is None else options[number]
        text = text[: found.start()] + chosen + text[found.end() :]
    text = _SLOT.sub(lambda m: plural(slots[m[1]]) if m[2] else slots[m[1]], text)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return _SENTENCE_START.sub(lambda m: m[1] + m[2].upper(), "\n".join(lines))


def simple_topic(told: str, slots: Slots) -> str:
    """Who a story is about, and perhaps one more thing in it, as somebody would ask for it."""
    rng, kinds = slots.rng, (*KINDS, "animal")
    things = [w for name, w in slots.words.items() if name.rstrip("0123456789") in kinds and f" {w}" in told]
    things = [word for word in things if word not in NO_THINGS]
    hero = slots["a h"] if rng.random() < 0.5 else article(slots.kind)
    if slots.words["h"] not in told:
        hero = article(things.pop(0)) if things else "animals"
    return f"{hero} and {article(rng.choice(things))}" if things and rng.random() < 0.6 else hero


def tale(index: int, seed: int = SEED) -> Tale:
    """Tale number `index` of a seed: always the same one."""
    rng = random.Random(f"{seed}/{index}")
    name = rng.choice(sorted(plots()))
    about, text = plots()[name]
    slots = Slots(rng)
    told = expand(text, slots)
    if rng.random() < 0.15 and name not in INDOORS and "{begin}" not in text:
        told = f"{rng.choice(WEATHER)} {told}"
    if rng.random() < 0.12:
        told = f"{told} {rng.choice(ENDINGS)}"
    topic = expand(about if rng.random() < 0.5 else "", slots) or simple_topic(told, slots)
    return Tale(name, topic[0].lower() + topic[1:], told)


def main() -> int:
    for index in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        story = tale(index)
        print(f"{story.about}\n\n{story.text}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
