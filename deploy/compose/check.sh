#!/usr/bin/env bash
# `make compose-check`: the compose file on a real Docker engine, from nothing to nothing.
#
# Builds the images, starts a project of its own on ports of its own, streams an answer, kills each of
# our containers once and streams again, and removes everything. COMPOSE_CHECK_FILES adds files with -f,
# for example one that names other images.
set -euo pipefail
cd "$(dirname "$0")/../.."

docker compose version >/dev/null 2>&1 || { echo "compose-check needs Docker Engine 25 with Compose 2, and a registry or local images"; exit 2; }

work=$(mktemp -d)
# A tag of its own: `docker compose up` beside it keeps its images.
export COMPOSE_PROJECT_NAME=sluice-check SLUICE_VERSION=check SLUICE_HOME="$work/home"
printf 'GATEWAY_PORT=18000\nADMIN_PORT=18001\nTELEMETRY_PORT=18002\nGRAFANA_PORT=13000\nPROMETHEUS_PORT=19090\n' > "$work/env"
.venv/bin/sluice compose init --file "$work/env" >/dev/null
files=(-f docker-compose.yml)
for file in ${COMPOSE_CHECK_FILES:-}; do files+=(-f "$file"); done
compose() { docker compose --env-file "$work/env" "${files[@]}" "$@"; }
trap 'compose logs --tail 20 || true; compose down -v --remove-orphans --timeout 5; rm -rf "$work"' EXIT

sluice() { .venv/bin/sluice --context compose "$@"; }
stream() { # until an answer ends well; at most 90 s
  for _ in $(seq 90); do
    if curl -sN --max-time 20 "http://127.0.0.1:18000/v1/chat/completions" -H "Authorization: Bearer $key" \
      -H 'content-type: application/json' \
      -d '{"model": "default", "stream": true, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello!"}]}' \
      | grep -q '^data: \[DONE\]'; then return 0; fi
    sleep 1
  done
  echo "no answer: $1"; return 1
}

compose build
started=$(date +%s)
compose up -d
until key=$(sluice keys create demo 2>/dev/null); do # the tenant comes with the bootstrap
  [ $(($(date +%s) - started)) -lt 300 ] || { echo "the bootstrap made no tenant"; exit 1; }
  sleep 1
done
stream "after the start"
echo "first answer $(($(date +%s) - started)) s after the start"
for service in gateway router replica-cpu control-plane telemetry; do
  compose kill "$service"
  compose up -d --no-recreate "$service"
  stream "after $service was killed"
  echo "$service was killed and is back"
done
trap - EXIT
compose down -v --remove-orphans --timeout 30
rm -rf "$work"
echo "compose-check: passed"
