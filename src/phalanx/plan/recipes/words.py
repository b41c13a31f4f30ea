"""What files of recipes say alike."""

from __future__ import annotations

import shlex

from phalanx.plan.recipes.launch import Launch


def wrapped(words: list[str], indent: str = "    ") -> str:
    """A command over several lines, a flag with its value on each."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return f" \\\n{indent}".join(shlex.join(line) for line in lines)


def title(launch: Launch) -> str:
    stages = f" PP={launch.stages}" if launch.stages > 1 else ""
    if launch.attention_ranks > 1:
        stages = " with data-parallel attention"
    return (
        f"{launch.model} with {launch.engine.title} in {launch.weight_format}: TP={launch.tp}{stages}, "
        f"{launch.replicas} replica{'s' if launch.replicas > 1 else ''} on {launch.machine.name}"
    )
