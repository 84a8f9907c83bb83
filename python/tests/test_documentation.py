"""Examples run, every public name is documented, the stubs describe the package, and its pictures are drawn."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot

import plimsoll_mrc as pm

matplotlib.use("agg")
GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


def documented():
    """Every public class, function, method and property, by its name."""
    yield "plimsoll_mrc", pm
    for name in pm.__all__:
        value = getattr(pm, name)
        if inspect.ismodule(value) or isinstance(value, str):
            continue
        yield name, value
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member, of_class in vars(value).items():
                if not member.startswith("_") and (callable(of_class) or inspect.isdatadescriptor(of_class)):
                    yield f"{name}.{member}", of_class


NAMES = dict(documented())


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_and_its_examples_run(folder, name):
    (folder / "loop.ids").write_text("1\n2\n3\n" * 2)
    text = inspect.getdoc(NAMES[name])
    # Fields of results are described by their class.
    fields = ("Point.", "WorkingSet.", "Vm.")
    assert text or name.startswith(fields), name
    example = doctest.DocTestParser().get_doctest(text or "", dict(vars(pm)), name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example)
    assert runner.failures == 0


def test_there_are_examples():
    with_examples = [name for name, value in NAMES.items() if ">>>" in (inspect.getdoc(value) or "")]
    assert {"plimsoll_mrc", "mrc", "Estimator", "Curve", "WorkingSetEstimator", "read_trace"} <= set(with_examples)


def test_the_guide_of_slices_runs():
    failures, examples = doctest.testfile(str(GUIDE.with_name("scale.md")), module_relative=False)
    assert examples > 5 and failures == 0


def test_the_guide_runs(folder):
    failures, examples = doctest.testfile(str(GUIDE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert examples > 20 and failures == 0
    assert (folder / "curve.svg").stat().st_size > 10_000


def test_the_documentation_of_mrc_lists_every_estimator_and_option():
    for name, row in pm.estimators().items():
        assert f"    {name}: {row['help']}" in pm.mrc.__doc__
        assert all(f"        {option}: " in pm.mrc.__doc__ for option in row["options"])


def test_the_stubs_describe_the_package():
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "plimsoll_mrc", "--ignore-disjoint-bases"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_types_are_checked(folder):
    (folder / "good.py").write_text(
        "import numpy as np\nimport plimsoll_mrc as pm\n"
        "curve: pm.Curve = pm.mrc(np.arange(9), 'shards', rate='1/2', seed=1)\n"
        "ratio: float = curve.at('4M').ratio + curve.at(np.int64(5)).ratio\nvm = pm.Vm(curve, baseline='4M')\npm.plan({'a': vm}, '1G')\n"
    )
    (folder / "bad.py").write_text("import plimsoll_mrc as pm\npm.mrc([1]).at(1).ratio.upper()\npm.plan({'a': 1}, [])\n")
    found = [subprocess.run([sys.executable, "-m", "mypy", "--strict", name], capture_output=True, text=True)
             for name in ("good.py", "bad.py")]
    assert found[0].returncode == 0, found[0].stdout
    assert found[1].stdout.count("error:") == 3, found[1].stdout


def test_a_curve_is_drawn_with_its_band():
    pages = np.random.default_rng(0).integers(0, 50_000, 1_000_000)
    figure, axes = pyplot.subplots()
    exact, sampled = pm.mrc(pages, "lru"), pm.mrc(pages, "shards")
    assert exact.plot(axes, label="exact") is axes and len(axes.collections) == 0
    sampled.plot(axes, color="red")
    assert len(axes.collections) == 1
    pm.mrc([1, 2, 1, 2], "lru", page_bytes=1 << 30).plot(axes)
    drawn, line, of_larger_pages = axes.lines
    assert drawn.get_label() == "exact" and line.get_color() == "red"
    np.testing.assert_allclose(drawn.get_xdata()[:-1], exact.sizes * 4096 / 2**20)
    np.testing.assert_array_equal(drawn.get_ydata()[:-1], exact.ratios)
    # In the same unit, whatever its range.
    np.testing.assert_array_equal(of_larger_pages.get_xdata()[:-1], [0, 2048])
    # Lines and bands end together, beyond the last point of any, and a line at 1 is within the frame.
    end = axes.get_xlim()[1]
    assert end > 2048 and axes.get_ylim()[1] > 1
    assert all(line.get_xdata()[-1] == end and line.get_ydata()[-1] == line.get_ydata()[-2] for line in axes.lines)
    assert axes.collections[0].get_paths()[0].vertices[:, 0].max() == end
    assert axes.get_xlabel() == "memory size (MiB)"
    pyplot.close(figure)


def test_a_curve_of_one_point_is_drawn():
    figure, axes = pyplot.subplots()
    pm.mrc([1, 2, 3], "lru").plot(axes, where="mid")
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [0, 1] and line.get_ydata().tolist() == [1, 1]
    pyplot.close(figure)
