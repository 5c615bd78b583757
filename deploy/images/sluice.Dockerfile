# Gateway, router, control plane, telemetry and the command `sluice`, in one image: the first word
# says which one runs.
#
#   docker build -f deploy/images/sluice.Dockerfile -t sluice .
#   docker run sluice gateway | router | control_plane | control_plane.migrate | telemetry | cli
#
# For a build that can be repeated, name the base by its digest: --build-arg BASE_IMAGE=python@sha256:...
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/build.lock requirements/sluice.lock ./requirements/
# PIP_INDEX_URL and the like reach pip as build arguments; nothing of them stays in the image.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST PIP_CERT
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements/build.lock \
 && python -m venv --without-pip /opt/sluice \
 && /opt/build/bin/pip --python /opt/sluice/bin/python install --require-hashes \
      --only-binary :all: --no-compile -r requirements/sluice.lock
# Of what was installed, a quarter is debug symbols, and the Hugging Face client, which `tokenizers`
# would fetch models with: nothing of ours asks it to. What was stripped must load as before.
RUN apt-get update \
 && apt-get install -y --no-install-recommends binutils \
 && /opt/build/bin/pip --python /opt/sluice/bin/python uninstall --yes \
      huggingface-hub hf-xet fsspec filelock tqdm \
 && cd /opt/sluice/lib/python3.*/site-packages \
 && rm -rf sqlalchemy/testing confluent_kafka/schema_registry \
 && find . -type d -name tests -prune -exec rm -r {} + \
 && find . -type f \( -name '*.py[xi]' -o -name '*.pxd' -o -name '*.[ch]' \) -delete \
 && find . -type f -name '*.so' -not -path '*.libs/*' -exec strip --strip-unneeded {} + \
 && find . -type f -name '*.so' -not -path '*.libs/*' > /tmp/stripped \
 && /opt/sluice/bin/python -c 'import ctypes; [ctypes.CDLL(line.strip()) for line in open("/tmp/stripped")]'
COPY pyproject.toml README.md LICENSE ./
COPY gateway/ gateway/
COPY router/ router/
COPY replica/ replica/
COPY control_plane/ control_plane/
COPY telemetry/ telemetry/
COPY cli/ cli/
COPY sim/ sim/
COPY sluice/ sluice/
COPY model_repo/ model_repo/
COPY migrations/ migrations/
# Times of files would differ from build to build; SOURCE_DATE_EPOCH fixes those in the wheel.
ENV SOURCE_DATE_EPOCH=1767225600
RUN /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
 && /opt/build/bin/pip --python /opt/sluice/bin/python install --no-deps --no-compile /wheels/*.whl \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/sluice/lib

FROM ${BASE_IMAGE}
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="sluice" \
      org.opencontainers.image.description="Gateway, router, control plane, telemetry and command line of Sluice" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --system --gid 10001 sluice \
 && useradd --system --uid 10001 --gid sluice --home-dir /var/lib/sluice --shell /usr/sbin/nologin sluice \
 && install -d -o sluice -g sluice -m 0750 /var/lib/sluice
COPY --from=build /opt/sluice /opt/sluice
ENV PATH=/opt/sluice/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8 HOME=/var/lib/sluice
WORKDIR /var/lib/sluice
# Named volumes take its owner over; nothing else is written, except below /tmp.
VOLUME /var/lib/sluice
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-m", "sluice.probe"]
ENTRYPOINT ["python", "-m"]
CMD ["cli", "--help"]
