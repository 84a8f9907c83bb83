"""The curve of a trace in Parquet files by Dask: one task for each file."""

from itertools import accumulate

import dask
import plimsoll_mrc as pm
import pyarrow.parquet as pq


def curve(paths, estimator="shards", **options):
    @dask.delayed
    def part(path, start):
        column = pq.read_table(path, columns=["page"]).column("page")
        return pm.map_batch(column, estimator, start=start, **options)

    starts = [0, *accumulate(pq.read_metadata(path).num_rows for path in paths)]
    parts = [part(path, start) for path, start in zip(paths, starts)]
    return pm.finish(dask.delayed(pm.merge)(parts).compute())
