"""Word lists for story requests, and the requests made of them. Everything here was written for this project."""

from __future__ import annotations

import random
from dataclasses import dataclass


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    """Phrases with semicolons between them."""
    return [" ".join(phrase.split()) for phrase in text.split(";")]


GIRLS = words(
    """
    Amy Ana Anna Bella Beth Clara Daisy Dora Ella Ellie Emma Eva Fay Gina Grace Hana Hazel Holly Ida Iris Ivy Jane
    Jill Joy Julia Kate Kim Kira Lara Lena Lila Lily Lola Lucy Luna Maria Mary Maya Meg Mia Mila Molly Nina Nora
    Olga Olive Pam Penny Polly Rita Rosa Rose Ruby Ruth Sally Sara Sofia Sue Tara Tina Vera Wendy Zoe
    """
)
BOYS = words(
    """
    Adam Alan Alex Ali Andy Ari Ben Bill Bob Carl Dan David Eli Eric Finn Frank Fred George Hans Henry Hugo Ian Igor
    Jack Jake James Jim Joe John Jonas Juan Kai Karl Ken Leo Luca Luis Mark Matt Max Mike Nick Noah Oli Omar Oscar
    Otto Pablo Paul Pete Ray Rob Roy Sam Sid Simon Ted Theo Tim Toby Tom Tony Will
    """
)
ANIMALS = words(
    """
    ant bear bee bird bunny calf cat chick cow crab crow deer dog donkey dragon duck eagle elephant fish fox frog
    goat goose hen horse kitten lamb lion lizard monkey mouse owl panda parrot penguin pig pony puppy rabbit raccoon
    seal sheep snail snake spider squirrel swan tiger turtle whale wolf worm zebra
    """
)
OBJECTS = words(
    """
    apple bag ball balloon banana basket bell bike blanket block boat book boot bottle bowl box bread bridge broom
    brush bucket button cake camera candle candy cap car card carrot chair clock cloud coat coin cookie crayon crown
    cup doll door drum egg feather flag flower fork fruit garden gift glass glove hammer hat honey horn jacket jam
    jar key kite ladder lamp leaf letter lock map mask milk mirror mitten nest net nut orange paint pan paper path
    peach pear pencil photo piano pie pillow plane plant plate pond pot potato puddle pumpkin puzzle rain ring river
    rock rocket rope rug sand sandwich scarf seed shell shoe shovel sled slide snow snowman soap sock soup spoon
    stamp star stick stone stool story strawberry swing table tea teddy tent ticket towel tower toy train tree truck
    tunnel umbrella vase wagon wall watch wheel whistle window wood yarn
    """
)
VERBS = words(
    """
    ask bake bark borrow bounce break bring build call carry catch clap clean climb close cook count cross cry cut
    dance dig draw dream drink drop eat fall feed find fix float fly follow forget give grow hide hold hop hug hurry
    jump keep kick knock laugh leave lift listen look lose make march meet mix move open pack paint pick plant play
    point pour promise pull push put race read rest ride roll run sail save search share shout show sing sit skip
    sleep slide smell smile splash spin stop swim swing talk taste teach thank throw tickle touch trade try turn
    visit wait wake walk wash watch wave whisper win wish work write
    """
)
ADJECTIVES = words(
    """
    angry big blue bright brave broken busy calm clean clever cold cozy curious dark deep dirty dry empty fast
    fluffy friendly funny gentle glad golden green happy hard heavy hot huge hungry kind lazy little lonely long
    lost loud lucky magic muddy new nice old pink pretty proud purple quick quiet red round sad scared shiny shy
    silly sleepy slow small smooth soft special strange strong sunny sweet tall thirsty tiny tired warm wet white
    wild wise yellow young
    """
)
PLACES = phrases(
    """
    the attic; a barn; the bakery; the beach; a big city; a boat; a cave; a castle; the doctor; a farm; the field;
    the forest; the garden; grandma's house; a hill; the kitchen; the lake; the library; the market; the meadow; a
    mountain; the ocean; the park; the playground; the pond; the river; the road; the school; the sea; a small
    house; a small town; the snow; the store; a tent; the train; a tree house; the village; the woods; the yard; the
    zoo
    """
)
TRAITS = phrases(
    """
    who is afraid of the dark; who cannot sleep; who has lost something; who wants to help; who tells a lie; who is
    very shy; who wants to learn to swim; who makes a mess; who finds a surprise; who is looking for a friend; who
    wants to be brave; who does not want to share; who is sick; who has a birthday; who gets lost; who has a dream;
    who moves to a new home; who breaks something; who wants to win a race; who learns to wait; who meets somebody
    new; who is too loud; who is hungry; who has a secret; who builds something; who helps an old man; who misses a
    friend; who is always late; who wants to fly; who finds a key; who says sorry; who is afraid of water; who
    learns to ride; who hears a strange sound; who makes a gift; who has a bad day
    """
)
FEATURES = phrases(
    """
    It should have a happy end.; Somebody says something in it.; It should teach something.; Something surprising
    happens in it.; Something goes wrong and is made good again.; It should be funny.; It should be calm, for the
    evening.
    """
)
REQUESTS = phrases(
    """
    Tell me a story about {}.; Write a short story about {}.; Please tell me a short story about {}.; I want to hear
    a story about {}.; Can you tell a story about {}?; Write a story in simple words about {}.
    """
)
OPENINGS = phrases(
    """
    One day,; Once upon a time, there was; Once upon a time,; There was once; One morning,; It was a sunny day.; It
    was a cold day.; One evening,; Every day,; In a small house,; Long ago,; One summer day,; One winter morning,;
    Today was a special day.; It was raining.
    """
)


@dataclass(frozen=True)
class Request:
    """What is asked for, and how the story must begin (empty: as it likes)."""

    text: str
    opening: str


def article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def subject(rng: random.Random) -> str:
    """Who a story is about."""
    kind = rng.randrange(4)
    if kind == 0:
        return f"a girl named {rng.choice(GIRLS)}"
    if kind == 1:
        return f"a boy named {rng.choice(BOYS)}"
    animal = rng.choice(ANIMALS)
    if kind == 2:
        return article(f"{rng.choice(ADJECTIVES)} {animal}")
    return f"{article(animal)} named {rng.choice(GIRLS + BOYS)}"


def topic(rng: random.Random) -> str:
    """What a story is about: a character with things, a place, a trait or a second character."""
    first = subject(rng)
    kind = rng.randrange(5)
    if kind == 0:
        return f"{first} {rng.choice(TRAITS)}"
    if kind == 1:
        thing = f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"
        return f"{first} and {article(thing)}"
    if kind == 2:
        return f"{first}, {article(rng.choice(OBJECTS))} and {rng.choice(PLACES)}"
    if kind == 3:
        return f"{first} and {subject(rng)} in {rng.choice(PLACES)}"
    return f"{first} {rng.choice(TRAITS)} in {rng.choice(PLACES)}"


def request(index: int, seed: int) -> Request:
    """Request number `index` of a seed: always the same one."""
    rng = random.Random(f"{seed}/{index}")
    text = rng.choice(REQUESTS).format(topic(rng))
    if rng.random() < 0.5:
        words = [f'"{rng.choice(VERBS)}"', f'"{rng.choice(OBJECTS)}"', f'"{rng.choice(ADJECTIVES)}"']
        text += f" Use the words {words[0]}, {words[1]} and {words[2]}."
    elif rng.random() < 0.5:
        text += f" {rng.choice(FEATURES)}"
    opening = rng.choice(OPENINGS) if rng.random() < 0.8 else ""
    return Request(text, opening)
