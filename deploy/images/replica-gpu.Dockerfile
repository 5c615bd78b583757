# A node with GPUs: the engine image (engine.Dockerfile), with the node agent in front, which starts
# that image's Triton once per replica.
#
#   docker build -f deploy/images/engine.Dockerfile --build-arg BASE_IMAGE=... -t sluice-engine .
#   docker build -f deploy/images/replica-gpu.Dockerfile --build-arg ENGINE_IMAGE=sluice-engine -t sluice-replica-gpu .
#
# Never built here: the vendor's image was out of reach. docs/compose.md says what that means.
ARG ENGINE_IMAGE=sluice-engine

FROM ${ENGINE_IMAGE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="sluice-replica-gpu" \
      org.opencontainers.image.description="Node agent of Sluice with Triton and TensorRT-LLM" \
      org.opencontainers.image.revision="${REVISION}"
USER root
# The agent's needs besides the engine's extra. The vendor's own packages stay as they are.
RUN python3 -m pip freeze | grep -iE '^(numpy|torch|tensorrt|tensorrt[-_]llm|transformers|tokenizers)==' \
      > /tmp/kept.txt \
 && python3 -m pip install --no-cache-dir --constraint /tmp/kept.txt "aiohttp>=3.14,<4" "obstore>=0.12" \
 && rm /tmp/kept.txt \
 && groupadd --system --gid 10001 sluice \
 && useradd --system --uid 10001 --gid sluice --home-dir /var/lib/sluice --shell /usr/sbin/nologin sluice \
 && install -d -o sluice -g sluice -m 0750 /var/lib/sluice
# The user of all pods of ours. PyTorch asks for its name, and writes caches into its home.
ENV HOME=/var/lib/sluice
WORKDIR /var/lib/sluice
VOLUME /var/lib/sluice
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=1800s --retries=3 \
    CMD ["python3", "-m", "sluice.probe"]
ENTRYPOINT ["python3", "-m"]
CMD ["replica.agent"]
