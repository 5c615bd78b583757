"""`python -m replica.agent` runs the node agent, or one of two commands.

`preflight` reports whether Triton can run on this machine. `uncordon` lifts the cordons of
accelerators, and a running agent puts them back into service within seconds.
"""

import asyncio
import errno
import sys

import uvloop

from replica.agent.app import StateDirectoryInUseError, build_agent
from replica.agent.hardware_watch import CordonFile
from replica.agent.settings import AgentSettings
from replica.agent.triton import preflight
from sluice import certificates, shared_secret
from sluice.identity import CertificateRole
from sluice.lifecycle import stop_signals
from sluice.logs import configure_logs


async def _run(settings: AgentSettings) -> int:
    async with stop_signals() as stop:
        try:
            await build_agent(settings).run(stop)
        except (StateDirectoryInUseError, OSError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            advice = "; stop the process that listens there, or set another AGENT__HTTP_ADDRESS"
            sys.stderr.write(f"agent: {error}{advice if is_taken else ''}\n")
            return 1
    return 0


def main() -> int:
    """Run the command line and return the exit status."""
    if sys.argv[1:] == ["preflight"]:
        problems = preflight()
        for problem in problems:
            sys.stdout.write(f"{problem}\n")
        return 1 if problems else 0
    if sys.argv[1:] == ["uncordon"]:
        lifted = CordonFile(AgentSettings.from_environment().state_dir).remove()
        sys.stdout.write("\n".join(lifted or ["no accelerator is cordoned"]) + "\n")
        return 0
    if sys.argv[1:]:
        sys.stderr.write("usage: python -m replica.agent [preflight | uncordon]\n")
        return 2
    settings = AgentSettings.from_environment()
    configure_logs("agent")
    certificates.use(CertificateRole.AGENT)
    shared_secret.use()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings))


if __name__ == "__main__":
    sys.exit(main())
