"""ModelledRunner: no tensors, virtual time. A price function says what a step takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from phalanx.engine.step_plan import Beat, StepPlan, StepResult, StepTimes
from phalanx.engine.whereabouts import Whereabouts
from phalanx.models.adapter import AdapterOrder


class ModelledRunner:
    """Runs steps in virtual time: `clock` moves on by `price(plan)` seconds when a step is collected.

    `token(slot, position)` names the token a step samples there; by default token 0 everywhere.
    """

    def __init__(
        self,
        price: Callable[[StepPlan], float],
        token: Callable[[int, int], int] = lambda slot, position: 0,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self.nodes: list[str] = []
        self.where = Whereabouts()
        self.clock = 0.0
        self._price = price
        self._token = token
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def adapt(self, order: AdapterOrder) -> None:
        return None

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        price = self._price(plan)
        self.clock += price
        tokens = list(map(self._token, *plan.yielded()))
        return StepResult(plan.step, tokens, [None] * len(tokens), StepTimes(device=price))

    def find_break(self, slot: int, position: int) -> str:
        return "no layer: nothing is computed here"

    def tend(self) -> bool:
        return False

    def beats(self) -> list[Beat]:
        return []

    def close(self) -> None:
        self._launched.clear()
