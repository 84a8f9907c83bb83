"""Traces in a store of objects: a server of S3 that checks signatures, moto's."""

import threading
import urllib.request
from urllib.parse import unquote

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import curve_of_cli
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

import plimsoll_mrc as pm

REGION = "eu-central-1"
BUCKET = "traces"
# A trace is read in parts of this size, two of them ahead.
PART_BYTES = 4 << 20
NAMES = ["plain.ids", "a b+c.ids", "2026/Spur für Größe/跟踪 №1.ids", "100%25 %41&x=y;~'()*!@$,:.ids"]


class Quiet(WSGIRequestHandler):
    def log(self, *_):
        pass


class Store:
    """A bucket. `ranges` has the key and the first and last byte of each range that was read."""

    def __init__(self):
        self.app = DomainDispatcherApplication(create_backend_app)
        self.ranges = []
        self.server = make_server("127.0.0.1", 0, self.serve, threaded=True, request_handler=Quiet)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        user = self.client("iam", "setup", "setup")
        user.create_user(UserName="reader")
        rule = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
        user.put_user_policy(UserName="reader", PolicyName="all", PolicyDocument=rule)
        key = user.create_access_key(UserName="reader")["AccessKey"]
        self.keys = key["AccessKeyId"], key["SecretAccessKey"]
        self.s3 = self.client("s3", *self.keys)
        self.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        # From now on every request is checked.
        check = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"})
        urllib.request.urlopen(check).close()

    def client(self, service, key, secret):
        return boto3.client(
            service, REGION, endpoint_url=self.endpoint, aws_access_key_id=key, aws_secret_access_key=secret
        )

    def serve(self, environ, start_response):
        if "HTTP_RANGE" in environ:
            key = unquote(environ["RAW_URI"]).removeprefix(f"/{BUCKET}/")
            first, last = environ["HTTP_RANGE"].removeprefix("bytes=").split("-")
            self.ranges.append((key, int(first), int(last)))
        return self.app(environ, start_response)

    def put(self, key, contents):
        """Returns the address."""
        self.s3.put_object(Bucket=BUCKET, Key=key, Body=contents)
        return f"s3://{BUCKET}/{key}"

    def ranges_of(self, key):
        return [(first, last) for of, first, last in self.ranges if of == key]

    def end(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def server():
    store = Store()
    yield store
    store.end()


@pytest.fixture
def store(server, monkeypatch):
    key, secret = server.keys
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    return server


def ids(pages):
    return "".join(f"{page}\n" for page in pages).encode()


def pages_of(address, **options):
    return np.concatenate(list(pm.read_trace(address, **options)))


@pytest.mark.parametrize("name", NAMES)
def test_an_object_is_found_whatever_its_name(store, name):
    assert list(pages_of(store.put(name, ids([7, 8, 7])))) == [7, 8, 7]


def test_an_object_is_read_in_ranges_one_after_the_other(store):
    pages = np.random.default_rng(1).integers(0, 10**9, 1_000_000)
    contents = ids(pages)
    address = store.put("long.ids", contents)
    assert len(contents) > 2 * PART_BYTES
    assert (pages_of(address) == pages).all()
    last = len(contents) - 1
    starts = range(0, len(contents), PART_BYTES)
    assert store.ranges_of("long.ids") == [(start, min(start + PART_BYTES - 1, last)) for start in starts]


def test_of_a_table_only_the_parts_with_its_pages_are_read(store, folder, zipf):
    other = np.random.default_rng(1).bytes(len(zipf) * 40)
    columns = {"page": zipf.astype("u8"), "other": pa.FixedSizeBinaryArray.from_buffers(pa.binary(40), len(zipf), [None, pa.py_buffer(other)])}
    pq.write_table(pa.table(columns), folder / "t.parquet", row_group_size=len(zipf), use_dictionary=False)
    contents = (folder / "t.parquet").read_bytes()
    address = store.put("t.parquet", contents)
    assert curve_of_cli(address) == pm.mrc(zipf, "lru")
    read = sum(last + 1 - first for first, last in store.ranges_of("t.parquet"))
    assert 0 < read < 0.9 * len(contents)


def test_a_key_that_is_missing_and_a_bucket_that_is_are_named(store):
    for address in (f"s3://{BUCKET}/none.ids", "s3://no-bucket/plain.ids"):
        with pytest.raises(pm.errors.TraceOpenError, match="not found") as error:
            pm.read_trace(address)
        assert address in str(error.value)
        assert isinstance(error.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_refused(store, monkeypatch, variable):
    address = store.put("mine.ids", ids([1]))
    monkeypatch.setenv(variable, "AKIAWRONG")
    with pytest.raises(pm.errors.TraceOpenError, match="403") as error:
        pm.read_trace(address)
    assert address in str(error.value)
    assert isinstance(error.value.__cause__, PermissionError)


def test_an_object_that_is_replaced_while_it_is_read_is_no_mixture(store):
    # More than is read ahead.
    contents = ids([1_234_567] * (5 * PART_BYTES // 8))
    trace = pm.read_trace(store.put("replaced.ids", contents))
    assert (next(trace) == 1_234_567).all()
    store.put("replaced.ids", contents.replace(b"1", b"9"))
    read = 0
    with pytest.raises(pm.errors.TraceError, match="replaced while it was read"):
        for pages in trace:
            assert (pages == 1_234_567).all()
            read += len(pages)
    assert read > 0
