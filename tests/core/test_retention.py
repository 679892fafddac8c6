import pytest

from trimaran.core.errors import ParameterError
from trimaran.core.retention import Retention


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"priority": 101}, "priority is 101; give a whole number from 0 to 100"),
        ({"priority": -1}, "priority is -1"),
        ({"priority": 3.5}, "priority is 3.5"),
        ({"priority": True}, "priority is True"),
        ({"seconds": 0}, "seconds are 0; give a number above 0"),
        ({"seconds": float("inf")}, "seconds are inf"),
        ({"seconds": "soon"}, "seconds are 'soon'"),
    ],
)
def test_a_bad_value_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Retention(**values)  # type: ignore[arg-type]


def test_the_default_is_what_blocks_have_anyway() -> None:
    assert Retention() == Retention(35, None)
