"""Options in a model's string: each in its type, and one clear error for what is none."""

from __future__ import annotations

from typing import TypedDict

import pytest

from llm_spec import ConfigError
from llm_spec.kit.model_options import parse_query_options


class Options(TypedDict, total=False):
    threads: int
    share: float
    exact: bool
    dtype: str


def test_each_has_its_type() -> None:
    """And what is not there is not among them."""
    found = parse_query_options("any", "threads=2&share=0.5&exact=false&dtype=bfloat16", Options)
    assert found == {"threads": 2, "share": 0.5, "exact": False, "dtype": "bfloat16"}
    assert parse_query_options("any", "", Options) == {}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("speed=2", "any has no option 'speed'; it has threads, share, exact, dtype"),
        ("threads=many", "threads is 'many'; it must be a number"),
        ("exact=yes", "exact is 'yes'; it must be true or false"),
        ("exact", "exact is ''; it must be true or false"),
    ],
)
def test_what_is_no_option_is_refused(query: str, message: str) -> None:
    """With what there is."""
    with pytest.raises(ConfigError, match=message):
        parse_query_options("any", query, Options)
