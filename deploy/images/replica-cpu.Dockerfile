# A node without GPUs: its agent, Triton, the OpenVINO driver and the default model. Debian 12 and its
# Python, because Triton's stub needs glibc 2.35 and the shared libpython of the same version.
#
#   docker build -f deploy/images/replica-cpu.Dockerfile -t sluice-replica-cpu .
#   docker run --shm-size=512m sluice-replica-cpu
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/build.lock requirements/replica-cpu.lock ./requirements/
# PIP_INDEX_URL and the like reach pip as build arguments; nothing of them stays in the image.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST PIP_CERT
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements/build.lock \
 && python -m venv --without-pip /opt/sluice \
 && /opt/build/bin/pip --python /opt/sluice/bin/python install --require-hashes \
      --only-binary :all: --no-compile -r requirements/replica-cpu.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY gateway/ gateway/
COPY router/ router/
COPY replica/ replica/
COPY control_plane/ control_plane/
COPY telemetry/ telemetry/
COPY cli/ cli/
COPY sim/ sim/
COPY sluice/ sluice/
COPY model_repo/ model_repo/
COPY console/ console/
COPY deploy/observability/prometheus/ deploy/observability/prometheus/
COPY migrations/ migrations/
# Times of files would differ from build to build; SOURCE_DATE_EPOCH fixes those in the wheel.
ENV SOURCE_DATE_EPOCH=1767225600
# The engine's scheduler is compiled, which saves a third of its time per step.
ENV HATCH_BUILD_HOOKS_ENABLE=1
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
 && /opt/build/bin/pip --python /opt/sluice/bin/python install --no-deps --no-compile /wheels/*.whl \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/sluice/lib

FROM ${BASE_IMAGE}
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="sluice-replica-cpu" \
      org.opencontainers.image.description="Node agent of Sluice with Triton on CPUs" \
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
CMD ["replica.agent"]
