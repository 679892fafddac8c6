"""What /metrics says of a server that has done a little of everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.http_server import HttpServer
from support.metrics import loaded_server, samples

DASHBOARDS_OF_VLLM = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:iteration_tokens_total_sum",
    "vllm:iteration_tokens_total_count",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:lora_requests_info",
    "vllm:cache_config_info",
}
"""What the dashboards of vLLM's own repository and of its users ask for."""


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> Iterator[HttpServer]:
    with loaded_server() as server:
        yield server


def test_all_that_vllms_dashboards_ask_for_is_there(loaded: HttpServer) -> None:
    found = samples(loaded)
    assert set(found) >= DASHBOARDS_OF_VLLM
    for name in DASHBOARDS_OF_VLLM:
        for labels in found[name]:
            assert (labels["model_name"], labels["engine"]) == ("smollm2", "0"), name


def test_sglangs_names_agree_with_vllms(loaded: HttpServer) -> None:
    assert loaded.metric("sglang:num_running_reqs") == loaded.metric("vllm:num_requests_running")
    assert loaded.metric("sglang:num_queue_reqs") == loaded.metric("vllm:num_requests_waiting")
    assert loaded.metric("sglang:token_usage") == loaded.metric("vllm:kv_cache_usage_perc")
    queries = loaded.metric("vllm:prefix_cache_queries_total")
    hits = loaded.metric("vllm:prefix_cache_hits_total")
    assert 0 < hits < queries
    assert loaded.metric("sglang:cache_hit_rate") == pytest.approx(hits / queries)


def test_what_was_never_done_isnt_claimed(loaded: HttpServer) -> None:
    assert not [name for name in samples(loaded) if "spec" in name]


def test_requests_are_counted_by_how_they_ended(loaded: HttpServer) -> None:
    def ended(reason: str) -> float:
        return loaded.metric("vllm:request_success_total", finished_reason=reason)

    assert ended("length") + ended("stop") == 6
    assert ended("abort") == 1
    assert ended("error") == 0
    refused = "vllm:admission_rejections_total"
    assert loaded.metric(refused, reason="queue_full") == 1
    assert loaded.metric(refused, reason="max_waiting") == 0
    assert loaded.metric("trimaran:watchdog_failures_total", reason="hang") == 0
    answered = loaded.metric("trimaran:slo_requests_total", slo="standard")
    assert answered >= 6  # the warm-up's are answered too
    assert 0 < loaded.metric("trimaran:slo_kept_total", slo="standard") <= answered


def test_histograms_of_requests_and_steps_add_up(loaded: HttpServer) -> None:
    assert loaded.metric("vllm:request_params_n_sum") == 1 + 3 + 1 + 1 + 1 + 1 + 1
    assert loaded.metric("vllm:request_params_max_tokens_sum") == 8 + 8 + 5 + 5 + 4 + 12 + 900
    longest = loaded.metric("vllm:request_max_num_generation_tokens_sum")
    generated = loaded.metric("vllm:request_generation_tokens_sum")
    assert 0 < longest < generated  # that of n = 3 has less in one sequence than in all
    assert generated == loaded.metric("vllm:generation_tokens_total")
    steps = loaded.metric("trimaran:steps_total")
    assert loaded.metric("vllm:iteration_tokens_total_count") == steps
    assert loaded.metric("vllm:iteration_tokens_total_sum") >= generated
    assert loaded.metric("trimaran:schedule_seconds_count") == steps
    gaps = loaded.metric("trimaran:compute_gap_seconds_sum")
    assert 0 < gaps < loaded.metric("trimaran:step_interval_seconds_sum")
    old, new = "vllm:time_per_output_token_seconds_sum", "vllm:inter_token_latency_seconds_sum"
    assert loaded.metric(old) == loaded.metric(new) > 0


def test_opentelemetrys_histograms_are_of_http_requests(loaded: HttpServer) -> None:
    def count(name: str, part: str = "count", **labels: str) -> float:
        return loaded.metric(f"gen_ai_server_{name}_seconds_{part}", **labels)

    for labels in samples(loaded)["gen_ai_server_request_duration_seconds_count"]:
        assert labels["gen_ai_provider_name"] == "trimaran"
        assert labels["gen_ai_request_model"] == "smollm2"
        assert loaded.url.endswith(":" + labels["server_port"])
    text, chat = ({"gen_ai_operation_name": name} for name in ("text_completion", "chat"))
    assert count("request_duration", **text) == 4 + 2
    assert count("request_duration", **text, error_type="") == 4
    assert count("request_duration", **text, error_type="client_disconnected") == 1
    assert count("request_duration", **text, error_type="429") == 1
    assert count("request_duration", **chat) == 1
    assert count("time_to_first_token") == count("time_per_output_token") == 5
    own, engines = count("request_duration", "sum", error_type=""), "vllm:e2e_request_latency"
    first = loaded.metric("vllm:time_to_first_token_seconds_sum")
    assert count("time_to_first_token", "sum") <= first
    assert count("time_to_first_token", "sum") < own <= loaded.metric(f"{engines}_seconds_sum") + 1
    before = count("request_duration", gen_ai_operation_name="embeddings")
    for body in ({"input": "a", "pooling": "mean"}, {"input": "a"}):
        httpx.post(f"{loaded.url}/v1/embeddings", json=body, timeout=60)
    assert count("request_duration", gen_ai_operation_name="embeddings") == before + 2
    assert count("time_to_first_token", gen_ai_operation_name="embeddings") == 0


def test_fragmentation_is_that_of_the_blocks_in_use(loaded: HttpServer) -> None:
    body = {"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{loaded.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        state = httpx.get(f"{loaded.url}/debug/state").json()
        last, size = state["steps"][-1], state["blocks"]["size"]
        (running,) = state["requests"]["running"]
        assert last["live"] == running["computed_tokens"]
        assert last["held"] == -(-last["live"] // size)
        assert loaded.metric("trimaran:kv_live_tokens") >= last["live"]
        assert 0 <= loaded.metric("trimaran:kv_fragmentation_ratio") < 1
        assert loaded.metric("trimaran:kv_blocks", state="held") >= last["held"]
    assert loaded.metric("trimaran:kv_blocks") == state["blocks"]["total"]


def test_every_metric_is_in_the_docs(loaded: HttpServer) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    told: set[str] = set()
    for word in re.findall(r"[\w:{},]{4,}", text):
        if "{" in word and "," in word:
            head, inside, tail = re.split(r"[{}]", word, maxsplit=2)
            told |= {f"{head}{each}{tail}".split(":")[-1] for each in inside.split(",")}
        else:
            told.add(re.sub(r"\{.*", "", word).split(":")[-1])
    for name in samples(loaded):
        if name.startswith(("process_", "python_")):
            continue
        own = re.sub(r"_(bucket|sum|count|created)$", "", name.rpartition(":")[2])
        assert {own, f"{own}_total"} & told, f"docs/serving.md doesn't tell of {name}"
