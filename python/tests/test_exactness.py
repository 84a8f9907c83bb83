"""Curves beside a naive LRU, and working sets beside sets of pages."""

from collections import Counter

import numpy as np
import pytest
from conftest import REQUIRED
from hypothesis import given, settings
from hypothesis import strategies as st

import plimsoll_mrc as pm

# Runs of small numbers, with some that are far apart.
streams = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), min_size=1, max_size=300)


def naive(pages):
    """Sizes and miss ratios of LRU memories, by a list of pages in the order of their use."""
    used, reuses = [], Counter()
    for page in pages:
        if page in used:
            reuses[len(used) - used.index(page)] += 1
            used.remove(page)
        used.append(page)
    sizes, ratios, misses = [0], [1.0], len(pages)
    for size in sorted(reuses):
        misses -= reuses[size]
        sizes.append(size)
        ratios.append(misses / len(pages))
    return sizes, ratios


@settings(deadline=None, max_examples=200)
@given(streams)
def test_what_is_exact_is_what_a_naive_lru_gives(pages):
    refs = np.array(pages, "u8")
    sizes, ratios = naive(pages)
    exact = [name for name, row in pm.estimators().items() if row["is_exact"]]
    assert exact
    for name, options in [(name, {}) for name in exact] + [("shards", {"rate": 1})]:
        curve = pm.mrc(refs, name, **options)
        assert curve.sizes.tolist() == sizes
        np.testing.assert_allclose(curve.ratios, ratios, rtol=0, atol=1e-12)
        assert (curve.lower == curve.ratios).all() and (curve.upper == curve.ratios).all()


@settings(deadline=None, max_examples=100)
@given(streams, st.sampled_from(sorted(pm.estimators())), st.integers(1, 50))
def test_every_curve_falls_within_its_band_however_batches_end(pages, name, batch):
    refs = np.array(pages, "u8")
    estimator = pm.Estimator(name, **REQUIRED.get(name, {}))
    for start in range(0, len(refs), batch):
        estimator.update(refs[start : start + batch])
    try:
        curve = estimator.curve()
    except pm.errors.EmptyError:
        assert name in ("shards", "ghost")
        return
    assert (np.diff(curve.sizes.astype("i8")) > 0).all() and (np.diff(curve.ratios) <= 0).all()
    assert (curve.lower <= curve.ratios).all() and (curve.ratios <= curve.upper).all()


@pytest.mark.parametrize("name", [name for name in pm.estimators() if name != "ghost"])
def test_every_estimate_is_close_to_the_exact_curve(zipf, name):
    exact = pm.mrc(zipf, "lru")
    curve = pm.mrc(zipf, name, **({"rate": 0.2} if name == "shards" else {}))
    assert curve.mean_absolute_error(exact) < 0.02
    assert exact.mean_absolute_error(exact, np.array([1, 5])) == 0 == exact.mean_absolute_error(exact, ["4M"])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 30), max_size=40), min_size=1, max_size=9), st.integers(1, 4))
def test_the_true_working_set_is_the_set_of_pages_of_the_window(intervals, window):
    estimator = pm.WorkingSetEstimator("truth", window=window)
    assert estimator.working_set is None
    for end, pages in enumerate(intervals, 1):
        result = estimator.update(pages).end_interval()
        expected = set().union(*intervals[max(0, end - window) : end])
        assert result == {"touched_pages": len(set(pages)), "truth_pages": len(expected)}
        assert estimator.working_set.size_pages == len(expected)


@pytest.mark.parametrize("name", pm.working_set_estimators())
def test_every_working_set_estimator_finds_half_of_a_memory(name):
    estimator = pm.WorkingSetEstimator(name, **REQUIRED.get(name, {}))
    columns = pm.working_set_estimators()[name]["columns"]
    for _ in range(60):
        assert list(estimator.update(np.arange(5_000, dtype="u4")).end_interval()) == columns
    found = estimator.working_set
    if name == "esx":
        assert found.lower <= 5_000 <= found.upper
    else:
        assert (found.size_pages, found.bound) == (5_000, "estimate")
        assert name == "truth" or found.settled_pages == 5_000
