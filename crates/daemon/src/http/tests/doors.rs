//! Sockets and TCP: permissions, takeover, tokens, certificates.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::process::{Resource, Rlimit};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{self, ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use x509_parser::time::ASN1Time;

use super::{ExampleServer, TOKEN, exchange, get, read_only, secret, settings, socket, tcp};
use crate::config::{ServeSettings, TcpSettings, TlsSettings};
use crate::http::{ServeError, Server, check, example, serve};

#[test]
fn sockets_have_their_permissions_and_are_taken_over_only_from_the_dead() {
    let served = ExampleServer::new(|_| {});
    let folder = served.folder.path();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(
        (mode(&socket(folder)), mode(&read_only(folder))),
        (0o660, 0o660)
    );
    let open = ExampleServer::new(|settings| settings.read_only_group = Some("everybody".into()));
    assert_eq!(mode(&read_only(open.folder.path())), 0o666);
    assert_eq!(mode(&socket(open.folder.path())), 0o660);
    let begin = |settings: &ServeSettings| serve(example::shared().0, settings);
    let taken = begin(&settings(folder)).unwrap_err();
    assert!(
        taken
            .to_string()
            .starts_with("another plimsolld serves there"),
        "{taken}"
    );
    assert_eq!(served.client().host().unwrap().vms.len(), 4);

    // The socket of a running server must not be removed; that of a dead one is.
    let elsewhere = tempfile::tempdir().unwrap();
    fs::create_dir(elsewhere.path().join("run")).unwrap();
    let stranger = UnixListener::bind(socket(elsewhere.path())).unwrap();
    let taken = begin(&settings(elsewhere.path())).unwrap_err();
    assert!(matches!(taken, ServeError::Taken { .. }), "{taken}");
    drop(stranger);
    begin(&settings(elsewhere.path())).unwrap().stop();
    assert!(!socket(elsewhere.path()).exists());
    fs::write(socket(elsewhere.path()), "precious").unwrap();
    let file = begin(&settings(elsewhere.path())).unwrap_err();
    assert!(matches!(file, ServeError::NoSocket { .. }), "{file}");
    assert_eq!(fs::read(socket(elsewhere.path())).unwrap(), b"precious");

    let mut nobodys = settings(tempfile::tempdir().unwrap().path());
    nobodys.group = Some("no such group".to_owned());
    let error = begin(&nobodys).unwrap_err();
    assert!(matches!(error, ServeError::NoGroup { .. }), "{error}");
}

#[test]
fn tcp_is_not_opened_to_everybody() {
    let folder = tempfile::tempdir().unwrap();
    let begin = |tcp: TcpSettings| {
        let mut settings = settings(folder.path());
        settings.tcp = Some(tcp);
        serve(example::shared().0, &settings).map(Server::stop)
    };
    let open = |tcp: TcpSettings| matches!(begin(tcp), Err(ServeError::Open { .. }));
    assert!(open(tcp("127.0.0.1:0")));
    for listen in ["0.0.0.0:0", "[::]:0"] {
        let mut everywhere = tcp(listen);
        everywhere.read_only = true;
        assert!(open(everywhere));
    }
    let mut look = tcp("127.0.0.1:0");
    look.read_only = true;
    begin(look).unwrap();

    let path = folder.path().join("token");
    let mut with_token = tcp("127.0.0.1:0");
    with_token.token_file = Some(path.clone());
    let refused = || begin(with_token.clone()).unwrap_err().to_string();
    assert!(refused().contains("No such file"));
    secret(path.clone(), "short");
    assert!(refused().contains("can be guessed"));
    secret(path.clone(), &"two words".repeat(9));
    assert!(refused().contains("one word"));
    secret(path.clone(), &"x".repeat(5000));
    assert!(refused().contains("over 4096 bytes"));
    secret(path.clone(), TOKEN);
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    assert!(refused().contains("others may read"));
    assert!(!socket(folder.path()).exists());
}

#[test]
fn over_tcp_a_token_is_needed_and_foreign_pages_are_kept_out() {
    let token = tempfile::tempdir().unwrap();
    let served = ExampleServer::new(|settings| {
        let mut tcp = tcp("127.0.0.1:0");
        tcp.token_file = Some(secret(token.path().join("token"), &format!("{TOKEN}\n")));
        settings.tcp = Some(tcp);
    });
    let address = served.server.as_ref().unwrap().tcp().unwrap();
    let ask = |method: &str, path: &str, headers: &str| {
        let request = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
        exchange(TcpStream::connect(address).unwrap(), request.as_bytes())
    };
    let host = format!("Host: {address}\r\n");
    let bearer = format!("{host}Authorization: Bearer {TOKEN}\r\n");
    let wrong = [
        host.clone(),
        format!("{host}Authorization: Bearer {}\r\n", &TOKEN[1..]),
        format!("{host}Authorization: Basic {TOKEN}\r\n"),
        format!("{host}Authorization: {TOKEN}\r\n"),
    ];
    for headers in wrong {
        for path in ["/v1/host", "/metrics", "/openapi.json", "/v1/nothing"] {
            let answer = ask("GET", path, &headers);
            assert!(answer.starts_with("HTTP/1.1 401 "), "{headers}{answer}");
            assert!(answer.contains("www-authenticate: Bearer"), "{answer}");
        }
    }
    let metrics = served.raw(&get("/metrics"));
    assert!(
        metrics.contains("\nplimsoll_failed_logins_total 16\n"),
        "{metrics}"
    );
    assert!(ask("GET", "/v1/host", &bearer).starts_with("HTTP/1.1 200 "));
    assert!(ask("GET", "/healthz", &host).starts_with("HTTP/1.1 200 "));
    // The page itself holds no secret.
    let page = ask("GET", "/", &host);
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
    assert!(
        page.contains("content-security-policy: default-src 'self'"),
        "{page}"
    );
    let tag = page
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .unwrap();
    let known = format!("{host}If-None-Match: {tag}\r\n");
    assert!(ask("GET", "/", &known).starts_with("HTTP/1.1 304 "));

    let (_, token) = bearer.split_once("\r\n").unwrap();
    for host in [
        "",
        "Host: evil.example\r\n",
        "Host: 10.0.0.1\r\n",
        "Host: localhost\r\nHost: evil\r\n",
    ] {
        let answer = ask("GET", "/v1/host", &format!("{host}{token}"));
        assert!(answer.starts_with("HTTP/1.1 400 "), "{host}{answer}");
    }
    for host in ["localhost:1", "127.0.0.1", "[::1]:80"] {
        let answer = ask("GET", "/v1/host", &format!("Host: {host}\r\n{token}"));
        assert!(answer.starts_with("HTTP/1.1 200 "), "{host}{answer}");
    }
    let change = |origin: &str| ask("POST", "/v1/pause", &format!("{bearer}{origin}"));
    for origin in ["http://evil.example", "null", "http://127.0.0.1:1"] {
        let answer = change(&format!("Origin: {origin}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 401 "), "{origin}: {answer}");
        assert!(!answer.contains("access-control"), "{answer}");
    }
    assert!(!served.client().host().unwrap().paused);
    let own = change(&format!("Origin: http://{address}\r\n"));
    assert!(own.starts_with("HTTP/1.1 200 "), "{own}");
    assert!(served.client().host().unwrap().paused);
}

#[test]
fn a_thousand_connections_without_a_token_do_not_keep_a_client_out() {
    let files = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: files.maximum,
        ..files
    };
    rustix::process::setrlimit(Resource::Nofile, raised).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret(folder.path().join(name), text);
    let (authority, certificate, key) = signed("localhost");
    let served = ExampleServer::new(|settings| {
        settings.tcp = Some(TcpSettings {
            token_file: Some(file("token", TOKEN)),
            tls: Some(TlsSettings {
                certificate: file("certificate", &certificate),
                key: file("key", &key),
                client_ca: None,
            }),
            ..tcp("127.0.0.1:0")
        });
    });
    let address = served.server.as_ref().unwrap().tcp().unwrap();
    let request = format!(
        "GET /v1/plan HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    );
    let client = || tls_client(address, &authority, None);
    let ask = |stream: &mut TlsStream| {
        let soon = Some(Duration::from_secs(10));
        stream.sock.set_read_timeout(soon).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = [0; 4096];
        let read = stream.read(&mut answer).unwrap();
        assert!(answer[..read].starts_with(b"HTTP/1.1 200 "));
    };
    let mut working = client();
    ask(&mut working);
    let mut crowd = Vec::new();
    for number in 0..1000 {
        crowd.push(TcpStream::connect(address).unwrap());
        if number % 100 == 99 {
            // One that was there before, and a new one.
            ask(&mut working);
            ask(&mut client());
        }
    }
    drop(crowd);
}

/// A certificate authority and a certificate signed by it: certificate and key in PEM.
fn signed(name: &str) -> (String, String, String) {
    signed_for(name, &|_| {})
}

fn signed_for(name: &str, change: &dyn Fn(&mut CertificateParams)) -> (String, String, String) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut leaf = CertificateParams::new(vec![name.to_owned()]).unwrap();
    change(&mut leaf);
    let leaf = leaf.signed_by(&key, &authority).unwrap();
    (authority.pem(), leaf.pem(), key.serialize_pem())
}

type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// A client of a server whose certificate `authority` signed; it may have a certificate and key of its own.
fn tls_client(address: SocketAddr, authority: &str, own: Option<(&str, &str)>) -> TlsStream {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let certificate = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate(authority)).unwrap();
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let config = match own {
        None => config.with_no_client_auth(),
        Some((own, key)) => {
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            let chain = vec![certificate(own)];
            config.with_client_auth_cert(chain, key).unwrap()
        }
    };
    let name = ServerName::try_from("localhost").unwrap();
    let tls = ClientConnection::new(Arc::new(config), name).unwrap();
    StreamOwned::new(tls, TcpStream::connect(address).unwrap())
}

#[test]
fn over_tls_clients_show_a_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret(folder.path().join(name), text);
    let (server_ca, certificate, key) = signed("localhost");
    let (client_ca, client, client_key) = signed("operator");
    let tls = TlsSettings {
        certificate: file("certificate", &certificate),
        key: file("key", &key),
        client_ca: Some(file("client-ca", &client_ca)),
    };
    let served = ExampleServer::new(|settings| {
        let mut tcp = tcp("127.0.0.1:0");
        tcp.tls = Some(tls.clone());
        settings.tcp = Some(tcp);
    });
    let address = served.server.as_ref().unwrap().tcp().unwrap();
    let ask = |shown| exchange(tls_client(address, &server_ca, shown), &get("/v1/host"));
    assert!(ask(Some((&client, &client_key))).starts_with("HTTP/1.1 200 "));
    assert_eq!(ask(None), "");
    let (_, stranger, strangers_key) = signed("operator");
    assert_eq!(ask(Some((&stranger, &strangers_key))), "");
    let plain = exchange(TcpStream::connect(address).unwrap(), &get("/v1/host"));
    assert!(!plain.contains("HTTP"), "{plain}");
    let metrics = served.raw(&get("/metrics"));
    assert!(
        metrics.contains("\nplimsoll_failed_logins_total 2\n"),
        "{metrics}"
    );
    assert!(
        metrics.contains("\nplimsoll_certificate_end_timestamp_seconds "),
        "{metrics}"
    );

    let begin = |tls: TlsSettings| {
        let mut settings = settings(&folder.path().join("other"));
        settings.tcp = Some(TcpSettings {
            tls: Some(tls),
            ..tcp("127.0.0.1:0")
        });
        serve(example::shared().0, &settings)
            .unwrap_err()
            .to_string()
    };
    let wrong_key = TlsSettings {
        key: file("other-key", &client_key),
        ..tls.clone()
    };
    let wrong = begin(wrong_key);
    assert!(
        wrong.contains("other-key: the key is not that of the certificate"),
        "{wrong}"
    );
    let empty = TlsSettings {
        certificate: file("empty", ""),
        ..tls
    };
    assert!(begin(empty).contains("no certificate"));
}

#[test]
fn a_certificate_that_clients_would_refuse_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret(folder.path().join(name), text);
    let reported = |change: &dyn Fn(&mut CertificateParams)| {
        let (_, certificate, key) = signed_for("localhost", change);
        let mut settings = settings(folder.path());
        settings.tcp = Some(TcpSettings {
            tls: Some(TlsSettings {
                certificate: file("certificate", &certificate),
                key: file("key", &key),
                client_ca: None,
            }),
            ..tcp("127.0.0.1:0")
        });
        let checked = check(&settings);
        // The daemon has more to do than to serve by TCP.
        settings.tcp.as_mut().unwrap().read_only = true;
        serve(example::shared().0, &settings).unwrap().stop();
        checked.map_err(|error| error.to_string())
    };
    let in_days = |days: u64| ASN1Time::now().to_datetime() + Duration::from_hours(24 * days);
    assert_eq!(reported(&|_| {}), Ok(None));
    let ended = reported(&|leaf| leaf.not_after = rcgen::date_time_ymd(2026, 1, 31)).unwrap_err();
    assert!(
        ended.contains("certificate: the certificate ended on Jan 31 00:00:00 2026"),
        "{ended}"
    );
    let early = reported(&|leaf| leaf.not_before = rcgen::date_time_ymd(3000, 1, 1)).unwrap_err();
    assert!(
        early.contains("valid only from Jan  1 00:00:00 3000"),
        "{early}"
    );
    let soon = reported(&|leaf| leaf.not_after = in_days(13));
    assert!(soon.unwrap().unwrap().contains("the certificate ends on "));
    let later = reported(&|leaf| leaf.not_after = in_days(15));
    assert_eq!(later, Ok(None));
}
