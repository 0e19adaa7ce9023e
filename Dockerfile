# syntax=docker/dockerfile:1

FROM rust:1.95-bookworm AS build
# OpenSSL, librdkafka and zstd are built from source and linked statically; zlib comes from the system.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ make perl pkg-config zlib1g-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# Cache mounts are not part of the image, so the binary is copied out of them.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --profile dist --features kafka-tls --locked --bin pointsman \
    && cp target/dist/pointsman /usr/local/bin/pointsman

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="Pointsman" \
      org.opencontainers.image.description="Learns online, from the events you already log, which embedding model should answer each query" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# The CA certificates are for brokers that use TLS.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates zlib1g \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 pointsman \
    && useradd --uid 10001 --gid pointsman --no-create-home --home-dir /var/lib/pointsman --shell /usr/sbin/nologin pointsman \
    && install -d -o pointsman -g pointsman /var/lib/pointsman
COPY --from=build /usr/local/bin/pointsman /usr/local/bin/pointsman
COPY config/default.toml /etc/pointsman/default.toml
# Fails the build if a shared library is missing.
RUN pointsman --version
USER 10001:10001
# By default store.dir and transport.file.dir are under data/ here: mount a volume.
WORKDIR /var/lib/pointsman
EXPOSE 9464
STOPSIGNAL SIGTERM
# For `learn` and `route`. Disable it for commands that do not listen.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["pointsman", "health", "--url", "http://127.0.0.1:9464/live"]
ENTRYPOINT ["pointsman"]
CMD ["--help"]
