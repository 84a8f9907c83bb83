"""Curves of traces that are larger than one process should read, by Ray: on one machine, or on a cluster.

Each slice of the trace is a task that reads it where it runs and returns a partial state, about as many references as the
estimator samples; further tasks merge neighbours, a few at a time. Partial states depend on their slice alone, so Ray may
run a task again when a worker dies, and the curve is still that of the estimator itself, to the last bit.

Needs the extra `ray` of the package.
"""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Union

import ray

from . import Curve, finish, map_batch, merge, read_trace
from ._types import Option
from .errors import OptionError

__all__ = ["Slice", "curve", "slices"]

# Partial states that are merged by one task.
_TOGETHER = 16


class Slice(NamedTuple):
    """A part of a trace that is read by one task: a file, or some row groups of a Parquet file."""

    path: str
    row_groups: Optional[List[int]] = None


def slices(path: Union[str, os.PathLike[str]], references: int = 50_000_000) -> List[Slice]:
    """The slices of a trace file: of a Parquet file, row groups with about so many rows together; otherwise the file."""
    path = os.fspath(path)
    if not path.endswith(".parquet"):
        return [Slice(path)]
    found: List[List[int]] = []
    rows = references
    for group, rows_of_group in enumerate(_rows(path)):
        if rows >= references:
            found.append([])
            rows = 0
        found[-1].append(group)
        rows += rows_of_group
    return [Slice(path, groups) for groups in found]


def curve(
    trace: Union[str, os.PathLike[str], Slice, Iterable[Union[str, os.PathLike[str], Slice]]],
    estimator: str = "shards",
    *,
    starts: Optional[Sequence[int]] = None,
    read: Optional[dict[str, Any]] = None,
    page_bytes: int = 4096,
    **options: Option,
) -> Curve:
    """The curve of a trace that is stored in a file, or in these files in this order.

    Paths must be readable where tasks run. `read` has options of `read_trace`. `starts` are the numbers of references
    before each slice; where the estimator needs them and they are not given, references are counted first: in the footer of Parquet files, and by one more pass over other files.
    """
    paths = [trace] if isinstance(trace, (str, os.PathLike, Slice)) else trace
    parts = [part for path in paths for part in ([path] if isinstance(path, Slice) else slices(path))]
    if not parts:
        raise OptionError("trace: there are no files, or no row groups in them")
    if not ray.is_initialized():
        ray.init()
    # Its types do not follow a function through `map`.
    remote: Any = ray.remote
    reading = {"page_bytes": page_bytes, **(read or {})}
    begins: Sequence[Optional[int]] = [None] * len(parts)
    if starts is not None:
        begins = starts
    elif _needs_start(estimator, options):
        count = remote(_references)
        counts = ray.get([count.remote(part, reading) for part in parts])
        begins = [0, *accumulate(counts)][:-1]
    if len(begins) != len(parts):
        raise OptionError(f"starts: there are {len(begins)} of them for {len(parts)} slices")
    map_slice, merge_parts, finish_parts = map(remote, (_map, _merge, _finish))
    found = [
        map_slice.remote(part, reading, estimator, {"start": start, "page_bytes": page_bytes, **options})
        for part, start in zip(parts, begins)
    ]
    while len(found) > _TOGETHER:
        found = [merge_parts.remote(*found[at : at + _TOGETHER]) for at in range(0, len(found), _TOGETHER)]
    return Curve.from_json(ray.get(finish_parts.remote(*found)))


def _needs_start(estimator: str, options: dict[str, Any]) -> bool:
    try:
        map_batch([], estimator, **options)
        return False
    except OptionError:
        # Options that are wrong raise here, too.
        map_batch([], estimator, start=0, **options)
        return True


def _rows(path: str) -> Iterator[int]:
    import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

    with pq.ParquetFile(path) as file:
        yield from (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))


def _references(part: Slice, reading: dict[str, Any]) -> int:
    if part.row_groups is not None:
        rows = list(_rows(part.path))
        return sum(rows[group] for group in part.row_groups)
    return sum(map(len, read_trace(part.path, **reading)))


def _map(part: Slice, reading: dict[str, Any], estimator: str, options: dict[str, Any]) -> bytes:
    return map_batch(read_trace(part.path, row_groups=part.row_groups, **reading), estimator, **options)


def _merge(*parts: bytes) -> bytes:
    return merge(parts)


def _finish(*parts: bytes) -> str:
    return finish(merge(parts)).to_json()
