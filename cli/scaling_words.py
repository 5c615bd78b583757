"""The lines of `sluice scaling explain`, in words and numbers."""

from cli.api import Json
from cli.scaling_roles import role_lines


def told(found: Json) -> list[str]:
    """Return the reason of a pool's size in words."""
    if not found.get("reasons"):
        return ["The pool has bounds and no plan yet: check that a control plane runs."]
    now = f"{found['ready']} ready, {found['booting']} booting"
    if found["asleep"] or found["sleepers"]:
        now += f", {found['asleep']} of {found['sleepers']} asleep"
    lines = [f"{found['wanted']} replicas ({now}):"]
    lines += role_lines(found)
    lines += [f"  {reason['replicas']:>4}  {reason['text']}" for reason in found["reasons"]]
    lines += hand_lines(found)
    lines += [f"Warning: {text}" for text in found["warnings"]]
    speed = found["speed"]
    if speed:
        prompt, output = 1 / speed["prompt_token_s"], 1 / speed["output_token_s"]
        lines.append(
            f"A full replica computes {prompt:,.0f} prompt tokens or gives {output:,.0f} output"
            f" tokens per second, with {speed['sequences']} requests at once."
        )
    seconds = found["tiers_s"] or 1.0
    for priority, (requests, prompt, output, refused) in sorted(
        found["tiers"].items(), key=lambda item: -int(item[0])
    ):
        lines.append(
            f"Priority {priority}: {requests / seconds:.1f} requests,"
            f" {prompt / seconds:,.0f} prompt and {output / seconds:,.0f} output tokens per"
            f" second; {refused} refused."
        )
    known = f"{found['boots']} boots measured" if found.get("boots") else "assumed, none measured"
    lines.append(f"A replica boots within {found['boot_s']:.0f} s ({known}).")
    if nodes := found.get("next_nodes"):
        lines.append(f"The next replicas boot on {', '.join(nodes)}, which fetch the base ahead.")
    return lines


def hand_lines(found: Json) -> list[str]:
    """Return a line for each setting by hand that is in effect, with the command that ends it."""
    lines: list[str] = []
    pool = found["pool_id"]
    if not found.get("is_on", True):
        lines.append(f"Scaling is off, so this is not applied: `sluice scaling set {pool} --on`.")
    if found.get("pin") is not None:
        until = f" until {found['pin_until'][:16]} UTC" if found["pin_until"] else ""
        lines.append(
            f"Set to {found['pin']} by hand ({found['pinned_by']}){until}:"
            f" `sluice scaling resume {pool}` lifts it."
        )
    if found.get("is_paused"):
        lines.append(f"Scaling is paused: `sluice scaling resume {pool}` ends the pause.")
    return lines
