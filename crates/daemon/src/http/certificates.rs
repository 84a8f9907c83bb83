//! The time in which the server's certificate is valid.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tracing::warn;
use x509_parser::parse_x509_certificate;
use x509_parser::time::ASN1Time;

const DAY: Duration = Duration::from_hours(24);
/// Time before its end from which on there are warnings.
const SOON_S: i64 = 14 * 24 * 3600;

/// The time in which a certificate is valid.
#[derive(Debug, Clone)]
pub(super) struct Validity {
    pub file: PathBuf,
    begin: ASN1Time,
    end: ASN1Time,
}

impl Validity {
    /// That of a certificate in `file`, or why it is none.
    pub fn new(file: &Path, certificate: &CertificateDer<'_>) -> Result<Self, String> {
        let (_, certificate) =
            parse_x509_certificate(certificate).map_err(|error| error.to_string())?;
        let validity = certificate.validity();
        Ok(Self {
            file: file.to_owned(),
            begin: validity.not_before,
            end: validity.not_after,
        })
    }

    /// Its end, in seconds of Unix time.
    pub fn end_unix_s(&self) -> i64 {
        self.end.timestamp()
    }

    /// Why clients refuse it `now`.
    pub fn fault(&self, now: ASN1Time) -> Option<String> {
        let Self { begin, end, .. } = self;
        if now > *end {
            Some(format!("the certificate ended on {end}; clients refuse it"))
        } else if now < *begin {
            Some(format!(
                "the certificate is valid only from {begin} on; clients refuse it"
            ))
        } else {
            None
        }
    }

    /// A note, if it ends soon after `now`.
    pub fn note(&self, now: ASN1Time) -> Option<String> {
        let Self { file, end, .. } = self;
        let is_soon = end.timestamp() - now.timestamp() < SOON_S;
        is_soon.then(|| format!("{}: the certificate ends on {end}", file.display()))
    }

    /// Warns each day if it is not valid or ends soon. The files are read at the daemon's start only.
    pub async fn watch(self) {
        loop {
            let now = ASN1Time::now();
            let fault = self.fault(now);
            let fault = fault.map(|fault| format!("{}: {fault}", self.file.display()));
            if let Some(wrong) = fault.or_else(|| self.note(now)) {
                warn!("{wrong}; a new one is used after a restart of plimsolld");
            }
            time::sleep(DAY).await;
        }
    }
}
