#!/usr/bin/env bash
# `make compose-check`: the compose file on a real Docker engine, from nothing to nothing.
#
# Builds the images, starts a project of its own on ports of its own, streams an answer, kills each of
# our containers once, restarts each under load with the profile `ha`, and removes everything.
#
# Where Docker runs already, with the real images. Where it does not, with an engine of its own
# (engine.sh: root and Debian packages are needed, no registry), and with what stands in for the images
# of others (standins/). COMPOSE_CHECK_IMAGES=real or standins chooses. pip's settings are taken from
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS and PIP_TRUSTED_HOST.
# COMPOSE_CHECK_FILES adds files with -f. Arguments go to check.py: --results writes benchmarks/results.
set -euo pipefail
cd "$(dirname "$0")/../.."
say() { echo "compose-check: $*"; }

began=$(date +%s)
images=${COMPOSE_CHECK_IMAGES:-real}
own_engine=
work=
finish() {
  if [ -n "$work" ]; then rm -rf "$work"; fi
  if [ -n "$own_engine" ]; then deploy/compose/engine.sh stop; fi
}
trap finish EXIT # also when the start fails half-way
if ! docker compose version > /dev/null 2>&1 || ! docker version > /dev/null 2>&1; then
  images=${COMPOSE_CHECK_IMAGES:-standins}
  own_engine=1
  exports=$(deploy/compose/engine.sh start)
  eval "$exports"
fi
mkdir -p "${COMPOSE_CHECK_WORK:-/tmp}"
work=$(mktemp -d -p "${COMPOSE_CHECK_WORK:-/tmp}")

arguments=()
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST; do
  if [ -n "${!name:-}" ]; then arguments+=(--build-arg "$name"); fi
done
python_image=${PYTHON_IMAGE:-python:3.11-slim-bookworm}
standins=()
if [ "$images" = standins ]; then
  python_image=sluice-check/python:3.11-bookworm
  standins=(--standins)
  for name in postgres valkey front prometheus kafka clickhouse objects; do
    say "stand-in $name"
    docker build --quiet --build-context repository=. --target "$name" "${arguments[@]}" \
      --build-arg DEBIAN_IMAGE=sluice-check/trixie:base --build-arg "PYTHON_IMAGE=$python_image" \
      -t "sluice-standin-$name:check" deploy/compose/standins > /dev/null
  done
fi
image() { # name, recipe, arguments
  say "image $1"
  docker build --quiet "${arguments[@]}" --build-arg "BASE_IMAGE=$python_image" "${@:3}" \
    -f "deploy/images/$2.Dockerfile" -t "$1:check" . > /dev/null
}
image sluice sluice
image sluice-edge sluice --build-arg IMAGE=sluice-edge
image sluice-replica-cpu replica-cpu
say "images are there after $(($(date +%s) - began)) s"
PYTHONPATH=. .venv/bin/python deploy/compose/check.py --work "$work/files" "${standins[@]}" "$@"
say "all of it took $(($(date +%s) - began)) s"
