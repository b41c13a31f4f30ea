"""What follows the mixer of a layer: a gated MLP, or experts that a router chooses among."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.spec.tensors import Run, Split, Stored, Tensor


class Activation(NamedTuple):
    """The gate of a gated MLP: SiLU or GELU (tanh) of one half times the other.

    `limit` bounds both before: the gate from above, the other half from both sides. `clamped` is
    gate * sigmoid(1.702 * gate) * (other half + 1).
    """

    kind: Literal["silu", "gelu", "clamped"] = "silu"
    limit: float | None = None


SILU = Activation()
_MOST_EXPERTS = 10_000


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weights.

    `score`: softmax over all experts, softmax over those chosen, sigmoid, or sqrt(softplus). `correction`: a bias for
    the choice alone. With `groups`, only experts of the `kept_groups` best ones (by their two best) may be chosen.
    `weighs_input`: weights multiply what the experts take, not what they give. `wide`: logits are made in float32.
    `hashed`: so many tokens have their experts in a table, and scores only weigh them.
    """

    experts: int
    experts_per_token: int
    score: Literal["softmax", "chosen_softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    renormalise: bool = False
    scaling: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    correction: bool = False
    bias: bool = False
    weighs_input: bool = False
    wide: bool = False
    hashed: int = 0

    def __post_init__(self) -> None:
        if self.experts > _MOST_EXPERTS:
            raise ValueError(f"{self.experts} experts, where {_MOST_EXPERTS} are the most that are counted one by one")
        if not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"a token goes to {self.experts_per_token} of {self.experts} experts")
        if self.groups > 1:
            self._check_groups()

    def _check_groups(self) -> None:
        """A group is judged by its two best, and those that are kept have to have as many as a token goes to."""
        size, rest = divmod(self.experts, self.groups)
        if rest or size < 2:
            raise ValueError(f"{self.experts} experts do not make {self.groups} groups of two or more")
        if not self.kept_groups <= self.groups or self.kept_groups * size < self.experts_per_token:
            raise ValueError(
                f"a token goes to {self.experts_per_token} experts of {self.kept_groups} of {self.groups} groups, "
                f"each of {size}"
            )


@dataclass(frozen=True)
class ExpertNames:
    """How a checkpoint calls the parts of a layer of experts. `correction` and `table` are paths below the block."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    correction: str = "gate.e_score_correction_bias"
    table: str = "gate.tid2eid"


class Fused(NamedTuple):
    """Experts kept as two stacks, `gate_up_proj` and `down_proj`; `interleaved`: rows of gate and up alternate.

    Those of some checkpoints are in `mxfp4`, and then not transposed.
    """

    transposed: bool = False
    interleaved: bool = False
    mxfp4: bool = False

    def weight(self, path: str, part: str, width: int) -> tuple[Stored, ...]:
        """Where a matrix is: `part` is gate, up or down, `width` the experts' inner one."""
        name, run = self._place(path, part, width)
        return (
            Stored(name, stacked=True, transposed=self.transposed, run=run),
            *((Stored(name, stacked=True, run=run, packed=True),) if self.mxfp4 else ()),
        )

    def bias(self, path: str, part: str, width: int) -> Stored:
        name, run = self._place(path, part, width)
        return Stored(f"{name}_bias", stacked=True, run=run)

    def _place(self, path: str, part: str, width: int) -> tuple[str, Run | None]:
        if part == "down":
            return f"{path}experts.down_proj", None
        second = part == "up"
        run = Run(1, 2, int(second)) if self.interleaved else Run(width, 2 * width, width * second)
        return f"{path}experts.gate_up_proj", run


@dataclass(frozen=True)
class Dense:
    """A gated MLP of `width` inner columns. `fused` is the one tensor that checkpoints keep gate and up in."""

    width: int
    activation: Activation = SILU
    bias: bool = False
    fused: str | None = None
    module: str = "mlp"

    routed = None

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        yield from self._gated(f"{prefix}{self.module}.", hidden, "ffn")

    def _gated(self, path: str, hidden: int, split: Split) -> Iterator[Tensor]:
        for second, name in enumerate(("gate_proj", "up_proj")):
            run = Run(self.width, 2 * self.width, self.width * second)
            weight = (Stored(f"{path}{self.fused}.weight", run=run),) if self.fused else ()
            bias = (Stored(f"{path}{self.fused}.bias", run=run),) if self.fused else ()
            yield Tensor(f"{path}{name}.weight", (self.width, hidden), split, is_linear=True, sources=weight)
            if self.bias:
                yield Tensor(f"{path}{name}.bias", (self.width,), split, sources=bias)
        yield Tensor(path + "down_proj.weight", (hidden, self.width), split, axis=1, is_linear=True)
        if self.bias:
            yield Tensor(path + "down_proj.bias", (hidden,))


@dataclass(frozen=True)
class Moe:
    """Routed experts of `intermediate` inner columns; `shared` columns of a further expert always run.

    Checkpoints keep each expert's matrices on their own, or `fused`: where both are known, both are read.
    """

    router: Router
    intermediate: int
    activation: Activation = SILU
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    names: ExpertNames = field(default=ExpertNames(), repr=False)
    fused: Fused | None = field(default=None, repr=False)

    width = 0

    @property
    def routed(self) -> Router:
        return self.router

    @property
    def experts(self) -> int:
        return self.router.experts

    @property
    def experts_per_token(self) -> int:
        return self.router.experts_per_token

    @property
    def shared_expert(self) -> Dense | None:
        if not self.shared:
            return None
        return Dense(self.shared, self.activation, module=f"{self.names.block}.{self.names.shared}")

    def tensors(self, prefix: str, hidden: int) -> Iterator[Tensor]:
        names, path = self.names, f"{prefix}{self.names.block}."
        yield Tensor(f"{path}{names.router}.weight", (self.experts, hidden), wide=self.router.wide)
        if self.router.bias:
            yield Tensor(f"{path}{names.router}.bias", (self.experts,))
        if self.router.correction:
            yield Tensor(f"{path}{names.correction}", (self.experts,), wide=True)
        if self.router.hashed:
            yield Tensor(f"{path}{names.table}", (self.router.hashed, self.experts_per_token), wide=True)
        wide, narrow = (self.intermediate, hidden), (hidden, self.intermediate)
        yield from self._matrix(path, "gate", names.gate, wide)
        yield from self._matrix(path, "up", names.up, wide)
        yield from self._matrix(path, "down", names.down, narrow)
        if self.shared_expert is not None:
            yield from self.shared_expert._gated(f"{path}{names.shared}.", hidden, "shared_ffn")
        if self.shared_gate:
            yield Tensor(f"{path}{names.shared_gate}.weight", (1, hidden))

    def _matrix(self, path: str, part: str, name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
        own = f"{path}experts.*.{name}"
        weight: tuple[Stored, ...] = ()
        bias: tuple[Stored, ...] = ()
        if self.fused is not None:
            weight = (Stored(f"{own}.weight"), *self.fused.weight(path, part, self.intermediate))
            bias = (Stored(f"{own}.bias"), self.fused.bias(path, part, self.intermediate))
        axis = 1 if part == "down" else 0
        yield Tensor(
            f"{own}.weight", shape, "expert_ffn", axis, is_linear=True, expert=True, copies=self.experts, sources=weight
        )
        if self.bias:
            split: Split | None = None if part == "down" else "expert_ffn"
            yield Tensor(f"{own}.bias", shape[:1], split, expert=True, copies=self.experts, sources=bias)
