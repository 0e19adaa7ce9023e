//! TLS of the HTTP server, by rustls. Certificate and key are reloaded when their files change.

use std::io;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use arc_swap::ArcSwapOption;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::server::TlsStream;

use super::reload::follow;
use crate::config::TlsConfig;
use crate::telemetry::HttpCounters;

/// Accepts TLS connections with the newest usable certificate.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// `None` if TLS is not configured. Must be called within the runtime, which then watches the files.
    pub fn load(config: &TlsConfig, counters: Arc<HttpCounters>) -> anyhow::Result<Option<Self>> {
        if !config.is_on() {
            return Ok(None);
        }
        let provider = Arc::new(ring::default_provider());
        let newest = Arc::new(Newest::default());
        let (signer, taken) = (provider.clone(), newest.clone());
        let paths = vec![config.certificate.clone(), config.key.clone()];
        follow("certificate", paths, counters, move |contents| {
            let [certificate, key] = contents else {
                return Err(anyhow!("expected a certificate file and a key file"));
            };
            taken.0.store(Some(Arc::new(certified(certificate, key, &signer)?)));
            Ok(())
        })
        .context("cannot use http.tls.certificate and http.tls.key")?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("cannot configure TLS")?
            .with_no_client_auth()
            .with_cert_resolver(newest);
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(Self(TlsAcceptor::from(Arc::new(server)))))
    }

    /// The server's side of a handshake.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.0.accept(stream).await
    }
}

/// A chain with its key. Fails if they do not match, for example between the two writes that replace them.
fn certified(certificate: &[u8], key: &[u8], provider: &CryptoProvider) -> anyhow::Result<CertifiedKey> {
    let chain = CertificateDer::pem_slice_iter(certificate).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| anyhow!("the certificate is not valid PEM: {error}"))?;
    if chain.is_empty() {
        return Err(anyhow!("the certificate file contains no PEM certificate"));
    }
    // A parser error could quote the file, and the key must not reach the log.
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| anyhow!("the key file contains no PEM private key"))?;
    CertifiedKey::from_der(chain, key, provider).context("the certificate and the key do not match")
}

/// The certificate in use.
#[derive(Debug, Default)]
struct Newest(ArcSwapOption<CertifiedKey>);

impl ResolvesServerCert for Newest {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.load_full()
    }
}
