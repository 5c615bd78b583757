"""Writes the chart's templates from the manifests of kustomize: `python deploy/helm/generate.py`.

The manifests in `deploy/kubernetes` are the only place where an object is written by hand.
kustomize renders them once for each switch of the chart; `unify.py` lays the renders over one
another. A part that has a value becomes that value. `_helpers.tpl`, `ingress.yaml` and the values
are written by hand. Needs kubectl or kustomize.
"""  # noqa: INP001 - a script beside what it belongs to

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from sluice.engines import names

sys.path.insert(0, str(Path(__file__).parent))
from unify import (
    Block,
    Expression,
    Variant,
    Variants,
    condition,
    template,
)

HOME = Path(__file__).parent
KUBERNETES = HOME.parent / "kubernetes"
TEMPLATES = HOME / "sluice" / "templates"
# kustomize takes seconds: a test compares this instead.
DIGEST = HOME / "templates.sha256"
HEADER = "{{- /* Made by deploy/helm/generate.py from deploy/kubernetes: change it there. */}}\n"

SWITCHES = {
    "mtls": "$.Values.mtls.enabled",
    "replica-drain": "$.Values.replicaDrain.enabled",
    "node-scaling": "$.Values.nodeScaling.enabled",
    "gateway-scaling": "$.Values.gateway.autoscaling.enabled",
    "zones": "$.Values.zones.required",
    "prometheus-operator": "$.Values.monitors.enabled",
}


def _is_of_nodes(nodes: str) -> str:
    found = " ".join(f'"{name}"' for name in names(lambda engine: engine.nodes == nodes))
    return f"(eq $pool.engine {found})"


OF_NODES = {nodes: _is_of_nodes(nodes) for nodes in ("embed", "gpu")}
SCHEMA = HOME / "sluice" / "values.schema.json"
_SCHEMA_ENGINES = re.compile(r'(?<="engine": \{"enum": )\[[^]]*\]')
# Each switch alone, and the pairs whose parts touch.
VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    *((it,) for it in SWITCHES),
    ("replica-drain", "mtls"),
    ("prometheus-operator", "mtls"),
)
VALUES = {
    "gateway": "gateway",
    "router": "router",
    "control-plane": "controlPlane",
    "telemetry": "telemetry",
}
SECRETS = {
    "sluice-admin": "admin",
    "sluice-installation": "installation",
    "sluice-database": "database",
    "sluice-valkey": "valkey",
    "sluice-clickhouse": "clickhouse",
    "sluice-objects": "objects",
    "sluice-objects-read": "objectsRead",
    "sluice-operator": "operator",
}
# Kinds that an operator may leave to others.
WHOLE = {
    "NetworkPolicy": "$.Values.networkPolicy.enabled",
    "PriorityClass": "$.Values.priorityClasses.create",
}
FILES = {
    "NetworkPolicy": "network",
    "PriorityClass": "priorities",
    "ServiceAccount": "accounts",
    "ConfigMap": "settings",
    "Role": "node-scaling",
    "RoleBinding": "node-scaling",
    "PodMonitor": "monitors",
    "ServiceMonitor": "monitors",
    "Issuer": "certificates",
    "Certificate": "certificates",
    "Job": "migrations",
}
HASHED = re.compile(r"^(backends|actuators|migrations)-[a-z0-9]{10}$")
Object = dict[str, Any]


def templates() -> dict[str, str]:
    """Return the name and the text of each generated file; CalledProcessError from kustomize."""
    with ThreadPoolExecutor(4) as threads:
        rendered = dict(zip(VARIANTS, threads.map(_rendered, VARIANTS), strict=True))
    found: dict[tuple[str, str], dict[Variant, Object]] = {}
    nodes: dict[str, dict[Variant, Object]] = {}
    for switches, objects in rendered.items():
        for it in objects:
            pool = it["metadata"].get("labels", {}).get("sluice.dev/nodes")
            if pool is None:
                key = (it["kind"], it["metadata"]["name"])
                found.setdefault(key, {})[frozenset(switches)] = _parameters(it)
            else:
                variant = frozenset(switches) | ({pool} - {"cpu"})
                nodes.setdefault(it["kind"], {})[variant] = _parameters(_of_any_pool(it, pool))
    for it in _migrations():
        found[it["kind"], it["metadata"]["name"]] = {
            frozenset(switches): _hook(it) for switches in VARIANTS
        }
    files: dict[str, list[str]] = {}
    for (kind, name), variants in found.items():
        file = FILES.get(kind) or next(iter(variants.values()))["metadata"].get("labels", {}).get(
            "app.kubernetes.io/component", name
        )
        files.setdefault("migrations" if name == "migrations" else file, []).append(
            _document(kind, variants)
        )
    range_over = "{{- range $name, $pool := $.Values.pools }}\n"
    files["nodes"] = [
        range_over
        + "".join(
            _known(it, "---\n" + "\n".join(template(it, {**OF_NODES, **SWITCHES})) + "\n")
            for it in nodes.values()
        )
        + "{{- end }}\n"
    ]
    return {f"{name}.yaml": HEADER + "".join(texts) for name, texts in files.items()}


def schema(text: str) -> str:
    """Return the schema of the values with the engines that the chart has nodes for."""
    engines = names(lambda engine: bool(engine.nodes))
    return _SCHEMA_ENGINES.sub(json.dumps(engines), text, count=1)


def digest() -> str:
    """Return the SHA-256 of all that the templates are made of, and of the templates."""
    sources = [it for it in KUBERNETES.rglob("*") if it.suffix in {".yaml", ".json"}]
    found = hashlib.sha256()
    for file in sorted([*sources, *HOME.glob("*.py"), *TEMPLATES.glob("*")]):
        found.update(f"{file.relative_to(HOME.parent).as_posix()}\n".encode())
        found.update(file.read_bytes())
    return f"{found.hexdigest()}\n"


def main() -> None:
    """Write the files, remove those that are made no longer, and note of what they were made."""
    made = templates()
    for file in TEMPLATES.glob("*.yaml"):
        if file.name not in made and file.read_text().startswith(HEADER):
            file.unlink()
    for name, text in made.items():
        (TEMPLATES / name).write_text(text)
    SCHEMA.write_text(schema(SCHEMA.read_text()))
    DIGEST.write_text(digest())


def _document(kind: str, variants: Variants) -> str:
    every = [frozenset(it) for it in VARIANTS]
    needed = [it for it in (condition(variants, every, SWITCHES), WHOLE.get(kind, "")) if it]
    if "annotations" in next(iter(variants.values()))["metadata"]:
        needed.append("$.Values.migrations.enabled")
    text = _known(variants, "---\n" + "\n".join(template(variants, SWITCHES)) + "\n")
    if not needed:
        return text
    when = needed[0] if len(needed) == 1 else f"and {' '.join(f'({it})' for it in needed)}"
    return f"{{{{- if {when} }}}}\n{text}{{{{- end }}}}\n"


def _rendered(switches: tuple[str, ...]) -> list[Object]:
    with tempfile.TemporaryDirectory() as folder:

        def path(name: str) -> str:
            return os.path.relpath((KUBERNETES / name).resolve(), Path(folder).resolve())

        chosen = {
            "namespace": "sluice",
            "resources": [path(it) for it in ("base", "pools/cpu", "pools/embed", "pools/gpu")],
            "components": [path(f"components/{it}") for it in switches],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(chosen))
        return _build(folder)


def _migrations() -> list[Object]:
    return [_parameters(it) for it in _build(str(KUBERNETES / "migrations"))]


def _build(folder: str) -> list[Object]:
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    done = subprocess.run([*program, folder], check=True, stdout=subprocess.PIPE, text=True)
    return list(yaml.safe_load_all(done.stdout))


def _of_any_pool(it: Object, pool: str) -> Object:
    """Return the object of one pool with the pool's name as an expression."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if value == f"{pool}-node":
            return Expression("{{ $name }}-node")
        return Expression("{{ $name }}") if value == pool else value

    renamed = walk(it)
    # The engine of a pool is no name.
    for entry in _container(renamed).get("env", []):
        if entry["name"] == "AGENT__ENGINES":
            entry["value"] = Expression("{{ $pool.engine }}")
    return renamed


def _container(it: Object) -> Object:
    containers = it.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [{}])
    return containers[0]


def _parameters(it: Object) -> Object:
    """Return the object with values of the chart in the place of what an operator may set."""
    it = _names(it)
    kind = it["kind"]
    if kind in ("Deployment", "StatefulSet", "Job"):
        _workload(it)
    elif kind == "ConfigMap":
        _settings(it)
    elif kind == "HorizontalPodAutoscaler":
        scaling, spec = "$.Values.gateway.autoscaling", it["spec"]
        spec["minReplicas"] = Expression(f"{{{{ {scaling}.replicasMin }}}}")
        spec["maxReplicas"] = Expression(f"{{{{ {scaling}.replicasMax }}}}")
        target = spec["metrics"][0]["resource"]["target"]
        target["averageUtilization"] = Expression(f"{{{{ {scaling}.cpuPercent }}}}")
    elif kind == "Role":
        it["rules"][0]["resourceNames"] = Block('{{- include "sluice.scaled" $ | nindent INDENT }}')
    return it


def _names(value: Any, key: str = "") -> Any:
    """Replace names that differ between clusters: namespace, Secrets, images, hashed ones."""
    if isinstance(value, dict):
        return {name: _names(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_names(inner) for inner in value]
    if not isinstance(value, str) or isinstance(value, Expression):
        return value
    return _name(key, value)


def _name(key: str, value: str) -> str:
    if key == "namespace" and value == "sluice":
        return Expression("{{ $.Release.Namespace }}")
    if key == "name" and value in SECRETS:
        return Expression(f"{{{{ $.Values.secrets.{SECRETS[value]} }}}}")
    if key == "image":
        return Expression(f'{{{{ include "sluice.image" (list $ "{value.partition(":")[0]}") }}}}')
    hashed = HASHED.match(value)
    return hashed[1] if hashed else value


def _settings(it: Object) -> None:
    name = it["metadata"]["name"]
    if name == "backends":
        it["data"] = Block("{{- toYaml $.Values.backends | nindent INDENT }}")
    elif name == "actuators":
        it["data"] = {
            "actuators.json": Expression("{{ toJson $.Values.nodeScaling.actuators | quote }}")
        }
    else:
        it["data"] = {
            key: Expression(f'{{{{ index $.Values.backends "{key}" | quote }}}}')
            for key in it["data"]
        }


def _workload(it: Object) -> None:
    part = it["metadata"]["labels"]["app.kubernetes.io/component"]
    own = {"replica": "$pool", "migrations": "$.Values.migrations"}.get(
        part
    ) or f"$.Values.{VALUES[part]}"
    if "replicas" in it["spec"]:
        it["spec"]["replicas"] = Expression(f"{{{{ {own}.replicas }}}}")
    container = _container(it)
    container["resources"] = Block(f"{{{{- toYaml {own}.resources | nindent INDENT }}}}")
    container["env"] = _environment(container["env"], f"{own}.env")
    container["<pull"] = Block('{{- include "sluice.pull" $ | nindent INDENT }}')
    pod = it["spec"]["template"]
    pod["metadata"]["<annotations"] = Block(
        f'{{{{- include "sluice.annotations" (list $ {own}) | nindent INDENT }}}}'
    )
    # Of the pool's values, with all others.
    pod["spec"].pop("tolerations", None)
    pod["spec"]["<placement"] = Block(
        f'{{{{- include "sluice.placement" (list $ {own}) | nindent INDENT }}}}'
    )
    for claim in it["spec"].get("volumeClaimTemplates", []):
        claim["spec"] = Block('{{- include "sluice.claim" $pool.storage | nindent INDENT }}')


def _environment(entries: list[Object], env: str) -> list[Any]:
    """Return the variables; the values' `env` overrides plain ones, and adds others.

    The names that it does not add are known when all variants are: `_known` writes them.
    """
    made: list[Any] = []
    for entry in entries:
        value = entry.get("value")
        if value is None or isinstance(value, Expression):
            made.append(entry)
            continue
        name, default = entry["name"], value.replace('"', '\\"')
        chosen = f'include "sluice.value" (list {env} "{name}" "{default}")'
        made.append({"name": name, "value": Expression(f"{{{{ {chosen} }}}}")})
    return [*made, Block(f'{{{{- include "sluice.env" (list {env} KNOWN) | nindent INDENT }}}}')]


def _known(variants: Variants, text: str) -> str:
    """Write the names of the variables into `text`: those that can be overridden, and the rest."""
    plain: dict[str, None] = {}
    taken: dict[str, None] = {}
    for it in variants.values():
        for entry in _container(it).get("env", []):
            if not isinstance(entry, Block):
                is_plain = "sluice.value" in entry.get("value", "")
                (plain if is_plain else taken)[entry["name"]] = None
    lists = [" ".join(["list", *(f'"{name}"' for name in names)]) for names in (plain, taken)]
    return text.replace("KNOWN", f"({lists[0]}) ({lists[1]})")


def _hook(it: Object) -> Object:
    """Return an object of the migrations as one that Helm applies before all others."""
    it["metadata"]["annotations"] = {
        "helm.sh/hook": "pre-install,pre-upgrade",
        "helm.sh/hook-weight": "0" if it["kind"] == "Job" else "-1",
        "helm.sh/hook-delete-policy": "before-hook-creation",
    }
    return it


if __name__ == "__main__":
    main()
