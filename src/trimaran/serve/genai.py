"""Names of spans, attributes and events: OpenTelemetry's semantic conventions for generative AI.

They are all in the state 'Development': when they change, this table changes and nothing else.
"""

from __future__ import annotations

from typing import Final

PROVIDER: Final = "trimaran"

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
"""The operation by the path of the endpoint; others have no span."""

SESSIONS: Final = {"/v1/realtime": "chat"}
"""Likewise of WebSockets: one span a session."""

# Of every span
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"

# Of the span of a whole request
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
REQUEST_PARAMETERS: Final = {
    "n": "gen_ai.request.choice.count",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
}
"""The attribute by the name of the sampling parameter."""

# The same times as those of the children, in seconds, where a back end shows no children
TIME_IN_QUEUE: Final = "gen_ai.latency.time_in_queue"
TIME_TO_FIRST_TOKEN: Final = "gen_ai.latency.time_to_first_token"
E2E: Final = "gen_ai.latency.e2e"
TIME_IN_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE: Final = "gen_ai.latency.time_in_model_decode"

# General conventions
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
CLIENT_ADDRESS: Final = "client.address"

# Our own
REQUEST_ID: Final = "trimaran.request.id"
PREEMPTIONS: Final = "trimaran.preemptions"
FIRST_TOKEN: Final = "trimaran.first_token"
"""An event: when the first token was there."""
QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
"""Names of the children."""
