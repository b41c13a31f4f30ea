"""Recipes: a plan as commands and files that start it."""

from phalanx.plan.recipes.boxes import WAYS
from phalanx.plan.recipes.files import KINDS, recipe, write_files
from phalanx.plan.recipes.launch import Launch, command
from phalanx.plan.recipes.words import wrapped

__all__ = ["KINDS", "WAYS", "Launch", "command", "recipe", "wrapped", "write_files"]
