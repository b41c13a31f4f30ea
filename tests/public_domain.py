"""A small set to score a model by, made of texts that belong to all, and what transformers makes of it."""

from __future__ import annotations

from typing import NamedTuple

PASSAGES = (
    "Four score and seven years ago our fathers brought forth, upon this continent, a new nation, conceived in "
    "liberty, and dedicated to the proposition that all men are created equal.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters.",
    "A hungry Fox saw some fine bunches of Grapes hanging from a vine that was trained along a high trellis, and did "
    "his best to reach them by jumping as high as he could into the air.",
)


class Item(NamedTuple):
    context: str
    choices: tuple[str, ...]
    right: int


ITEMS = (
    Item("Question: What is the capital of France?\nAnswer:", (" Berlin", " Paris", " Madrid", " Rome"), 1),
    Item("Question: How many legs does a spider have?\nAnswer:", (" six", " four", " eight", " ten"), 2),
    Item("The slow and steady tortoise won the race against the", (" hare", " fox", " lion", " crow"), 0),
    Item("Water freezes at zero degrees", (" Kelvin", " Celsius", " north", " inches"), 1),
)

OF_PASSAGES = (-102.07485, -254.92591, -178.43408)
OF_ITEMS = (
    (-10.7743, -4.50932, -13.26545, -7.39196),
    (-7.91944, -8.7335, -9.65263, -10.3411),
    (-1.5464, -6.03737, -4.75187, -11.99975),
    (-5.35162, -0.13209, -11.16587, -12.88725),
)
"""Sums of log-probabilities by transformers 5.22 in float32 from the default model's file: of each passage but for its
first token, and of each choice behind its context."""
