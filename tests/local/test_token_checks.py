"""What drafts propose is checked before it can fail a request, and errors name what was wrong without quoting it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_spec import DraftError
from llm_spec.contract.token_model import DraftToken
from llm_spec.local.propose import ReadOnlyTokenIds, check_confidence, check_draft_token, get_confidence_before_sampling

QUOTE = "what the user wrote"
LAW = np.array([0.25, 0.75, 0.0])


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (7, "a value of type int; it must be a DraftToken"),
        ((1, None, None), "a value of type tuple"),
        (DraftToken(1.0), "id is of type float; it must be a whole number"),  # type: ignore[arg-type]
        (DraftToken(QUOTE), "id is of type str"),  # type: ignore[arg-type]
        (DraftToken(None), "id is of type NoneType"),  # type: ignore[arg-type]
        (DraftToken(3), "token id 3 is outside the vocabulary of 3"),
        (DraftToken(-1), "token id -1 is outside"),
        (DraftToken(1, 0.5, [0.0, 1.0, 0.0]), "token id 1 are of type list; they must be a numpy array"),  # type: ignore[arg-type]
        (DraftToken(1, 0.5, np.array([0.5, 0.5])), "are not 3 probabilities"),
        (DraftToken(2, 0.5, LAW), "are not 3 probabilities"),  # a token that cannot be
        (DraftToken(1, 0.5, 2 * LAW), "are not 3 probabilities"),
        (DraftToken(1, 0.5, np.array([-0.5, 1.5, 0.0])), "are not 3 probabilities"),
        (DraftToken(1, 0.5, np.array([np.nan, 1.0, 0.0])), "are not 3 probabilities"),
    ],
)
def test_what_no_target_can_verify_is_refused(token: Any, reason: str) -> None:
    """With a reason that names the type or the number, never a text."""
    with pytest.raises(DraftError, match=reason) as caught:
        check_draft_token(token, 3)
    assert QUOTE not in str(caught.value)


@pytest.mark.parametrize("token", [DraftToken(0), DraftToken(2, 0.5), DraftToken(1, 0.75, LAW)])
def test_what_can_be_verified_passes_as_it_is(token: DraftToken) -> None:
    """The same token, distribution and confidence included."""
    assert check_draft_token(token, 3) is token


def test_an_id_of_another_integer_type_becomes_an_int() -> None:
    """So that answers hold nothing else."""
    token = check_draft_token(DraftToken(np.int64(2), 0.5), 3)  # type: ignore[arg-type]
    assert (type(token.token_id), token) == (int, DraftToken(2, 0.5))


@pytest.mark.parametrize(
    ("confidence", "reason"),
    [
        (QUOTE, "is of type str; it must be a number from 0 to 1"),
        ([0.5], "is of type list"),
        (float("nan"), "is nan; it must be from 0 to 1"),
        (float("inf"), "is inf"),
        (1.5, "is 1.5"),
        (-0.5, "is -0.5"),
    ],
)
def test_a_confidence_that_steers_nothing_is_refused(confidence: Any, reason: str) -> None:
    """With a reason that names the type or the number, never a text."""
    with pytest.raises(DraftError, match=reason) as caught:
        check_confidence(confidence)
    assert QUOTE not in str(caught.value)


@pytest.mark.parametrize("confidence", [None, 0, 1, 0.5, 1.0000001, np.float32(0.3), np.array(0.3)])
def test_a_confidence_is_a_number_or_none(confidence: Any) -> None:
    """Of whatever type, and as exact as single precision is."""
    check_confidence(confidence)


def test_before_the_draw_a_draft_is_as_sure_as_of_its_likeliest_token() -> None:
    """Whichever was drawn; a token that was given, not drawn, has a confidence of its own."""
    assert {get_confidence_before_sampling(DraftToken(token_id, float(LAW[token_id]), LAW)) for token_id in (0, 1)} == {
        0.75
    }
    assert get_confidence_before_sampling(DraftToken(0, 0.25)) == 0.25
    assert get_confidence_before_sampling(DraftToken(0)) is None


def test_a_view_grows_with_its_list_and_cannot_change_it() -> None:
    """It reads as a sequence does; what writes to it raises."""
    token_ids = [1, 2, 3]
    view: Any = ReadOnlyTokenIds(token_ids)
    token_ids.append(4)
    assert (len(view), view[-1], view[1:3], list(view), 4 in view) == (4, 4, [2, 3], [1, 2, 3, 4], True)
    view[1:].append(5)
    with pytest.raises(AttributeError, match="'ReadOnlyTokenIds' object has no attribute 'append'"):
        view.append(5)
    with pytest.raises(TypeError, match="'ReadOnlyTokenIds' object does not support item assignment"):
        view[0] = 5
    assert token_ids == [1, 2, 3, 4]
