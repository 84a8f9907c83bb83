"""Miss-ratio curves and working sets of page references in numpy arrays and Arrow data.

>>> import numpy as np
>>> curve = mrc(np.arange(1_000_000) % 1000, "lru")
>>> curve.at(999).ratio, curve.at(1000).ratio
(1.0, 0.001)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Mapping

from . import errors
from ._native import (
    Curve,
    Estimator,
    Point,
    Simulation,
    Trace,
    WorkingSet,
    WorkingSetEstimator,
    __version__,
    cache_policies,
    estimators,
    finish,
    map_batch,
    merge,
    object_mrc,
    plan,
    read_trace,
    working_set_estimators,
)
from ._types import EstimatorRow, Option, References, Share, Size
from .errors import PlimsollError

__all__ = [
    "Curve",
    "Estimator",
    "PlimsollError",
    "Point",
    "Simulation",
    "Trace",
    "Vm",
    "WorkingSet",
    "WorkingSetEstimator",
    "__version__",
    "cache_policies",
    "errors",
    "estimators",
    "finish",
    "map_batch",
    "merge",
    "mrc",
    "object_mrc",
    "plan",
    "read_trace",
    "working_set_estimators",
]


def mrc(refs: References, estimator: str = "shards", *, page_bytes: int = 4096, **options: Option) -> Curve:
    """The miss-ratio curve of references: page numbers in order, in any form that `Estimator.update` takes.

    >>> mrc([1, 2, 3, 1, 2, 3], "lru").ratios
    array([1. , 0.5])

    Estimators and their options:
    """
    return Estimator(estimator, page_bytes=page_bytes, **options).update(refs).curve()


def _described(rows: Mapping[str, EstimatorRow]) -> Iterator[str]:
    for name, row in rows.items():
        yield f"    {name}: {row['help']}"
        for option, spec in row["options"].items():
            default = "required" if spec["default"] is None else f"default {spec['default']}"
            yield f"        {option}: {spec['help']} ({default})"


if mrc.__doc__:
    mrc.__doc__ = mrc.__doc__.rstrip() + "\n\n" + "\n".join(_described(estimators())) + "\n"


@dataclass(frozen=True)
class Vm:
    """A VM for `plan`. Sizes are bytes, or text such as "512M".

    Without a curve it keeps its present size. `baseline` is the size against which its losses are measured (by default that
    which the curve records), and `current` its present size (by default the baseline). `max_loss` bounds the rise of its
    misses over those at the baseline ("5%"), `max_misses` their number per second ("20/s"), for curves with a rate.
    """

    curve: Curve | None = None
    baseline: Size | None = None
    current: Size | None = None
    min: Size = 0
    max: Size | None = None
    shares: int = 100
    max_loss: Share | None = None
    max_misses: Share | None = None
    working_set: Size | None = None
