"""Whether ranks that must have the same bits have them, and if not, who has other ones and from where on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def disagreement(marks: Mapping[int, Sequence[int]]) -> str | None:
    """What differs, if anything does. Of every rank: digests of the residual stream as each layer takes it and as the
    head does, 0 where nobody looked, and one of the tokens.

    The first place where they differ is told, and the ranks that differ from most. Of two, or of halves, nobody can say
    who is right.
    """
    columns = list(zip(*marks.values(), strict=True))
    for place, found in enumerate(columns):
        (common, votes), *others = Counter(found).most_common()
        if not others:
            continue
        alone = [rank for rank, digest in zip(marks, found, strict=True) if digest != common]
        looked_at = [before for before in range(place) if any(columns[before])]
        name = _name(place, place == len(columns) - 1, looked_at[-1] if looked_at else None)
        if votes <= len(found) - votes:
            return f"Ranks {_and(sorted(marks))} differ {name}; which of them is right cannot be told."
        who = f"Rank {alone[0]} differs" if len(alone) == 1 else f"Ranks {_and(alone)} differ"
        return f"{who} from the others {name}."
    return None


def _and(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def _name(place: int, is_last: bool, same_at: int | None) -> str:
    """Where it came in: behind the place at which all were last seen to be the same."""
    if is_last:
        return "in the tokens they sampled"
    if place == 0:
        return "in what the embedding gave"
    if same_at == place - 1:
        return f"in the residual stream behind layer {place - 1}"
    if same_at is None:
        return f"in the residual stream somewhere up to and behind layer {place - 1}"
    return f"in the residual stream behind one of the layers {same_at} to {place - 1}"
