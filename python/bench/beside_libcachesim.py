"""LRU curves of recorded traces by plimsoll-mrc and by libcachesim: rate and error.

libcachesim's package has no function for a curve, so that LRU is simulated once for each of SIZES sizes. Rates are references of
the trace a second of CPU time, from the file to all ratios; errors are differences from our exact curve at these sizes.

usage: beside_libcachesim.py PLIMSOLL TRACE...
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import libcachesim as lcs
import numpy as np

import plimsoll_mrc as pm

SIZES = 20
RUNS = 5


def timed(function):
    """The median CPU time of some runs, and the last result."""
    times = []
    for _ in range(RUNS):
        began = time.process_time()
        result = function()
        times.append(time.process_time() - began)
    return median(times), result


def simulated(path, sizes):
    ratios = []
    for size in sizes:
        reader = lcs.TraceReader(
            str(path), lcs.TraceType.ORACLE_GENERAL_TRACE, lcs.ReaderInitParam(ignore_obj_size=True)
        )
        ratios.append(lcs.LRU(int(size)).process_trace(reader)[0])
    return np.array(ratios)


plimsoll, *traces = sys.argv[1:]
print(f"{'trace':<16}{'':<30}{'M references/s':>16}{'mean error':>12}{'largest':>10}")
with tempfile.TemporaryDirectory() as folder:
    for trace in map(Path, traces):
        name = trace.name.split(".")[0]
        path = Path(folder) / f"{name}.oracleGeneral.bin"
        subprocess.run([plimsoll, "trace", "convert", trace, path], check=True, stdout=subprocess.DEVNULL)
        pages = np.concatenate(list(pm.read_trace(path)))
        exact = pm.mrc(pages, "lru")
        footprint = len(np.unique(pages))
        sizes = np.unique(np.linspace(1, footprint, SIZES, dtype="u8"))
        truth = exact.at_sizes(sizes).ratios
        lines = {
            f"libcachesim LRU, {len(sizes)} sizes": lambda: simulated(path, sizes),
            "libcachesim LRU, one size": lambda: simulated(path, sizes[-1:]),
            **{
                f"ours, {estimator}": lambda estimator=estimator: pm.mrc(
                    pm.read_trace(path), estimator
                ).at_sizes(sizes).ratios
                for estimator in pm.estimators()
                if estimator != "ghost"
            },
        }
        for label, run in lines.items():
            seconds, ratios = timed(run)
            error = np.abs(ratios - truth[-len(ratios) :])
            rate = len(pages) / seconds / 1e6
            print(f"{name:<16}{label:<30}{rate:>16.2f}{error.mean():>12.4f}{error.max():>10.4f}", flush=True)
