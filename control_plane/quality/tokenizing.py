"""Turns texts into a base's token ids. Run by `python -m control_plane.quality.tokenizing`.

Tokenizing runs in a separate process, because a large tokenizer blocks the interpreter for a second
and uses 200 MiB. The process reads tokenizer.json from stdin. It writes one list of ids for each
text in its arguments as JSON.
"""

import asyncio
import json
import sys
from collections.abc import Sequence

_LIMIT_S = 60.0


class TokenizingError(Exception):
    """The process returned no ids. The message has the reason."""


async def token_ids_apart(tokenizer: bytes, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token ids of each text, without special tokens.

    Args:
        tokenizer: Content of tokenizer.json.
        texts: Texts to tokenize, at least one.

    Raises:
        TokenizingError: The content is not a tokenizer, or tokenizing exceeds 60 seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "control_plane.quality.tokenizing", *texts),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            report, errors = await process.communicate(tokenizer)
    except TimeoutError:
        raise TokenizingError(f"no ids within {_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise TokenizingError(errors.decode(errors="replace")[-300:])
    return [tuple(ids) for ids in json.loads(report)]


def main() -> None:
    """Tokenize the texts in the arguments."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode())
    made = [tokenizer.encode(text, add_special_tokens=False).ids for text in sys.argv[1:]]
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
