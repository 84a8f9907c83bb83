"""Types of arguments and of rows of the registries, for type checkers."""

from typing import Any, Dict, List, Optional, Sequence, SupportsIndex, TypedDict, Union

from numpy.typing import NDArray

# Arrays of integers, Arrow data, Series, lists, and iterators of these.
References = Any
# A number, or text with a unit: 0.01, "1/100", "512M".
Option = Union[SupportsIndex, float, str]
# Whole numbers, also numpy's, of bytes (pages, where a size of a curve is meant), or text such as "512M".
Size = Union[SupportsIndex, str]
Sizes = Union[Sequence[Size], NDArray[Any]]
# A number, or text such as "5%" or "20/s".
Share = Union[float, str]


class OptionRow(TypedDict):
    help: str
    kind: str
    # A size in pages.
    default: Union[int, float, None]


class CachePolicyRow(TypedDict):
    help: str
    source: str


class EstimatorRow(TypedDict):
    help: str
    options: Dict[str, OptionRow]
    is_exact: bool
    cost: str
    source: str


class WorkingSetEstimatorRow(TypedDict):
    help: str
    feed: str
    options: Dict[str, OptionRow]
    columns: List[str]
    source: str
