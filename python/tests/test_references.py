"""References of every form give the curve of the same numbers."""

import copy
import pickle
import tracemalloc

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import plimsoll_mrc as pm
from plimsoll_mrc import errors

PAGES = np.random.default_rng(0).integers(0, 100, 5_000)

FORMS = {
    "list": PAGES.tolist(),
    "read-only": np.frombuffer(PAGES.tobytes(), "int64"),
    "strided": np.repeat(PAGES, 3)[::3],
    "backwards": PAGES[::-1].copy()[::-1],
    "nothing masked": np.ma.masked_equal(PAGES, -1),
    "other byte order": PAGES.astype(">u8"),
    "pandas": pd.Series(PAGES),
    "pandas, nullable": pd.Series(PAGES, dtype="Int64"),
    "pandas, arrow": pd.Series(PAGES, dtype="uint32[pyarrow]"),
    "pandas, index": pd.Index(PAGES),
    "polars": pl.Series(PAGES),
    "polars, chunks": pl.concat([pl.Series(PAGES[:10]), pl.Series(PAGES[10:])], rechunk=False),
    "polars, slice": pl.concat([pl.Series([1, 2, 3]), pl.Series(PAGES)])[3:],
    "arrow": pa.array(PAGES),
    "arrow, slice": pa.array(np.concatenate([PAGES, PAGES]))[5_000:],
    "arrow, chunks": pa.chunked_array([PAGES[:1], PAGES[1:]]),
    "iterator": iter(np.array_split(PAGES, 9)),
    "iterator of arrow": (pa.array(part) for part in np.array_split(PAGES, 9)),
    **{f"numpy {kind}": PAGES.astype(kind) for kind in "u8 i8 u4 i4 u2 i2 u1 i1".split()},
    **{f"arrow {kind}": pa.array(PAGES.astype(kind)) for kind in "u8 i8 u4 i4 u2 i2 u1 i1".split()},
}


@pytest.mark.parametrize("refs", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_curve(refs):
    assert pm.mrc(refs, "lru") == pm.mrc(PAGES.astype("u8"), "lru")


def test_a_field_of_packed_records_is_read():
    records = np.zeros(len(PAGES), [("time", "<u4"), ("id", "<u8"), ("size", "<u4")])
    records["id"] = PAGES
    assert pm.mrc(records["id"], "lru") == pm.mrc(PAGES, "lru")


def test_signed_numbers_keep_their_identity():
    signed = PAGES - 50
    for refs in [signed, signed.astype("i4"), signed.astype("i1"), pa.array(signed), pa.array(signed.astype("i2"))]:
        assert pm.mrc(refs, "shards", rate=0.3) == pm.mrc(signed.astype("u8"), "shards", rate=0.3)


def test_contiguous_64_bit_numbers_are_not_copied():
    refs = np.arange(4_000_000)
    estimator = pm.Estimator("shards")
    tracemalloc.start()
    try:
        for copied, given in [(False, refs), (False, pd.Series(refs)), (True, refs.astype("i4"))]:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            estimator.update(given)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert (peak > 1 << 20) == copied, peak
    finally:
        tracemalloc.stop()


def test_long_arrays_are_counted_to_the_last_reference():
    refs = np.arange((1 << 21) + 3) % 1_000
    for given in [refs, refs.astype("u4"), pa.array(refs), np.repeat(refs, 2)[::2]]:
        estimator = pm.Estimator("lru").update(given)
        assert estimator.references == len(refs)
        assert estimator.curve().at(1_000).ratio == 1_000 / len(refs)


def test_a_curve_is_a_table_for_arrow():
    curve = pm.mrc(PAGES, "shards", rate=0.5)
    for frame in [
        pl.DataFrame(curve).to_pandas(),
        pd.DataFrame.from_arrow(curve),
        pa.table(curve).to_pandas(),
    ]:
        assert list(frame) == ["size_pages", "miss_ratio", "low", "high"]
        for name, column in zip(frame, [curve.sizes, curve.ratios, curve.lower, curve.upper]):
            np.testing.assert_array_equal(frame[name], column)


@pytest.mark.parametrize("passed", [copy.copy, copy.deepcopy, *(lambda value, protocol=protocol: pickle.loads(pickle.dumps(value, protocol)) for protocol in (0, 2, 5))])
def test_results_are_copied_and_pickled(passed):
    curve = pm.Curve.from_json(pm.mrc(PAGES, "shards", rate=0.5).to_json())
    assert passed(curve) == curve and passed(curve).to_json() == curve.to_json()
    assert passed(curve.at(7)) == curve.at(7)
    estimator = pm.WorkingSetEstimator("truth", window=2).update([1, 2])
    estimator.end_interval()
    found = estimator.working_set
    assert passed(found) == found == pm.WorkingSet(2, "estimate")
    assert found != pm.WorkingSet(2, "at_least") and passed(pm.WorkingSet(2, "estimate", 1, 3, 4, 5)).settled_pages == 5
    with pytest.raises(pm.errors.OptionError, match='bound: "about": expected estimate, at_least, at_most'):
        pm.WorkingSet(2, "about")


def test_the_arrays_of_a_curve_are_read_only_and_outlive_it():
    curve = pm.mrc(PAGES, "lru")
    sizes = curve.sizes
    assert curve.sizes is sizes and len(curve) == len(sizes)
    with pytest.raises(ValueError, match="read-only"):
        sizes[0] = 1
    expected = sizes.copy()
    del curve
    np.testing.assert_array_equal(sizes, expected)


def test_lists_of_integers_of_64_bits_are_exact():
    large = [1, 2**63, 2**64 - 1, 1]
    assert pm.mrc(large, "lru") == pm.mrc(np.array(large, "u8"), "lru")
    with pytest.raises(errors.ReferencesError, match="from 0 to"):
        pm.mrc([1, 2**64], "lru")
