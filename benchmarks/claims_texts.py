"""Prompts of the claims: what people ask, in the shapes that were measured elsewhere."""

from __future__ import annotations

from pathlib import Path

from octavo.models.tokenizer import Tokenizer

PROSE = Path(__file__).with_name("perplexity.txt")


def _choices(question: str, *choices: str) -> str:
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", choices, strict=True))
    return f"{question}\n{listed}"


EXAMPLES = (
    (_choices("Which of these is a mammal?", "A trout", "A whale", "A heron", "A toad"), "B"),
    (_choices("What is 12 times 11?", "121", "122", "132", "144"), "C"),
    (
        _choices(
            "Why do we see lightning before we hear thunder?",
            "Light travels faster than sound",
            "Thunder starts later than lightning",
            "Sound is absorbed by clouds",
            "The ear is slower than the eye",
        ),
        "A",
    ),
    (
        _choices(
            "Which change makes a loop that counts from 0 to n - 1 count from 1 to n?",
            "Start it at n",
            "Add one to every count",
            "Run it twice",
            "Count down",
        ),
        "B",
    ),
    (
        _choices(
            "A lake freezes from the top because",
            "fish keep the bottom warm",
            "the ground is hot",
            "wind cools only the surface",
            "water is densest above its freezing point",
        ),
        "D",
    ),
)
QUESTIONS = (
    _choices("Which planet is closest to the Sun?", "Venus", "Mars", "Mercury", "Earth"),
    _choices("How many sides has a hexagon?", "Five", "Six", "Seven", "Eight"),
    _choices("Which of these is a prime number?", "21", "27", "29", "33"),
    _choices("What do bees make from nectar?", "Silk", "Honey", "Milk", "Salt"),
    _choices("In which season do most trees shed leaves?", "Autumn", "Spring", "Summer", "Winter"),
    _choices("What is the opposite of scarce?", "Rare", "Plentiful", "Distant", "Thin"),
    _choices("Which organ pumps blood?", "The liver", "The lung", "The heart", "The kidney"),
    _choices("What is a third of 96?", "31", "32", "33", "36"),
    _choices("Which unit measures electric current?", "Volt", "Ohm", "Watt", "Ampere"),
    _choices("Which gas do plants take from the air?", "Helium", "Carbon dioxide", "Neon", "Argon"),
    _choices("What does a thermometer measure?", "Weight", "Speed", "Temperature", "Length"),
    _choices("Which of these is a sorting method?", "Quicksort", "Hashing", "Caching", "Paging"),
    _choices("Which word is an adverb?", "Quick", "Quickly", "Quicken", "Quickness"),
    _choices("How many minutes are in three hours?", "120", "150", "180", "210"),
    _choices("Which metal is liquid in a warm room?", "Iron", "Lead", "Tin", "Mercury"),
    _choices("What is the boundary of a circle called?", "Radius", "Chord", "Arc", "Circumference"),
)

# What a turn about a passage asks first, and then.
ENDS = (
    "\n\nWhat is this about?",
    "\n\nSum this up in a sentence.",
    "\n\nWho would want to read this?",
    "\n\nGive this a title.",
    "\n\nWhich words of this are technical?",
    "\n\nWhat is the main claim here?",
)
FOLLOW_UPS = (
    "Why is that so?",
    "Can you say it in fewer words?",
    "What would you ask the author?",
    "Is anything left out?",
)

PROBLEM = (
    "Problem: a baker has three ovens. The first bakes 12 loaves in 40 minutes, the second 18 "
    "loaves in an hour, and the third 10 loaves in half an hour. The shop opens at eight, and by "
    "then 200 loaves have to be on the shelves. The ovens take twenty minutes to get hot, which "
    "they can do side by side, and between two batches each has to be emptied and filled again, "
    "which takes five minutes of the baker's time. There is one baker, who can see to one oven at "
    "a time, and who would like to sleep as long as possible.\n\n"
    "Think step by step. Each step is one short sentence that uses what the steps before it found, "
    "and says a number where it can. If a step turns out to be wrong, say so and go on from the "
    "last one that was right. When nothing is left to find out, give the hour at which the first "
    "oven has to be lit.\n\n"
    "Example: a bus leaves every 12 minutes, and a walk takes 30. Step: in 30 minutes two buses "
    "leave and a third is close. Step: the wait is 6 minutes on average. Step: so the bus is "
    "faster if its ride takes less than 24 minutes.\n\nSolution:"
)
# Ways to go on from a thought.
TOPICS = (" Step: count the batches,", " Step: look at the baker,", " Step: start from the end,")

# 19 tokens on average, as in Alpaca, and as uneven.
INSTRUCTIONS = (
    "Write a short poem about the sea at night.",
    "List the steps to plant a tomato seed in a pot.",
    "Explain to a child of ten how a bicycle stays upright while it is moving.",
    "Suggest three names for a bakery that sells only rye bread, and say why each of them fits.",
    "Rewrite this so that it sounds friendly: the meeting of next week has been cancelled, and "
    "nobody needs to come to the office that day.",
    "Name two causes of inflation, and for each of them one thing that a central bank can do.",
)


def passage(tokenizer: Tokenizer, number: int, num_tokens: int) -> str:
    """A piece of this project's prose, another one for each number."""
    tokens = tokenizer.encode(PROSE.read_text(), add_special_tokens=False)
    begin = number * 7 * num_tokens % (len(tokens) - num_tokens)
    return tokenizer.decode(tokens[begin : begin + num_tokens])
