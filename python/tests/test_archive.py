"""What `plimsoll fleet archive` wrote is queried by DuckDB."""

import json
import subprocess
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import duckdb
import pytest
from conftest import PLIMSOLL, plimsoll

DAY_MS = 86_400_000
MINUTE_MS = 60_000
MIB = 1 << 20
DAYS = 3
# Working sets in MiB that each VM has in turn, one every five minutes.
WORKING_SETS = {"web": range(100, 200), "db": [700] * 19 + [900]}


class Daemon(BaseHTTPRequestHandler):
    """plimsolld of a host with two VMs, of which one has no UUID."""

    host = "host-1"
    now_ms = 0

    def do_GET(self):
        url = urlsplit(self.path)
        query = {key: int(values[0]) for key, values in parse_qs(url.query).items()}
        words = unquote(url.path).split("/")
        if words[2] == "demands":
            answer = self.demands(query)
        elif words[4] == "curves":
            answer = {"vm": words[3], "curves": self.every(30, query, lambda at: {"unix_ms": at, "curve": curve(words[3], at)})}
        else:
            answer = {"vm": words[3], "samples": self.every(5, query, lambda at: sample(words[3], at))}
        body = json.dumps({"schema": 1} | answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def demands(self, query):
        vm = {"present": True, "managed": True, "size_bytes": MIB, "unknown_need_bytes": MIB, "intervals": []}
        uuids = {"web": "c7a5fdbd-edaf-9455-926a-d65c16db1809", "db": None}
        return query | {
            "host": self.host,
            "now_unix_ms": self.now_ms,
            "processors": 2,
            "total_bytes": 1 << 32,
            "vms": [vm | {"vm": name, "uuid": uuids[name]} for name in WORKING_SETS],
        }

    def every(self, minutes, query, made):
        """What is made of each time of a query until now."""
        end = min(query["until_unix_ms"], self.now_ms)
        return [made(at) for at in range(query["since_unix_ms"], end, minutes * MINUTE_MS)]

    def log_message(self, *_):
        pass


def sample(vm, at_ms):
    working_sets = WORKING_SETS[vm]
    mib = working_sets[at_ms // (5 * MINUTE_MS) % len(working_sets)]
    return {
        "unix_ms": at_ms,
        "direct_bytes": 1024 * MIB,
        "cache_bytes": 0,
        "target_bytes": None,
        "working_set_bytes": mib * MIB,
        "relative": None,
        "misses_per_second": None,
        "overhead_ratio": 0.01,
        "lost": 0,
    }


def curve(vm, at_ms):
    """It misses nothing from as many MiB on as the hour of day, and 10 more."""
    hour = at_ms % DAY_MS // (60 * MINUTE_MS)
    point = {"miss_ratio": 1.0, "low": 0.9, "high": 1.0}
    none = {"miss_ratio": 0.0, "low": 0.0, "high": 0.05}
    return {
        "schema": 1,
        "vm": vm,
        "page_bytes": 4096,
        "references": 1000,
        "baseline_pages": 1024 * 256,
        "points": [{"size_pages": 0} | point, {"size_pages": (hour + 10) * 256} | none],
    }


@pytest.fixture
def archive(tmp_path):
    """An archive of three days and a half, and the directory that it is in."""
    now_ms = int(time.time() * 1000)
    Daemon.now_ms = now_ms
    with ThreadingHTTPServer(("127.0.0.1", 0), Daemon) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "hosts.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{server.server_port}"]}]))
        args = ("fleet", "archive", tmp_path / "archive", "--hosts", tmp_path / "hosts.json", "--since", f"{DAYS}d")
        first = plimsoll(*args)
        again = plimsoll(*args)
        server.shutdown()
    return tmp_path / "archive", first, again, now_ms


def test_duckdb_reads_the_archive(archive):
    root, first, again, now_ms = archive
    days = range(now_ms // DAY_MS - DAYS, now_ms // DAY_MS + 1)
    assert first == f"hosts archived: 1; files written: {2 * len(days)}, final already: 0\n"
    # Days that ended lately, and today, are written again.
    final = sum((day + 1) * DAY_MS + 3 * 60 * MINUTE_MS <= now_ms for day in days)
    assert again == f"hosts archived: 1; files written: {2 * (len(days) - final)}, final already: {2 * final}\n"

    con = duckdb.connect()
    table = lambda name: f"read_parquet('{root}/date=*/host=*/{name}.parquet', hive_partitioning = true)"  # noqa: E731
    # The 95th percentile of the working set of each VM.
    found = con.sql(f"""
        SELECT host, vm, quantile_disc(working_set_bytes, 0.95) // 1048576 AS mib, count(*) AS rows
        FROM {table("working_sets")} WHERE date < '{date(days[-1])}' GROUP BY host, vm ORDER BY vm
    """).fetchall()
    rows = DAYS * 288
    times = [day * 288 + slot for day in days[:-1] for slot in range(288)]
    expected = []
    for vm in sorted(WORKING_SETS):
        sizes = sorted(WORKING_SETS[vm][at % len(WORKING_SETS[vm])] for at in times)
        expected.append(("host-1", vm, sizes[-(-len(sizes) * 95 // 100) - 1], rows))
    assert found == expected

    # The curve of one hour, with its band.
    found = con.sql(f"""
        SELECT size_bytes // 1048576 AS mib, avg(miss_ratio), min(low), max(high), count(*)
        FROM {table("curves")}
        WHERE date = '{date(days[1])}' AND vm = 'web' AND epoch_ms(time) // 3600000 % 24 = 14
        GROUP BY mib ORDER BY mib
    """).fetchall()
    assert found == [(0, 1.0, 0.9, 1.0, 2), (24, 0.0, 0.0, 0.05, 2)]
    # Each time is of the date of its folder.
    wrong = con.sql(f"SELECT count(*) FROM {table('curves')} WHERE epoch_ms(time) // {DAY_MS} != date::DATE - DATE '1970-01-01'")
    assert wrong.fetchall() == [(0,)]
    found = con.sql(f"SELECT DISTINCT vm, uuid IS NULL FROM {table('curves')} ORDER BY vm").fetchall()
    assert found == [("db", True), ("web", False)]


def date(day):
    return datetime.fromtimestamp(day * 86400, timezone.utc).strftime("%Y-%m-%d")


@pytest.mark.parametrize(
    "args, code, why",
    [
        (["archive"], 2, "--hosts or --prometheus"),
        (["archive", "--hosts", "none.json"], 1, "none.json"),
        (["archive", "--hosts", "hosts.json"], 5, "hosts not completely archived: 1"),
        (["hosts.json/below", "--hosts", "hosts.json"], 1, "hosts.json/below"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, args, code, why):
    (tmp_path / "hosts.json").write_text('[{"targets":["127.0.0.1:9"]}]')
    found = subprocess.run([PLIMSOLL, "fleet", "archive", *args], capture_output=True, text=True)
    assert (found.returncode, why in found.stderr) == (code, True), found.stderr
