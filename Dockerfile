# kvfs in a container, from the Debian package that `make deb` makes (docs/kubernetes.md):
#     make deb && docker build -t kvfs .
FROM debian:12-slim
COPY dist/kvfs_*_amd64.deb /tmp/
RUN apt-get update \
    && apt-get install -y --no-install-recommends /tmp/kvfs_*_amd64.deb \
    && rm -rf /var/lib/apt/lists/* /tmp/kvfs_*_amd64.deb
# SIGTERM unmounts in order. The settings come from a volume.
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvfs"]
CMD ["mount", "--foreground", "--config", "/etc/kvfs/kv.toml"]
