# Gateway, router, control plane, telemetry and the command `sluice`: the first word says which one runs.
#
#   docker build -f deploy/images/sluice.Dockerfile -t sluice .
#   docker run sluice control_plane | control_plane.migrate | telemetry | telemetry.migrate | cli
#
# Gateways and routers, of which there are many, run from a smaller one, with what they need only:
#
#   docker build -f deploy/images/sluice.Dockerfile --build-arg IMAGE=sluice-edge -t sluice-edge .
#   docker run sluice-edge gateway | router
#
# For a build that can be repeated, name the base by its digest: --build-arg BASE_IMAGE=python@sha256:...
ARG BASE_IMAGE=python:3.11-slim-bookworm

# The parts of the base that images keep: Python, what it and wheels link to, certificates. There is no shell
# in them and no package manager.
FROM ${BASE_IMAGE} AS runtime
RUN groupadd --system --gid 10001 sluice \
 && useradd --system --uid 10001 --gid sluice --home-dir /var/lib/sluice --shell /usr/sbin/nologin sluice \
 && install -d -m 0755 /runtime /runtime/etc /runtime/var /runtime/var/lib \
 && install -d -m 1777 /runtime/tmp \
 && install -d -o sluice -g sluice -m 0750 /runtime/var/lib/sluice \
 && cp -a --parents /etc/passwd /etc/group /etc/ssl /usr/lib/ssl /usr/share/ca-certificates \
      /etc/ld.so.conf /etc/ld.so.conf.d /runtime \
 && cp -L /etc/os-release /runtime/etc/os-release \
 && echo 'hosts: files dns' > /runtime/etc/nsswitch.conf
RUN python=$(readlink -f "$(command -v python3)") \
 && stdlib=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))') \
 && for name in python python3 "${python##*/}"; do \
      cp -a --parents "${python%/*}/$name" /runtime || exit 1; \
    done \
 && cp -a --parents "$stdlib" /runtime \
 && cd "/runtime$stdlib" \
 && rm -rf test idlelib lib2to3 tkinter turtledemo ensurepip pydoc_data site-packages config-* \
 && find . -type d -name __pycache__ -prune -exec rm -r {} + \
 && find . -xtype l -delete \
 && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s "$PWD" -p "$stdlib" . \
 && { ldd "$python" "$stdlib"/lib-dynload/*.so; ldconfig -p \
        | grep -E '^\s*lib(stdc\+\+|gcc_s|m|dl|rt|pthread|util|resolv)\.so\.' ; } \
      | sed -nE 's|.*[[:space:]](/[^ :]+\.so[^ :]*)( \(0x.*)?$|\1|p' | sort -u \
      | xargs cp -L --parents -t /runtime \
 && ldconfig -r /runtime

FROM ${BASE_IMAGE} AS build
ARG IMAGE=sluice
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/build.lock requirements/sluice.lock requirements/sluice-edge.lock ./requirements/
# PIP_INDEX_URL and the like reach pip as build arguments; nothing of them stays in the image.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST PIP_CERT
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements/build.lock \
 && python -m venv --without-pip /opt/sluice \
 && /opt/build/bin/pip --python /opt/sluice/bin/python install --require-hashes \
      --only-binary :all: --no-compile -r "requirements/${IMAGE}.lock"
# A half of the installed files is debug symbols, the Hugging Face client, which `tokenizers` would
# fetch models with, and the arrays that Triton's client is made of: nothing of ours asks for them.
RUN apt-get update \
 && apt-get install -y --no-install-recommends binutils gcc libc6-dev \
 && /opt/build/bin/pip --python /opt/sluice/bin/python uninstall --yes \
      huggingface-hub hf-xet fsspec filelock tqdm httpx2 httpcore2 truststore \
      numpy ml-dtypes python-rapidjson \
 && cd /opt/sluice/lib/python3.*/site-packages \
 && rm -rf sqlalchemy/testing confluent_kafka/schema_registry \
 && find . -type d -name tests -prune -exec rm -r {} + \
 && find . -type f \( -name '*.py[xi]' -o -name '*.pxd' -o -name '*.[ch]' \) -delete \
 && find . -type f -name '*.so' -not -path '*.libs/*' -exec strip --strip-unneeded {} +
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
# Times of files would differ from build to build; SOURCE_DATE_EPOCH fixes those in the wheel. Its data
# of replicas has the default model, which is uploaded by the command line of the other image.
ENV SOURCE_DATE_EPOCH=1767225600
# The router's core is compiled, which halves what a request and a token cost there.
ENV HATCH_BUILD_HOOKS_ENABLE=1
RUN /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
 && /opt/build/bin/pip --python /opt/sluice/bin/python install --no-deps --no-compile /wheels/*.whl \
 && if [ "$IMAGE" = sluice-edge ]; then rm -r /opt/sluice/lib/python3.*/site-packages/replica/_data; fi \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/sluice/lib

FROM scratch
ARG IMAGE=sluice
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="${IMAGE}" \
      org.opencontainers.image.description="Services and command line of Sluice; sluice-edge: gateway and router" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=runtime /runtime/ /
COPY --from=build /opt/sluice /opt/sluice
ENV PATH=/opt/sluice/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8 HOME=/var/lib/sluice
# The stripped files, their libraries and the libraries of Python must load here.
RUN ["python", "-c", "import bz2, ctypes, hashlib, lzma, pathlib, sqlite3, ssl, zlib; [ctypes.CDLL(str(it)) for it in pathlib.Path('/opt/sluice/lib').rglob('*.so') if '.libs/' not in str(it)]"]
WORKDIR /var/lib/sluice
# Named volumes take its owner over; nothing else is written, except below /tmp.
VOLUME /var/lib/sluice
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-m", "sluice.probe"]
ENTRYPOINT ["python", "-m"]
CMD ["cli", "--help"]
