"""Runs an estimator on the pages in a file of uint64 for each line of standard input; `plimsoll-bench python` starts it.

A line is the name of an estimator and options, as `shards rate=0.01`; the answer is the CPU time in seconds from the first batch
to the finished curve.
"""

import sys
import time

import numpy as np

import plimsoll_mrc as pm

BATCH = 1 << 20

pages = np.fromfile(sys.argv[1], "u8")
for line in sys.stdin:
    name, *options = line.split()
    estimator = pm.Estimator(name, **dict(option.split("=") for option in options))
    began = time.process_time()
    for start in range(0, len(pages), BATCH):
        estimator.update(pages[start : start + BATCH])
    estimator.curve()
    print(time.process_time() - began, flush=True)
