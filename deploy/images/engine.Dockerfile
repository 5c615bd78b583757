# The engine image: Triton with TensorRT-LLM from its vendor, and Sluice's engine host beside it.
#
#   docker build -f deploy/images/engine.Dockerfile \
#     --build-arg BASE_IMAGE=<registry>/nvidia/tritonserver:26.07-trtllm-python-py3 -t sluice-engine .
#
# docs/engines.md says how it is run, and that this recipe was checked by a linter, never built.
ARG BASE_IMAGE

FROM ${BASE_IMAGE} AS wheel
WORKDIR /src
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
COPY console/ console/
COPY deploy/observability/prometheus/ deploy/observability/prometheus/
COPY migrations/ migrations/
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE_IMAGE}
COPY --from=wheel /wheels/ /wheels/
# The packages that the vendor has tested together stay as they are: pip may add packages, but not replace these.
# The last line is the rule of Triton's Python backend, which numpy 2 breaks without an error.
RUN python3 -m pip freeze \
      | grep -iE '^(numpy|torch|tensorrt|tensorrt[-_]llm|transformers|tokenizers|llguidance|xgrammar)==' \
      > /wheels/kept.txt \
 && python3 -m pip install --no-cache-dir --constraint /wheels/kept.txt \
      "$(ls /wheels/sluice-*.whl)[replica-gpu]" \
 && rm -r /wheels \
 && python3 -c 'import numpy; assert numpy.__version__.startswith("1."), numpy.__version__'
COPY model_repo/llm/ /models/llm/

# SLUICE_BASE_DIGEST and SLUICE_ENGINE_OPTIONS come from the pool; the artifact is mounted read-only.
ENV SLUICE_ENGINE=trtllm \
    SLUICE_ARTIFACT_DIR=/artifacts/base \
    SLUICE_ARTIFACTS_DIR=/artifacts \
    PYTHONUNBUFFERED=1
USER triton-server
EXPOSE 8001
STOPSIGNAL SIGTERM
# Longer than the longest answer that may still run when the container is stopped.
# Without a secret, whoever reaches the port could load code: ENGINE_ACCESS is NAME=VALUE, and callers
# send the header triton-grpc-protocol-NAME. The agent of replica-gpu makes one by itself.
ENTRYPOINT ["/bin/sh", "-ec", "exec tritonserver --model-repository=/models --model-control-mode=explicit \
    --load-model=llm --disable-auto-complete-config --allow-http=false --grpc-port=8001 \
    --metrics-address=127.0.0.1 --metrics-port=8002 --exit-timeout-secs=120 \
    --grpc-restricted-protocol=health,metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging:${ENGINE_ACCESS:?set NAME=VALUE}"]
