"""Measures the CPU time of sampling per row, which a step needs besides the model's graph.

One operation is `prepare` and `sample` of one step, divided by its rows. All rows have the same
kind of sampling. The sequences have 200 prompt tokens and 50 emitted ones. One thread fills the
masks of grammars. Logits have a normal distribution with a standard deviation of 2.5, flatter than
those of a trained model. So top_p keeps hundreds of tokens, and it would cost less with fewer.
"grammar" alternates between two sequences of states, so that no mask is cached. The vocabulary of
128k tokens is an artificial tokenizer. `compile_ms` is the time to compile a new grammar. Figures
are CPU time of one core, as median and best of the steps. On a busy machine, other processes use
the same memory and the core's other hyperthread. So the best is nearer to the figure of an idle
machine. Not measured: the graph.
Run: `python -m benchmarks.micro.sampling`.
"""

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import write_result
from replica.engine.grammar import GrammarCompiler
from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.sampler import Sampler
from replica.engine.types import Grammar, GrammarKind, Sampling, SequenceRequest

EOS = frozenset({0, 1})
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
SHAPES = ((64, 4096), (32, 131_072))
STEPS = {4096: 200, 131_072: 20}
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 50
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["text", "count"],
}
PENALTIES = Sampling(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5)
KINDS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top_p": Sampling(temperature=0.8, top_p=0.9),
    "top_k": Sampling(temperature=0.8, top_k=40),
    "min_p": Sampling(temperature=0.8, min_p=0.05),
    "penalties": PENALTIES,
    "bias": Sampling(temperature=0.8, logit_bias=((5, -100.0), (6, 2.0))),
    "logprobs_5": Sampling(temperature=0.8, logprobs=5),
    "grammar": Sampling(
        temperature=0.8, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    ),
}


def write_tokenizer(path: Path, vocabulary: int) -> None:
    """Write a tokenizer with two special tokens, all single bytes, and random words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(0)
    words = dict.fromkeys(["<|end|>", "<|stop|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(words) < vocabulary:
        word = "".join(rng.choices(ALPHABET, k=rng.randint(2, 9)))
        words[word.replace(" ", "\u0120")] = None  # a space in byte-level tokenizers
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in list(words)[:2]])
    tokenizer.save(str(path))


def sequences(rows: int, vocabulary: int, sampling: Sampling) -> list[ScheduledSequence]:
    """Return decoding sequences, each with another seed."""
    rng = random.Random(1)
    batch: list[ScheduledSequence] = []
    for key in range(rows):
        prompt = [rng.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)]
        own = Sampling(**{name: getattr(sampling, name) for name in Sampling.__slots__})
        request = SequenceRequest(key, prompt, 10_000, sampling=own)
        sequence = ScheduledSequence(request, key, b"", EOS)
        if sampling.grammar is None:
            sequence.tokens.extend([rng.randrange(2, vocabulary) for _ in range(OUTPUT_TOKENS)])
        batch.append(sequence)
    return batch


def per_row_us(compiler: GrammarCompiler, rows: int, kind: str) -> dict[str, Any]:
    """Return the CPU time of one row with one kind of sampling, in µs."""
    vocabulary, sampling = compiler.vocabulary, KINDS[kind]
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2.5, (rows, vocabulary)).astype(np.float32)
    sampler = Sampler(vocabulary, EOS, compiler)
    samples: list[float] = []
    plan = StepPlan([], [])
    for step in range(STEPS[vocabulary]):
        if step % 20 == 0:
            plan = StepPlan(sequences(rows, vocabulary, sampling), [])
            sampler.prepare(plan)  # creates the sequences' state, unmeasured
        started_s = time.process_time()
        sampler.prepare(plan)
        output = sampler.sample(logits, plan)
        samples.append(time.process_time() - started_s)
        assert not output.failed, output.failed
        for sequence, token in zip(plan.sampled, output.tokens, strict=True):
            sequence.tokens.append(token)
    return {
        "rows": rows,
        "vocabulary": vocabulary,
        "kind": kind,
        "us_per_row": round(1e6 * statistics.median(samples) / rows, 2),
        "best_us_per_row": round(1e6 * min(samples) / rows, 2),
    }


def compile_ms(compiler: GrammarCompiler) -> float:
    """Return the time to compile one new grammar like that of the case "grammar"."""
    samples: list[float] = []
    for index in range(20):
        schema = SCHEMA | {"description": f"number {index}"}
        started_s = time.perf_counter()
        compiler.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        samples.append(time.perf_counter() - started_s)
    return round(1e3 * statistics.median(samples), 2)


def main() -> None:
    """Measure, print and write the result."""
    per_row: list[dict[str, Any]] = []
    compiling: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for rows, vocabulary in SHAPES:
            path = Path(directory) / f"{vocabulary}.json"
            write_tokenizer(path, vocabulary)
            compiler = GrammarCompiler(path, vocabulary, EOS)
            started_s = time.perf_counter()
            compiler.check(Grammar(GrammarKind.JSON))
            first_ms = round(1e3 * (time.perf_counter() - started_s), 1)
            per_row += [per_row_us(compiler, rows, kind) for kind in KINDS]
            compiling.append(
                {
                    "vocabulary": vocabulary,
                    "first_with_tokenizer_ms": first_ms,
                    "new_schema_ms": compile_ms(compiler),
                }
            )
    operation = (
        "per_row: prepare + sample of one step, divided by its rows; CPU time of one core."
        " compile: wall time of GrammarCompiler.check of a new grammar."
    )
    figures = {"per_row": per_row, "compile": compiling}
    path = write_result("sampling", operation, figures)
    for row in (*per_row, *compiling):
        print(row)
    print(path)


if __name__ == "__main__":
    main()
