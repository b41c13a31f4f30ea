"""Recipes: a plan as commands and files that start it."""

from phalanx.plan.recipes.files import KINDS, recipe, wrapped, write_files
from phalanx.plan.recipes.launch import Launch, command

__all__ = ["KINDS", "Launch", "command", "recipe", "wrapped", "write_files"]
