"""The curve of a trace in Parquet files by Spark: one partition for each file, as `mapInArrow` passes it on."""

from itertools import accumulate

import plimsoll_mrc as pm
import pyarrow as pa
import pyarrow.parquet as pq


def curve(spark, paths, estimator="shards", **options):
    def parts(batches):
        for batch in batches:
            for place, path, start in zip(*(column.to_pylist() for column in batch.columns)):
                pages = pq.read_table(path, columns=["page"]).column("page")
                part = pm.map_batch(pages, estimator, start=start, **options)
                yield pa.RecordBatch.from_pydict({"place": [place], "part": [part]})

    starts = accumulate((pq.read_metadata(path).num_rows for path in paths[:-1]), initial=0)
    slices = spark.createDataFrame(list(zip(range(len(paths)), paths, starts)), "place long, path string, start long")
    found = slices.repartitionByRange(len(paths), "place").mapInArrow(parts, "place long, part binary")
    return pm.finish(pm.merge(bytes(row.part) for row in found.orderBy("place").toLocalIterator()))
