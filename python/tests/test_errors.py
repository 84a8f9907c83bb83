"""Bad input raises the exception that mirrors the Rust error, and leaves the estimator usable."""

from types import MappingProxyType

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from conftest import REQUIRED

import plimsoll_mrc as pm
from plimsoll_mrc import errors

BAD = {
    "floats": ([1.5], "page numbers are integers; this array is of dtype float64"),
    "booleans": (np.array([True]), "of dtype bool"),
    "times": (np.array(["2026-01-01"], "datetime64[s]"), "of dtype datetime64"),
    "objects": (np.array([1, "a"], object), "of dtype object"),
    "two dimensions": (np.zeros((2, 3), int), "one dimension; this one has 2"),
    "a number": (5, "this is of type int"),
    "text": ("1,2,3", "this is of type str"),
    "nothing": (None, "this is of type NoneType"),
    "a table": (pd.DataFrame({"page": [1]}), "this Arrow data is of type Struct"),
    "strings": (pl.Series(["a"]), "this Arrow data is of type Utf8View"),
    "nulls": (pa.array([1, None, None]), "2 of 3 page numbers are null"),
    "nulls of pandas": (pd.Series([1, None], dtype="Int64"), "1 of 2 page numbers are null"),
    "masked values": (np.ma.masked_equal([1, -1, 2], -1), "some page numbers are masked"),
    "ragged lists": ([[1, 2], [3]], "inhomogeneous shape"),
    "128-bit numbers": (pl.Series([1], dtype=pl.Int128), "is still not supported"),
    "iterators in an iterator": (iter([iter([1])]), "this is of type list_iterator"),
}


@pytest.mark.parametrize("refs, text", BAD.values(), ids=BAD)
def test_what_is_not_page_numbers_is_refused(refs, text):
    estimator = pm.Estimator("lru").update([1, 2])
    with pytest.raises(errors.ReferencesError, match=text):
        estimator.update(refs)
    assert estimator.update([1, 2]).curve().at(2).ratio == 0.5


def test_references_before_an_exception_are_counted():
    def batches():
        yield [1, 2]
        raise KeyError("stop")

    estimator = pm.Estimator("lru")
    with pytest.raises(KeyError, match="stop"):
        estimator.update(batches())
    assert estimator.references == 2


@pytest.mark.parametrize("name", pm.estimators())
def test_without_references_there_is_no_curve(name):
    estimator = pm.Estimator(name, **REQUIRED.get(name, {})).update([]).update(np.array([], "u8"))
    with pytest.raises(errors.EmptyError, match="nothing was observed, or none of it is in the sample"):
        estimator.curve()


OPTIONS = {
    "there is no estimator 'lfu', only lru, shards": ("lfu", {}),
    "rate: lru uses every reference": ("lru", {"rate": 0.1}),
    "rats: shards takes only rate, seed": ("shards", {"rats": 0.1}),
    "rats: shards-max takes only max_samples, seed": ("shards-max", {"rats": 0.1}),
    "above 0 and at most 1; got 2": ("shards", {"rate": 2}),
    "rate: 'x' is not a rate": ("shards", {"rate": "x"}),
    "seed: expected a whole number; got -1": ("shards", {"seed": -1}),
    "max_samples: expected a whole number, at least 1; got 0": ("shards-max", {"max_samples": 0}),
    "estimator ghost requires direct SIZE": ("ghost", {}),
    "direct: expected a whole number of pages, or text like '512M'; got None": ("ghost", {"direct": None}),
    "a page cannot have 3 bytes": ("lru", {"page_bytes": 3}),
}


@pytest.mark.parametrize("text", OPTIONS)
def test_options_are_refused_with_a_reason(text):
    name, options = OPTIONS[text]
    with pytest.raises(errors.OptionError) as caught:
        pm.Estimator(name, **options)
    assert text in str(caught.value) and "--" not in str(caught.value)


@pytest.mark.parametrize("rate", [2, 1e18, float("inf"), float("nan"), 0])
def test_rates_are_shares(rate):
    with pytest.raises(errors.OptionError, match="above 0 and at most 1"):
        pm.Estimator("aet", rate=rate)


@pytest.mark.parametrize("share", [-1, float("nan"), float("inf")])
def test_shares_are_numbers_from_0_on(share):
    for name, options in {"prl": ["tolerance", "warm_up"], "pml": ["tolerance"]}.items():
        for option in options:
            with pytest.raises(errors.OptionError, match="expected a share of 0 or more; got"):
                pm.WorkingSetEstimator(name, **{option: share})


CURVE = pm.mrc([1, 2, 1], "lru")
OUT_OF_RANGE = {
    "page_bytes": lambda: pm.mrc([1], "lru", page_bytes=-1),
    "page_bytes of a trace": lambda: pm.read_trace("x", page_bytes=-1),
    "page_bytes of a working set": lambda: pm.WorkingSetEstimator("pml", page_bytes=1 << 64),
    "seed": lambda: pm.Simulation(seed=-1),
    "seed of a plan": lambda: pm.plan({}, "1G", seed=-1),
    "start": lambda: pm.map_batch([1], "lru", start=-1),
    "points": lambda: CURVE.thinned(-1),
    "rate": lambda: pm.Simulation("2"),
    "rate of objects": lambda: pm.object_mrc([1], [1], rate="1/0"),
    "shares": lambda: pm.plan({"a": pm.Vm(CURVE, "64M", shares=0)}, "1G"),
    "baseline": lambda: pm.plan({"a": pm.Vm(CURVE, "64Q")}, "1G"),
    "min": lambda: pm.plan({"a": pm.Vm(CURVE, "64M", min=None)}, "1G"),
    "size of a point": lambda: pm.Point(-1, 0, 0, 0),
    "size of a working set": lambda: pm.WorkingSet(-1, "estimate"),
    "upper limit of a working set": lambda: pm.WorkingSet(1, "estimate", 0, 1 << 64),
    "interval of a working set": lambda: pm.WorkingSet(1, "estimate", settled_interval=-1),
    "row_groups": lambda: pm.read_trace("x.parquet", row_groups=[-1]),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_out_of_range_are_errors_of_ours(name):
    with pytest.raises(errors.OptionError):
        OUT_OF_RANGE[name]()


def test_pages_beyond_the_memory_are_refused():
    estimator = pm.WorkingSetEstimator("esx", memory=100)
    with pytest.raises(errors.ReferencesError, match="page 100 is beyond the memory of 100 pages"):
        estimator.update([99, 100])
    with pytest.raises(errors.OptionError, match="^memory: it has no pages"):
        pm.WorkingSetEstimator("esx", memory=0)


def test_a_miss_ratio_is_a_number():
    with pytest.raises(errors.OptionError, match="got nan"):
        pm.mrc([1, 1], "lru").size_for(float("nan"))


def test_traces_that_cannot_be_read(folder):
    with pytest.raises(errors.TraceOpenError, match="cannot open 'none.ids'") as caught:
        pm.read_trace("none.ids")
    assert isinstance(caught.value, OSError) and isinstance(caught.value.__cause__, FileNotFoundError)
    (folder / "bad.ids").write_text("1\n2\nx\n")
    estimator = pm.Estimator("lru")
    with pytest.raises(errors.TraceError, match="bad.ids, line 3: expected"):
        estimator.update(pm.read_trace("bad.ids"))
    (folder / "bad.csv").write_text("key,--size\nx,1\n")
    with pytest.raises(errors.TraceError, match=r"\(or another, by page_column or key_column\), found 'key,--size'"):
        pm.Estimator("lru").update(pm.read_trace("bad.csv"))
    with pytest.raises(errors.OptionError, match="'odd' is not a trace format; known formats: ids"):
        pm.read_trace("bad.ids", "odd")


def test_names_and_contents_of_files_are_as_they_are(folder):
    name = "of --rate (--seed).csv"
    with pytest.raises(errors.TraceOpenError) as caught:
        pm.read_trace(name)
    assert str(caught.value).startswith(f"cannot open '{name}': ")
    (folder / name).write_text("key,of --size\nx,1\n")
    with pytest.raises(errors.TraceError) as caught:
        pm.Estimator("lru").update(pm.read_trace(name))
    assert str(caught.value) == (
        f"{name}, line 1: expected a column 'page' (or another, by page_column or key_column), found 'key,of --size'"
    )
    with pytest.raises(errors.TraceError) as caught:
        pm.read_trace(name, device="1")
    assert str(caught.value).startswith(f"{name}: device is not used by csv traces")
    (folder / "of --rate").write_bytes(b"\1 --rate")
    with pytest.raises(errors.TraceError) as caught:
        pm.read_trace("of --rate")
    assert str(caught.value).startswith(r"of --rate: unknown format, it begins with '\x01 --rate'; use format with one of")


def test_curves_and_plans_that_are_not_valid():
    curve = pm.mrc(np.arange(10_000) % 1_000, "lru")
    with pytest.raises(errors.CurveError):
        pm.Curve.from_json("{}")
    with pytest.raises(errors.CurveError, match="does not exceed the point before it"):
        curve.at_sizes([2, 1])
    with pytest.raises(errors.CurveError, match="pages of 4096 bytes, the other of 8192"):
        curve.mean_absolute_error(pm.mrc([1, 2], "lru", page_bytes=8192))
    with pytest.raises(errors.PlanError, match="VM web has no baseline"):
        pm.plan({"web": pm.Vm(curve)}, "1G")
    with pytest.raises(errors.OptionError, match="there is no policy 'best'"):
        pm.plan({}, "1G", policy="best")
    with pytest.raises(errors.OptionError, match="seed: search hull does not take it; only annealing does"):
        pm.plan({}, "1G", search="hull", seed=1)
    with pytest.raises(errors.InfeasibleError, match="need 8 MiB, and the host has 4 MiB") as caught:
        pm.plan({"web": pm.Vm(curve, baseline="8M", min="8M")}, "4M")
    assert caught.value.needed_bytes == 8 << 20
    assert caught.value.total_bytes == 4 << 20
    assert caught.value.least_bytes == {"web": 8 << 20}


def test_sizes_are_a_list_and_no_text():
    curve = pm.mrc([1, 2, 1], "lru")
    with pytest.raises(errors.OptionError, match="expected a list of sizes; got '12'"):
        curve.at_sizes("12")
    with pytest.raises(errors.OptionError, match="expected a list of sizes; got '12'"):
        pm.Simulation(1).update([1, 2, 1]).miss_ratios("lru", "12")
    with pytest.raises(errors.OptionError, match="sizes: there are none"):
        curve.at_sizes([])


def test_a_plan_is_of_vms():
    with pytest.raises(TypeError, match="^expected a Vm; got 5$"):
        pm.plan({"a": 5}, "1G")


def test_a_plan_takes_any_mapping():
    vms = {"web": pm.Vm(pm.mrc([1, 2, 1], "lru"), baseline="8M")}
    assert pm.plan(MappingProxyType(vms), "1G") == pm.plan(vms, "1G")


def test_every_exception_is_a_plimsoll_error():
    raised = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(raised) == 10
    assert all(issubclass(value, pm.PlimsollError) and value.__doc__ for value in raised)
