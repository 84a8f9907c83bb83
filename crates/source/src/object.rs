//! Traces in a store of objects: `s3://BUCKET/KEY`, in S3 and in stores that speak its protocol.
//!
//! Credentials, region and endpoint are those of the usual variables: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
//! `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`, and `AWS_SKIP_SIGNATURE=true` for public buckets;
//! otherwise those of the instance or container. Objects are read in parts; every part must be of the object that was opened, which
//! its entity tag identifies, so one that is replaced meanwhile ends the reading with an error. The protocol is `object_store`'s, the
//! connections are `ureq`'s.
//!
//! Not here: formats and compression, which are recognised as those of files are (`trace`).

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions, GetOptions, ObjectStore, RetryConfig};
use tokio::runtime::{Builder, Runtime};
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::bytes_at::{OBJECTS, ReadAt};
use crate::contained::contained;

/// Size of a part.
const PART_BYTES: u64 = 4 << 20;
/// Parts that are kept: a few columns of a table are read side by side.
const KEPT_PARTS: usize = 8;
/// Parts that are read ahead of what is consumed.
const AHEAD_PARTS: usize = 2;
/// The most that is read of one answer.
const ANSWER_BYTES_MAX: u64 = 2 * PART_BYTES;
/// Time limits: until there is a connection, and for an answer.
const CONNECT_MAX: Duration = Duration::from_secs(5);
const ANSWER_MAX: Duration = Duration::from_mins(1);
/// Variables of which each says where the keys are, or that none is needed; without one the host's metadata service is asked.
const CREDENTIALS: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];
/// Repetitions of a request that failed by no fault of its own, and the time for all of them.
const RETRIES_MAX: usize = 4;
const RETRY_MAX: Duration = Duration::from_mins(2);

/// An object.
pub(crate) struct Object {
    store: AmazonS3,
    key: object_store::path::Path,
    /// Its entity tag, which an object that replaces it does not have.
    tag: Option<String>,
    length_bytes: u64,
    runtime: Runtime,
    /// The latest last, each with its position.
    parts: Mutex<VecDeque<(u64, Bytes)>>,
}

impl Object {
    /// Opens the object at an address, by these variables of the environment.
    pub(crate) fn open(
        address: &str,
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> io::Result<Self> {
        let rest = address.strip_prefix(OBJECTS).unwrap_or_default();
        let Some((bucket, key)) = rest.split_once('/').filter(|(bucket, key)| {
            let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !bucket.is_empty() && bucket.bytes().all(is_name) && !key.is_empty()
        }) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "an object's address is s3://BUCKET/KEY",
            ));
        };
        let key = object_store::path::Path::parse(key)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let mut builder = AmazonS3Builder::new();
        let mut has_credentials = false;
        for (name, value) in variables {
            has_credentials |= CREDENTIALS.iter().any(|credential| name == *credential);
            if let (Some(name), Some(value)) = (name.to_str(), value.to_str())
                && name.starts_with("AWS_")
                && let Ok(key) = name.to_ascii_lowercase().parse()
            {
                builder = builder.with_config(key, value);
            }
        }
        let retry = RetryConfig {
            max_retries: RETRIES_MAX,
            retry_timeout: RETRY_MAX,
            ..RetryConfig::default()
        };
        let builder = builder
            .with_bucket_name(bucket)
            .with_retry(retry)
            .with_http_connector(Connector);
        let runtime = Builder::new_current_thread().enable_time().build()?;
        let options = GetOptions {
            head: true,
            ..GetOptions::default()
        };
        // Of variables that make no address and no header the library takes some for granted.
        let opened = contained(|| {
            let store = builder.build()?;
            let found = runtime.block_on(store.get_opts(&key, options))?;
            Ok((store, found.meta))
        });
        let (store, meta) = opened
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "the AWS_ variables make no valid request: check AWS_ENDPOINT_URL (https://HOST), AWS_REGION and the keys",
                )
            })?
            .map_err(|error| match error {
                object_store::Error::Generic { .. } if !has_credentials => io::Error::other(format!(
                    "no keys are set (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket AWS_SKIP_SIGNATURE=true), so \
                     the host's metadata service was asked for them: {error}"
                )),
                error => io_error(error),
            })?;
        Ok(Self {
            store,
            key,
            tag: meta.e_tag,
            length_bytes: meta.size,
            runtime,
            parts: Mutex::default(),
        })
    }

    pub(crate) fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// The part at a position before the end, read if it is not kept.
    fn part(&self, offset_bytes: u64) -> io::Result<Bytes> {
        let start = offset_bytes / PART_BYTES * PART_BYTES;
        let kept = || self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, part)) = kept().iter().find(|(at, _)| *at == start) {
            return Ok(part.clone());
        }
        let part = self.read_part(start)?;
        let mut kept = kept();
        if kept.len() >= KEPT_PARTS {
            kept.pop_front();
        }
        kept.push_back((start, part.clone()));
        Ok(part)
    }

    fn read_part(&self, start: u64) -> io::Result<Bytes> {
        let range = start..self.length_bytes.min(start + PART_BYTES);
        let length = range.end - range.start;
        let options = GetOptions {
            range: Some(range.into()),
            if_match: self.tag.clone(),
            ..GetOptions::default()
        };
        let read = async {
            let found = self.store.get_opts(&self.key, options).await?;
            let tag = found.meta.e_tag.clone();
            Ok((tag, found.bytes().await?))
        };
        let replaced = || io::Error::other("the object was replaced while it was read");
        let (tag, part) = self.runtime.block_on(read).map_err(|error| match error {
            object_store::Error::Precondition { .. } => replaced(),
            error => io_error(error),
        })?;
        // Some stores ignore the condition.
        if tag.is_some() && self.tag.is_some() && tag != self.tag {
            return Err(replaced());
        }
        if part.len() as u64 != length {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{} bytes came of {length} at {start}", part.len()),
            ));
        }
        Ok(part)
    }

    /// A reader from beginning to end, which reads ahead.
    pub(crate) fn stream(self: Arc<Self>) -> impl Read + Send {
        let (sender, parts) = sync_channel(AHEAD_PARTS - 1);
        let left_bytes = self.length_bytes;
        thread::spawn(move || {
            let mut start = 0;
            while start < self.length_bytes {
                let part = self.part(start);
                let is_last = part.is_err();
                // Nobody receives once the reader is dropped.
                if sender.send(part).is_err() || is_last {
                    return;
                }
                start += PART_BYTES;
            }
        });
        Stream {
            parts,
            part: Bytes::new(),
            left_bytes,
        }
    }
}

impl ReadAt for Object {
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        if offset_bytes >= self.length_bytes || buffer.is_empty() {
            return Ok(0);
        }
        let part = self.part(offset_bytes)?;
        let skipped = usize::try_from(offset_bytes % PART_BYTES).unwrap_or(usize::MAX);
        let mut rest = part.get(skipped..).unwrap_or_default();
        rest.read(buffer)
    }
}

/// The parts as a thread reads them.
struct Stream {
    parts: Receiver<io::Result<Bytes>>,
    part: Bytes,
    /// What was not received yet.
    left_bytes: u64,
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.part.is_empty() {
            if self.left_bytes == 0 {
                return Ok(0);
            }
            let part = self.parts.recv().map_err(|_| {
                io::Error::other(
                    "reading ended before the object did: the thread that reads is gone",
                )
            })?;
            self.part = part?;
            self.left_bytes -= self.part.len() as u64;
        }
        let length = self.part.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.part.split_to(length));
        Ok(length)
    }
}

fn io_error(error: object_store::Error) -> io::Error {
    let kind = match &error {
        object_store::Error::NotFound { .. } => io::ErrorKind::NotFound,
        object_store::Error::PermissionDenied { .. }
        | object_store::Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

/// Connects by `ureq`.
#[derive(Debug)]
struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        let allows_http = allows_http.is_some_and(|value| {
            ["1", "true", "on", "yes", "y"].contains(&value.to_ascii_lowercase().as_str())
        });
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let found = rustls_native_certs::load_native_certs().certs;
        let authorities: Vec<_> = found
            .iter()
            .map(|certificate| Certificate::from_der(certificate).to_owned())
            .collect();
        let tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(provider)
            .root_certs(RootCerts::new_with_certs(&authorities))
            .build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_global(Some(ANSWER_MAX))
            .max_redirects(0)
            .https_only(!allows_http)
            .http_status_as_error(false)
            .accept_encoding("identity")
            .build()
            .new_agent();
        Ok(HttpClient::new(Service(agent)))
    }
}

#[derive(Debug)]
struct Service(Agent);

#[async_trait::async_trait]
impl HttpService for Service {
    /// Answers when the answer is there: each thread that reads has a runtime of its own, which has nothing else to do.
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let answer = match body.as_bytes().filter(|bytes| !bytes.is_empty()) {
            Some(bytes) => {
                let request = ureq::http::Request::from_parts(head, bytes.to_vec());
                self.0.run(request)
            }
            None => self.0.run(ureq::http::Request::from_parts(head, ())),
        };
        let (head, mut body) = answer.map_err(http_error)?.into_parts();
        let bytes = body.with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        let bytes = bytes.map_err(http_error)?;
        Ok(HttpResponse::from_parts(head, bytes.into()))
    }
}

fn http_error(error: ureq::Error) -> HttpError {
    let kind = match &error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => HttpErrorKind::Connect,
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            HttpErrorKind::Connect
        }
        ureq::Error::Io(_) | ureq::Error::BodyStalled => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    };
    HttpError::new(kind, error)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fmt::Write as _;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// What goes wrong, by the number of the request from 0.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub(crate) enum Fault {
        None,
        /// This request is refused for a moment.
        Busy(u64),
        /// The connection ends in the middle of this answer.
        Cut(u64),
        /// From this request on it is another object.
        Replaced(u64),
        /// The same, of a store that ignores the condition of a request.
        ReplacedAnyway(u64),
        /// The key is not known.
        Forbidden,
    }

    /// A store with one object, `traces/a b+c.ids` in `bucket`.
    pub(crate) struct Store {
        endpoint: String,
        requests: Arc<AtomicU64>,
    }

    fn contents() -> Vec<u8> {
        // Three parts, the last one short.
        (0..2 * PART_BYTES + 1234)
            .map(|at| (at * 31 / 7).to_le_bytes()[0])
            .collect()
    }

    pub(crate) fn store(contents: Vec<u8>, fault: Fault) -> Store {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(AtomicU64::new(0));
        let (counted, contents) = (requests.clone(), Arc::new(contents));
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (counted, contents) = (counted.clone(), contents.clone());
                thread::spawn(move || serve(&connection.unwrap(), &contents, &counted, fault));
            }
        });
        Store { endpoint, requests }
    }

    fn serve(connection: &TcpStream, contents: &[u8], requests: &AtomicU64, fault: Fault) {
        let mut lines = BufReader::new(connection).lines();
        while let Some(Ok(request)) = lines.next() {
            let head: Vec<String> = lines
                .by_ref()
                .map_while(|line| line.ok().filter(|line| !line.is_empty()))
                .collect();
            let field = |name: &str| {
                let found = head.iter().find_map(|line| {
                    let (found, value) = line.split_once(": ")?;
                    found.eq_ignore_ascii_case(name).then_some(value)
                });
                found.map(str::to_owned)
            };
            let number = requests.fetch_add(1, Ordering::Relaxed);
            let signature = field("authorization").unwrap();
            assert!(signature.starts_with("AWS4-HMAC-SHA256 Credential=key/"));
            assert!(signature.contains("/eu-test-1/s3/aws4_request"));
            let tag = match fault {
                Fault::Replaced(from) | Fault::ReplacedAnyway(from) if number >= from => "\"2\"",
                _ => "\"1\"",
            };
            let is_head = request.starts_with("HEAD ");
            let range = field("range").map(|range| {
                let (from, to) = range
                    .strip_prefix("bytes=")
                    .unwrap()
                    .split_once('-')
                    .unwrap();
                from.parse().unwrap()..to.parse::<usize>().unwrap() + 1
            });
            let status = match (fault, field("if-match")) {
                (Fault::Busy(busy), _) if busy == number => "503 Slow Down",
                (Fault::Forbidden, _) => "403 Forbidden",
                _ if !request.contains(" /bucket/traces/a%20b%2Bc.ids ") => "404 Not Found",
                (Fault::Replaced(_), Some(wanted)) if wanted != tag => "412 Precondition Failed",
                _ if range.is_some() => "206 Partial Content",
                _ => "200 OK",
            };
            let is_good = status.starts_with("20");
            let sent = range.clone().unwrap_or(0..contents.len());
            let body = if is_good {
                &contents[sent.clone()]
            } else {
                &b""[..]
            };
            let mut answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n", body.len());
            if is_good {
                answer +=
                    &format!("etag: {tag}\r\nlast-modified: Thu, 26 Nov 2026 00:00:00 GMT\r\n");
            }
            if range.is_some() && is_good {
                let (last, all) = (sent.end - 1, contents.len());
                write!(
                    answer,
                    "content-range: bytes {}-{last}/{all}\r\n",
                    sent.start
                )
                .unwrap();
            }
            answer += "\r\n";
            let mut connection = connection;
            connection.write_all(answer.as_bytes()).unwrap();
            if fault == Fault::Cut(number) {
                connection.write_all(&body[..body.len() / 2]).unwrap();
                return;
            }
            if !is_head {
                connection.write_all(body).unwrap();
            }
        }
    }

    pub(crate) const ADDRESS: &str = "s3://bucket/traces/a b+c.ids";

    pub(crate) fn variables(store: &Store) -> impl Iterator<Item = (OsString, OsString)> {
        let variables = [
            ("AWS_ENDPOINT_URL", store.endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "eu-test-1"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("NOT_OURS", "x"),
        ];
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        variables.into_iter()
    }

    fn open(store: &Store, address: &str) -> io::Result<Object> {
        Object::open(address, variables(store))
    }

    fn all(object: Object) -> io::Result<Vec<u8>> {
        let mut read = Vec::new();
        Arc::new(object).stream().read_to_end(&mut read)?;
        Ok(read)
    }

    #[test]
    fn an_object_is_read_in_parts_from_beginning_to_end_and_anywhere() {
        let store = store(contents(), Fault::None);
        let object = open(&store, ADDRESS).unwrap();
        let contents = contents();
        assert_eq!(object.length_bytes(), contents.len() as u64);
        let mut some = vec![0; 100];
        for at in [PART_BYTES - 50, 7, 2 * PART_BYTES + 1134] {
            object.read_exact_at(&mut some, at).unwrap();
            let at = usize::try_from(at).unwrap();
            assert_eq!(some, contents[at..at + 100]);
        }
        // Of each part once, and how long it is.
        assert_eq!(store.requests.load(Ordering::Relaxed), 4);
        let beyond = object.read_exact_at(&mut some, 2 * PART_BYTES + 1135);
        assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(object.read_at(&mut some, u64::MAX).unwrap(), 0);
        assert!(all(object).unwrap() == contents);
    }

    #[test]
    fn what_fails_for_a_moment_is_asked_for_again() {
        for fault in [Fault::Busy(0), Fault::Busy(2), Fault::Cut(1), Fault::Cut(3)] {
            let store = store(contents(), fault);
            assert!(all(open(&store, ADDRESS).unwrap()).unwrap() == contents());
            assert_eq!(store.requests.load(Ordering::Relaxed), 5);
        }
    }

    #[test]
    fn an_object_that_is_replaced_while_it_is_read_is_no_mixture() {
        for fault in [Fault::Replaced(2), Fault::ReplacedAnyway(2)] {
            let store = store(contents(), fault);
            let error = all(open(&store, ADDRESS).unwrap()).unwrap_err();
            assert_eq!(
                error.to_string(),
                "the object was replaced while it was read",
                "{fault:?}"
            );
        }
    }

    #[test]
    fn without_keys_the_error_names_them() {
        let store = store(contents(), Fault::None);
        let without = variables(&store).filter(|(name, _)| name != "AWS_ACCESS_KEY_ID");
        let metadata = (
            "AWS_METADATA_ENDPOINT".into(),
            store.endpoint.clone().into(),
        );
        let opened = Object::open(ADDRESS, without.chain([metadata]));
        let error = opened.map(|_| ()).unwrap_err();
        assert!(error.to_string().starts_with("no keys are set"), "{error}");
    }

    #[test]
    fn variables_that_make_no_request_and_an_open_connection_nobody_allowed_are_refused() {
        let store = store(contents(), Fault::None);
        let with = |name: &str, value: &str| {
            let others = variables(&store).filter(|(other, _)| other != name);
            let given = (name.into(), value.into());
            Object::open(ADDRESS, others.chain([given]))
                .map(|_| ())
                .unwrap_err()
                .to_string()
        };
        for (name, value) in [
            ("AWS_ENDPOINT_URL", "nonsense"),
            ("AWS_SESSION_TOKEN", "a\nb"),
        ] {
            let error = with(name, value);
            assert!(
                error.starts_with("the AWS_ variables make no valid request"),
                "{error}"
            );
        }
        let error = with("AWS_ALLOW_HTTP", "false");
        assert!(error.contains("https"), "{error}");
        assert_eq!(store.requests.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_cannot_be_opened_says_why() {
        let good = store(contents(), Fault::None);
        let kind = |address| open(&good, address).map(|_| ()).unwrap_err().kind();
        assert_eq!(kind("s3://bucket/none"), io::ErrorKind::NotFound);
        for address in [
            "s3://",
            "s3://bucket",
            "s3://bucket/",
            "s3:///key",
            "s3://b@c/k",
            "s3://b/k//l",
        ] {
            assert_eq!(kind(address), io::ErrorKind::InvalidInput, "{address}");
        }
        let forbidden = store(contents(), Fault::Forbidden);
        let error = open(&forbidden, ADDRESS).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        // Nobody listens.
        let gone = Store {
            endpoint: format!(
                "http://{}",
                TcpListener::bind("127.0.0.1:0")
                    .unwrap()
                    .local_addr()
                    .unwrap()
            ),
            requests: Arc::default(),
        };
        let error = open(&gone, ADDRESS).map(|_| ()).unwrap_err();
        println!("{error}");
        assert!(error.to_string().contains("refused"), "{error}");
    }
}
