"""Which methods the hook alone can do: PPO, which is the host's, with weights and gates between the two engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import STATISTICS
from mis_ext.correction.statistics import Reduce as SequenceReduce
from mis_ext.correction.weights import Level, Weight
from mis_ext.methods import factors
from mis_ext.methods.batch import MISMATCH, STALENESS
from mis_ext.methods.method import Method
from mis_ext.methods.surrogates import Ratio, Surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class HookMethod:
    """A method as the hook can do it, with a configuration and what the host has to do.

    Attributes:
        config: What the hook computes.
        low: What the host's ``--eps-clip`` must be.
        high: The same of ``--eps-clip-high``.
        dual: Of ``--eps-clip-c``; None leaves it out.
    """

    config: CorrectionConfig
    low: float
    high: float
    dual: float | None


def as_correction(method: Method) -> HookMethod:
    """The method as a configuration of the hook.

    Raises:
        ValueError: The hook alone cannot do it; the message says why.
    """
    low, high, dual = _clip(method.surrogate)
    if method.terms:
        raise ValueError("it has an additive term: a KL term is the host's (--use-kl-loss), others need the whole loss")
    if method.normalize_over is not None:
        raise ValueError("it normalises the weights of the whole loss")
    weights, gates = [], []
    for factor in method.factors:
        if factor.pair != MISMATCH:
            raise ValueError(f"it compares {' with '.join(factor.pair)}: the hook sees proximal and behavior only")
        if isinstance(factor, factors.RatioWeight):
            weights.append(_weight(factor))
        elif isinstance(factor, factors.Keep):
            gates.append(_gate(factor))
        else:
            raise ValueError(f"the hook has no {type(factor).__name__}")
    if not weights and not gates:
        raise ValueError("it corrects nothing: it is the host's own loss, and needs no hook")
    if len(weights) > 1:
        raise ValueError("it has two weights, the hook has one")
    config = CorrectionConfig(weight=weights[0] if weights else None, gates=tuple(gates))
    return HookMethod(config=config, low=low, high=high, dual=dual)


def _clip(surrogate: Surrogate) -> tuple[float, float, float | None]:
    if not isinstance(surrogate, Ratio) or (surrogate.pair, surrogate.level) != (STALENESS, "token"):
        what = (
            f"{surrogate.level} ratio {' / '.join(surrogate.pair)}"
            if isinstance(surrogate, Ratio)
            else "no clipped ratio"
        )
        raise ValueError(f"its surrogate ({what}) is not the host's, a clipped token ratio current / proximal")
    low, high, dual = surrogate.low, surrogate.high, surrogate.dual
    is_outward = (surrogate.sides, surrogate.spread) == ("outward", "token")
    if not (is_outward and isinstance(low, float) and isinstance(high, float) and isinstance(dual, float | None)):
        raise ValueError("its clip is not the host's: outward, at two numbers")
    return 1.0 - low, high - 1.0, dual


def _weight(factor: factors.RatioWeight) -> Weight:
    if factor.level not in get_args(Level):
        raise ValueError(f"the hook has no weights of level {factor.level}")
    level = cast(Level, factor.level)
    if factor.when != "always" or factor.power != 1.0:
        raise ValueError("the hook's weight is the ratio itself, whatever the advantage, which it does not see")
    if factor.high is None:
        if factor.low is not None:
            raise ValueError("the hook has no weight with a low bound alone")
        return Weight(level=level, mode="unbounded")
    if factor.low is None:
        return Weight(level=level, mode="truncate", high=factor.high)
    return Weight(level=level, mode="clip", low=factor.low, high=factor.high)


def _gate(factor: factors.Keep) -> Gate:
    if factor.statistic not in STATISTICS:
        raise ValueError(f"the hook has no gate on {factor.statistic}")
    if factor.reduce not in get_args(SequenceReduce):
        raise ValueError(f"the hook has no gate with the reduction {factor.reduce}")
    if (factor.when, factor.of_tokens) != ("always", "always"):
        raise ValueError("its gate depends on the advantage, which the hook does not see")
    reduce = cast(SequenceReduce, factor.reduce)
    return Gate(statistic=factor.statistic, reduce=reduce, low=factor.low, high=factor.high, action=factor.action)
