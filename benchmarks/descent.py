"""Fits constants of the cost model by the loss of the choice: coordinate descent on what a choice
by them loses, in the mean of the products. Plans that are predicted alike count by how alike they
are, so that small steps show. The errors of predictions, and what changes, count a little."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from agmm.planning.cost_model import Constants, gpu_constants
from agmm.planning.problems import Problem

FITTED = "fitted"
"""The name of the GPU that the constants so far are given as."""
STEPS, MOST_STEPS = (0.15, 0.05, 0.02), 4
MOST_ERROR, MOST_LOST = 0.3, 0.5
"""The largest error of a prediction's logarithm, and of a choice's, that counts: more counts no
more."""
NEAR = 6.0
"""How fast the errors of plans that are slower than the best count less."""
ALIKE = 0.02
"""Predictions that differ by so much share a choice e to 1."""
STAYS = 0.003
"""What a constant's change counts, times the square of its logarithm."""

RATE = 0.03
"""The change of a constant's logarithm in the first step of `Descent.slide`: a choice."""
MEAN_STAYS, SQUARE_STAYS, LEAST_SLOPE = 0.8, 0.95, 1e-6
"""How much of the mean slope, and of its square, stays from step to step, and what slopes count as
none: choices."""
NUDGE = 0.004
"""The change of a logarithm by which a slope is found."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Parameter(Generic[Key]):
    """A constant that is fitted: how it is read and set, the keys of the calls that it matters to,
    and what its change counts (`STAYS`)."""

    get: Callable[[Constants], float]
    put: Callable[[Constants, float], Constants]
    keys: Sequence[Key]
    stays: float = STAYS


def entry_of(
    name: str, entry: str, keys: Sequence[Key], usual: float, stays: float = STAYS
) -> Parameter[Key]:
    """Return the entry of a constant that is given by name; ``usual`` where there is none."""
    return Parameter(
        lambda c: float(getattr(c, name).get(entry, usual)),
        lambda c, value: changed(c, name, {**getattr(c, name), entry: value}),
        keys,
        stays,
    )


def number(name: str, keys: Sequence[Key]) -> Parameter[Key]:
    """Return a constant that is one number."""
    return Parameter(
        lambda c: float(getattr(c, name)), lambda c, value: changed(c, name, value), keys
    )


@dataclass(frozen=True)
class Call:
    """A measured call: a product's, by a plan."""

    problem: Problem
    product: int
    log_us: float
    """The logarithm of its time."""
    lost: float
    """What it takes more than the product's fastest call, as a logarithm."""
    weight: float
    """The weight of its error: nobody chooses a plan that takes half as long again."""
    how: Any = None
    """What else the prediction needs."""

    @classmethod
    def of(cls, problem: Problem, product: int, us: float, best_us: float, how: Any) -> Call:
        """Return the call that took so long where the best one took ``best_us``."""
        lost = math.log(us / best_us)
        weight = math.exp(-NEAR * math.expm1(lost))
        return cls(problem, product, math.log(us), min(lost, MOST_LOST), weight, how)


class Descent(Generic[Key]):
    """The constants so far, those that are given as FITTED's, also between the steps.

    Args:
        start: the constants to begin with, which a change is counted from.
        calls: the calls by what a constant matters to, such as their kernel.
        products: the number of products that the calls are of.
        predict: the predicted times in µs of the calls of a key, as FITTED's constants say them.
        margin: the factor of a key's predictions where plans are compared.
    """

    def __init__(
        self,
        start: Constants,
        calls: dict[Key, list[Call]],
        products: int,
        predict: Callable[[Key, Sequence[Call]], list[float]],
        margin: Callable[[Constants, Key], float] = lambda *_: 1.0,
    ) -> None:
        self.start = self.now = start
        self.calls = calls
        self._products = products
        self._predict_us, self._margin = predict, margin
        self.give(start)
        self._predicted = {key: self._predict(key) for key in calls}

    def give(self, constants: Constants) -> None:
        gpu_constants.give(FITTED, constants)
        self.now = constants

    def _predict(self, key: Key) -> list[float]:
        return [math.log(us) for us in self._predict_us(key, self.calls[key])]

    def loss(self) -> float:
        products: list[list[tuple[float, float]]] = [[] for _ in range(self._products)]
        errors = weights = 0.0
        for key, predicted in self._predicted.items():
            margin = math.log(self._margin(self.now, key))
            for call, log_us in zip(self.calls[key], predicted, strict=True):
                products[call.product].append((log_us + margin, call.lost))
                errors += call.weight * min(abs(log_us - call.log_us), MOST_ERROR) ** 2
                weights += call.weight
        lost = 0.0
        for calls in products:
            least = min(log_us for log_us, _ in calls)
            shares = [math.exp((least - log_us) / ALIKE) for log_us, _ in calls]
            total = sum(share * each for share, (_, each) in zip(shares, calls, strict=True))
            lost += total / sum(shares)
        return lost / len(products) + errors / weights

    def descend(
        self,
        get: Callable[[Constants], float],
        put: Callable[[float], Constants],
        keys: Sequence[Key],
        stays: float = STAYS,
    ) -> None:
        """`put` makes what the constants are with another value; `keys`: that it matters to."""
        usual = get(self.start)

        def at(tried: float) -> float:
            self.give(put(tried))
            self._predicted.update({key: self._predict(key) for key in keys})
            return self.loss() + stays * math.log(tried / usual) ** 2

        value = get(self.now)
        best = at(value)
        for step in STEPS:
            for _ in range(MOST_STEPS):
                reached, tried = min((at(v), v) for v in (value * (1 + step), value / (1 + step)))
                if reached >= best - 1e-7:
                    break
                best, value = reached, tried
        at(value)

    def in_dict(
        self, name: str, entry: str, keys: Sequence[Key], usual: float, stays: float = STAYS
    ) -> None:
        """Fit one entry of a constant that is given by kernel, or by another name."""
        base, one = self.now, entry_of(name, entry, keys, usual, stays)
        self.descend(one.get, lambda value: one.put(base, value), keys, stays)

    def scalar(self, name: str, keys: Sequence[Key], most: float = math.inf) -> None:
        """Fit a constant that is one number."""
        base, one = self.now, number(name, keys)
        self.descend(one.get, lambda value: one.put(base, min(value, most)), keys)

    def slide(self, parameters: Sequence[Parameter[Key]], steps: int) -> None:
        """Fit all parameters together, by steps against the slope of the loss by the logarithm of
        each (Adam's rule): what several constants share is found so, which is no slope of one."""
        usual = [math.log(one.get(self.start)) for one in parameters]
        means, squares = [0.0] * len(parameters), [0.0] * len(parameters)
        best = self.loss() + self._stays(parameters, usual), self.now
        for step in range(1, steps + 1):
            slopes = self._slopes(parameters, usual)
            rate = RATE * (1 - (step - 1) / steps)
            constants = self.now
            for i, (one, slope) in enumerate(zip(parameters, slopes, strict=True)):
                means[i] += (1 - MEAN_STAYS) * (slope - means[i])
                squares[i] += (1 - SQUARE_STAYS) * (slope * slope - squares[i])
                mean = means[i] / (1 - MEAN_STAYS**step)
                square = squares[i] / (1 - SQUARE_STAYS**step)
                factor = math.exp(-rate * mean / (math.sqrt(square) + LEAST_SLOPE))
                constants = one.put(constants, one.get(constants) * factor)
            self._go_to(constants)
            best = min(
                best, (self.loss() + self._stays(parameters, usual), self.now), key=lambda b: b[0]
            )
        self._go_to(best[1])

    def _go_to(self, constants: Constants) -> None:
        self.give(constants)
        self._predicted = {key: self._predict(key) for key in self.calls}

    def _stays(self, parameters: Sequence[Parameter[Key]], usual: Sequence[float]) -> float:
        return sum(
            one.stays * (math.log(one.get(self.now)) - at) ** 2
            for one, at in zip(parameters, usual, strict=True)
        )

    def _slopes(self, parameters: Sequence[Parameter[Key]], usual: Sequence[float]) -> list[float]:
        base, predicted, before = self.now, dict(self._predicted), self.loss()
        slopes = []
        for one, at in zip(parameters, usual, strict=True):
            value = one.get(base)
            self.give(one.put(base, value * math.exp(NUDGE)))
            self._predicted.update({key: self._predict(key) for key in one.keys})
            slope = (self.loss() - before) / NUDGE
            slopes.append(slope + 2 * one.stays * (math.log(value) - at))
            self._predicted.update({key: predicted[key] for key in one.keys})
        self.give(base)
        return slopes


def changed(constants: Constants, name: str, value: Any) -> Constants:
    change: dict[str, Any] = {name: value}
    return replace(constants, **change)


def rounded(value: Any) -> Any:
    """The value with the digits that a fit has."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, float):
        return float(f"{value:.3g}") if value < 100 else round(value)
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value
