"""Which methods the hook alone can do: PPO, which is the host's, with weights and gates between the two engines."""

from __future__ import annotations

from dataclasses import dataclass

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import STALENESS
from mis_ext.correction.weights import Weight
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
    for factor in method.factors:
        if not isinstance(factor, Gate | Weight):
            raise ValueError(f"the hook has no {type(factor).__name__}")
        if factor.hook_obstacle is not None:
            raise ValueError(factor.hook_obstacle)
    weights = [factor for factor in method.factors if isinstance(factor, Weight)]
    gates = tuple(factor for factor in method.factors if isinstance(factor, Gate))
    if not weights and not gates:
        raise ValueError("it corrects nothing: it is the host's own loss, and needs no hook")
    if len(weights) > 1:
        raise ValueError("it has two weights, the hook has one")
    config = CorrectionConfig(weight=weights[0] if weights else None, gates=gates)
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
