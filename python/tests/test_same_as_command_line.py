"""What Python computes is what `plimsoll` computes, bit for bit."""

import csv

import numpy as np
import pytest
from conftest import REQUIRED, curve_of_cli, plan_of_cli, plimsoll

import plimsoll_mrc as pm


@pytest.mark.parametrize("name", pm.estimators())
@pytest.mark.parametrize("batch", [1_000, 300_000])
def test_every_estimator_gives_the_curve_of_the_command_line(zipf_trace, zipf, name, batch):
    options = REQUIRED.get(name, {})
    flags = [flag for option, value in options.items() for flag in (f"--{option}", value)]
    estimator = pm.Estimator(name, **options)
    for start in range(0, len(zipf), batch):
        estimator.update(zipf[start : start + batch])
    assert estimator.curve() == curve_of_cli(zipf_trace, "--estimator", name, *flags)
    assert estimator.references == len(zipf)


@pytest.mark.parametrize(
    "name, options",
    [
        ("shards", {"rate": "1/20", "seed": 7}),
        ("shards-max", {"max_samples": 500, "seed": 3}),
        ("aet", {"rate": 0.1}),
        ("counter-stacks", {"interval": 1000}),
        ("lru", {"threads": 2}),
        ("ghost", {"direct": "4M", "ghost": 5000}),
    ],
)
def test_options_mean_the_same(zipf_trace, zipf, name, options):
    flags = [flag for option, value in options.items() for flag in ("--" + option.replace("_", "-"), value)]
    assert pm.mrc(zipf, name, **options) == curve_of_cli(zipf_trace, "--estimator", name, *flags)


def test_defaults_may_be_given():
    for rows, make in (pm.estimators(), pm.Estimator), (pm.working_set_estimators(), pm.WorkingSetEstimator):
        for name, row in rows.items():
            defaults = {option: spec["default"] for option, spec in row["options"].items()}
            make(name, **{**defaults, **REQUIRED.get(name, {})})


def test_sizes_and_points_are_those_of_the_command_line(zipf_trace, zipf):
    curve = pm.mrc(zipf, "lru")
    at_sizes = pm.Curve.from_json(plimsoll("mrc", zipf_trace, "-o", "json", "--sizes", "100,4M,20000"))
    assert curve.at_sizes([100, "4M", 20_000]) == at_sizes
    assert curve.thinned(50) == pm.Curve.from_json(plimsoll("mrc", zipf_trace, "-o", "json", "--points", 50))
    assert at_sizes.at("4M") == curve.at(1024)


def test_a_trace_is_read_as_by_the_command_line(folder):
    (folder / "disk.csv").write_text("page,op\n7,r\n9,w\n7,r\n")
    trace = pm.read_trace("disk.csv", "csv", page_column="page")
    assert trace.format == "csv"
    assert [pages.tolist() for pages in trace] == [[7, 9, 7]]
    assert pm.mrc(pm.read_trace("disk.csv"), "lru") == curve_of_cli("disk.csv")
    (folder / "web.tsv").write_text("url\n/a\n/b\n/a\n")
    keys = pm.read_trace("web.tsv", "csv", key_column="url")
    assert pm.mrc(keys, "lru") == curve_of_cli("web.tsv", "--key-column", "url")
    with pytest.raises(pm.errors.OptionError, match="page_column and key_column exclude each other"):
        pm.read_trace("web.tsv", "csv", page_column="url", key_column="url")


def test_a_plan_is_that_of_the_command_line(folder, zipf):
    web = pm.mrc(zipf, "shards", rate=0.1)
    db = pm.mrc(np.arange(200_000) % 30_000, "lru")
    for name, curve in {"web": web, "db": db}.items():
        (folder / f"{name}.json").write_text(curve.to_json(name))
    flags = ["--vm", "web:baseline=80M,min=16M", "--vm", "db:baseline=120M,max-loss=1%"]
    vms = {"web": pm.Vm(web, baseline="80M", min="16M"), "db": pm.Vm(db, baseline="120M", max_loss="1%")}
    plan = pm.plan(vms, "210M", max_loss=0.2, unit="1M")
    assert plan == plan_of_cli("web.json", "db.json", "--total", "210M", "--max-loss", "20%", "--unit", "1M", *flags)
    assert sum(target["target_bytes"] for target in plan["targets"]) <= 210 << 20
    for policy, options in {"esx": {"idle_tax": 0.5}, "isolated": {"search": "annealing", "seed": 3}}.items():
        given = [flag for key, value in options.items() for flag in ("--" + key.replace("_", "-"), value)]
        of_cli = plan_of_cli("web.json", "db.json", "--total", "210M", "--policy", policy, *given, *flags)
        assert pm.plan(vms, "210M", policy=policy, **options) == of_cli


def rows_of_cli(*args):
    return list(csv.DictReader(plimsoll("mrc", *args, "-o", "csv").splitlines()))


@pytest.mark.parametrize("rate", [1, 0.2])
def test_policies_are_simulated_as_by_the_command_line(zipf_trace, zipf, rate):
    policies = list(pm.cache_policies())
    sizes = [100, 3_000, 20_000]
    flags = ["--cache-policy", ",".join(policies), "--rate", rate, "--seed", 5, "--sizes", ",".join(map(str, sizes))]
    rows = rows_of_cli(zipf_trace, *flags)
    simulation = pm.Simulation(rate, seed=5).update(zipf)
    ratios = [ratio for policy in policies for ratio in simulation.miss_ratios(policy, sizes)]
    assert ratios == [float(row["miss_ratio"]) for row in rows]
    assert simulation.references == len(zipf)
    fraction = pm.Simulation(f"{rate:.0%}", seed=5).update(zipf)
    assert (fraction.miss_ratios("sieve", sizes) == simulation.miss_ratios("sieve", sizes)).all()
    with pytest.raises(pm.errors.OptionError, match="there is no policy 'belady', only fifo, lru"):
        simulation.miss_ratios("belady", sizes)


@pytest.mark.parametrize("rate", [1, 0.1])
def test_objects_with_sizes_have_the_curves_of_the_command_line(folder, zipf, rate):
    records = np.zeros(len(zipf), [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records["object"] = zipf
    records["size"] = 1 + zipf % 9_973
    records.tofile(folder / "objects.oracleGeneral")
    sizes = [100_000, 10_000_000]
    flags = ["--estimator", "shards", "--rate", rate, "--seed", 5, "--sizes", ",".join(map(str, sizes))]
    rows = rows_of_cli("objects.oracleGeneral", "--object-sizes", *flags)
    curves = pm.object_mrc(zipf, records["size"], rate=rate, seed=5)
    for curve, column in zip(curves, ["miss_ratio", "byte_miss_ratio"]):
        assert curve.at_sizes(sizes).ratios.tolist() == [float(row[column]) for row in rows]
    with pytest.raises(pm.errors.ReferencesError, match="there are 2 objects and 1 sizes"):
        pm.object_mrc([1, 2], [3])
    with pytest.raises(pm.errors.ReferencesError, match="4 GiB or more"):
        pm.object_mrc([1], [1 << 32])
