"""LRU curves of recorded traces by plimsoll-mrc and by libcachesim: rate and error.

libcachesim's package has no function for a curve, so that LRU is simulated once for each of SIZES sizes. Rates are references of
the trace a second of CPU time, from the file to all ratios; errors are differences from our exact curve at these sizes.

Other eviction policies follow: the differences of our full simulation from libcachesim's at the same sizes, and of our sample of a
tenth of the pages from our full simulation. Traces in oracle-general form are also compared with their objects' sizes.

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


POLICIES = {
    "fifo": lcs.FIFO,
    "lru": lcs.LRU,
    "arc": lcs.ARC,
    "s3-fifo": lcs.S3FIFO,
    "sieve": lcs.Sieve,
    "w-tinylfu": lcs.WTinyLFU,
}

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])


def simulated(path, sizes, policy=lcs.LRU, with_sizes=False):
    """Miss ratios by requests, or pairs of those by requests and by bytes."""
    ratios = []
    for size in sizes:
        reader = lcs.TraceReader(
            str(path),
            lcs.TraceType.ORACLE_GENERAL_TRACE,
            lcs.ReaderInitParam(ignore_obj_size=not with_sizes),
        )
        both = policy(int(size)).process_trace(reader)
        ratios.append(both if with_sizes else both[0])
    return np.array(ratios)


def compare_policies(name, path, pages, sizes):
    # libcachesim refuses S3-FIFO in fewer than 10 pages, and admits none with W-TinyLFU in fewer than 100.
    sizes = sizes[sizes >= 100]
    full = pm.Simulation(rate=1).update(pages)
    sample = pm.Simulation(rate=0.1).update(pages)
    for policy, theirs in POLICIES.items():
        ours = full.miss_ratios(policy, sizes)
        seconds, ratios = timed(lambda: simulated(path, sizes, theirs))
        error = np.abs(ours - ratios)
        sampled = np.abs(sample.miss_ratios(policy, sizes) - ours)
        rate = len(pages) / seconds / 1e6
        print(f"{name:<16}{policy + ' beside libcachesim':<30}{rate:>16.2f}{error.mean():>12.4f}{error.max():>10.4f}")
        print(f"{name:<16}{policy + ', a tenth':<30}{'':>16}{sampled.mean():>12.4f}{sampled.max():>10.4f}", flush=True)


def compare_sizes(name, path):
    records = np.fromfile(path, RECORD)
    objects, sizes = records["object"], records["size"]
    _, first = np.unique(objects, return_index=True)
    footprint = int(sizes[first].astype("u8").sum())
    caches = np.linspace(footprint // 1000, footprint, SIZES, dtype="u8")
    theirs = simulated(path, caches, with_sizes=True)
    exact = pm.object_mrc(objects, sizes)
    for rate in (1.0, 0.1, 0.01):
        seconds, curves = timed(lambda: pm.object_mrc(objects, sizes, rate=rate))
        for column, (curve, whole) in enumerate(zip(curves, exact)):
            by = ("requests", "bytes")[column]
            ratios = curve.at_sizes(caches).ratios
            label, truth = (f"objects of a share {rate} by {by}", whole.at_sizes(caches).ratios)
            if rate == 1:
                label, truth = f"objects by {by}, libcachesim", theirs[:, column]
            error = np.abs(ratios - truth)
            rate_of = len(objects) / seconds / 1e6
            print(f"{name:<16}{label:<30}{rate_of:>16.2f}{error.mean():>12.4f}{error.max():>10.4f}", flush=True)


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
        compare_policies(name, path, pages, sizes)
        if trace.name.endswith(".oracleGeneral.bin"):
            compare_sizes(name, trace)
