import pytest

from trimaran.core.errors import ParameterError
from trimaran.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e-5),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", 1000),
        ("prompt_logprobs", -1),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {-3: 1.0}),
        ("seed", 2**64),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("logit_bias", [1]),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.parameter == name


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ParameterError, match="'temprature'.*'temperature'"):
        SamplingParams.from_mapping({"temprature": 1.0})


def test_vllm_spellings() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
