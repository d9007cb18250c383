"""Running estimates that forget: what a lookahead is decided by. Plain floats, about a microsecond an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import ConfigError

__all__ = [
    "AcceptanceEstimate",
    "ExponentialMovingAverage",
    "ForwardCostLine",
    "PassCostEstimate",
    "RobustTokenCostAverage",
    "TokenCostMean",
]

_OUTLIER_RATIO = 3.0  # a time beyond this many times the expected one counts as that much: a hiccup, or a new level
_REFUTED = 0.5  # a time below this part of the expected one refutes it: times are only ever disturbed upward
_DOUBT = 0.1  # what earlier evidence is worth once it has been refuted
_WIDE_WEIGHT = 4.0  # passes: what is believed of several tokens' cost counts as so many,
_WIDE_TOLERANCE = (
    0.2  # passes of one token: and where measured times differ from it by more than that, which is no noise,
)
_REFUTED_WIDE_WEIGHT = 0.3  # as so many
_TOKEN_WEIGHT = 6.4  # the same of each token's: as a tenth of a pass that has eight more


class ExponentialMovingAverage:
    """Mean of a series in which a value's weight halves every `half_life` values (or falls by `1 - alpha` each).

    The first value counts in full; `value` is None before it.
    """

    def __init__(self, *, alpha: float | None = None, half_life: float | None = None) -> None:
        check_number(ConfigError, "alpha", alpha, 0.0, 1.0, above=True)
        check_number(ConfigError, "half_life", half_life, 0.0, above=True)
        if half_life is not None and alpha is None:
            alpha = 1.0 - math.pow(0.5, 1.0 / half_life)
        elif alpha is None or half_life is not None:
            raise ConfigError(f"alpha is {alpha!r} and half_life is {half_life!r}; give exactly one of them")
        self.alpha = alpha
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.value: float | None = None
        self.count = 0

    def update(self, value: float) -> float:
        """Add a value; return the new mean."""
        mean = value if self.value is None else self.value + self.alpha * (value - self.value)
        self.value = mean
        self.count += 1
        return mean


class AcceptanceEstimate:
    """How often a drafted token is accepted: accepted / (accepted + first rejections), older tokens weighing less.

    Tokens after a rejection were never judged: counting them (accepted / drafted) would make a long lookahead look
    like a bad draft. `half_life` is in judged tokens; the prior counts as `prior_weight` of them and does not fade.
    """

    def __init__(self, *, half_life: float, prior: float, prior_weight: float) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._prior = prior
        self._prior_weight = prior_weight
        self.accepted = 0.0
        self.rejected = 0.0

    @property
    def rate(self) -> float:
        """Acceptance per judged token, in 0..1."""
        return self.estimate_rate_with_prior(self._prior)

    def estimate_rate_with_prior(self, prior: float) -> float:
        """The same with another prior of the same weight."""
        weight = self._prior_weight
        return (self.accepted + weight * prior) / (self.accepted + self.rejected + weight)

    def update(self, num_accepted: int, *, rejected: bool) -> None:
        """Add a round: leading tokens that were accepted, and whether another was rejected."""
        if num_accepted:
            self.decay(num_accepted)
            self.accepted += num_accepted
        if rejected:
            self.decay(1)
            self.rejected += 1.0

    def decay(self, num_tokens: int) -> None:
        """Let the evidence age by so many tokens."""
        keep = self._keep**num_tokens
        self.accepted *= keep
        self.rejected *= keep


class _TokenCostBase:
    """Seconds per token; recent ones weigh more."""

    def __init__(self, *, half_life: float) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def value(self) -> float | None:
        """None before the first update."""
        return self._seconds / self._tokens if self._tokens else None

    @property
    def num_tokens(self) -> int:
        """So many tokens are behind `value`, older ones counting less."""
        return round(self._tokens)

    def _add_decaying(self, num_tokens: int, seconds: float, keep: float) -> None:
        """Add what is new to `keep` of what was there."""
        self._seconds = keep * self._seconds + seconds
        self._tokens = keep * self._tokens + num_tokens


class RobustTokenCostAverage(_TokenCostBase):
    """Seconds per token, robust against hiccups; recent rounds weigh more. The half-life is in rounds."""

    def update(self, num_tokens: int, seconds: float) -> None:
        """Add a round of `num_tokens` (at least 1)."""
        keep, seconds = _weigh_outlier(seconds, None if self.value is None else self.value * num_tokens)
        self._add_decaying(num_tokens, seconds, self._keep * keep)


class TokenCostMean(_TokenCostBase):
    """Seconds per token as they come one by one; recent ones weigh more. The half-life is in tokens.

    A hiccup counts in full: what it held up comes at once after it, and only together they have the true mean.
    """

    def update(self, num_tokens: int, seconds: float) -> None:
        """Add `num_tokens` (at least 1)."""
        self._add_decaying(num_tokens, seconds, self._keep**num_tokens)


class _PassSums:
    """Sums over passes of one token, and over wider ones.

    The two forget separately: a long stretch of one must not wipe out what is known of the other.
    """

    def __init__(self, half_life: float, max_outlier: float = _OUTLIER_RATIO) -> None:
        self.alone = [0.0, 0.0]  # of the weights w, and of w y
        self.wide = [0.0, 0.0, 0.0, 0.0, 0.0]  # x = width - 1: of w, w x, w x x, w y, w x y
        self._keep = 0.5 ** (1.0 / half_life)
        self._max_outlier = max_outlier

    def add(self, width: int, seconds: float, expected_s: float, *, deviation_s: float = 0.0) -> None:
        """Add a pass of `width` tokens (at least 1); the first one may take any time.

        `deviation_s`: how much longer than by a line passes of this width take; that is not part of the sums.
        """
        is_known = self.alone[0] + self.wide[0] > 0.0
        keep, y = _weigh_outlier(seconds, expected_s if is_known else None, self._max_outlier)
        if keep < 1.0:
            self.alone = [keep * value for value in self.alone]
            self.wide = [keep * value for value in self.wide]
        x, y = width - 1, y - deviation_s
        if x:
            terms = (1.0, x, x * x, y, x * y)
            self.wide = [self._keep * value + term for value, term in zip(self.wide, terms, strict=True)]
        else:
            self.alone = [self._keep * value + term for value, term in zip(self.alone, (1.0, y), strict=True)]


class ForwardCostLine:
    """Seconds of a forward as a line over its width (tokens given to it): least squares that forget.

    The prior is one pseudo-observation, `cost(9) = prior_ratio * cost(1)`, of weight `prior_weight`; it has no scale,
    so it holds in any unit and keeps the line determined when every width was the same. `max_outlier`: a time beyond so
    many times the expected one counts as that much; infinity gives the true mean.
    """

    def __init__(
        self,
        *,
        half_life: float,
        prior_ratio: float = 1.5,
        prior_weight: float = 0.1,
        max_outlier: float = _OUTLIER_RATIO,
    ) -> None:
        self._sums = _PassSums(half_life, max_outlier)
        self._slope_per_base = (prior_ratio - 1.0) / 8.0
        self._prior = 64.0 * prior_weight
        self._base, self._slope = 1.0, self._slope_per_base

    @property
    def base_s(self) -> float:
        """Seconds of one token alone; 1 before the first update."""
        return self._base

    @property
    def per_token_s(self) -> float:
        """Seconds that one token more costs."""
        return self._slope

    def update(self, width: int, seconds: float) -> None:
        """Add a forward of `width` tokens (at least 1)."""
        self._sums.add(width, seconds, self._base + self._slope * (width - 1))
        self._fit_line()

    def _fit_line(self) -> None:
        """Minimise `sum w (y - base - slope x)^2 + prior (slope - tilt base)^2`; neither may be negative."""
        weight, sum_x, sum_xx, sum_y, sum_xy = self._sums.wide
        weight += self._sums.alone[0]
        sum_y += self._sums.alone[1]
        ones = weight + self._prior * self._slope_per_base**2
        cross = sum_x - self._prior * self._slope_per_base
        squares = sum_xx + self._prior
        determinant = ones * squares - cross * cross
        self._base = (sum_y * squares - sum_xy * cross) / determinant
        self._slope = (sum_xy * ones - sum_y * cross) / determinant
        mean = sum_y / weight
        if self._slope < 0.0:
            self._base, self._slope = mean, 0.0
        self._base = max(self._base, 0.05 * mean)


class PassCostEstimate:
    """Seconds of a pass by its width: of one token alone, and a line over widths from two on.

    Kernels for a single row are others than those for several: llama.cpp may take 2.5 times as long for two rows, and
    only 6 times for 16. So the line may begin at another height than that of one token: `wide_s` above it. Least
    squares that forget, and priors without scale, as in `ForwardCostLine`, whose line is this one's for `wide_s` = 0.
    The priors are in times of a pass of one token, and so are `deviations`: how far passes of 2, 3, … tokens are above
    the line; for wider ones the last holds.
    """

    def __init__(
        self, *, half_life: float, prior_wide_cost: float, prior_token_cost: float, deviations: Sequence[float] = ()
    ) -> None:
        self._deviations, self._tilts = _list_deviations(tuple(deviations))
        self._sums = _PassSums(half_life)
        self._prior_wide = prior_wide_cost
        self._prior_token = prior_token_cost
        self.plain_s = 1.0  # of one token alone; 1 before the first update
        self.wide_s = prior_wide_cost  # that a pass takes longer because it has several
        self.per_token_s = prior_token_cost  # for each token after the first

    def estimate_extra_s(self, num_more: int) -> float:
        """Seconds that a pass takes longer for so many tokens after its first."""
        if not num_more:
            return 0.0
        return self.wide_s + num_more * self.per_token_s + self.plain_s * self._get_deviation(num_more)

    def list_extra_s(self, max_more: int) -> list[float]:
        """[n]: the same for n tokens, up to `max_more`."""
        wide_s, token_s, plain_s, deviations = self.wide_s, self.per_token_s, self.plain_s, self._deviations
        last = len(deviations) - 1
        counts = range(1, max_more + 1)
        return [0.0, *[wide_s + n * token_s + plain_s * deviations[n if n < last else last] for n in counts]]

    def estimate_token_s(self, num_more: int) -> float:
        """Seconds for each token beyond so many (at least 1) after the first, if as many follow as is cheapest."""
        return self.per_token_s + self.plain_s * (self._tilts[num_more] if num_more < len(self._tilts) else 0.0)

    def update(self, width: int, seconds: float) -> None:
        """Add a pass of `width` tokens (at least 1)."""
        deviation_s = self.plain_s * self._get_deviation(width - 1)
        self._sums.add(width, seconds, self.plain_s + self.estimate_extra_s(width - 1), deviation_s=deviation_s)
        self._fit()

    def _get_deviation(self, num_more: int) -> float:
        """How far a pass of so many tokens after its first is above the line."""
        return self._deviations[min(num_more, len(self._deviations) - 1)]

    def _fit(self) -> None:
        """Minimise the squared errors of plain_s = b, wide_s = d and per_token_s = s, those of the priors among them.

        `sum_alone w (y - b)^2 + sum_wide w (y - b - d - s x)^2 + p (d - prior b)^2 + q (s - prior b)^2`
        """
        alone, alone_y = self._sums.alone
        weight, sum_x, sum_xx, sum_y, sum_xy = self._sums.wide
        is_refuted = abs(self.wide_s - self._prior_wide * self.plain_s) > _WIDE_TOLERANCE * self.plain_s
        wide_weight = _REFUTED_WIDE_WEIGHT if is_refuted else _WIDE_WEIGHT
        p_wide, q_token = wide_weight * self._prior_wide, _TOKEN_WEIGHT * self._prior_token
        first = alone + weight + p_wide * self._prior_wide + q_token * self._prior_token
        plain_s, wide_s, per_token_s = _solve_three(
            (
                (first, weight - p_wide, sum_x - q_token, alone_y + sum_y),
                (weight - p_wide, weight + wide_weight, sum_x, sum_y),
                (sum_x - q_token, sum_x, sum_xx + _TOKEN_WEIGHT, sum_xy),
            )
        )
        self.plain_s = max(plain_s, 0.05 * (alone_y + sum_y) / (alone + weight))
        self.per_token_s = max(per_token_s, 0.0)
        least_wide_s = -self.per_token_s - self.plain_s * self._get_deviation(1)
        self.wide_s = max(wide_s, least_wide_s)  # two take at least as long as one


@lru_cache(maxsize=16)
def _list_deviations(deviations: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Deviations by the number of tokens after the first, and the least slope from each of them to a later one."""
    by_count = (0.0, *deviations)
    tilts = tuple(
        min((by_count[later] - by_count[count]) / (later - count) for later in range(count + 1, len(by_count)))
        for count in range(len(by_count) - 1)
    )
    return by_count, tilts


def _solve_three(equations: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """Solve three linear equations a x + b y + c z = d by Cramer's rule; they have one solution."""
    (a1, b1, c1, d1), (a2, b2, c2, d2), (a3, b3, c3, d3) = equations
    bc12, bc13, bc23 = b1 * c2 - b2 * c1, b1 * c3 - b3 * c1, b2 * c3 - b3 * c2
    dc12, dc13, dc23 = d1 * c2 - d2 * c1, d1 * c3 - d3 * c1, d2 * c3 - d3 * c2
    bd12, bd13, bd23 = b1 * d2 - b2 * d1, b1 * d3 - b3 * d1, b2 * d3 - b3 * d2
    determinant = a1 * bc23 - a2 * bc13 + a3 * bc12
    return (
        (d1 * bc23 - d2 * bc13 + d3 * bc12) / determinant,
        (a1 * dc23 - a2 * dc13 + a3 * dc12) / determinant,
        (a1 * bd23 - a2 * bd13 + a3 * bd12) / determinant,
    )


def _weigh_outlier(seconds: float, expected: float | None, max_outlier: float = _OUTLIER_RATIO) -> tuple[float, float]:
    """How far to keep earlier evidence, and the time to add to it."""
    if not expected:  # a time of 0 says no more than none
        return 1.0, seconds
    if seconds < _REFUTED * expected and max_outlier < math.inf:
        return _DOUBT, seconds
    return 1.0, min(seconds, max_outlier * expected)
