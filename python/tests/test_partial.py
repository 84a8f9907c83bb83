"""Partial states: slices mapped apart and merged give the curve of the whole, under any engine and when a worker dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import plimsoll
from hypothesis import given, settings
from hypothesis import strategies as st

import plimsoll_mrc as pm

EXAMPLES = Path(__file__).parents[1] / "examples"
OPTIONS = {"lru": {}, "shards": {"rate": 0.2, "seed": 5}, "shards-max": {"max_samples": 50}}
streams = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), min_size=1, max_size=300)


def mapped(pages, cuts, name, **options):
    edges = [0, *sorted(cuts), len(pages)]
    return [pm.map_batch(pages[a:b], name, start=a, **options) for a, b in zip(edges, edges[1:])]


@settings(deadline=None, max_examples=200)
@given(streams, st.sampled_from(sorted(OPTIONS)), st.data())
def test_slices_give_the_curve_of_the_whole_stream(pages, name, data):
    refs = np.array(pages, "u8")
    parts = mapped(refs, data.draw(st.lists(st.integers(0, len(refs)), max_size=5)), name, **OPTIONS[name])
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [pm.merge(parts[at : at + 2])]
    try:
        expected = pm.mrc(refs, name, **OPTIONS[name])
    except pm.errors.EmptyError:
        with pytest.raises(pm.errors.EmptyError):
            pm.finish(parts[0])
        return
    assert pm.finish(parts[0]) == expected


@pytest.mark.parametrize("name", OPTIONS)
def test_python_and_the_command_line_write_the_same_partial_states(folder, zipf_trace, zipf, name):
    options = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS[name].items()]
    plimsoll("mrc", zipf_trace, "--estimator", name, *options, "--start", 0, "--partial", "a.part")
    mine = pm.map_batch(pm.read_trace(zipf_trace), name, start=0, **OPTIONS[name])
    assert Path("a.part").read_bytes() == mine
    Path("b.part").write_bytes(mine)
    merged = pm.Curve.from_json(plimsoll("mrc", "--merge", "b.part", "-o", "json", "--points", 1 << 30))
    assert merged == pm.finish(mine) == pm.mrc(zipf, name, **OPTIONS[name])


def test_what_is_no_partial_state_or_does_not_follow_raises(zipf):
    part = pm.map_batch(zipf, "lru", start=0)
    for wrong in (b"", b"PLIMPART", part[:-1], part[:50] + b"\0" + part[51:] + b"\0"):
        with pytest.raises(pm.errors.PartialError):
            pm.finish(wrong)
    with pytest.raises(pm.errors.PartialError, match="out of order"):
        pm.merge([part, part])
    with pytest.raises(pm.errors.PartialError, match="of different curves"):
        pm.merge([part, pm.map_batch(zipf, "shards", start=len(zipf))])
    with pytest.raises(pm.errors.PartialError, match="no parts"):
        pm.merge([])
    with pytest.raises(pm.errors.PartialError, match="first 5 references"):
        pm.finish(pm.map_batch(zipf, "lru", start=5))
    with pytest.raises(pm.errors.OptionError, match="start"):
        pm.map_batch(zipf, "shards")
    with pytest.raises(pm.errors.OptionError, match="aet has no partial states"):
        pm.map_batch(zipf, "aet")
    with pytest.raises(TypeError):
        pm.finish("text")


@pytest.fixture(scope="module")
def stream():
    return np.random.default_rng(7).zipf(1.3, 400_000) % 50_000


@pytest.fixture(scope="module")
def files(stream, tmp_path_factory):
    """The stream in three Parquet files of several row groups."""
    folder = tmp_path_factory.mktemp("parquet")
    paths = [str(folder / f"{place}.parquet") for place in range(3)]
    for path, pages in zip(paths, np.array_split(stream, 3)):
        pq.write_table(pa.table({"page": pages}), path, row_group_size=20_000)
    return paths


@pytest.fixture(scope="module")
def local_ray():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OPTIONS)
def test_ray_gives_the_same_curve(local_ray, stream, files, zipf_trace, zipf, name):
    from plimsoll_mrc import ray

    expected = pm.mrc(stream, name, **OPTIONS[name])
    assert ray.curve(files, name, **OPTIONS[name]) == expected
    parts = [part for path in files for part in ray.slices(path, 1)]
    assert len(parts) == 21
    assert ray.curve(parts, name, **OPTIONS[name]) == expected
    # Files that do not tell how many references they have, and nothing but the estimator's name.
    twice = pm.mrc(np.concatenate([zipf, zipf]), name)
    assert ray.curve([zipf_trace, zipf_trace], name) == twice
    with pytest.raises(pm.errors.OptionError, match="1 of them for 3 slices"):
        ray.curve(files, name, starts=[0])


@pytest.mark.filterwarnings("default")
def test_ray_reads_a_file_as_read_trace_does(local_ray, folder, stream):
    from plimsoll_mrc import ray

    table = pa.table({"time": np.arange(len(stream)), "Page": stream, "object": stream[::-1]})
    # Workers run in another directory.
    path = str(folder / "one.parquet")
    pq.write_table(table, path, row_group_size=100_000)
    for given in (path, Path(path), ray.Slice(path)):
        assert ray.curve(given, "lru") == pm.mrc(stream, "lru")
    for column, pages in {"2": stream, "OBJECT": stream[::-1]}.items():
        assert ray.curve(path, "lru", read={"page_column": column}) == pm.mrc(pages, "lru")
    negative = folder / "negative.parquet"
    pq.write_table(pa.table({"page": [1, -1]}), negative)
    with pytest.raises(pm.errors.TraceError, match="null or negative"):
        ray.curve(negative, "lru")
    with pytest.raises(pm.errors.OptionError, match="there are no files"):
        ray.curve([])
    with pytest.raises(pm.errors.TraceError, match="there is no row group 4"):
        pm.read_trace(path, row_groups=[4])


def reader_of(fifo, others):
    """The process that has a pipe open, other than these."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                opened = {os.readlink(link) for link in (folder / "fd").iterdir()}
            except OSError:
                continue
            if str(fifo) in opened and int(folder.name) not in others:
                return int(folder.name)
        time.sleep(0.05)
    raise AssertionError(f"nobody reads {fifo}")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_worker_that_is_killed_changes_nothing(local_ray, folder, name):
    from concurrent.futures import ThreadPoolExecutor

    from plimsoll_mrc import ray

    pages = np.random.default_rng(3).integers(0, 5_000, 90_000)
    slices = np.array_split(pages, 3)
    paths = [folder / f"{place}.ids" for place in range(3)]
    for path, part in zip(paths, slices):
        np.savetxt(path, part, "%d")
    # The second slice comes through a pipe, in which its worker waits.
    text = paths[1].read_bytes()
    paths[1].unlink()
    os.mkfifo(paths[1])
    pipe = os.open(paths[1], os.O_RDWR)
    starts = [0, 30_000, 60_000]
    with ThreadPoolExecutor() as pool, os.fdopen(pipe, "wb") as writer:
        found = pool.submit(ray.curve, paths, name, starts=starts, read={"format": "ids"}, **OPTIONS[name])
        first = reader_of(paths[1], {os.getpid()})
        os.kill(first, signal.SIGKILL)
        second = reader_of(paths[1], {os.getpid(), first})
        assert second != first and not found.done()
        writer.write(text)
        writer.close()
        assert found.result(120) == pm.mrc(pages, name, **OPTIONS[name])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OPTIONS)
def test_dask_gives_the_same_curve(stream, files, monkeypatch, name):
    from dask.distributed import Client, LocalCluster

    monkeypatch.syspath_prepend(EXAMPLES)
    import dask_curve

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        assert dask_curve.curve(files, name, **OPTIONS[name]) == pm.mrc(stream, name, **OPTIONS[name])


@pytest.mark.filterwarnings("default")
def test_spark_gives_the_same_curve(stream, files):
    # Some 400 MB, so not among the packages of the extra `test`.
    pytest.importorskip("pyspark", reason="pyspark is not installed (extra `spark`)")
    if subprocess.run(["sh", "-c", "java -version"], capture_output=True).returncode:
        pytest.skip("Spark needs a Java runtime: apt install default-jre-headless")
    # In a process of its own, which takes the JVM with it.
    script = (
        "import sys; from pyspark.sql import SparkSession; import spark_curve\n"
        "spark = SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "for name, options in eval(sys.argv[1]).items():\n"
        "    print('curve', name, spark_curve.curve(spark, sys.argv[2:], name, **options).to_json())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", script, repr(OPTIONS), *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("curve ")]
    assert [name for _, name, _ in found] == list(OPTIONS)
    for _, name, text in found:
        assert pm.Curve.from_json(text) == pm.mrc(stream, name, **OPTIONS[name])
