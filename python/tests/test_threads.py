"""Threads work at once, on estimators of their own and on shared ones."""

import signal
import threading
import time

import numpy as np
import pytest

import plimsoll_mrc as pm


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_threads_stream_into_estimators_of_their_own(zipf):
    expected = [pm.mrc(zipf, name) for name in ("lru", "aet")]
    estimators = [pm.Estimator(name) for name in ("lru", "aet")]

    def stream(estimator):
        for part in np.array_split(zipf, 300):
            estimator.update(part)

    in_threads(*(lambda estimator=estimator: stream(estimator) for estimator in estimators))
    assert [estimator.curve() for estimator in estimators] == expected


def test_two_threads_stream_into_one_estimator():
    estimator = pm.Estimator("lru")

    def stream(first):
        for _ in range(200):
            estimator.update(np.arange(first, first + 1_000))
            estimator.curve()

    in_threads(lambda: stream(0), lambda: stream(1_000))
    curve = estimator.curve()
    assert estimator.references == curve.references == 400_000
    assert curve.ratios[-1] == 2_000 / 400_000


def test_other_threads_run_while_an_estimator_works():
    refs = np.random.default_rng(1).integers(0, 1_000_000, 20_000_000)
    estimator = pm.Estimator("lru")
    worker = threading.Thread(target=estimator.update, args=(refs,))
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    worker.join()
    assert estimator.references == len(refs)
    # With the lock held this thread would have had a turn before and one after, if any.
    assert turns > 10


PAGES = np.random.default_rng(1).integers(0, 1_000_000, 10_000_000)
# Of about 10 s.
LONG = {
    "miss_ratios": lambda: pm.Simulation(1).update(PAGES[:200_000]).miss_ratios("arc", range(1_000, 200_000, 20)),
    "object_mrc": lambda: pm.object_mrc(PAGES, PAGES),
    "merge": lambda: pm.merge([pm.map_batch(np.arange(100_000), "lru")] * 2_000),
}


# Of some seconds in one step of one state.
LONG_STEPS = {
    "merge": lambda part: pm.merge([part, part]),
    "finish": pm.finish,
}


@pytest.fixture(scope="session")
def large_part():
    return pm.map_batch(np.random.default_rng(1).permutation(8_000_000), "lru")


@pytest.mark.parametrize("name", LONG_STEPS)
def test_a_long_step_can_be_interrupted(name, large_part):
    assert_interrupted(0.2, lambda: LONG_STEPS[name](large_part), 1.3)


@pytest.mark.parametrize("name", LONG)
def test_a_long_call_can_be_interrupted(name):
    assert_interrupted(1, LONG[name], 2)


def assert_interrupted(after, call, within):
    """An interrupt after some seconds of CPU time, so that what else runs does not matter, ends a call before some more."""
    start = time.process_time()
    interrupted = None

    # No timer of virtual time: it leaves out what a hypervisor takes from the CPU, which this clock counts.
    def interrupt():
        nonlocal interrupted
        while time.process_time() - start < after:
            time.sleep(0.01)
        interrupted = time.process_time()
        signal.raise_signal(signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        call()
        watcher.join()
    watcher.join()
    assert time.process_time() - interrupted < within


def test_a_long_update_can_be_interrupted():
    refs = np.random.default_rng(1).integers(0, 1_000_000, 40_000_000)
    estimator = pm.Estimator("lru")

    def interrupt():
        while estimator.references == 0:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        estimator.update(refs)
        watcher.join()
    watcher.join()
    assert 0 < estimator.references <= len(refs)
    assert estimator.curve().references == estimator.references
