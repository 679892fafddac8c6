"""Fields that several endpoints share, and how they become sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trimaran.core.retention import DEFAULT_PRIORITY, Retention
from trimaran.core.sampling_params import SamplingParams
from trimaran.serve.errors import unsupported

MAX_FIELDS = 64
"""Fields of an object; none that is known has as many."""

Text = Annotated[str, Field(max_length=1 << 20)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

FIRST = Field(fail_fast=True)
"""For lists: the first bad item ends the check. A body of a million bad items would otherwise
make a million errors, which takes minutes and gigabytes."""


def at_most(count: int) -> BeforeValidator:
    """For mappings: `max_length` of pydantic counts only after each entry was checked."""

    def check(value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > count:
            raise ValueError(f"has {len(value)} entries; give {count} at most")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A request's body; whatever isn't a field of it is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields; give {MAX_FIELDS} at most")
        return value


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class RetentionFields(Body):
    """How long a prompt is to stay in the prefix cache."""

    priority: int = Field(DEFAULT_PRIORITY, ge=0, le=100)
    seconds: float | None = Field(None, gt=0, le=30 * 86_400)


class Sampling(Body):
    """OpenAI's sampling fields and vLLM's beyond them; None is the default."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=256)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], FIRST] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[dict[str, float] | None, at_most(4096)] = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=128)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=1024)
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    user: str | None = Field(None, max_length=1024)

    def sampling(self, **given: Any) -> SamplingParams:
        """The parameters of the request; `given` are those with other names in the API.

        Raises:
            ApiError, ParameterError: name the field at fault.
        """
        names = (
            "temperature top_p top_k min_p n seed stop stop_token_ids presence_penalty"
            " frequency_penalty repetition_penalty min_tokens ignore_eos"
            " include_stop_str_in_output skip_special_tokens prompt_logprobs"
        )
        values = {
            name: value for name in names.split() if (value := getattr(self, name)) is not None
        }
        if self.logit_bias:
            values["logit_bias"] = {_token(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams.from_mapping(values | given)


def _token(key: str) -> int:
    if not key.isdecimal() or len(key) > 10:
        raise unsupported("logit_bias", f"has the key '{key}'; keys are token ids")
    return int(key)


class Wishes(Body):
    """What a request wants of the engine besides its tokens."""

    slo: Literal["interactive", "standard", "batch"] | None = None
    retention: RetentionFields | None = None

    def wishes(self) -> dict[str, Any]:
        """As `AsyncEngine.start` takes them."""
        found: dict[str, Any] = {}
        if self.slo is not None:
            found["slo"] = self.slo
        if self.retention is not None:
            found["retention"] = Retention(self.retention.priority, self.retention.seconds)
        return found
