"""The driver `trtllm` against the recorded fake: what it asks of TensorRT-LLM, and what it survives."""

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replica.drivers import trtllm
from replica.drivers.options import OptionsError
from replica.drivers.registry import load_driver
from replica.drivers.trtllm_api import IMAGE, TrtllmApi
from replica.engine.types import Finish, Grammar, GrammarKind, Sampling, SequenceRequest
from sluice.errors import ErrorCode
from sluice.hashing import block_hashes, cache_root
from tests.support.random_models import write_random_adapter, write_random_model

_spec = importlib.util.spec_from_file_location(
    "contract_fake_trtllm_alone", Path(__file__).with_name("fake_trtllm.py")
)
assert _spec is not None
assert _spec.loader is not None
fake = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trtllm") / "base"
    write_random_model(directory)
    return directory


@pytest.fixture
def load(base: Path) -> Iterator[Callable]:
    """Load a driver; `faults` and other attributes are of the fake, the rest are options."""
    opened = []

    def load_with(*, version: str = "1.2.1", attributes: dict | None = None, **options):
        llm = type("LLM", (fake.LLM,), attributes or {})
        importer = fake.importer(version, llm)
        driver = trtllm.load_trtllm(base, "base", options, make_api=lambda: TrtllmApi(importer))
        opened.append(driver)
        return driver

    yield load_with
    for driver in opened:
        driver.close()


def engine_of(driver) -> fake.LLM:
    return driver._client._llm


def run(driver, *requests: SequenceRequest) -> dict:
    """Run requests; returns the end of each."""
    ends = {}
    for request in requests:
        driver.add(request)
    while driver.has_work:
        ends |= {event.key: event for event in driver.step().finished}
    return ends


def until(driver, condition: Callable[[], bool]) -> None:
    """Step an idle driver until late events have made something true."""
    ends_at_s = time.monotonic() + 60
    while not condition():
        driver.step()
        assert time.monotonic() < ends_at_s
        time.sleep(0.001)


def request(key: int = 1, output: int = 4, **fields) -> SequenceRequest:
    return SequenceRequest(key, [5, 6, 7], output, **{"ignore_eos": True, **fields})


def test_without_tensorrt_llm_the_error_names_the_image(base: Path) -> None:
    with pytest.raises(ValueError, match=f"not installed .*{IMAGE}"):
        load_driver("trtllm", base, "base", {})
    with pytest.raises(ValueError, match="needs a base artifact"):
        load_driver("trtllm", None, "base", {})


@pytest.mark.parametrize("version", ["1.1.0", "0.21.0", "unknown"])
def test_versions_before_the_oldest_known_are_refused(load, version) -> None:
    with pytest.raises(ValueError, match=f"TensorRT-LLM {version} is older than 1.2"):
        load(version=version)


@pytest.mark.parametrize("version", ["1.2.0rc6", "1.2.1", "1.3.0rc26", "1.4.0rc1"])
def test_the_known_lines_are_served(load, version) -> None:
    assert run(load(version=version), request())[1].reason is Finish.LENGTH


def test_a_version_that_cannot_isolate_tenants_is_refused(load) -> None:
    def old(self, inputs, sampling_params=None, lora_request=None, *, streaming=False):
        raise AssertionError

    with pytest.raises(ValueError, match="generate_async does not take cache_salt"):
        load(attributes={"generate_async": old})


def test_options_become_arguments(load) -> None:
    driver = load(
        tensor_parallel="4",
        pipeline_parallel=2,
        expert_parallel=4,
        sequences_max=32,
        step_tokens_max=4096,
        context_tokens_max=1000,
        kv_memory_share=0.8,
        kv_dtype="fp8",
        kv_tokens_max=100_000,
        kv_host_bytes=1 << 30,
        stream_interval=2,
        adapter_slots=3,
        adapter_rank=16,
        speculation='{"decoding_type": "NGram", "max_draft_len": 4}',
        extra='{"enable_attention_dp": true}',
    )
    given = engine_of(driver).arguments
    assert (given["tensor_parallel_size"], given["pipeline_parallel_size"]) == (4, 2)
    assert given["moe_expert_parallel_size"] == 4
    assert given["max_batch_size"] == 33  # one for probes
    assert (given["max_num_tokens"], given["max_seq_len"]) == (4096, 1000)
    assert given["enable_attention_dp"] is True
    assert given["stream_interval"] == 2
    cache = given["kv_cache_config"]
    assert (cache.free_gpu_memory_fraction, cache.dtype) == (0.8, "fp8")
    assert (cache.max_tokens, cache.host_cache_size) == (100_000, 1 << 30)
    assert (cache.tokens_per_block, cache.enable_block_reuse) == (32, True)
    assert cache.event_buffer_max_size > 0
    assert (given["lora_config"].max_loras, given["lora_config"].max_lora_rank) == (3, 16)
    assert given["speculative_config"] == fake.NGramDecodingConfig(max_draft_len=4)
    assert driver.limits.context_tokens_max == 1000
    assert driver.limits.kv_blocks == fake.LLM.blocks


def test_a_kind_of_speculation_has_the_class_that_the_version_has(load) -> None:
    text = '{"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model_dir": "draft"}'
    given = engine_of(load(speculation=text)).arguments["speculative_config"]
    assert given == fake.EagleDecodingConfig(max_draft_len=3, speculative_model_dir="draft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0; it must be above 0"),
        ({"kv_memory_share": 1.5}, "kv_memory_share is 1.5"),
        ({"grammars": "xgrammar"}, "grammars is 'xgrammar'"),
        (
            {"speculation": '{"decoding_type": "Magic"}'},
            "decoding_type is 'Magic'; known are NGram",
        ),
        ({"speculation": "{"}, "speculation is not JSON"),
        ({"extra": "[]"}, "extra is not a JSON object"),
        ({"extra": '{"max_seq_len": 5}'}, "extra names max_seq_len"),
        ({"speculation": '{"decoding_type": "MTP"}'}, "1.2.1 has no MTPDecodingConfig"),
        ({"tensor_paralel": 2}, "unknown engine option tensor_paralel"),
    ],
)
def test_impossible_options_are_refused(load, options, message) -> None:
    with pytest.raises(OptionsError, match=message):
        load(**options)


def test_a_model_that_gives_no_first_token_does_not_load(load) -> None:
    with pytest.raises(ValueError, match=r"cannot run the model: .*CUDA error"):
        load(attributes={"faults": {1: "CUDA error: out of memory"}})
    with pytest.raises(ValueError, match=r"no token within 0.2 s \(load_s_max\)"):
        load(attributes={"is_hung": True}, load_s_max=0.2)


def test_requests_are_sent_as_ids_with_their_own_salt_and_sampling(load) -> None:
    driver = load()
    plain = request(1, stop_token_ids=frozenset({9, 8}), ignore_eos=False)
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=11, logprobs=0)
    salted = request(2, cache_root=b"s" * 16, sampling=sampling)
    run(driver, plain, salted)
    first, second = engine_of(driver).seen[1:]  # the very first is the warm-up
    assert first.prompt_token_ids == [5, 6, 7]
    assert (first.params.top_k, first.params.temperature, first.salt) == (1, None, None)
    assert {8, 9, 2, 0} == set(first.params.stop_token_ids)  # 0 and 2 end the base itself
    assert (first.params.end_id, first.params.include_stop_str_in_output) == (-1, True)
    assert not first.params.detokenize
    assert second.salt == (b"s" * 16).hex()
    params = second.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.7, 0.9, 40, 11)
    assert (params.stop_token_ids, params.logprobs) == (None, 1)


def test_a_trace_context_goes_on_to_engines_that_take_one(load) -> None:
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "v=1"}
    driver = load()
    run(driver, request(1, trace=trace), request(2))
    assert engine_of(driver).traces[1:] == [trace, None]

    def older(
        self, inputs, sampling_params=None, lora_request=None, streaming=False, cache_salt=None
    ):
        return fake.LLM.generate_async(
            self, inputs, sampling_params, lora_request, streaming=streaming, cache_salt=cache_salt
        )

    driver = load(attributes={"generate_async": older})
    assert run(driver, request(1, trace=trace))[1].reason is Finish.LENGTH


def test_prompt_tokens_are_told_with_the_step_that_computed_them(load) -> None:
    driver = load()
    driver.add(request(1))
    told: list[int] = []

    def is_over() -> bool:
        told.append(driver.load().step_prompt_tokens)
        return not driver.has_work and sum(told) > 0

    until(driver, is_over)
    driver.step()
    assert sum(told) == 3
    assert driver.load().step_prompt_tokens == 0


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar(GrammarKind.JSON), {"json_object": True}),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), {"json": '{"type": "object"}'}),
        (Grammar(GrammarKind.REGEX, "a+"), {"regex": "a+"}),
        (Grammar(GrammarKind.CHOICE, '["a.b", "c"]'), {"regex": r"a\.b|c"}),
        (Grammar(GrammarKind.EBNF, 'start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_grammars_are_handed_on(load, grammar, expected) -> None:
    driver = load()
    run(driver, request(1, sampling=Sampling(grammar=grammar)))
    assert engine_of(driver).seen[-1].params.guided_decoding == fake.GuidedDecodingParams(
        **expected
    )
    with pytest.raises(ValueError, match="a grammar cannot go on behind 2 emitted tokens"):
        driver.add(request(2, sampling=Sampling(grammar=grammar), resumed_tokens=2))


def test_uncheckable_grammars_need_an_explicit_wish(load, monkeypatch) -> None:
    monkeypatch.setattr(trtllm, "_grammar_check", lambda directory, facts: None)
    assert not load().capabilities.has_grammars
    assert load(grammars_unchecked="true").capabilities.has_grammars
    assert not load(grammars="", grammars_unchecked=True).capabilities.has_grammars


ENGINE = RuntimeError("Background error: the worker process died")


@pytest.mark.parametrize(
    ("fault", "reason", "code"),
    [
        ("Maximum queue size of 64 has been reached", Finish.BUSY, ErrorCode.ENGINE_BUSY),
        (
            "prompt length should not exceed max_num_tokens",
            Finish.REFUSED,
            ErrorCode.ENGINE_REFUSED,
        ),
        (ValueError("bad prompt"), Finish.REFUSED, ErrorCode.ENGINE_REFUSED),
        ("Executor failed: CUDA error", Finish.FAILED, ErrorCode.ENGINE_FAILED),
    ],
)
def test_an_error_of_a_request_is_told_to_it_alone(load, fault, reason, code) -> None:
    driver = load(attributes={"faults": {2: fault}})
    ends = run(driver, request(1), request(2))
    assert (ends[1].reason, ends[1].code) == (reason, code)
    assert str(fault) in ends[1].message
    assert ends[2].reason is Finish.LENGTH


def test_a_lost_engine_ends_everything_now_and_later(load) -> None:
    driver = load(attributes={"faults": {3: ENGINE}})
    ends = run(driver, request(1, 400), request(2, 400))
    assert {end.reason for end in ends.values()} == {Finish.FAILED}
    assert "worker process died" in ends[1].message
    assert run(driver, request(3))[3].code == ErrorCode.ENGINE_FAILED


def test_a_silent_engine_is_given_up(load) -> None:
    driver = load(silence_s_max=0.2)
    engine_of(driver).is_hung = True
    ends = run(driver, request(1), request(2))
    assert {end.reason for end in ends.values()} == {Finish.FAILED}
    assert "said nothing for" in ends[1].message


def test_a_cancelled_request_is_aborted_in_the_engine(load) -> None:
    driver = load()
    driver.add(request(1, 1500))
    while not driver.step().tokens:
        pass
    driver.cancel(1)
    assert [event.reason for event in driver.step().finished] == [Finish.CANCELLED]
    # The next one shares the engine with nobody once the abort has arrived.
    run(driver, request(2, 50))
    assert engine_of(driver)._running == []


def test_adapters_are_named_by_path_and_content(load, base: Path, tmp_path: Path) -> None:
    driver = load(adapter_slots=1)
    for index, digest in enumerate(("one", "two")):
        write_random_adapter(tmp_path / digest, base, index)
        driver.put_adapter(digest, driver.read_adapter(digest, tmp_path / digest))
    run(driver, request(1, adapter_digest="one"), request(2, adapter_digest="two"))
    first, second = (result.lora_id for result in engine_of(driver).seen[-2:])
    assert 0 < first != second > 0
    assert max(first, second) < 1 << 63
    shutil.rmtree(tmp_path / "one")
    end = run(driver, request(3, adapter_digest="one"))[3]
    assert (end.reason, end.code) == (Finish.FAILED, ErrorCode.ADAPTER_NOT_FOUND)
    assert "load it again" in end.message


@pytest.mark.parametrize("executor", [None, fake.GenerationExecutorRpcProxy()], ids=["ipc", "rpc"])
def test_cache_events_carry_our_hashes_and_evictions_follow(load, executor) -> None:
    driver = load(attributes={"blocks": 24, "_executor": executor})
    prompt = list(range(30, 130))
    run(driver, SequenceRequest(1, prompt, 4, ignore_eos=True))
    own = block_hashes(prompt, cache_root("base", "", b""), 3)
    until(driver, lambda: set(own) <= set(driver.cached_blocks()))
    for key in range(2, 12):
        run(driver, SequenceRequest(key, [key * 30 + i for i in range(100)], 4, ignore_eos=True))
    until(driver, lambda: not set(own) & set(driver.cached_blocks()))
    assert 0 < len(driver.cached_blocks()) <= 24
