import json
import os
import subprocess

import numpy as np
import pytest

import plimsoll_mrc as pm

# The command line of the same sources.
PLIMSOLL = os.environ["PLIMSOLL"]

# Values of the options without a default.
REQUIRED = {"ghost": {"direct": 100}, "esx": {"memory": 10_000}}


def plimsoll(*args):
    return subprocess.run([PLIMSOLL, *map(str, args)], check=True, capture_output=True, text=True).stdout


def curve_of_cli(trace, *args):
    """The whole curve that the command line computes of a trace."""
    points = 1 << 30
    return pm.Curve.from_json(plimsoll("mrc", trace, "-o", "json", "--points", points, *args))


def plan_of_cli(*args):
    return json.loads(plimsoll("plan", "-o", "json", *args))


@pytest.fixture(scope="session")
def zipf_trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "zipf.plimsoll"
    plimsoll("trace", "generate", "zipf", "--pages", 20_000, "--references", 300_000, "--out", path)
    return path


@pytest.fixture(scope="session")
def zipf(zipf_trace):
    return np.concatenate(list(pm.read_trace(zipf_trace)))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Tests and examples write their files here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
