"""How mapping slices scales from one to two workers of Ray, beside two processes that only burn time; and what merging costs.

    slices.py [references of a file] [rounds]

Eight Parquet files (zstd, row groups of a million, Zipf over a million pages) are mapped by one worker and by two, in turn. Prints
million references a second by wall time, and CPU seconds of the workers, medians of the rounds; the second CPU of a shared machine
may not be free, so the ratio of pure arithmetic in two processes is printed beside.
"""

import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

import plimsoll_mrc as pm
from plimsoll_mrc import ray as slices

ESTIMATORS = {
    "shards": {"rate": 0.01},
    "shards at 1/1000": {"rate": 0.001},
    "shards-max": {"max_samples": 1024},
    "lru": {},
}


def write(path, references, seed):
    rng = np.random.default_rng(seed)
    ranks = np.exp(rng.random(references) * np.log(1_000_000)).astype("u8")
    pages = (ranks * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    pq.write_table(pa.table({"page": pages}), path, compression="zstd", row_group_size=1_000_000)


def mapped(part, start, estimator, options):
    cpu = time.process_time()
    result = slices._map(part, {}, estimator, {"start": start, **options})
    return result, time.process_time() - cpu


def decoded(part):
    cpu = time.process_time()
    for batch in pm.read_trace(part.path, row_groups=part.row_groups):
        np.asarray(batch)
    return None, time.process_time() - cpu


def run(workers, tasks):
    """Runs tasks by so many workers at a time; returns results, wall and CPU seconds."""
    waiting, running, results, cpu = list(enumerate(tasks)), {}, {}, 0.0
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < workers:
            place, (function, arguments) = waiting.pop(0)
            running[function.remote(*arguments)] = place
        done, _ = ray.wait(list(running), num_returns=1)
        result, seconds = ray.get(done[0])
        results[running.pop(done[0])] = result
        cpu += seconds
    return [results[place] for place in sorted(results)], time.perf_counter() - start, cpu


def burn(count):
    total = 0
    for number in range(count):
        total += number * number
    return total


def arithmetic():
    """How much faster two processes do twice the work than one does it, with nothing shared: 2 on two free CPUs."""
    seconds = []
    for workers in (1, 2):
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(burn, [1] * workers)
            start = time.perf_counter()
            pool.map(burn, [10_000_000] * workers, chunksize=1)
            seconds.append(time.perf_counter() - start)
    return 2 * seconds[0] / seconds[1]


def main():
    references = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    map_slice, decode = ray.remote(mapped), ray.remote(decoded)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{place}.parquet") for place in range(8)]
        for seed, path in enumerate(paths):
            write(path, references, seed)
        parts = [slices.Slice(path, list(range(pq.ParquetFile(path).num_row_groups))) for path in paths]
        total = references * len(paths)
        bytes_each = sum(Path(path).stat().st_size for path in paths) / total
        print(f"{len(paths)} files of {references} references, {bytes_each:.2f} bytes each")
        kinds = {"decoding alone": [(decode, (part,)) for part in parts]}
        for label, options in ESTIMATORS.items():
            name = label.split(" ")[0]
            kinds[label] = [
                (map_slice, (part, references * place, name, options)) for place, part in enumerate(parts)
            ]
        for label, tasks in kinds.items():
            run(2, tasks[:2])
            found, free = {1: [], 2: []}, []
            for _ in range(rounds):
                free.append(arithmetic())
                for workers in found:
                    results, *seconds = run(workers, tasks)
                    found[workers].append(seconds)
            rates = {n: statistics.median(total / wall / 1e6 for wall, _ in found[n]) for n in found}
            ratio = statistics.median(one[0] / two[0] for one, two in zip(found[1], found[2]))
            cpu = {n: statistics.median(total / cpu / 1e6 for _, cpu in found[n]) for n in found}
            line = (
                f"{label}: {rates[1]:.1f} and {rates[2]:.1f} M/s, ratio {ratio:.2f}"
                f" (arithmetic {statistics.median(free):.2f}); by CPU time {cpu[1]:.1f} and {cpu[2]:.1f} M/s"
            )
            if results[0] is not None:
                size = sum(map(len, results)) / total
                start = time.process_time()
                whole = pm.merge(results)
                merging = time.process_time() - start
                pm.finish(whole)
                finishing = time.process_time() - start - merging
                line += f"; {size:.3f} bytes a reference; merged in {merging:.2f} s, finished in {finishing:.2f} s of CPU time"
            print(line, flush=True)


if __name__ == "__main__":
    main()
