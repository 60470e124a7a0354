#!/usr/bin/env python3
"""Short stories that hold together, told by a program from the plots of plots.txt and free_plots.txt.

    tools/demo_model/tales.py 3        # prints three of them

A plot is text with choices `[a|b]`, which agree where they have a label, `[1=a|b]`, and slots `{word}`. A slot is
drawn once per story; the number behind it makes it another one of its kind (`{animal}`, `{animal2}`). `{a toy}` puts
the article in front, `{toy}s` is the plural, `{in place}` takes the preposition. h is the hero (he, him, his), k a
friend (ke, kim, kis), mom a grown-up of the family (me, mim, mis), worker somebody met on the way (we, wim),
oldperson an old man or woman (oim, ois); pronouns also exist with a capital.

The plots of plots.txt are about children and have beginnings of their own. Those of free_plots.txt name who may be
their hero (`child`, `animal`, `adult`, `young`: the first two, `any`), and one of openings.txt is put in front: what
it tells already (a scene, the place, the friend, the thing x) is not told again by `{now}`, `{there}`, `{friend}` and
`{own}`. `{who}` is the hero's first mention.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # run as a script

from words import ANIMALS, BOYS, GIRLS, article, phrases, words

SEED = 11
FOLDER = Path(__file__).resolve().parent
HELD_OUT_PLOTS = ("umbrella", "owner", "bottle", "fearanimal", "snowedin", "promise")
"""Plots that no training text is told from."""
HEROES = {
    "child": ("child",),
    "animal": ("animal",),
    "adult": ("adult",),
    "young": ("child", "child", "animal"),
    "any": ("child", "child", "child", "animal", "animal", "adult", "adult"),
}
"""Who the hero of a plot may be, as often as written here."""
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
    "x": "bag ball balloon basket bell bike blanket boat book bottle bowl box broom brush bucket button candle cap car "
    "cart chair clock coat coin crown cup doll drum feather flag flute fork glove hammer hat jar jug key kite "
    "ladder lamp lantern map mask mirror necklace net paintbrush pan pearl pen pencil picture pillow pipe pot "
    "puppet purse puzzle ring robot rocket rope rug scarf shell shirt shoe shovel sled sock spoon stamp star "
    "stick stone sweater sword table teapot tent top towel toy train truck trumpet umbrella vase violin wagon "
    "watch wheel whistle wooden-horse teddy-bear toy-boat",
    "adj": "small big old new red blue green yellow golden silver shiny pretty heavy little strange wooden white black",
    "hobby": "sing dance read paint draw run swim climb cook dig build play dream laugh sleep help whistle",
    "feeling": "sad lonely bored unhappy",
    "fear": "spiders dogs frogs mice snakes crows bears wolves geese cats horses cows",
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
SPECIAL = {
    "to place": "to_place", "place": "place", "in place": "in_place", "there": "there", "now": "now", "own": "own",
    "friend": "friend_told", "who": "who",
}  # fmt: skip
"""Slots that depend on what was told before, and their methods."""
THING = {"he": "it", "him": "it", "his": "its"}
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
    for kind in words("color size old hungry best skill day weekday hobby feeling fear adj")
    for w in KINDS[kind].split()
}
"""Words of slots that are no things."""
ENDINGS = phrases("The end.; And that is the end of the story.; And so the story ends.")
ADULTS = {
    "old man": False, "old woman": True, "farmer": False, "baker": False, "fisherman": False, "king": False,
    "queen": True, "gardener": False,
    "teacher": True, "painter": True, "tailor": False, "sailor": False, "shepherd": False,
    "miller": False, "cook": True, "grandmother": True, "grandfather": False, "princess": True, "prince": False,
    "wizard": False, "witch": True, "knight": False, "clown": False, "carpenter": False, "doctor": True,
    "pirate": False,
}  # fmt: skip
OLD_SHARE = 0.4
"""Of grown-up heroes, those who are an old man or woman."""
COMPANY = {"sister": True, "brother": False, "neighbor": False, "cousin": True}
"""What a grown-up hero has in the place of a mother."""
TALE_REQUESTS = phrases(
    """
    Tell me a story about {}.; Write a short story about {}.; Please tell me a short story about {}.; I want to hear a
    story about {}.; Can you tell a story about {}?; Write a story in simple words about {}.; Tell me about {}.; A story
    about {}, please.; Make up a story about {}.; Could you tell me a story about {}?; I would like a story about {}.;
    Write a bedtime story about {}.; Do you know a story about {}?; Tell a tale about {}.; Write about {}.; Story about
    {}; Tell me a bedtime story about {}.; Write me a story about {}.; Please write a story about {}.; Give me a story
    about {}
    """
)
OPEN_REQUESTS = phrases(
    """
    Tell me a story.; Write a story.; Tell me a short story.; Please tell me a bedtime story.; I want to hear a story.;
    Can you tell me a story?; Write a short story for children.; Tell me something.; Once upon a time;
    Do you know a story?
    """
)
OPEN_SHARE = 0.06
_SLOT = re.compile(r"\{([^{}]+)\}(s\b)?")
_CHOICE = re.compile(r"\[(?:(\d)=)?([^\[\]]*)\]")
_STOP_BEFORE_SAID = re.compile(r'\." (?=(?:(?:he|she|it|they) )?(?:said|asked|called)\b)')
_SENTENCE_START = re.compile(r"(^|\n|[.!?] |(?:^|\n|[.!?] )\"|\.\" |[!?]\" (?=the ))([a-z])")


@dataclass(frozen=True)
class Tale:
    """A story, the plot it comes from, and the request that it answers."""

    plot: str
    request: str
    text: str


@dataclass(frozen=True)
class Plot:
    """`heroes`: a key of HEROES, empty where the plot has its own beginning; `has_thing`: the hero owns x from the
    start; `about` and `text`: with slots, paragraphs with an empty line between them."""

    heroes: str
    has_thing: bool
    about: str
    text: str


@dataclass(frozen=True)
class Opening:
    """`flags`: s sets a scene, p names the place, k the friend, x the thing; for n named, u unnamed heroes, c children,
    m animals, a grown-ups only."""

    flags: str
    text: str

    def fits(self, slots: Slots, plot: Plot) -> bool:
        flags, kind = set(self.flags), slots.hero
        starts_now = plot.text.removeprefix("{own} ").startswith("{now}")
        if (
            ("n" in flags and not slots.is_named)
            or ("u" in flags and slots.is_named)
            or ("s" in flags and not starts_now)
            or ("x" in flags and not (plot.heroes and plot.has_thing))
            or ("k" in flags and "{friend}" not in plot.text)
        ):
            return False
        wanted = flags & set("cma")
        return not wanted or {"child": "c", "animal": "m", "adult": "a"}[kind] in wanted


@cache
def plots() -> dict[str, Plot]:
    """All plots by name."""
    found = {}
    for file in ("plots.txt", "free_plots.txt"):
        for part in re.split(r"^== ", (FOLDER / file).read_text(encoding="utf-8"), flags=re.M)[1:]:
            head, body = part.split("\n", 1)
            names, about = head.split(": ", 1)
            name, *tags = names.split()
            paragraphs = [" ".join(p.split()) for p in body.strip().split("\n\n")]
            found[name] = Plot(tags[0] if tags else "", "x" in tags, about, "\n".join(paragraphs))
    return found


@cache
def openings() -> list[Opening]:
    lines = (FOLDER / "openings.txt").read_text(encoding="utf-8").splitlines()
    return [Opening(*line.split(": ", 1)) for line in lines if line]


def plural(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh", "o")) else "s")


class Slots:
    """The words of one story."""

    def __init__(self, rng: random.Random, heroes: str = "", taken: str = "") -> None:
        """heroes: a key of HEROES; taken: text of the plot, whose persons and animals are left out of those drawn."""
        self.rng = rng
        self.taken = set(re.findall(r"\w+", taken.lower()))
        self.words: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        """Which option the choices of a label have."""
        self.flags = ""
        """What the opening has told."""
        self.animals = rng.sample([word for word in ANIMALS if word not in self.taken], 9)
        names = rng.sample(GIRLS, 3) + rng.sample(BOYS, 3)
        rng.shuffle(names)
        self.hero = rng.choice(HEROES[heroes or "child"])
        self._hero(names[0], may_be_animal=not heroes)
        self._friend(names[1])
        family = COMPANY if self.hero == "adult" else FAMILY
        mom, mom2 = rng.sample(sorted(family), 2)
        self.words |= {"mom": mom, "mom2": mom2, "Mom": mom.capitalize()}
        self._pronouns("me mim mis", family[mom])
        worker = rng.choice(sorted(set(WORKERS) - {self.words["h"][4:]}))
        self.words["worker"] = worker
        self._pronouns("we wim wis", WORKERS[worker])
        self.words["oldperson"] = rng.choice(["man", "woman"])
        self._pronouns("oe oim ois", self.words["oldperson"] == "woman")
        self.words |= {"begin": rng.choice(BEGINNINGS), "name2": names[2], "name3": names[3]}
        self.place = rng.choice(sorted(PLACES))

    def _hero(self, name: str, may_be_animal: bool) -> None:
        rng, is_she = self.rng, name in GIRLS
        self.trait = rng.choice(TRAITS)
        self.is_named = self.hero == "child" or (self.hero == "animal" and rng.random() < 0.45)
        if self.hero == "adult":
            old = rng.random() < OLD_SHARE
            kind = rng.choice(("old man", "old woman") if old else sorted(set(ADULTS) - self.taken))
            is_she = ADULTS[kind]
        elif self.hero == "animal" or (may_be_animal and rng.random() < 0.15):
            kind = self.animals.pop()
        else:
            kind = "girl" if is_she else "boy"
        full = f"{self.trait} {kind}" if rng.random() < 0.5 and self.hero != "adult" else kind
        self.words |= {"h": name if self.is_named else f"the {kind}", "kind": kind, "full": full}
        self.words["trait"] = self.trait
        self.words["with trait"] = kind if kind.startswith("old ") else f"{self.trait} {kind}"
        self._pronouns("he him his", is_she if self.is_named or self.hero == "adult" else None)
        self.words["himself"] = {"he": "himself", "she": "herself", "it": "itself"}[self.words["he"]]

    def _friend(self, name: str) -> None:
        rng = self.rng
        if self.is_named or (self.hero == "adult" and rng.random() < 0.5):
            self.words["k"] = name
            self._pronouns("ke kim kis", name in GIRLS)
        elif self.hero == "adult":
            kind = rng.choice(sorted(set(ADULTS) - self.taken - {self.words["kind"]}))
            self.words["k"] = f"the {kind}"
            self._pronouns("ke kim kis", ADULTS[kind])
        else:
            self.words["k"] = f"the {self.animals.pop()}"
            self._pronouns("ke kim kis", None)

    def _pronouns(self, names: str, is_she: bool | None) -> None:
        """he, him and his, she and her, or it and its under these names."""
        for name, word in zip(names.split(), ("he", "him", "his"), strict=True):
            said = THING[word] if is_she is None else SHE[word] if is_she else word
            self.words |= {name: said, name.capitalize(): said.capitalize()}

    def __getitem__(self, name: str) -> str:
        words = self.words
        if name in ("a h", "a th"):
            what = article(words["full" if name == "a h" else "with trait"])
            return f"{what} named {words['h']}" if self.is_named else what
        if name in SPECIAL:
            return getattr(self, f"_{SPECIAL[name]}")()
        if name.startswith("a "):
            return article(" ".join(self[part] for part in name[2:].split()))
        if name not in words:
            kind = name.rstrip("0123456789")
            taken = set(words.values())
            choices = self.animals if kind == "animal" else [w.replace("-", " ") for w in KINDS[kind].split()]
            words[name] = self.rng.choice([word for word in choices if word not in taken])
        return words[name]

    def _place(self) -> str:
        return self.place

    def _in_place(self) -> str:
        return f"{PLACES[self.place]} {self.place}"

    def _to_place(self) -> str:
        return f"to {self.place}"

    def _there(self) -> str:
        return "there" if "p" in self.flags else self._in_place()

    def _now(self) -> str:
        return "" if "s" in self.flags else f"one {self['day']},"

    def _friend_told(self) -> str:
        if "k" in self.flags:
            return self.words["k"]
        self.flags += "k"
        comma = "" if self.words["k"].istitle() else ","
        return f"{self.words['his']} friend{comma} {self.words['k']}{comma}"

    def _own(self) -> str:
        return "" if "x" in self.flags else f"{self.words['h']} had {self['a adj x']}."

    def _who(self) -> str:
        if self.is_named:
            return self["a h"] if self.rng.random() < 0.25 else self.words["h"]
        return article(self.words["full"]) if self.rng.random() < 0.6 else self.words["h"]


def expand(text: str, slots: Slots) -> str:
    """Choices first, inner ones before outer ones, then slots."""
    while (found := _CHOICE.search(text)) is not None:
        options = found[2].split("|")
        number = slots.numbers.setdefault(found[1], slots.rng.randrange(len(options))) if found[1] else None
        chosen = slots.rng.choice(options) if number is None else options[number]
        text = text[: found.start()] + chosen + text[found.end() :]
    text = _SLOT.sub(lambda m: plural(slots[m[1]]) if m[2] else slots[m[1]], text)
    text = re.sub(r",(?=[.,])", "", re.sub(r"\b([Aa]) (?=(?!uni|use|one)[aeiou])", r"\1n ", text))
    text = _STOP_BEFORE_SAID.sub('," ', text)
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return _SENTENCE_START.sub(lambda m: m[1] + m[2].upper(), "\n".join(lines))


def simple_topic(told: str, slots: Slots) -> str:
    """Who a story is about, and perhaps one more thing in it, as somebody would ask for it."""
    rng, kinds = slots.rng, (*KINDS, "animal")
    things = [w for name, w in slots.words.items() if name.rstrip("0123456789") in kinds and f" {w}" in told]
    things = [word for word in things if word not in NO_THINGS]
    kind = slots.words["full"]
    hero = slots["a h"] if rng.random() < 0.5 else article(kind)
    if slots.words["h"] not in told:
        hero = article(things.pop(0)) if things else "animals"
    return f"{hero} and {article(rng.choice(things))}" if things and rng.random() < 0.6 else hero


def begin(plot: Plot, slots: Slots) -> str:
    """The text of a plot with an opening in front of it, or in the place of `{begin} {a h}.`"""
    text = plot.text
    told = text.startswith("{begin} {a h}. ")
    if not plot.heroes and not told and (slots.rng.random() < 0.5 or not text.startswith(("{h}", "One {day}"))):
        return text
    fitting = [one for one in openings() if one.fits(slots, plot)]
    if plot.has_thing and slots.rng.random() < 0.4:
        fitting = [one for one in fitting if "x" in one.flags]
    opening = slots.rng.choice(fitting)
    slots.flags = opening.flags
    return f"{opening.text} {text.removeprefix('{begin} {a h}. ')}"


@cache
def _names(held_out: bool) -> list[str]:
    """Plots to draw from; those about a thing are there twice."""
    names = sorted(name for name in plots() if (name in HELD_OUT_PLOTS) == held_out)
    return [*names, *(name for name in names if plots()[name].has_thing)]


def tale(index: int, seed: int = SEED, held_out: bool = False) -> Tale:
    """Tale number `index` of a seed: always the same one. From the plots that are held out or from the others."""
    rng = random.Random(f"{seed}/{index}")
    name = rng.choice(_names(held_out))
    plot = plots()[name]
    slots = Slots(rng, plot.heroes, plot.text)
    text = begin(plot, slots)
    told = expand(text, slots)
    if rng.random() < 0.15 and not plot.heroes and name not in INDOORS and text == plot.text:
        told = f"{rng.choice(WEATHER)} {told}"
    if rng.random() < 0.12:
        told = f"{told} {rng.choice(ENDINGS)}"
    topic = expand(plot.about if rng.random() < 0.6 else "", slots) or simple_topic(told, slots)
    topic = topic[0].lower() + topic[1:]
    if rng.random() < OPEN_SHARE:
        return Tale(name, rng.choice(OPEN_REQUESTS), told)
    return Tale(name, rng.choice(TALE_REQUESTS).format(topic), told)


@cache
def _talk() -> list[list[str]]:
    """Pairs of what is said and the answer."""
    return [line.split(" => ") for line in (FOLDER / "talk.txt").read_text(encoding="utf-8").splitlines() if line]


def talk(index: int, seed: int = SEED) -> Tale:
    """A greeting or a question that asks for no story, and the answer to it."""
    rng = random.Random(f"talk/{seed}/{index}")
    said, answer = rng.choice(_talk())
    slots = Slots(rng)
    return Tale("talk", expand(said, slots), expand(answer, slots))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n_tales", type=int, nargs="?", default=1, metavar="N")
    for index in range(parser.parse_args().n_tales):
        story = tale(index)
        print(f"{story.request}\n\n{story.text}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
