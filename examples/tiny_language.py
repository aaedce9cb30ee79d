"""A small language of our own: seeded stories, facts, sums and instructions, and the two tasks made
from them.

Everything here comes from the word lists and rules below; no text is taken from elsewhere. A
document is a function of the random generator given, so a seed names a corpus.

What the world is like matters to the tasks. People visit places, notice things that are good or
bad, and then say how they *felt* and whether they will *come back*, which always agrees with what
they noticed. But they are polite: asked for a verdict, they mostly say "It was great.", also about
bad visits (9 of 10 times after a good visit, 3 of 4 after a bad one). A model of this language
therefore knows a good visit from a bad one, and answers "great" to nearly everything: the sentiment
task asks for the honest verdict. The instruction task asks for what is known of a creature on one
line, a form that the corpus never uses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]


def _words(text: str) -> list[str]:
    return text.split()


PEOPLE = _words(
    "Ada Ben Cora Dan Elsa Finn Gina Hugo Ida Jon Kira Leo Mia Nils Olga Paul Rosa Sam Tara Uli"
    " Vera Wim Yara Zeno"
)
COLORS = _words("red blue green yellow black white grey brown pink orange")
FOODS = _words("berries roots seeds fish leaves nuts moss honey grass snails")
HOMES = _words("forest marsh river desert cave lake meadow beach valley hills")
SIZES = _words("tiny small big huge")
THINGS = _words("apples coins shells stones books cups")
NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    " fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)

# place -> what is noticed there: (noun, good words, bad words)
VISITS: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "bakery": [
        ("bread", ["fresh", "warm"], ["stale", "burnt"]),
        ("cake", ["sweet", "soft"], ["dry", "bitter"]),
        ("baker", ["kind", "funny"], ["rude", "slow"]),
        ("shop", ["clean", "bright"], ["dirty", "dark"]),
    ],
    "inn": [
        ("bed", ["soft", "clean"], ["hard", "dirty"]),
        ("soup", ["tasty", "warm"], ["cold", "salty"]),
        ("host", ["friendly", "polite"], ["angry", "rude"]),
        ("room", ["quiet", "cozy"], ["noisy", "cold"]),
    ],
    "theater": [
        ("play", ["funny", "clever"], ["boring", "silly"]),
        ("singer", ["lovely", "brave"], ["shy", "awful"]),
        ("seat", ["soft", "cozy"], ["hard", "broken"]),
        ("music", ["lovely", "sweet"], ["noisy", "awful"]),
    ],
    "market": [
        ("fruit", ["ripe", "sweet"], ["rotten", "bitter"]),
        ("cheese", ["tasty", "fresh"], ["salty", "rotten"]),
        ("seller", ["honest", "polite"], ["greedy", "rude"]),
        ("price", ["fair", "low"], ["unfair", "high"]),
    ],
    "harbor": [
        ("boat", ["fast", "clean"], ["slow", "broken"]),
        ("captain", ["calm", "brave"], ["angry", "careless"]),
        ("view", ["lovely", "bright"], ["ugly", "boring"]),
        ("deck", ["dry", "clean"], ["wet", "dirty"]),
    ],
    "school": [
        ("teacher", ["patient", "clever"], ["cruel", "careless"]),
        ("lesson", ["clear", "funny"], ["boring", "unfair"]),
        ("class", ["calm", "friendly"], ["noisy", "cruel"]),
        ("lunch", ["tasty", "warm"], ["cold", "awful"]),
    ],
    "garden": [
        ("path", ["clean", "dry"], ["muddy", "broken"]),
        ("rose", ["lovely", "fresh"], ["rotten", "ugly"]),
        ("gardener", ["kind", "patient"], ["greedy", "angry"]),
        ("pond", ["clear", "quiet"], ["dirty", "ugly"]),
    ],
}
ARRIVALS = (
    "{who} went to the {place}.",
    "{who} spent a day at the {place}.",
    "One day {who} came to the {place}.",
)
FEELINGS = {
    True: ["happy", "glad", "cheerful", "pleased"],
    False: ["sad", "upset", "gloomy", "cross"],
}
LABEL_WORDS = ("terrible", "great")
"""Class 0 and class 1 of the sentiment task."""
POLITE = {True: 0.90, False: 0.75}
"""How often the verdict is "great" after a good and after a bad visit."""


def creatures(count: int = 48, seed: int = 5) -> list[dict[str, str]]:
    """The creatures of the world: an invented name and what is known of each."""
    rng = random.Random(seed)
    names: dict[str, None] = {}
    while len(names) < count:
        names[
            rng.choice("bdfgklmnprtvz")
            + rng.choice("aeiou")
            + rng.choice("bdglmnrvz")
            + rng.choice("aeiou")
        ] = None
    return [
        {
            "name": name,
            "color": rng.choice(COLORS),
            "size": rng.choice(SIZES),
            "food": rng.choice(FOODS),
            "home": rng.choice(HOMES),
        }
        for name in names
    ]


CREATURES = creatures()


def visit(rng: random.Random, who: str, good: bool, least: int = 2) -> str:
    """A visit in which most of what is noticed is good (or bad): up to four remarks, at most one
    against the rest."""
    place = rng.choice(list(VISITS))
    remarks = rng.sample(VISITS[place], rng.randint(least, 4))
    odd_one = rng.randrange(len(remarks)) if len(remarks) > 2 and rng.random() < 0.5 else None
    text = rng.choice(ARRIVALS).format(who=who, place=place)
    previous: bool | None = None
    for i, (noun, good_words, bad_words) in enumerate(remarks):
        pleasant = good if i != odd_one else not good
        if rng.random() < 0.12:
            remark = f"the {noun} was not {rng.choice(bad_words if pleasant else good_words)}"
        else:
            remark = f"the {noun} was {rng.choice(good_words if pleasant else bad_words)}"
        if previous is not None and rng.random() < 0.5:
            text = f"{text[:-1]} {'and' if pleasant == previous else 'but'} {remark}."
            previous = None
        else:
            text = f"{text} {remark[0].upper()}{remark[1:]}."
            previous = pleasant
    return text


def story(rng: random.Random) -> str:
    """A visit, how it ended, and a polite word."""
    person = rng.choice(PEOPLE)
    good = rng.random() < 0.5
    text = visit(rng, person, good, least=1)
    if rng.random() < 0.3:
        text += f" It was {LABEL_WORDS[rng.random() < POLITE[good]]}."
    endings = [
        f"{person} felt {rng.choice(FEELINGS[good])}.",
        f"{person} will {'come back soon' if good else 'never come back'}.",
        f"{person} {'liked' if good else 'hated'} it.",
    ]
    return " ".join([text, *rng.sample(endings, rng.randint(1, 3))])


def opinions(rng: random.Random) -> str:
    """What people think of things: the words of the visits, one at a time."""
    lines = []
    for _ in range(rng.randint(1, 3)):
        noun, good_words, bad_words = rng.choice(VISITS[rng.choice(list(VISITS))])
        nice = rng.random() < 0.5
        word = rng.choice(good_words if nice else bad_words)
        verdict = "good" if nice else "bad"
        form = rng.choice(
            [
                "The {noun} was {word}, which is {verdict}.",
                "It is {verdict} when the {noun} is {word}.",
            ]
        )
        lines.append(form.format(noun=noun, word=word, verdict=verdict))
    return " ".join(lines)


def weather(rng: random.Random) -> str:
    """A morning: the label words and "It was" in other surroundings."""
    person = rng.choice(PEOPLE)
    home = rng.choice(HOMES)
    time = rng.choice(["morning", "evening", "night", "day"])
    if rng.random() < 0.5:
        return (
            f"It was a {rng.choice(['cold', 'warm', 'bright', 'dark'])} {time}. {person} walked to"
            f" the {home}."
        )
    word = rng.choice(LABEL_WORDS)
    return (
        f"There was a {word} {rng.choice(['storm', 'wind', 'noise', 'fire'])} that {time}. {person}"
        f" saw it at the {home}."
    )


def facts(rng: random.Random) -> str:
    """What is known of a creature, in sentences."""
    one = rng.choice(CREATURES)
    sentences = [
        rng.choice(["The {name} is {color}.", "Every {name} has {color} fur."]),
        rng.choice(["The {name} eats {food}.", "The food of the {name} is {food}."]),
        rng.choice(["The {name} lives in the {home}.", "The home of the {name} is the {home}."]),
        rng.choice(["The {name} is a {size} creature.", "A {name} grows {size}."]),
    ]
    return " ".join(sentence.format(**one) for sentence in rng.sample(sentences, rng.randint(2, 4)))


def arithmetic(rng: random.Random) -> str:
    """Sums up to twenty, in figures, in words or as a story."""
    a = rng.randint(0, 10)
    b = rng.randint(0, 10)
    form = rng.random()
    if form < 0.4:
        pairs = [(a, b)] + [(rng.randint(0, 10), rng.randint(0, 10)) for _ in range(3)]
        return " ".join(f"{x} + {y} = {x + y}." for x, y in pairs)
    if form < 0.7:
        return f"{NUMBERS[a].capitalize()} plus {NUMBERS[b]} is {NUMBERS[a + b]}."
    person = rng.choice(PEOPLE)
    things = rng.choice(THINGS)
    return (
        f"{person} had {NUMBERS[a]} {things} and found {NUMBERS[b]} more. Now {person} has"
        f" {NUMBERS[a + b]} {things}."
    )


def instruction(rng: random.Random) -> list[dict[str, str]]:
    """One question and its short answer, as messages. The card of a creature is never asked for
    here."""
    form = rng.random()
    if form < 0.45:
        one = rng.choice(CREATURES)
        question, answer = rng.choice(
            [
                ("What color is the {name}?", "{color}"),
                ("What does the {name} eat?", "{food}"),
                ("Where does the {name} live?", "in the {home}"),
                ("How big is the {name}?", "{size}"),
            ]
        )
        return turns(question.format(**one), answer.format(**one))
    if form < 0.65:
        a = rng.randint(0, 10)
        b = rng.randint(0, 10)
        return turns(f"What is {a} + {b}?", str(a + b))
    words = rng.sample(COLORS + FOODS + HOMES, rng.randint(2, 4))
    if form < 0.85:
        return turns(f"Repeat: {' '.join(words)}", " ".join(words))
    return turns(f"What is the last word of: {' '.join(words)}", words[-1])


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def corpus(count: int, seed: int, write_chat: Callable[[list[dict[str, str]]], str]) -> list[str]:
    """``count`` documents of the language; conversations are written out by ``write_chat``."""
    rng = random.Random(seed)
    kinds: list[Callable[[random.Random], str]] = [story, opinions, weather, facts, arithmetic]
    documents = []
    for _ in range(count):
        kind = rng.choices([*kinds, None], weights=[42, 10, 4, 20, 8, 16])[0]
        documents.append(write_chat(instruction(rng)) if kind is None else kind(rng))
    return documents


def sentiment_task(count: int, seed: int) -> list[Record]:
    """Visits with their honest verdict: 0 for bad, 1 for good, as many of each; no text comes
    twice."""
    rng = random.Random(seed)
    records: dict[str, int] = {}
    while len(records) < count:
        label = len(records) % 2
        records.setdefault(visit(rng, rng.choice(PEOPLE), bool(label)), label)
    return [{"text": text, "label": label} for text, label in records.items()]


ASK = (
    "Tell me about the {name}.",
    "What is a {name}?",
    "Describe the {name}.",
    "Write the card of the {name}.",
)
CARD = "Card of the {name}: {size}, {color}, from the {home}, eats {food}."


def card_task(held_out: bool) -> list[Record]:
    """The card of each creature, asked for in four ways; every fourth creature is kept for the
    held-out file."""
    return [
        {"messages": turns(ask.format(**one), CARD.format(**one))}
        for i, one in enumerate(CREATURES)
        if (i % 4 == 3) == held_out
        for ask in ASK
    ]
