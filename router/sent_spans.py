"""Remembers which spans of prompts a router has sent to an engine, so that none is sent again."""

from collections import OrderedDict

from sluice.prompt_spans import SPAN_BLOCKS, span_names


class SentSpans:
    """The names of the spans that one engine has most recently received.

    An engine keeps as many spans as fit into its KV pool. Several routers may fill it, and prompts
    without hashes too, so a router counts on half of them only. The engine refuses a span that it
    lacks, and then `clear` is called.
    """

    def __init__(self, kv_blocks: int) -> None:
        """Remember nothing yet of an engine with `kv_blocks` blocks."""
        self._count_max = kv_blocks // SPAN_BLOCKS // 2
        self._names: OrderedDict[bytes, None] = OrderedDict()  # the least recently used is first

    def send(self, hashes: bytes) -> list[bytes]:
        """Record that the engine will have a whole prompt.

        Args:
            hashes: Hashes of the full blocks of the prompt, concatenated.

        Returns:
            The names of the first spans, which the engine has already.
        """
        names, sent = span_names(hashes), self._names
        known = 0
        while known < len(names) and names[known] in sent:
            known += 1
        # The end of a prompt is forgotten before its beginning, without which the end is useless.
        for name in reversed(names):
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self._count_max:
            sent.popitem(last=False)
        return names[:known]

    def clear(self) -> None:
        """Forget everything, because the engine lacks a span."""
        self._names.clear()
